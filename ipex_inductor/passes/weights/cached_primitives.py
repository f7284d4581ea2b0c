"""Run convolutions by a oneDNN with cached primitives, where that library is installed.

It saves the descriptors that torch's oneDNN creates at each call, some 25 microseconds
(`benchmarks/studies/cached_primitives.py`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ipex_inductor.ops.conv.cached_primitives import Geometry
from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.passes.weights.packing import Product
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu import cached_primitives

ipex = torch.ops.ipex


class Most(NamedTuple):
    """The largest call for which the 25 microseconds that are saved still show.

    Attributes:
        dense: Multiplications of a convolution without groups.
        grouped: Multiplications of a convolution with groups of several channels.
        depthwise: Multiplications of a convolution with one channel a group.
        added: Bytes of a result with an addend, where torch adds in place.
    """

    dense: float
    grouped: float
    depthwise: float  # one channel a group
    added: float


# The largest calls for which cached primitives are faster, by CPU and dtype
# (`benchmarks/studies/cached_primitives.py`).
# On AVX2 torch's newer kernels lead for groups of 8 channels (in bf16 on AMX too) and, in place,
# behind addends; descriptors take 45 microseconds there.
FASTER: Mapping[tuple[str, torch.dtype], Most] = {
    ("x86-64:avx2", torch.float32): Most(128 << 20, 2 << 20, 8 << 20, 3 << 17),
    ("x86-64:amx", torch.bfloat16): Most(128 << 20, 1 << 20, 2 << 20, 1 << 20),
    ("x86-64:amx", torch.float32): Most(128 << 20, 8 << 20, 8 << 20, 1 << 20),
    ("x86-64:avx512_bf16", torch.bfloat16): Most(256 << 20, 32 << 20, 4 << 20, 1 << 20),
    ("x86-64:avx512_bf16", torch.float32): Most(256 << 20, 32 << 20, 4 << 20, 1 << 20),
}
NOWHERE = Most(0, 0, 0, 0)


def why_not_faster() -> str | None:
    """Return why torch's convolutions are used on this CPU, None where some are slower."""
    arch = architecture()
    measured = any(arch == name for name, _ in FASTER)
    return None if measured else f"they were not measured on {arch}: torch's are used"


def with_kept_primitive(product: Product, why_not: Callable[[], str | None]) -> Product | None:
    """Return the convolution by a cached primitive, None where torch's oneDNN computes it.

    Args:
        product: The product on oneDNN's packed weight.
        why_not: Returns why cached primitives are not available, or None.
    """
    if product.op is not ipex.conv.default:
        return None
    x, _, bias, addend, *window, binary, unary, scalars, form = product.args(product.weight)
    stride, padding, dilation, transposed, _, groups = window
    value, sizes = product.weight.meta["val"], [*x.meta["val"].shape]
    if (
        transposed
        or len(sizes) != 4
        or not all(isinstance(size, int) for size in sizes)
        or not (form == "channels_last" or _is_one_pixel(x, value))
        or binary not in ("none", "add")
        or value.dtype not in cached_primitives.TYPES
    ):
        return None
    out = sides(sizes[2:], value.shape[2:], stride, padding, dilation)
    window_sizes: Any = (value.shape[2:], out, stride, padding, dilation)
    operands = bias is not None, addend is not None
    geometry = Geometry(
        *(
            cached_primitives.TYPES[value.dtype],
            *sizes,
            len(value),
            *map(tuple, window_sizes),
            groups,
            *operands,
        )
    )
    if why_not() is not None or not _is_faster(geometry, value.dtype):
        return None
    try:
        tag, size = cached_primitives.layout(geometry, unary, scalars)
    except cached_primitives.KeptError:  # no kernel but the slow reference
        return None
    size //= value.element_size()
    numbers: Any = geometry.flat()
    return Product(
        cached_primitives.KEPT_CONV,
        product.weight,
        (size,),
        lambda packed: (x, packed, bias, addend, numbers, unary, scalars, tag),
        lambda g: g.call_function(
            cached_primitives.KEPT_WEIGHT, (product.weight, groups, tag, size)
        ),
        strides=(1,),
    )


def _is_one_pixel(x: Any, weight: torch.Tensor) -> bool:
    """Return whether image and kernel are 1 x 1, as in a gate: all memory formats are equal."""
    return bool(math.prod((*x.meta["val"].shape[2:], *weight.shape[2:])) == 1)


def _is_faster(geometry: Geometry, dtype: torch.dtype) -> bool:
    """Return whether a cached primitive is faster for a convolution of this kind and size."""
    onednn: Any = torch.backends.mkldnn
    if dtype == torch.float32 and onednn.conv.fp32_precision not in ("none", "ieee"):
        return False  # torch may round its inputs then, and multiplies faster
    most = FASTER.get((architecture(), dtype), NOWHERE)
    alone = geometry.groups == geometry.channels
    kind = most.dense if geometry.groups == 1 else most.depthwise if alone else most.grouped
    pixels = geometry.batch * math.prod(geometry.out)
    fits = not geometry.added or pixels * geometry.out_channels * dtype.itemsize <= most.added
    return fits and pixels * math.prod(geometry.weight) <= kind
