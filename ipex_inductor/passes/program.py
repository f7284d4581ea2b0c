"""A straight-line program over weights: what the prologue runs, as plain data."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate

# Ops that torch implements in slow Python, by what that comes down to: same bits, same strides.
DIRECT: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "prims::convert_element_type": lambda x, dtype: torch.empty_like(x, dtype=dtype).copy_(x),
}


@dataclass(frozen=True)
class Ref:
    """The value number `index`: first the program's inputs, then each step's result."""

    index: int


@dataclass(frozen=True)
class Step:
    """One call: the op's full name (or "getitem") and its arguments, values as `Ref`."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Program:
    """`steps` over the graph inputs numbered `inputs`; `outputs` are the derived tensors.

    `takes` says what the inputs are: dtype, shape and strides, on which the steps may depend.
    """

    inputs: tuple[int, ...]
    takes: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Ref, ...]

    @functools.cached_property
    def text(self) -> str:
        """What it computes, whatever graph it came from: equal texts give equal results."""
        return repr((self.takes, self.steps, self.outputs))

    def run(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The derived tensors of these weights, in the order of `outputs`."""
        values: list[Any] = list(weights)
        # No inference tensors: those could not be written again outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            for step in self.steps:
                kwargs = {name: _filled(value, values) for name, value in step.kwargs}
                values.append(_function(step.op)(*_filled(step.args, values), **kwargs))
        return [values[ref.index] for ref in self.outputs]


def record(
    inputs: dict[torch.fx.Node, int],
    nodes: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
) -> Program:
    """The program of `nodes` in order; `inputs` maps placeholders to graph input numbers."""
    refs = {node: Ref(i) for i, node in enumerate([*inputs, *nodes])}

    def step(node: torch.fx.Node) -> Step:
        args, kwargs = map_aggregate((node.args, tuple(node.kwargs.items())), _substitute)
        name = "getitem" if node.target is operator.getitem else node.target.name()  # type: ignore[union-attr]
        return Step(name, args, kwargs)

    def _substitute(value: Any) -> Any:
        return refs[value] if isinstance(value, torch.fx.Node) else value

    return Program(
        tuple(inputs.values()),
        tuple(_description(node.meta["val"]) for node in inputs),
        tuple(map(step, nodes)),
        tuple(refs[node] for node in outputs),
    )


def _description(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"


def _filled(argument: Any, values: Sequence[Any]) -> Any:
    """`argument` with the values that its `Ref`s stand for; tuples may become lists."""
    if isinstance(argument, Ref):
        return values[argument.index]
    if isinstance(argument, (tuple, list)):
        return [_filled(part, values) for part in argument]
    return argument


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    """The op called "namespace::name.overload" (or "namespace::name")."""
    if name in DIRECT:
        return DIRECT[name]
    path = name if "." in name else f"{name}.default"
    op: Callable[..., Any] = operator.attrgetter(path.replace("::", "."))(torch.ops)
    return op
