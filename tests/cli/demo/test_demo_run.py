"""`ipex-inductor demo` for real: a whole run on a few layers, and whether its check sees faults."""

import copy
import itertools
import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ipex_inductor.cli import app
from ipex_inductor.cli.demo import demo, measure, models

ROOT = Path(__file__).parents[3]

MODEL = """
    import torch
    from torch import nn

    def small():
        print("a model may print")
        net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))
        return net, (torch.randn(8, 64),)

    def norm():
        return nn.Sequential(nn.LayerNorm(64), nn.GELU()), (torch.randn(8, 64),)
"""
OPTIONS = ("--dtype", "fp32", "--device", "cpu", "--seconds", "0.2", "--json")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Children find the model, and keep their temporary files in the folder returned."""
    (tmp_path / "toy.py").write_text(textwrap.dedent(MODEL))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for switch in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
        monkeypatch.delenv(switch, raising=False)  # conftest.py turns off what is measured here
    return temporary


def check(stdout, names, temporary):
    """All rows, by name: right, timed, and found by a second process."""
    (model,) = json.loads(stdout)["models"]
    rows = {row["name"]: row for row in model["rows"]}
    assert {*rows} == {*names}
    assert model["inputs"] == ["8x64"]
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "ok")
    assert {row["reason"] for row in rows.values()} == {""}
    for row in rows.values():
        assert 0 < row["min_ms"] <= row["median_ms"]
        assert 0 < row["error"] <= row["limit"] < 1e-4
    for name in {"inductor", "ipex"} & {*names}:
        assert rows[name]["aot_hits"] == 1, "the second process found nothing in the first's folder"
        assert rows[name]["warm_s"] < rows[name]["cold_s"]
    assert list(temporary.iterdir()) == [], "temporary caches were left behind"
    return rows


COMMAND = ["demo", *OPTIONS, "--model"]


@pytest.mark.slow  # five processes and three cold caches; the next test has one of each kind
@pytest.mark.usefixtures("instructions_known")
def test_small_model_end_to_end(folders):
    command = [sys.executable, "-m", "ipex_inductor", *COMMAND, "toy:small"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = check(done.stdout, ["eager", "inductor", "frozen", "ipex"], folders)
    assert rows["frozen"]["aot_hits"] == 0, "freezing bypasses the caches"


@pytest.mark.slow
@pytest.mark.usefixtures("instructions_known")
def test_small_model_by_eager_and_ipex(folders, monkeypatch):
    two = tuple(c for c in demo.CONTESTANTS if c.name in ("eager", "ipex"))
    monkeypatch.setattr(demo, "CONTESTANTS", two)
    monkeypatch.setattr(demo, "YARDSTICK", "eager")
    # A header of Inductor's is compiled for a kernel or two; the test above has it. It also has
    # linear layers, for which our kernels are built.
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    done = CliRunner().invoke(app, [*COMMAND, "toy:norm"])
    assert done.exit_code == 0, done.output
    check(done.stdout, ["eager", "ipex"], folders)


@pytest.fixture(scope="module")
def resnet():
    pytest.importorskip("transformers")
    model, inputs = models.load("resnet50", "bf16", 1, "cpu")
    with torch.no_grad():
        truth = measure._first_tensor(measure.fp64_output(model, inputs))
        return model, inputs, model(*inputs).logits, truth


LOST = list(itertools.product([0, 1, 26, -1], ["running_mean", "bias"]))
EACH = {(0, "running_mean"), (1, "bias"), (26, "running_mean"), (-1, "bias")}


@pytest.mark.parametrize(
    ("layer", "lost"),
    [pytest.param(*how, marks=[] if how in EACH else [pytest.mark.slow]) for how in LOST],
)
@pytest.mark.sampled
def test_one_wrong_batch_norm_of_resnet_is_seen(resnet, layer, lost):
    model, inputs, eager, truth = resnet
    broken = copy.deepcopy(model)
    norms = [m for m in broken.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    getattr(norms[layer], lost).data.zero_()
    with torch.no_grad():
        outputs = {"eager": [eager], "broken": [broken(*inputs).logits]}
    verdicts = measure.check(outputs, truth)
    assert {name: v["correct"] for name, v in verdicts.items()} == {"eager": True, "broken": False}
