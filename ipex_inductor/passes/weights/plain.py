"""Leave small fp32 products on plain weights, where torch's kernels are faster than oneDNN's.

At each call torch's oneDNN creates descriptors, which takes some 30 microseconds, and converts
images that are not channels-last. For a small product that is most of the time.
"""

import math
from typing import Any, NamedTuple

import torch

from ipex_inductor import compat
from ipex_inductor.passes.engine.packable import Product
from ipex_inductor.target.device import architecture

NAME = "plain-products"


class Most(NamedTuple):
    """The largest product for which torch's own kernel was measured to be faster.

    Attributes:
        products: Multiplications.
        pixels: Pixels of all results, or rows of a linear layer. More pixels of few channels each
            are slower: the kernel gathers each pixel's window, and multiplies narrow matrices.
    """

    products: float
    pixels: float = math.inf


# By kind of product and memory format of a convolution's result: the largest for which all smaller
# cases of `python -m benchmarks plain_weights` were faster, alone, with an addend and with a
# ReLU, on AMX and on such a CPU restricted to AVX-512 or AVX2.
FASTER: dict[tuple[str, str], Most] = {
    ("one pixel", "contiguous"): Most(8 << 20, pixels=4096),
    ("one pixel", "channels_last"): Most(3 << 19, pixels=2048),
    ("window", "contiguous"): Most(1 << 18),
    ("window", "channels_last"): Most(1 << 20, pixels=256),
    ("linear", ""): Most(1 << 18),
}
CPUS = ("x86-64:amx", "x86-64:avx512_bf16", "x86-64:avx512", "x86-64:avx2")  # measured


def why_plain(product: Product) -> str | None:
    """Return why oneDNN's kernel on a packed weight is not used for `product`, None if it is.

    For a size that varies, its present value counts.
    """
    x, weight, bias, _, *window, _, _, _, form = product.args(product.weight)
    value = weight.meta["val"]
    sizes = compat.hints(x.meta["val"])
    if value.dtype != torch.float32 or architecture() not in CPUS or None in sizes:
        return None
    if may_round("conv" if window else "matmul"):
        return None
    if not window:
        kind, pixels = ("linear", ""), math.prod(sizes[:-1])
    elif window[3] or window[5] != 1:  # transposed, grouped
        return None
    else:
        kind = "one pixel" if math.prod(value.shape[2:]) == 1 else "window", form
        pixels = sizes[0] * math.prod(_sides(sizes[2:], value.shape[2:], *window[:3]))
    most, products = FASTER[kind], pixels * value.numel()
    if products > most.products or pixels > most.pixels:
        return None
    if window and not compat.convolves_itself(sizes, value.shape, bias is not None, *window):
        return None
    return f"torch's own kernel is faster for {products / 1e6:.2g}M multiplications in fp32"


def _sides(sizes: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[int]:
    """Return height and width, or the length, of a convolution's result.

    Args:
        sizes: Height and width, or the length, of the input.
        kernel: The kernel's sizes along these dimensions.
        stride: The stride along each dimension.
        padding: The padding at either side.
        dilation: The dilation along each dimension.
    """
    sides = zip(sizes, kernel, stride, padding, dilation, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides]


def may_round(kind: str) -> bool:
    """Return whether oneDNN may round fp32 inputs of a "conv" or "matmul", and multiply faster."""
    backend: Any = torch.backends.mkldnn
    return getattr(backend, kind).fp32_precision not in ("none", "ieee")
