"""`ipex::kept_conv` in torch's ops: a 2d convolution with cached primitives.

`templates/cpu/cached_primitives.py` defines the ops, next to their library, so that none runs
without it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipex_inductor.ops.common import epilogue


class Geometry(NamedTuple):
    """A 2d convolution of channels-last activations; `type` is oneDNN's number of its dtype."""

    type: int
    batch: int
    channels: int
    height: int
    width: int
    out_channels: int
    window: tuple[int, int]
    out: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    biased: int
    added: int

    @property
    def weight(self) -> tuple[int, ...]:
        """Return the shape of the weight."""
        return self.out_channels, self.channels // self.groups, *self.window

    def flat(self) -> list[int]:
        """Return the fields as a flat list, which ops and C++ take."""
        return [n for value in self for n in (value if isinstance(value, tuple) else (value,))]

    @classmethod
    def of(cls, flat: Sequence[int]) -> "Geometry":
        """Return the geometry that `flat` lists."""
        pairs: Any = [tuple(flat[n : n + 2]) for n in range(6, 16, 2)]
        numbers: Any = flat
        return cls(*numbers[:6], *pairs, *numbers[16:])


def reference(
    x: Tensor,
    arranged: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    geometry: Geometry,
    unary: str,
    scalars: Sequence[float],
) -> Tensor:
    """Return `unary(convolution(x, weight, bias) + other, *scalars)`.

    Args:
        x: [B, C, H, W].
        arranged: the plain weight, flat, with any padding after it.
        bias: [O] if `geometry.biased`.
        other: as the result, if `geometry.added`.
        geometry: geometry of the convolution.
        unary: name in `ops/common/epilogue.py`.
        scalars: arguments of the unary.
    """
    weight = arranged[: math.prod(geometry.weight)].view(geometry.weight)
    product = torch.conv2d(
        x, weight, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    )
    result = epilogue.apply(product, other, "add" if geometry.added else "none", unary, scalars)
    return result.contiguous(memory_format=torch.channels_last)
