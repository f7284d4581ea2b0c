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

_HEAD = '''\
import triton
import triton.language as tl


@triton.jit
def where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def sqrt(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def joined(upper, lower):
    wide = upper.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return (wide | lower.to(tl.uint16, bitcast=True).to(tl.uint32)).to(tl.float32, bitcast=True)


@triton.jit
def step({arguments}, BLOCK: tl.constexpr):
    """A program is a chunk: a row, and which block of its tensors; a row ends with their size."""
    chunk = chunks + 2 * tl.program_id(0)
    row = rows + {width} * tl.load(chunk)
    begin = BLOCK * tl.load(chunk + 1)
    size = tl.load(row + {width} - 1)
'''


def triton_source(kernel: StepKernel) -> str:
    """A module with one kernel, `step`; pointers in `rows` are multiples of 16 bytes.

    Only formulas without norms: those need two passes.
    """
    assert not kernel.rule.norms
    head = _HEAD.format(arguments=", ".join(signature(kernel)), width=len(kernel.columns) + 1)
    pointers = "".join(
        f"    {name}_ = tl.load(row + {number}).to(tl.pointer_type({TYPES[dtype]}))\n"
        f"    {name}_ = tl.multiple_of({name}_, 16) + begin + tl.arange(0, BLOCK)\n"
        for number, (name, dtype) in enumerate(kernel.columns)
    )
    whole = indent("\n".join(_element(kernel, "")), " " * 8)
    tail = indent("\n".join(_element(kernel, ", mask=inside")), " " * 8)
    return (
        f"{head}{pointers}    if begin + BLOCK <= size:\n{whole}\n    else:\n"
        f"        inside = begin + tl.arange(0, BLOCK) < size\n{tail}\n"
    )


def signature(kernel: StepKernel) -> dict[str, str]:
    """Triton's types of the arguments: tables, the group's numbers, and what is made of those."""
    made = (name for name, _ in assignments(kernel.rule.scalars(kernel.on)))
    real = "fp64" if kernel.param == "float64" else "fp32"
    return {"rows": "*i64", "chunks": "*i64", **dict.fromkeys((*kernel.numbers, *made), real)}


def _element(kernel: StepKernel, mask: str) -> Iterator[str]:
    real = "tl.float64" if kernel.param == "float64" else "tl.float32"
    for name, _ in kernel.columns:
        yield f"{name} = tl.load({name}_{mask})"
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
        yield f"tl.store({name}_, {name}{mask})"
    if kernel.rest == "int16":
        yield "bits = param.to(tl.uint32, bitcast=True)"
        yield "upper = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)"
        yield "lower = bits.to(tl.uint16).to(tl.int16, bitcast=True)"
        yield f"tl.store(param_, upper{mask})"
        yield f"tl.store(rest_, lower{mask})"
    else:
        if kernel.rest:
            yield f"tl.store(rest_, param{mask})"
        yield f"tl.store(param_, param.to({TYPES[kernel.param]}){mask})"
    if kernel.zeroed:
        yield f"tl.store(grad_, tl.zeros([BLOCK], {TYPES[kernel.grad]}){mask})"
