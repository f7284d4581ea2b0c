"""Fingerprint of all facts that the plan of a step follows from, read before each step.

Only types, addresses, dtypes, layouts and the sharding of DTensors are held, of hundreds of
tensors. C++ reads tensors if its library can be built, and local parts of DTensors. Otherwise one
property after the other is read of all tensors at once, without a line of Python for each.
"""

import functools
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, not_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ipex_inductor.optim.operands import LeftError
from ipex_inductor.optim.planning import flags_of
from ipex_inductor.optim.shards import is_kind_of_shards, is_sharded
from ipex_inductor.optim.weights import Trained
from ipex_inductor.templates.optimizer.formulas import FORMULAS
from ipex_inductor.templates.optimizer.step_cuda import VECTOR
from ipex_inductor.templates.tensor_reader.look_cpp import Reader, reader

log = logging.getLogger("ipex_inductor")

PLAIN = {Tensor, nn.Parameter}
LASTING = {float, int, bool, str, type(None)}  # types whose values never change in place
# Parameters, and names of the states that a step reads, by group.
Named = tuple[list[list[nn.Parameter]], list[tuple[str, ...]]]
ASKED = (type, Tensor.size, Tensor.stride, attrgetter("dtype"))  # properties of each tensor


@dataclass
class Look:
    """Facts that are equal for two steps of one plan, the written tensors, and gradient addresses.

    A tensor is described by its type, address, sizes, strides and dtype. For a gradient, the
    address is replaced by whether a GPU may read it in vectors.
    """

    facts: list[Any]
    held: list[Tensor]  # parameters with a gradient, then states; local parts of DTensors
    addresses: "array[int]"
    kept: object  # keeps gradients in memory
    whole: list[Tensor] = field(default_factory=list)  # DTensors whose parts are in `held`

    @functools.cached_property
    def grads(self) -> list[Tensor]:
        """Gradients as Python objects, which most steps do not need."""
        return [p.grad for p in self.held[: len(self.addresses)] if p.grad is not None]

    @functools.cached_property
    def parts(self) -> list[Tensor]:
        """Local parts of the gradients."""
        return self.grads


def look(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained], last_facts: Sequence[Any] = ()
) -> Look | None:
    """Return the fingerprint of the next step of `optimizer`, or None if only `plan` can judge it.

    That is so for tensors that are not plain and for states that are missing.

    Args:
        optimizer: the fused optimizer.
        weights: master weights by parameter.
        last_facts: facts of an earlier fingerprint, which may be equal.
    """
    facts: list[Any] = []
    try:
        named = _groups(optimizer, facts)
        fingerprint = _look_at_groups(optimizer, named, last_facts) or _of_shards(optimizer, named)
        if fingerprint is None:
            return None
        fingerprint.facts += facts
        if not weights:
            return fingerprint
        rests = [
            weights.get(p)
            for p in fingerprint.whole or fingerprint.held
            if isinstance(p, nn.Parameter)
        ]
    except (LeftError, KeyError, TypeError):
        return None
    held = _local_parts([weight.rest for weight in rests if weight], fingerprint.facts)
    if {*map(type, held)} - PLAIN:
        return None
    fingerprint.facts += (*map(type, rests), *map(Tensor.data_ptr, held), *_forms(held))
    fingerprint.held += held
    return fingerprint


class Groups:
    """Parameter groups at one time, and the numbers that kernels get of them, if known."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Read the groups.

        Raises as `flags_of` does, and `KeyError` or `TypeError` for invalid groups.
        """
        self.facts: list[Any] = []
        self.named = _groups(optimizer, self.facts)
        self.numbers: list[array[float]] | None = None
        self.held = [dict(group) for group in optimizer.param_groups]
        self.lasting = all(map(_lasts, self.held))

    def still(self, optimizer: Optimizer) -> bool:
        """Return whether the groups hold equal values, except for learning rates.

        Another rate is stored, and the numbers are dropped.
        """
        groups = optimizer.param_groups
        if not self.lasting or len(groups) != len(self.held):
            return False
        for group, held in zip(groups, self.held, strict=True):
            rate = group.get("lr")
            if rate is not held["lr"] and type(rate) is type(held["lr"]) is float:
                self.numbers = self.numbers if rate == held["lr"] else None
                held["lr"] = rate
            both = chain(group, group.values()), chain(held, held.values())
            if len(group) != len(held) or not all(map(is_, *both)):
                return False
        return True


def _lasts(group: Mapping[str, Any]) -> bool:
    """Return whether no value of a group can change in place, except for its parameters."""
    values = (value for name, value in group.items() if name != "params")
    flat = chain.from_iterable(value if type(value) is tuple else [value] for value in values)
    return {*map(type, flat)} <= LASTING and type(group["params"]) is list


class Seen(NamedTuple):
    """Result of `compare_tensors`: gradients' addresses and holder, whether all launches ran."""

    addresses: "array[int]"
    kept: object
    taken: bool


def compare_tensors(
    optimizer: Optimizer,
    groups: Groups,
    facts: bytes,
    last: "array[int]",
    turns: bytes,
    take: bool,
) -> Seen | None:
    """Return the gradients' addresses if the tensors of `groups` still have these facts, else None.

    None as well if no reader counts versions, or if step counters differ from the values in
    `turns`. Versions of tensors that a step writes are counted otherwise, so call this after all
    that may refuse the step.

    Args:
        optimizer: the fused optimizer.
        groups: the groups at the last step.
        facts: facts of the last plan.
        last: addresses of gradients at the last step.
        turns: addresses of the launch slots.
        take: whether to run the launches as well, if groups and gradients have not changed.
    """
    read, state = _reader(), optimizer.state
    if read is None or not read.counts or not isinstance(state, dict):
        return None
    held = groups.held if take else None
    tables = optimizer.param_groups, held, *groups.named
    result = read.check_and_count(*tables, state, facts, turns, last.tobytes())
    if not result:
        return None if result is None else Seen(last, None, True)
    grad_holder, *moved = result
    return Seen(array("q", *moved) if moved else last, grad_holder, False)


def gradients(optimizer: Optimizer) -> Look | None:
    """Return the fingerprint of parameters and gradients alone."""
    groups = [_list(group["params"]) for group in optimizer.param_groups]
    return _look_at_groups(optimizer, (groups, [()] * len(groups)))


def _groups(optimizer: Optimizer, facts: list[Any]) -> Named:
    """Return parameters and state names of all groups; append other facts of them to `facts`."""
    name = type(optimizer).__name__
    groups, names = [], []
    for group in optimizer.param_groups:
        flags, rate = flags_of(optimizer, group), group["lr"]
        facts += (flags, group.get("capturable"), type(rate) is float or _place(rate))
        groups.append(_list(group["params"]))
        names.append(_states(name, flags))
    return groups, names


def _list(params: Any) -> list[nn.Parameter]:
    """Return `params` as a list."""
    return params if type(params) is list else [*params]


@functools.cache
def _states(name: str, flags: frozenset[str]) -> tuple[str, ...]:
    """Return the names of the state that a step reads."""
    rule = FORMULAS[name]
    return ("step",) * rule.counts + rule.state(flags)


def _place(rate: Any) -> Any:
    """Return device and dtype of a learning rate if it is a tensor, else None."""
    return (rate.device, rate.dtype) if isinstance(rate, Tensor) else None


@functools.cache
def _reader() -> Reader | None:
    """Return the C++ reader; None, which is logged once, if it cannot be built."""
    library = reader()
    if isinstance(library, Reader):
        return library
    log.info("tensors of an optimizer are looked at by Python before each step: %s", library)
    return None


def _look_at_groups(
    optimizer: Optimizer, named: Named, last_facts: Sequence[Any] = ()
) -> Look | None:
    """Return the fingerprint of plain tensors, read by C++ if possible."""
    read = _reader()
    if read is None:
        return _in_python(optimizer, named)
    return _read(read, optimizer, named, last_facts)


def _read(
    read: Reader, optimizer: Optimizer, named: Named, last_facts: Sequence[Any]
) -> Look | None:
    """Return the fingerprint of plain tensors, read by C++."""
    state = optimizer.state
    if not isinstance(state, dict):
        return None
    last_bytes = last_facts[0] if last_facts and isinstance(last_facts[0], bytes) else b""
    result = read.look(*named, state, last_bytes)
    return Look([result.facts], result.held, result.addresses, result.gradients) if result else None


def _of_shards(optimizer: Optimizer, named: Named) -> Look | None:
    """Return the fingerprint of tensors among which there are DTensors, else None."""
    if not any(map(is_sharded, chain.from_iterable(named[0]))):
        return None
    facts, owners, owned = _list_tensors(optimizer, named)
    held, grads = _local_parts(owners, facts), _local_parts(owned, facts)
    read = _reader()
    result = _read_in_python(held, grads) if read is None else read.tell(held, grads)
    if result is None:
        return None
    fingerprint = Look([*facts, *result[0]], held, result[1], grads, owners)
    fingerprint.grads, fingerprint.parts = owned, grads
    return fingerprint


def _local_parts(tensors: list[Any], facts: list[Any]) -> list[Any]:
    """Return the local parts of `tensors`; append the specs of DTensors to `facts`."""
    kinds = {*map(type, tensors)} - PLAIN
    if len(kinds) != 1 or not is_kind_of_shards(*kinds):
        return tensors  # all are plain, or no kernel steps some of them
    # `to_local` would take 20 us. Most tensors share one spec object.
    facts += (t._spec if type(t) in kinds else None for t in tensors)
    return [t._local_tensor if type(t) in kinds else t for t in tensors]


def _in_python(optimizer: Optimizer, named: Named) -> Look | None:
    """Return the fingerprint of plain tensors, read by Python."""
    facts, held, grads = _list_tensors(optimizer, named)
    result = _read_in_python(held, grads)
    if result is None:
        return None
    fingerprint = Look([*facts, *result[0]], held, result[1], grads)
    fingerprint.grads = grads
    return fingerprint


def _list_tensors(optimizer: Optimizer, named: Named) -> tuple[list[Any], list[Any], list[Any]]:
    """Return three lists: which parameters have no gradient, written tensors, and gradients.

    Written tensors are the parameters that have a gradient, and their states.
    """
    facts: list[Any] = []
    held: list[Any] = []
    grads: list[Any] = []
    all_states: list[Any] = []
    for params, names in zip(*named, strict=True):
        group_grads = [*map(attrgetter("grad"), params)]
        absent = [grad is None for grad in group_grads]
        facts.append(absent)
        if any(absent):
            present = [*map(not_, absent)]
            params, group_grads = [*compress(params, present)], [*compress(group_grads, present)]
        held += params
        grads += group_grads
        if names:
            states: Iterator[Any] = map(optimizer.state.get, params)
            group_states = map(itemgetter(*names), states)
            all_states += chain.from_iterable(group_states) if len(names) > 1 else group_states
    return facts, held + all_states, grads


def _read_in_python(held: list[Any], grads: list[Any]) -> "tuple[list[Any], array[int]] | None":
    """Return facts of plain tensors and addresses of gradients; None for other tensors."""
    if {*map(type, held), *map(type, grads)} - PLAIN:
        return None
    if {*map(attrgetter("layout"), grads)} - {torch.strided}:
        return None
    if any(not t.data_ptr() and t.numel() for t in chain(held, grads)):  # no memory
        return None
    if True in map(Tensor.is_neg, grads):
        return None
    addresses = array("q", map(Tensor.data_ptr, grads))
    facts = [*map(Tensor.data_ptr, held), *(address % VECTOR for address in addresses)]
    return [*facts, *_forms(held + grads)], addresses


def _forms(tensors: list[Tensor]) -> Iterator[Any]:
    """Yield type, size, stride and dtype of all tensors, one property after the other."""
    for read_form in ASKED:
        yield from map(read_form, tensors)
