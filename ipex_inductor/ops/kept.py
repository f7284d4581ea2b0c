"""A convolution over a plane as `ipex::kept_conv` has it (`templates/cpu/cached_primitives.py`), in
torch's ops.

The ops themselves stand beside the library that has them, so that none is run without it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipex_inductor.ops import epilogue


class Geometry(NamedTuple):
    """A convolution over a plane, of channels-last images; oneDNN's number of its dtype."""

    type: int
    batch: int
    channels: int
    height: int
    width: int
    made: int
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
        """The weight's shape."""
        return self.made, self.channels // self.groups, *self.window

    def flat(self) -> list[int]:
        """As ops and C++ take it."""
        return [n for each in self for n in (each if isinstance(each, tuple) else (each,))]

    @classmethod
    def of(cls, flat: Sequence[int]) -> "Geometry":
        """What `flat` wrote."""
        pairs: Any = [tuple(flat[n : n + 2]) for n in range(6, 16, 2)]
        numbers: Any = flat
        return cls(*numbers[:6], *pairs, *numbers[16:])


def reference(
    x: Tensor,
    arranged: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    given: Geometry,
    unary: str,
    scalars: Sequence[float],
) -> Tensor:
    """`unary(convolution(x, weight, bias) + other, *scalars)`, words of `ops/epilogue.py`.

    Bias and other are there where `given` says so; a plain weight.
    """
    weight = arranged[: math.prod(given.weight)].view(given.weight)
    made = torch.conv2d(x, weight, bias, given.stride, given.padding, given.dilation, given.groups)
    result = epilogue.apply(made, other, "add" if given.added else "none", unary, scalars)
    return result.contiguous(memory_format=torch.channels_last)
