"""Gated pairs by the kernel alone, held against fp64. As a program, by the interpreter."""

import itertools
import json
import sys

import torch
import torch.nn.functional as F
import triton

from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.templates.build.gpu import _module
from ipex_inductor.templates.triton import glu
from support.rendered_templates import source

# Rows, columns, terms: ones, primes, tails of blocks, whole blocks, many terms.
SIZES = (
    *((130, 72, 96), (64, 128, 64), (1, 1, 8), (257, 65, 200), (97, 61, 1000), (2, 131, 24)),
    *((65, 64, 32), (33, 8, 4096)),
)
SMALL = glu.Tile(64, 64, 32, 4, 2)
CASES = [*itertools.product(SIZES, glu.UNARY, (False, True))]
DTYPES = ("float32", "float16")
# By how many are asked for; of some each size, activation and bias is one.
INTERPRETED = {"some": CASES[::3], "all": CASES}
# Sums in fp32 and a GELU that is 2e-5 of its value off; then one rounding.
CLOSE = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 4e-3}


# Into rows of their own, whose factors are positive, so that infinities meet no others.
ODD = (float("inf"), -float("inf"), float("nan"))


def error(sizes, unary, biased, dtype, tile=SMALL, device="cpu", odd=()):
    """The largest, in parts of the largest exact value; the result lies in NaN before.

    Of what is finite; infinities and NaN are where they should be.
    """
    rows, columns, terms = sizes
    torch.manual_seed(rows)
    x, gate, weight, gate_bias, bias = (
        torch.randn(*size).div(divisor).to(device, getattr(torch, dtype))
        for size, divisor in (
            ((rows, terms), 1),
            *[((columns, terms), terms**0.5)] * 2,
            *[((columns,), 1)] * 2,
        )
    )
    if odd:
        gate, weight = gate.abs(), weight.abs()
        x[: len(odd), 0] = torch.tensor(odd)
    opening, opened = (
        F.linear(x.double(), factor.double(), added.double() if biased else None)
        for factor, added in ((gate, gate_bias), (weight, bias))
    )
    wanted = UNARY[unary].fn(opening) * opened
    constants = glu.constants(*sizes, biased, unary, tile, 3) | {"ALLOW_TF32": False}
    kernel = _module(source(glu.SOURCE, constants, columns, epilogue=False))["kernel"]
    out = torch.full(wanted.shape, float("nan"), dtype=x.dtype, device=device)
    options = {}
    if device != "cpu":  # for what describes a tensor to the copy engine
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    biases = (gate_bias, bias) if biased else (bias,)
    kernel[(constants["PROGRAMS"],)](x, gate, weight, *biases, out, out, **options)
    finite = wanted.isfinite()
    torch.testing.assert_close(out[~finite].double(), wanted[~finite], equal_nan=True)
    return float((out.double() - wanted)[finite].abs().max() / wanted[finite].abs().max())


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret
    found = {d: [error(*case, d) for case in INTERPRETED[sys.argv[1]]] for d in DTYPES}
    found["odd"] = [error(SIZES[0], u, True, DTYPES[0], odd=ODD) for u in glu.UNARY]
    print(json.dumps(found))
