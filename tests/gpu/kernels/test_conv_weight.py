"""The gradient of a stem's weight on a GPU: every tile, alone and through Inductor."""

import pytest
import torch

from ipex_inductor.autotune import measure
from ipex_inductor.autotune.measure import Candidate
from ipex_inductor.lowerings.problem import settings, shapes
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import compiling, tuner
from ipex_inductor.target import device
from ipex_inductor.templates.triton.conv_small_channel_weight import NAME, TILES
from support.cases.conv_weight_cases import CASES, RANDOM, SHAPES, case
from support.rendered_templates import error_of_weight

pytestmark = pytest.mark.gpu

# Sums of factors as they are: only their order is another, whatever the dtype.
CUT_OFF = 1e-4  # of the largest: a product that is missing is thirty times as much
HALVES = ("bfloat16", "float16")
LARGER = [
    ([8, 3, 64, 64], [64, 3, 7, 7], 2, 3),
    ([4, 3, 61, 67], [64, 3, 7, 7], 2, 3),
    ([4, 3, 64, 64], [40, 3, 3, 3], 2, 1),
    ([4, 1, 33, 31], [120, 1, 5, 5], 1, 2),
    ([4, 4, 64, 64], [128, 4, 4, 4], 4, 0),
    ([2, 3, 64, 64], [200, 3, 16, 16], 16, 0),
]


def tiles_of(out_channels):
    width = min(128, max(16, 1 << (out_channels - 1).bit_length()))
    return [tile for tile in TILES if width == tile.BLOCK_N]


EVERY = [
    case(*shape, tile=[*vars(tile).values()], warps=tile.num_warps, dtype=dtype, last=last)
    | {"steps": steps}
    for shape in LARGER
    for tile in tiles_of(shape[1][0])
    for dtype, last, steps in (("bfloat16", True, 7), ("float16", False, 1), ("float16", True, 64))
]
SMALL = [each | {"dtype": "bfloat16"} for each in CASES[: 2 * len(SHAPES)]]
BESIDE = [each | {"dtype": dtype} for each in CASES if "planted" in each for dtype in HALVES]


@pytest.mark.parametrize("number", range(len(EVERY) + len(SMALL) + len(BESIDE)))
def test_values(number):
    """Into memory full of NaN, with what is no number beside windows."""
    check([*EVERY, *SMALL, *BESIDE][number])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RANDOM)))
def test_values_of_drawn_sizes(number):
    for dtype in HALVES:
        check(RANDOM[number] | {"dtype": dtype})


def check(each):
    # Tensor cores cut sums off where others round: up to 500 times, one after the other.
    assert error_of_weight(each, "cuda") <= CUT_OFF, each


AROUND = "dilation=1,1 groups=1"
PROBLEMS = [
    f"16x64x112x112:L 16x3x224x224:L 64x3x7x7:L stride=2,2 padding=3,3 {AROUND}",
    f"8x64x56x56:L 8x3x112x112 64x3x7x7:L stride=2,2 padding=3,3 {AROUND}",
    f"8x32x56x56:L 8x3x112x112:L 32x3x3x3:L stride=2,2 padding=1,1 {AROUND}",
    f"8x16x56x56:L 8x3x112x112:L 16x3x3x3:L stride=2,2 padding=1,1 {AROUND}",
    f"8x128x28x28:L 8x3x112x112:L 128x3x4x4:L stride=4,4 padding=0,0 {AROUND}",
    f"8x768x14x14:L 8x3x224x224:L 768x3x16x16:L stride=16,16 padding=0,0 {AROUND}",
    f"3x61x23x29:L 3x1x23x29:L 61x1x3x3:L stride=1,1 padding=1,1 {AROUND}",
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("text", PROBLEMS)
def test_every_tile_through_inductor(text, dtype):
    """No farther off than torch's own may be, and laid out as its result is."""
    known = str(device.current("cuda")), settings.settings_of("cuda")
    (problem,) = shapes.problems([f"ipex.conv_weight_grad.default {dtype} {text}"], *known)
    trial = tuner._trial(problem, torch.device("cuda"))
    ours = [call for call in library.calls(problem) if call.name == NAME]
    assert ours
    for call in ours:
        run = compiling.compile_choice(problem, call.choice, trial.inputs)
        found = measure.verify_candidate(Candidate(call.choice, run), trial.judge, trial.inputs)
        assert isinstance(found, float), (call.choice, found.reason)
