"""Graphs for `torch.compile`, compiled ahead for an absent GPU or for a level of CPUs.

They become entries of the kernel cache, under the keys that are looked up on that device if torch
is the same build there.
"""

import contextlib
import copy
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ipex_inductor import compat
from ipex_inductor.aot_cache import default_store, kernels, toolkit
from ipex_inductor.aot_cache.bundling import packing
from ipex_inductor.aot_cache.digest import frame_fields
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.graph_files import workroom
from ipex_inductor.aot_cache.graph_files.graphs import GraphFiles
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.aot_cache.manifest import Manifest
from ipex_inductor.backend import compile_graph
from ipex_inductor.compiler import graph_cache
from ipex_inductor.compiler.arguments import Where
from ipex_inductor.compiler.inner_compile import copy_graph
from ipex_inductor.errors import ArgumentError, CompilerNotFoundError, OptionError
from ipex_inductor.prebuild import described, describing, driver
from ipex_inductor.prebuild.steps import load_step
from ipex_inductor.reporting import decisions
from ipex_inductor.reporting.decisions import Event
from ipex_inductor.target import x86_levels
from ipex_inductor.target.device import Target
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.cpu import (
    blocked,
    cpu_library,
    decode_attention,
    int8,
    short_attention,
    weight_only,
    winograd,
)
from ipex_inductor.templates.tensor_reader import accesses_cpp, weights_cpp, weights_triton

Tensor = torch.Tensor
GPU = torch.device("cuda", describing.INDEX)
Range = tuple[int, int] | None  # the least size and the largest; None: any
# Keyed by input (number, name, or the path to a tensor in it), then by dimension.
Dynamic = Mapping[int | str | Where, Mapping[int, Range]]
CPU = torch.device("cpu")
# Names that generated code imports where it calls our library for CPUs.
OURS = blocked, decode_attention, short_attention, winograd
CALLS = tuple(module.__name__.encode() for module in OURS)
TIMED = ("max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Prebuilt:
    """The results of compilation for one target.

    `kernels_only`: why no graph is cached, "" if `entries` are the graphs that the target will
    find.
    `own`: kernels of this package, which it finds whatever torch it has.
    """

    target: Target
    kernels_only: str
    entries: dict[Key, Entry] = field(default_factory=dict)
    own: dict[Key, Entry] = field(default_factory=dict)
    graphs: int = 0
    made: described.CompiledKernels = field(default_factory=described.CompiledKernels)
    events: tuple[Event, ...] = ()
    seconds: float = 0.0
    unbuilt: str = ""  # why Triton's module for the driver is not in it
    gate: tuple[Mapping[str, Any], ...] = ()  # of each SYCL kernel, facts from its binary
    native: str = ""  # compiler of their native code, or why there is none
    failed: tuple[str, ...] = ()  # what was requested and could not be built

    @property
    def missing(self) -> list[str]:
        """Return descriptions of everything that must still be compiled on the target."""
        lost = 0 if self.kernels_only else self.graphs - len(self.entries)
        graphs = [f"{lost} of {self.graphs} graphs, which could not be kept"] if lost else []
        kernels = () if self.kernels_only else self.made.unlaunched
        module = f"Triton's module for the driver, which a C compiler makes: {self.unbuilt}"
        launchers = [f"kernel {name}, which needs Triton's launcher" for name in kernels]
        return [*self.failed] + graphs + launchers + [module] * bool(self.unbuilt)


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
    """Compile `model` as `torch.compile(model, backend="ipex")` does on `target`.

    The code is for the shapes, dtypes and strides of `example_inputs` and `kwargs`. Nothing is
    timed: records, tables and models choose.

    Args:
        model: Module to compile.
        example_inputs: Positional arguments of a call.
        target: GPU or level of x86-64.
        kwargs: Keyword arguments of that call.
        dynamic: Ranges of dimensions of inputs; the code is for all sizes in a range, if
            `torch._dynamo.mark_dynamic` requests an equal range on the target.
        training: Compile with gradients and backward graphs; without it, under `torch.no_grad()`.
        optimizer: Also compile the kernels of the fused step of this optimizer of the model, as
            `steps.load_step` does.
        scaler: The step runs under `GradScaler`.
        mode: As for `torch.compile`.
        options: As for `torch.compile`.

    Raises:
        ArgumentError: the model is in train mode without `training`, cannot be copied, or lacks a
            dimension of `dynamic`.
        OptionError: the mode times kernels.
        Exception: errors of `described.device`, `x86_levels.check`, `steps.load_step` and
            compilation.
    """
    check_model(model, mode, training)
    kernels_only = _why_kernels_only(target)
    began = time.perf_counter()
    with _building(target, training, cached=not kernels_only) as building:
        call = (model, tuple(example_inputs), dict(kwargs or {}))
        twin, args, named = fake_copy(call, _place(target))
        mark_dynamic_sizes(args, named, dynamic)
        graphs = _compile_graphs(twin, args, named, mode, options)
        if optimizer is not None:
            load_step(optimizer, _place(target), scaler)
        entries = (
            {}
            if kernels_only
            else _graphs(_read_entries(files.key for files in building.graph_files))
        )
        if target.kind == "cpu":
            _look_into(entries, building.compiled)
        elif target.kind == "cuda" and entries:
            for writes in (True, False):
                weights_triton.load_kernel(_place(target), writes)
    modules, unbuilt = _module_for_driver() if entries and target.kind == "cuda" else ({}, "")
    own = [*building.kernel_keys, *(_reader_of_weights() if entries else ())]
    return Prebuilt(
        target,
        kernels_only,
        entries={key: _ready(entry, modules) for key, entry in entries.items()},
        own=_read_entries(own),
        graphs=graphs,
        made=building.compiled,
        events=tuple(event for report in building.reports for event in report.events),
        seconds=time.perf_counter() - began,
        unbuilt=unbuilt,
    )


@dataclass(frozen=True)
class _Building:
    """The objects collected while code is compiled."""

    compiled: described.CompiledKernels
    graph_files: list[GraphFiles]
    kernel_keys: list[Key]
    reports: list[decisions.GraphReport]


@contextmanager
def _building(target: Target, training: bool, cached: bool) -> Iterator[_Building]:
    """Enter the described device, with or without torch's caches of graphs."""
    fake_tensors: Any = FakeTensorMode  # without type annotations
    with (
        nullcontext() if cached else compat.graph_caches_off(),
        _describe(target) as compiled,
        fake_tensors(allow_non_fake_inputs=True),
        torch.set_grad_enabled(training),
        compat.backward_too(),
        compat.dynamo_unchanged(),
        graph_cache.collect_files() as graph_files,
        kernels.record_keys() as kernel_keys,
        decisions.capturing() as reports,
    ):
        yield _Building(compiled, graph_files, kernel_keys, reports)


def _place(target: Target) -> torch.device:
    """Return the device of fake tensors for a target."""
    return CPU if target.kind == "cpu" else GPU


def _describe(target: Target) -> AbstractContextManager[described.CompiledKernels]:
    """Return the context in which the process compiles for a target."""
    return _as_level(target) if target.kind == "cpu" else described.device(target)


@contextmanager
def _as_level(target: Target) -> Iterator[described.CompiledKernels]:
    """Compile for a level of x86-64; raise `CompilerNotFoundError` without a compiler."""
    level = x86_levels.check(target)
    if toolkit.compiler() is None:
        advice = "Install one (`apt-get install g++`); users of the bundle need none."
        raise CompilerNotFoundError("a C++ compiler that builds graphs for CPUs", "none", advice)
    with x86_levels.compile_ahead(level):
        yield described.CompiledKernels()


def _look_into(entries: Mapping[Key, Entry], compiled: described.CompiledKernels) -> None:
    """Record the libraries of CPU graphs, and build our libraries too if they call them."""
    calls = False
    quantized = dict.fromkeys((int8, weight_only), False)
    for entry in entries.values():
        files = workroom.unpack_files(entry.blob)
        compiled.kernels += (Path(name).stem for name in files if name.endswith(".so"))
        calls |= any(symbol in data for data in files.values() for symbol in CALLS)
        for module in quantized:
            name = module.__name__.encode()
            quantized[module] |= any(name in data for data in files.values())
    if calls:
        cpu_library.ship_library()
    for module, is_called in quantized.items():
        if is_called:
            module.ship_library()


def _why_kernels_only(target: Target) -> str:
    """Return why no graph can be cached, "" if graphs can.

    Raises `ArgumentError` if torch's cache folder is not ours.
    """
    why = compat.why_not_for(target.kind)
    if not why and (elsewhere := graph_cache.why_not_ours()):
        advice = "Unset TORCHINDUCTOR_CACHE_DIR: what is not verified is not packed."
        raise ArgumentError("Inductor's files in a folder of ours", elsewhere, advice)
    return why


def _compile_graphs(
    model: nn.Module,
    args: Sequence[Any],
    named: Mapping[str, Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> int:
    """Compile each graph of a call, which continues eagerly; return the number of graphs.

    Args:
        model: Module with fake tensors.
        args: Positional arguments.
        named: Keyword arguments.
        mode: As for `torch.compile`.
        options: As for `torch.compile`.
    """
    graphs = 0

    def compile_and_go_on(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        eager = copy_graph(gm)
        compile_graph(gm, inputs, mode=mode, options={**(options or {}), "strict": True})
        return eager.forward

    torch.compile(model, backend=compile_and_go_on)(*args, **named)
    return graphs


def _module_for_driver() -> tuple[Mapping[str, bytes], str]:
    """Return Triton's driver module as files and ""; or no files and the reason."""
    try:
        return driver.files(), ""
    except driver.NoModuleError as error:
        return {}, str(error)


def _reader_of_weights() -> list[Key]:
    """Return the keys of the libraries that check the weights and note accesses to them."""
    with kernels.record_keys() as keys, contextlib.suppress(NotBuiltError):
        # Not from the caches of results, as this process may have them already.
        weights_cpp.reader.__wrapped__()
        accesses_cpp.library.__wrapped__()
    return keys


def prebuild_step(optimizer: Optimizer, target: Target, *, scaler: bool = False) -> Prebuilt:
    """Compile the kernels of `optimizer`'s fused step for `target`, and no graph.

    See `steps.load_step`; raises what that, `described.device` and `x86_levels.check` raise.
    """
    began = time.perf_counter()
    with _describe(target), kernels.record_keys() as keys:
        load_step(optimizer, _place(target), scaler)
    entries, seconds = _read_entries(keys), time.perf_counter() - began
    return Prebuilt(target, compat.why_not_for(target.kind), own=entries, seconds=seconds)


def pack(
    done: Iterable[Prebuilt],
    path: str | os.PathLike[str],
    *,
    name: str = "",
    key: str | os.PathLike[str] | None = None,
    serial: int | None = None,
) -> Manifest:
    """Pack compiled entries into the new bundle `path`.

    Args:
        done: Results of `prebuild` and `prebuild_step`.
        path: File of the new bundle.
        name: Name of the bundle, by default that of the file.
        key: As for `cache pack`.
        serial: As for `cache pack`.

    Raises:
        ArgumentError: there is nothing to pack, or the file exists.
    """
    entries = {k: entry for one in done for k, entry in (one.entries | one.own).items()}
    out = Path(path)
    return packing.pack_entries(out, name or out.stem, entries, Path(key) if key else None, serial)


def _read_entries(keys: Iterable[Key | None]) -> dict[Key, Entry]:
    """Return the cached entries of those keys."""
    store = default_store.store()
    return {key: entry for key in keys if key and store and (entry := store.get(key))}


def _graphs(entries: dict[Key, Entry]) -> dict[Key, Entry]:
    """Return the entries with a graph that torch has cached; others hold code alone.

    Code without its graph would be compiled again.
    """

    def has_graph(entry: Entry) -> bool:
        return any(
            name.startswith(compat.KEPT_GRAPHS) for name in workroom.unpack_files(entry.blob)
        )

    return {key: entry for key, entry in entries.items() if has_graph(entry)}


def _ready(entry: Entry, more: Mapping[str, bytes]) -> Entry:
    """Return a compressed entry for transport, with `more` files added to torch's."""
    blob = frame_fields({**workroom.unpack_files(entry.blob), **more}) if more else entry.blob
    return Entry(entry.meta, workroom.compress_files(blob))


def mark_dynamic_sizes(
    args: Sequence[Any], named: Mapping[str, Any], dynamic: Dynamic | None
) -> None:
    """Mark the varying sizes for Dynamo; raise `ArgumentError` for a missing dimension."""
    for which, dims in (dynamic or {}).items():
        path = which if isinstance(which, tuple) else (which,)
        _mark(_at(args if isinstance(path[0], int) else named, path), which, dims)


def _at(holder: Any, path: Where) -> Any:
    """Return the value at a path of indices and names, None if there is none."""
    for key in path:
        try:
            holder = holder[key]
        except (IndexError, KeyError, TypeError):
            return None
    return holder


def _mark(tensor: Any, which: int | str | Where, dims: Mapping[int, Range]) -> None:
    """Mark dimensions of a tensor as dynamic; raise `ArgumentError` if a range does not fit."""
    for dim, sizes in dims.items():
        size = tensor.shape[dim] if isinstance(tensor, Tensor) and 0 <= dim < tensor.dim() else None
        least, most = sizes or (size, size)
        if size is None or least is None or most is None or not least <= size <= most:
            actual = f"dimension {dim} of input {which!r}: {sizes} around {size}"
            raise ArgumentError("ranges of sizes that the example has", actual, "Check both.")
        limits = {"min": least, "max": most} if sizes else {}
        torch._dynamo.mark_dynamic(tensor, dim, **limits)


def check_model(model: nn.Module, mode: str | None, training: bool) -> None:
    """Raise `OptionError` or `ArgumentError` if the model cannot be compiled ahead."""
    if mode in TIMED:
        advice = "Tune where that GPU is; its records are used here without a mode."
        raise OptionError("a mode in which no kernel is timed", f"mode {mode!r}", advice)
    if model.training and not training:
        advice = "Call model.eval() first, or ask for training."
        raise ArgumentError("a module in eval mode", "one in train mode", advice)


def fake_copy(value: Any, device: torch.device) -> Any:
    """Return a copy whose tensors are fake ones on that device, with equal strides.

    A tensor that occurs several times becomes one fake tensor.
    """
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = _fake(device, tensor)
        return fakes[id(tensor)]

    for part in pytree.tree_leaves(value):
        for tensor in _tensors(part) if isinstance(part, nn.Module) else ():
            fake(tensor)
    placed = pytree.tree_map_only(Tensor, fake, value)
    return pytree.tree_map_only(nn.Module, lambda part: _twin(part, fakes), placed)


def _twin(model: nn.Module, fakes: Mapping[int, Tensor]) -> nn.Module:
    """Return a copy of a module with its tensors replaced; raise `ArgumentError` on failure."""
    try:
        return copy.deepcopy(model, dict(fakes))
    except Exception as error:
        actual = f"{type(error).__name__}: {error}"
        raise ArgumentError("a model that can be copied", actual, "See copy.deepcopy.") from error


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers of a module."""
    yield from model.parameters()
    yield from model.buffers()


def _fake(device: torch.device, tensor: Tensor) -> Tensor:
    """Return an empty tensor on the device, with the tensor's shape, strides and dtype."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)
