"""The listings of IPEX's documentation run, with the import line changed and with it as it was.

`listings/` holds them as they were printed; where they say `...`, the names that a test gives.
"""

import copy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from ipex_inductor.cli.demo import models as demo_models
from ipex_inductor.ipex_api import compat_ipex
from ipex_inductor.ipex_api.math_mode import FP32MathMode

LISTINGS = Path(__file__).parent / "listings"
OLD, NEW = "import intel_extension_for_pytorch as ipex", "import ipex_inductor as ipex"
BF16 = torch.bfloat16

# `torch.cpu.amp.autocast`, `torch.jit`: what the listings were printed with
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["import changed", "as it was"])
def run(request):
    """Run a listing with the names given; what it leaves behind."""

    def run(name, **names):
        text = (LISTINGS / f"{name}.py").read_text()
        assert text.count(OLD) == 1
        exec(text if request.param == "as it was" else text.replace(OLD, NEW), names)
        return SimpleNamespace(**{k: v for k, v in names.items() if not k.startswith("__")})

    if request.param == "as it was":
        compat_ipex.install()
    yield run
    compat_ipex.uninstall()


class Model(nn.Module):
    """Convolution, batch norm (as after training) and ReLU, dropout, and a classifier."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(64, 5))
        self.features[1].running_mean.normal_(0, 0.2)
        self.features[1].running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.classifier(self.features(x))


def given(model):
    """What stands for `Model()`; the caller keeps the original."""
    return {"Model": lambda: copy.deepcopy(model)}


@pytest.mark.sampled("as it was")
def test_bf16_training(run):
    model, steps = Model(), 12
    data, target = torch.randn(16, 3, 8, 8), torch.randint(5, (16,))
    left = run("bf16_training", batches=[(data, target)] * steps, **given(model))

    assert {p.dtype for p in left.model.classifier.parameters()} == {BF16}
    state = left.model.state_dict()
    assert {v.dtype for v in state.values() if v.is_floating_point()} == {torch.float32}
    weight = left.model.features[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert left.output.dtype == BF16

    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # activations are rounded to bf16 (8 bits), and twelve steps carry that on
    assert left.losses == pytest.approx(losses, rel=0.05)
    assert left.losses[-1] < 0.8 * left.losses[0]


@pytest.mark.sampled("import changed")
def test_bf16_inference(run):
    model, data = Model().eval(), torch.randn(4, 3, 8, 8)
    left = run("bf16_inference", data=data, **given(model))
    assert isinstance(left.model, torch.jit.ScriptModule)
    assert "batch_norm" not in str(left.model.graph)
    assert left.output.dtype == BF16
    with torch.no_grad():
        exact = model(data)
    # two products in bf16 (8 bits) of values near 1
    torch.testing.assert_close(left.output.float(), exact, rtol=0.05, atol=0.02)


@pytest.fixture
def resnet50(monkeypatch):
    """In place of torchvision's, which would fetch weights: the demo's, random and thin."""
    widths = {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256], "return_dict": False}
    thin = replace(demo_models.MODELS["resnet50"], overrides=widths)
    model = demo_models._from_config(thin, 1)[0].eval()
    logits = Logits(model)
    models = ModuleType("torchvision.models")
    models.resnet50 = lambda pretrained: copy.deepcopy(logits)
    package = ModuleType("torchvision")
    package.models = models
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    return logits


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)[0]


@pytest.mark.sampled("as it was")
def test_fp32_resnet50(run, resnet50, capsys):
    left = run("fp32_resnet50", args=SimpleNamespace(batch_size=1))
    assert "graph(" in capsys.readouterr().out
    with torch.no_grad():
        exact = resnet50(left.x)
    # 53 layers deep in fp32, and channels-last sums in another order
    torch.testing.assert_close(left.output, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.sampled("import changed")
def test_xpu_optimize(run, tmp_path):
    model, data = Model(), torch.randn(4, 3, 8, 8)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    names = {"PATH": tmp_path / "model.pt", "data": data, "model_device": "cpu"}
    left = run("xpu_optimize", **names, **given(Model()))
    assert left.output.dtype == BF16
    with torch.no_grad():
        exact = model.eval()(data)
    torch.testing.assert_close(left.output.float(), exact, rtol=0.05, atol=0.02)  # as above
    trained = left.trained_model.state_dict()["classifier.2.weight"]
    moved = (trained - model.classifier[2].weight).abs()
    assert trained.dtype == torch.float32
    assert 0 < moved.max() < 1


@pytest.mark.sampled("as it was")
def test_fp32_math_mode(run):
    precision = torch.backends.mkldnn
    before = [
        (part, part.fp32_precision) for part in (precision.matmul, precision.conv, precision.rnn)
    ]
    try:
        left = run("fp32_math_mode")
    finally:
        torch.set_float32_matmul_precision("highest")
        for part, word in before:
            part.fp32_precision = word
    fp32, _, bf32 = FP32MathMode
    assert left.modes == [fp32, bf32, fp32, fp32]
