"""Eager calls that take as long as Inductor's code for a product and its epilogue.

A library call without an epilogue is followed by one kernel of Inductor's, which adds the bias and
the addend and applies the activation. Its time is that of the bytes it moves: it reads the product
and the addend and writes the result. One eager kernel in place moves the same bytes, so it stands
in for it without being compiled. Inductor's may take longer, as for an activation that computes
much. The stand-in may be too fast, never too slow, so an error keeps the default.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from ipex_inductor.autotune.measure import Run
from ipex_inductor.autotune.record import Constant, Problem
from ipex_inductor.lowerings.common.calls import Call
from ipex_inductor.lowerings.problem.workload import function_of, operands_by_name

CONV, LINEAR = (str(op) for op in (torch.ops.ipex.conv.default, torch.ops.ipex.linear.default))
# Operands of the product itself: a GEMM of the library adds its bias.
PRODUCTS = {CONV: ("x", "weight"), LINEAR: ("x", "weight", "bias")}
BY_ROWS = ("x", "other")  # operands whose first dimension is the result's
NO_EPILOGUE: dict[str, Constant] = {"binary": "none", "unary": "none", "scalars": ()}


@dataclass(frozen=True)
class Rows:
    """The first and the last row of a problem's operands and of its result, as views.

    Attributes:
        names: names of the operands, in order.
        step: distance of the two rows; 1 if there are no others.
    """

    names: tuple[str, ...]
    step: int

    def of_operands(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Return the operands that the two rows of the result depend on."""
        pairs = zip(self.names, operands, strict=True)
        return [self.of_result(t) if name in BY_ROWS else t for name, t in pairs]

    def of_result(self, result: Tensor) -> Tensor:
        """Return the two rows of a result."""
        return result[:: self.step]


def rows_of_problem(problem: Problem) -> Rows:
    """Return the two rows that are compared of a problem in `PRODUCTS` without symbols."""
    operands = operands_by_name(problem)
    return Rows(tuple(operands), max(1, int(operands["x"].shape[0]) - 1))


def run_of_call(problem: Problem, call: Call) -> Run:
    """Return an eager run that takes as long as `call` with its epilogue in a compiled graph.

    Its result is that of `call` only if the library computes the epilogue.

    Args:
        problem: problem of an op in `PRODUCTS`, without further epilogue.
        call: library call that may compute it.
    """
    if call.epilogues is not None:
        compute = function_of(problem, call.body)
        return lambda operands: compute(*operands)
    names = [*operands_by_name(problem)]
    kept = [i for i, name in enumerate(names) if name in PRODUCTS[problem.op]]
    multiply = function_of(_product_of(problem, kept), call.body)
    if "other" in names:
        addend = names.index("other")
        return lambda operands: multiply(*(operands[i] for i in kept)).add_(operands[addend])
    if len(kept) < len(names) or problem.constants["unary"] != "none":
        return lambda operands: multiply(*(operands[i] for i in kept)).relu_()
    return lambda operands: multiply(*(operands[i] for i in kept))


def _product_of(problem: Problem, kept: Sequence[int]) -> Problem:
    """Return the problem without its epilogue, on the operands at the indices `kept`."""
    names = [*operands_by_name(problem)]
    absent: dict[str, Constant] = {n: None for i, n in enumerate(names) if i not in kept}
    constants = {**problem.constants, **NO_EPILOGUE, **absent}
    return replace(problem, operands=tuple(problem.operands[i] for i in kept), constants=constants)
