"""Updates read from graphs, in Triton: the lines of the C++ kernels, for GPUs."""

import functools
import re
from dataclasses import replace
from textwrap import indent

from ipex_inductor.ops.optimizer.update import Update
from ipex_inductor.templates.kernel_text import fill_macro
from ipex_inductor.templates.optimizer.step import assignments
from ipex_inductor.templates.optimizer.step_triton import SIXTEEN_BITS, TYPES, head, of_chunk, words

_fill = functools.partial(fill_macro, "optimizer/update_triton.py.jinja")


def update_triton_source(update: Update) -> str:
    """Return a module with `scalars`, and `step`, which runs after it and reads its table."""
    update = _replace_divisions(update)
    names, real = table_names(update), TYPES[update.real]
    lines = [f"table += {len(names)} * number"]
    lines += [f"{name} = tl.load(table + {k})" for k, name in enumerate(names)]
    lines += of_chunk(update.columns, lambda inside: _element(update, real, inside))
    step = head("step", step_signature(update), len(update.columns) + 1) + indent(
        "\n".join(lines), " " * 4
    )
    rounded = "".join(_fill("as_rounded", name=name) for name in sorted(SIXTEEN_BITS))
    rounded += _fill("as_float32") * any("as_float32(" in line for line in update.scalars)
    coarse = {dtype for _, dtype in update.columns} <= SIXTEEN_BITS
    return f"{words(coarse)}{rounded}{step}\n\n\n{_scalars(update, names, real)}"


def step_signature(update: Update) -> dict[str, str]:
    """Return Triton's types of the arguments of `step`."""
    return {"rows": "*i64", "chunks": "*i32", "table": _table(update)}


def scalars_signature(update: Update) -> dict[str, str]:
    """Return Triton's types of the arguments of `scalars`."""
    return {"rows": "*i64", "count": "i32", "numbers": "*i64", "table": _table(update)}


def table_names(update: Update) -> tuple[str, ...]:
    """Return the columns of the table: the scalars that all elements of a row share."""
    update = _replace_divisions(update)
    computed = (name for name, _ in (*update.numbers, *assignments(update.scalars)))
    read = set(re.findall(r"\w+", " ".join(value for _, value in assignments(update.lines))))
    return tuple(name for name in computed if name in read)


def _replace_divisions(update: Update) -> Update:
    """Return the update with divisions by a scalar replaced by products with its inverse.

    The error is an ulp, as of GPUs' divisions, which take many instructions.
    """
    shared = {name for name, _ in (*update.numbers, *assignments(update.scalars))}
    inverses: dict[str, str] = {}
    lines = []
    for name, value in assignments(update.lines):
        divided, _, by = value.rpartition(" / ")
        if divided and by in shared:
            inverses[by] = f"over_{by} = 1 / {by}"
            lines.append(f"{name} = {divided} * over_{by}")
        else:
            lines.append(f"{name} = {value}")
    return replace(update, lines=tuple(lines), scalars=(*update.scalars, *inverses.values()))


def _table(update: Update) -> str:
    return f"*{update.real}".replace("float", "fp")


def _scalars(update: Update, names: tuple[str, ...], real: str) -> str:
    lines = []
    for k, (name, dtype) in enumerate(update.numbers):
        load = f"tl.load(numbers + {len(update.numbers)} * group + {k}, mask=inside, other=0)"
        if dtype:
            load = f"tl.load({load}.to(tl.pointer_type({TYPES[dtype]})), mask=inside, other=0)"
        lines.append(f"{name} = {load}.to(tl.float64{'' if dtype else ', bitcast=True'})")
    if update.counted:
        lines += _fill("count_step", dtype=TYPES[update.counted]).splitlines()
    lines += update.scalars
    lines += [
        f"tl.store(table + {len(names)} * row + {k}, tl.cast({name}, {real}), mask=inside)"
        for k, name in enumerate(names)
    ]
    return _fill("scalars") + indent("\n".join(lines), " " * 4) + "\n"


def _element(update: Update, real: str, inside: str) -> list[str]:
    """Return the lines that load, compute and store a block; without a mask it is whole."""
    mask = f", mask={inside}" if inside else ""
    return [
        *(f"{name} = tl.load({name}_{mask}).to({real})" for name, _ in update.columns),
        *update.lines,
        *(
            f"tl.store({name}_, tl.cast(tl.cast({name}, {real}), {TYPES[dtype]}){mask})"
            for name, dtype in update.columns
            if name in update.stored
        ),
    ]
