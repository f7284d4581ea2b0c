"""`ipex::conv_grouped`: a convolution in groups, of which several make one small product."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.defining import op
from ipex_inductor.ops.stem import rows_of, sides


@dataclass(frozen=True)
class Blocks:
    """A grouped weight as blocks of `size` groups each, with zeros up to [terms, columns]."""

    groups: int
    size: int
    terms: int
    columns: int

    @classmethod
    def fitting(
        cls, shape: Sequence[int], groups: int, terms: int, columns: int
    ) -> "Blocks | None":
        """As many groups a block as it has room for, of a weight of that shape; None for none."""
        made, each = shape[0] // groups, shape[1]
        size = min(columns // made, terms // each, groups)
        return cls(groups, size, terms, columns) if size else None

    @property
    def count(self) -> int:
        """So many blocks; the last has groups of zeros where `size` does not divide."""
        return -(-self.groups // self.size)

    def of_weight(self, weight: Tensor) -> Tensor:
        """The weight [O, C / groups, h, w] as [count, h * w, terms, columns]."""
        made, each = len(weight) // self.groups, weight.shape[1]
        by_group = weight.reshape(self.groups, made, each, -1)
        by_group = F.pad(by_group, (0, 0) * 3 + (0, self.count * self.size - self.groups))
        by_block = by_group.view(self.count, self.size, made, each, -1)
        # [count, h * w, group, term, group, column]: zeros but where both groups are the same.
        square = _diagonal(by_block.permute(0, 4, 3, 2, 1)).permute(0, 1, 4, 2, 5, 3)
        dense = square.reshape(self.count, -1, self.size * each, self.size * made)
        missing = self.columns - self.size * made, self.terms - self.size * each
        return F.pad(dense, (0, missing[0], 0, missing[1])).contiguous()

    def restored(self, blocks: Tensor, shape: Sequence[int]) -> Tensor:
        """The weight of that shape of which `of_weight` made `blocks`."""
        made, each = shape[0] // self.groups, shape[1]
        dense = blocks[:, :, : self.size * each, : self.size * made]
        square = dense.reshape(self.count, -1, self.size, each, self.size, made)
        by_block = square.diagonal(dim1=2, dim2=4).permute(0, 4, 3, 2, 1)
        by_group = by_block.reshape(self.count * self.size, -1)[: self.groups]
        return by_group.reshape(*shape)


def _diagonal(values: Tensor) -> Tensor:
    """`torch.diag_embed(values)` of the values alone: a prologue hoists no zeros made elsewhere."""
    size = values.shape[-1]
    apart = F.pad(values.unsqueeze(-1), (0, size)).flatten(-2)  # each lies `size + 1` further on
    return apart[..., : size * size].reshape(*values.shape, size)


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
    """`conv2d(x, weight, groups=groups)` as rows, a pixel each: [B * H' * W', columns].

    x [B, C, H, W] in channels-last; `blocks` what `Blocks.of_weight` made of a weight of that
    `window`, by the `tile` of the template (`templates/triton/conv_grouped.py`). This is the
    reference.
    """
    shape = columns, x.shape[1] // groups, *window
    found = Blocks.fitting(shape, groups, *blocks.shape[2:])
    assert found is not None
    weight = found.restored(blocks, shape)
    return rows_of(torch.conv2d(x, weight, None, stride, padding, dilation, groups)).contiguous()


@conv_grouped.register_fake
def _(
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
    height, width = sides(x.shape[2:], window, stride, padding, dilation)
    return x.new_empty((x.shape[0] * height * width, columns))
