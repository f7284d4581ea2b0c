"""FP32MathMode: torch's settings of precision, device by device."""

import itertools

import pytest
import torch

from ipex_inductor.errors import DeviceError, OptionError
from ipex_inductor.ipex_api import math_mode
from ipex_inductor.ipex_api.math_mode import FP32MathMode, get_fp32_math_mode, set_fp32_math_mode

pytestmark = pytest.mark.unit

FP32, TF32, BF32 = FP32MathMode
ONEDNN, CUDNN = torch.backends.mkldnn, torch.backends.cudnn
PARTS = {
    "cpu": (ONEDNN.matmul, ONEDNN.conv, ONEDNN.rnn),
    "cuda": (torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn),
}


@pytest.fixture(autouse=True)
def _restored():
    before = [(part, part.fp32_precision) for part in itertools.chain(*PARTS.values())]
    yield
    torch.set_float32_matmul_precision("highest")
    CUDNN.allow_tf32 = True
    for part, word in before:
        part.fp32_precision = word


def words(device):
    return {part.fp32_precision for part in PARTS[device]}


def test_the_values_are_those_of_ipex():
    assert [mode.value for mode in (FP32, TF32, BF32)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("device", "mode", "expected"),
    [
        ("cpu", FP32, {"ieee"}),
        ("cpu", TF32, {"tf32"}),
        ("cpu", BF32, {"bf16"}),
        ("cuda", FP32, {"ieee", "none"}),  # torch's word for cuDNN without tf32
        ("cuda", TF32, {"tf32"}),
    ],
)
def test_a_mode_is_torchs_precision_of_products_convolutions_and_rnns(device, mode, expected):
    set_fp32_math_mode(TF32 if mode == FP32 else FP32, device)
    set_fp32_math_mode(mode=mode, device=device)
    assert words(device) == expected
    assert get_fp32_math_mode(device) is mode


@pytest.mark.parametrize("modes", list(itertools.product(FP32MathMode, repeat=2)))
def test_torchs_older_switch_stays_readable(modes):
    """Inductor's autotuning asks it; torch raises where it and the new one disagree."""
    for mode in modes:
        set_fp32_math_mode(mode)
        assert torch.get_float32_matmul_precision() in ("highest", "high", "medium")
    set_fp32_math_mode(TF32, "cuda")
    assert torch.backends.cuda.matmul.allow_tf32
    assert CUDNN.allow_tf32


def test_the_cpu_leaves_a_gpu_as_it_was(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = words("cuda"), torch.backends.cuda.matmul.fp32_precision
    set_fp32_math_mode(BF32)
    assert (words("cuda"), torch.backends.cuda.matmul.fp32_precision) == before


def test_the_least_exact_part_is_reported():
    set_fp32_math_mode(FP32)
    ONEDNN.conv.fp32_precision = "bf16"
    assert get_fp32_math_mode() is BF32


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_bf32_on_a_gpu_is_an_error_that_says_torch_has_none(device):
    with pytest.raises(OptionError, match="torch has no bf32 on") as caught:
        set_fp32_math_mode(BF32, device)
    assert caught.value.expected == f"FP32MathMode.FP32, FP32MathMode.TF32 on device {device!r}"
    assert "torch.bfloat16" in caught.value.todo


@pytest.mark.parametrize("call", [lambda d: set_fp32_math_mode(FP32, d), get_fp32_math_mode])
def test_an_unknown_device_is_answered_with_the_known_ones(call):
    with pytest.raises(OptionError, match="a device out of cpu, cuda, xpu; got 'xpu:0'"):
        call("xpu:0")


def test_an_unknown_mode_is_an_error():
    with pytest.raises(OptionError, match="got 7"):
        set_fp32_math_mode(7)


class FakeOneDnn:
    allow_tf32 = False


def test_xpu_is_onednns_tf32_switch(monkeypatch):
    fake = FakeOneDnn()
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
    monkeypatch.setattr(math_mode.torch.backends, "mkldnn", fake)
    set_fp32_math_mode(TF32, "xpu")
    assert fake.allow_tf32 is True
    assert get_fp32_math_mode("xpu") is TF32
    set_fp32_math_mode(FP32, "xpu")
    assert fake.allow_tf32 is False
    assert get_fp32_math_mode("xpu") is FP32


@pytest.mark.skipif(torch.xpu._is_compiled(), reason="this torch is built for Intel GPUs")
def test_xpu_without_intel_gpus_in_torch_is_exact_and_nothing_else(recwarn):
    set_fp32_math_mode(FP32, "xpu")
    assert get_fp32_math_mode("xpu") is FP32
    assert not recwarn.list  # torch's own setter warns here
    with pytest.raises(DeviceError, match="a torch built for Intel GPUs"):
        set_fp32_math_mode(TF32, "xpu")
