"""Templates of Inductor's that compute what a call does: where one is faster, there is no call.

A call is measured as an op of ours, a template as the op of torch's that is left without it.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ipex_inductor.autotune.record import Choice, Problem, decode_problem
from ipex_inductor.autotune.select import Selection
from ipex_inductor.lowerings.problem.workload import function_of, named, widened

CONV, LINEAR = (str(op) for op in (torch.ops.ipex.conv.default, torch.ops.ipex.linear.default))
FACTORS = {"aten.mm.default": (0, 1), "aten.addmm.default": (1, 2)}  # which operands they are
SMALL = 8  # rows, columns and terms that epilogues are compared on


def settled(
    selected: Mapping[bytes, Selection], offered: Mapping[bytes, Collection[Choice]]
) -> dict[bytes, Selection]:
    """`selected`, where Inductor's own takes the place of every call that a template beats.

    One that is `offered`: Inductor's options may leave templates out of its lists. For whoever
    makes a key of it: that has the choices, and not the times that decide this.
    """
    templates = [
        (decode_problem(key), each)
        for key, each in selected.items()
        if each.choice.name.startswith("inductor.")
        and each.measured
        and each.choice in offered.get(key, ())
    ]
    return {key: _left(decode_problem(key), each, templates) for key, each in selected.items()}


def _left(
    problem: Problem, known: Selection, templates: list[tuple[Problem, Selection]]
) -> Selection:
    """`known`, or Inductor's own if one of `templates` is faster at the same."""
    for other, each in templates:
        if each.best.p50 < known.best.p50 and is_plain(other, problem):
            from ipex_inductor.lowerings.select.library import CALLS  # and half of Inductor

            usual = CALLS[problem.op][0].choice
            if known.choice == usual:
                return known
            reason = f"as a template is faster than {known.choice.name}: {each}"
            return Selection(replace(each.best, choice=usual), known.best, reason)
    return known


def is_plain(other: Problem, problem: Problem) -> bool:
    """Whether `other` is `problem`, of an op of ours, as Inductor has it in its lists.

    Layouts may differ: where a size is one, what its stride is is anybody's choice.
    """
    same = {CONV: _is_convolution, LINEAR: _is_product}.get(problem.op)
    return same is not None and same(other, problem)


def _is_convolution(other: Problem, problem: Problem) -> bool:
    if other.op != "aten.convolution.default":
        return False
    words = [problem.constants["binary"], problem.constants["unary"]]
    words = [word for word in words if word != "none"]
    behind = re.findall(r"aten\.(\w+)\.", other.epilogue)[::-1]  # the outermost stands first
    operands = zip(other.operands[:2], problem.operands[:2], strict=True)
    same = behind == words if words else other.epilogue == problem.epilogue
    return (
        same
        and not (words and problem.epilogue)
        and all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in operands)
        and all(problem.constants.get(n) == value for n, value in other.constants.items())
    )


def _is_product(other: Problem, problem: Problem) -> bool:
    """Of rows: those of more dimensions Inductor multiplies without their epilogue."""
    if other.op not in FACTORS or other.symbols or problem.symbols:
        return False
    operands = named(problem)
    x, weight = operands["x"], operands["weight"]
    factors = [other.operands[i] for i in FACTORS[other.op]]
    dtypes = {o.dtype for o in (*other.operands, *problem.operands)}
    return (
        len(dtypes) == 1
        and [f.shape for f in factors] == [x.shape, weight.shape[::-1]]
        and _rest(problem, (0, 1)) == _rest(other, FACTORS[other.op])
        and _agree(other, problem)
    )


def _rest(problem: Problem, factors: tuple[int, int]) -> list[Any]:
    """The shapes of all operands but the factors; two alike are told apart by nobody."""
    shapes = sorted(o.shape for i, o in enumerate(problem.operands) if i not in factors)
    return shapes if len({*map(len, shapes)}) == len(shapes) else [problem.op]


def _agree(other: Problem, problem: Problem) -> bool:
    """Whether both make the same of a few numbers, in fp64; what is not 1-D is a matrix."""
    generator = torch.Generator().manual_seed(0)
    with _disable_current_modes(), torch.no_grad():

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        x, weight, rest = made(SMALL, SMALL), made(SMALL, SMALL), {1: made(SMALL)}
        rest[2] = made(SMALL, SMALL)
        ours = [x, weight, *(rest[len(o.shape)] for o in problem.operands[2:])]
        factors = dict(zip(FACTORS[other.op], (x, weight.t()), strict=True))
        theirs = [factors.get(i, rest.get(len(o.shape))) for i, o in enumerate(other.operands)]
        results = function_of(widened(problem))(*ours), function_of(widened(other))(*theirs)
        return torch.allclose(*results, rtol=1e-9, atol=1e-12)  # the order of sums may differ
