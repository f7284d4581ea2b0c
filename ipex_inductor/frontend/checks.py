"""Checks of the arguments of `optimize`, before it changes anything."""

import sys
from typing import Any

import torch
from torch import nn

from ipex_inductor.errors import (
    ArgumentError,
    DeviceError,
    MixedDevicesError,
    PhaseError,
    WrappedModelError,
)
from ipex_inductor.frontend import graph_mode

DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)

# The modules of wrapper classes. A model can only be wrapped if the module was imported.
WRAPPERS = {
    "torch.nn.parallel": ("DistributedDataParallel", "DataParallel"),
    "torch.distributed.fsdp": ("FullyShardedDataParallel", "FSDPModule"),
    "torch._dynamo.eval_frame": ("OptimizedModule",),
}


def check(model: Any, dtype: Any, optimizer: Any) -> None:
    """Raise a typed error for arguments that do not fit together."""
    if not isinstance(model, nn.Module):
        actual = f"a {type(model).__name__}"
        raise ArgumentError("a torch.nn.Module", actual, "Pass the model itself.")
    if dtype not in DTYPES and not _is_all(model, dtype):
        expected = "torch.float32, torch.bfloat16, torch.float16 or what all parameters are"
        raise ArgumentError(expected, repr(dtype), "Leave it out to keep the model's own.")
    _check_phase(model, optimizer)
    _check_unwrapped(model)
    _check_devices(model)


def _is_all(model: nn.Module, dtype: Any) -> bool:
    """Return whether `model` has floating-point parameters, all in `dtype`."""
    return {p.dtype for p in model.parameters() if p.is_floating_point()} == {dtype}


def _check_phase(model: nn.Module, optimizer: Any) -> None:
    if model.training and optimizer is None:
        raise PhaseError(
            "The optimizer should be given for training mode",
            "an optimizer, as the model is in training mode",
            "none",
            "Pass optimizer=..., or call model.eval() first for inference.",
        )
    if not model.training and optimizer is not None:
        raise PhaseError(
            "The optimizer should not be given for inference mode",
            "no optimizer, as the model is in eval mode",
            f"a {type(optimizer).__name__}",
            "Leave it out, or call model.train() first.",
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        actual = f"a {type(optimizer).__name__}"
        raise ArgumentError("a torch.optim.Optimizer", actual, "Pass the one that steps the model.")
    if optimizer is not None:
        _check_steps(model, optimizer)


def _check_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    trained = {p for p in model.parameters() if p.requires_grad}
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    if trained and stepped and trained.isdisjoint(stepped):
        raise ArgumentError(
            "an optimizer of parameters of the model",
            f"a {type(optimizer).__name__} that steps none of them",
            "Make it of model.parameters(). Of several optimizers of one model give each with "
            "inplace=True: a copy of the model has parameters of its own.",
        )


def _check_unwrapped(model: nn.Module) -> None:
    wrappers = _loaded_wrappers()
    if model._compiled_call_impl is not None and not graph_mode.is_on(model):
        raise WrappedModelError(
            "a model that is not compiled yet",
            "one whose compile() was called",
            "Call optimize first, then compile what it returns (or graph_mode=True does).",
        )
    for module in model.modules():
        if isinstance(module, wrappers):
            raise WrappedModelError(
                "a model that is not wrapped yet",
                f"a {type(module).__name__}",
                "Call optimize on the plain model first, then wrap or compile what it returns.",
            )


def _loaded_wrappers() -> tuple[type, ...]:
    modules = ((sys.modules.get(module), names) for module, names in WRAPPERS.items())
    attributes = (getattr(module, name, None) for module, names in modules for name in names)
    return tuple(kind for kind in attributes if isinstance(kind, type))


def _check_devices(model: nn.Module) -> None:
    types = sorted({p.device.type for p in model.parameters()})
    if len(types) > 1:
        raise MixedDevicesError(
            "The model is mixed with different device type",
            "all parameters on one type of device",
            " and ".join(types),
            "Move the model to one device first: model.to(device).",
        )
    if types == ["meta"]:
        advice = "Give the model storage first: model.to_empty(device=...), then load its weights."
        raise DeviceError("parameters with storage", "parameters on device 'meta'", advice)
