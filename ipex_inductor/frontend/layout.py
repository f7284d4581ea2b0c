"""The channels-last policy: the fastest layout of convolution weights on each device."""

from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.frontend.notes import Notes

LINES = (nn.Conv1d, nn.ConvTranspose1d)
CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d, *LINES)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Policy(Enum):
    """When `optimize` lays convolution weights out channels-last."""

    AUTO = "where the device gains by it"
    ALWAYS = "always"
    NEVER = "never"


_policy = Policy.AUTO  # process-wide, as in IPEX


def enable_auto_channels_last() -> None:
    """Make `optimize` lay out convolution weights channels-last from now on.

    This holds for every device, and for 1-D convolutions too.
    """
    _set(Policy.ALWAYS)


def disable_auto_channels_last() -> None:
    """Make `optimize` keep the layout of convolution weights from now on."""
    _set(Policy.NEVER)


def policy() -> Policy:
    """Return the policy in force."""
    return _policy


def lay_out(model: nn.Module, optimizer: Any, level: str, notes: Notes) -> None:
    """Make the convolution weights of `model` channels-last where the policy says so."""
    convolutions = [(n, m) for n, m in model.named_modules() if isinstance(m, CONVOLUTIONS)]
    if _policy is Policy.AUTO and any(isinstance(module, LINES) for _, module in convolutions):
        convolutions = [(n, m) for n, m in convolutions if not isinstance(m, LINES)]
        slower = "1-D convolutions were measured slower; enable_auto_channels_last() asks for it"
        notes.record_skipped("channels_last", slower)
    if not convolutions:
        return
    reason = _why_not(convolutions[0][1].weight.device, level)
    if isinstance(optimizer, torch.optim.LBFGS):
        reason = "LBFGS views each gradient as a row"
    if reason:
        notes.record_rejected("channels_last", reason)
        return
    for name, module in convolutions:
        weight = module.weight  # a weight computed by a parametrization has no layout of its own
        if type(weight) is nn.Parameter:
            weight.data = _channels_last(weight.data)
            notes.record_applied("channels_last", where=name)


def _channels_last(weight: Tensor) -> Tensor:
    if weight.dim() == 3:  # torch has no 3-d format: use that of an activation with one row
        return _channels_last(weight.unsqueeze(2)).squeeze(2)
    # `contiguous` leaves strides of dimensions of one element, for which DDP's buckets do not fit.
    return weight.to(memory_format=FORMATS[weight.dim()])


def _why_not(device: torch.device, level: str) -> str | None:
    if _policy is Policy.NEVER:
        return "disable_auto_channels_last() was called"
    if _policy is Policy.AUTO and level == "O0":
        return "level O0"
    if _policy is Policy.AUTO and not _gains(device):
        return f"no known gain on {device}; enable_auto_channels_last() asks for it"
    return None


def _gains(device: torch.device) -> bool:
    """Return whether the fastest convolution kernels of `device` are channels-last."""
    if device.type == "cpu":
        return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if device.type == "cuda":  # tensor cores; MIOpen prefers channels first
        return not torch.version.hip and torch.cuda.get_device_capability(device) >= (7, 0)
    if device.type == "xpu":
        properties = torch.xpu.get_device_properties(device)
        return bool(getattr(properties, "has_subgroup_2d_block_io", False))
    return False


def _set(new_policy: Policy) -> None:
    global _policy
    _policy = new_policy
