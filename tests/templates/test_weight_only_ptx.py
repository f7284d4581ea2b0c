"""PTX that decodes weights: every byte, by an interpreter of its instructions."""

import pytest
import torch

from ipex_inductor.ops.quant.weight_only import INTEGERS, NF4, NIBBLES
from ipex_inductor.ops.quant.weight_only_rows import BASES
from ipex_inductor.templates.weight_only_ptx import PAIR, instructions
from support.ptx import run, to_bits, to_float

pytestmark = pytest.mark.unit

DTYPES = ("bfloat16", "float16")
ZEROS = {"int4": (0, 7, 16), "int8": (-128, 0, 5, 127)}


def decode(name, dtype, code, zero=None):
    """Return the four elements, or eight of nibbles, of four bytes."""
    base = BASES.get((name, getattr(torch, dtype)), 0)
    offset = [] if zero is None else [to_bits(float(-(zero + base)), PAIR[dtype]) * 0x10001] * 2
    results = 4 if name in NIBBLES else 2
    words = run(instructions(name, dtype, zero is not None), results, [code, *offset])
    return [to_float(w >> s & 0xFFFF, PAIR[dtype]) for w in words for s in (0, 16)]


def rounded(level, dtype):
    return float(torch.tensor(level).to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4", "int8", "nf4"])
def test_every_byte(name, dtype):
    """Four different bytes at a time; even elements first, then odd ones."""
    for first in range(0, 256, 4):
        bytes_ = [first, 255 - first, (first * 7 + 3) % 256, first + 1]
        code = int.from_bytes(bytes(bytes_), "little")
        for zero in (None, *ZEROS.get(name, ())):
            found = decode(name, dtype, code, zero)
            if name == "int8":
                wanted = [b - 256 * (b > 127) - (zero or 0) for b in bytes_]
            else:
                nibbles = [b & 15 for b in bytes_] + [b >> 4 for b in bytes_]
                shift = 8 if zero is None else zero
                wanted = [rounded(NF4[n], dtype) if name == "nf4" else n - shift for n in nibbles]
            assert found == wanted, (bytes_, zero)


def test_zero_points_are_of_integers():
    assert {*ZEROS} == {*INTEGERS}
