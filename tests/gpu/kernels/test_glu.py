"""A gated pair of layers on a GPU: values, through Inductor, and in a model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.lowerings.select import library, selection
from ipex_inductor.reporting import decisions
from ipex_inductor.target import device
from ipex_inductor.templates.triton import glu
from support.autotune.autotune_records import plant
from support.cases import glu_cases
from support.helpers import code_of, no_farther_off_than_eager
from support.op_checks import problem_here, verify

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper():
    if device.current("cuda").arch != "sm_90":
        pytest.skip("it is for Hopper's copy engine")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tile", [glu_cases.SMALL, *glu.TILES], ids=str)
def test_values(tile, dtype):
    """Against fp64, into memory full of NaN."""
    for case in glu_cases.CASES:
        error = glu_cases.error(*case, dtype, tile, "cuda")
        assert error <= glu_cases.CLOSE[dtype], case


PROBLEMS = {
    "silu": "4x512x512 1024x512 1024x512 gate_bias=None bias=None unary='silu'",
    "gelu, odd sizes": "1101x776 1000x776 1000x776 1000 1000 unary='gelu'",
    "gelu by tanh": "2048x256 192x256 192x256 gate_bias=None bias=None unary='gelu_tanh'",
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_through_inductor(name, dtype):
    problem = problem_here(f"ipex.gated_linear.default {dtype} {PROBLEMS[name]}")
    ours = [call for call in library.calls(problem) if call.parameters]
    assert ours
    verify(problem, ours)


class Gated(nn.Module):
    """The feed-forward part of a Llama, with what comes before and behind."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(512)
        self.gate, self.up = (nn.Linear(512, 1024, bias=False) for _ in range(2))
        self.down = nn.Linear(1024, 512, bias=False)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


@torch.no_grad()
def test_in_a_model(tmp_path, monkeypatch):
    """By record; without one as one product of both weights."""

    def times(*_):
        raise AssertionError("something was to be measured")

    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(selection, "tune_locally", times)
    model = Gated().eval().cuda().bfloat16()
    x = torch.randn(2, 1024, 512, device="cuda").bfloat16()
    plant(tmp_path / "database", lambda: model(x))
    for database, named in (("database", True), ("none", False)):
        torch.compiler.reset()
        decisions.clear()
        options = {"strict": True, "autotune_database": str(tmp_path / database)}
        fn = torch.compile(model, backend="ipex", options=options)
        (code,) = code_of(fn, x)
        assert ("gated_rows" in code) == named
        said = [e.reason for r in decisions.reports() for e in r.events if e.kind == "choice"]
        assert sum(glu.NAME in reason for reason in said) == named
        no_farther_off_than_eager(fn, model, x)
