"""What the plan of a step follows from, read of hundreds of tensors before each step.

Nothing is held but types, addresses, dtypes and layouts, and how DTensors are cut. C++ reads
tensors where it can be had, of DTensors what is here; where not, one question after the other is
put to all tensors at once, with no line of Python for each.
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
LASTING = {float, int, bool, str, type(None)}  # of which a value is never another
Named = tuple[list[list[nn.Parameter]], list[tuple[str, ...]]]  # of groups, and of their states
ASKED = (type, Tensor.size, Tensor.stride, attrgetter("dtype"))  # of every tensor


@dataclass
class Look:
    """Facts, which two steps of one plan have alike; what is written; where gradients are.

    A tensor is given by its type, address, sizes, strides and dtype, a gradient by all but its
    address, of which it counts whether a GPU may read it in vectors.
    """

    facts: list[Any]
    held: list[Tensor]  # those parameters that have a gradient first; of DTensors what is here
    addresses: "array[int]"
    kept: object  # as long as the gradients are to be in memory
    whole: list[Tensor] = field(default_factory=list)  # DTensors, of which parts are held

    @functools.cached_property
    def grads(self) -> list[Tensor]:
        """Gradients as Python has them, of which most steps need none."""
        return [p.grad for p in self.held[: len(self.addresses)] if p.grad is not None]

    @functools.cached_property
    def parts(self) -> list[Tensor]:
        """What is here of the gradients."""
        return self.grads


def look(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained], known: Sequence[Any] = ()
) -> Look | None:
    """What a plan follows from now; None for other tensors, or none: that is for `plan` to tell.

    `known`: facts that these may be again.
    """
    facts: list[Any] = []
    try:
        named = _groups(optimizer, facts)
        found = _found(optimizer, named, known) or _of_shards(optimizer, named)
        if found is None:
            return None
        found.facts += facts
        if not weights:
            return found
        rests = [weights.get(p) for p in found.whole or found.held if isinstance(p, nn.Parameter)]
    except (LeftError, KeyError, TypeError):
        return None
    held = _here([weight.rest for weight in rests if weight], found.facts)
    if {*map(type, held)} - PLAIN:
        return None
    found.facts += (*map(type, rests), *map(Tensor.data_ptr, held), *_forms(held))
    found.held += held
    return found


class Groups:
    """Groups as they stand, and what kernels are given of them (`numbers`, where that is known)."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Raises what `flags_of` does, and `KeyError`, `TypeError` for what holds no groups."""
        self.facts: list[Any] = []
        self.named = _groups(optimizer, self.facts)
        self.numbers: list[array[float]] | None = None
        self.held = [dict(group) for group in optimizer.param_groups]
        self.lasting = all(map(_lasts, self.held))

    def still(self, optimizer: Optimizer) -> bool:
        """Whether all they hold is the same, but for rates: of other rates no numbers are known."""
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
    """Whether nothing a group holds changes in its place, but who its parameters are."""
    values = (each for name, each in group.items() if name != "params")
    flat = chain.from_iterable(each if type(each) is tuple else [each] for each in values)
    return {*map(type, flat)} <= LASTING and type(group["params"]) is list


class Seen(NamedTuple):
    """The same tensors: where gradients lie, what keeps them, whether all turns were taken."""

    addresses: "array[int]"
    kept: object
    taken: bool


def again(
    optimizer: Optimizer,
    groups: Groups,
    facts: bytes,
    last: "array[int]",
    turns: bytes,
    take: bool,
) -> Seen | None:
    """What is seen, if the tensors of `groups` have these facts; None if not.

    Also if no reader counts versions, or steps are not where `turns` have them. Versions of what a
    step writes are counted else, so whatever may refuse to step comes before. If groups hold what
    they held, and gradients are where they were, that may `take` the turns.
    """
    read, state = _reader(), optimizer.state
    if read is None or not read.counts or not isinstance(state, dict):
        return None
    held = groups.held if take else None
    around = optimizer.param_groups, held, *groups.named
    told = read.again(*around, state, facts, turns, last.tobytes())
    if not told:
        return None if told is None else Seen(last, None, True)
    kept, *moved = told
    return Seen(array("q", *moved) if moved else last, kept, False)


def gradients(optimizer: Optimizer) -> Look | None:
    """The same of parameters and gradients alone."""
    groups = [_list(group["params"]) for group in optimizer.param_groups]
    return _found(optimizer, (groups, [()] * len(groups)))


def _groups(optimizer: Optimizer, facts: list[Any]) -> Named:
    """Of all groups; into `facts` what else a plan reads of them."""
    name = type(optimizer).__name__
    groups, names = [], []
    for group in optimizer.param_groups:
        flags, rate = flags_of(optimizer, group), group["lr"]
        facts += (flags, group.get("capturable"), type(rate) is float or _place(rate))
        groups.append(_list(group["params"]))
        names.append(_states(name, flags))
    return groups, names


def _list(params: Any) -> list[nn.Parameter]:
    return params if type(params) is list else [*params]


@functools.cache
def _states(name: str, flags: frozenset[str]) -> tuple[str, ...]:
    """What a step reads of a state."""
    rule = FORMULAS[name]
    return ("step",) * rule.counts + rule.state(flags)


def _place(rate: Any) -> Any:
    """Where a rate is, if that is a tensor."""
    return (rate.device, rate.dtype) if isinstance(rate, Tensor) else None


@functools.cache
def _reader() -> Reader | None:
    found = reader()
    if isinstance(found, Reader):
        return found
    log.info("tensors of an optimizer are looked at by Python before each step: %s", found)
    return None


def _found(optimizer: Optimizer, named: Named, known: Sequence[Any] = ()) -> Look | None:
    """What is there of groups."""
    read = _reader()
    return _in_python(optimizer, named) if read is None else _read(read, optimizer, named, known)


def _read(read: Reader, optimizer: Optimizer, named: Named, known: Sequence[Any]) -> Look | None:
    state = optimizer.state
    if not isinstance(state, dict):
        return None
    before = known[0] if known and isinstance(known[0], bytes) else b""
    told = read.look(*named, state, before)
    return Look([told.facts], told.held, told.addresses, told.gradients) if told else None


def _of_shards(optimizer: Optimizer, named: Named) -> Look | None:
    """The same, where some are DTensors."""
    if not any(map(is_sharded, chain.from_iterable(named[0]))):
        return None
    facts, owners, owned = _listed(optimizer, named)
    held, grads = _here(owners, facts), _here(owned, facts)
    read = _reader()
    told = _asked(held, grads) if read is None else read.tell(held, grads)
    if told is None:
        return None
    seen = Look([*facts, *told[0]], held, told[1], grads, owners)
    seen.grads, seen.parts = owned, grads
    return seen


def _here(tensors: list[Any], facts: list[Any]) -> list[Any]:
    """What this process holds of each; into `facts` how those that are DTensors are cut."""
    kinds = {*map(type, tensors)} - PLAIN
    if len(kinds) != 1 or not is_kind_of_shards(*kinds):
        return tensors  # all are plain, or some are nobody's whom a kernel steps
    # Not by `to_local`, which takes 20 us. What says how a tensor is cut is mostly one object.
    facts += (t._spec if type(t) in kinds else None for t in tensors)
    return [t._local_tensor if type(t) in kinds else t for t in tensors]


def _in_python(optimizer: Optimizer, named: Named) -> Look | None:
    """The same, from Python."""
    facts, held, grads = _listed(optimizer, named)
    told = _asked(held, grads)
    if told is None:
        return None
    seen = Look([*facts, *told[0]], held, told[1], grads)
    seen.grads = grads
    return seen


def _listed(optimizer: Optimizer, named: Named) -> tuple[list[Any], list[Any], list[Any]]:
    """Who has no gradient; parameters that have one, and their states; gradients."""
    facts: list[Any] = []
    held: list[Any] = []
    grads: list[Any] = []
    all_states: list[Any] = []
    for params, names in zip(*named, strict=True):
        given = [*map(attrgetter("grad"), params)]
        absent = [grad is None for grad in given]
        facts.append(absent)
        if any(absent):
            there = [*map(not_, absent)]
            params, given = [*compress(params, there)], [*compress(given, there)]
        held += params
        grads += given
        if names:
            states: Iterator[Any] = map(optimizer.state.get, params)
            found = map(itemgetter(*names), states)
            all_states += chain.from_iterable(found) if len(names) > 1 else found
    return facts, held + all_states, grads


def _asked(held: list[Any], grads: list[Any]) -> "tuple[list[Any], array[int]] | None":
    """Facts of plain tensors, and addresses of gradients; None for others."""
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
    for ask in ASKED:
        yield from map(ask, tensors)
