"""What our inner compiler returns for a graph that may be captured: Inductor's code, in calls."""

import copy
from dataclasses import dataclass, field
from typing import Any

from torch._inductor.output_code import CompiledFxGraph, OutputCode

from ipex_inductor import compat
from ipex_inductor.capture.policy import NAME, Calls
from ipex_inductor.capture.reasons import why_not_code
from ipex_inductor.reporting import decisions


@dataclass
class CapturedCode(OutputCode):
    """Runs `inner`, or replays it. Whether it does is decided by each process for itself.

    An importable class of its own, as AOTAutogradCache saves it with the graph.
    """

    inner: CompiledFxGraph
    static: tuple[int, ...]  # numbers of the inputs that are weights, derived of them, or written
    moving: tuple[int, ...]  # those of all others that it reads
    written: tuple[int, ...] = ()  # of the static ones those that it writes
    events: tuple[decisions.Event, ...] = ()  # what was decided, where nothing stands around it
    _boxed_call: bool = True
    _calls: Calls | None = field(default=None, repr=False)

    def start(self, report: decisions.GraphReport | None) -> None:
        """Begin with nothing decided."""
        self._calls = Calls(self.inner, self.static, self.moving, report, self.written)

    def __call__(self, inputs: Any) -> Any:
        """Boxed call: `inputs` is emptied, as Inductor's own graphs do."""
        assert self._calls is not None
        return self._calls(inputs)

    def prepare_for_serialization(self) -> None:
        """Drop all that belongs to this process."""
        self._calls = None
        self.inner = copy.copy(self.inner)
        self.inner.prepare_for_serialization()

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Make a graph that came out of the cache callable again."""
        decisions.recall(self.events)
        self.inner = compat.reload_graph(self.inner, constants)
        self.inner.post_compile(example_inputs, constants, graph_kwargs)
        self.start(decisions.current())

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Keep the Triton kernels with the graph they belong to."""
        self.inner.set_triton_bundle(triton_bundle)


def around(
    inner: Any, report: decisions.GraphReport, static: tuple[int, ...], moving: tuple[int, ...]
) -> Any:
    """`inner` in calls that may be captured, or as it is, with the reason in `report`."""
    if not isinstance(inner, CompiledFxGraph):
        return inner  # it calls nothing
    if reason := why_not_code(inner):
        report.add("missed", NAME, reason)
        return inner
    written = tuple(sorted(inner.mutated_input_idxs))  # where they are, for the caller to see
    static = tuple(sorted({*static, *written}))
    moving = tuple(i for i in moving if i not in written)
    code = CapturedCode(inner, static, moving, written, tuple(report.events))
    code.start(report)
    return code
