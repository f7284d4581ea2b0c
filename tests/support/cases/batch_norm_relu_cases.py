"""Convolutions behind a norm and a relu by the kernel alone, held against fp64. As a program, by
the interpreter."""

import json
import random
import sys

import torch
import triton

from ipex_inductor.templates.build.gpu import _module
from ipex_inductor.templates.triton import batch_norm_relu
from support.rendered_templates import source

# Rows, columns, channels of the first part and of each behind it, how many of those: ones, primes,
# tails of blocks, parts that fill a step and that do not, as many as a step takes and one more.
SIZES = [
    *((1, 1, 8, 8, 1), (64, 32, 64, 32, 2), (130, 72, 96, 32, 3), (97, 61, 40, 24, 5)),
    *((65, 16, 8, 16, 9), (33, 130, 72, 64, 2), (257, 65, 200, 0, 0), (2, 131, 136, 48, 4)),
    *((31, 40, 16, 8, 11), (49, 128, 256, 32, 24), (3, 300, 1024, 40, 1), (5, 24, 64, 0, 0)),
]
_draw = random.Random(0)
SIZES += [
    (
        _draw.randint(1, 300),
        _draw.randint(1, 200),
        8 * _draw.randint(1, 40),
        8 * _draw.randint(1, 8),
        _draw.randint(1, 12),
    )
    for _ in range(30)
]
SMALL = batch_norm_relu.Tile(32, 32, 64, 4, 2), batch_norm_relu.Tile(64, 16, 32, 4, 3)
CASES = [(sizes, n % 2 == 0) for n, sizes in enumerate(SIZES)]  # with a bias or without, in turns
INTERPRETED = {"float32": CASES[:13], "float16": CASES[1:11:2]}
# Sums in fp32 of what is rounded as torch rounds it, and one rounding.
CLOSE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
ODD = (float("inf"), -float("inf"), float("nan"))


def takes(tile, sizes):
    """Whether a step of the tile takes a whole part."""
    return batch_norm_relu.lane(sizes[3]) <= tile.BLOCK_K


def tiles_of(number, sizes, whole):
    """Return the tiles that take a case; one of them, in turns, if not the `whole`."""
    found = [tile for tile in SMALL if takes(tile, sizes)]
    return found if whole else [found[number % len(found)]]


def error(sizes, biased, dtype, tile=SMALL[0], device="cpu", odd=()):
    """The largest, in parts of the largest exact value; the result lies in NaN before.

    Of what is finite; infinities and NaN are where they should be.
    """
    rows, columns, first, each, parts = sizes
    terms = first + each * parts
    torch.manual_seed(rows)
    kind = getattr(torch, dtype)
    given = [torch.randn(rows, n).to(device, kind) for n in (first, *[each] * parts)]
    weight = torch.randn(columns, terms).div(terms**0.5).to(device, kind)
    bias = torch.randn(columns).to(device, kind)
    scale, shift = torch.rand(terms) + 0.5, torch.randn(terms) / 2
    if odd:  # in the first and the last part, of one sign, so that infinities meet no others
        weight = weight.abs()
        given[0][: len(odd), 0] = torch.tensor(odd)
        given[-1][len(odd) : 2 * len(odd), -1] = torch.tensor(odd)
    affine = torch.stack([scale, shift]).to(device)
    made = torch.relu(torch.cat(given, 1).float() * affine[0] + affine[1]).to(kind)
    wanted = made.double() @ weight.double().t() + (bias.double() if biased else 0)
    constants = batch_norm_relu.constants(rows, columns, first, each, parts, biased, tile)
    text = source(
        batch_norm_relu.SOURCE, constants | {"ALLOW_TF32": False}, columns, epilogue=False
    )
    out = torch.full(wanted.shape, float("nan"), dtype=kind, device=device)
    options = {}
    if device != "cpu":
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    kernel = _module(text)["kernel"][(constants["PROGRAMS"],)]
    kernel(given[0], affine, weight, *given[1:], bias, out, out, **options)
    finite = wanted.isfinite()
    torch.testing.assert_close(out[~finite].double(), wanted[~finite], equal_nan=True)
    return float((out.double() - wanted)[finite].abs().max() / wanted[finite].abs().max())


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret
    found = {
        d: [
            error(*case, d, tile)
            for number, case in enumerate(cases)
            for tile in tiles_of(number, case[0], sys.argv[1] == "all")
        ]
        for d, cases in INTERPRETED.items()
    }
    found["odd"] = [error(SIZES[3], biased, "float32", odd=ODD) for biased in (False, True)]
    print(json.dumps(found))
