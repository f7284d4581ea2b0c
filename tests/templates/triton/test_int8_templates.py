"""Triton templates of 8-bit integers without a GPU: values by the interpreter, binaries of GPUs."""

import json
import os
import subprocess
import sys

import pytest

from ipex_inductor.templates.triton import int8_boxes, int8_conv, int8_gemm, int8_streamed
from support import int8_rendered
from support.int8_rendered import CLOSE, compile_case
from support.rendered_templates import within_limits

pytestmark = pytest.mark.unit


def case_of(template, x, out, tile, window=(1, 1), stride=(1, 1), padding=(0, 0), dilation=(1, 1)):
    geometry = {"window": window, "stride": stride, "padding": padding, "dilation": dilation}
    return {"template": template, "x": x, "out": out, "tile": tile, **geometry}


A_FEW = 16  # bytes that ptxas keeps for itself, of no register
SMALL = (32, 64, 32, 4, 2)
THREE = {"window": (3, 3), "padding": (1, 1)}
ADDED = {"other": True}
CASES = {
    "a GEMM whose last blocks are not full": case_of(
        "gemm", (70, 48, 1, 1), 40, (32, 32, 32, 4, 2)
    ),
    "a GEMM in streams": case_of("streamed", (70, 48, 1, 1), 40, (32, 32, 4, 2, 1)),
    "rows of single pixels": case_of("conv", (5, 40, 1, 1), 24, (16, 64, 32, 4, 2)),
    "a 1x1 of a strided image": case_of("conv", (2, 32, 5, 5), 24, SMALL, stride=(2, 2)),
    "a 3x3 with borders": case_of("conv", (2, 40, 5, 4), 40, SMALL, **THREE),
    "a strided 3x3": case_of("conv", (1, 32, 6, 7), 24, SMALL, stride=(2, 2), **THREE),
    "a dilated 3x3": case_of(
        "conv", (1, 32, 6, 6), 24, SMALL, window=(3, 3), padding=(2, 2), dilation=(2, 2)
    ),
    "a window larger than its image": case_of(
        "conv", (1, 32, 2, 3), 24, SMALL, window=(5, 5), padding=(2, 2)
    ),
    "few channels": case_of(
        "conv", (1, 3, 9, 10), 24, SMALL, window=(7, 7), stride=(2, 2), padding=(3, 3)
    ),
    "few channels in words": case_of("conv", (1, 4, 6, 7), 24, SMALL, **THREE),
    "boxes of a 3x3": case_of("boxes", (2, 32, 6, 5), 40, (64, 64, 4, 2), **THREE),
    "a GEMM with an addend": case_of("gemm", (70, 48, 1, 1), 40, (32, 32, 32, 4, 2)) | ADDED,
    "a streamed one": case_of("streamed", (70, 48, 1, 1), 40, (32, 32, 4, 2, 1)) | ADDED,
    "a 3x3 with an addend": case_of("conv", (2, 40, 5, 4), 40, SMALL, **THREE) | ADDED,
    "boxes with an addend": case_of("boxes", (2, 32, 6, 5), 40, (64, 64, 4, 2), **THREE) | ADDED,
    "16 channels without padding": case_of(
        "conv", (1, 16, 6, 7), 24, (32, 64, 64, 4, 2), window=(4, 4)
    ),
    "boxes of a strided 3x3": case_of(
        "boxes", (1, 64, 6, 8), 24, (32, 64, 4, 2), stride=(2, 2), **THREE
    ),
}


def test_values_by_the_interpreter(tmp_path):
    """Against float64, into memory full of NaN, with a zero point that zeros do not stand for."""
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([*CASES.values()]))
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, int8_rendered.__file__, str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-300:]} {done.stderr[-2000:]}"
    errors = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert {name: e for name, e in zip(CASES, errors, strict=True) if not e <= CLOSE} == {}


RESNET = {
    "gemm": ("gemm", (401408, 256, 1, 1), 64),
    "streamed": ("streamed", (401408, 256, 1, 1), 64),
    "conv": ("conv", (128, 128, 56, 56), 128),
    "boxes": ("boxes", (128, 128, 28, 28), 128),
}
TILES = {
    "gemm": int8_gemm.TILES,
    "streamed": int8_streamed.TILES,
    "conv": int8_conv.TILES,
    "boxes": int8_boxes.TILES,
}
EACH = [(name, tile) for name, tiles in TILES.items() for tile in tiles]


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        pytest.param(
            name, tile, marks=[pytest.mark.slow] * (tile != TILES[name][0]), id=f"{name} {tile}"
        )
        for name, tile in EACH
    ],
)
def test_each_tile_compiles_for_an_h200(name, tile):
    """Within the registers of a thread and the memory of a multiprocessor, on tensor cores."""
    options = (
        {}
        if name in ("gemm", "streamed")
        else {**THREE, "stride": (2, 2) if name == "conv" else (1, 1)}
    )
    case = case_of(*RESNET[name], [*vars(tile).values()], **options) | {"programs": 132}
    made = compile_case(case, "h200")
    within_limits(made, "h200", A_FEW)
    multiplies = "wgmma" if tile.BLOCK_M >= 64 else "mma.sync"
    assert multiplies in made.asm["ptx"]


@pytest.mark.parametrize("gpu", ["a100-80gb", pytest.param("b200", marks=pytest.mark.slow)])
def test_the_gathered_tile_compiles_for_other_gpus(gpu):
    within_limits(compile_case(case_of(*RESNET["conv"], SMALL, **THREE), gpu), gpu)


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("depth", [16, 21, 32, 64, 100, 128])
@pytest.mark.parametrize("columns", [1, 16, 64, 1000])
@pytest.mark.parametrize("rows", [1, 20, 100, 10000])
def test_a_tile_is_chosen_for_all_sizes(rows, columns, depth, lines):
    tile = int8_conv.choose_tile(rows, columns, depth, lines, 132)
    assert max(16, 2 * rows) >= tile.BLOCK_M
    assert not lines or depth <= tile.BLOCK_K
