"""The graphs of a problem's choices, as many compiled at once as Inductor has compilers.

A graph that fails in company is compiled again alone in this process, when the others are done:
there its reason is its own, and a compiler that crashes takes the process with it, whose parent
knows who was at work. Graphs are waited for in the order in which their kernels were handed to the
workers, so that of whoever hangs the first is waited for.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.autotune import measure
from ipex_inductor.autotune.record import Choice, Problem
from ipex_inductor.lowerings.tune import compiling
from ipex_inductor.lowerings.tune.compiling import Begun

Tried = Begun | Exception  # or what it failed by


@dataclass(frozen=True)
class Graphs:
    """Of one problem; `usual` is begun, by its number, and `doing` hears whose turn is next."""

    problem: Problem
    choices: Sequence[Choice]
    inputs: Sequence[Tensor]
    usual: Mapping[int, Begun]
    doing: Callable[[int], None]

    def next(self, left: deque[int], fewest: int, deadline: float) -> dict[int, Tried]:
        """The graphs of the first numbers in `left`, which go out of it: compiled, or why not.

        None is still being compiled. Past `deadline` (of `time.monotonic`) only the `fewest` begin.
        """
        graphs = self._begun(left, fewest, deadline)
        for i, graph in graphs.items():
            self.doing(i)
            if isinstance(graph, Begun):
                graphs[i] = tried(graph.waited)
        if compat.compilers() > 1:
            failed = [i for i, graph in graphs.items() if isinstance(graph, Exception)]
            for number, i in enumerate(failed):
                if number >= fewest and time.monotonic() > deadline:
                    break
                self.doing(i)
                graphs[i] = self._alone(i)
        return graphs

    def _begun(self, left: deque[int], fewest: int, deadline: float) -> dict[int, Tried]:
        graphs: dict[int, Tried] = {}
        while left and len(graphs) < compat.compilers():
            if len(graphs) >= fewest and time.monotonic() > deadline:
                break
            i = left.popleft()
            self.doing(i)
            graphs[i] = self.usual.get(i) or tried(functools.partial(self._begin, i))
        return graphs

    def _begin(self, number: int) -> Begun:
        return compiling.begun(self.problem, self.choices[number], self.inputs)

    def _alone(self, number: int) -> Tried:
        with compat.compiles_anew_in_this_process():
            return tried(lambda: self._begin(number).waited())


def tried(make: Callable[[], Begun]) -> Tried:
    """What it makes, or what it failed by."""
    try:
        return make()
    except measure.FATAL:
        raise
    except Exception as error:
        return error
