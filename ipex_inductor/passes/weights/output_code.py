"""Compiled code of a split graph: the prologue, then Inductor's code."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch._inductor.output_code import OutputCode

from ipex_inductor import compat
from ipex_inductor.passes.weights.derived import DerivedWeights, make_getter
from ipex_inductor.passes.weights.program import Program
from ipex_inductor.passes.weights.weight_snapshot import Check
from ipex_inductor.reporting import decisions


@dataclass
class PrologueCode(OutputCode):
    """Run `programs` on the weights that changed, then `inner` on the inputs that it reads.

    This is an importable class of its own, so that AOTAutogradCache saves programs and graph
    together: a wrapper function would not be saved, and a copied cache key would lose the prologue.
    """

    inner: OutputCode
    programs: tuple[Program, ...]
    reads: tuple[int, ...]  # numbers of the inputs that `inner` takes before the derived tensors
    captured: bool
    repeats: bool = False  # whether `inner` may run twice: see `pure.is_repeatable`
    events: tuple[decisions.Event, ...] = ()  # decisions, repeated in a process that loads this
    _boxed_call: bool = True
    _derived: DerivedWeights | None = field(default=None, repr=False)
    _read: Callable[[list[Any]], tuple[Any, ...]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Start without derived weights."""
        self._derived = DerivedWeights(self.programs, self.captured)
        self._read = make_getter(self.reads)

    def __call__(self, inputs: Any) -> Any:
        """Run the graph; a boxed call, which empties `inputs` as Inductor's own graphs do.

        Contents of weights on GPUs are compared while `inner` runs. If one was written, results are
        computed again, and `inner` runs again.
        """
        derived, read = self._derived, self._read
        assert derived is not None
        assert read is not None
        checks: list[Check] = []
        values = derived.of(inputs, checks if self.repeats else None)
        if not checks:
            inputs[:] = *read(inputs), *values
            return self._run(derived, inputs)
        saved_inputs = [*inputs]
        inputs[:] = *read(inputs), *values
        try:
            results = self.inner(inputs)
        except Exception:  # outdated results may hold invalid indices
            if derived.are_confirmed(saved_inputs, checks):
                raise
        else:
            if derived.are_confirmed(saved_inputs, checks):
                return results
            del results
        del values
        checks.clear()  # they hold outdated results
        return self._run(derived, [*read(saved_inputs), *derived.of(saved_inputs)])

    def _run(self, derived: DerivedWeights, inputs: list[Any]) -> Any:
        """Run `inner`, and note its time if results were computed in this call."""
        computed, derived.computed_now = derived.computed_now, False
        if not computed:
            return self.inner(inputs)
        began = time.perf_counter()
        results = self.inner(inputs)
        derived.note_call(time.perf_counter() - began)
        return results

    def prepare_for_serialization(self) -> None:
        """Drop all that belongs to this process; a cache entry holds no weights."""
        self._derived = self._read = None
        self.inner = copy.copy(self.inner)
        self.inner.prepare_for_serialization()

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Make a graph that was loaded from the cache callable again."""
        decisions.recall(self.events)
        self.inner = compat.reload_graph(self.inner, constants)
        # It looks for a fake mode and symbols in them: there are none here, or of subclasses.
        self.inner.post_compile(example_inputs, constants, graph_kwargs)
        self.__post_init__()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Keep the Triton kernels with the graph they belong to."""
        self.inner.set_triton_bundle(triton_bundle)
