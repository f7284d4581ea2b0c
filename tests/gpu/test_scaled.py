"""A scaled image and its convolution on a GPU: values, through Inductor, and in a model."""

import pytest
import scaled_cases
import torch
from helpers import code_of, no_farther_off_than_eager
from records import plant
from torch import nn
from verified import problem_here, verify

from ipex_inductor import decisions
from ipex_inductor.lowerings import library, selection
from ipex_inductor.templates import scaled

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tile", [scaled_cases.SMALL, *scaled.TILES], ids=str)
def test_values(tile, dtype):
    """Against fp64, into memory full of NaN; all shapes by the first."""
    few = scaled_cases.CASES[:24:3]
    for case in scaled_cases.CASES if tile is scaled_cases.SMALL else few:
        error = scaled_cases.error(*case, dtype, tile, "cuda")
        assert error <= scaled_cases.CLOSE[dtype], case


@pytest.mark.parametrize("tile", scaled.TILES[::3], ids=str)
def test_what_is_not_finite_stays_so(tile):
    error = scaled_cases.error((3, 196, 40, 72), True, "bfloat16", tile, "cuda", scaled_cases.ODD)
    assert error <= scaled_cases.CLOSE["bfloat16"]


WORDS = {
    "plain": "other=None binary='none' unary='none' scalars=()",
    "relu": "other=None binary='none' unary='relu' scalars=()",
}
PROBLEMS = {
    "EfficientNet's": ("64x144x28x28:L 64x144x1x1:L 40x144x1x1:L 40", "plain"),
    "odd, no bias": ("7x67x11x9:L 7x67x1x1:L 130x67x1x1:L bias=None", "relu"),
    "of few pixels": ("64x576x7x7:L 64x576x1x1:L 300x576x1x1:L 300", "plain"),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_through_inductor(name, dtype):
    """Together or apart."""
    operands, words = PROBLEMS[name]
    problem = problem_here(f"ipex.conv_scaled.default {dtype} {operands} {WORDS[words]}")
    calls = library.calls(problem)
    assert not all(call.apart for call in calls)
    verify(problem, calls)


class Block(nn.Module):
    """A residual of MobileNetV3 (arXiv:1905.02244), its activations smooth."""

    def __init__(self, channels=40, wide=120):
        super().__init__()
        self.out, self.back = nn.Conv2d(channels, wide, 1), nn.Conv2d(wide, channels, 1)
        self.each = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.norm = nn.BatchNorm2d(channels)
        self.less, self.more = nn.Conv2d(wide, 16, 1), nn.Conv2d(16, wide, 1)
        self.act = nn.SiLU()

    def forward(self, x):
        y = self.act(self.each(self.act(self.out(x))))
        numbers = self.more(self.act(self.less(y.mean((2, 3), keepdim=True)))).sigmoid()
        return x + self.norm(self.back(y * numbers))


@torch.no_grad()
def test_in_a_model(tmp_path, monkeypatch):
    """By record, with weights that change: nothing else reads or writes the scaled image."""

    def times(*_):
        raise AssertionError("something was to be measured")

    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(selection, "here", times)
    last = {"memory_format": torch.channels_last}
    model = Block().eval().cuda().bfloat16().to(**last)
    x = torch.randn(16, 40, 28, 28, device="cuda").bfloat16().to(**last)
    plant(tmp_path / "database", lambda: model(x))
    for database, named in (("database", True), ("none", False)):
        torch.compiler.reset()
        decisions.clear()
        options = {"strict": True, "autotune_database": str(tmp_path / database)}
        fn = torch.compile(model, backend="ipex", options=options)
        (code,) = code_of(fn, x)
        assert ("scaled_rows" in code) == named
        said = [e.reason for r in decisions.reports() for e in r.events if e.kind == "choice"]
        assert sum(scaled.NAME in reason for reason in said) == named
        for _ in range(2):
            no_farther_off_than_eager(fn, model, x)
            model.back.weight.mul_(0.5)
