"""Kernels in SYCL for an Intel GPU that is not here: SPIR-V, and native code where ocloc is.

They are entries of the kernel cache under the keys that the runtime looks for. Native code is kept
only if its binary says what was promised of it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from ipex_inductor import compat
from ipex_inductor.aot_cache import default_store, kernels
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.compiler.inner_compile import copied
from ipex_inductor.compiler.kernel_selection import sycl_kernels
from ipex_inductor.errors import ArgumentError, MissingPackageError, SyclAbsentError, SyclError
from ipex_inductor.optim import FUSED_OPTIMIZERS
from ipex_inductor.optim import kernels as steps
from ipex_inductor.optim.planning import expected
from ipex_inductor.optim.weights import TABLE
from ipex_inductor.prebuild import described_xpu
from ipex_inductor.prebuild.describing import INDEX
from ipex_inductor.prebuild.graphs import Dynamic, Prebuilt, checked, described_as, marked
from ipex_inductor.target.device import Target
from ipex_inductor.templates.sycl import binaries, ocloc, shim, worker, zebin
from ipex_inductor.templates.sycl.source import Source
from ipex_inductor.templates.sycl.step import step_source
from ipex_inductor.templates.tensor_reader.look_cpp import reader

XPU = torch.device("xpu", INDEX)
ONLY = "what is compiled ahead for Intel GPUs is kernels in SYCL"


def prebuild(
    model: nn.Module,
    example_inputs: Sequence[Any],
    target: Target,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic: Dynamic | None = None,
    training: bool = False,
    optimizer: Optimizer | None = None,
    scaler: bool = False,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Prebuilt:
    """All kernels in SYCL that there are to choose from for `model` on `target`.

    In inference those of its linear layers and convolutions, in all blocks; in training, for which
    products have none, those of the fused step of `optimizer`. With the libraries by which a
    process calls them, so that none is compiled there. Takes what `graphs.prebuild` takes, and
    raises what that and `described_xpu.device` do; `SyclAbsentError` where nothing compiles.
    """
    checked(model, mode, training)
    began = time.perf_counter()
    found = (
        {}
        if training
        else _of_graphs(model, example_inputs, target, kwargs, dynamic, mode, options)
    )
    if optimizer is not None:
        found |= _of_step(optimizer, scaler)
    done = _Built(target)
    for source, name in found.items():
        done.add(source, name)
    done.entries |= _libraries(optimizer is not None)
    seconds = time.perf_counter() - began
    return Prebuilt(
        target,
        ONLY,
        own=done.entries,
        seconds=seconds,
        gate=tuple(done.gate),
        native=done.ocloc or done.lacking,
        failed=tuple(done.failed),
    )


def _of_graphs(
    model: nn.Module,
    example_inputs: Sequence[Any],
    target: Target,
    kwargs: Mapping[str, Any] | None,
    dynamic: Dynamic | None,
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> dict[Source, str]:
    found: dict[Source, str] = {}
    fake_tensors: Any = FakeTensorMode  # which has no types

    def learn(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        eager = copied(gm)
        found.update(sycl_kernels(gm, inputs, mode, options))
        return eager.forward

    with (
        described_xpu.device(target),
        fake_tensors(allow_non_fake_inputs=True),
        torch.no_grad(),
        compat.dynamo_unchanged(),
    ):
        given = (model, tuple(example_inputs), dict(kwargs or {}))
        twin, args, named = described_as(given, XPU)
        marked(args, named, dynamic)
        compiled: Any = torch.compile(twin, backend=learn)
        compiled(*args, **named)
    return found


def _libraries(steps: bool) -> dict[Key, Entry]:
    """What a process compiles before the first kernel; for `steps`, what looks at their tensors."""
    with kernels.looked_for() as read:
        if steps:
            reader.__wrapped__()  # also where this process has it already
    store = default_store.store()
    found = {key: entry for key in read if store and (entry := store.get(key))}
    return dict([shim.shipped()]) | found


def _of_step(optimizer: Optimizer, scaler: bool) -> dict[Source, str]:
    """As `optim/launch_groups_sycl.py` asks for them; gradients have their parameters' dtypes.

    Norms of Lamb and Lars are kernels of the same source, and what clips gradients or unscales them
    is a number of it; the norm that is clipped is torch's own there.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in FUSED_OPTIMIZERS:
        todo = "Leave it out: it runs as torch has it."
        raise ArgumentError("an optimizer with a fused step there", name, todo)
    own = vars(optimizer)
    options = own.get(steps.OPTIONS) or steps.Options()
    scaled = scaler or options.clip_norm is not None
    found = expected(optimizer, own.get(TABLE, {}), scaled, options.zero_grad)
    return {step_source(k, counting=False): f"{name} {k.param} {k.rest}".strip() for k in found}


class _Built:
    """What was compiled so far. Raises `SyclAbsentError`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.entries: dict[Key, Entry] = {}
        self.gate: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.ocloc, self.lacking = "", ""
        self._compiler = next((d for d in shim.shim().devices if d["type"] == "cpu"), None)
        if self._compiler is None:
            todo = 'pip install "ipex-inductor[sycl-cpu]"'
            raise SyclAbsentError("SYCL's CPU device, for which its compiler starts", "none", todo)
        try:
            self.ocloc = ocloc.named()
        except MissingPackageError as error:
            self.lacking = f"none: {error}"

    def add(self, source: Source, name: str) -> None:
        """Compile it, and hold it against the gate."""
        try:
            key = binaries.spirv_key(source)
            spirv = self.entries[key] = binaries.spirv(source, lambda: self._spirv(source))
            rows = [*self._native(source, spirv.blob)] if self.ocloc else [{"wrong": ""}]
        except (SyclError, ValueError) as error:
            rows = [{"wrong": str(error).partition("\n")[0]}]
        self.gate += [{"name": name, **row} for row in rows]
        self.failed += [f"kernel {name}: {row['wrong']}" for row in rows if row["wrong"]]

    def _spirv(self, source: Source) -> bytes:
        assert self._compiler is not None
        return worker.compiled(source, self._compiler, native=False).spirv

    def _native(self, source: Source, spirv: bytes) -> Iterator[dict[str, Any]]:
        arch = self.target.arch
        key = binaries.native_key(source, arch, self.ocloc)
        entry = kernels.kernel(key, lambda: (source.manifest, ocloc.native(source, spirv, arch)))
        promised = "matrix" in source.needs
        wrong = False
        for facts in zebin.facts(entry.blob):
            said = facts.wrong(self.target, promised)
            wrong = wrong or bool(said)
            yield asdict(facts) | {"wrong": said}
        if not wrong:
            self.entries[key] = entry
