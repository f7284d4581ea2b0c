"""Convolutions by a oneDNN whose primitives are kept, where that library is installed.

What torch's own needs at each call for descriptors is saved, some 25 microseconds
(`benchmarks/kept.py`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ipex_inductor.ops.kept import Geometry
from ipex_inductor.ops.stem import sides
from ipex_inductor.passes.weights.packing import Product
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu import cached_primitives

ipex = torch.ops.ipex


class Most(NamedTuple):
    """The most that a call may do: behind it the 25 microseconds that are saved no longer show.

    Products of numbers; `added`: bytes of a result with an addend, where torch adds in place.
    """

    dense: float
    grouped: float
    depthwise: float  # one channel a group
    added: float


# Where it is faster, by CPU and dtype (`benchmarks/kept.py`). On AVX2 torch's newer kernels lead
# for groups of 8 channels (in bf16 on AMX too) and, in place, behind addends; descriptors take 45
# microseconds there.
FASTER: Mapping[tuple[str, torch.dtype], Most] = {
    ("x86-64:avx2", torch.float32): Most(128 << 20, 2 << 20, 8 << 20, 3 << 17),
    ("x86-64:amx", torch.bfloat16): Most(128 << 20, 1 << 20, 2 << 20, 1 << 20),
    ("x86-64:amx", torch.float32): Most(128 << 20, 8 << 20, 8 << 20, 1 << 20),
    ("x86-64:avx512_bf16", torch.bfloat16): Most(256 << 20, 32 << 20, 4 << 20, 1 << 20),
    ("x86-64:avx512_bf16", torch.float32): Most(256 << 20, 32 << 20, 4 << 20, 1 << 20),
}
NOWHERE = Most(0, 0, 0, 0)


def why_not_faster() -> str | None:
    """Why torch's are kept on this CPU, None where some are slower."""
    arch = architecture()
    measured = any(arch == name for name, _ in FASTER)
    return None if measured else f"nobody measured them on {arch}: torch's are kept"


def with_kept_primitive(product: Product, why_not: Callable[[], str | None]) -> Product | None:
    """The same convolution by that library; None where torch's oneDNN keeps it.

    `why_not` is asked of what it has here.
    """
    if product.op is not ipex.conv.default:
        return None
    x, _, bias, other, *window, binary, unary, scalars, form = product.args(product.weight)
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
    around: Any = (value.shape[2:], out, stride, padding, dilation)
    operands = bias is not None, other is not None
    geometry = Geometry(
        *(
            cached_primitives.TYPES[value.dtype],
            *sizes,
            len(value),
            *map(tuple, around),
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
        lambda packed: (x, packed, bias, other, numbers, unary, scalars, tag),
        lambda g: g.call_function(
            cached_primitives.KEPT_WEIGHT, (product.weight, groups, tag, size)
        ),
        strides=(1,),
    )


def _is_one_pixel(x: Any, weight: torch.Tensor) -> bool:
    """Whether images and window are one pixel each, as of a gate: all formats are the same."""
    return bool(math.prod((*x.meta["val"].shape[2:], *weight.shape[2:])) == 1)


def _is_faster(given: Geometry, dtype: torch.dtype) -> bool:
    """Whether it is for a convolution of this kind and size."""
    onednn: Any = torch.backends.mkldnn
    if dtype == torch.float32 and onednn.conv.fp32_precision not in ("none", "ieee"):
        return False  # torch's round their inputs, as they may, and multiply faster
    most = FASTER.get((architecture(), dtype), NOWHERE)
    alone = given.groups == given.channels
    kind = most.dense if given.groups == 1 else most.depthwise if alone else most.grouped
    pixels = given.batch * math.prod(given.out)
    fits = not given.added or pixels * given.made * dtype.itemsize <= most.added
    return fits and pixels * math.prod(given.weight) <= kind
