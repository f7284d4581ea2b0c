"""The last plan of an optimizer, taken again while nothing but numbers and gradients changed."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ipex_inductor.errors import DeviceError
from ipex_inductor.optim.alias_check import overlapping
from ipex_inductor.optim.launch_groups import UNSCALED
from ipex_inductor.optim.operands import LeftError
from ipex_inductor.optim.plan import Plan, next_numbers, numbers_of, run
from ipex_inductor.optim.planning import plan
from ipex_inductor.optim.state_fingerprint import Groups, Look, again, look
from ipex_inductor.optim.weights import Trained


class Asked(NamedTuple):
    """What `plan` is asked for beside the optimizer."""

    scaled: bool
    zeroed: bool
    waits: bool


AHEAD = 32  # steps
ALONE = Asked(scaled=False, zeroed=False, waits=True)  # a step, and nothing beside


@dataclass
class Known:
    """A plan, and what it followed from."""

    facts: list[Any]
    asked: Asked
    made: Plan
    addresses: "array[int]"  # of the gradients, as they stand in its rows
    plain: bool  # of `ALONE`, no DTensors; what is written has versions: inference tensors have not
    on_cuda: bool  # some of it lies there, so CUDA is in use, and no other kind of GPU
    groups: Groups | None = None  # as they stood at the last step that was `unchanged`
    apart: "tuple[array[int], bool] | None" = None  # whether those at these addresses are
    ahead: int = 0  # for how many steps numbers were made at once

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copies and pickles of an optimizer's attributes have None: they are yet to look."""
        return type(None), ()


_captured: list[Plan] = []  # nobody says when a graph that may read their tables is gone
KNOWN = "_ipex_last_step"  # an attribute, as its groups may lead back to the optimizer


def looked(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained]
) -> tuple[Look | None, Known | None]:
    """What is seen now, and what the last step of the optimizer left, if all is as it was."""
    last = vars(optimizer).get(KNOWN)
    seen = look(optimizer, weights, last.facts if last else ())
    return seen, last if last and seen and last.facts == seen.facts else None


def apart(last: Known | None, seen: Look | None, grads: list[Tensor]) -> bool:
    """Whether no two gradients share memory; what is `known` of those at the same addresses."""
    if last is None or seen is None:
        return not overlapping(enumerate(grads))
    if last.apart is None or last.apart[0] != seen.addresses:
        last.apart = seen.addresses, not overlapping(enumerate(grads))
    return last.apart[1]


def taken(last: Known | None, seen: Look | None, asked: Asked) -> Plan | None:
    """The last plan, for the gradients that are `seen`, if it was asked for the same."""
    if not (last and seen and last.asked == asked and last.made.as_far):
        return None
    made = last.made
    if last.addresses != seen.addresses:
        made.move(seen.addresses)
        last.addresses = seen.addresses
    made.written = seen.held + seen.parts if asked.zeroed else seen.held
    return made


def repeated(optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained]) -> bool:
    """Whether this step is like the last one and of nothing beside; it is done then.

    Not while a graph is captured.
    """
    if not weights and unchanged(optimizer):
        return True
    last = vars(optimizer).get(KNOWN)
    if last is None or last.asked != ALONE or _captures(last):
        return False
    seen, known = looked(optimizer, weights)
    made = taken(known, seen, ALONE)
    if made is None:
        return False
    run(made, optimizer, numbers_of(made, optimizer, UNSCALED), UNSCALED)
    return True


def unchanged(optimizer: Optimizer) -> bool:
    """The same in less time, of plain parameters without `weights`; versions are counted first.

    Where all is on GPUs and stays as it is, one call of C++ looks and launches, with numbers that
    are known ahead, of more steps the longer groups hold the same.
    """
    last = vars(optimizer).get(KNOWN)
    if last is None or not last.plain or _captures(last):
        return False
    made, groups, steady = last.made, last.groups, True
    around = last.facts[0], last.addresses, made.turns
    seen = again(optimizer, groups, *around, take=True) if groups and made.ready() else None
    if seen is not None and seen.taken:
        return True
    if seen is None:
        groups = _groups(optimizer, last)
        if groups is None:
            return False
        steady = groups.numbers is not None
    assert groups is not None
    if groups.numbers is None:
        groups.numbers = numbers_of(made, optimizer, UNSCALED)
    else:
        groups.numbers = next_numbers(made, groups.numbers)
    if seen is None:
        seen = again(optimizer, groups, *around, take=made.have(groups.numbers))
    taken = seen is not None and seen.taken
    if not taken:
        made.withdraw()
    if seen is None:
        return False
    if not taken:
        if seen.addresses is not last.addresses:
            made.move(seen.addresses)
            last.addresses = seen.addresses
        run(made, optimizer, groups.numbers, UNSCALED)  # `seen` keeps gradients in memory
    last.ahead = min(AHEAD, 2 * last.ahead + 1) if taken and steady and groups.lasting else 0
    made.look_ahead(groups.numbers, last.ahead)
    return True


def _groups(optimizer: Optimizer, last: Known) -> Groups | None:
    """The optimizer's, if what is read of them is what the last plan followed from."""
    if last.groups is None or not last.groups.still(optimizer):
        last.groups = None
        try:
            found = Groups(optimizer)
        except (LeftError, KeyError, TypeError):
            return None
        last.groups = found if found.facts == last.facts[1:] else None
    return last.groups


def planned(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    asked: Asked,
    last: Known | None,
    seen: Look | None,
) -> Plan:
    """The plan of this step: `plan`'s. Raises `DeviceError` for a new one in a CUDA graph."""
    made = taken(last, seen, asked)
    if made is not None:
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
    last = vars(optimizer).get(KNOWN)
    if last and last.made is made:
        return
    seen = look(optimizer, weights) if made.lasts else None
    if seen is None:
        vars(optimizer).pop(KNOWN, None)
    else:
        plain = asked == ALONE and type(seen.facts[0]) is bytes
        plain = plain and not any(tensor.is_inference() for tensor in seen.held)
        on_cuda = any(tensor.is_cuda for tensor in seen.held)
        vars(optimizer)[KNOWN] = Known(seen.facts, asked, made, seen.addresses, plain, on_cuda)


def capturing() -> bool:
    """Whether what is launched now goes into a graph of a GPU's."""
    here: Any
    for here in (torch.cuda, torch.xpu):
        if here.is_initialized() and here.is_current_stream_capturing():
            return True
    return False


def _captures(known: Known) -> bool:
    """The same for a step like this one, in less time where CUDA is in use."""
    return torch._C._cuda_isCurrentStreamCapturing() if known.on_cuda else capturing()
