"""The last plan of an optimizer, taken again while nothing but numbers and gradients changed.

Looking at a tensor as `plan` does takes microseconds, and there are hundreds. Nothing is held here
but addresses, dtypes and layouts, all of which must be as they were.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ipex_inductor.optim.batches import VECTOR
from ipex_inductor.optim.plan import LeftError, Plan, flags_of, plan
from ipex_inductor.optim.weights import Trained
from ipex_inductor.templates.formulas import FORMULAS

_known: "weakref.WeakKeyDictionary[Optimizer, tuple[list[Any], Plan]]" = weakref.WeakKeyDictionary()


def planned(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    scaled: bool,
    zeroed: bool,
    waits: bool,
) -> Plan:
    """The plan of this step: `plan`'s."""
    looks: list[Any] = [scaled, zeroed, waits]
    grads: list[int] = []
    written: list[Tensor] = []
    plain = _look(optimizer, weights, zeroed, looks, grads, written)
    known = _known.get(optimizer)
    if plain and known and known[0] == looks and known[1].as_far:
        made = known[1]
        for (rows, place), address in zip(made.grads, grads, strict=True):
            rows[place] = address
        made.written = written
        return made
    made = plan(optimizer, weights, scaled, zeroed, waits)
    if plain and made.lasts:
        _known[optimizer] = looks, made
    else:
        _known.pop(optimizer, None)
    return made


def _look(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    zeroed: bool,
    looks: list[Any],
    grads: list[int],
    written: list[Tensor],
) -> bool:
    """What a plan follows from; False if that is no plain matter."""
    rule = FORMULAS[type(optimizer).__name__]
    for group in optimizer.param_groups:
        try:
            flags = flags_of(optimizer, group)
        except LeftError:
            return False
        names = ("step",) * rule.counts + rule.state(flags)
        looks += [flags, group.get("capturable"), isinstance(group["lr"], Tensor)]
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                looks.append(None)
                continue
            own = optimizer.state.get(param, {}) if names else {}
            held: list[Any] = [param, *[own.get(name) for name in names]]
            if param in weights:
                looks.append(type(weights[param]))
                held.append(weights[param].rest)
            if type(grad) is not Tensor or grad.layout is not torch.strided:
                return False
            for tensor in held:
                kind = type(tensor)
                if kind is not Tensor and kind is not nn.Parameter:
                    return False
                looks.append(tensor.data_ptr())
                looks.append(tensor.dtype)
                looks.append(tensor.stride())
                looks.append(tensor.numel())
            looks.append((grad.dtype, grad.stride(), grad.numel(), grad.is_neg()))
            grads.append(grad.data_ptr())
            looks.append(grads[-1] % VECTOR)
            written += held
            if zeroed:
                written.append(grad)
    return True
