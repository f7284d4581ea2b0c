"""The kernel that updates FP8 scales: compiled for GPUs that are not here, and interpreted."""

import os
import subprocess
import sys

import pytest

from ipex_inductor.target.device import find_target
from ipex_inductor.templates.build.gpu import binary
from ipex_inductor.templates.triton import fp8_scaling

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_it_compiles_where_there_is_no_gpu(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    compiled = binary(
        fp8_scaling.SOURCE,
        "update",
        find_target(gpu),
        (("template", "fp8_scaling"),),
        fp8_scaling.SIGNATURE,
        fp8_scaling.CONSTANTS,
        {"num_warps": fp8_scaling.WARPS, "enable_fp_fusion": False},
    )
    assert compiled.blob[:4] == b"\x7fELF"


# Histories of one tile and of several, of columns in one program and in several, with all that a
# scale must not follow. NaN of another payload is the same number.
INTERPRETED = """
import itertools, math, sys
import numpy, torch
from ipex_inductor.ops.quant import fp8_states
from ipex_inductor.templates.build import gpu
from ipex_inductor.templates.triton import fp8_scaling

numpy.seterr(all="ignore")
kernel = gpu._module(fp8_scaling.SOURCE)["update"]
special = torch.tensor([0.0, math.inf, math.nan, 1e-44, 3e38, 1e-38, 448.0])
constants = {**fp8_scaling.CONSTANTS, "ROWS": 8, "COLUMNS": 4}
torch.manual_seed(0)
count = 0
for length, tensors, recent, margin, interval in itertools.product(
    map(int, sys.argv[1:]), (1, 7), (False, True), (0, 3, -2), (1, 3)
):
    settings = fp8_states.Settings(margin, recent, interval, length, "")
    state = torch.rand(3 + length, tensors) * 100
    state[fp8_states.COUNT] = torch.arange(tensors) % interval
    drawn = torch.rand(length, tensors) < 0.2
    values = special[torch.randint(len(special), (length, tensors))]
    state[3:] = torch.where(drawn, values, state[3:])
    state[3:, 0] = 0
    for _ in range(3):
        want = state.clone()
        want_scales = fp8_states.update_by_torch(want, 57344.0, settings)
        scales = torch.full((2, tensors, fp8_states.SPACE), -1.0)
        numbers = fp8_scaling.numbers(57344.0, settings, length, tensors)
        kernel[(-(-tensors // 4),)](state, scales, *numbers, **constants)
        for got, wanted in ((state, want), (scales, want_scales)):
            assert torch.equal(got.nan_to_num(-1), wanted.nan_to_num(-1)), (settings, tensors)
            assert torch.equal(got.isnan(), wanted.isnan())
        state[fp8_states.HISTORY] = torch.rand(tensors)
        count += 1
print(count, "updates are equal")
"""


# Of histories that fill a block or not: each length is 72 updates.
LENGTHS = [("1", "9"), pytest.param(("1", "2", "8", "9", "21"), marks=pytest.mark.slow)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=["some", "all"])
def test_interpreted_it_equals_the_ops_of_torch(lengths):
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED, *lengths]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stdout.endswith(f"{72 * len(lengths)} updates are equal\n"), result.stderr[-3000:]
