"""Transposed matrices by the kernel alone. As a program, by Triton's interpreter."""

import json

import torch
import triton

from ipex_inductor.templates.build.gpu import _module
from ipex_inductor.templates.triton import transpose
from support.rendered_templates import source

# Whole blocks, tails of blocks on either side, less than a block, one row or column.
SIZES = ((128, 64), (130, 72), (5, 300), (16, 16), (1, 40), (40, 1), (97, 61))
SMALL = transpose.Tile(32, 32, 4, 1)


def is_transposed(sizes, dtype):
    """Whether the result, which lies in memory of nines before, is the transpose."""
    rows, columns = sizes
    x = torch.arange(rows * columns).remainder(120).to(getattr(torch, dtype)).view(rows, columns)
    constants = transpose.constants(rows, columns, SMALL)
    kernel = _module(source(transpose.SOURCE, constants, rows, epilogue=False))["kernel"]
    out = torch.full((columns, rows), 121, dtype=x.dtype)
    kernel[(constants["BLOCKS_M"] * constants["BLOCKS_C"],)](x, out, out, out)
    return torch.equal(out, x.t())


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret
    print(json.dumps([is_transposed(s, d) for s in SIZES for d in ("int8", "float32")]))
