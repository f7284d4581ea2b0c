"""Choice of the GPU library call or kernel that computes an `ipex::` op with its epilogue.

An `ipex::` op and its constants define the whole epilogue. Its problem therefore measures how the
library performs with the epilogue, compared with what Inductor generates for it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.fx import Node

from ipex_inductor.autotune.record import Choice, Problem, encode
from ipex_inductor.autotune.select import (
    Selection,
    lookup,
    nearest,
    select_by_neighbors,
    select_by_stand_in,
)
from ipex_inductor.lowerings.common.calls import Call
from ipex_inductor.lowerings.conv import (
    batch_norm_relu,
    conv,
    conv_weight,
    residual,
    small_channel_pool,
)
from ipex_inductor.lowerings.gemm import glu, linear
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.node_problem import problem_of
from ipex_inductor.lowerings.problem.selector_hook import Offer
from ipex_inductor.lowerings.problem.settings import settings_of
from ipex_inductor.lowerings.quant import int8_scaled, weight_only_rows
from ipex_inductor.lowerings.select import sycl_model
from ipex_inductor.ops.quant import weight_only_rows as weight_only_ops

Body = Callable[..., Tensor]

CALLS: dict[str, tuple[Call, ...]] = {
    str(torch.ops.ipex.conv.default): conv.CALLS,
    str(torch.ops.ipex.conv_pool.default): small_channel_pool.CALLS,
    str(torch.ops.ipex.conv_preactivated.default): batch_norm_relu.CALLS,
    str(torch.ops.ipex.conv_shortcut.default): residual.CALLS,
    str(torch.ops.ipex.conv_weight_grad.default): conv_weight.CALLS,
    str(torch.ops.ipex.gated_linear.default): glu.CALLS,
    str(torch.ops.ipex.int8_conv.default): int8_scaled.CONV_CALLS,
    str(torch.ops.ipex.int8_linear.default): int8_scaled.LINEAR_CALLS,
    str(torch.ops.ipex.linear.default): linear.CALLS,
    str(torch.ops.ipex.weight_only_linear.default): weight_only_rows.CALLS,
}
# Bodies in fp64 of ops whose own reference rounds, by which kernels are verified.
EXACT: dict[str, Body] = {
    str(torch.ops.ipex.weight_only_linear.default): weight_only_ops.compute_exactly,
}


def calls(problem: Problem) -> list[Call]:
    """Return the calls that may compute `problem`, Inductor's default first.

    The list is empty if `problem` is not of an `ipex::` op.
    """
    return [call for call in _with_epilogue(problem) if call.why_not(problem) is None]


def default_body(problem: Problem) -> Body | None:
    """Return the body that Inductor lowers an `ipex::` op to by default; None for torch ops."""
    return CALLS[problem.op][0].body if problem.op in CALLS else None


def _with_epilogue(problem: Problem) -> list[Call]:
    """Return the calls registered for the problem's op that support its epilogue."""
    return [call for call in CALLS.get(problem.op, ()) if call.has_epilogue(problem)]


@dataclass(frozen=True)
class Candidates:
    """Hold a problem and the calls that may compute it, Inductor's default first."""

    problem: Problem
    calls: list[Call]

    @property
    def offer(self) -> Offer:
        """Return the calls as an offer of their choices."""
        choices = tuple(call.choice for call in self.calls)
        return Offer(self.problem, choices, choices[0])


class FirstCall(Protocol):
    """The interface of `tune/first_call.py`: measure while a graph compiles."""

    def measure(
        self, offers: Mapping[bytes, Offer], unselected: Collection[bytes], device: torch.device
    ) -> "Measured":
        """Return selections of problems in `offers` that have none."""


class Measured(Protocol):
    """The interface of the result: selections and reasons by encoded problem, and a summary."""

    @property
    def selections(self) -> Mapping[bytes, Selection]:
        """Return the selections."""

    @property
    def reasons(self) -> Mapping[bytes, str]:
        """Return why problems were not measured."""

    @property
    def summary(self) -> str:
        """Return what was measured; "" if nothing was."""


class Chooser:
    """Select the kernel for each node of one graph; called by `passes/fusion/library.py`.

    The candidates are reported through `selector_hook.add_offer`.

    Args:
        selected: selections by encoded problem.
        off: reason why nothing may be chosen; "" if there is none.
        tables: architectures whose packaged table is consulted for problems not in `selected`.
        guesses: whether SYCL kernels may be selected by the cost model alone.
        first_call: measures problems that no source selects for; None: they get the default.
    """

    def __init__(
        self,
        selected: Mapping[bytes, Selection],
        off: str = "",
        tables: Collection[str] = (),
        guesses: bool = False,
        first_call: FirstCall | None = None,
    ) -> None:
        self._off, self._tables, self._guesses = off, tables, guesses
        self._selections: dict[bytes, Selection | None] = dict(selected)
        self._first_call = first_call
        self._candidates: dict[bytes, Candidates | str] = {}
        self._unmeasured: dict[bytes, str] = {}

    def __call__(self, node: Node) -> tuple[Body | None, str, str]:
        """Return the body that computes `node`, with the kind and the reason of the decision.

        The body is None if Inductor's default computes it.
        """
        device = node.meta["val"].device
        if self._off:
            return None, "missed", self._off
        found = self._find_candidates(node)
        if isinstance(found, str):
            return None, "missed", found
        problem, listed = found.problem, found.calls
        selector_hook.add_offer(found.offer)
        selection = self._select(encode(problem), found.offer)
        if selection is None:
            return self._predict(problem, listed, device)
        default = listed[0]
        chosen = next((call for call in listed if call.choice == selection.choice), None)
        if chosen is None:
            reason = (
                f"{default.name}: {selection.choice.name} ({selection.source}) is not offered here"
            )
            return None, "choice", reason
        return _decide(chosen, default, problem, device, str(selection))

    def measure(self, nodes: Iterable[Node]) -> str:
        """Measure the problems of `nodes` that no source selects for, if that is allowed.

        Returns:
            What was measured; "" if nothing was.
        """
        offers: dict[bytes, Offer] = {}
        devices = set()
        for node in nodes if self._first_call and not self._off else ():
            candidates = self._find_candidates(node)
            if not isinstance(candidates, str):
                key = encode(candidates.problem)
                times = offers[key].times + 1 if key in offers else 1
                offers[key] = replace(candidates.offer, times=times)
                devices.add(node.meta["val"].device)
        unselected = {key for key, offer in offers.items() if self._select(key, offer) is None}
        if self._first_call is None or not unselected or len(devices) > 1:
            return ""
        measured = self._first_call.measure(offers, unselected, devices.pop())
        self._selections.update(measured.selections)
        self._unmeasured.update(measured.reasons)
        return measured.summary

    def _find_candidates(self, node: Node) -> Candidates | str:
        """Return the candidates of a node, or why there is no choice; a model repeats problems."""
        device = node.meta["val"].device
        problem = problem_of(node, selector_hook.arch_of(device), settings_of(device.type))
        if problem is None:
            return "a record cannot describe it"
        key = encode(problem)
        if key not in self._candidates:
            self._candidates[key] = _list_candidates(problem)
        return self._candidates[key]

    def _select(self, key: bytes, offer: Offer) -> Selection | None:
        """Return the selection of an encoded problem by any source but a model."""
        if key not in self._selections:
            may_look = offer.problem.arch in self._tables
            self._selections[key] = _look_up_shipped(key, offer) if may_look else None
        return self._selections[key]

    def _predict(
        self, problem: Problem, candidates: list[Call], device: torch.device
    ) -> tuple[Body | None, str, str]:
        """Select the default for a problem without records, or what the cost model predicts.

        Args:
            problem: problem of the node.
            candidates: calls that may compute it, the default first.
            device: device that the node runs on.
        """
        default = candidates[0]
        reason = f"{default.name}: nothing is recorded of {len(candidates)} choices"
        if unmeasured := self._unmeasured.get(encode(problem)):
            reason = f"{reason}; {unmeasured}"
        guess = sycl_model.fastest(problem, candidates)
        if guess is None:
            return None, "choice", reason
        call, prediction = guess
        if not self._guesses:
            return None, "choice", f"{reason}; {prediction}, taken with option sycl=xpu"
        return _decide(call, default, problem, device, f"{call.name}: {prediction}")


def _list_candidates(problem: Problem) -> Candidates | str:
    """Return the calls that may compute a problem, or why there is no choice."""
    candidates = calls(problem)
    if len(candidates) < 2:
        reasons = filter(None, (call.why_not(problem) for call in _with_epilogue(problem)))
        return next(reasons, "no library supports this epilogue")
    if all(call.apart for call in candidates):
        fused = (call for call in CALLS[problem.op] if not call.apart)
        reasons = filter(None, (call.why_not(problem) for call in fused))
        return next(reasons, "no kernel supports it")
    return Candidates(problem, candidates)


def _look_up_shipped(key: bytes, offer: Offer) -> Selection | None:
    """Return the selection of an encoded problem by the packaged tables."""
    if selection := lookup({key}, None).get(key):
        return selection
    for find_selections in (nearest, select_by_stand_in, select_by_neighbors):
        if selection := find_selections({key: offer.choices}, None).get(key):
            return selection
    return None


def _decide(
    chosen: Call, default: Call, problem: Problem, device: torch.device, reason: str
) -> tuple[Body | None, str, str]:
    """Return the decision for `chosen`, checking that it is available on `device`.

    Args:
        chosen: call that was selected.
        default: call that Inductor makes.
        problem: problem of the node.
        device: device that the node runs on.
        reason: why `chosen` was selected.

    Returns:
        The body (None for Inductor's default), the kind and the reason of the decision.
    """
    if chosen is default or chosen.apart:
        return None, "choice", f"apart, {reason}" if chosen.apart else reason
    if chosen.ready is not None and (lacking := chosen.ready(problem, device)):
        return None, "missed", f"{default.name}: {chosen.name} is not to be had: {lacking}"
    return chosen.compute, "choice", reason


def call_of(problem: Problem, choice: Choice) -> Call:
    """Return the call that `choice` stands for.

    Raises:
        ValueError: `choice` may not compute `problem`.
    """
    for call in calls(problem):
        if call.choice == choice:
            return call
    raise ValueError(f"{choice.name} may not compute it")
