"""SYCL kernels for an absent Intel GPU: SPIR-V, and native code where ocloc is installed.

They are entries of the kernel cache under the keys that the runtime looks up. Native code is kept
only if its binary confirms the promised properties.
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
from ipex_inductor.compiler.inner_compile import copy_graph
from ipex_inductor.compiler.kernel_selection import sycl_kernels
from ipex_inductor.errors import ArgumentError, MissingPackageError, SyclAbsentError, SyclError
from ipex_inductor.optim import FUSED_OPTIMIZERS
from ipex_inductor.optim import kernels as steps
from ipex_inductor.optim.planning import list_kernels
from ipex_inductor.optim.weights import TABLE
from ipex_inductor.prebuild import described_xpu
from ipex_inductor.prebuild.describing import INDEX
from ipex_inductor.prebuild.graphs import (
    Dynamic,
    Prebuilt,
    check_model,
    fake_copy,
    mark_dynamic_sizes,
)
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
    """Compile all SYCL kernels that may be chosen for `model` on `target`.

    For inference these are the kernels of linear layers and convolutions, in all block sizes. For
    training, where GEMMs have no SYCL kernels, they are those of the fused step of `optimizer`. The
    libraries by which a process calls them are included, so that none is compiled on the target.

    Args:
        model: Module to compile.
        example_inputs: Positional arguments of a call.
        target: Intel GPU.
        kwargs: Keyword arguments of that call.
        dynamic: As for `graphs.prebuild`.
        training: Compile no kernels of graphs.
        optimizer: Also compile the kernels of this optimizer's fused step.
        scaler: The step runs under `GradScaler`.
        mode: As for `torch.compile`.
        options: As for `torch.compile`.

    Raises:
        SyclAbsentError: no SYCL compiler can be used.
        Exception: errors of `graphs.prebuild` and `described_xpu.device`.
    """
    check_model(model, mode, training)
    began = time.perf_counter()
    sources = (
        {}
        if training
        else _of_graphs(model, example_inputs, target, kwargs, dynamic, mode, options)
    )
    if optimizer is not None:
        sources |= _of_step(optimizer, scaler)
    done = _Built(target)
    for source, name in sources.items():
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
    """Return the sources of all candidate kernels of the model's graphs, with their names.

    Args:
        model: Module to compile.
        example_inputs: Positional arguments of a call.
        target: Intel GPU.
        kwargs: Keyword arguments of that call.
        dynamic: As for `graphs.prebuild`.
        mode: As for `torch.compile`.
        options: As for `torch.compile`.
    """
    sources: dict[Source, str] = {}
    fake_tensors: Any = FakeTensorMode  # without type annotations

    def learn(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        eager = copy_graph(gm)
        sources.update(sycl_kernels(gm, inputs, mode, options))
        return eager.forward

    with (
        described_xpu.device(target),
        fake_tensors(allow_non_fake_inputs=True),
        torch.no_grad(),
        compat.dynamo_unchanged(),
    ):
        call = (model, tuple(example_inputs), dict(kwargs or {}))
        twin, args, named = fake_copy(call, XPU)
        mark_dynamic_sizes(args, named, dynamic)
        compiled: Any = torch.compile(twin, backend=learn)
        compiled(*args, **named)
    return sources


def _libraries(steps: bool) -> dict[Key, Entry]:
    """Return the libraries a process needs before its first kernel, as entries of the cache.

    `steps`: include the library that reads the tensors of optimizer steps.
    """
    with kernels.record_keys() as keys:
        if steps:
            reader.__wrapped__()  # also where this process has it already
    store = default_store.store()
    entries = {key: entry for key in keys if store and (entry := store.get(key))}
    return dict([shim.cache_entry()]) | entries


def _of_step(optimizer: Optimizer, scaler: bool) -> dict[Source, str]:
    """Return the sources of a fused step's kernels as a launch requests them.

    Gradients have their parameters' dtypes. Norms of Lamb and Lars are kernels of each step's
    source; clipping and unscaling of gradients are numbers passed to it. The norm used for clipping
    is torch's own there. Raises `ArgumentError` for an optimizer without a fused step.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in FUSED_OPTIMIZERS:
        advice = "Leave it out: its step then runs as in torch."
        raise ArgumentError("an optimizer with a fused step there", name, advice)
    state = vars(optimizer)
    options = state.get(steps.OPTIONS) or steps.Options()
    scaled = scaler or options.clip_norm is not None
    step_kernels = list_kernels(optimizer, state.get(TABLE, {}), scaled, options.zero_grad)
    return {
        step_source(k, counting=False): f"{name} {k.param} {k.rest}".strip() for k in step_kernels
    }


class _Built:
    """The kernels compiled so far. Raises `SyclAbsentError`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.entries: dict[Key, Entry] = {}
        self.gate: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.ocloc, self.lacking = "", ""
        self._compiler = next((d for d in shim.shim().devices if d["type"] == "cpu"), None)
        if self._compiler is None:
            advice = 'pip install "ipex-inductor[sycl-cpu]"'
            raise SyclAbsentError(
                "SYCL's CPU device, for which its compiler starts", "none", advice
            )
        try:
            self.ocloc = ocloc.compiler_name()
        except MissingPackageError as error:
            self.lacking = f"none: {error}"

    def add(self, source: Source, name: str) -> None:
        """Compile a source, and check its binary against the promised properties."""
        try:
            key = binaries.spirv_key(source)
            spirv = self.entries[key] = binaries.spirv(source, lambda: self._spirv(source))
            rows = [*self._native(source, spirv.blob)] if self.ocloc else [{"wrong": ""}]
        except (SyclError, ValueError) as error:
            rows = [{"wrong": str(error).partition("\n")[0]}]
        self.gate += [{"name": name, **row} for row in rows]
        self.failed += [f"kernel {name}: {row['wrong']}" for row in rows if row["wrong"]]

    def _spirv(self, source: Source) -> bytes:
        """Return the SPIR-V of a source."""
        assert self._compiler is not None
        return worker.compile_source(source, self._compiler, native=False).spirv

    def _native(self, source: Source, spirv: bytes) -> Iterator[dict[str, Any]]:
        """Compile native code and yield its facts; keep the entry only if none is wrong."""
        arch = self.target.arch
        key = binaries.native_key(source, arch, self.ocloc)
        entry = kernels.kernel(key, lambda: (source.manifest, ocloc.native(source, spirv, arch)))
        promised = "matrix" in source.needs
        wrong = False
        for facts in zebin.facts(entry.blob):
            fault = facts.wrong(self.target, promised)
            wrong = wrong or bool(fault)
            yield asdict(facts) | {"wrong": fault}
        if not wrong:
            self.entries[key] = entry
