"""Compute 3 x 3 convolutions by Winograd's algorithm, where our kernel was measured to be faster.

It saves 20 of 36 products of each pair of channels in fp32, and 108 of 144 in bf16. That must pay
for the transforms of activations and sums, and for a weight of 16 or 36 elements instead of 9,
which is stored in fp32 even in bf16 (`benchmarks/studies/winograd.py`).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ipex_inductor.ops.conv.winograd import PANEL, TILE
from ipex_inductor.ops.conv.winograd import transformed_shape as of_weight
from ipex_inductor.passes.weights.packing import Product
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu.blocked import UNARY
from ipex_inductor.templates.cpu.winograd import BINARY

ipex = torch.ops.ipex
WINDOW, ONE = (3, 3), [1, 1]


class Bounds(NamedTuple):
    """The fewest channels, input and output, and the fewest tiles for which it is faster.

    Attributes:
        channels: The fewest input channels.
        channels_out: The fewest output channels.
        tiles: The fewest tiles.
        share: The largest share of products that may be left; tiles over the border of a small
            result waste some.
        pairs: The fewest tiles times pairs of channels; with fewer, the cost of each call
            dominates.
    """

    channels: int
    channels_out: int
    tiles: int
    share: float
    pairs: int = 0


# Bounds where it is faster, by CPU and dtype (`benchmarks/studies/winograd.py`).
FASTER: Mapping[tuple[str, torch.dtype], Bounds] = {
    ("x86-64:avx2", torch.float32): Bounds(32, 32, 9, 0.6),
    ("x86-64:avx512_bf16", torch.float32): Bounds(16, 16, 4, 0.6),
    ("x86-64:avx512_bf16", torch.bfloat16): Bounds(32, 16, 16, 0.4, 100_000),
}


def by_tiles(product: Product) -> Product | None:
    """Return the convolution on a transformed weight, None where oneDNN's kernel is used."""
    if product.op is not ipex.conv.default:
        return None
    x, _, bias, addend, *window, binary, unary, scalars, form = product.args(product.weight)
    stride, padding, dilation, transposed, _, groups = window
    value, sizes = product.weight.meta["val"], [*x.meta["val"].shape]
    if (
        transposed
        or groups != 1
        or tuple(value.shape[2:]) != WINDOW
        or [*stride] != ONE
        or [*dilation] != ONE
        or form != "channels_last"
        or binary not in BINARY
        or unary not in UNARY
        or scalars
        or not all(isinstance(size, int) for size in sizes)
        or not _is_faster(sizes, padding, value)
    ):
        return None
    shape = of_weight(value)
    return Product(
        ipex.winograd.default,
        product.weight,
        shape,
        lambda packed: (x, packed, bias, addend, [*padding], binary, unary),
        lambda g: g.call_function(ipex.winograd_weight.default, (product.weight,)),
        strides=tuple(math.prod(shape[i:]) for i in range(1, 5)),
        dtype=torch.float32,
    )


def _is_faster(sizes: list[int], padding: list[int], weight: torch.Tensor) -> bool:
    """Return whether Winograd's algorithm was measured to be faster for these sizes."""
    bounds = FASTER.get((architecture(), weight.dtype))
    channels_out, channels = weight.shape[:2]
    if bounds is None or channels_out % PANEL or channels % PANEL:
        return False
    sides = [size + 2 * more - 2 for size, more in zip(sizes[2:], padding, strict=True)]
    tile = TILE[weight.dtype]
    tiles = math.prod(-(-side // tile) for side in sides)
    share = tiles * (tile + 2) ** 2 / (math.prod(sides) * math.prod(WINDOW))
    tiles *= sizes[0]
    many = (
        channels >= bounds.channels
        and channels_out >= bounds.channels_out
        and tiles >= bounds.tiles
    )
    return many and share <= bounds.share and tiles * channels * channels_out >= bounds.pairs
