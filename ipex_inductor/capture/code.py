"""Output code of a graph that may be captured: Inductor's code behind a capture policy."""

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
    """Run `inner` or replay its CUDA graph; each process decides by itself.

    An importable class, as AOTAutogradCache pickles it with the graph.
    """

    inner: CompiledFxGraph
    static: tuple[int, ...]  # indices of inputs that are weights, derived from them, or written
    moving: tuple[int, ...]  # indices of all other inputs that it reads
    written: tuple[int, ...] = ()  # indices of static inputs that it writes
    events: tuple[decisions.Event, ...] = ()  # decisions to report if no outer code holds them
    _boxed_call: bool = True
    _calls: Calls | None = field(default=None, repr=False)

    def start(self, report: decisions.GraphReport | None) -> None:
        """Start with an undecided capture policy."""
        self._calls = Calls(self.inner, self.static, self.moving, report, self.written)

    def __call__(self, inputs: Any) -> Any:
        """Run the graph on boxed `inputs`, which are emptied as by Inductor's own graphs."""
        assert self._calls is not None
        return self._calls(inputs)

    def prepare_for_serialization(self) -> None:
        """Drop all state of this process."""
        self._calls = None
        self.inner = copy.copy(self.inner)
        self.inner.prepare_for_serialization()

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Make a graph loaded from the cache callable again."""
        decisions.recall(self.events)
        self.inner = compat.reload_graph(self.inner, constants)
        self.inner.post_compile(example_inputs, constants, graph_kwargs)
        self.start(decisions.current())

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Store the Triton kernels with their graph."""
        self.inner.set_triton_bundle(triton_bundle)


def wrap_code(
    inner: Any, report: decisions.GraphReport, static: tuple[int, ...], moving: tuple[int, ...]
) -> Any:
    """Return `inner` wrapped for capture, or `inner` itself with the reason in `report`.

    Args:
        inner: Inductor's output code.
        report: receives the reason.
        static: indices of the inputs that stay at their addresses.
        moving: indices of all other inputs that the graph reads.
    """
    if not isinstance(inner, CompiledFxGraph):
        return inner  # it launches nothing
    if reason := why_not_code(inner):
        report.add("missed", NAME, reason)
        return inner
    written = tuple(sorted(inner.mutated_input_idxs))  # written in place, visible to the caller
    static = tuple(sorted({*static, *written}))
    moving = tuple(i for i in moving if i not in written)
    code = CapturedCode(inner, static, moving, written, tuple(report.events))
    code.start(report)
    return code
