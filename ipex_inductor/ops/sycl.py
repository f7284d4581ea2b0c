"""`ipex::sycl_*`: products and convolutions on weights packed for kernels in SYCL.

What stands here is the reference, in torch's ops; `templates/sycl/calls.py` puts kernels in its
place on devices that have some.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops import epilogue
from ipex_inductor.ops.defining import op
from ipex_inductor.ops.stem import sides

WORD = 4  # bytes that a lane reads of its column at a time
RUN = 64  # bytes: runs of terms are filled up to a multiple, which every step divides
COLUMNS = 64  # of a panel, which lies in one piece; every block divides them


@dataclass(frozen=True)
class Window:
    """How a convolution looks at an image, and at its weight as runs of neighbouring terms."""

    size: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)

    @property
    def across(self) -> int:
        """Runs of a row of the window: one where its columns lie side by side in memory."""
        return 1 if self.dilation[1] == 1 else self.size[1]

    @property
    def runs(self) -> int:
        """Of the whole window."""
        return self.size[0] * self.across

    def terms(self, channels: int) -> int:
        """Of a run."""
        return channels * self.size[1] // self.across


def packed(weight: Tensor, runs: int = 1) -> Tensor:
    """The weight [N, runs * terms] as kernels read it: [panels, words of terms, 64, terms of each].

    A panel is 64 columns. Runs are filled up with zeros to 64 bytes, the last panel with columns.
    """
    size = weight.element_size()
    rows = weight.reshape(weight.shape[0], runs, weight.shape[1] // runs)
    rows = F.pad(rows, (0, -rows.shape[2] % (RUN // size), 0, 0, 0, -len(rows) % COLUMNS))
    panels, words = len(rows) // COLUMNS, runs * rows.shape[2] * size // WORD
    if not rows.numel():
        return weight.new_empty((panels, words, COLUMNS, WORD // size))
    whole = rows.flatten(1).view(torch.int32).view(panels, COLUMNS, words)  # quick to move
    return whole.transpose(1, 2).contiguous().view(weight.dtype).view(panels, words, COLUMNS, -1)


def restored(weight: Tensor, columns: int, runs: int, terms: int) -> Tensor:
    """What `packed` made it of: [columns, runs * terms]."""
    rows = weight.permute(0, 2, 1, 3).reshape(weight.shape[0] * COLUMNS, runs, -1)
    return rows[:columns, :, :terms].flatten(1)


def packed_window(weight: Tensor, window: Window) -> Tensor:
    """The weight [O, C, *window] packed, for images whose channels are last."""
    return packed(weight.permute(0, 2, 3, 1).flatten(1), window.runs)


def by_groups(weight: Tensor) -> Tensor:
    """The weight [O, C / groups, h, w] as the kernel for groups reads it: [h, w, C / groups, O]."""
    return weight.permute(2, 3, 1, 0).contiguous()


@op("sycl_packed")
def sycl_packed(weight: Tensor, dilation: list[int], groups: int) -> Tensor:
    """The weight of a linear layer, [N, K], or of a convolution, [O, C / groups, h, w], packed."""
    if weight.dim() == 2:
        return packed(weight)
    if groups > 1:
        return by_groups(weight)
    return packed_window(weight, Window((*weight.shape[2:],), dilation=(*dilation,)))


@sycl_packed.register_fake
def _(weight: Tensor, dilation: list[int], groups: int) -> Tensor:
    columns, channels, *window = weight.shape
    if groups > 1:
        return weight.new_empty((*window, channels, columns))
    size = weight.element_size()
    runs, terms = 1, channels
    if window:
        seen = Window((*window,), dilation=(*dilation,))
        runs, terms = seen.runs, seen.terms(channels)
    words = runs * -(-terms * size // RUN) * (RUN // WORD)
    return weight.new_empty((-(-columns // COLUMNS), words, COLUMNS, WORD // size))


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
    """`ipex::linear` on a weight of `ipex::sycl_packed`; `columns` are those it had.

    x [..., K], bias [columns], other and the result [..., columns]. `block`: how a kernel cuts it
    (`Tile.block`), "" for what is usual.
    """
    plain = restored(weight, columns, 1, x.shape[-1])
    return epilogue.apply(F.linear(x, plain, bias), other, binary, unary, scalars)


sycl_linear = op("sycl_linear")(linear_in_torch)


@sycl_linear.register_fake
def _(
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
    return x.new_empty((*x.shape[:-1], columns))


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
    """`ipex::conv` over a plane, not transposed, on a weight of `ipex::sycl_packed`.

    x [B, C, H, W]; the weight had `columns` rows and that `window`. The result [B, columns, H', W']
    is channels-last if `last`, or else contiguous. `block` as in `ipex::sycl_linear`.
    """
    if groups > 1:
        plain = weight.permute(3, 2, 0, 1)
    else:
        seen = Window((*window,), dilation=(*dilation,))
        plain = restored(weight, columns, seen.runs, seen.terms(x.shape[1]))
        plain = plain.view(columns, *window, x.shape[1]).permute(0, 3, 1, 2)
    product = F.conv2d(x, plain, bias, stride, padding, dilation, groups)
    return _formatted(epilogue.apply(product, other, binary, unary, scalars), last)


sycl_conv = op("sycl_conv")(conv_in_torch)


@sycl_conv.register_fake
def _(
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
    height, width = sides(x.shape[2:], window, stride, padding, dilation)
    return _formatted(x.new_empty((x.shape[0], columns, height, width)), last)


def _formatted(result: Tensor, last: bool) -> Tensor:
    return result.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
