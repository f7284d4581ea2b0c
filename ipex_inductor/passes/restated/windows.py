"""Read convolutions that are restated."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ipex_inductor.passes.engine.packable import varies

Node = torch.fx.Node
HALVES = (torch.bfloat16, torch.float16)


class Convolution:
    """The arguments of `aten.convolution`, with a number for each dimension of the window.

    Args:
        arguments: Of the operator: x [N, C, *sizes], weight [O, C / groups, *window], bias [O] or
            None, stride, padding and dilation (a number for each dimension, or one for all),
            whether it is transposed, the padding of its output, and the number of groups.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.x, self.weight, self.bias, *numbers, transposed, _, groups = arguments
        weight = getattr(self.weight, "meta", {}).get("val", self.weight)
        rank = len(weight.shape) - 2
        self.stride, self.padding, self.dilation = (
            [*each] * rank if len(each) == 1 else [*each] for each in numbers
        )
        self.is_dense = not transposed and groups == 1


def read(node: Node) -> Convolution:
    """Return the arguments of a convolution's node, whose tensors are nodes."""
    return Convolution(node.args)


def shape(node: Node) -> Any:
    """Return the shape of a node's value."""
    return node.meta["val"].shape


def is_at_most(size: object, most: int) -> bool:
    """Return whether a size does not vary and is at most so large."""
    return isinstance(size, int) and size <= most


def is_in_16_bits(node: Node) -> bool:
    """Return whether a convolution is in bf16 or fp16; only these were measured."""
    return node.meta["val"].dtype in HALVES


def why_not(node: Node) -> str | None:
    """Return why a convolution of the right kind is not restated, or None."""
    convolution = read(node)
    image = convolution.x.meta["val"]
    sizes = (*image.shape[1:], *image.stride(), *shape(convolution.weight))
    if varies(node) or not all(isinstance(size, int) for size in sizes):
        return "other sizes than its batch vary"
    return None if math.prod(shape(node)[1:]) else "it is empty"
