"""Shapes that the SYCL templates are tested with, references in fp64, and how close they are."""

import torch
import torch.nn.functional as F

from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.conv.sycl import Window

# Rows (of any dimensions), terms, columns: of nets, of tiles and one beside, primes, 1, and none.
LINEAR = [
    ((8,), 64, 64), ((6,), 32, 64), ((7,), 33, 65), ((5,), 31, 63), ((1,), 1, 1), ((1,), 128, 96),
    ((2, 3), 48, 17), ((128,), 256, 128), ((13,), 11, 7), ((97,), 101, 103), ((3, 5, 7), 19, 23),
    ((16,), 512, 64), ((17,), 257, 16), ((12,), 255, 128), ((32,), 4, 200), ((2,), 1000, 3),
    ((129,), 16, 1), ((1,), 3, 257), ((64,), 96, 80), ((31,), 2, 64), ((0,), 16, 8), ((4,), 0, 5),
    ((4,), 16, 0), ((2, 0), 8, 8), ((9,), 300, 130), ((33,), 65, 129), ((11,), 512, 512),
    ((200,), 40, 40),
]  # fmt: skip
# Images [B, C, H, W], channels made, window, stride, padding, dilation.
CONV = [
    ((2, 3, 23, 29), 16, (7, 7), (2, 2), (3, 3), (1, 1)),
    ((1, 3, 20, 18), 13, (3, 3), (2, 2), (1, 1), (1, 1)),
    ((2, 64, 7, 9), 64, (1, 1), (1, 1), (0, 0), (1, 1)),
    ((1, 64, 8, 8), 64, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 96, 9, 7), 70, (3, 3), (2, 2), (1, 1), (1, 1)),
    ((2, 17, 5, 11), 13, (1, 1), (2, 2), (0, 0), (1, 1)),
    ((1, 40, 13, 6), 31, (3, 3), (1, 2), (2, 0), (2, 1)),
    ((1, 40, 13, 9), 31, (3, 3), (2, 1), (1, 2), (1, 2)),
    ((1, 130, 3, 3), 66, (1, 3), (1, 1), (0, 1), (1, 1)),
    ((3, 24, 1, 1), 5, (1, 1), (1, 1), (0, 0), (1, 1)),
    ((1, 16, 6, 6), 3, (2, 2), (2, 2), (0, 0), (1, 1)),
    ((2, 23, 4, 5), 1, (3, 1), (1, 1), (1, 0), (1, 1)),
    ((1, 64, 5, 5), 19, (1, 1), (1, 1), (1, 1), (1, 1)),
    ((1, 1, 17, 19), 5, (5, 3), (1, 2), (0, 2), (1, 1)),
    ((2, 1, 28, 28), 6, (5, 5), (1, 1), (2, 2), (1, 1)),
    ((1, 4, 13, 11), 7, (3, 5), (3, 2), (2, 1), (1, 1)),
    ((1, 2, 7, 7), 1, (7, 7), (1, 1), (0, 0), (1, 1)),
    ((1, 3, 1, 1), 3, (1, 1), (1, 1), (0, 0), (1, 1)),
    ((1, 3, 5, 130), 8, (3, 3), (1, 1), (2, 0), (1, 1)),
    ((5, 3, 2, 2), 17, (3, 3), (2, 2), (1, 1), (1, 1)),
    ((1, 31, 19, 23), 65, (3, 3), (1, 1), (2, 2), (2, 2)),
    ((1, 8, 17, 9), 33, (5, 3), (3, 1), (2, 3), (1, 3)),
    ((2, 5, 1, 1), 7, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((0, 8, 4, 4), 8, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 300, 4, 4), 40, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 12, 6, 8), 67, (2, 4), (1, 3), (1, 2), (1, 1)),
]
# Images, channels made, groups, and as above.
GROUPED = [
    ((2, 64, 9, 17), 64, 64, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 96, 12, 14), 96, 96, (3, 3), (2, 2), (1, 1), (1, 1)),
    ((2, 72, 11, 7), 72, 72, (5, 5), (1, 1), (2, 2), (1, 1)),
    ((1, 40, 15, 13), 40, 40, (5, 5), (2, 2), (2, 2), (1, 1)),
    ((1, 128, 8, 8), 128, 128, (7, 7), (1, 1), (3, 3), (1, 1)),
    ((3, 13, 7, 5), 13, 13, (3, 3), (1, 1), (0, 0), (1, 1)),
    ((1, 31, 19, 23), 31, 31, (3, 3), (1, 1), (2, 2), (2, 2)),
    ((1, 8, 17, 9), 8, 8, (5, 3), (3, 1), (2, 0), (1, 3)),
    ((2, 5, 1, 1), 5, 5, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 65, 6, 33), 65, 65, (1, 7), (1, 2), (0, 3), (1, 1)),
    ((1, 33, 33, 6), 33, 33, (7, 1), (2, 1), (3, 0), (1, 1)),
    ((2, 16, 5, 5), 16, 16, (5, 5), (1, 1), (0, 0), (1, 1)),
    ((1, 8, 6, 6), 24, 8, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 32, 7, 7), 64, 8, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 64, 5, 9), 32, 2, (3, 3), (2, 1), (1, 1), (1, 1)),
    ((1, 30, 4, 6), 20, 10, (1, 1), (1, 1), (0, 0), (1, 1)),
    ((1, 12, 9, 9), 18, 6, (5, 1), (1, 2), (2, 0), (2, 1)),
    ((1, 7, 3, 3), 7, 1, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 1, 8, 8), 4, 1, (3, 3), (1, 1), (0, 0), (1, 1)),
    ((1, 21, 5, 5), 35, 7, (2, 2), (2, 2), (1, 1), (1, 1)),
    ((4, 16, 1, 19), 16, 4, (1, 3), (1, 1), (0, 1), (1, 1)),
    ((1, 130, 3, 3), 130, 13, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((0, 8, 4, 4), 8, 8, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 48, 4, 4), 3, 3, (3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 20, 3, 11), 40, 20, (3, 5), (1, 1), (1, 2), (1, 1)),
    ((1, 2, 31, 2), 2, 2, (3, 3), (1, 1), (1, 1), (1, 1)),
]
# Dimensions before the last, and that.
NORM = [
    ((4,), 768), ((2, 3), 64), ((1,), 1), ((5,), 2), ((7,), 17), ((3,), 31), ((1,), 1024),
    ((2,), 4096), ((13,), 100), ((9,), 16), ((9,), 15), ((8, 2), 33), ((3, 5, 2), 8), ((64,), 48),
    ((1,), 3), ((2,), 257), ((6,), 511), ((6,), 513), ((4, 4), 12), ((10,), 7), ((0,), 16),
    ((2, 0), 4), ((31,), 63), ((1, 1), 129), ((2,), 5000), ((3,), 1000),
]  # fmt: skip

WORDS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
}
# Half of the distance to the next number, as a part of the number: one rounding, at the end. fp32
# results are as far as their sums are: see ADDED.
ROUNDED = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Of the sum of all terms' magnitudes: a thousand additions in fp32 (2^-24 each, errors of either
# sign), two more for the epilogue, and functions of the device that are good to 4 of its digits.
ADDED = 2.0**-20


def drawn(size, dtype, device="cpu"):
    """Numbers around 0, or small integers."""
    if dtype == torch.int8:
        return torch.randint(-128, 128, size, dtype=dtype, device=device)
    return torch.randn(size, device=device).to(dtype)


def amid_nan(x):
    """The same in rows that lie apart: what is between them is not a number, or is large."""
    whole = x.new_full(
        (*x.shape[:-1], x.shape[-1] + 5), 127 if x.dtype == torch.int8 else torch.nan
    )
    whole[..., 2:-3] = x
    return whole[..., 2:-3]


def close(found, wanted, magnitude):
    """Whether each of `found` is what rounding makes of `wanted`; `magnitude`: of the sums."""
    assert found.shape == wanted.shape
    allowed = ROUNDED[found.dtype] * wanted.abs() + ADDED * (magnitude + 1)
    # fp16 has numbers down to 2^-24 only, half of which is the most that rounding there does.
    allowed = allowed + 2.0**-25 * (found.dtype == torch.float16)
    away = (found.double() - wanted).abs()
    return bool((away <= allowed).all())  # NaN is not


def finished(sums, magnitude, binary, unary, scalars, other):
    """The epilogue in fp64, and how large what went in was."""
    beside = None if other is None else other.double()
    wanted = epilogue.apply(sums, beside, binary, unary, scalars)
    if beside is not None:
        magnitude = magnitude * beside.abs() if binary == "mul" else magnitude + beside.abs()
    return wanted, magnitude


def linear(x, weight, bias):
    """In fp64: sums and their magnitudes."""
    given = x.double(), weight.double(), None if bias is None else bias.double()
    around = [None if each is None else each.abs() for each in given]
    return F.linear(*given), F.linear(*around)


def conv(x, weight, bias, window, groups=1):
    """The same of a convolution."""
    around = (window.stride, window.padding, window.dilation, groups)
    given = x.double(), weight.double(), None if bias is None else bias.double()
    magnitudes = [None if each is None else each.abs() for each in given]
    return F.conv2d(*given, *around), F.conv2d(*magnitudes, *around)


def window(size, stride, padding, dilation):
    """As templates take it."""
    return Window(size, stride, padding, dilation)


def made_of(dtype):
    """What a product of it is written as."""
    return "bf16" if dtype == "int8" else dtype
