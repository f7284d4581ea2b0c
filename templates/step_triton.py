"""The same kernels of optimizer steps in Triton, for GPUs."""

from collections.abc import Iterator
from textwrap import indent

from ipex_inductor.templates.step import StepKernel, assignments

TYPES = {
    "float64": "tl.float64",
    "float32": "tl.float32",
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
    "int16": "tl.int16",
}
ROW = 3  # numbers of a row of `scalars`: the address of its step, its group, how far it is

_WORDS = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def sqrt(x):
    return {sqrt}


@triton.jit
def pow(a, b):
    return libdevice.pow(a, b)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def joined(upper, lower):
    wide = upper.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return (wide | lower.to(tl.uint16, bitcast=True).to(tl.uint32)).to(tl.float32, bitcast=True)


"""
_STEP = '''\
@triton.jit
def step({arguments}, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """A program is a chunk: a row, and which block of its tensors; a row ends with their size."""
    chunk = chunks + 2 * tl.program_id(0).to(tl.int64)
    number = tl.load(chunk).to(tl.int64)
    begin = BLOCK * tl.load(chunk + 1).to(tl.int64)
    row = rows + {width} * number
    size = tl.load(row + {width} - 1)
'''
_SCALARS = '''\
@triton.jit
def scalars(rows, count, numbers, rates, grad_scale, clip, found_inf, table, BLOCK: tl.constexpr):
    """A program is a block of rows: it counts their steps, and makes what `step` reads of them.

    Addresses may be 0, for what is not there.
    """
    row = BLOCK * tl.program_id(0) + tl.arange(0, BLOCK)
    inside = row < count
    left = 0.0
    if found_inf != 0:
        left = tl.load(found_inf.to(tl.pointer_type(tl.float32)))
    scale = tl.full([BLOCK], 1.0, tl.float64)
    if grad_scale != 0:
        scale = scale / tl.load(grad_scale.to(tl.pointer_type(tl.float32))).to(tl.float64)
    if clip != 0:
        scale = scale * tl.load(clip.to(tl.pointer_type(tl.float32))).to(tl.float64)
    address = tl.load(rows + {row} * row, mask=inside, other=0)
    group = tl.load(rows + {row} * row + 1, mask=inside, other=0)
    far = tl.load(rows + {row} * row + 2, mask=inside, other=0)
    first = far != 0
    counted = address.to(tl.pointer_type({counted}))
    here = inside & (address != 0)
    step = tl.where(here, tl.load(counted, mask=here, other=0).to(tl.float64), far) + 1.0
    tl.store(counted, step.to({counted}), mask=here & (left == 0))
'''


def triton_source(kernel: StepKernel, tabled: bool = False) -> str:
    """A module with the kernel `step`, and `scalars`, which is to run before it if it is `tabled`.

    `step` is given the group's numbers and what the formula makes of them, the same for all rows;
    or a table with these for each row, and whether the row is to be left as it is. Only formulas
    without norms: those need two passes.
    """
    assert not kernel.rule.norms
    arguments = ", ".join(signature(kernel, tabled))
    head = _STEP.format(arguments=arguments, width=len(kernel.columns) + 1)
    lines = [
        f"{name}_ = tl.multiple_of(tl.load(row + {number}).to(tl.pointer_type({TYPES[dtype]})), "
        f"ALIGNED) + begin + tl.arange(0, BLOCK)"
        for number, (name, dtype) in enumerate(kernel.columns)
    ]
    if tabled:
        names = scalar_names(kernel)
        lines.append(f"table += {len(names) + 1} * number")
        lines += [f"{name} = tl.load(table + {k})" for k, name in enumerate(names)]
        lines.append(f"live = tl.load(table + {len(names)}) + tl.zeros([BLOCK], tl.float32) == 0")
    lines += [
        "if begin + BLOCK <= size:",
        *_element(kernel, "", "live" * tabled),
        "else:",
        "    inside = begin + tl.arange(0, BLOCK) < size",
        *_element(kernel, "inside", "inside & live" if tabled else "inside"),
    ]
    step = head + indent("\n".join(lines), " " * 4) + "\n"
    words = _WORDS.format(sqrt=_sqrt(kernel))
    return words + step + (f"\n\n{_scalars(kernel)}" if tabled else "")


def signature(kernel: StepKernel, tabled: bool = False) -> dict[str, str]:
    """Triton's types of the arguments of `step`."""
    real = "fp64" if kernel.param == "float64" else "fp32"
    tables = {"rows": "*i64", "chunks": "*i32"}
    if tabled:
        return {**tables, "table": f"*{real}"}
    return {**tables, **dict.fromkeys(scalar_names(kernel), real)}


def scalars_signature(kernel: StepKernel) -> dict[str, str]:
    """Triton's types of the arguments of `scalars`."""
    addresses = dict.fromkeys(("grad_scale", "clip", "found_inf"), "i64")
    table = signature(kernel, tabled=True)["table"]
    return {
        "rows": "*i64",
        "count": "i32",
        "numbers": "*fp64",
        "rates": "*i64",
        **addresses,
        "table": table,
    }


def scalar_names(kernel: StepKernel) -> tuple[str, ...]:
    """What all elements of a tensor share: the numbers, and what the formula makes of them."""
    made = (name for name, _ in assignments(kernel.rule.scalars(kernel.on)))
    return tuple(dict.fromkeys((*kernel.numbers, *made)))


def _scalars(kernel: StepKernel) -> str:
    """fp64, as in C++; a group's rate may be a tensor, which counts instead of its number."""
    head = _SCALARS.format(row=ROW, counted=TYPES[kernel.counted or "float32"])
    own = kernel.rule.numbers
    loads = (
        f"{name} = tl.load(numbers + {len(own)} * group + {number}, mask=inside, other=0)"
        for number, name in enumerate(own)
    )
    rate = (
        "rate_ = tl.load(rates + group, mask=inside, other=0)",
        "given = tl.load(rate_.to(tl.pointer_type(tl.float32)), mask=rate_ != 0, other=0)",
        "lr = tl.where(rate_ != 0, given.to(tl.float64), lr)",
    )
    made = (f"{name} = {value}" for name, value in assignments(kernel.rule.scalars(kernel.on)))
    names = scalar_names(kernel)
    real = "tl.float64" if kernel.param == "float64" else "tl.float32"
    stores = (
        f"tl.store(table + {len(names) + 1} * row + {k}, {_full(name)}.to({real}), mask=inside)"
        for k, name in enumerate((*names, "left"))
    )
    return head + indent("\n".join((*loads, *rate, *made, *stores)), " " * 4) + "\n"


def _sqrt(kernel: StepKernel) -> str:
    """Rounded as IEEE has it; a bit less so (2^-23), and in a third of the time, for 16 bits."""
    coarse = {kernel.param, *kernel.state} <= {"float16", "bfloat16"} and not kernel.rest
    rounded = "tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)"
    return "tl.sqrt(x)" if coarse else rounded


def _full(name: str) -> str:
    """One number for all rows is to become one a row."""
    return f"({name} + tl.zeros([BLOCK], tl.float64))"


def _element(kernel: StepKernel, inside: str, live: str) -> list[str]:
    """A block loaded where it is `inside`, stepped, stored where it is `live`; no mask for all.

    Nothing waits for `live` but the stores.
    """
    masks = (f", mask={inside}" * bool(inside), f", mask={live}" * bool(live))
    return [f"    {line}" for line in _lines(kernel, *masks, masks[0])]


def _lines(kernel: StepKernel, loaded: str, stored: str, zeroed: str) -> Iterator[str]:
    real = "tl.float64" if kernel.param == "float64" else "tl.float32"
    for name, _ in kernel.columns:
        yield f"{name} = tl.load({name}_{loaded})"
    if kernel.rest == "int16":
        yield "param = joined(param, rest)"
    elif kernel.rest:  # where somebody wrote the parameter since, that counts
        yield f"seen = rest.to({TYPES[kernel.param]}) == param"
        yield "param = where(seen, rest, param.to(tl.float32))"
    for name, _ in kernel.columns:
        if name != "rest":
            yield f"{name} = {name}.to({real})"
    if kernel.scaled:
        yield f"grad = (grad * scale).to({TYPES[kernel.grad]}).to({real})"
    for name, value in assignments(kernel.rule.update(kernel.on)):
        yield f"{name} = {value}"
    for name in kernel.rule.state(kernel.on):
        yield f"tl.store({name}_, {name}{stored})"
    if kernel.rest == "int16":
        yield "bits = param.to(tl.uint32, bitcast=True)"
        yield "upper = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)"
        yield "lower = bits.to(tl.uint16).to(tl.int16, bitcast=True)"
        yield f"tl.store(param_, upper{stored})"
        yield f"tl.store(rest_, lower{stored})"
    else:
        if kernel.rest:
            yield f"tl.store(rest_, param{stored})"
        yield f"tl.store(param_, param.to({TYPES[kernel.param]}){stored})"
    if kernel.zeroed:
        yield f"tl.store(grad_, tl.zeros([BLOCK], {TYPES[kernel.grad]}){zeroed})"
