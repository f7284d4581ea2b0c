"""What fp32 matrix products, convolutions and RNNs may round their inputs to, on each device."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from ipex_inductor.errors import DeviceError, OptionError


class FP32MathMode(IntEnum):
    """How fp32 inputs are read: as they are, or with the mantissa of tf32 (10 bit) or bf16 (7)."""

    FP32 = 0
    TF32 = 1
    BF32 = 2


FP32, TF32, BF32 = FP32MathMode
_MODES = {"none": FP32, "ieee": FP32, "tf32": TF32, "bf16": BF32}  # by torch's word


def set_fp32_math_mode(mode: FP32MathMode = FP32, device: str = "cpu") -> None:
    """Let products of fp32 tensors on `device` ("cpu", "cuda" or "xpu") round their inputs.

    For the whole process, through torch's own settings of precision: matrix products, convolutions
    and RNNs. Raises `OptionError` for another device or mode, and for BF32 on GPUs, which torch
    does not have there; `DeviceError` for TF32 on "xpu" where torch is built without Intel GPUs.
    """
    math = _math(device)
    if mode not in math.modes:
        todo = "Use FP32MathMode.TF32, or autocast to torch.bfloat16."
        names = ", ".join(f"FP32MathMode.{known.name}" for known in math.modes)
        raise OptionError(f"{names} on device {device!r}", f"{mode!r}{math.lacks}", todo)
    math.write(FP32MathMode(mode))


def get_fp32_math_mode(device: str = "cpu") -> FP32MathMode:
    """The mode of `device`; where products and convolutions differ, the least exact one in use.

    "cuda" starts with TF32, which torch allows cuDNN's convolutions. Raises `OptionError` for an
    unknown device.
    """
    return _math(device).read()


def _read_cpu() -> FP32MathMode:
    onednn: Any = torch.backends.mkldnn
    return max(_MODES[part.fp32_precision] for part in (onednn.matmul, onednn.conv, onednn.rnn))


def _write_cpu(mode: FP32MathMode) -> None:
    """Torch's older switch is set with the new one: where the two disagree, reading it raises.

    Inductor's autotuning reads it before torch 2.15. It sets CUDA's too, which is set back.
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
    """The older switches, because they set the new ones too, and not the other way round."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    cuda.allow_tf32 = cudnn.allow_tf32 = mode == TF32


def _read_xpu() -> FP32MathMode:
    return TF32 if torch.backends.mkldnn.allow_tf32 else FP32


def _write_xpu(mode: FP32MathMode) -> None:
    onednn: Any = torch.backends.mkldnn
    if torch.xpu._is_compiled():
        onednn.allow_tf32 = mode == TF32
    elif mode != FP32:
        todo = "Install torch's XPU build, or name the device you use."
        raise DeviceError("a torch built for Intel GPUs", "one that is not", todo)


@dataclass(frozen=True)
class _Math:
    """The modes of one device, how to read and write them, and why one is not there."""

    modes: tuple[FP32MathMode, ...]
    read: Callable[[], FP32MathMode]
    write: Callable[[FP32MathMode], None]
    lacks: str = ""


_DEVICES = {
    "cpu": _Math((FP32, TF32, BF32), _read_cpu, _write_cpu),
    "cuda": _Math((FP32, TF32), _read_cuda, _write_cuda, "; torch has no bf32 on CUDA devices"),
    "xpu": _Math((FP32, TF32), _read_xpu, _write_xpu, "; torch has no bf32 on Intel GPUs"),
}


def _math(device: str) -> _Math:
    if device in _DEVICES:
        return _DEVICES[device]
    todo = 'Name a device type, as in set_fp32_math_mode(mode, device="cpu").'
    raise OptionError(f"a device out of {', '.join(_DEVICES)}", repr(device), todo)
