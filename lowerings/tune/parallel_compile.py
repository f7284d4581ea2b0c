"""Compile the graphs of a problem's candidates, as many at once as Inductor has workers.

A graph that fails in parallel is compiled again alone in this process, after the others. Its error
is then its own. If a compiler crashes, the process ends with it, and the parent knows which
candidate was compiling. Graphs are waited for in the order in which their kernels were handed to
the workers, so that of several hanging graphs the first is waited for.
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

Tried = Begun | Exception  # or the error that it failed with


@dataclass(frozen=True)
class Graphs:
    """Hold the graphs of one problem's candidates.

    Attributes:
        problem: problem of all graphs.
        choices: candidates of the problem.
        inputs: example operands.
        usual: graphs that are already started, by index in `choices`.
        doing: receives the index of the candidate that is worked on next.
    """

    problem: Problem
    choices: Sequence[Choice]
    inputs: Sequence[Tensor]
    usual: Mapping[int, Begun]
    doing: Callable[[int], None]

    def next(self, pending: deque[int], fewest: int, deadline: float) -> dict[int, Tried]:
        """Take the next candidates out of `pending`, and return their compiled graphs or errors.

        No graph is still compiling when this returns.

        Args:
            pending: indices of the candidates that are not compiled yet.
            fewest: number of candidates that are started even past the deadline.
            deadline: time of `time.monotonic` after which no further candidates are started.
        """
        graphs = self._start_graphs(pending, fewest, deadline)
        for i, graph in graphs.items():
            self.doing(i)
            if isinstance(graph, Begun):
                graphs[i] = try_compile(graph.wait_compiled)
        if compat.compilers() > 1:
            failed = [i for i, graph in graphs.items() if isinstance(graph, Exception)]
            for number, i in enumerate(failed):
                if number >= fewest and time.monotonic() > deadline:
                    break
                self.doing(i)
                graphs[i] = self._compile_alone(i)
        return graphs

    def _start_graphs(self, pending: deque[int], fewest: int, deadline: float) -> dict[int, Tried]:
        graphs: dict[int, Tried] = {}
        while pending and len(graphs) < compat.compilers():
            if len(graphs) >= fewest and time.monotonic() > deadline:
                break
            i = pending.popleft()
            self.doing(i)
            graphs[i] = self.usual.get(i) or try_compile(functools.partial(self._begin, i))
        return graphs

    def _begin(self, number: int) -> Begun:
        return compiling.start_choice(self.problem, self.choices[number], self.inputs)

    def _compile_alone(self, number: int) -> Tried:
        with compat.compiles_anew_in_this_process():
            return try_compile(lambda: self._begin(number).wait_compiled())


def try_compile(make: Callable[[], Begun]) -> Tried:
    """Return what `make` returns, or the error that it failed with."""
    try:
        return make()
    except measure.FATAL:
        raise
    except Exception as error:
        return error
