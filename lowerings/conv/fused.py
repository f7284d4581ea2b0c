"""Convolutions that a template fuses with the ops around them, and their calls without it.

A call that is "apart" leaves the graph as it is: the kernel of the convolution is chosen as for any
other convolution, and Inductor computes the ops around it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from ipex_inductor.autotune.record import Operand, Problem
from ipex_inductor.lowerings.common.calls import Call, always
from ipex_inductor.lowerings.conv import conv


def return_unchanged(result: Tensor) -> Tensor:
    """Return the result of a convolution that no op follows."""
    return result


@dataclass(frozen=True)
class FusedConv:
    """The convolution within a fused op.

    Attributes:
        extract: returns the problem of its `ipex::conv` from a problem of the fused op.
        list_arguments: takes the arguments of the fused op and returns those of its `ipex::conv`;
            computes the ops before the convolution.
        finish: computes the ops behind the convolution from its result.
        why_odd: returns why neither a template nor separate calls can be measured, or None.
    """

    extract: Callable[[Problem], Problem]
    list_arguments: Callable[..., tuple[Any, ...]]
    finish: Callable[[Tensor], Tensor] = return_unchanged
    why_odd: Callable[[Problem], str | None] = always

    def separate_calls(self, is_offered: Callable[[Call], bool]) -> tuple[Call, ...]:
        """Return the calls of the convolution with the other ops separate, default first.

        Args:
            is_offered: tells which calls of `ipex::conv` are worth a measurement.
        """
        return tuple(map(self._keep_separate, filter(is_offered, conv.CALLS)))

    def _keep_separate(self, call: Call) -> Call:
        return replace(
            call,
            body=functools.partial(self._run, call),
            why_not=functools.partial(self._why_not, call),
            epilogues=None,
            arrange=call.arrange and functools.partial(self._arrange, call),
            ready=None,
            apart=True,
        )

    def _run(self, call: Call, *args: Any) -> Tensor:
        arranged, args = (args[:1], args[1:]) if call.arrange else ((), args)
        return self.finish(call.body(*arranged, *self.list_arguments(*args)))

    def _arrange(self, call: Call, *args: Any) -> Tensor:
        assert call.arrange is not None
        return call.arrange(*self.list_arguments(*args))

    def _why_not(self, call: Call, problem: Problem) -> str | None:
        if reason := self.why_odd(problem):
            return reason
        conv_problem = self.extract(problem)
        if not call.has_epilogue(conv_problem):
            return "its epilogue is not supported"
        return call.why_not(conv_problem)


def as_conv_problem(
    problem: Problem, operands: tuple[Operand, ...], constants: dict[str, Any]
) -> Problem:
    """Return a problem of `ipex::conv` with these operands and constants."""
    frozen = {k: tuple(v) if isinstance(v, list) else v for k, v in constants.items()}
    op = str(torch.ops.ipex.conv.default)
    return structs.replace(problem, op=op, operands=operands, constants=frozen, epilogue="")
