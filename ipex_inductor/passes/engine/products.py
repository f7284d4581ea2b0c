"""Convolutions and linear layers of a graph in one form, with their neighbouring nodes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor.passes.engine.packable import varies

Node = torch.fx.Node
aten = torch.ops.aten

# They keep the order of elements, so consecutive channels stay consecutive.
RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
)


Build = Callable[..., Node]  # takes an op, its arguments and its fake `value`; returns a node


@dataclass(frozen=True)
class Product:
    """The node `node` as the product of `x` and `weight`, plus `bias` or None.

    `outputs` and `inputs` number the dimensions of the weight along which output and input channels
    lie; dimension 1 holds the channels of a single group. `again` builds the product with another
    x, weight and bias of equal shapes. `uneven` says why a number added to all of x does not add
    one number to all results of a channel, None where it does.
    """

    name: str
    node: Node
    x: Any
    weight: Any
    bias: Any
    outputs: int
    inputs: int
    again: Callable[[Build, Any, Node, Node], Node]
    groups: int = 1
    uneven: str | None = None

    def width(self, dim: int) -> int:
        """Return how many channels of all groups lie along dimension `dim` of the weight."""
        size: int = self.weight.meta["val"].shape[dim]
        return size * self.groups if dim == 1 else size


def as_product(node: Any) -> Product | None:
    """Return `node` as a product, None if it is none."""
    read = READERS.get(node.target) if node.op == "call_function" else None
    return read(node) if read else None


def product_before(norm: Node) -> tuple[Product | None, list[Node]]:
    """Return the product that `norm` normalises, and the reshapes between, first to last."""
    node: Any = norm.args[0]
    between: list[Node] = []
    while node.target in RESHAPES:
        between.insert(0, node)
        node = node.args[0]
    return as_product(node), between


def product_after(norm: Node) -> tuple[Product | None, list[Node]]:
    """Return a product that reads the result of `norm`, and the nodes between, first to last."""
    node = next((user for user in norm.users if user.args[1] == 0), norm)
    between = [node]
    while len(node.users) == 1 and next(iter(node.users)).target in RESHAPES:
        node = next(iter(node.users))
        between.append(node)
    products = filter(None, map(as_product, node.users))
    return next((p for p in products if p.x is node), None), between


def _convolution(node: Node) -> Product | None:
    x, weight, bias, *window = node.args
    if varies(node):
        return None
    _, padding, _, transposed, _, groups = window
    kind, outputs, inputs, uneven = "conv", 0, 1, None
    if any(padding):  # type: ignore[arg-type]
        uneven = "the convolution pads with zeros, which are not shifted"
    if transposed:
        kind, outputs, inputs = "conv_transpose", 1, 0
        uneven = "the convolution is transposed: not every result sums the whole window"
    return Product(
        name=f"{kind}{node.meta['val'].dim() - 2}d",
        node=node,
        x=x,
        weight=weight,
        bias=bias,
        outputs=outputs,
        inputs=inputs,
        again=lambda build, *operands: build(
            node.target, *operands, *window, value=node.meta["val"]
        ),
        groups=groups,  # type: ignore[arg-type]
        uneven=uneven,
    )


def _linear(node: Node, x: Any, matrix: Any, bias: Any) -> Product:
    """Return x [M, K] times a matrix [K, N], most often the permuted weight [N, K] of a layer."""
    if matrix.target is aten.permute.default and list(matrix.args[1]) == [1, 0]:
        return Product("linear", node, x, matrix.args[0], bias, 0, 1, _with_permuted)
    return Product("linear", node, x, matrix, bias, 1, 0, _with_matrix)


def _with_permuted(build: Build, x: Any, weight: Node, bias: Node) -> Node:
    return _with_matrix(build, x, build(aten.permute.default, weight, [1, 0]), bias)


def _with_matrix(build: Build, x: Any, matrix: Node, bias: Node) -> Node:
    return build(aten.addmm.default, bias, x, matrix)


def _addmm(node: Node) -> Product | None:
    bias, x, matrix = node.args
    return None if node.kwargs else _linear(node, x, matrix, bias)  # beta, alpha


def _mm(node: Node) -> Product:
    x, matrix = node.args
    return _linear(node, x, matrix, None)


READERS: dict[Any, Callable[[Node], Product | None]] = {
    aten.convolution.default: _convolution,
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
}
