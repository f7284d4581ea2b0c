"""A package of an FP8 net computes on rounded operands in its own code, without Python."""

import pytest
import torch
from torch import nn

import ipex_inductor
from ipex_inductor.quantization import QConfigMapping, Scheme, convert, prepare


@pytest.mark.sampled("static")
@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"weight_only": True}], ids=["static", "weights"])
def test_a_loaded_package_gives_the_models_result(settings, tmp_path):
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(5, 16)
    scheme = Scheme(dtype=torch.float8_e4m3fn, observer="min_max", **settings)
    prepared = prepare(model, QConfigMapping().set_global(scheme), example_inputs=x)
    prepared(x)
    quantized = convert(prepared)
    path = str(tmp_path / "net.ipexbundle")
    ipex_inductor.package(quantized, (x,), path)
    weights = {**quantized.state_dict(), **dict(quantized.named_buffers())}
    run = ipex_inductor.load(path, weights=weights, allow_unsigned=True)
    # A sum in another order may round to the next number in FP8, 1/8 off, times a weight below 0.4.
    error = (run(x) - quantized(x)).abs().max()
    assert error < (1e-5 if settings else 0.05 * quantized(x).abs().max())
