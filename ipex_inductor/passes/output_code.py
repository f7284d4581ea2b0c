"""What our inner compiler returns for a split graph: the prologue, then Inductor's code."""

import copy
import functools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor.output_code import CompiledFxGraph, OutputCode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from ipex_inductor import compat, report
from ipex_inductor.passes.program import Program


@dataclass
class PrologueCode(OutputCode):
    """Runs `program` on the weights when one of them changed, then `inner` on all inputs.

    An importable class of its own, so that AOTAutogradCache saves program and graph together: a
    wrapper function would not be saved, and a copied cache key would lose the prologue.
    """

    inner: CompiledFxGraph
    program: Program
    captured: bool
    events: tuple[report.Event, ...] = ()  # what was decided, for a process that loads this
    _boxed_call: bool = True
    _derived: "DerivedWeights | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Start without derived weights."""
        self._derived = DerivedWeights(self.program, self.captured)

    def __call__(self, inputs: Any) -> Any:
        """Boxed call: `inputs` is emptied, as Inductor's own graphs do."""
        assert self._derived is not None
        inputs.extend(self._derived.of([inputs[i] for i in self.program.inputs]))
        return self.inner(inputs)

    def prepare_for_serialization(self) -> None:
        """Drop all that belongs to this process; an entry holds no weights."""
        self._derived = None
        self.inner = copy.copy(self.inner)
        self.inner.prepare_for_serialization()

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Make a graph that came out of the cache callable again."""
        report.recall(self.events)
        loaded = compat.reload_graph(self.inner, constants)
        if loaded is None:
            raise RuntimeError("the cached graph could not be reloaded; it is compiled again")
        self.inner = loaded
        self.inner.post_compile(example_inputs, constants, graph_kwargs)
        self._derived = DerivedWeights(self.program, self.captured)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Keep the Triton kernels with the graph they belong to."""
        self.inner.set_triton_bundle(triton_bundle)


class DerivedWeights:
    """The results of a program, kept until a weight's identity, storage or version changes.

    Holds its weights weakly, and drops the results when one of them dies. What torch cannot see
    (`p.data.add_()`, numpy views, raw pointers) it cannot see either. `captured`: CUDA graphs read
    the results, so new ones are written to the old addresses.
    """

    def __init__(self, program: Program, captured: bool) -> None:
        self._program, self._captured = program, captured
        self._lock = threading.Lock()
        self._current: _Snapshot | None = None

    def of(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The derived tensors of `weights`, computed anew only when they changed."""
        seen = _fingerprint(weights)
        current = self._current  # read once: another thread may replace it
        if current is not None and seen is not None and current.seen == seen:
            return current.values
        with self._lock:
            return self._compute(weights, seen)

    def _compute(self, weights: Sequence[torch.Tensor], seen: list[Any] | None) -> list[Any]:
        old = self._current
        if old is not None and seen is not None and old.seen == seen:
            return old.values
        values = self._program.run(weights)
        storages = [w.untyped_storage() for w in weights]
        if self._captured and old is not None:
            values = _settle(old.values, values, {s._cdata for s in storages})
        token = object()
        self._current = _Snapshot(
            token,
            seen,
            values,
            [weakref.ref(w, functools.partial(self._drop, token)) for w in weights],
            # A weakly held storage keeps its address from being given to another one.
            [StorageWeakRef(s) for s in storages],  # type: ignore[no-untyped-call]
        )
        return values

    def _drop(self, token: object, _: object) -> None:
        if self._current is not None and self._current.token is token:
            self._current = None


@dataclass(frozen=True)
class _Snapshot:
    """What one run of the program gave, for which weights; replaced whole, never changed."""

    token: object
    seen: list[Any] | None
    values: list[torch.Tensor]
    weights: list["weakref.ref[torch.Tensor]"]
    storages: list[StorageWeakRef]


def _fingerprint(weights: Sequence[torch.Tensor]) -> list[Any] | None:
    """Equal for two calls only if no weight changed; None if torch does not count versions."""
    try:
        versions = [w._version for w in weights]
    except RuntimeError:  # inference tensors
        return None
    pointers = [w.data_ptr() for w in weights]
    storages = [w.untyped_storage()._cdata for w in weights]
    return [_optimizer_steps, *map(id, weights), versions, pointers, storages]


# torch's fused optimizers write parameters without counting a version (2.11 to 2.15), so every step
# of any optimizer in the process counts as a change.
_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    if not torch.compiler.is_compiling():  # a compiled step counts versions, and must not guard
        _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


def _settle(
    old: list[torch.Tensor], new: list[torch.Tensor], weights: set[int]
) -> list[torch.Tensor]:
    """The new values at the old addresses where they fit; never in the storage of a weight."""

    def fits(a: torch.Tensor, b: torch.Tensor) -> bool:
        same = a.device == b.device and a.dtype == b.dtype and a.shape == b.shape
        strided = a.layout == b.layout == torch.strided
        own = strided and a.untyped_storage()._cdata not in weights
        return same and own and a.stride() == b.stride()

    return [a.copy_(b) if fits(a, b) else b for a, b in zip(old, new, strict=True)]
