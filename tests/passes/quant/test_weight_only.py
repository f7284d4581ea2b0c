"""The pass on linear layers on quantized weights, for an H200 that is not here."""

import pytest
import torch
from torch import nn

from ipex_inductor.ops.quant.weight_only import Scheme
from ipex_inductor.prebuild.graphs import prebuild
from ipex_inductor.target.device import find_target
from support.weight_only_ops import BF16, F16, make_operands

SUBJECT = "weight-only linear, int4 in "


class Layer(nn.Module):
    """A layer on a quantized weight, and an activation."""

    def __init__(self, operands):
        super().__init__()
        for name in ("weight", "scales", "zeros", "bias"):
            self.register_buffer(name, getattr(operands, name))
        self.scheme = operands.scheme

    def forward(self, x):
        tensors = self.weight, self.scales, self.zeros, None, self.bias
        return torch.ops.ipex.weight_only_linear(x, *tensors, *self.scheme).relu()


def build(rows, tmp_path, monkeypatch, compute="bfloat16", dynamic=None):
    """Return the decisions about the layer, others' kinds, and the kernels."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # or graphs could not be kept
    torch.manual_seed(0)
    scheme = Scheme("int4", 64, compute)
    words = {"dtype": BF16, "scale_dtype": F16, "zeros": True, "bias": True}
    o = make_operands(rows, 256, 96, scheme, **words)
    target, options = find_target("h200"), {"strict": True}
    done = prebuild(Layer(o).eval(), (o.x,), target, options=options, dynamic=dynamic)
    about = [e for e in done.events if e.subject.startswith(SUBJECT)]
    return about, {e.kind for e in done.events if e not in about}, done.made.kernels


def test_it_is_a_template_and_factors_are_laid_out_ahead(tmp_path, monkeypatch):
    """Its one kernel adds the bias and applies the activation."""
    (event,), others, kernels = build(2, tmp_path, monkeypatch)
    assert (event.kind, event.subject) == ("fired", f"{SUBJECT}bfloat16")
    assert "hoisted" in others
    (kernel,) = kernels
    assert kernel.startswith("triton_tem_fused")
    assert "relu" in kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "words", "kind", "reason"),
    [
        (2, {"compute": "float32"}, "missed", '"float32": each call dequantizes the weight'),
        (300, {}, "choice", "over 128 rows a library multiplies the dequantized weight"),
        (5, {"dynamic": {0: {0: (2, 64)}}}, "missed", "its number of rows varies"),
    ],
)
def test_what_stays_whole(rows, words, kind, reason, tmp_path, monkeypatch):
    """Then nothing of the weight is computed ahead, as a dequantized weight would be kept."""
    (event,), others, kernels = build(rows, tmp_path, monkeypatch, **words)
    assert event.kind == kind
    assert reason in event.reason
    assert "hoisted" not in others
    assert not [name for name in kernels if "triton_tem" in name]
