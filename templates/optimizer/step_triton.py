"""Optimizer-step kernels in Triton, for GPUs."""

import functools
from collections.abc import Callable, Iterable, Iterator
from textwrap import indent

from ipex_inductor.templates.kernel_text import fill_macro
from ipex_inductor.templates.optimizer.step import StepKernel, assignments, scalar_names

TYPES = {
    "float64": "tl.float64",
    "float32": "tl.float32",
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
    "int16": "tl.int16",
}
Columns = tuple[tuple[str, str], ...]  # names and dtypes
SIXTEEN_BITS = {"float16", "bfloat16"}
ROW = 3  # numbers of a row of `scalars`: the address of its step, its group, how far it is

_fill = functools.partial(fill_macro, "optimizer/step_triton.py.jinja")


def triton_source(kernel: StepKernel, tabled: bool = False) -> str:
    """Return a module with the kernel `step`, and the kernels that run before it.

    `step` takes the group's numbers and the formula's scalars, equal for all rows; or, if `tabled`,
    a table that `scalars` wrote, with these for each row and whether to leave the row unchanged. If
    norms of tensors take part, its programs first sum them, compute the `ratios` of each row, and
    then step. For `sharded` tensors a kernel `norms` writes sums to an address that a row holds
    before its size, and `step` computes ratios from the sums at the next address.
    """
    lines = [*(_of_table(kernel) if tabled else ()), *_ratios(kernel)]
    blocks = blocks_of(kernel)
    lines += of_chunk(kernel.columns, lambda inside: _element(kernel, inside, tabled), blocks)
    body = indent("\n".join(lines), " " * 4)
    arguments, width = signature(kernel, tabled), _width(kernel)
    kernels = [head("step", arguments, width) + body]
    if kernel.rule.norms:
        norms = _norms(kernel, tabled)
        if kernel.sharded:
            kernels.append(head("norms", norms_signature(kernel, tabled), width) + norms)
        else:
            every = ", ".join(arguments)
            both = _fill("norms_and_step", arguments=every, given=every, width=width, blocks=blocks)
            parts = (
                _part("norms_of", arguments, width) + norms,
                _part("step_of", arguments, width) + body,
            )
            kernels = [*parts, both]
    kernels += [scalars_of(kernel) + _fill("scalars")] * tabled
    return words(_sixteen_bits(kernel)) + "\n\n\n".join(kernels)


def blocks_of(kernel: StepKernel) -> int:
    """Return the number of blocks of a chunk, which a program processes one after the other.

    With norms, the beginning and the end of a program take long; large blocks are as good
    (`WITH_NORMS`).
    """
    return 2 if kernel.rule.norms and len(kernel.columns) > 3 else 1


def signature(kernel: StepKernel, tabled: bool = False) -> dict[str, str]:
    """Return Triton's types of the arguments of `step`: tables of addresses first."""
    norms = kernel.rule.norms and not kernel.sharded
    tables = {"ratios": f"*{_real(kernel)}", **_sums_of(kernel)} if norms else {}
    return {**_TABLES, **tables, **_numbers(kernel, tabled)}


def norms_signature(kernel: StepKernel, tabled: bool = False) -> dict[str, str]:
    """Return Triton's types of the arguments of `norms`."""
    return {**_TABLES, **_sums_of(kernel), **_numbers(kernel, tabled)}


_TABLES = {"rows": "*i64", "chunks": "*i32"}


def _sums_of(kernel: StepKernel) -> dict[str, str]:
    """Return the arguments that hold the sums of chunks."""
    return {"parts": f"*{_real(kernel)}", "counters": "*i64"}


def _numbers(kernel: StepKernel, tabled: bool) -> dict[str, str]:
    if tabled:
        return {"table": f"*{_real(kernel)}"}
    return dict.fromkeys(scalar_names(kernel), _real(kernel))


def scalars_signature(kernel: StepKernel) -> dict[str, str]:
    """Return Triton's types of the arguments of `scalars`."""
    types = {"rows": "*i64", "count": "i32", "numbers": "*fp64", "rates": "*i64", "times": "fp64"}
    addresses = dict.fromkeys(("divisor", "factor", "found_inf"), "i64")
    return {**types, **addresses, "table": signature(kernel, tabled=True)["table"]}


def _real(kernel: StepKernel) -> str:
    return kernel.real.replace("float", "fp")


def head(name: str, arguments: Iterable[str], width: int) -> str:
    """Return the first lines of a kernel with a chunk a program and rows of width `width`."""
    return (
        _fill("head", name=name, arguments=", ".join(arguments))
        + _fill("own_chunk")
        + _fill("row", width=width)
    )


def _part(name: str, arguments: Iterable[str], width: int) -> str:
    """Return the first lines of a function that a kernel of `head` calls."""
    every = ", ".join(("before", "chunk", "number", "block", *arguments))
    return _fill("head", name=name, arguments=every) + _fill("row", width=width)


def _width(kernel: StepKernel) -> int:
    """Return a row's width: columns, of shards both sums' addresses, and the size."""
    return len(kernel.columns) + 2 * kernel.sharded + 1


def of_chunk(
    columns: Columns, block: Callable[[str], Iterable[str]], blocks: int = 1
) -> Iterator[str]:
    """Yield the lines that run `block` on a chunk, with a pointer `NAME_` for each column.

    The chunk has `blocks` blocks.

    `block` takes the mask, or "". At the end of a tensor, narrow blocks are used in a loop: masks
    for all elements at once would take registers that keep other programs off the multiprocessor.
    """
    for number, (name, dtype) in enumerate(columns):
        pointer = f"tl.load(row + {number}).to(tl.pointer_type({TYPES[dtype]}))"
        yield f"{name}_at = tl.multiple_of({pointer}, ALIGNED)"
    if blocks == 1:
        yield from _of_block(columns, block)
        return
    yield f"end = tl.minimum({blocks} * (begin + BLOCK), size)"
    yield f"for begin in range({blocks} * begin, end, BLOCK):"
    yield from (f"    {line}" for line in _of_block(columns, block))


def _of_block(columns: Columns, block: Callable[[str], Iterable[str]]) -> Iterator[str]:
    yield "if begin + BLOCK <= size:"
    yield "    place = begin + tl.arange(0, BLOCK)"
    yield from (f"    {line}" for line in (*_places(columns), *block("")))
    yield "else:"
    yield "    for narrow in range(begin, size, BLOCK // 4):"
    yield "        place = narrow + tl.arange(0, BLOCK // 4)"
    yield "        inside = place < size"
    yield from (f"        {line}" for line in (*_places(columns), *block("inside")))


def _places(columns: Columns) -> Iterator[str]:
    yield from (f"{name}_ = {name}_at + place" for name, _ in columns)


def _of_table(kernel: StepKernel) -> Iterator[str]:
    """Yield the lines that load the scalars of a row, and whether it is to be written."""
    names = scalar_names(kernel)
    yield f"table += {len(names) + 1} * number"
    yield from (f"{name} = tl.load(table + {k})" for k, name in enumerate(names))
    yield f"left = tl.load(table + {len(names)})"


LIVE = "live = left + tl.zeros(place.shape, tl.float32) == 0"


def _ratios(kernel: StepKernel) -> Iterator[str]:
    """Yield the lines that load the ratios, or compute them from all processes' sums."""
    ratios = assignments(kernel.rule.ratios(kernel.on))
    if not kernel.sharded:
        for k, (name, _) in enumerate(ratios):
            # Another multiprocessor may have written it, so it is read from the L2 cache.
            place = f"ratios + {len(ratios)} * number + {k}"
            yield f"{name} = tl.load({place}, cache_modifier='.cg')"
        return
    yield _sums("total", len(kernel.columns) + 1)
    for k, name in enumerate(kernel.rule.norms):
        yield f"norm_{name} = sqrt(tl.load(total + {k}))"
    for name, value in ratios:
        yield f"{name} = ({value}).to({TYPES[kernel.real]})"


def _sums(name: str, place: int) -> str:
    return f"{name} = tl.load(row + {place}).to(tl.pointer_type(tl.float64))"


def _norms(kernel: StepKernel, tabled: bool) -> str:
    """Return the lines before norms are known: a chunk's sums, a row's sums, and ratios."""
    norms, real = kernel.rule.norms, TYPES[kernel.real]
    before = assignments(kernel.rule.before(kernel.on))
    stored = [name for name in kernel.rule.state(kernel.on) if name in dict(before)]

    def block(mask: str) -> Iterator[str]:
        more = f", mask={mask}, other=0" * bool(mask)
        written = " & ".join([mask] * bool(mask) + ["live"] * tabled)
        where = f", mask={written}" * bool(written)
        yield from [LIVE] * tabled
        yield from _operands(kernel, more)
        yield from (f"{name} = {value}" for name, value in before)
        yield from (f"tl.store({name}_, {name}{where})" for name in stored)
        for name in norms:
            square = f"{name} * {name}"
            yield f"sum_{name} += tl.sum({f'where({mask}, {square}, 0)' if mask else square})"

    lines = [
        *(_of_table(kernel) if tabled else ()),
        *(f"sum_{name} = tl.zeros([], {real})" for name in norms),
        *of_chunk(kernel.columns, block, blocks_of(kernel)),
        *(f"tl.store(parts + {len(norms)} * chunk + {k}, sum_{n})" for k, n in enumerate(norms)),
    ]
    last = [f"norm_{name} = tl.zeros([BLOCK // 8], tl.float64)" for name in norms]
    last.append("for begin in range(0, count, BLOCK // 8):")
    for k, name in enumerate(norms):
        part = f"parts + {len(norms)} * (begin + index) + {k}, mask=begin + index < count, other=0"
        last.append(f"    norm_{name} += tl.load({part}, cache_modifier='.cg').to(tl.float64)")
    if kernel.sharded:
        last.append(_sums("own", len(kernel.columns)))
        last += [f"tl.store(own + {k}, tl.sum(norm_{name}))" for k, name in enumerate(norms)]
        last.append("tl.store(counters + number, 0)")
    else:
        last += [f"norm_{name} = sqrt(tl.sum(norm_{name}))" for name in norms]
        ratios = assignments(kernel.rule.ratios(kernel.on))
        last += [
            f"tl.store(ratios + {len(ratios)} * number + {k}, ({value}).to({real}))"
            for k, (_, value) in enumerate(ratios)
        ]
        last += ["tl.debug_barrier()", 'tl.atomic_add(counters + number, 1, sem="acq_rel")']
    which = "count - 1" if kernel.sharded else "before * (count + 1) + count - 1"
    body = indent("\n".join(lines), " " * 4) + "\n"
    body += _fill("last_program", norms=len(norms), last=which, blocks=blocks_of(kernel))
    return body + indent("\n".join(last), " " * 8) + "\n"


def scalars_of(kernel: StepKernel) -> str:
    """Return a function that other kernels call to compute the scalars that a row's elements share.

    Computed in fp64, as in C++. A group's rate may be a tensor, which then counts instead of its
    number; the address of an fp64 rate is odd.
    """
    begin = _fill("scalars_of", row=ROW, counted=TYPES[kernel.counted or "float32"])
    numbers = kernel.rule.numbers
    loads = (
        f"{name} = tl.load(numbers + {len(numbers)} * group + {number}, mask=inside, other=0)"
        for number, name in enumerate(numbers)
    )
    rate = (
        "rate_ = tl.load(rates + group, mask=inside, other=0)",
        "wide = rate_ % 2 != 0",
        "narrow = (rate_ != 0) & ~wide",
        "given = tl.load(rate_.to(tl.pointer_type(tl.float32)), mask=narrow, other=0)",
        "lr = tl.where(narrow, given.to(tl.float64), lr)",
        "given = tl.load((rate_ - 1).to(tl.pointer_type(tl.float64)), mask=wide, other=0)",
        "lr = tl.where(wide, given, lr)",
    )
    computed = (f"{name} = {value}" for name, value in assignments(kernel.rule.scalars(kernel.on)))
    names = scalar_names(kernel)
    real = TYPES[kernel.real]
    stores = (
        f"tl.store(table + {len(names) + 1} * row + {k}, {_full(name)}.to({real}), mask=inside)"
        for k, name in enumerate((*names, "left"))
    )
    return begin + indent("\n".join((*loads, *rate, *computed, *stores)), " " * 4) + "\n"


def words(coarse: bool) -> str:
    """Return the functions that all lines may call.

    Square roots are rounded as IEEE requires; if `coarse`, for 16 bits, with an error of 2^-23, in
    a third of the time.
    """
    rounded = "tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)"
    return _fill("words", sqrt="tl.sqrt(x)" if coarse else rounded)


def _sixteen_bits(kernel: StepKernel) -> bool:
    return {kernel.param, *kernel.state} <= SIXTEEN_BITS and not kernel.rest


def _full(name: str) -> str:
    """Return an expression that broadcasts a number to one a row."""
    return f"({name} + tl.zeros([BLOCK], tl.float64))"


def _element(kernel: StepKernel, inside: str, tabled: bool) -> Iterator[str]:
    """Yield the lines that load a block if `inside`, step it, and store it if `live`.

    Only the stores wait for `live`; without a mask the block is whole.
    """
    live = " & ".join([inside] * bool(inside) + ["live"] * tabled)
    masks = (f", mask={inside}" * bool(inside), f", mask={live}" * bool(live))
    yield from [LIVE] * tabled
    yield from _lines(kernel, *masks, masks[0])


def _operands(kernel: StepKernel, loaded: str) -> Iterator[str]:
    """Yield the loads of all columns, in the arithmetic's precision; unused ones are dropped."""
    real = TYPES[kernel.real]
    for name, _ in kernel.columns:
        yield f"{name} = tl.load({name}_{loaded})"
    if kernel.rest == "int16":
        yield "param = joined(param, rest)"
    elif kernel.rest:  # a parameter written since then replaces its master
        yield f"seen = rest.to({TYPES[kernel.param]}) == param"
        yield "param = where(seen, rest, param.to(tl.float32))"
    for name, _ in kernel.columns:
        if name != "rest":
            yield f"{name} = {name}.to({real})"
    if kernel.scaled:
        yield f"grad = (grad * scale).to({TYPES[kernel.grad]}).to({real})"


def _lines(kernel: StepKernel, loaded: str, stored: str, zeroed: str) -> Iterator[str]:
    yield from _operands(kernel, loaded)
    for name, value in assignments(kernel.rule.update(kernel.on)):
        yield f"{name} = {value}"
    done = dict(assignments(kernel.rule.before(kernel.on)))
    for name in kernel.rule.state(kernel.on):
        if name not in done:
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
        yield f"tl.store(grad_, tl.zeros(grad_.shape, {TYPES[kernel.grad]}){zeroed})"
