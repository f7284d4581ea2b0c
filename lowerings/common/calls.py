"""Calls of a library that may compute an op of ours together with its epilogue."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.virtualized import V

from ipex_inductor import compat
from ipex_inductor.autotune.record import Choice, Operand, Problem
from ipex_inductor.lowerings.problem.workload import empty, named

DTYPES = {"bfloat16", "float16", "float32"}


@dataclass(frozen=True)
class Call:
    """`body` takes the arguments of the op; `why_not` says why it may not compute a problem.

    `epilogues` are the (binary, unary) that the library computes itself. None where it leaves the
    epilogue to Inductor, whatever that is. A template of ours has `parameters`, and the digest of
    its source as `version`. `arrange` takes the arguments too, and makes of the weight alone what
    `body` takes before all others. `ready` says why it is not to be had on a device, "" if it is;
    it is asked of what was chosen. `apart`: chosen, it leaves a graph of several ops as it is.
    """

    name: str
    body: Callable[..., Tensor]
    why_not: Callable[[Problem], str | None]
    epilogues: frozenset[tuple[str, str]] | None = None
    parameters: Mapping[str, bool | int | str] = field(default_factory=dict)
    version: str = ""
    arrange: Callable[..., Tensor] | None = None
    ready: Callable[[Problem, torch.device], str] | None = None
    apart: bool = False

    @property
    def choice(self) -> Choice:
        """As records have it. Of whole epilogues each torch brings a library of its own."""
        if self.parameters:
            template = f"{compat.TEMPLATES}, {self.version}"  # compiled by the Triton of that torch
            return Choice("template", self.name, {**self.parameters}, template)
        return Choice("library", self.name, {}, compat.TEMPLATES if self.epilogues else "")

    def whole(self, *args: Any) -> Tensor:
        """All of it, as a graph has it in which work on weights alone is hoisted."""
        return self.body(*args) if self.arrange is None else self.body(self.arrange(*args), *args)

    def has_epilogue(self, problem: Problem) -> bool:
        """Whether the library, or else Inductor, computes the epilogue of `problem`."""
        if self.epilogues is None:
            return True
        return (problem.constants["binary"], problem.constants["unary"]) in self.epilogues


def always(problem: Problem) -> None:
    """The `why_not` of what computes every problem."""


def why_not(problem: Problem) -> str | None:
    """Why neither cuDNN nor cuBLASLt is asked for `problem`, None when it may be."""
    if not problem.arch.startswith("sm_"):
        return f"no library is known that has it on {problem.arch}"
    return why_odd(problem)


def why_odd(problem: Problem) -> str | None:
    """Why its sizes or dtypes are nobody's who has one kernel for it, None when they are usual."""
    operands = named(problem).values()
    if problem.symbols:
        return "its sizes vary"
    dtypes = {operand.dtype for operand in operands}
    if len(dtypes) != 1 or not dtypes <= DTYPES:
        return f"no library has it in {', '.join(sorted(dtypes))}"
    if any(size == 0 for operand in operands for size in operand.shape):
        return "a size is zero"
    return None


# What cuBLASLt applies to a product and its bias; its GELU is the tanh form.
ACTIVATIONS = frozenset({("none", "relu"), ("none", "gelu_tanh")})


def addmm_activation(rows: Tensor, weight: Tensor, bias: Tensor, unary: str) -> Tensor:
    """`unary(rows @ weight.T + bias)`, rounded once: rows [M, K], weight [N, K], bias [N]."""
    use_gelu = unary == "gelu_tanh"
    result: Tensor = torch.ops.aten._addmm_activation(bias, rows, weight.t(), use_gelu=use_gelu)
    return result


def is_channels_last(operand: Operand) -> bool:
    """Whether it is dense, and its channels lie side by side."""
    like = empty(operand, torch.device("meta"))
    return like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)


class LibraryCall(ir.ExternKernelAlloc):
    """`op(*args)` in generated Python, where tensors and constants stand in any order.

    For ops without a fake implementation: `layout` says what comes back.
    """

    def __init__(self, op: Any, layout: ir.Layout, args: Sequence[Any]) -> None:
        self._given = tuple(args)
        super().__init__(layout, [*filter(_is_tensor, args)], op_overload=op)

    def codegen_args(self) -> list[str]:
        """All of them, positionally."""
        write: Any = V.graph.wrapper_code.val_to_arg_str
        inputs = iter(self.inputs)
        return [write(next(inputs) if _is_tensor(each) else each) for each in self._given]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, ir.IRNode)
