"""Graphs for `torch.compile`, compiled for a GPU that is not here, or for a level of CPUs.

They become entries of the kernel cache under the keys that they are looked for by where that device
is, if torch is the same build there.
"""

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
from ipex_inductor.aot_cache import default_store, kernels, packing, toolkit, workroom
from ipex_inductor.aot_cache.digest import frame_fields
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.graphs import GraphFiles
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.aot_cache.manifest import Manifest
from ipex_inductor.backend import compile_graph
from ipex_inductor.compiler import graph_cache
from ipex_inductor.compiler.arguments import Where
from ipex_inductor.compiler.inner_compile import copied
from ipex_inductor.errors import ArgumentError, CompilerNotFoundError, OptionError
from ipex_inductor.prebuild import described, describing, driver
from ipex_inductor.prebuild.steps import load_step
from ipex_inductor.reporting import decisions
from ipex_inductor.reporting.decisions import Event
from ipex_inductor.target import x86_levels
from ipex_inductor.target.device import Target
from ipex_inductor.templates.cpu import blocked, cpu_library, short_attention, winograd
from ipex_inductor.templates.tensor_reader import weights_cpp, weights_triton

Tensor = torch.Tensor
GPU = torch.device("cuda", describing.INDEX)
Range = tuple[int, int] | None  # the least size and the largest; None: any
# By input, its number or name, or that and what leads to a tensor in it; and by dimension.
Dynamic = Mapping[int | str | Where, Mapping[int, Range]]
CPU = torch.device("cpu")
# What generated code imports where it calls our library for CPUs.
CALLS = tuple(each.__name__.encode() for each in (blocked, short_attention, winograd))
TIMED = ("max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Prebuilt:
    """What was compiled for one target.

    `kernels_only`: why no graph is kept, "" where `entries` are what that GPU will find. `own` are
    kernels of ours, which it finds whatever torch it has.
    """

    target: Target
    kernels_only: str
    entries: dict[Key, Entry] = field(default_factory=dict)
    own: dict[Key, Entry] = field(default_factory=dict)
    graphs: int = 0
    made: described.Made = field(default_factory=described.Made)
    events: tuple[Event, ...] = ()
    seconds: float = 0.0
    unbuilt: str = ""  # why Triton's module for the driver is not in it
    gate: tuple[Mapping[str, Any], ...] = ()  # of each kernel in SYCL, what its binary says
    native: str = ""  # of those, who made native code, or why nobody
    failed: tuple[str, ...] = ()  # what was asked for and is not there

    @property
    def missing(self) -> list[str]:
        """What will be compiled after all where the GPU is."""
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

    For the shapes, dtypes and strides of `example_inputs` and `kwargs`; where `dynamic` gives a
    dimension of an input a range, for all sizes in it, if `torch._dynamo.mark_dynamic` asks for the
    same range there. With gradients and backward graphs if it is for `training`, under
    `torch.no_grad()` if not. With the kernels of the fused
    step of an `optimizer` of the model, for `steps.load_step`. Nothing is timed: records, tables
    and models choose. Raises `ArgumentError` for a model in train mode without `training` or that
    cannot be copied, or a dimension that is not there, `OptionError` for a mode that times kernels,
    what `described.device`, `levels.check` and `steps.load_step` raise, and what does not compile.
    """
    checked(model, mode, training)
    kernels_only = _why_kernels_only(target)
    began = time.perf_counter()
    with _building(target, training, cached=not kernels_only) as building:
        given = (model, tuple(example_inputs), dict(kwargs or {}))
        twin, args, named = described_as(given, _place(target))
        marked(args, named, dynamic)
        graphs = _compiled(twin, args, named, mode, options)
        if optimizer is not None:
            load_step(optimizer, _place(target), scaler)
        kept = {} if kernels_only else _graphs(_kept(files.key for files in building.found))
        if target.kind == "cpu":
            _look_into(kept, building.made)
        elif target.kind == "cuda" and kept:
            for writes in (True, False):
                weights_triton.load_kernel(_place(target), writes)
    modules, unbuilt = _module_for_driver() if kept and target.kind == "cuda" else ({}, "")
    return Prebuilt(
        target,
        kernels_only,
        {key: _ready(entry, modules) for key, entry in kept.items()},
        _kept([*building.own, *(_reader_of_weights() if kept else ())]),
        graphs,
        building.made,
        tuple(event for report in building.reports for event in report.events),
        time.perf_counter() - began,
        unbuilt,
    )


@dataclass(frozen=True)
class _Building:
    """What comes to light while something is compiled."""

    made: described.Made
    found: list[GraphFiles]
    own: list[Key]
    reports: list[decisions.GraphReport]


@contextmanager
def _building(target: Target, training: bool, cached: bool) -> Iterator[_Building]:
    """The process as if that device were here, with or without torch's caches of graphs."""
    fake_tensors: Any = FakeTensorMode  # which has no types
    with (
        nullcontext() if cached else compat.graph_caches_off(),
        _described(target) as made,
        fake_tensors(allow_non_fake_inputs=True),
        torch.set_grad_enabled(training),
        compat.backward_too(),
        compat.dynamo_unchanged(),
        graph_cache.looked_for() as found,
        kernels.looked_for() as own,
        decisions.capturing() as reports,
    ):
        yield _Building(made, found, own, reports)


def _place(target: Target) -> torch.device:
    return CPU if target.kind == "cpu" else GPU


def _described(target: Target) -> AbstractContextManager[described.Made]:
    return _as_level(target) if target.kind == "cpu" else described.device(target)


@contextmanager
def _as_level(target: Target) -> Iterator[described.Made]:
    level = x86_levels.check(target)
    if toolkit.compiler() is None:
        todo = "Install one (`apt-get install g++`); who uses the bundle needs none."
        raise CompilerNotFoundError("a C++ compiler that builds graphs for CPUs", "none", todo)
    with x86_levels.ahead(level):
        yield described.Made()


def _look_into(kept: Mapping[Key, Entry], made: described.Made) -> None:
    """Note the libraries of graphs for CPUs, and have ours too where they call it."""
    calls = False
    for entry in kept.values():
        files = workroom.unpacked(entry.blob)
        made.kernels += (Path(name).stem for name in files if name.endswith(".so"))
        calls |= any(each in data for data in files.values() for each in CALLS)
    if calls:
        cpu_library.ship_library()


def _why_kernels_only(target: Target) -> str:
    """Why no graph can be kept. Raises `ArgumentError` where torch's folder is not ours."""
    why = compat.why_not_for(target.kind)
    if not why and (elsewhere := graph_cache.why_not_ours()):
        todo = "Unset TORCHINDUCTOR_CACHE_DIR: what is not verified is not packed."
        raise ArgumentError("Inductor's files in a folder of ours", elsewhere, todo)
    return why


def _compiled(
    model: nn.Module,
    args: Sequence[Any],
    named: Mapping[str, Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> int:
    """Compile each graph of a call, which runs on as it is; how many there were."""
    graphs = 0

    def compile_and_go_on(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        eager = copied(gm)
        compile_graph(gm, inputs, mode=mode, options={**(options or {}), "strict": True})
        return eager.forward

    torch.compile(model, backend=compile_and_go_on)(*args, **named)
    return graphs


def _module_for_driver() -> tuple[Mapping[str, bytes], str]:
    """Triton's module for the driver, as files; or none, and why."""
    try:
        return driver.files(), ""
    except driver.NoModuleError as error:
        return {}, str(error)


def _reader_of_weights() -> list[Key]:
    """The key of what checks the weights at each call."""
    with kernels.looked_for() as read:
        weights_cpp.reader.__wrapped__()  # also where this process has it already
    return read


def prebuild_step(optimizer: Optimizer, target: Target, *, scaler: bool = False) -> Prebuilt:
    """The kernels of `optimizer`'s fused step on `target`, and no graph; see `steps.load_step`.

    Raises what that, `described.device` and `levels.check` raise.
    """
    began = time.perf_counter()
    with _described(target), kernels.looked_for() as ours:
        load_step(optimizer, _place(target), scaler)
    own, seconds = _kept(ours), time.perf_counter() - began
    return Prebuilt(target, compat.why_not_for(target.kind), own=own, seconds=seconds)


def pack(
    done: Iterable[Prebuilt],
    path: str | os.PathLike[str],
    *,
    name: str = "",
    key: str | os.PathLike[str] | None = None,
    serial: int | None = None,
) -> Manifest:
    """Put what was built into the new bundle `path`; `name`, `key` and `serial` as `cache pack`'s.

    Raises `ArgumentError` where there is nothing to pack, or a file of that name.
    """
    entries = {k: entry for one in done for k, entry in (one.entries | one.own).items()}
    out = Path(path)
    return packing.pack_entries(out, name or out.stem, entries, Path(key) if key else None, serial)


def _kept(keys: Iterable[Key | None]) -> dict[Key, Entry]:
    store = default_store.store()
    return {key: entry for key in keys if key and store and (entry := store.get(key))}


def _graphs(entries: dict[Key, Entry]) -> dict[Key, Entry]:
    """Those with a graph that torch has kept: of others it has the code alone, compiled anew."""

    def has_graph(entry: Entry) -> bool:
        return any(name.startswith(compat.KEPT_GRAPHS) for name in workroom.unpacked(entry.blob))

    return {key: entry for key, entry in entries.items() if has_graph(entry)}


def _ready(entry: Entry, more: Mapping[str, bytes]) -> Entry:
    """With `more` files than torch made, to be carried."""
    blob = frame_fields({**workroom.unpacked(entry.blob), **more}) if more else entry.blob
    return Entry(entry.meta, workroom.smaller(blob))


def marked(args: Sequence[Any], named: Mapping[str, Any], dynamic: Dynamic | None) -> None:
    """Let Dynamo know which sizes vary. Raises `ArgumentError` for one that is not there."""
    for which, dims in (dynamic or {}).items():
        path = which if isinstance(which, tuple) else (which,)
        _mark(_at(args if isinstance(path[0], int) else named, path), which, dims)


def _at(holder: Any, path: Where) -> Any:
    """What is there; None for nothing."""
    for key in path:
        try:
            holder = holder[key]
        except (IndexError, KeyError, TypeError):
            return None
    return holder


def _mark(tensor: Any, which: int | str | Where, dims: Mapping[int, Range]) -> None:
    for dim, sizes in dims.items():
        size = tensor.shape[dim] if isinstance(tensor, Tensor) and 0 <= dim < tensor.dim() else None
        least, most = sizes or (size, size)
        if size is None or least is None or most is None or not least <= size <= most:
            came = f"dimension {dim} of input {which!r}: {sizes} around {size}"
            raise ArgumentError("ranges of sizes that the example has", came, "Check both.")
        limits = {"min": least, "max": most} if sizes else {}
        torch._dynamo.mark_dynamic(tensor, dim, **limits)


def checked(model: nn.Module, mode: str | None, training: bool) -> None:
    """Raise `OptionError` or `ArgumentError` for what cannot be compiled ahead."""
    if mode in TIMED:
        todo = "Tune where that GPU is; its records are used here without a mode."
        raise OptionError("a mode in which no kernel is timed", f"mode {mode!r}", todo)
    if model.training and not training:
        todo = "Call model.eval() first, or ask for training."
        raise ArgumentError("a module in eval mode", "one in train mode", todo)


def described_as(value: Any, device: torch.device) -> Any:
    """A copy whose tensors are fake ones on that device, each once, with the same strides."""
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
    try:
        return copy.deepcopy(model, dict(fakes))
    except Exception as error:
        came = f"{type(error).__name__}: {error}"
        raise ArgumentError("a model that can be copied", came, "See copy.deepcopy.") from error


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _fake(device: torch.device, tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
