"""Means and variances by the kernel alone, held against fp64. As a program, by the interpreter."""

import json
import sys
import traceback

import torch
import triton

from ipex_inductor.ops.pointwise.moments import SAMPLES, moments, sample_distance
from ipex_inductor.templates.build.gpu import _module
from ipex_inductor.templates.triton.moments import SOURCE, TILE, Tile, constants
from support.rendered_templates import source

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALL = (Tile(16, 16, 1, 1, 1), Tile(32, 8, 1, 2, 1), Tile(8, 64, 1, 3, 1), TILE)
# Ones, primes, tails of blocks of rows and of columns, fewer rows than are sampled.
ROWS = (1, 2, 3, 13, 16, 17, 97, 128, 257, 1031)
COLUMNS = (1, 8, 24, 61, 64, 136)
SHAPES = [(r, c) for r in ROWS for c in COLUMNS]
# A mean and what x begins as; the variance may be of one rounding in a mean and still be right.
MEANS = (0.0, 1e3, -3.0)

ROUNDING = 2.0**-24


def kernel(x, tile, parts):
    """What it writes, into memory full of NaN."""
    rows, columns = x.shape
    given = constants(rows, columns, parts, tile)
    out = torch.full((columns, 2 * parts + 1), float("nan"), device=x.device)
    run = _module(source(SOURCE, given, out.shape[1], epilogue=False))["kernel"]
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    run[(given["BLOCKS_C"] * parts,)](x, x, x, out, **options)
    return out


def most_parts(rows, tile):
    """So many that each has a block of rows, and no more than an interpreter is quick with."""
    return min(7, -(-rows // tile.BLOCK_M))


def close(partial, x, slack=64):
    """Whether variance and mean are as near as sums in fp32 may come.

    A sum of n terms in parts and blocks is off by a few roundings of the sum of their magnitudes,
    `slack` of them at most; the terms are shifted, so those of the variance are as large as itself
    and what the shift is off, squared.
    """
    exact = x.double()
    variance, mean = torch.var_mean(exact, 0, correction=0)
    samples = torch.arange(SAMPLES, device=x.device) * sample_distance(len(x))
    shift = exact[samples.clamp(max=len(x) - 1)].mean(0)
    squares = variance + (shift - mean).square()
    found, found_mean = moments(partial, len(x))
    allowed = slack * ROUNDING * squares
    off = (found.double() - variance).abs()
    assert (off <= allowed).all(), f"variance: {(off / allowed).max():.3g} of what is allowed"
    allowed = slack * ROUNDING * squares.sqrt() + 2 * ROUNDING * mean.abs()
    off = (found_mean.double() - mean).abs()
    assert (off <= allowed).all(), f"mean: {(off / allowed).max():.3g} of what is allowed"


def numbers(rows, columns, dtype, mean, device):
    return (torch.randn(rows, columns, device=device) + mean).to(dtype)


def values(device="cpu", whole=True):
    """Shapes; means, tiles and numbers of parts in turns, and dtypes if not the `whole`.

    Else every third shape, so that each number of rows and each of columns is among them, and with
    each number of columns each dtype.
    """
    torch.manual_seed(0)
    for at, (rows, columns) in enumerate(SHAPES):
        row, column = divmod(at, len(COLUMNS))
        if not whole and (row + column) % 3:
            continue
        tile = SMALL[at % len(SMALL)]
        for number, dtype in enumerate(DTYPES):
            if not whole and number != (row // 3 + column // 3) % len(DTYPES):
                continue
            x = numbers(rows, columns, dtype, MEANS[(at + number) % len(MEANS)], device)
            parts = 1 + at % most_parts(rows, tile)
            close(kernel(x, tile, parts), x)


def extremes(device="cpu"):
    """Alike where it is sampled and nowhere else, an outlier there, all alike."""
    tile = SMALL[0]
    rows = 257 if device == "cpu" else 1031  # which an interpreter is slow with
    for dtype in DTYPES:
        x = numbers(rows, 24, dtype, 1e3, device)
        x[torch.arange(SAMPLES) * sample_distance(len(x))] = 0
        close(kernel(x, tile, 5), x)
        x = numbers(rows, 24, dtype, 1.0, device)
        x[0] = 6e4
        close(kernel(x, tile, 5), x)
        partial = kernel(torch.full_like(x, 0.1), tile, 5)
        assert not moments(partial, len(x))[0].any(), "numbers alike have no variance"


def not_finite(device="cpu"):
    """Where torch's variance is NaN ours is, and where its mean is not finite ours is not."""
    for row in (0, 3, sample_distance(130), 129):  # among the samples and not
        x = numbers(130, 24, torch.float32, 1.0, device)
        x[row, 3], x[row, 4], x[row, 5], x[129, 5] = (
            *map(float, ("inf", "-inf", "inf")),
            float("-inf"),
        )
        x[row, 23] = float("nan")
        variance, mean = torch.var_mean(x, 0, correction=0)
        found, found_mean = moments(kernel(x, SMALL[0], 3), 130)
        assert variance.isnan().sum() == 4
        assert torch.equal(variance.isnan(), found.isnan())
        assert torch.equal(mean.isfinite(), found_mean.isfinite())


def reference(device="cpu"):
    """Part by part what the op's reference says."""
    for at, (rows, columns) in enumerate(SHAPES[::5]):
        tile = SMALL[at % len(SMALL)]
        x = numbers(rows, columns, torch.float32, 1.0, device)
        parts = most_parts(rows, tile)
        wanted = torch.ops.ipex.column_moments(x, parts, [*vars(tile).values()])
        torch.testing.assert_close(kernel(x, tile, parts), wanted, rtol=1e-5, atol=1e-4)


def without_last_rows():
    """A kernel that forgets the last row of all is seen."""
    from unittest.mock import patch

    wrong = SOURCE.replace("(row < ROWS)", "(row < ROWS - 1)")
    assert wrong != SOURCE
    with patch.dict(globals(), SOURCE=wrong):
        some_values()


def some_values():
    values(whole=False)


CHECKS = (some_values, extremes, not_finite, reference, without_last_rows)


def main():
    """What each of them raised, or those that are named, as JSON."""
    told = {}
    for check in [globals()[name] for name in sys.argv[1:]] or CHECKS:
        try:
            check()
            told[check.__name__] = ""
        except Exception:
            told[check.__name__] = traceback.format_exc()
    print(json.dumps(told))


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret
    main()
