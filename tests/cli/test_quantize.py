"""`ipex-inductor quantize`: budget, files, progress, and errors before and after the work."""

import json
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from ipex_inductor import quantization
from ipex_inductor.cli import app
from support import html_check

MODULE = """
    import torch
    from torch import nn

    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.sturdy, self.fragile, self.last = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            y = self.sturdy(x).tanh()
            spread = torch.cat([y[:, :1] * 1000, y[:, 1:]], 1)
            z = self.fragile(spread)
            return self.last((z - spread[:, :1] * self.fragile.weight[:, 0]).tanh())

    def fragile():
        return Fragile(), (torch.randn(8, 16),)

    def data():
        torch.manual_seed(1)
        return [(torch.randn(8, 16), torch.zeros(8)) for _ in range(3)]

    def generator():
        return (x for x, _ in data())

    def tensor():
        return data()[0][0]

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a, b):
            return self.linear(a) + b

    def pair():
        return Pair(), (torch.randn(2, 4), torch.randn(2, 4))

    def two():
        return [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(3)]

    def two_with_labels():
        return [(inputs, torch.zeros(2)) for inputs in two()]

    def named():
        return [{"a": a, "b": b} for a, b in two()]

    def agreement(model):
        exact, inputs = Fragile().eval(), torch.cat([x for x, _ in data()])
        assert not torch.is_grad_enabled()
        return 1 - (model(inputs) - exact(inputs)).norm() / exact(inputs).norm()

    def text(model):
        return "good"

    def nan(model):
        return float("nan")

    def number():
        return 7

    def none():
        return []
"""


@pytest.fixture(autouse=True)
def nets(tmp_path, monkeypatch):
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "80")
    return name


def run(nets, *args, data="data"):
    arguments = (f"{nets}:fragile", "--data", f"{nets}:{data}", *args)
    return CliRunner().invoke(app, ["quantize", *arguments])


def test_layers_are_left_in_floating_point_until_the_accuracy_is_in_budget(nets):
    args = ("--accuracy", f"{nets}:agreement", "--budget-accuracy", "0.05", "--json")
    done = run(nets, *args)
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["floating"] == ["fragile:linear:0"]
    assert facts["baseline"] == 1
    assert facts["baseline"] - facts["accuracy"] <= 0.05
    layers = {layer["name"]: layer["quantized"] for layer in facts["layers"]}
    assert layers == {"sturdy:linear:0": True, "fragile:linear:0": False, "last:linear:0": True}


def test_the_table_and_the_accuracy_are_printed(nets):
    done = run(nets, "--budget-accuracy", "5")
    assert done.exit_code == 0, done.output
    for part in ("sturdy:linear:0", "of a budget of 5", "recipe: histogram, 100 samples"):
        assert part in done.stdout


def test_progress_is_plain_lines_outside_of_a_terminal(nets):
    done = run(nets, "--budget-accuracy", "0.05", "--observer", "min_max", "--samples", "24")
    lines = [line for line in done.stderr.splitlines() if "Warning" not in line]
    assert lines == [
        "calibrate min_max, 24 samples",
        "sensitivity of 3 layers",
        "in floating point: fragile:linear:0",
    ]
    assert "\x1b" not in done.output


def test_progress_is_a_bar_on_a_terminal(nets, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = run(nets, "--budget-accuracy", "0.05", "--observer", "min_max")
    assert done.exit_code == 0
    assert "━" in done.stderr


@pytest.mark.parametrize("data", ["generator", "tensor"])
def test_data_may_be_a_generator_or_a_tensor(nets, data):
    done = run(nets, "--budget-accuracy", "5", "--json", data=data)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["batches"] == (3 if data == "generator" else 1)


@pytest.mark.parametrize("data", ["two", "two_with_labels", "named"])
def test_a_model_of_two_inputs(nets, data):
    args = ("--data", f"{nets}:{data}", "--budget-accuracy", "5", "--json")
    done = CliRunner().invoke(app, ["quantize", f"{nets}:pair", *args])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["batches"] == 3


def test_model_and_report_are_written_whole(nets, tmp_path):
    files = ("--output", "net", "--report", "report.html")
    done = run(nets, "--budget-accuracy", "5", *files)
    assert done.exit_code == 0, done.output
    html_check.check((tmp_path / "report.html").read_text())
    names = {path.name for path in tmp_path.iterdir() if path.suffix != ".py"} - {"__pycache__"}
    assert names == {"net.safetensors", "net.json", "report.html"}
    module = sys.modules[nets]
    loaded = quantization.load("net", module.Fragile().eval())
    assert loaded(module.tensor()).shape == (8, 16)


def test_the_report_may_be_json(nets, tmp_path):
    done = run(nets, "--budget-accuracy", "5", "--report", "report.json")
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "report.json").read_text())
    assert made["layers"][0]["name"] == "sturdy:linear:0"


def test_nothing_is_written_if_no_recipe_is_in_budget(nets, tmp_path):
    done = run(nets, "--budget-accuracy", "0", "--output", "net", "--report", "r.json")
    assert done.exit_code == 2
    assert "no recipe is accurate enough" in done.stderr
    assert not (tmp_path / "net.json").exists()
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--report", "report.txt"), "FILE.html or FILE.json"),
        (("--report", "missing/report.json"), "--report in a folder that exists"),
        (("--output", "missing/net"), "--output in a folder that exists"),
        (("--output", "net", "--report", "net.json"), "beside the model's own files"),
        (("--output", "net.safetensors", "--report", "net.json"), "beside the model's own files"),
        (("--accuracy", "{}:missing"), "to be importable"),
        (("--accuracy", "{}:text"), "to return a number"),
        (("--accuracy", "{}:nan"), "to return a number"),
    ],
)
def test_bad_arguments_are_typed_errors(nets, args, message):
    done = run(nets, *(arg.format(nets) for arg in args))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("missing", "to be importable"),
        ("number", "to return a data loader"),
        ("none", "calibration data"),
    ],
)
def test_bad_data_are_typed_errors(nets, data, message):
    done = run(nets, data=data)
    assert done.exit_code == 2
    assert message in done.stderr
