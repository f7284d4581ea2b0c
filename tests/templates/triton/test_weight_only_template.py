"""The template of GEMMs on quantized weights without a GPU: values interpreted, and binaries."""

import json
import os
import re
import subprocess
import sys

import pytest

from ipex_inductor.templates.triton import weight_only
from ipex_inductor.templates.triton.weight_only import FEW, MANY, SOME, TILES, Tile
from support import weight_only_rendered
from support.rendered_templates import usage, within_limits
from support.weight_only_rendered import case_of, compile_case

pytestmark = pytest.mark.unit

# Sums in fp32: some roundings of 2^-24 for each of up to 576 elements. Weights that are scaled
# before are rounded to fp16 once more, by at most 2^-11.
CLOSE, ROUNDED = 2.0**-21, 2.0**-11
SMALL = (8, 32, 128, 2, 2, 5)
HALF_DEEP = (8, 32, 64, 2, 2, 5)
F16 = {"dtype": "float16"}
# Triton's interpreter multiplies no bf16; `tests/gpu/test_weight_only.py` does.
CASES = {
    "int4, tails of M, N and K": case_of("int4", (3, 40, 576), 128, SMALL, **F16),
    "int4 with zero points": case_of("int4", (3, 40, 576), 64, HALF_DEEP, zeroed=True, **F16),
    "int4 in rows": case_of("int4", (1, 40, 576), 576, SMALL, scales="float32", zeroed=True, **F16),
    "int8 in rows": case_of("int8", (3, 40, 576), 576, SMALL, scales="float32", **F16),
    "int8 with zero points": case_of("int8", (3, 40, 576), 64, HALF_DEEP, zeroed=True, **F16),
    "int8, wide scales": case_of(
        "int8", (3, 40, 512), 128, SMALL, scales="float32", zeroed=True, **F16
    ),
    "nf4": case_of("nf4", (3, 40, 512), 64, HALF_DEEP, **F16),
    "fp8 in rows": case_of("fp8", (3, 40, 576), 576, SMALL, scales="float32", **F16),
    "fp8, scales in bf16": case_of("fp8", (3, 40, 576), 128, SMALL, scales="bfloat16", **F16),
    "integers with scales of groups": case_of(
        "int4", (3, 40, 576), 128, SMALL, zeroed=True, stepped=True, **F16
    ),
    "integers with scales of rows": case_of(
        "int8", (3, 40, 576), 576, SMALL, scales="float32", stepped=True, **F16
    ),
    "two steps a turn, with a tail": case_of(
        "int4", (3, 40, 832), 128, (*SMALL[:5], 4, 2), zeroed=True, **F16
    ),
    "four steps a turn": case_of("nf4", (3, 40, 576), 64, (8, 32, 64, 1, 2, 4, 4), **F16),
    "even columns of x first": case_of(
        "int4", (70, 40, 512), 128, (64, 64, 128, 2, 4, 4), zeroed=True, **F16
    ),
}
SCALED_BEFORE = {
    "groups of 32": case_of("int4", (3, 40, 576), 32, SMALL, zeroed=True, **F16),
    "groups of 32, wide": case_of(
        "int8", (3, 40, 512), 32, SMALL, scales="float32", zeroed=True, **F16
    ),
    "groups of 64": case_of("nf4", (3, 40, 576), 64, SMALL, **F16),
}


def interpret(cases, folder):
    """Return the errors of cases, by Triton's interpreter in another process."""
    file = folder / "cases.json"
    file.write_text(json.dumps([*cases.values()]))
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(folder)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, weight_only_rendered.__file__, str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-300:]} {done.stderr[-2000:]}"
    errors = (float(line.split()[1]) for line in done.stdout.splitlines())
    return dict(zip(cases, errors, strict=True))


def test_values_by_the_interpreter(tmp_path):
    """Against fp64, into memory full of NaN."""
    errors = interpret(CASES | SCALED_BEFORE, tmp_path)
    wrong = {n: e for n, e in errors.items() if not e <= (CLOSE if n in CASES else ROUNDED)}
    assert wrong == {}


# A tile of each kind, and for each format what its decoding is in PTX.
COMPILED = {
    "int4": ("int4", 128, False, FEW, "prmt"),
    "int4 with zero points": ("int4", 64, True, FEW, "fma.rn.bf16x2"),
    "int4 in groups of 32": ("int4", 32, True, FEW, "prmt"),
    "int8": ("int8", 4096, False, FEW, "prmt"),
    "nf4": ("nf4", 64, False, FEW, "lop3"),
    "fp8": ("fp8", 4096, False, FEW, "e4m3x2"),
    "int4, some rows": ("int4", 128, True, SOME, "wgmma"),
    "fp8, many rows": ("fp8", 4096, False, MANY, "wgmma"),
}


def case_for(name, tile):
    weight_dtype, group, zeroed, *_ = COMPILED[name]
    scales = "float32" if group == 4096 else "float16"
    sizes = (tile.BLOCK_M, 4096, 4096)
    return case_of(weight_dtype, sizes, group, [*vars(tile).values()], "bfloat16", scales, zeroed)


def tile_for(name):
    _, group, _, tiles, _ = COMPILED[name]
    return next(t for t in tiles if group % t.BLOCK_K == 0 or group == 32)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "int4" else pytest.mark.slow) for n in COMPILED],
)
def test_it_compiles_for_an_h200(name):
    """Without spills; weights reach registers by loads of 16 bytes through shared memory."""
    made = compile_case(case_for(name, tile_for(name)), "h200")
    within_limits(made, "h200")
    assert COMPILED[name][-1] in made.asm["ptx"]
    assert re.search(r"cp\.async\.\w+\.shared\.global.*0x10", made.asm["ptx"])


@pytest.mark.slow
@pytest.mark.parametrize("tile", [t for t in TILES if t.parts == 1], ids=str)
def test_each_tile_compiles_for_an_h200(tile):
    made = compile_case(case_for("int4", tile), "h200")
    within_limits(made, "h200")
    registers, _ = usage(made)
    assert registers <= 255


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["a100-80gb", "b200"])
def test_other_gpus(gpu):
    within_limits(compile_case(case_for("int4", FEW[1]), gpu), gpu)


SIZES = [(4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (1000, 576), (40, 64)]


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 64, 65, 256])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_tile_is_chosen_for_all_sizes(rows, size):
    columns, depth = size
    for group in (32, 64, 128, depth):
        tile = weight_only.choose_tile(rows, columns, depth, group, 132, nibbles=rows % 2 == 1)
        assert weight_only.fits(tile, rows, depth, group)
        assert rows <= tile.BLOCK_M or tile.BLOCK_M == weight_only.MOST_BLOCK


def test_large_weights_fill_an_h200():
    """At least six programs a multiprocessor for one row, and no more parts than that takes."""
    chosen = {
        n: weight_only.choose_tile(1, n, 4096, 128, 132, nibbles=True)
        for n in (4096, 14336, 128256)
    }
    assert chosen == {
        4096: Tile(8, 32, 128, 8, 2, 4, 2),
        14336: Tile(8, 64, 128, 4, 2, 4, 2),
        128256: Tile(8, 64, 128, 1, 2, 4, 2),
    }


@pytest.mark.parametrize(
    ("nibbles", "group", "unroll"),
    [(True, 32, 2), (True, 64, 4), (True, 128, 2), (True, 4096, 2), (False, 128, 1)],
)
def test_a_turn_reads_pieces_of_128_bytes(nibbles, group, unroll):
    assert weight_only.choose_tile(1, 4096, 4096, group, 132, nibbles).unroll == unroll


@pytest.mark.parametrize(("group", "fits"), [(32, True), (64, True), (192, True), (48, False)])
def test_groups(group, fits):
    assert (weight_only.why_not_groups(1024, group) is None) == fits
    assert any(weight_only.fits(t, 1, 1024, group) for t in TILES) == fits
