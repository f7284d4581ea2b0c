"""Which call of a GPU's libraries computes an op of ours with its epilogue: a record's, or none.

An op of ours and its constants say the whole epilogue, so a problem of one is what to measure: how
the library does with the epilogue against what Inductor makes of the same.
"""

import re
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.fx import Node

from ipex_inductor.autotune.record import Choice, Problem, decode_problem, encode
from ipex_inductor.autotune.select import Selection, lookup
from ipex_inductor.lowerings import conv, linear, listed
from ipex_inductor.lowerings.calls import Call
from ipex_inductor.lowerings.settings import settings_of
from ipex_inductor.lowerings.workload import problem_of

Body = Callable[..., Tensor]

CALLS: dict[str, tuple[Call, ...]] = {
    str(torch.ops.ipex.conv.default): conv.CALLS,
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
    """What `passes/library.py` asks, of one graph.

    What there is to choose from is told to who learns that (`listed.choosing`). `off`: a reason why
    nothing may be chosen, "" for none. `tables`: architectures whose table in the package is asked
    about what is not among `selected`.
    """

    def __init__(
        self, selected: Mapping[bytes, Selection], off: str = "", tables: Collection[str] = ()
    ) -> None:
        self._selected, self._off, self._tables = selected, off, tables

    def __call__(self, node: Node) -> tuple[Body | None, str, str]:
        """What computes `node`, None for Inductor; the kind and the reason of that decision."""
        device = node.meta["val"].device
        if self._off:
            return None, "missed", self._off
        problem = problem_of(node, listed.arch_of(device), settings_of(device.type))
        if problem is None:
            return None, "missed", "no record can say what it computes"
        offered = calls(problem)
        if len(offered) < 2:
            reasons = filter(None, (call.why_not(problem) for call in _with_epilogue(problem)))
            return None, "missed", next(reasons, "no library has this epilogue")
        choices = tuple(call.choice for call in offered)
        usual, key = offered[0], encode(problem)
        listed.tell(listed.Offer(problem, choices, usual.choice))
        known = self._selected.get(key)
        if known is None and problem.arch in self._tables:
            known = lookup({key}, None).get(key)
        if known is None:
            reason = f"{usual.name}: nothing is recorded of {len(offered)} choices"
            return None, "choice", reason
        chosen = next((call for call in offered if call.choice == known.choice), None)
        if chosen is None:
            reason = f"{usual.name}: {known.choice.name} ({known.source}) is not offered here"
            return None, "choice", reason
        faster = self._faster(problem, known)
        if chosen is not usual and faster is not None:
            reason = f"{usual.name}: as a template is faster than {chosen.name}: {faster}"
            return None, "choice", reason
        return None if chosen is usual else chosen.whole, "choice", str(known)

    def _faster(self, problem: Problem, known: Selection) -> Selection | None:
        """What was selected for the plain convolution and its epilogue, if that takes less time."""
        for key, each in self._selected.items():
            if each.choice.kind != "template" or not each.measured:
                continue
            if each.best.p50 < known.best.p50 and _is_plain(decode_problem(key), problem):
                return each
        return None


def _is_plain(other: Problem, problem: Problem) -> bool:
    """Whether `other` is `problem`, a convolution of ours, as Inductor has it in its lists.

    Layouts may differ: where a size is one, what its stride is is anybody's choice.
    """
    if other.op != "aten.convolution.default" or problem.op != str(torch.ops.ipex.conv.default):
        return False
    words = [problem.constants["binary"], problem.constants["unary"]]
    words = [word for word in words if word != "none"]
    behind = re.findall(r"aten\.(\w+)\.", other.epilogue)[::-1]  # the outermost stands first
    operands = zip(other.operands[:2], problem.operands[:2], strict=True)
    same = behind == words if words else other.epilogue == problem.epilogue
    return (
        same
        and not (words and problem.epilogue)
        and all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in operands)
        and all(problem.constants.get(n) == value for n, value in other.constants.items())
    )


def call_of(problem: Problem, choice: Choice) -> Call:
    """The call that `choice` is. Raises `ValueError` if it may not compute `problem`."""
    for call in calls(problem):
        if call.choice == choice:
            return call
    raise ValueError(f"{choice.name} may not compute it")
