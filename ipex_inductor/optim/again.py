"""The last plan of an optimizer, taken again while nothing but numbers and gradients changed.

Looking at a tensor as `plan` does takes microseconds, and there are hundreds: here one question
after the other is put to all of them at once, with no line of Python for each. Nothing is held but
addresses, dtypes and layouts, all of which must be as they were.
"""

import weakref
from collections.abc import Mapping
from itertools import chain, compress
from operator import attrgetter, itemgetter, not_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ipex_inductor.optim.batches import VECTOR
from ipex_inductor.optim.plan import LeftError, Plan, flags_of, plan
from ipex_inductor.optim.weights import Trained
from ipex_inductor.templates.formulas import FORMULAS

ASKED = (Tensor.numel, Tensor.stride, attrgetter("dtype"))  # of every tensor
_known: "weakref.WeakKeyDictionary[Optimizer, tuple[list[Any], Plan]]" = weakref.WeakKeyDictionary()


def planned(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    scaled: bool,
    zeroed: bool,
    waits: bool,
) -> Plan:
    """The plan of this step: `plan`'s."""
    found = _look(optimizer, weights)
    if found is None:
        _known.pop(optimizer, None)
        return plan(optimizer, weights, scaled, zeroed, waits)
    looks, held, grads = found
    looks += (scaled, zeroed, waits)
    known = _known.get(optimizer)
    if known and known[0] == looks and known[1].as_far:
        made = known[1]
        for (rows, place), address in zip(made.grads, map(Tensor.data_ptr, grads), strict=True):
            rows[place] = address
        made.written = held + grads if zeroed else held
        return made
    made = plan(optimizer, weights, scaled, zeroed, waits)
    if made.lasts:
        _known[optimizer] = looks, made
    else:
        _known.pop(optimizer, None)
    return made


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
        looks += (flags, group.get("capturable"), isinstance(group["lr"], Tensor))
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
