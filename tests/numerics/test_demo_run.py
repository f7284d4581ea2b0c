"""`ipex-inductor demo` for real: a whole run on a few layers, and whether its check sees faults."""

import copy
import itertools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from ipex_inductor.cli import demo_measure, demo_models

ROOT = Path(__file__).parents[2]

MODEL = """
    import torch
    from torch import nn

    def small():
        print("a model may print")
        net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))
        return net, (torch.randn(8, 64),)
"""
OPTIONS = ("--dtype", "fp32", "--device", "cpu", "--seconds", "0.2", "--json")


@pytest.mark.usefixtures("instructions_known")
def test_small_model_end_to_end(tmp_path):
    (tmp_path / "toy.py").write_text(textwrap.dedent(MODEL))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # a folder here has a kernel or two
    for switch in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
        env.pop(switch, None)  # conftest.py turns off the caches that are measured here
    done = subprocess.run(
        [sys.executable, "-m", "ipex_inductor", "demo", "--model", "toy:small", *OPTIONS],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (model,) = json.loads(done.stdout)["models"]
    rows = {row["name"]: row for row in model["rows"]}
    assert model["inputs"] == ["8x64"]
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "ok")
    assert {row["reason"] for row in rows.values()} == {""}
    for row in rows.values():
        assert 0 < row["min_ms"] <= row["median_ms"]
        assert 0 < row["error"] <= row["limit"] < 1e-4
    for name in ("inductor", "ipex"):
        assert rows[name]["aot_hits"] == 1, "the second process found nothing in the first's folder"
        assert rows[name]["warm_s"] < rows[name]["cold_s"]
    assert rows["frozen"]["aot_hits"] == 0, "freezing bypasses the caches"
    assert list(temporary.iterdir()) == [], "temporary caches were left behind"


@pytest.fixture(scope="module")
def resnet():
    pytest.importorskip("transformers")
    model, inputs = demo_models.load("resnet50", "bf16", 1, "cpu")
    with torch.no_grad():
        truth = demo_measure._first_tensor(demo_measure.fp64_output(model, inputs))
        return model, inputs, model(*inputs).logits, truth


LOST = list(itertools.product([0, 1, 26, -1], ["running_mean", "bias"]))
EACH = {(0, "running_mean"), (1, "bias"), (26, "running_mean"), (-1, "bias")}


@pytest.mark.parametrize(
    ("layer", "lost"),
    [pytest.param(*how, marks=[] if how in EACH else [pytest.mark.slow]) for how in LOST],
)
def test_one_wrong_batch_norm_of_resnet_is_seen(resnet, layer, lost):
    model, inputs, eager, truth = resnet
    broken = copy.deepcopy(model)
    norms = [m for m in broken.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    getattr(norms[layer], lost).data.zero_()
    with torch.no_grad():
        outputs = {"eager": [eager], "broken": [broken(*inputs).logits]}
    verdicts = demo_measure.check(outputs, truth)
    assert {name: v["correct"] for name, v in verdicts.items()} == {"eager": True, "broken": False}
