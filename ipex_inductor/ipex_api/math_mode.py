"""Reduced-precision modes of fp32 GEMMs, convolutions and RNNs, by device type."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from ipex_inductor.errors import DeviceError, OptionError


class FP32MathMode(IntEnum):
    """Rounding of fp32 inputs: none, or the mantissa of tf32 (10 bits) or bf16 (7 bits)."""

    FP32 = 0
    TF32 = 1
    BF32 = 2


FP32, TF32, BF32 = FP32MathMode
_MODES = {"none": FP32, "ieee": FP32, "tf32": TF32, "bf16": BF32}  # keyed by torch's names


def set_fp32_math_mode(mode: FP32MathMode = FP32, device: str = "cpu") -> None:
    """Let GEMMs, convolutions and RNNs of fp32 tensors round their inputs, on one device type.

    It holds for the whole process, through torch's own precision settings.

    Args:
        mode: the rounding.
        device: "cpu", "cuda" or "xpu".

    Raises:
        OptionError: for another device or mode, and for BF32 on GPUs, which torch lacks there.
        DeviceError: for TF32 on "xpu" if torch is built without Intel GPUs.
    """
    math = _find_device(device)
    if mode not in math.modes:
        advice = "Use FP32MathMode.TF32, or autocast to torch.bfloat16."
        names = ", ".join(f"FP32MathMode.{choice.name}" for choice in math.modes)
        raise OptionError(f"{names} on device {device!r}", f"{mode!r}{math.lacks}", advice)
    math.write(FP32MathMode(mode))


def get_fp32_math_mode(device: str = "cpu") -> FP32MathMode:
    """Return the mode of `device`; if GEMMs and convolutions differ, the least exact one.

    "cuda" starts with TF32, which torch allows for cuDNN's convolutions.

    Raises:
        OptionError: for an unknown device.
    """
    return _find_device(device).read()


def _read_cpu() -> FP32MathMode:
    onednn: Any = torch.backends.mkldnn
    return max(_MODES[part.fp32_precision] for part in (onednn.matmul, onednn.conv, onednn.rnn))


def _write_cpu(mode: FP32MathMode) -> None:
    """Set the mode on CPUs in torch's older and newer switch: if they disagree, reading raises.

    Inductor's autotuning reads the older one before torch 2.15. It sets CUDA's too, which is set
    back.
    """
    cuda = torch.backends.cuda.matmul
    on_cuda = cuda.fp32_precision
    if mode != FP32:  # with "ieee" the two always agree
        torch.set_float32_matmul_precision({TF32: "high", BF32: "medium"}[mode])
        if torch.cuda.is_available():
            cuda.fp32_precision = on_cuda
    onednn: Any = torch.backends.mkldnn
    for part in (onednn.matmul, onednn.conv, onednn.rnn):
        part.fp32_precision = {FP32: "ieee", TF32: "tf32", BF32: "bf16"}[mode]


def _read_cuda() -> FP32MathMode:
    cudnn: Any = torch.backends.cudnn
    parts = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    return max(_MODES[part.fp32_precision] for part in parts)


def _write_cuda(mode: FP32MathMode) -> None:
    """Set the older switches, which set the newer ones too, but not vice versa."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    cuda.allow_tf32 = cudnn.allow_tf32 = mode == TF32


def _read_xpu() -> FP32MathMode:
    return TF32 if torch.backends.mkldnn.allow_tf32 else FP32


def _write_xpu(mode: FP32MathMode) -> None:
    onednn: Any = torch.backends.mkldnn
    if torch.xpu._is_compiled():
        onednn.allow_tf32 = mode == TF32
    elif mode != FP32:
        advice = "Install torch's XPU build, or name the device you use."
        raise DeviceError("a torch built for Intel GPUs", "one that is not", advice)


@dataclass(frozen=True)
class _Math:
    """The modes of one device type, how to read and write them, and why one is missing."""

    modes: tuple[FP32MathMode, ...]
    read: Callable[[], FP32MathMode]
    write: Callable[[FP32MathMode], None]
    lacks: str = ""


_DEVICES = {
    "cpu": _Math((FP32, TF32, BF32), _read_cpu, _write_cpu),
    "cuda": _Math((FP32, TF32), _read_cuda, _write_cuda, "; torch has no bf32 on CUDA devices"),
    "xpu": _Math((FP32, TF32), _read_xpu, _write_xpu, "; torch has no bf32 on Intel GPUs"),
}


def _find_device(device: str) -> _Math:
    if device in _DEVICES:
        return _DEVICES[device]
    advice = 'Name a device type, as in set_fp32_math_mode(mode, device="cpu").'
    raise OptionError(f"a device out of {', '.join(_DEVICES)}", repr(device), advice)
