"""`ipex::sycl_*`: GEMMs and convolutions on weights packed for SYCL kernels.

This file has the reference in torch's ops; `templates/sycl/calls.py` registers kernels on devices
that have some.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.ops.conv.geometry import sides

WORD = 4  # bytes that a lane reads of its column per load
RUN = 64  # bytes; runs along K are padded to a multiple, which every K step divides
COLUMNS = 64  # N of a panel, which is contiguous; every block size divides it


@dataclass(frozen=True)
class Window:
    """Geometry of a 2d convolution, and its weight as runs of adjacent elements along K."""

    size: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)

    @property
    def across(self) -> int:
        """Return the number of runs per kernel row: one if its columns are adjacent in memory."""
        return 1 if self.dilation[1] == 1 else self.size[1]

    @property
    def runs(self) -> int:
        """Return the number of runs of the whole kernel."""
        return self.size[0] * self.across

    def terms(self, channels: int) -> int:
        """Return the K elements of a run, for an activation of `channels` channels."""
        return channels * self.size[1] // self.across


def pack_weight(weight: Tensor, runs: int = 1) -> Tensor:
    """Return the weight [N, runs * terms] packed for kernels: [panels, words, 64, K of a word].

    A panel is 64 columns, a word 4 bytes of K. Runs are padded with zeros to 64 bytes, the last
    panel with columns.
    """
    size = weight.element_size()
    rows = weight.reshape(weight.shape[0], runs, weight.shape[1] // runs)
    rows = F.pad(rows, (0, -rows.shape[2] % (RUN // size), 0, 0, 0, -len(rows) % COLUMNS))
    panels, word_count = len(rows) // COLUMNS, runs * rows.shape[2] * size // WORD
    if not rows.numel():
        return weight.new_empty((panels, word_count, COLUMNS, WORD // size))
    # Int32 words are faster to transpose.
    whole = rows.flatten(1).view(torch.int32).view(panels, COLUMNS, word_count)
    return (
        whole.transpose(1, 2).contiguous().view(weight.dtype).view(panels, word_count, COLUMNS, -1)
    )


def unpack_weight(weight: Tensor, columns: int, runs: int, terms: int) -> Tensor:
    """Return the weight [columns, runs * terms] that `pack_weight` packed."""
    rows = weight.permute(0, 2, 1, 3).reshape(weight.shape[0] * COLUMNS, runs, -1)
    return rows[:columns, :, :terms].flatten(1)


def pack_kernel(weight: Tensor, window: Window) -> Tensor:
    """Return the weight [O, C, *window] packed for channels-last activations."""
    return pack_weight(weight.permute(0, 2, 3, 1).flatten(1), window.runs)


def pack_grouped(weight: Tensor) -> Tensor:
    """Return the weight [O, C / groups, h, w] for the grouped kernel: [h, w, C / groups, O]."""
    return weight.permute(2, 3, 1, 0).contiguous()


@op("sycl_packed")
def sycl_packed(weight: Tensor, dilation: list[int], groups: int) -> Tensor:
    """Return the weight of a linear layer [N, K] or a convolution [O, C / groups, h, w], packed."""
    if weight.dim() == 2:
        return pack_weight(weight)
    if groups > 1:
        return pack_grouped(weight)
    return pack_kernel(weight, Window((*weight.shape[2:],), dilation=(*dilation,)))


@sycl_packed.register_fake
def _(weight: Tensor, dilation: list[int], groups: int) -> Tensor:
    columns, channels, *window = weight.shape
    if groups > 1:
        return weight.new_empty((*window, channels, columns))
    size = weight.element_size()
    runs, terms = 1, channels
    if window:
        geometry = Window((*window,), dilation=(*dilation,))
        runs, terms = geometry.runs, geometry.terms(channels)
    word_count = runs * -(-terms * size // RUN) * (RUN // WORD)
    return weight.new_empty((-(-columns // COLUMNS), word_count, COLUMNS, WORD // size))


def linear_in_torch(
    x: Tensor,
    weight: Tensor,
    columns: int,
    bias: Tensor | None,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: list[float],
    block: str = "",
) -> Tensor:
    """Return `ipex::linear` on a weight of `ipex::sycl_packed`.

    Args:
        x: [..., K].
        weight: the packed weight.
        columns: N of the plain weight.
        bias: [columns].
        other: [..., columns].
        binary: name in `ops/common/epilogue.py`.
        unary: name in `ops/common/epilogue.py`.
        scalars: arguments of the unary.
        block: blocking of the kernel (`Tile.block`), "" for the default.

    Returns:
        [..., columns].
    """
    plain = unpack_weight(weight, columns, 1, x.shape[-1])
    return epilogue.apply(F.linear(x, plain, bias), other, binary, unary, scalars)


sycl_linear = op("sycl_linear")(linear_in_torch)


@fake(sycl_linear)
def _(call: Arguments) -> object:
    return call.x.new_empty((*call.x.shape[:-1], call.columns))


def conv_in_torch(
    x: Tensor,
    weight: Tensor,
    columns: int,
    bias: Tensor | None,
    other: Tensor | None,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    binary: str,
    unary: str,
    scalars: list[float],
    last: bool,
    block: str = "",
) -> Tensor:
    """Return `ipex::conv` in 2d, not transposed, on a weight of `ipex::sycl_packed`.

    Args:
        x: [B, C, H, W].
        weight: the packed weight.
        columns: O of the plain weight.
        bias: [columns].
        other: as the result.
        window: size of the kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
        groups: number of groups.
        binary: name in `ops/common/epilogue.py`.
        unary: name in `ops/common/epilogue.py`.
        scalars: arguments of the unary.
        last: True if the result is channels-last, else it is contiguous.
        block: blocking of the kernel (`Tile.block`), "" for the default.

    Returns:
        [B, columns, H', W'].
    """
    if groups > 1:
        plain = weight.permute(3, 2, 0, 1)
    else:
        geometry = Window((*window,), dilation=(*dilation,))
        plain = unpack_weight(weight, columns, geometry.runs, geometry.terms(x.shape[1]))
        plain = plain.view(columns, *window, x.shape[1]).permute(0, 3, 1, 2)
    product = F.conv2d(x, plain, bias, stride, padding, dilation, groups)
    return _with_format(epilogue.apply(product, other, binary, unary, scalars), last)


sycl_conv = op("sycl_conv")(conv_in_torch)


@fake(sycl_conv)
def _(call: Arguments) -> object:
    height, width = sides(call.x.shape[2:], call.window, call.stride, call.padding, call.dilation)
    return _with_format(call.x.new_empty((call.x.shape[0], call.columns, height, width)), call.last)


def _with_format(result: Tensor, last: bool) -> Tensor:
    return result.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
