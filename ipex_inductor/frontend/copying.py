"""Copies of a model with its optimizer: the new optimizer steps the new model, with its state."""

import copy
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ipex_inductor.errors import ArgumentError
from ipex_inductor.frontend.notes import Notes
from ipex_inductor.optim.weights import TABLE


def copy_with_model(model: nn.Module, optimizer: Any = None) -> tuple[nn.Module, Any]:
    """Return deep copies of both; the new optimizer has the new model's parameters.

    Parameters outside the model, such as those of a loss function, stay the originals.

    Raises `ArgumentError` for a model that cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        copied = copy.deepcopy(model, memo)
        for param in model.parameters():
            if id(param) in memo:
                _carry(param, memo[id(param)], memo)
    except Exception as error:
        advice = "optimize(..., inplace=True) changes the model itself and needs no copy."
        reason = f"{type(error).__name__}: {error}"
        raise ArgumentError("a model that copy.deepcopy can copy", reason, advice) from error
    return copied, None if optimizer is None else _copy_optimizer(optimizer, memo)


def _carry(param: nn.Parameter, copied: nn.Parameter, memo: dict[int, Any]) -> None:
    """Copy what torch's copies of parameters lose: attributes and hooks."""
    for name, value in vars(param).items():
        if name not in vars(copied):
            vars(copied)[name] = copy.deepcopy(value, memo)
    if param.requires_grad:
        for hook in (param._backward_hooks or {}).values():
            copied.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            copied.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def warn_of_schedulers(optimizer: Any, notes: Notes) -> None:
    """Note that an LR scheduler which drives `optimizer` will not drive the copy.

    That can no longer be detected once the step is one of ours.
    """
    marked = hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")
    if marked and TABLE not in vars(optimizer):
        notes.record_rejected(
            "scheduler", "it drives the optimizer that was copied: make it of the new one"
        )


def _copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy with all attributes: torch copies only defaults, state and groups.

    LBFGS, for example, has more. The user's hooks stay.
    """
    params = (p for group in optimizer.param_groups for p in group["params"])
    memo |= {id(p): p for p in params if id(p) not in memo}
    copied = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            vars(copied)[name] = copy.copy(value)
        elif name not in vars(copied) and not _is_step(name, value, optimizer):
            vars(copied)[name] = copy.deepcopy(value, memo)
    return copied


def _is_step(name: str, value: Any, optimizer: Optimizer) -> bool:
    """Return whether the attribute is a patched step, or a method bound to `optimizer`."""
    return name == "step" or getattr(value, "__self__", None) is optimizer
