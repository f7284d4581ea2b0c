"""Process settings that affect an op: read into a problem, and set where it is measured."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor.autotune.record import Constant


@dataclass(frozen=True)
class Setting:
    """Describe one of torch's switches and the ops that it affects.

    Attributes:
        devices: device types that it affects.
        get: returns its value.
        set: sets its value.
        default: value that is not written into problems; None if every value is written.
        dtype: dtype of an operand of the affected ops; "" for any.
        word: part of the names of the affected ops; "" for all.
    """

    devices: frozenset[str]
    get: Callable[[], Constant]
    set: Callable[[Any], object]
    default: Constant
    dtype: str = ""
    word: str = ""


def _flag(owner: Any, name: str) -> tuple[Callable[[], Constant], Callable[[Any], object]]:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


def _precision(owner: Any) -> Callable[[], Constant]:
    """Return a getter of the fp32 precision of a backend.

    torch's older function raises if only the new switch was set.
    """
    return lambda: "ieee" if owner.fp32_precision == "none" else str(owner.fp32_precision)


# Setting an older switch also sets the new one, so that they agree. Inductor reads both.
_OLDER = {"ieee": "highest", "tf32": "high", "bf16": "medium"}
_onednn: Any = torch.backends.mkldnn
_cudnn: Any = torch.backends.cudnn
_cuda: Any = torch.backends.cuda.matmul
_CPU, _CUDA, _ALL = frozenset({"cpu"}), frozenset({"cuda"}), frozenset({"cpu", "cuda", "xpu"})

SETTINGS = {
    "threads": Setting(_CPU, torch.get_num_threads, torch.set_num_threads, None),
    "fp32 products": Setting(
        _CPU,
        _precision(_onednn.matmul),
        lambda value: torch.set_float32_matmul_precision(_OLDER[value]),
        "ieee",
        "float32",
    ),
    "fp32 convolutions": Setting(
        _CPU,
        _precision(_onednn.conv),
        _flag(_onednn.conv, "fp32_precision")[1],
        "ieee",
        "float32",
        "conv",
    ),
    "fp32 cuda products": Setting(
        _CUDA,
        _precision(_cuda),
        lambda value: torch.set_float32_matmul_precision(_OLDER[value]),
        "ieee",
        "float32",
    ),
    "fp32 cuda convolutions": Setting(
        _CUDA,
        _precision(_cudnn.conv),
        lambda value: setattr(_cudnn, "allow_tf32", value == "tf32"),
        "tf32",
        "float32",
        "conv",
    ),
    "cudnn.benchmark": Setting(_CUDA, *_flag(_cudnn, "benchmark"), False, word="conv"),
    "cudnn.enabled": Setting(_CUDA, *_flag(_cudnn, "enabled"), True, word="conv"),
    "cudnn.deterministic": Setting(_CUDA, *_flag(_cudnn, "deterministic"), False, word="conv"),
    "deterministic": Setting(
        _ALL, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, False
    ),
    "fp16 reduced": Setting(
        _CUDA, *_flag(_cuda, "allow_fp16_reduced_precision_reduction"), True, "float16"
    ),
    "bf16 reduced": Setting(
        _CUDA, *_flag(_cuda, "allow_bf16_reduced_precision_reduction"), True, "bfloat16"
    ),
    "fp16 accumulated": Setting(_CUDA, *_flag(_cuda, "allow_fp16_accumulation"), False, "float16"),
}


def settings_of(device: str) -> dict[str, Constant]:
    """Return the settings of a device type that differ from their defaults."""
    values = {name: s.get() for name, s in SETTINGS.items() if device in s.devices}
    return {name: value for name, value in values.items() if value != SETTINGS[name].default}


def relevant_settings(
    settings: Mapping[str, Constant], op: str, dtypes: Collection[str]
) -> dict[str, Constant]:
    """Return the settings that affect a call of `op` on operands of `dtypes`.

    Settings of other dtypes are left out. Users of bf16 often set the precision of fp32 GEMMs to
    "high", and their problems would otherwise not match records.
    """
    affecting: dict[str, Constant] = {}
    affected_dtypes = {"float32" if dtype == "complex64" else dtype for dtype in dtypes}
    for name, value in settings.items():
        setting = SETTINGS.get(name)
        if setting is None or (setting.word in op and setting.dtype in ("", *affected_dtypes)):
            affecting[name] = value
    return affecting


def apply(device: str, settings: dict[str, Constant]) -> None:
    """Apply `settings` to this process, and the defaults of all settings not in it."""
    for name, setting in SETTINGS.items():
        value = settings.get(name, setting.default)
        if device in setting.devices and value is not None and setting.get() != value:
            setting.set(value)
