"""Inductor templates that compete with kernels for `ipex::` ops.

A kernel for an `ipex::` op is measured as that op. An Inductor template is measured as the torch
op that the graph contains when the `ipex::` op is not lowered to a call. Where the template is
faster, Inductor's default is selected for the `ipex::` op.
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
from ipex_inductor.lowerings.problem.workload import function_of, operands_by_name, to_float64

CONV, LINEAR = (str(op) for op in (torch.ops.ipex.conv.default, torch.ops.ipex.linear.default))
# Positions of the two GEMM factors among the operands.
FACTORS = {"aten.mm.default": (0, 1), "aten.addmm.default": (1, 2)}
SMALL = 8  # M, N and K of the matrices on which epilogues are compared


def prefer_templates(
    selected: Mapping[bytes, Selection], offered: Mapping[bytes, Collection[Choice]]
) -> dict[bytes, Selection]:
    """Return `selected` with Inductor's default wherever an Inductor template beats the call.

    A template counts only if it is in `offered` for its problem, as Inductor's options may leave
    templates out of its lists. Cache keys should be made of this function's result: `selected`
    holds the choices, but not the times that decide between calls and templates.

    Args:
        selected: selection for each encoded problem.
        offered: candidates that Inductor lists for each encoded problem.
    """
    templates = [
        (decode_problem(key), selection)
        for key, selection in selected.items()
        if selection.choice.name.startswith("inductor.")
        and selection.is_measured
        and selection.choice in offered.get(key, ())
    ]
    return {
        key: _prefer_default(decode_problem(key), selection, templates)
        for key, selection in selected.items()
    }


def _prefer_default(
    problem: Problem, selection: Selection, templates: list[tuple[Problem, Selection]]
) -> Selection:
    """Return `selection`, or Inductor's default if a template in `templates` is faster.

    Args:
        problem: problem of the `ipex::` op.
        selection: kernel selected for `problem`.
        templates: measured Inductor templates, each with the problem it was selected for.
    """
    for template_problem, template in templates:
        if template.best.p50 < selection.best.p50 and is_torch_form(template_problem, problem):
            from ipex_inductor.lowerings.select.library import CALLS  # and half of Inductor

            default = CALLS[problem.op][0].choice
            if selection.choice == default:
                return selection
            reason = f"as a template is faster than {selection.choice.name}: {template}"
            return Selection(replace(template.best, choice=default), selection.best, reason)
    return selection


def is_torch_form(other: Problem, problem: Problem) -> bool:
    """Return whether `other` is the torch problem that Inductor lists for an `ipex::` `problem`.

    Layouts may differ: the stride of a dimension of size one is arbitrary.
    """
    compare = {CONV: _is_convolution, LINEAR: _is_gemm}.get(problem.op)
    return compare is not None and compare(other, problem)


def _is_convolution(torch_problem: Problem, problem: Problem) -> bool:
    if torch_problem.op != "aten.convolution.default":
        return False
    fused_ops = [problem.constants["binary"], problem.constants["unary"]]
    fused_ops = [name for name in fused_ops if name != "none"]
    # The outermost op is first in the epilogue's text.
    epilogue_ops = re.findall(r"aten\.(\w+)\.", torch_problem.epilogue)[::-1]
    operands = zip(torch_problem.operands[:2], problem.operands[:2], strict=True)
    same_epilogue = (
        epilogue_ops == fused_ops if fused_ops else torch_problem.epilogue == problem.epilogue
    )
    return (
        same_epilogue
        and not (fused_ops and problem.epilogue)
        and all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in operands)
        and all(problem.constants.get(n) == value for n, value in torch_problem.constants.items())
    )


def _is_gemm(torch_problem: Problem, problem: Problem) -> bool:
    """Return whether `torch_problem` is the 2-D GEMM of `problem`, including its epilogue.

    Inputs of more than two dimensions do not match: Inductor multiplies them without an epilogue.
    """
    if torch_problem.op not in FACTORS or torch_problem.symbols or problem.symbols:
        return False
    operands = operands_by_name(problem)
    x, weight = operands["x"], operands["weight"]
    factors = [torch_problem.operands[i] for i in FACTORS[torch_problem.op]]
    dtypes = {o.dtype for o in (*torch_problem.operands, *problem.operands)}
    return (
        len(dtypes) == 1
        and [f.shape for f in factors] == [x.shape, weight.shape[::-1]]
        and _other_shapes(problem, (0, 1))
        == _other_shapes(torch_problem, FACTORS[torch_problem.op])
        and _agree(torch_problem, problem)
    )


def _other_shapes(problem: Problem, factors: tuple[int, int]) -> list[Any]:
    """Return the sorted shapes of all operands but the GEMM's factors.

    If two shapes have an equal number of dimensions, they cannot be matched to operands. The op's
    name is returned instead, so that the comparison fails.
    """
    shapes = sorted(o.shape for i, o in enumerate(problem.operands) if i not in factors)
    return shapes if len({*map(len, shapes)}) == len(shapes) else [problem.op]


def _agree(torch_problem: Problem, problem: Problem) -> bool:
    """Return whether both problems compute equal results for small random fp64 inputs.

    Operands that are not 1-D are taken to be matrices.
    """
    generator = torch.Generator().manual_seed(0)
    with _disable_current_modes(), torch.no_grad():

        def random_tensor(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        x, weight, rest = (
            random_tensor(SMALL, SMALL),
            random_tensor(SMALL, SMALL),
            {1: random_tensor(SMALL)},
        )
        rest[2] = random_tensor(SMALL, SMALL)
        ours = [x, weight, *(rest[len(o.shape)] for o in problem.operands[2:])]
        factors = dict(zip(FACTORS[torch_problem.op], (x, weight.t()), strict=True))
        theirs = [
            factors.get(i, rest.get(len(o.shape))) for i, o in enumerate(torch_problem.operands)
        ]
        results = (
            function_of(to_float64(problem))(*ours),
            function_of(to_float64(torch_problem))(*theirs),
        )
        return torch.allclose(*results, rtol=1e-9, atol=1e-12)  # the order of sums may differ
