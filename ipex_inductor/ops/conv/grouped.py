"""`ipex::conv_grouped`: a grouped convolution; several groups form one small GEMM."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.ops.conv.geometry import rows_of, sides


@dataclass(frozen=True)
class Blocks:
    """A grouped weight as blocks of `size` groups each, zero-padded to [terms, columns]."""

    groups: int
    size: int
    terms: int
    columns: int

    @classmethod
    def fit(cls, shape: Sequence[int], groups: int, terms: int, columns: int) -> "Blocks | None":
        """Return blocks of as many groups as fit; None if no group fits.

        Args:
            shape: shape of the weight, [O, C / groups, h, w].
            groups: number of groups.
            terms: K of a block, per kernel tap.
            columns: N of a block.
        """
        group_out, group_in = shape[0] // groups, shape[1]
        size = min(columns // group_out, terms // group_in, groups)
        return cls(groups, size, terms, columns) if size else None

    @property
    def count(self) -> int:
        """Return the number of blocks; the last has groups of zeros if `size` does not divide."""
        return -(-self.groups // self.size)

    def of_weight(self, weight: Tensor) -> Tensor:
        """Return the weight [O, C / groups, h, w] as [count, h * w, terms, columns]."""
        group_out, group_in = len(weight) // self.groups, weight.shape[1]
        by_group = weight.reshape(self.groups, group_out, group_in, -1)
        by_group = F.pad(by_group, (0, 0) * 3 + (0, self.count * self.size - self.groups))
        by_block = by_group.view(self.count, self.size, group_out, group_in, -1)
        # [count, h * w, group, term, group, column]: zeros except where both groups are equal.
        square = _diagonal(by_block.permute(0, 4, 3, 2, 1)).permute(0, 1, 4, 2, 5, 3)
        dense = square.reshape(self.count, -1, self.size * group_in, self.size * group_out)
        missing = self.columns - self.size * group_out, self.terms - self.size * group_in
        return F.pad(dense, (0, missing[0], 0, missing[1])).contiguous()

    def to_weight(self, blocks: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the weight of the given shape that `of_weight` arranged as `blocks`."""
        group_out, group_in = shape[0] // self.groups, shape[1]
        dense = blocks[:, :, : self.size * group_in, : self.size * group_out]
        square = dense.reshape(self.count, -1, self.size, group_in, self.size, group_out)
        by_block = square.diagonal(dim1=2, dim2=4).permute(0, 4, 3, 2, 1)
        by_group = by_block.reshape(self.count * self.size, -1)[: self.groups]
        return by_group.reshape(*shape)


def _diagonal(values: Tensor) -> Tensor:
    """Return `torch.diag_embed(values)` from the values alone, so that a prologue can hoist it."""
    size = values.shape[-1]
    # Consecutive values are `size + 1` apart.
    spaced = F.pad(values.unsqueeze(-1), (0, size)).flatten(-2)
    return spaced[..., : size * size].reshape(*values.shape, size)


@op("conv_grouped")
def conv_grouped(
    x: Tensor,
    blocks: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    columns: int,
    tile: list[int],
) -> Tensor:
    """Return `conv2d(x, weight, groups=groups)` as rows, one per pixel: [B * H' * W', columns].

    This is the reference of the template (`templates/triton/conv_grouped.py`).

    Args:
        x: [B, C, H, W] in channels-last.
        blocks: the weight as `Blocks.of_weight` arranges it, for the `tile`.
        window: size of the kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
        groups: number of groups.
        columns: number of output channels, O.
        tile: parameters of the template.
    """
    shape = columns, x.shape[1] // groups, *window
    layout = Blocks.fit(shape, groups, *blocks.shape[2:])
    assert layout is not None
    weight = layout.to_weight(blocks, shape)
    return rows_of(torch.conv2d(x, weight, None, stride, padding, dilation, groups)).contiguous()


@fake(conv_grouped)
def _(call: Arguments) -> object:
    height, width = sides(call.x.shape[2:], call.window, call.stride, call.padding, call.dilation)
    return call.x.new_empty((call.x.shape[0] * height * width, call.columns))
