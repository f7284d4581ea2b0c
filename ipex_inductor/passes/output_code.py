"""What our inner compiler returns for a split graph: the prologue, then Inductor's code."""

import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor.output_code import CompiledFxGraph, OutputCode
from torch.multiprocessing.reductions import StorageWeakRef

from ipex_inductor import compat
from ipex_inductor.passes.program import Program


@dataclass
class PrologueCode(OutputCode):
    """Runs `program` on the weights when one of them changed, then `inner` on all inputs.

    An importable class of its own, so that AOTAutogradCache saves program and graph together: a
    wrapper function would not be saved, and a copied cache key would lose the prologue.
    """

    inner: CompiledFxGraph
    program: Program
    _boxed_call: bool = True
    _derived: "DerivedWeights | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Start without derived weights."""
        self._derived = DerivedWeights(self.program)

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
        loaded = compat.reload_graph(self.inner, constants)
        if loaded is None:
            raise RuntimeError("the cached graph could not be reloaded; it is compiled again")
        self.inner = loaded
        self.inner.post_compile(example_inputs, constants, graph_kwargs)
        self._derived = DerivedWeights(self.program)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Keep the Triton kernels with the graph they belong to."""
        self.inner.set_triton_bundle(triton_bundle)


class DerivedWeights:
    """The results of a program, kept until a weight's identity, storage or version changes.

    Holds its weights weakly, and drops the results when one of them dies. What torch cannot see
    (`p.data.add_()`, numpy views, raw pointers) it cannot see either.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._lock = threading.Lock()
        self._seen: list[Any] | None = None
        self._weights: list[weakref.ref[torch.Tensor]] = []
        self._storages: list[StorageWeakRef] = []
        self._values: list[torch.Tensor] = []
        self.runs = 0

    def of(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The derived tensors of `weights`, computed anew only when they changed."""
        if self._seen is not None and self._seen == _fingerprint(weights):
            return self._values
        with self._lock:
            return self._compute(weights)

    def _compute(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        now = _fingerprint(weights)
        if self._seen is None or self._seen != now:
            self._seen = None
            fresh = self._program.run(weights)
            storages = [w.untyped_storage() for w in weights]
            self._values = _settle(self._values, fresh, {s._cdata for s in storages})
            self._weights = [weakref.ref(w, self._drop) for w in weights]
            # A weakly held storage keeps its address from being given to another one.
            self._storages = [StorageWeakRef(s) for s in storages]  # type: ignore[no-untyped-call]
            self._seen = now
            self.runs += 1
        return self._values

    def _drop(self, _: object) -> None:
        self._seen, self._values = None, []


def _fingerprint(weights: Sequence[torch.Tensor]) -> list[Any] | None:
    """Equal for two calls only if no weight changed; None if torch does not count versions."""
    try:
        versions = [w._version for w in weights]
    except RuntimeError:  # inference tensors
        return None
    pointers = [w.data_ptr() for w in weights]
    storages = [w.untyped_storage()._cdata for w in weights]
    return [*map(id, weights), versions, pointers, storages]


def _settle(
    old: list[torch.Tensor], new: list[torch.Tensor], weights: set[int]
) -> list[torch.Tensor]:
    """The new values, on a GPU at the old addresses where they fit: captured graphs read those.

    Never written: a result that shares its storage with a weight.
    """
    if len(old) != len(new):
        return new

    def fits(a: torch.Tensor, b: torch.Tensor) -> bool:
        same = a.device == b.device and a.dtype == b.dtype and a.shape == b.shape
        return (
            same
            and a.device.type != "cpu"
            and a.stride() == b.stride()
            and a.untyped_storage()._cdata not in weights
        )

    return [a.copy_(b) if fits(a, b) else b for a, b in zip(old, new, strict=True)]
