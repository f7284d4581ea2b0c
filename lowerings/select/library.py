"""Which call of a GPU's libraries computes an op of ours with its epilogue: a record's, or none.

An op of ours and its constants say the whole epilogue, so a problem of one is what to measure: how
the library does with the epilogue against what Inductor makes of the same.
"""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.fx import Node

from ipex_inductor.autotune.record import Choice, Problem, encode
from ipex_inductor.autotune.select import (
    Selection,
    derived,
    lookup,
    nearest,
    neighboring,
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
from ipex_inductor.lowerings.problem.settings import settings_of
from ipex_inductor.lowerings.problem.workload import problem_of
from ipex_inductor.lowerings.select import sycl_model

Body = Callable[..., Tensor]

CALLS: dict[str, tuple[Call, ...]] = {
    str(torch.ops.ipex.conv.default): conv.CALLS,
    str(torch.ops.ipex.conv_pool.default): small_channel_pool.CALLS,
    str(torch.ops.ipex.conv_preactivated.default): batch_norm_relu.CALLS,
    str(torch.ops.ipex.conv_shortcut.default): residual.CALLS,
    str(torch.ops.ipex.conv_weight_grad.default): conv_weight.CALLS,
    str(torch.ops.ipex.gated_linear.default): glu.CALLS,
    str(torch.ops.ipex.linear.default): linear.CALLS,
}


def calls(problem: Problem) -> list[Call]:
    """Those that may compute it, what Inductor does first; none for what is no op of ours."""
    return [call for call in _with_epilogue(problem) if call.why_not(problem) is None]


def plain(problem: Problem) -> Body | None:
    """What Inductor makes an op of ours of; None for torch's own."""
    return CALLS[problem.op][0].body if problem.op in CALLS else None


def _with_epilogue(problem: Problem) -> list[Call]:
    return [call for call in CALLS.get(problem.op, ()) if call.has_epilogue(problem)]


class Chooser:
    """What `passes/fusion/library.py` asks, of one graph.

    What there is to choose from is told to who learns that (`listed.choosing`). `off`: a reason why
    nothing may be chosen, "" for none. `tables`: architectures whose table in the package is asked
    about what is not among `selected`. `guesses`: kernels in SYCL are taken on a model's word.
    """

    def __init__(
        self,
        selected: Mapping[bytes, Selection],
        off: str = "",
        tables: Collection[str] = (),
        guesses: bool = False,
    ) -> None:
        self._selected, self._off, self._tables = selected, off, tables
        self._guesses = guesses

    def __call__(self, node: Node) -> tuple[Body | None, str, str]:
        """What computes `node`, None for Inductor; the kind and the reason of that decision."""
        device = node.meta["val"].device
        if self._off:
            return None, "missed", self._off
        problem = problem_of(node, selector_hook.arch_of(device), settings_of(device.type))
        if problem is None:
            return None, "missed", "no record can say what it computes"
        offered = calls(problem)
        if len(offered) < 2:
            reasons = filter(None, (call.why_not(problem) for call in _with_epilogue(problem)))
            return None, "missed", next(reasons, "no library has this epilogue")
        if all(call.apart for call in offered):
            together = (call for call in CALLS[problem.op] if not call.apart)
            reasons = filter(None, (call.why_not(problem) for call in together))
            return None, "missed", next(reasons, "no kernel has it")
        choices = tuple(call.choice for call in offered)
        usual, key = offered[0], encode(problem)
        selector_hook.tell(selector_hook.Offer(problem, choices, usual.choice))
        known = self._selected.get(key)
        if known is None and problem.arch in self._tables:
            which = {key: choices}
            asked = (nearest, derived, neighboring)
            found = lookup({key}, None) or next(
                filter(None, (ask(which, None) for ask in asked)), {}
            )
            known = found.get(key)
        if known is None:
            return self._guessed(problem, offered, device)
        chosen = next((call for call in offered if call.choice == known.choice), None)
        if chosen is None:
            reason = f"{usual.name}: {known.choice.name} ({known.source}) is not offered here"
            return None, "choice", reason
        return _taken(chosen, usual, problem, device, str(known))

    def _guessed(
        self, problem: Problem, offered: list[Call], device: torch.device
    ) -> tuple[Body | None, str, str]:
        """What nobody measured is left to Inductor, but where a model is to be believed."""
        usual = offered[0]
        reason = f"{usual.name}: nothing is recorded of {len(offered)} choices"
        guess = sycl_model.fastest(problem, offered)
        if guess is None:
            return None, "choice", reason
        call, said = guess
        if not self._guesses:
            return None, "choice", f"{reason}; {said}, taken with option sycl=xpu"
        return _taken(call, usual, problem, device, f"{call.name}: {said}")


def _taken(
    chosen: Call, usual: Call, problem: Problem, device: torch.device, reason: str
) -> tuple[Body | None, str, str]:
    """What was chosen, if it is to be had on `device`."""
    if chosen is usual or chosen.apart:
        return None, "choice", f"apart, {reason}" if chosen.apart else reason
    if chosen.ready is not None and (lacking := chosen.ready(problem, device)):
        return None, "missed", f"{usual.name}: {chosen.name} is not to be had: {lacking}"
    return chosen.whole, "choice", reason


def call_of(problem: Problem, choice: Choice) -> Call:
    """The call that `choice` is. Raises `ValueError` if it may not compute `problem`."""
    for call in calls(problem):
        if call.choice == choice:
            return call
    raise ValueError(f"{choice.name} may not compute it")
