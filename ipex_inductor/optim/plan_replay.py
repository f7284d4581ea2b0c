"""Reuse of the last plan of an optimizer while only numbers and gradients have changed."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ipex_inductor.errors import DeviceError
from ipex_inductor.optim.alias_check import find_overlapping
from ipex_inductor.optim.launching.launch_groups import UNSCALED
from ipex_inductor.optim.operands import LeftError
from ipex_inductor.optim.plan import Plan, next_numbers, numbers_of, run
from ipex_inductor.optim.planning import plan
from ipex_inductor.optim.state_fingerprint import Groups, Look, compare_tensors, look
from ipex_inductor.optim.weights import Trained


class Asked(NamedTuple):
    """Arguments of `plan` other than the optimizer and its weights."""

    scaled: bool
    zeroed: bool
    waits: bool


AHEAD = 32  # most steps whose numbers are precomputed
ALONE = Asked(scaled=False, zeroed=False, waits=True)  # a plain step without extra work


@dataclass
class Known:
    """A plan and the facts that it follows from."""

    facts: list[Any]
    asked: Asked
    made: Plan
    addresses: "array[int]"  # of the gradients, as the plan has them
    plain: bool  # `ALONE`, without DTensors and inference tensors, which have no versions
    on_cuda: bool  # some tensors are on CUDA devices, so no other kind of GPU is used
    groups: Groups | None = None  # groups at the last step that `repeat_plain_step` repeated
    disjoint: "tuple[array[int], bool] | None" = None  # addresses, result of `are_disjoint`
    ahead: int = 0  # number of steps whose numbers were precomputed

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None, so that copies of an optimizer plan their own step."""
        return type(None), ()


_captured: list[Plan] = []  # graphs may read their tables; the end of a graph is not known
KNOWN = "_ipex_last_step"  # an attribute: its groups may refer to the optimizer


def look_and_compare(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained]
) -> tuple[Look | None, Known | None]:
    """Return a new fingerprint, and the last step of `optimizer` if its facts are equal."""
    last = vars(optimizer).get(KNOWN)
    fingerprint = look(optimizer, weights, last.facts if last else ())
    return fingerprint, last if last and fingerprint and last.facts == fingerprint.facts else None


def are_disjoint(last: Known | None, fingerprint: Look | None, grads: list[Tensor]) -> bool:
    """Return whether no two gradients share memory; cached for gradients at equal addresses."""
    if last is None or fingerprint is None:
        return not find_overlapping(enumerate(grads))
    if last.disjoint is None or last.disjoint[0] != fingerprint.addresses:
        last.disjoint = fingerprint.addresses, not find_overlapping(enumerate(grads))
    return last.disjoint[1]


def reuse_plan(last: Known | None, fingerprint: Look | None, request: Asked) -> Plan | None:
    """Return the last plan with the current addresses of gradients, if `request` is equal."""
    if not (last and fingerprint and last.asked == request and last.made.counters_unchanged):
        return None
    step_plan = last.made
    if last.addresses != fingerprint.addresses:
        step_plan.move(fingerprint.addresses)
        last.addresses = fingerprint.addresses
    step_plan.written = fingerprint.held + fingerprint.parts if request.zeroed else fingerprint.held
    return step_plan


def repeat_step(optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained]) -> bool:
    """Run the last plan if nothing but gradients changed and nothing else is requested.

    Returns whether the step was done. Nothing is done while a graph is captured.
    """
    if not weights and repeat_plain_step(optimizer):
        return True
    last = vars(optimizer).get(KNOWN)
    if last is None or last.asked != ALONE or _captures(last):
        return False
    fingerprint, unchanged_step = look_and_compare(optimizer, weights)
    step_plan = reuse_plan(unchanged_step, fingerprint, ALONE)
    if step_plan is None:
        return False
    run(step_plan, optimizer, numbers_of(step_plan, optimizer, UNSCALED), UNSCALED)
    return True


def repeat_plain_step(optimizer: Optimizer) -> bool:
    """Repeat a step of plain parameters without master weights by a faster path.

    Returns whether the step was done. Versions of written tensors are counted first. If all
    tensors are on GPUs and unchanged, one C++ call compares and launches, with precomputed
    numbers. More steps are precomputed the longer the groups stay unchanged.
    """
    last = vars(optimizer).get(KNOWN)
    if last is None or not last.plain or _captures(last):
        return False
    step_plan, groups, steady = last.made, last.groups, True
    last_facts = last.facts[0], last.addresses, step_plan.turns
    comparison = (
        compare_tensors(optimizer, groups, *last_facts, take=True)
        if groups and step_plan.ready()
        else None
    )
    if comparison is not None and comparison.taken:
        return True
    if comparison is None:
        groups = _groups(optimizer, last)
        if groups is None:
            return False
        steady = groups.numbers is not None
    assert groups is not None
    if groups.numbers is None:
        groups.numbers = numbers_of(step_plan, optimizer, UNSCALED)
    else:
        groups.numbers = next_numbers(step_plan, groups.numbers)
    if comparison is None:
        comparison = compare_tensors(
            optimizer, groups, *last_facts, take=step_plan.have(groups.numbers)
        )
    replayed = comparison is not None and comparison.taken
    if not replayed:
        step_plan.withdraw()
    if comparison is None:
        return False
    if not replayed:
        if comparison.addresses is not last.addresses:
            step_plan.move(comparison.addresses)
            last.addresses = comparison.addresses
        # `comparison` keeps gradients in memory until the kernels have run.
        run(step_plan, optimizer, groups.numbers, UNSCALED)
    last.ahead = min(AHEAD, 2 * last.ahead + 1) if replayed and steady and groups.lasting else 0
    step_plan.look_ahead(groups.numbers, last.ahead)
    return True


def _groups(optimizer: Optimizer, last: Known) -> Groups | None:
    """Return the groups if the plan's facts of them still hold, else None."""
    if last.groups is None or not last.groups.still(optimizer):
        last.groups = None
        try:
            groups = Groups(optimizer)
        except (LeftError, KeyError, TypeError):
            return None
        last.groups = groups if groups.facts == last.facts[1:] else None
    return last.groups


def find_plan(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    request: Asked,
    last: Known | None,
    fingerprint: Look | None,
) -> Plan:
    """Return the plan of this step: the last one if it still holds, else a new one.

    Args:
        optimizer: the fused optimizer.
        weights: master weights by parameter.
        request: arguments of `plan`.
        last: the last step, if its facts are equal.
        fingerprint: current state of the tensors, if it could be read.

    Raises:
        DeviceError: a new plan is needed while a CUDA graph is captured.
    """
    step_plan = reuse_plan(last, fingerprint, request)
    if step_plan is not None:
        return step_plan
    if is_capturing():
        advice = "Take a step like it outside of the graph first."
        raise DeviceError("a step like the last one", "another, while a graph is captured", advice)
    return plan(optimizer, weights, **request._asdict())


def keep(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained], request: Asked, step_plan: Plan
) -> None:
    """Remember the plan that was just run; plans captured by a graph are kept forever."""
    if is_capturing() and not any(step_plan is captured for captured in _captured):
        _captured.append(step_plan)
    last = vars(optimizer).get(KNOWN)
    if last and last.made is step_plan:
        return
    fingerprint = look(optimizer, weights) if step_plan.lasts else None
    if fingerprint is None:
        vars(optimizer).pop(KNOWN, None)
    else:
        plain = request == ALONE and type(fingerprint.facts[0]) is bytes
        plain = plain and not any(tensor.is_inference() for tensor in fingerprint.held)
        on_cuda = any(tensor.is_cuda for tensor in fingerprint.held)
        vars(optimizer)[KNOWN] = Known(
            fingerprint.facts, request, step_plan, fingerprint.addresses, plain, on_cuda
        )


def is_capturing() -> bool:
    """Return whether launches on the current stream of a GPU are captured in a graph."""
    backend: Any
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized() and backend.is_current_stream_capturing():
            return True
    return False


def _captures(last: Known) -> bool:
    """Return `is_capturing()` for a step like the last one, faster where CUDA is in use."""
    return torch._C._cuda_isCurrentStreamCapturing() if last.on_cuda else is_capturing()
