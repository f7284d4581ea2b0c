"""Optimizer-step kernels: one kind of parameters, all of them in one call."""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from ipex_inductor.ops.optimizer.update import Update
from ipex_inductor.templates.optimizer.formulas import FORMULAS, Formula

C_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "_Float16",
    "bfloat16": "BFloat16",
    "int16": "int16_t",
}


@dataclass(frozen=True)
class StepKernel:
    """The properties that determine the code of a step; dtypes are names, as `float32`.

    `rest` holds what a low-precision parameter cannot: its lower halves (`int16`), its fp32 master
    (`float32`), or nothing (""). `state` has a dtype for each state of the formula, `counted` that
    of `step`, if the formula reads it. `scaled`: gradients are multiplied by the number `scale`,
    and rounded; `zeroed`: they are set to 0 afterwards. `sharded`: norms are of tensors whose parts
    lie in several processes; `norms` sums the squares in a call of its own, and `step` reads the
    norms of all processes.
    """

    formula: str
    flags: tuple[str, ...]
    param: str
    rest: str
    grad: str
    state: tuple[str, ...]
    counted: str = ""
    scaled: bool = False
    zeroed: bool = False
    sharded: bool = False

    @property
    def rule(self) -> Formula:
        """Return the formula."""
        return FORMULAS[self.formula]

    @cached_property
    def on(self) -> frozenset[str]:
        """Return the flags as a set, as formulas take them."""
        return frozenset(self.flags)

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Return the tensors of a row, by name and dtype, in order."""
        rest = (("rest", self.rest),) if self.rest else ()
        state = zip(self.rule.state(self.on), self.state, strict=True)
        return (("param", self.param), *rest, ("grad", self.grad), *state)

    @property
    def real(self) -> str:
        """Return the dtype of the arithmetic."""
        return "float64" if self.param == "float64" else "float32"

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """Return the names of a group's numbers, in order."""
        return self.rule.numbers + ("scale",) * self.scaled

    @property
    def problem(self) -> dict[str, Any]:
        """Return the fields, as keys of the kernel cache name them."""
        return {"template": "step", **{f.name: getattr(self, f.name) for f in fields(self)}}


def cpp_source(kernel: StepKernel) -> str:
    """Return a C++ library with `step`, and `norms` for shards; it documents their arguments."""
    return render_template(
        "optimizer/step.cpp.jinja", kept="double", counting=True, **parts_of(kernel)
    )


def update_source(update: Update) -> str:
    """Return a C++ library with the `step` of an update that was read from a graph."""
    parts = parts_of_update(update)
    return render_template("optimizer/step.cpp.jinja", kept="double", counting=True, **parts)


def parts_of(kernel: StepKernel) -> dict[str, Any]:
    """Return the values that C++ and SYCL templates are rendered with."""
    rule, on = kernel.rule, kernel.on
    states = rule.state(on)
    before, update = assignments(rule.before(on)), assignments(rule.update(on))
    scalars, ratios = assignments(rule.scalars(on)), assignments(rule.ratios(on))
    operands = {name for name, _ in kernel.columns}
    temporaries = dict.fromkeys(n for n, _ in (*before, *update) if n not in operands)
    written = {name for name, _ in before} & set(states)
    return {
        "title": f"{kernel.formula}: {', '.join(f'{n} {d}' for n, d in kernel.columns)}",
        "real": C_TYPES[kernel.real],
        "columns": [(name, C_TYPES[dtype]) for name, dtype in kernel.columns],
        "param": C_TYPES[kernel.param],
        "rest": C_TYPES.get(kernel.rest, ""),
        "grad": C_TYPES[kernel.grad],
        "counted": C_TYPES.get(kernel.counted, ""),
        "numbers": kernel.numbers,
        "held": {},
        "scalars": dict.fromkeys([*kernel.numbers, *(n for n, _ in (*scalars, *ratios))]),
        "scalar_lines": scalars,
        "ratio_lines": ratios,
        "ratio_names": {name for name, _ in ratios},
        "norms": rule.norms,
        "temporaries": temporaries,
        "before_lines": before,
        "before_stored": written,
        "update_lines": update,
        "update_stored": (set(states) | ({"param"} if not kernel.rest else set())) - written,
        "scaled": kernel.scaled,
        "zeroed": kernel.zeroed,
        "sharded": kernel.sharded,
        "paired": _is_paired(kernel.real, kernel.columns),
        "arithmetic": True,
    }


def parts_of_update(update: Update) -> dict[str, Any]:
    """Return the template values of an update that was read from a graph."""
    scalars, lines = assignments(update.scalars), assignments(update.lines)
    dtypes = dict(update.columns)
    return {
        "title": f"read from a graph: {', '.join(f'{n} {d}' for n, d in update.columns)}",
        "real": C_TYPES[update.real],
        "columns": [(name, C_TYPES[dtype]) for name, dtype in update.columns],
        "param": C_TYPES[dtypes["param"]],
        "rest": "",
        "grad": "",
        "counted": C_TYPES.get(update.counted, ""),
        "numbers": [name for name, _ in update.numbers],
        "held": {name: C_TYPES[dtype] for name, dtype in update.numbers if dtype},
        "scalars": dict.fromkeys(name for name, _ in (*update.numbers, *scalars)),
        "scalar_lines": scalars,
        "ratio_lines": [],
        "ratio_names": set(),
        "norms": (),
        "temporaries": dict.fromkeys(name for name, _ in lines if name not in dtypes),
        "before_lines": [],
        "before_stored": set(),
        "update_lines": lines,
        "update_stored": set(update.stored),
        "scaled": False,
        "zeroed": False,
        "sharded": False,
        "paired": _is_paired(update.real, update.columns),
        "arithmetic": False,  # but functions, which may produce any NaN
    }


def _is_paired(real: str, columns: Iterable[tuple[str, str]]) -> bool:
    """Return whether all tensors are bf16, so that two elements are read as one word."""
    return real == "float32" and {dtype for _, dtype in columns} == {"bfloat16"}


def render_template(template: str, **values: Any) -> str:
    """Return the template, a path below `templates/`, rendered with all its values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    here = Path(__file__).parent
    files = FileSystemLoader([here.parent, here], encoding="utf-8")
    environment = Environment(loader=files, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.get_template(template).render(values)


@functools.lru_cache(maxsize=256)
def scalars_function(kernel: StepKernel) -> Callable[..., tuple[float, ...]]:
    """Return a function of a count and a group's numbers that computes all scalars, in fp64.

    It computes as the C++ kernel does; `scalar_names` are the names of its results. The count is
    the number of the step or, if the formula does not count, whether it is the first.
    """
    counted = "step" if kernel.rule.counts else "first"
    lines = (f"    {name} = {value}" for name, value in assignments(kernel.rule.scalars(kernel.on)))
    results = ", ".join(f"float({name})" for name in scalar_names(kernel))
    source = [
        f"def scalars({counted}, {', '.join(kernel.numbers)}):",
        *lines,
        f"    return {results},",
    ]
    namespace: dict[str, Any] = {
        "sqrt": math.sqrt,
        "where": lambda condition, a, b: a if condition else b,
    }
    exec("\n".join(source), namespace)  # lines of `formulas.py` alone
    return cast(Callable[..., tuple[float, ...]], namespace["scalars"])


def scalar_names(kernel: StepKernel) -> tuple[str, ...]:
    """Return the names of the scalars that all elements of a tensor share."""
    computed = (name for name, _ in assignments(kernel.rule.scalars(kernel.on)))
    return tuple(dict.fromkeys((*kernel.numbers, *computed)))


def assignments(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Return lines as pairs of a name and the value assigned to it."""
    return [(name, value) for name, _, value in (line.partition(" = ") for line in lines)]
