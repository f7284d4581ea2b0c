"""Convolutions of scaled images by the kernel alone, held against fp64. By the interpreter too."""

import itertools
import json
import random

import torch
import triton
from rendered import source

from ipex_inductor.templates import scaled
from ipex_inductor.templates.gpu import _module

# Images, their pixels, columns and terms: ones, primes, tails, blocks of one, two and many images.
SIZES = [
    *((1, 1, 1, 1), (2, 64, 16, 32), (3, 49, 40, 72), (5, 7, 17, 33), (1, 97, 61, 131)),
    *((2, 65, 130, 64), (130, 1, 24, 96), (4, 196, 8, 5), (9, 15, 33, 200), (2, 31, 300, 17)),
    *((1, 3, 7, 4096), (2, 37, 5, 9000)),
]
_draw = random.Random(0)
SIZES += [
    (_draw.randint(1, 9), _draw.randint(1, 200), _draw.randint(1, 140), _draw.randint(1, 300))
    for _ in range(30)
]
SMALL = scaled.Tile(32, 32, 32, 4, 2)
CASES = [*itertools.product(SIZES, (False, True))]
# With a bias or without, in turns; on a GPU both, and all of them.
INTERPRETED = {"float32": CASES[:24:2][::2] + CASES[1:24:2][1::2], "float16": CASES[:6]}
# Sums in fp32, whose one factor is rounded once more as torch rounds it, and one rounding.
CLOSE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
# In channels of their own that nobody else's weights read.
ODD = (float("inf"), -float("inf"), float("nan"))


def error(sizes, biased, dtype, tile=SMALL, device="cpu", odd=()):
    """The largest, in parts of the largest exact value; the result lies in NaN before.

    Of what is finite; infinities and NaN are where they should be.
    """
    images, pixels, columns, terms = sizes
    rows = images * pixels
    torch.manual_seed(rows)
    x, scale, weight, bias = (
        torch.randn(*size).div(divisor).to(device, getattr(torch, dtype))
        for size, divisor in (
            ((rows, terms), 1),
            ((images, terms), 1),
            ((columns, terms), terms**0.5),
            ((columns,), 1),
        )
    )
    if odd:
        weight, scale = weight.abs(), scale.abs()
        x[: len(odd), 0] = torch.tensor(odd)
    # Rounded as torch's product is.
    product = x * scale.repeat_interleave(pixels, 0)
    wanted = product.double() @ weight.double().t() + (bias.double() if biased else 0)
    constants = scaled.constants(images, pixels, columns, terms, biased, tile)
    text = source(scaled.SOURCE, constants | {"ALLOW_TF32": False}, columns, epilogue=False)
    kernel = _module(text)["kernel"]
    out = torch.full(wanted.shape, float("nan"), dtype=x.dtype, device=device)
    options = {}
    if device != "cpu":
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    kernel[(constants["PROGRAMS"],)](x, scale, weight, bias, out, out, **options)
    finite = wanted.isfinite()
    torch.testing.assert_close(out[~finite].double(), wanted[~finite], equal_nan=True)
    return float((out.double() - wanted)[finite].abs().max() / wanted[finite].abs().max())


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret
    found = {d: [error(*case, d) for case in cases] for d, cases in INTERPRETED.items()}
    found["odd"] = [error(SIZES[2], biased, "float32", odd=ODD) for biased in (False, True)]
    print(json.dumps(found))
