"""The last plan of an optimizer, taken again while nothing but numbers and gradients changed.

Looking at a tensor as `plan` does takes microseconds, and there are hundreds: here one question
after the other is put to all of them at once, with no line of Python for each. Nothing is held but
addresses, dtypes and layouts, all of which must be as they were.
"""

import weakref
from collections.abc import Mapping
from itertools import chain, compress
from operator import attrgetter, itemgetter, not_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ipex_inductor.errors import DeviceError
from ipex_inductor.optim.plan import LeftError, Plan, flags_of, plan
from ipex_inductor.optim.weights import Trained
from ipex_inductor.templates.formulas import FORMULAS
from ipex_inductor.templates.step_cuda import VECTOR

ASKED = (Tensor.numel, Tensor.stride, attrgetter("dtype"))  # of every tensor


class Asked(NamedTuple):
    """What `plan` is asked for beside the optimizer."""

    scaled: bool
    zeroed: bool
    waits: bool


_captured: list[Plan] = []  # nobody says when a graph that may read their tables is gone
_known: "weakref.WeakKeyDictionary[Optimizer, tuple[list[Any], Plan]]" = weakref.WeakKeyDictionary()


def planned(optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained], asked: Asked) -> Plan:
    """The plan of this step: `plan`'s. Raises `DeviceError` for a new one in a CUDA graph."""
    found = _look(optimizer, weights)
    known = _known.get(optimizer)
    if found and known and known[0] == [*found[0], asked] and known[1].as_far:
        _, held, grads = found
        made = known[1]
        for (rows, place), address in zip(made.grads, map(Tensor.data_ptr, grads), strict=True):
            rows[place] = address
        made.written = held + grads if asked.zeroed else held
        return made
    if capturing():
        todo = "Take a step like it outside of the graph first."
        raise DeviceError("a step like the last one", "another, while a graph is captured", todo)
    return plan(optimizer, weights, **asked._asdict())


def keep(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained], asked: Asked, made: Plan
) -> None:
    """Remember what was just run; what a graph has captured, for good."""
    if capturing() and not any(made is each for each in _captured):
        _captured.append(made)
    if (known := _known.get(optimizer)) and known[1] is made:
        return
    found = _look(optimizer, weights) if made.lasts else None
    if found is None:
        _known.pop(optimizer, None)
    else:
        _known[optimizer] = [*found[0], asked], made


def capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    here: Any = torch.cuda
    return bool(here.is_initialized() and here.is_current_stream_capturing())


def _look(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained]
) -> tuple[list[Any], list[Tensor], list[Tensor]] | None:
    """What a plan follows from, what it writes, and the gradients; None if that is no plain matter.

    A tensor is given by its address, numel, stride and dtype, a gradient by all but its address.
    """
    rule = FORMULAS[type(optimizer).__name__]
    looks: list[Any] = []
    held: list[Any] = []
    grads: list[Any] = []
    for group in optimizer.param_groups:
        params, given = group["params"], [*map(attrgetter("grad"), group["params"])]
        absent = [grad is None for grad in given]
        looks.append(absent)
        if any(absent):
            there = [*map(not_, absent)]
            params, given = [*compress(params, there)], [*compress(given, there)]
        try:
            flags = flags_of(optimizer, group)
            names = ("step",) * rule.counts + rule.state(flags)
            states = map(optimizer.state.get, params)
            found = [*map(itemgetter(*names), states)] if names else []  # type: ignore[arg-type]
        except (LeftError, KeyError, TypeError):  # no such states yet
            return None
        looks += (flags, group.get("capturable"), _place(group["lr"]))
        held += params
        held += chain.from_iterable(found) if len(names) > 1 else found
        grads += given
        if weights:
            rests = [*map(weights.get, params)]
            looks += map(type, rests)
            held += (weight.rest for weight in rests if weight)
    if {*map(type, held)} - {Tensor, nn.Parameter} or {*map(type, grads)} - {Tensor}:
        return None
    if {*map(attrgetter("layout"), grads)} - {torch.strided}:
        return None
    looks += map(Tensor.data_ptr, held)
    looks += map(Tensor.is_neg, grads)
    looks += (address % VECTOR for address in map(Tensor.data_ptr, grads))
    for ask in ASKED:
        looks += map(ask, held)
        looks += map(ask, grads)
    return looks, held, grads


def _place(rate: Any) -> Any:
    """Where a rate is, if that is a tensor."""
    return (rate.device, rate.dtype) if isinstance(rate, Tensor) else None
