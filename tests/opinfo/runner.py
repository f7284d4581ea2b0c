"""Groups of cases in a process of their own, so that a crash or a hang is a row and no end."""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from typing import Any

from opinfo import cases, check
from opinfo.cases import Case

KINDS = ("module", "op", "foreach")
WAYS = ("weights", "training", "inference", "in place")
GROUPS_A_PROCESS = 25  # its memory grows with what it compiled
# In inference g++ takes some 6 s for a graph whatever it holds. In training it takes a second for
# each kernel, so that small graphs cost nothing, and less is compiled again where one is wrong.
TRAINED_OF_GROUP = 3


def groups(todo: Sequence[Case], size: int) -> list[list[Case]]:
    """Return runs of cases that share a graph: what our passes touch most comes first."""

    def rank(case: Case) -> tuple[int, int, str]:
        return KINDS.index(case.kind), WAYS.index(case.way), case.dtype

    ordered = sorted(todo, key=rank)  # stable: names stay in the order of the lists
    trained = [case for case in ordered if case.way == "training"]
    others = [case for case in ordered if case.way != "training"]
    runs = (others, size), (trained, max(1, size // TRAINED_OF_GROUP))
    return [run[start : start + n] for run, n in runs for start in range(0, len(run), n)]


def rows(todo: Sequence[Case], size: int, as_is: bool, timeout: int) -> Iterator[dict[str, Any]]:
    """Yield a row a case as they come."""
    waiting = groups(todo, size)[::-1]
    while waiting:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, initializer=_begin, initargs=(as_is,)) as pool:
            for _ in range(GROUPS_A_PROCESS):
                if not waiting:
                    return
                group = waiting.pop()
                try:
                    yield from pool.submit(_checked, group, timeout).result()
                except BrokenProcessPool:
                    if len(group) == 1:
                        yield {"case": str(group[0]), "status": "crash", "reason": "process died"}
                    else:
                        half = len(group) // 2
                        waiting += [group[half:], group[:half]]
                    break


def _begin(as_is: bool) -> None:
    import logging
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=logging.CRITICAL)  # of graph breaks, by the page
    torch.set_num_threads(1)  # the samples are small
    if as_is:
        from ipex_inductor import compat

        compat.compile_inner = _as_it_stands
        check.compiles = False


def _as_it_stands(gm: Any, example_inputs: Any, **_: Any) -> Any:
    """Run a graph op by op, in the place of Inductor's compiler."""

    def call(inputs: list[Any]) -> Any:
        given = list(inputs)
        inputs.clear()
        return gm(*given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _checked(group: Sequence[Case], timeout: int) -> list[dict[str, Any]]:
    """Return rows with what the tables say of them; the process ends if it takes too long."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(timeout)
    try:
        found = check.check(group)
    finally:
        signal.alarm(0)
    by_name = {str(case): case for case in group}
    return [asdict(judged(by_name[row.case], row)) for row in found]


def judged(case: Case, row: check.Row) -> check.Row:
    """Return the row, `listed` or `unlisted` where `both_wrong.toml` speaks of it."""
    listed = cases.row_of(case, "both_wrong")
    if listed and row.status == "both":
        row.status = "listed"
    elif listed and row.status == "pass" and check.compiles and not listed.get("together"):
        row.status, row.reason = "unlisted", f"passes, though listed: {listed['reason']}"
    return row
