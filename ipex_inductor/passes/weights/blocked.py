"""Compute GEMMs on weights in blocks by a kernel of ours, where it was measured to beat oneDNN's.

It serves linear layers, and 1 x 1 convolutions in channels-last graphs. The size of one GEMM is
weighed against what is set up for it at each call (`benchmarks/studies/blocked.py`).
"""

import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ipex_inductor import compat
from ipex_inductor.ops.gemm.blocked import COLUMNS, pair_size
from ipex_inductor.passes.attention import short_attention
from ipex_inductor.passes.weights.packing import Product
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu import cpu_library, int8, weight_only
from ipex_inductor.templates.cpu.blocked import BINARY, UNARY

Node = torch.fx.Node
ipex = torch.ops.ipex


class Bounds(NamedTuple):
    """The sizes of x [rows, columns] for which our kernel is faster.

    Attributes:
        depth: The fewest columns of x (K).
        rows: The most rows of x (M).
        deep: Alternatively, the most rows for each column of x.
        products: The most multiplications, counting zeros that pad the last vectors. Where there is
            a bound, oneDNN is many times faster beyond it, so a size that may change is not
            accepted.
    """

    depth: int
    rows: int
    deep: int = 0
    products: float = math.inf


# Bounds where our kernel is faster, by CPU and dtype: of linear layers, and of convolutions. In
# convolutions oneDNN adds an addend in place, which is cheaper than a third tensor, above all where
# K is small. On AMX oneDNN's GEMMs in bf16 are ten times as fast, so ours takes only products that
# cost less than oneDNN's 20 microseconds of descriptors.
FASTER: Mapping[tuple[str, torch.dtype], tuple[Bounds, Bounds]] = {
    ("x86-64:amx", torch.float32): (Bounds(1, 8192), Bounds(1, 0)),
    ("x86-64:amx", torch.bfloat16): (Bounds(1, 8192, products=1 << 19), Bounds(1, 0)),
    ("x86-64:avx512_bf16", torch.bfloat16): (Bounds(16, 8192), Bounds(64, 4096, 25)),
    ("x86-64:avx512_bf16", torch.float32): (Bounds(1, 8192), Bounds(64, 4096, 25)),
    ("x86-64:avx512_bf16", torch.float16): (Bounds(16, 8192), Bounds(64, 0)),
    ("x86-64:avx2", torch.float32): (Bounds(128, 4096), Bounds(128, 64)),
    # Convolutions in bf16 are computed in fp32 here (`upcast`).
    ("x86-64:avx2", torch.bfloat16): (Bounds(128, 4096), Bounds(128, 0)),
}
# The most multiplications with zeros that pad the last vectors; they take 20 microseconds.
WASTE = 1 << 20
VECTOR = 16  # columns, on AVX-512
# Columns of a block that are contiguous, where that is less than the whole block.
PANEL = {"x86-64:avx2": 16}
# Functions in Dynamo's graph that may become such GEMMs, or attention over few keys.
SOURCES = {F.linear, F.conv2d, F.scaled_dot_product_attention, operator.matmul}
SOURCES |= {torch.matmul, torch.mm, torch.addmm, torch.conv2d}


def begin_building(gm: torch.fx.GraphModule) -> None:
    """Start compiling the kernels while Dynamo traces, if the graph may use them."""
    offered = {arch for arch, _ in {*FASTER, *short_attention.FASTER}}
    if architecture() in offered and any(node.target in SOURCES for node in gm.graph.nodes):
        cpu_library.begin()
    if any("quantized_decomposed" in str(node.target) for node in gm.graph.nodes):
        int8.begin()
    if any("weight_only_linear" in str(node.target) for node in gm.graph.nodes):
        weight_only.begin()


def in_blocks(product: Product) -> Product | None:
    """Return the product on a weight in blocks, None where oneDNN's kernel is used."""
    x, _, bias, addend, *window, binary, unary, scalars, form = product.args(product.weight)
    image = product.op is ipex.conv.default
    value = product.weight.meta["val"]
    if (image and (not _is_one_pixel(product.shape, window) or form != "channels_last")) or (
        binary not in BINARY
        or unary not in UNARY
        or scalars
        or not _is_faster(x.meta["val"], value, image)
    ):
        return None
    epilogue = binary, unary, image
    columns = product.shape[0]
    paired = pair_size(value.dtype)
    panel = PANEL.get(architecture(), COLUMNS)
    count = -(-columns // COLUMNS) * (COLUMNS // panel)
    shape = (count, product.shape[1] // paired, panel, paired)
    return Product(
        ipex.blocked.default,
        product.weight,
        shape,
        lambda packed: (x, packed, bias, addend, columns, *epilogue),
        lambda g: g.call_function(ipex.blocks.default, (product.weight, panel)),
        strides=(shape[1] * panel * paired, panel * paired, paired, 1),
    )


def _is_one_pixel(shape: tuple[int, ...], window: list[Any]) -> bool:
    """Return whether a convolution is a GEMM: a 1 x 1 kernel without stride, padding or groups."""
    stride, padding, _, transposed, _, groups = window
    steps = list(stride) == [1, 1] and not any(padding)
    return len(shape) == 4 and shape[2:] == (1, 1) and steps and not transposed and groups == 1


def _count_columns(columns: int) -> int:
    """Return how many columns the kernel computes: one, two or all vectors of the last block."""
    whole, rest = columns // COLUMNS * COLUMNS, columns % COLUMNS
    return whole + next(some for some in (0, VECTOR, 2 * VECTOR, COLUMNS) if some >= rest)


def _is_faster(x: torch.Tensor, weight: torch.Tensor, image: bool) -> bool:
    """Return whether our kernel was measured to be faster for products of these sizes.

    Of a layer whose number of rows may change, the present number counts; an image's sizes are
    known.
    """
    columns, depth = weight.shape[:2]
    both, sizes = FASTER.get((architecture(), weight.dtype)), compat.hints(x)
    if both is None or None in sizes or depth % pair_size(weight.dtype):
        return False
    bounds = both[image]
    changes = any(isinstance(size, torch.SymInt) for size in x.shape)
    if changes and (image or bounds.products < math.inf):
        return False
    rows = math.prod(sizes) // depth
    filled = _count_columns(columns)
    most = max(bounds.rows, bounds.deep * depth)
    return (
        depth >= bounds.depth
        and rows <= most
        and rows * depth * filled <= bounds.products
        and rows * depth * (filled - columns) <= WASTE
    )
