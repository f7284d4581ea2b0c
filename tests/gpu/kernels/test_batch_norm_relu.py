"""A norm, its relu and the convolution behind on a GPU: values, through Inductor, in a model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.lowerings.select import library, selection
from ipex_inductor.passes.fusion.batch_norm_relu import NAME
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.triton import batch_norm_relu
from support.autotune.autotune_records import plant
from support.cases import batch_norm_relu_cases
from support.cases.batch_norm_relu_cases import takes
from support.helpers import code_of, no_farther_off_than_eager
from support.op_checks import problem_here, verify

pytestmark = pytest.mark.gpu

# Of a small tile all cases, of the others some each.
TILES = [*enumerate([*batch_norm_relu_cases.SMALL, *batch_norm_relu.TILES])]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_values(tile, dtype):
    """Against fp64, into memory full of NaN."""
    number, tile = tile
    for sizes, biased in batch_norm_relu_cases.CASES[number :: len(TILES) if number else 1]:
        if takes(tile, sizes):
            error = batch_norm_relu_cases.error(sizes, biased, dtype, tile, "cuda")
            assert error <= batch_norm_relu_cases.CLOSE[dtype], sizes


@pytest.mark.parametrize("tile", batch_norm_relu.TILES, ids=str)
def test_what_is_not_finite_stays_so(tile):
    odd = batch_norm_relu_cases.ODD
    for sizes in ((97, 61, 40, 24, 5), (64, 32, 64, 32, 2), (33, 72, 64, 0, 0)):
        error = batch_norm_relu_cases.error(sizes, True, "bfloat16", tile, "cuda", odd)
        assert error <= batch_norm_relu_cases.CLOSE["bfloat16"]


def line(batch, first, pixels, columns, each, parts, words):
    """Of square images."""
    terms, size = first + each * parts, f"x{pixels}x{pixels}:L"
    operands = [f"{batch}x{first}{size}", f"{columns}x{terms}x1x1:L"]
    operands += [] if "bias=None" in words else [str(columns)]
    operands += [*[str(terms)] * 4, *[f"{batch}x{each}{size}"] * parts]
    return f"{' '.join(operands)} epsilon=1e-05 more={parts} {words} scalars=()"


PROBLEMS = {
    "DenseNet's": line(32, 64, 28, 128, 32, 3, "unary='relu'"),
    "a transition": line(16, 128, 28, 256, 32, 12, "unary='none' bias=None"),
    "many parts, few pixels": line(8, 512, 7, 128, 32, 15, "unary='relu'"),
    "odd": line(7, 72, 11, 130, 24, 5, "unary='silu'"),
    "one image alone": line(4, 200, 13, 96, 0, 0, "unary='relu'"),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_through_inductor(name, dtype):
    """Together or apart."""
    problem = problem_here(f"ipex.conv_preactivated.default {dtype} {PROBLEMS[name]}")
    calls = library.calls(problem)
    assert not all(call.apart for call in calls)
    verify(problem, calls)


class Layer(nn.Module):
    """Of a DenseNet."""

    def __init__(self, inputs, width=64, growth=32):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, growth, 3, padding=1, bias=False)

    def forward(self, parts):
        made = self.conv1(F.relu(self.norm1(torch.cat(parts, 1))))
        return self.conv2(F.relu(self.norm2(made)))


class Dense(nn.Module):
    """A block of four layers, the stem before it and the transition behind."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.layers = nn.ModuleList(Layer(64 + 32 * i) for i in range(4))
        self.norm, self.conv = nn.BatchNorm2d(192), nn.Conv2d(192, 96, 1, bias=False)

    def forward(self, x):
        parts = [self.stem(x)]
        for layer in self.layers:
            parts.append(layer(parts))
        # One of them twice, as no DenseNet has it.
        whole = torch.cat([*parts[:3], parts[4], parts[4]], 1)
        return F.avg_pool2d(self.conv(F.relu(self.norm(whole))), 2)


@torch.no_grad()
def test_in_a_model(tmp_path, monkeypatch):
    """By record, with weights and statistics that change: nothing is written side by side."""

    def times(*_):
        raise AssertionError("something was to be measured")

    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(selection, "tune_locally", times)
    last = {"memory_format": torch.channels_last}
    model = Dense().eval().cuda().bfloat16().to(**last)
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        for values in (norm.running_mean, norm.weight.data, norm.bias.data):
            values.normal_(0.5, 0.5)
    x = torch.randn(16, 3, 28, 28, device="cuda").bfloat16().to(**last)
    plant(tmp_path / "database", lambda: model(x))
    for off in (False, True):
        torch.compiler.reset()
        decisions.clear()
        options = {"strict": True, "autotune_database": str(tmp_path / "database")}
        options |= {"rules": f"-{NAME}"} if off else {}
        fn = torch.compile(model, backend="ipex", options=options)
        (code,) = code_of(fn, x)
        assert ("preactivated_rows" in code) != off
        assert ("_cat_" in code) == off  # in the name of a kernel
        said = [e.reason for r in decisions.reports() for e in r.events if e.kind == "choice"]
        assert sum(batch_norm_relu.NAME in reason for reason in said) == (0 if off else 5)
        for _ in range(2):
            no_farther_off_than_eager(fn, model, x)
            model.norm.bias.add_(0.25)
            model.layers[2].norm1.running_var.mul_(2.0)
            model.layers[3].conv1.weight.mul_(0.5)
