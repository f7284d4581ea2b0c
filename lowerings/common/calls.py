"""Library calls that may compute an `ipex::` op together with its epilogue."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.virtualized import V

from ipex_inductor import compat
from ipex_inductor.autotune.record import Choice, Operand, Problem
from ipex_inductor.lowerings.problem.workload import operands_by_name

DTYPES = {"bfloat16", "float16", "float32"}


@dataclass(frozen=True)
class Call:
    """Describe one way of computing an `ipex::` op: a library's call or a template of ours.

    Attributes:
        name: name in records.
        body: takes the arguments of the op and computes it.
        why_not: returns why the call may not compute a problem, or None.
        epilogues: (binary, unary) pairs that the library computes itself; None if Inductor computes
            the epilogue, whatever it is.
        parameters: parameters of a template.
        version: digest of a template's source.
        arrange: takes the arguments of the op and preprocesses the weight alone; `body` then
            takes the result before all other arguments.
        ready: returns why a chosen call is not available on a device, or "".
        apart: whether a graph of several ops stays as it is if this call is chosen.
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
        """Return the choice that records name.

        Torch's version is part of it if the library computes whole epilogues, as each torch comes
        with its own library.
        """
        if self.parameters:
            # The Triton of that torch compiles the template.
            template = f"{compat.TEMPLATES}, {self.version}"
            return Choice("template", self.name, {**self.parameters}, template)
        return Choice("library", self.name, {}, compat.TEMPLATES if self.epilogues else "")

    def compute(self, *args: Any) -> Tensor:
        """Run the call with the weight preprocessing, which a graph constant-folds."""
        return self.body(*args) if self.arrange is None else self.body(self.arrange(*args), *args)

    def has_epilogue(self, problem: Problem) -> bool:
        """Return whether the library, or else Inductor, computes the problem's epilogue."""
        if self.epilogues is None:
            return True
        return (problem.constants["binary"], problem.constants["unary"]) in self.epilogues


def always(problem: Problem) -> None:
    """Return None: the `why_not` of a call that computes every problem."""


def why_not(problem: Problem) -> str | None:
    """Return why neither cuDNN nor cuBLASLt may compute `problem`; None if they may."""
    if not problem.arch.startswith("sm_"):
        return f"no library is known to support it on {problem.arch}"
    return why_odd(problem)


def why_odd(problem: Problem) -> str | None:
    """Return why the sizes or dtypes exclude libraries and templates; None if they do not."""
    operands = operands_by_name(problem).values()
    if problem.symbols:
        return "its sizes vary"
    dtypes = {operand.dtype for operand in operands}
    if len(dtypes) != 1 or not dtypes <= DTYPES:
        return f"no library supports it in {', '.join(sorted(dtypes))}"
    if any(size == 0 for operand in operands for size in operand.shape):
        return "a size is zero"
    return None


# Epilogues that cuBLASLt applies to a GEMM with bias. Its GELU is the tanh form.
ACTIVATIONS = frozenset({("none", "relu"), ("none", "gelu_tanh")})


def addmm_activation(rows: Tensor, weight: Tensor, bias: Tensor, unary: str) -> Tensor:
    """Return `unary(rows @ weight.T + bias)`, rounded once.

    Shapes are rows [M, K], weight [N, K], bias [N].
    """
    use_gelu = unary == "gelu_tanh"
    result: Tensor = torch.ops.aten._addmm_activation(bias, rows, weight.t(), use_gelu=use_gelu)
    return result


def is_channels_last(operand: Operand) -> bool:
    """Return whether the operand is 4-D, dense and channels-last.

    It agrees with `Tensor.is_contiguous`, but makes no tensor: it is called hundreds of times for
    each problem.
    """
    if len(operand.shape) != 4:
        return False
    shape, stride = ([int(n) for n in numbers] for numbers in (operand.shape, operand.stride))
    dense = 1
    for dimension in (1, 3, 2, 0):
        if shape[dimension] != 1:
            if stride[dimension] != dense:
                return False
            dense *= shape[dimension]
    return True


class LibraryCall(ir.ExternKernelAlloc):
    """Extern call `op(*args)` in generated Python, with tensors and constants in any order.

    It serves ops without a fake implementation; `layout` is the layout of the result.
    """

    def __init__(self, op: Any, layout: ir.Layout, args: Sequence[Any]) -> None:
        self._given = tuple(args)
        super().__init__(layout, [*filter(_is_tensor, args)], op_overload=op)

    def codegen_args(self) -> list[str]:
        """Return all arguments as code, positionally."""
        write: Any = V.graph.wrapper_code.val_to_arg_str
        inputs = iter(self.inputs)
        return [
            write(next(inputs) if _is_tensor(argument) else argument) for argument in self._given
        ]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, ir.IRNode)
