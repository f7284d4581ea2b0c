"""Read convolutions that are restated."""

import math
from typing import Any

import torch

from ipex_inductor.passes.engine.packable import varies

Node = torch.fx.Node
HALVES = (torch.bfloat16, torch.float16)


class Convolution:
    """The arguments of `aten.convolution`, with a number for each dimension of the window.

    Args:
        x: The images [N, C, *sizes].
        weight: [O, C / groups, *window].
        bias: [O], or None.
        stride: A number for each dimension, or one for all, as of all that follow.
        padding: Zeros at both ends.
        dilation: The distance of taps.
        transposed: Whether the convolution is transposed.
        output_padding: Of transposed convolutions.
        groups: The number of groups.
    """

    def __init__(
        self,
        x: Any,
        weight: Any,
        bias: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        output_padding: Any,
        groups: int,
    ) -> None:
        self.x, self.weight, self.bias = x, weight, bias
        rank = len(getattr(weight, "meta", {}).get("val", weight).shape) - 2
        self.stride, self.padding, self.dilation = (
            [*numbers] * rank if len(numbers) == 1 else [*numbers]
            for numbers in (stride, padding, dilation)
        )
        self.is_dense = not transposed and groups == 1


def read(node: Node) -> Convolution:
    """Return the arguments of a convolution's node, whose tensors are nodes."""
    args: Any = node.args
    return Convolution(*args)


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
