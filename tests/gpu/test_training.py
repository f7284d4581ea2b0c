"""Whole models in training under autocast: gradients against fp64, and the rules that fired."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# How many images or texts, the library it is of, and what has to stay fused.
NORMS = {"channel-tiles", "max-pool", "moments", "relu-mask"}
MODELS = {
    "resnet50": (16, "torchvision", NORMS | {"foreach"}),
    "bert": (4, "transformers", {"constant-mask", "foreach"}),
    "gpt2-medium": (1, "transformers", {"constant-mask", "foreach"}),
}


@pytest.mark.parametrize("model", MODELS)
def test_gradients(model):
    """No farther off than eager's, with what `train.py` allows: it holds them against fp64."""
    batch, library, rules = MODELS[model]
    pytest.importorskip(library, reason=f"the model is {library}'s")
    command = [sys.executable, "train.py", "--check", "--peers", "eager", "ours"]
    command += ["--models", model, "--batch", str(batch)]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()[1:]]
    (ours,) = (row for row in rows if row["peer"] == "ours")
    assert rules <= {*ours["fired"]}
