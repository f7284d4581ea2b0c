"""Read the step of an optimizer from its Dynamo graph: which tensors it updates, and how.

Dynamo gives a step a graph of its own, of foreach or single-tensor ops. Whatever formula they
compute is taken as it stands, so nothing here depends on the optimizer or on torch's version.
`fused_steps` has the formulas of torch's own fused steps.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.ops.optimizer.update import Allocated, Program
from ipex_inductor.passes.engine.source import FUSED_STEPS
from ipex_inductor.passes.optimizer import fused_steps
from ipex_inductor.passes.optimizer.terms import ALIASES, Cell, Reading, Terms, UnreadError
from ipex_inductor.passes.optimizer.updates import Writing, dtype_name

REALS = ("float64", "float32", "float16", "bfloat16")
LOW = ("float16", "bfloat16")
TENSORS = (Tensor, nn.Parameter, torch._subclasses.FakeTensor)


def program_of(gm: torch.fx.GraphModule) -> tuple[Program, list[Tensor]]:
    """Return all that `gm` does, as updates of its operands, and an example of each operand.

    Raises `UnreadError` if it does more.
    """
    follows = begun = torch.is_grad_enabled()
    terms = Terms()
    reading = Reading(terms)
    operands = _Operands(gm, terms)
    outputs: tuple[int | None, ...] = ()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            reading.values[node] = operands.take(node)
        elif node.op == "output":
            outputs = tuple(operands.find_output(output, reading.values) for output in node.args[0])
        elif node.target is torch._C._set_grad_enabled:
            follows = bool(node.args[0])
        elif follows:
            raise UnreadError("autograd records the computation")
        elif node.op == "call_function" and node.target in FUSED_STEPS:
            fused_steps.read(reading, node)
        else:
            reading.read(node)
    if follows != begun:
        raise UnreadError("gradients are switched on or off for later code")
    held_count = operands.inputs + len(operands.attributes)
    examples = operands.examples
    writing = Writing(terms, operands.cells, examples, reading.singles)
    program = Program(
        device=str(writing.device),
        attributes=tuple(operands.attributes),
        allocated=tuple(
            Allocated(tuple(t.shape), t.stride(), dtype_name(t)) for t in examples[held_count:]
        ),
        written=tuple(n for n in writing.written if n < held_count),
        outputs=outputs,
        updates=writing.updates(),
    )
    return program, examples


class _Operands:
    """The tensors that a graph takes, or creates to return them."""

    def __init__(self, gm: torch.fx.GraphModule, terms: Terms) -> None:
        self.gm = gm
        self.terms = terms
        self.held: dict[str, Any] = {**gm._buffers, **gm._parameters}
        self.inputs = 0
        self.attributes: list[str] = []
        self.cells: list[Cell] = []
        self.examples: list[Tensor] = []
        self._known: dict[int, Cell] = {}

    def take(self, node: torch.fx.Node) -> Cell:
        """Return the cell of an input or attribute."""
        if node.op == "placeholder":
            if self.attributes:
                raise UnreadError("an input after an attribute")
            self.inputs += 1
            return self._add(_check_tensor(node.meta.get("example_value")), (node, None))
        example = self.held.get(str(node.target))
        if id(example) in self._known:
            return self._known[id(example)]
        if type(example) not in TENSORS:
            raise UnreadError(f"an attribute that is a {type(example).__name__}")
        self.attributes.append(str(node.target))
        cell = self._known[id(example)] = self._add(_check_tensor(example), (node, None))
        return cell

    def find_output(self, value: Any, values: Mapping[torch.fx.Node, Any]) -> int | None:
        """Return the number of the operand that is an output."""
        if value is None:
            return None
        cell = values.get(value) if isinstance(value, torch.fx.Node) else None
        if not isinstance(cell, Cell) or cell in self.cells or value.target in ALIASES:
            raise UnreadError("an output that is not a new tensor")
        if cell.operand is None:
            node, index = cell.origin
            example: Any = node.meta.get("example_value")
            example = _check_tensor(example if index is None else example[index])
            if tuple(example.shape) != cell.shape:
                raise UnreadError("an output whose shape differs from its source")
            cell.operand = len(self.cells)
            output_cell = self._add(example, cell.origin)
            output_cell.term, output_cell.last = cell.term, cell.last
        return cell.operand

    def _add(self, example: Tensor, origin: tuple[torch.fx.Node, int | None]) -> Cell:
        leaf = self.terms.make("leaf", len(self.cells))
        name = dtype_name(example)
        stored = f"as_{name}" if name in LOW else ""
        cell = Cell(leaf, tuple(example.shape), origin, stored)
        self.cells.append(cell)
        self.examples.append(example)
        return cell


def _check_tensor(example: Any) -> Tensor:
    if type(example) not in TENSORS:
        raise UnreadError(f"a {type(example).__name__}")
    if example.layout is not torch.strided:
        raise UnreadError("sparse tensors")
    if any(not isinstance(n, int) for n in (*example.shape, *example.stride())):
        raise UnreadError("shapes that are symbols")
    if dtype_name(example) not in REALS:
        raise UnreadError(f"tensors of {example.dtype}")
    if example.is_neg() or example.is_inference():
        raise UnreadError("tensors that are negated when they are read, or of inference mode")
    checked: Tensor = example
    return checked
