"""`ipex.xpu` without an Intel GPU: what it forwards, and the summary of memory."""

import inspect

import pytest
import torch
from torch import nn

import ipex_inductor
from ipex_inductor import frontend, xpu
from ipex_inductor.errors import OptionError
from ipex_inductor.ipex_api import math_mode
from ipex_inductor.ipex_api.math_mode import FP32MathMode

MEMORY = [name for name in xpu.__all__ if "mem" in name or name.startswith("reset")]


def test_optimize_is_ipex_optimize_without_concat_linear():
    whole = inspect.signature(frontend.optimize).parameters
    ours = inspect.signature(xpu.optimize).parameters
    assert list(ours) == [name for name in whole if name != "concat_linear"]
    assert all(ours[name].default == whole[name].default for name in ours)


def test_optimize_hands_every_argument_on(monkeypatch):
    monkeypatch.setattr(frontend, "optimize", lambda *args: args)
    names = list(inspect.signature(xpu.optimize).parameters)
    assert xpu.optimize(**{name: name for name in names}) == tuple(names)


def test_optimize_works_where_there_is_no_intel_gpu():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    optimized = xpu.optimize(model, dtype=torch.bfloat16)
    assert optimized[0].weight.dtype == torch.bfloat16
    assert type(optimized[1]) is nn.Identity


@pytest.mark.parametrize("name", [name for name in MEMORY if name != "memory_summary"])
def test_memory_functions_are_torchs(name):
    assert getattr(xpu, name) is getattr(torch.xpu, name)


@pytest.mark.parametrize("abbreviated", [False, True])
def test_memory_summary_is_of_the_device_asked_for(monkeypatch, abbreviated):
    asked = []

    def stats(device):
        asked.append(device)
        return {f"active_bytes.{p}.{c}": 2048 for p in POOLS for c in COLUMNS}

    monkeypatch.setattr(xpu, "memory_stats", stats)
    said = xpu.memory_summary(torch.device("xpu:3"), abbreviated)
    assert asked == [3]
    assert "XPU memory summary, device ID 3 " in said
    assert said.count("2048 B") == 4 * (1 if abbreviated else 3)


POOLS, COLUMNS = ("all", "large_pool", "small_pool"), ("current", "peak", "allocated", "freed")


def test_math_mode_is_of_intel_gpus(monkeypatch):
    asked = []
    monkeypatch.setattr(math_mode, "set_fp32_math_mode", lambda *args: asked.append(args))
    monkeypatch.setattr(math_mode, "get_fp32_math_mode", lambda device: FP32MathMode.FP32)
    xpu.set_fp32_math_mode(FP32MathMode.TF32)
    with xpu.fp32_math_mode(FP32MathMode.TF32):
        assert len(asked) == 2
    assert xpu.get_fp32_math_mode() is FP32MathMode.FP32
    tf32, fp32 = ((mode, "xpu") for mode in (FP32MathMode.TF32, FP32MathMode.FP32))
    assert asked == [tf32, tf32, fp32]


def test_bf32_says_that_torch_has_none():
    with pytest.raises(OptionError, match="torch has no bf32 on Intel GPUs"):
        xpu.set_fp32_math_mode(FP32MathMode.BF32)
    with (
        pytest.raises(OptionError, match="torch has no bf32"),
        xpu.fp32_math_mode(FP32MathMode.BF32),
    ):
        pass


@pytest.mark.filterwarnings("ignore")  # torch's, where there is no such device
def test_autocast_is_torchs_for_xpu():
    cast = xpu.amp.autocast(enabled=True)
    assert isinstance(cast, torch.amp.autocast)
    assert (cast.device, cast.fast_dtype) == ("xpu", torch.bfloat16)


def test_the_package_shows_its_face():
    for name in ("optimize", "FP32MathMode", "set_fp32_math_mode", "verbose", "VERBOSE_ON"):
        assert name in ipex_inductor.__all__
        assert getattr(ipex_inductor, name)
    assert ipex_inductor.xpu is xpu
    assert ipex_inductor.nn.__name__ == "ipex_inductor.nn"
    assert not hasattr(ipex_inductor, "no_such_thing")
