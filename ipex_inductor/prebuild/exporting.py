"""Models into packages: exported, through our passes, compiled by AOTInductor with weights apart.

Weights are inputs of the code, so nothing of them is in it, and oneDNN's packed ones can be handed
over as they are; what is derived from weights is a program, which runs when they are loaded.
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
from ipex_inductor.aot_cache import default_store, packing
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
    described,
    encoded,
    part_of,
)
from ipex_inductor.reporting.decisions import Event, GraphReport
from ipex_inductor.target import x86_levels
from ipex_inductor.target.device import Target, architecture
from ipex_inductor.templates.cpu import cpu_library

Tensor = torch.Tensor
Source = tuple[str, int | str]  # ("input", 0), ("weight", "conv.bias") or ("derived", 3)


@dataclass(frozen=True)
class Packaged:
    """A bundle with a package: what is in it, what was decided, and whether it was compiled now."""

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
    """Compile `model` for this kind of CPU, or for others and for GPUs, into the new bundle `path`.

    Without its weights. `targets` are levels of x86-64 and GPUs, which need not be here, and a
    package is made for each; model and inputs are on the CPU in any case.
    `ipex_inductor.load(path, weights=state_dict)` runs it, on inputs of the shapes and dtypes of
    `example_inputs` and `kwargs`. `mode` and `options` are those of `torch.compile`; `name` (that
    of the file), the private `key` to sign with and `serial` those of `cache pack`. Raises
    `ArgumentError` for a model that cannot be packaged (in train mode, with effects, or that
    returns views of its inputs) or a file that is there; `DeviceError` for one that is not on the
    CPU, or where torch is not built for that GPU; `TargetError` for a GPU that is none of NVIDIA's
    and for a CPU that is none of x86-64's, or other than this one's family; what torch.export and
    `described.device` raise.
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
            todo = "Others get graphs (`--arch` without `--package`)."
            raise TargetError("a GPU of NVIDIA", str(target), todo)
        if why := compat.why_not_for(target.kind):
            todo = "Install the build of torch that the GPU's machine has; it needs no GPU."
            raise DeviceError(f"torch for {target}", why, todo)
    made = [_made(model, example_inputs, t, kwargs, mode, options) for t in targets or (None,)]
    entries = {key: entry for key, entry, _ in made}
    bundled = packing.pack_entries(
        out, name or out.stem, entries, Path(key) if key else None, serial
    )
    compiled = any(fresh for *_, fresh in made)
    events = [Event(*event) for entry in entries.values() for event in entry.meta["events"]]
    return Packaged(bundled, GraphReport(events, "passes" if compiled else "cache"), compiled)


def _made(
    model: nn.Module,
    example_inputs: Sequence[Any],
    target: Target | None,
    kwargs: Mapping[str, Any] | None,
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> tuple[Key, Entry, bool]:
    """The entry for a GPU, or for this CPU, its key, and whether it was compiled now."""
    fake_tensors: Any = FakeTensorMode  # which has no types
    with torch.no_grad():
        given, named = pytree.tree_map(_plain, (tuple(example_inputs), dict(kwargs or {})))
        call = _Exported.of(model, given, named)
    with ExitStack() as stack, torch.no_grad():
        if target and target.kind == "cpu":
            stack.enter_context(x86_levels.described(x86_levels.check(target)))
        elif target:
            stack.enter_context(packaging(target))
            stack.enter_context(fake_tensors(allow_non_fake_inputs=True))
            call = call.on(torch.device("cuda", INDEX))
        ahead = Ahead.of(call.gm, call.tensors, mode, options)
        found = ahead.key(KIND, call.problem())
        # Code of the user's that a compilation runs is in no key.
        store = None if ahead.runs_users_code else default_store.store()
        kept = store.get(found) if store else None
        entry = kept or _compiled(call, ahead)
    if store and not kept:
        store.put(found, dict(entry.meta), entry.blob)
    return found, entry, kept is None


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module) or model.training:
        came = "one in train mode" if isinstance(model, nn.Module) else type(model).__name__
        raise ArgumentError("a module in eval mode", came, "Call model.eval() first.")
    places = {t.device.type for t in (*model.parameters(), *model.buffers())}
    if places - {"cpu"}:
        came = f"one on {', '.join(sorted(places))}"
        raise DeviceError("a model on the CPU", came, "Packages are for CPUs: model.to('cpu').")


@dataclass(frozen=True)
class _Exported:
    """An exported model as a flat graph: tensors in, tensors out, its parameters attributes."""

    gm: torch.fx.GraphModule
    tensors: list[Tensor]
    numbers: list[int]  # of the leaves that `tensors` are
    leaves: list[Any]
    keywords: tuple[str, ...]
    arguments: str
    results: str
    returned: list[Any]  # the number of a tensor, or a constant
    saved: frozenset[str]  # what a state dict has
    constants: dict[str, bytes]  # what it has not

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "_Exported":
        program, gm = compat.exported(model, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        _refuse_odd(leaves, "input")
        saved = frozenset(model.state_dict())
        if lost := {name for name, _ in gm.named_parameters()} - saved:
            todo = "Its weights could not be given to `load`: remove the hook that renames them."
            wanted = "a model whose state dict has its parameters by their names"
            raise ArgumentError(wanted, f"one that lacks {', '.join(sorted(lost))}", todo)
        gm.graph.set_codegen(torch.fx.graph.CodeGen())
        placeholders = gm.graph.find_nodes(op="placeholder")
        for node, leaf in zip(placeholders, leaves, strict=True):
            if not isinstance(leaf, Tensor):  # the graph is for that value alone
                gm.graph.erase_node(node)
        (end,) = gm.graph.find_nodes(op="output")
        returned = list(end.args[0])
        nodes = [each for each in returned if isinstance(each, torch.fx.Node)]
        _refuse_odd([each for each in returned if not isinstance(each, torch.fx.Node)], "output")
        end.args = (tuple(nodes),)
        gm.recompile()
        counted = iter(range(len(nodes)))
        numbers = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return cls(
            gm,
            [leaves[n] for n in numbers],
            numbers,
            leaves,
            tuple(kwargs),
            pytree.treespec_dumps(spec),
            pytree.treespec_dumps(program.call_spec.out_spec),
            [("tensor", next(counted)) if each in nodes else ("fixed", each) for each in returned],
            saved,
            {name: _bytes(t) for name, t in _tensors(gm).items() if name not in saved},
        )

    def on(self, device: torch.device) -> "_Exported":
        """The same of fake tensors on a GPU, but for the constants."""

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                made = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                )
                return nn.Parameter(made, False) if isinstance(value, nn.Parameter) else made
            return device if isinstance(value, torch.device) else value

        for name, tensor in _tensors(self.gm).items():
            owner, _, last = name.rpartition(".")
            module = self.gm.get_submodule(owner)
            own = module._parameters if last in module._parameters else module._buffers
            if last in own:
                own[last] = moved(tensor)
            else:
                setattr(module, last, moved(tensor))
        for _, module in _graphs(self.gm):
            for node in module.graph.nodes:
                node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
            module.recompile()
        return replace(self, tensors=[moved(tensor) for tensor in self.tensors])

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        tensors = (*self.tensors, *_tensors(self.gm).values())
        return any(tensor.device.type == "cuda" for tensor in tensors)

    def described(self, leaf: Tensor) -> Described:
        """An input as it is where the code runs."""
        about = described(leaf)
        return msgspec.structs.replace(about, device="cuda") if self.on_gpu else about

    def problem(self) -> dict[str, Any]:
        """What code and metadata depend on beside the graph's text."""
        fixed = [leaf for leaf in self.leaves if not isinstance(leaf, Tensor)]
        own = (*self.gm.named_parameters(), *self.gm.named_buffers())
        return {
            "call": (self.arguments, self.results, self.keywords, repr(fixed), repr(self.returned)),
            "inputs": tuple(repr(described(t)) for t in self.tensors),
            "weights": tuple((name, repr(described(tensor))) for name, tensor in own),
            "constants": tuple((n, _digest(data)) for n, data in sorted(self.constants.items())),
        }


def _tensors(gm: torch.fx.GraphModule) -> dict[str, Tensor]:
    """Parameters, buffers, literals and attributes that are plain tensors, by name."""
    own: dict[str, Tensor] = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    for prefix, module in _graphs(gm):
        for node in module.graph.find_nodes(op="get_attr"):
            value = operator.attrgetter(node.target)(module)
            own |= {prefix + node.target: value} if isinstance(value, Tensor) else {}
    return own


def _graphs(gm: torch.fx.GraphModule) -> Iterator[tuple[str, torch.fx.GraphModule]]:
    """A graph and the bodies of its higher-order ops, each with what its names begin with."""
    for name, module in gm.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            yield f"{name}." * bool(name), module


class _Made:
    """What comes out of one compilation: the inner compiler, and who gets the programs."""

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
        """The inner compiler: of a graph that takes only what it reads."""
        if why := compat.why_not_ahead():
            todo = "Package the part of it that computes, in eval mode."
            raise ArgumentError("a model that only computes", why, todo)
        self.takes, self.weights = [], {}  # it may be compiled anew, without templates
        kept: list[Any] = []
        static: list[int] = []
        derived = 0
        for number, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            source: Source = ("derived", derived)
            if (about := node.meta.get("desc")) is None:
                derived += 1
            elif hasattr(about, "target"):
                source = ("weight", about.target)
                self._names[number] = about.target
                self.weights[about.target] = described(node.meta["val"])
            else:
                source = ("input", self._call.numbers[about.idx])
            if node.users:
                self.takes.append(source)
                static += [len(kept)] * (source[0] != "input")
                kept.append(example_inputs[number])
            else:
                gm.graph.erase_node(node)
        gm.recompile()
        kwargs["static_input_idxs"] = static
        on_gpu = self._call.on_gpu
        library, self.needs = compat.compile_ahead(gm, kept, self._level, on_gpu, **kwargs)
        ipex = torch.ops.ipex
        ours = {ipex.blocked.default, ipex.short_attention.default, ipex.winograd.default}
        if cpu_library.is_paired() and any(node.target in ours for node in gm.graph.nodes):
            self.needs = sorted({*self.needs, "avx512_bf16"})
        self.files[CODE] = library.read_bytes()
        if (nodes := library.with_suffix(".json")).exists():
            self.files[NODES] = nodes.read_bytes()
        return _never

    def join(self, inner: Any, programs: Iterable[Program], *_: Any, **__: Any) -> Any:
        """The weight prologue."""
        self.parts = tuple(part_of(program, self._names) for program in programs)
        return inner


def _never(_: Any) -> Any:
    raise AssertionError("compiled for another process")


_never._boxed_call = True  # type: ignore[attr-defined]


def _compiled(call: _Exported, ahead: Ahead) -> Entry:
    level = x86_levels.LEVELS.get(architecture())
    made = _Made(call, level.march if level else "")
    ahead.compile(made.compile, made.join)
    constants = {name: call.constants[name] for name in made.weights if name in call.constants}
    leaves = [leaf if isinstance(leaf, Tensor) else None for leaf in call.leaves]
    about = Package(
        format=FORMAT,
        needs=tuple(made.needs),
        keywords=call.keywords,
        arguments=call.arguments,
        results=call.results,
        leaves=tuple(None if leaf is None else call.described(leaf) for leaf in leaves),
        fixed=tuple(None if isinstance(leaf, Tensor) else encoded(leaf) for leaf in call.leaves),
        returned=tuple(v if kind == "tensor" else None for kind, v in call.returned),
        returned_fixed=tuple(encoded(v) if kind == "fixed" else None for kind, v in call.returned),
        weights={n: d for n, d in made.weights.items() if n not in constants},
        constants={n: made.weights[n] for n in constants},
        device="cuda" if call.on_gpu else "cpu",
        parts=made.parts,
        takes=tuple(made.takes),
        events=tuple((e.kind, e.subject, e.reason, e.where) for e in ahead.report.events),
    )
    files = made.files | {CONSTANT + name: data for name, data in constants.items()}
    return Entry(msgspec.json.decode(msgspec.json.encode(about)), frame_fields(files))


def _plain(value: Any) -> Any:
    """An input without repeated memory, which no other could be copied to."""
    return value.contiguous() if isinstance(value, Tensor) and 0 in value.stride() else value


def _refuse_odd(leaves: Iterable[Any], what: str) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor | bool | int | float | str | None):
            came = f"an {what} that is a {type(leaf).__name__}"
            raise ArgumentError("tensors and plain values", came, "Wrap the model in one of these.")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    """The elements in order, whatever their layout."""
    flat = tensor.detach().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
