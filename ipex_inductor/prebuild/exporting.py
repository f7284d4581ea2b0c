"""Packages of models: exported, optimized by our passes, compiled by AOTInductor without weights.

Weights are inputs of the code, so the code holds none of them, and oneDNN's packed weights can be
passed directly. Weight preprocessing is a program that runs when weights are loaded.
"""

import hashlib
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ipex_inductor import compat
from ipex_inductor.aot_cache import default_store
from ipex_inductor.aot_cache.bundling import packing
from ipex_inductor.aot_cache.digest import frame_fields
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.aot_cache.manifest import Manifest
from ipex_inductor.backend import Ahead
from ipex_inductor.errors import ArgumentError, DeviceError, TargetError
from ipex_inductor.passes.weights.program import Program
from ipex_inductor.prebuild.describing import INDEX
from ipex_inductor.prebuild.gpu_libraries import packaging
from ipex_inductor.prebuild.package import (
    CODE,
    CONSTANT,
    FORMAT,
    KIND,
    NODES,
    Described,
    Package,
    Part,
    describe,
    encode,
    part_of,
)
from ipex_inductor.reporting.decisions import Event, GraphReport
from ipex_inductor.target import x86_levels
from ipex_inductor.target.device import Target, architecture
from ipex_inductor.templates.cpu import cpu_library, int8, weight_only

Tensor = torch.Tensor
Source = tuple[str, int | str]  # ("input", 0), ("weight", "conv.bias") or ("derived", 3)


@dataclass(frozen=True)
class Packaged:
    """The result of `package`: manifest, decisions, and whether code was compiled now."""

    manifest: Manifest
    report: GraphReport
    compiled: bool


def package(
    model: nn.Module,
    example_inputs: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    targets: Sequence[Target] = (),
    kwargs: Mapping[str, Any] | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str = "",
    key: str | os.PathLike[str] | None = None,
    serial: int | None = None,
) -> Packaged:
    """Compile `model` without its weights for CPUs or GPUs, into the new bundle `path`.

    `ipex_inductor.load(path, weights=state_dict)` runs it, on inputs of the shapes and dtypes of
    `example_inputs` and `kwargs`.

    Args:
        model: Module in eval mode, on the CPU.
        example_inputs: Positional arguments of a call, on the CPU.
        path: File of the new bundle.
        targets: Levels of x86-64 and GPUs, which need not be present; one package is made for each.
            Without targets, this machine's kind of CPU.
        kwargs: Keyword arguments of that call.
        mode: As for `torch.compile`.
        options: As for `torch.compile`.
        name: Name of the bundle, by default that of the file.
        key: File of the private key to sign with.
        serial: As for `cache pack`.

    Raises:
        ArgumentError: the model cannot be packaged (in train mode, with effects, or it returns
            views of its inputs), or the file exists.
        DeviceError: the model is not on the CPU, or torch is not built for that GPU.
        TargetError: a GPU is not of NVIDIA; a CPU is not x86-64, or of another family than this
            one.
        Exception: errors of torch.export and `described.device`.
    """
    out = Path(path)
    if os.path.lexists(out):
        raise ArgumentError("a file that is not there yet", f"{out}, which is", "Remove it.")
    _check(model)
    for target in targets:
        if target.kind == "cpu":
            x86_levels.check(target)
            continue
        if target.kind != "cuda":
            advice = "Others get graphs (`--arch` without `--package`)."
            raise TargetError("a GPU of NVIDIA", str(target), advice)
        if why := compat.why_not_for(target.kind):
            advice = "Install the build of torch that the GPU's machine has; it needs no GPU."
            raise DeviceError(f"torch for {target}", why, advice)
    packages = [
        _make_entry(model, example_inputs, t, kwargs, mode, options) for t in targets or (None,)
    ]
    entries = {key: entry for key, entry, _ in packages}
    bundled = packing.pack_entries(
        out, name or out.stem, entries, Path(key) if key else None, serial
    )
    compiled = any(fresh for *_, fresh in packages)
    events = [Event(*event) for entry in entries.values() for event in entry.meta["events"]]
    return Packaged(bundled, GraphReport(events, "passes" if compiled else "cache"), compiled)


def _make_entry(
    model: nn.Module,
    example_inputs: Sequence[Any],
    target: Target | None,
    kwargs: Mapping[str, Any] | None,
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> tuple[Key, Entry, bool]:
    """Return the key, the entry, and whether it was compiled now rather than cached.

    Args:
        model: Module in eval mode.
        example_inputs: Positional arguments.
        target: GPU or level of x86-64; None for this CPU.
        kwargs: Keyword arguments.
        mode: As for `torch.compile`.
        options: As for `torch.compile`.
    """
    fake_tensors: Any = FakeTensorMode  # without type annotations
    with torch.no_grad():
        args, named = pytree.tree_map(_expand_memory, (tuple(example_inputs), dict(kwargs or {})))
        call = _Exported.of(model, args, named)
    with ExitStack() as stack, torch.no_grad():
        if target and target.kind == "cpu":
            stack.enter_context(x86_levels.target_level(x86_levels.check(target)))
        elif target:
            stack.enter_context(packaging(target))
            stack.enter_context(fake_tensors(allow_non_fake_inputs=True))
            call = call.on(torch.device("cuda", INDEX))
        ahead = Ahead.of(call.gm, call.tensors, mode, options)
        key = ahead.key(KIND, call.problem())
        # User code that a compilation runs is in no key.
        store = None if ahead.runs_users_code else default_store.store()
        cached = store.get(key) if store else None
        entry = cached or _compile_entry(call, ahead)
    if store and not cached:
        store.put(key, dict(entry.meta), entry.blob)
    return key, entry, cached is None


def _check(model: nn.Module) -> None:
    """Raise `ArgumentError` or `DeviceError` unless this is a module in eval mode on the CPU."""
    if not isinstance(model, nn.Module) or model.training:
        actual = "one in train mode" if isinstance(model, nn.Module) else type(model).__name__
        raise ArgumentError("a module in eval mode", actual, "Call model.eval() first.")
    devices = {t.device.type for t in (*model.parameters(), *model.buffers())}
    if devices - {"cpu"}:
        actual = f"one on {', '.join(sorted(devices))}"
        raise DeviceError("a model on the CPU", actual, "Packages are for CPUs: model.to('cpu').")


@dataclass(frozen=True)
class _Exported:
    """An exported model as a flat graph: tensors in, tensors out, parameters as attributes."""

    gm: torch.fx.GraphModule
    tensors: list[Tensor]
    numbers: list[int]  # positions of `tensors` among the leaves
    leaves: list[Any]
    keywords: tuple[str, ...]
    arguments: str
    results: str
    returned: list[Any]  # the number of a tensor, or a constant
    saved: frozenset[str]  # names in the state dict
    constants: dict[str, bytes]  # tensors that it lacks

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "_Exported":
        """Export a model; raise `ArgumentError` if inputs, outputs or weights cannot be used."""
        program, gm = compat.export_model(model, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        _refuse_odd(leaves, "input")
        saved = frozenset(model.state_dict())
        if missing := {name for name, _ in gm.named_parameters()} - saved:
            advice = "Its weights could not be given to `load`: remove the hook that renames them."
            wanted = "a model whose state dict has its parameters by their names"
            raise ArgumentError(wanted, f"one that lacks {', '.join(sorted(missing))}", advice)
        gm.graph.set_codegen(torch.fx.graph.CodeGen())
        placeholders = gm.graph.find_nodes(op="placeholder")
        for node, leaf in zip(placeholders, leaves, strict=True):
            if not isinstance(leaf, Tensor):  # the graph is specialized for that value
                gm.graph.erase_node(node)
        (end,) = gm.graph.find_nodes(op="output")
        returned = list(end.args[0])
        nodes = [value for value in returned if isinstance(value, torch.fx.Node)]
        _refuse_odd([value for value in returned if not isinstance(value, torch.fx.Node)], "output")
        end.args = (tuple(nodes),)
        gm.recompile()
        counter = iter(range(len(nodes)))
        numbers = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return cls(
            gm,
            [leaves[n] for n in numbers],
            numbers,
            leaves,
            tuple(kwargs),
            pytree.treespec_dumps(spec),
            pytree.treespec_dumps(program.call_spec.out_spec),
            [
                ("tensor", next(counter)) if value in nodes else ("fixed", value)
                for value in returned
            ],
            saved,
            {name: _bytes(t) for name, t in _tensors(gm).items() if name not in saved},
        )

    def on(self, device: torch.device) -> "_Exported":
        """Return the model with fake tensors on a GPU; `constants` keeps its bytes."""

        def move(value: Any) -> Any:
            """Return a tensor or device on the GPU, any other value unchanged."""
            if isinstance(value, Tensor):
                fake = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                )
                return nn.Parameter(fake, False) if isinstance(value, nn.Parameter) else fake
            return device if isinstance(value, torch.device) else value

        for name, tensor in _tensors(self.gm).items():
            owner, _, last = name.rpartition(".")
            module = self.gm.get_submodule(owner)
            tensors = module._parameters if last in module._parameters else module._buffers
            if last in tensors:
                tensors[last] = move(tensor)
            else:
                setattr(module, last, move(tensor))
        for _, module in _graphs(self.gm):
            for node in module.graph.nodes:
                node.args, node.kwargs = pytree.tree_map(move, (node.args, node.kwargs))
            module.recompile()
        return replace(self, tensors=[move(tensor) for tensor in self.tensors])

    @property
    def on_gpu(self) -> bool:
        """Return whether a GPU computes."""
        tensors = (*self.tensors, *_tensors(self.gm).values())
        return any(tensor.device.type == "cuda" for tensor in tensors)

    def describe(self, leaf: Tensor) -> Described:
        """Return the description of an input on the device where the code runs."""
        about = describe(leaf)
        return msgspec.structs.replace(about, device="cuda") if self.on_gpu else about

    def problem(self) -> dict[str, Any]:
        """Return the facts beside the graph's text that code and metadata depend on."""
        fixed = [leaf for leaf in self.leaves if not isinstance(leaf, Tensor)]
        weights = (*self.gm.named_parameters(), *self.gm.named_buffers())
        return {
            "call": (self.arguments, self.results, self.keywords, repr(fixed), repr(self.returned)),
            "inputs": tuple(repr(describe(t)) for t in self.tensors),
            "weights": tuple((name, repr(describe(tensor))) for name, tensor in weights),
            "constants": tuple((n, _digest(data)) for n, data in sorted(self.constants.items())),
        }


def _tensors(gm: torch.fx.GraphModule) -> dict[str, Tensor]:
    """Return parameters, buffers, literals and attributes that are plain tensors, by name."""
    tensors: dict[str, Tensor] = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    for prefix, module in _graphs(gm):
        for node in module.graph.find_nodes(op="get_attr"):
            value = operator.attrgetter(node.target)(module)
            tensors |= {prefix + node.target: value} if isinstance(value, Tensor) else {}
    return tensors


def _graphs(gm: torch.fx.GraphModule) -> Iterator[tuple[str, torch.fx.GraphModule]]:
    """Yield a graph and the bodies of its higher-order ops, each with the prefix of its names."""
    for name, module in gm.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            yield f"{name}." * bool(name), module


class _Made:
    """The collected results of one compilation: inner compiler and consumer of programs."""

    def __init__(self, call: _Exported, level: str) -> None:
        self._call, self._level = call, level
        self._names: dict[int, str] = {}  # of weights, by their number in the whole graph
        self.takes: list[Source] = []
        self.weights: dict[str, Described] = {}
        self.parts: tuple[Part, ...] = ()
        self.needs: list[str] = []
        self.files: dict[str, bytes] = {}

    def compile(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        """Compile a graph as Inductor's inner compiler, which takes only inputs that are read."""
        if why := compat.why_not_ahead():
            advice = "Package the part of it that computes, in eval mode."
            raise ArgumentError("a model that only computes", why, advice)
        self.takes, self.weights = [], {}  # it may be compiled again, without templates
        inputs: list[Any] = []
        static: list[int] = []
        derived = 0
        for number, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            source: Source = ("derived", derived)
            if (about := node.meta.get("desc")) is None:
                derived += 1
            elif hasattr(about, "target"):
                source = ("weight", about.target)
                self._names[number] = about.target
                self.weights[about.target] = describe(node.meta["val"])
            else:
                source = ("input", self._call.numbers[about.idx])
            if node.users:
                self.takes.append(source)
                static += [len(inputs)] * (source[0] != "input")
                inputs.append(example_inputs[number])
            else:
                gm.graph.erase_node(node)
        gm.recompile()
        kwargs["static_input_idxs"] = static
        on_gpu = self._call.on_gpu
        library, self.needs = compat.compile_ahead(gm, inputs, self._level, on_gpu, **kwargs)
        ipex = torch.ops.ipex
        ours = {ipex.blocked.default, ipex.short_attention.default, ipex.winograd.default}
        ours |= {*int8.KERNELS, weight_only.LINEAR, ipex.decode_attention.default}
        if cpu_library.is_paired() and any(node.target in ours for node in gm.graph.nodes):
            self.needs = sorted({*self.needs, "avx512_bf16"})
        self.files[CODE] = library.read_bytes()
        if (nodes := library.with_suffix(".json")).exists():
            self.files[NODES] = nodes.read_bytes()
        return _never

    def join(self, inner: Any, programs: Iterable[Program], *_: Any, **__: Any) -> Any:
        """Record the weight preprocessing and return `inner` unchanged."""
        self.parts = tuple(part_of(program, self._names) for program in programs)
        return inner


def _never(_: Any) -> Any:
    """Raise `AssertionError`, since the code is for another process."""
    raise AssertionError("compiled for another process")


_never._boxed_call = True  # type: ignore[attr-defined]


def _compile_entry(call: _Exported, ahead: Ahead) -> Entry:
    """Compile an exported model and return its entry."""
    level = x86_levels.LEVELS.get(architecture())
    compilation = _Made(call, level.march if level else "")
    ahead.compile(compilation.compile, compilation.join)
    constants = {
        name: call.constants[name] for name in compilation.weights if name in call.constants
    }
    leaves = [leaf if isinstance(leaf, Tensor) else None for leaf in call.leaves]
    about = Package(
        format=FORMAT,
        needs=tuple(compilation.needs),
        keywords=call.keywords,
        arguments=call.arguments,
        results=call.results,
        leaves=tuple(None if leaf is None else call.describe(leaf) for leaf in leaves),
        fixed=tuple(None if isinstance(leaf, Tensor) else encode(leaf) for leaf in call.leaves),
        returned=tuple(v if kind == "tensor" else None for kind, v in call.returned),
        returned_fixed=tuple(encode(v) if kind == "fixed" else None for kind, v in call.returned),
        weights={n: d for n, d in compilation.weights.items() if n not in constants},
        constants={n: compilation.weights[n] for n in constants},
        device="cuda" if call.on_gpu else "cpu",
        parts=compilation.parts,
        takes=tuple(compilation.takes),
        events=tuple((e.kind, e.subject, e.reason, e.where) for e in ahead.report.events),
    )
    files = compilation.files | {CONSTANT + name: data for name, data in constants.items()}
    return Entry(msgspec.json.decode(msgspec.json.encode(about)), frame_fields(files))


def _expand_memory(value: Any) -> Any:
    """Return an input without repeated memory, because a tensor cannot be copied into such."""
    return value.contiguous() if isinstance(value, Tensor) and 0 in value.stride() else value


def _refuse_odd(leaves: Iterable[Any], what: str) -> None:
    """Raise `ArgumentError` for a leaf that is neither a tensor nor a plain value."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor | bool | int | float | str | None):
            actual = f"an {what} that is a {type(leaf).__name__}"
            raise ArgumentError(
                "tensors and plain values", actual, "Wrap the model in one of these."
            )


def _digest(data: bytes) -> str:
    """Return the SHA-256 of the data as hexadecimal text."""
    return hashlib.sha256(data).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    """Return a tensor's elements in logical order, regardless of its strides."""
    flat = tensor.detach().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
