"""What of the process's state an op obeys: read into a problem, and set where it is measured."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor.autotune.record import Constant


@dataclass(frozen=True)
class Setting:
    """One of torch's switches, by the kinds of device that obey it."""

    devices: frozenset[str]
    get: Callable[[], Constant]
    set: Callable[[Any], object]
    default: Constant  # what is not written down; None writes every value


def _flag(owner: Any, name: str) -> tuple[Callable[[], Constant], Callable[[Any], object]]:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


_CPU, _CUDA, _ALL = frozenset({"cpu"}), frozenset({"cuda"}), frozenset({"cpu", "cuda", "xpu"})
_matmul: Any = torch.backends.cuda.matmul
_precision = (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)

SETTINGS = {
    "threads": Setting(_CPU, torch.get_num_threads, torch.set_num_threads, None),
    "float32_matmul_precision": Setting(_ALL, *_precision, "highest"),
    "cudnn.allow_tf32": Setting(_CUDA, *_flag(torch.backends.cudnn, "allow_tf32"), True),
    "cudnn.benchmark": Setting(_CUDA, *_flag(torch.backends.cudnn, "benchmark"), False),
    "deterministic": Setting(
        _ALL, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, False
    ),
    "fp16_reduced": Setting(_CUDA, *_flag(_matmul, "allow_fp16_reduced_precision_reduction"), True),
    "bf16_reduced": Setting(_CUDA, *_flag(_matmul, "allow_bf16_reduced_precision_reduction"), True),
}


def settings_of(device: str) -> dict[str, Constant]:
    """Those that a device of that kind obeys and that are not as they usually are."""
    found = {name: s.get() for name, s in SETTINGS.items() if device in s.devices}
    return {name: value for name, value in found.items() if value != SETTINGS[name].default}


def apply(device: str, settings: dict[str, Constant]) -> None:
    """Make this process as `settings` say, and as usual in all they do not say."""
    for name, setting in SETTINGS.items():
        value = settings.get(name, setting.default)
        if device in setting.devices and value is not None and setting.get() != value:
            setting.set(value)
