"""Loading and running of packages: no Dynamo, no Inductor, no compiler.

The whole bundle is verified, and its package is checked against this machine, before any of it is
run.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from ipex_inductor import compat
from ipex_inductor.aot_cache import key as keys
from ipex_inductor.aot_cache.bundle import Bundle, open_bundle
from ipex_inductor.aot_cache.digest import unframe_fields
from ipex_inductor.aot_cache.entry import unpack_any
from ipex_inductor.aot_cache.folder import SUFFIX
from ipex_inductor.aot_cache.graph_files import workroom
from ipex_inductor.errors import ArgumentError, BundleError, IpexError, PackageError
from ipex_inductor.prebuild.package import (
    CODE,
    CONSTANT,
    FORMAT,
    KIND,
    NODES,
    Described,
    Package,
    decode,
)
from ipex_inductor.reporting.decisions import Event, GraphReport
from ipex_inductor.runtime import gc_pause
from ipex_inductor.target.device import current, level, runs_on

Tensor = torch.Tensor


class LoadedModel:
    """A packaged model, called as the original model is; created by `load`."""

    def __init__(self, package: Package, files: Mapping[str, bytes], origin: str) -> None:
        self.package, self.origin = package, origin
        self._device = torch.device(package.device)
        self._on_device: Callable[[], AbstractContextManager[Any]] = nullcontext
        if package.device == "cuda":  # the current device, from now on
            self._device = torch.device("cuda", torch.cuda.current_device())
            self._on_device = partial(torch.cuda.device, self._device)
        events = [Event(*event) for event in package.events]
        self.report = GraphReport(events, source="cache")
        self._arguments, self._results = map(_spec, (package.arguments, package.results))
        self._constants = {
            name: _tensor(files[CONSTANT + name], about).to(self._device)
            for name, about in package.constants.items()
        }
        self._parts = [(part.weights, part.program) for part in package.parts]
        self._fixed, self._returned_fixed = map(decode, (package.fixed, package.returned_fixed))
        self._inputs = [(n, a) for n, a in enumerate(package.leaves) if a is not None]
        self._static: dict[int, Tensor] = {}
        self._runner = _open_runner(files, str(self._device))

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Use these weights from now on, and run the weight preprocessing on them.

        Weights that are used unchanged are not copied, so write neither to a loaded state dict nor
        to tensors that share its memory. Raises `ArgumentError` for weights that the code does not
        take.
        """
        tensors = {**_lay_out_weights(self.package, weights, self._device), **self._constants}
        derived: list[Tensor] = []
        with self._on_device():
            for names, program in self._parts:
                derived += program.run([tensors[name] for name in names])
        # Replaced as a whole: a call in another thread sees either all old or all new weights.
        sources: dict[str, Any] = {"weight": tensors, "derived": derived}
        self._static = {
            number: sources[kind][name]
            for number, (kind, name) in enumerate(self.package.takes)
            if kind != "input"
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result, without gradients; raise `ArgumentError` for other inputs."""
        inputs, static = self._read(args, kwargs), self._static
        operands = [
            static[number] if number in static else inputs[name]
            for number, (_, name) in enumerate(self.package.takes)
        ]
        with torch.no_grad(), torch._C._DisableAutocast(), self._on_device():
            outputs = self._runner.run(operands)
        package = self.package
        leaves = [
            fixed if number is None else outputs[number]
            for number, fixed in zip(package.returned, self._returned_fixed, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self._results)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Tensor]:
        """Return the input tensors by leaf number; raise `ArgumentError` if they do not fit."""
        package = self.package
        named = {name: kwargs[name] for name in package.keywords if name in kwargs}
        leaves, spec = pytree.tree_flatten((args, named))
        if spec != self._arguments or len(named) != len(kwargs):
            actual = f"{len(args)} and {sorted(kwargs)}"
            advice = "Call it as it was when it was packaged."
            raise ArgumentError(f"arguments of the form {self._arguments}", actual, advice)
        for number, (about, fixed) in enumerate(zip(package.leaves, self._fixed, strict=True)):
            leaf = leaves[number]
            if about is None:
                why = "" if type(leaf) is type(fixed) and leaf == fixed else repr(leaf)
            else:
                why = about.why_not(leaf, self._device)
            if why:
                wanted = repr(fixed) if about is None else str(about)
                advice = "The code is for those sizes alone; package the model for others too."
                raise ArgumentError(f"{wanted} as input {number}", why, advice)
        return {number: about.lay_out(leaves[number]) for number, about in self._inputs}


def load(
    path: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    allow_unsigned: bool = False,
    allow_older: bool = False,
) -> LoadedModel:
    """Load the package in a bundle with the weights of a state dict, ready to be called.

    Inputs have the shapes and dtypes that it was packaged for. Weight preprocessing (folding,
    casts, packing) runs now. A package for a GPU runs on the current device, where weights and
    inputs must be.

    Args:
        path: File of the bundle.
        weights: State dict of the model.
        allow_unsigned: As for `use_bundle`.
        allow_older: As for `use_bundle`.

    Raises:
        BundleError: the bundle is not whole, not trusted, or older than one used before.
        PackageError: no package in it was made for this torch and this CPU.
        ArgumentError: the weights do not fit.
    """
    with gc_pause.pause():  # a full garbage collection would walk all of torch's objects in vain
        bundle = open_bundle(Path(path), allow_unsigned, allow_older)
        try:
            package, blob = _choose_package(bundle)
            model = LoadedModel(package, unframe_fields(blob), bundle.origin)
        except IpexError:
            raise
        except (AttributeError, LookupError, OSError, RuntimeError, ValueError) as error:
            actual = f"{bundle.path}: {type(error).__name__}: {error}"
            raise BundleError(
                "a package that can be loaded", actual, "Package it again."
            ) from error
        model.load_weights(weights)
    return model


def _choose_package(bundle: Bundle) -> tuple[Package, bytes]:
    """Return metadata and data of the package for the highest architecture that runs here.

    Raises `PackageError` if there is none.
    """
    candidates, reasons = [], []
    for item in bundle.manifest.entries:
        if item.kind != KIND:
            continue
        framed, entry = unpack_any(bundle.load(item.key + SUFFIX))
        try:
            package = msgspec.convert(entry.meta, Package)
            fields = keys.read(framed)
        except (msgspec.MsgspecError, ValueError) as error:
            reasons.append(f"it cannot be read: {error}")
            continue
        if why := "; ".join(_differences(fields, package)):
            reasons.append(why)
        else:
            rank = level(fields["architecture"]), len(package.needs)
            candidates.append((rank, package, entry.blob))
    if not candidates:
        actual = f"{bundle.path}: {' | '.join(dict.fromkeys(reasons)) or 'it has none'}"
        advice = "Package the model on such a machine: ipex-inductor prebuild --package."
        raise PackageError("a package for this torch and this CPU", actual, advice)
    _, package, blob = max(candidates, key=itemgetter(0))
    return package, blob


def _differences(fields: Mapping[str, Any], package: Package) -> Iterator[str]:
    """Yield the reasons why a package cannot run here."""
    if package.device == "cuda" and not torch.cuda.is_available():
        yield f"built for {fields.get('architecture')}, and torch sees no GPU"
        return
    running = str(current("cuda")) if package.device == "cuda" else current().arch
    if package.format != FORMAT:
        yield f"format {package.format} here, {FORMAT} there"
    if fields.get("torch") != compat.VERSION:
        yield f"built for torch {fields.get('torch')}, running on {compat.VERSION}"
    if not runs_on(_family(package, str(fields.get("architecture"))), _family(package, running)):
        yield f"built for {fields.get('architecture')}, running on {running}"
    able = torch.cpu.get_capabilities()
    if missing := [name for name in package.needs if able.get(name) is not True]:
        yield f"this CPU lacks {', '.join(missing)}"


def _family(package: Package, architecture: str) -> str:
    """Return the part of an architecture that decides whether instructions run.

    GPU kernels run on any other GPU of their kind.
    """
    return architecture.partition(":")[0] if package.device == "cuda" else architecture


def _spec(text: str) -> pytree.TreeSpec:
    """Return torch's tree structure of a text; raise `PackageError` for unknown classes."""
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:  # a class of a library that was not imported
        advice = "Import what defines it, then load."
        raise PackageError("types that torch.utils._pytree knows", str(error), advice) from None


def _lay_out_weights(
    package: Package, weights: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Return the weights in the layouts the code takes; raise `ArgumentError` if one is unfit."""
    wrong = [
        f"{name}: expected {about}, got {why}"
        for name, about in package.weights.items()
        if (why := about.why_not(weights[name], device) if name in weights else "nothing")
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" * (len(wrong) > 3)
        advice = "Give the state dict of a model like the one that was packaged."
        raise ArgumentError("its weights", "; ".join(wrong[:3]) + more, advice)
    return {name: about.lay_out(weights[name]) for name, about in package.weights.items()}


def _tensor(data: bytes, about: Described) -> Tensor:
    """Return the tensor whose elements are these bytes, in logical order."""
    dtype = getattr(torch, about.dtype)
    empty = torch.empty_strided(about.shape, about.strides, dtype=dtype, device="cpu")
    if not data:
        return empty
    return empty.copy_(torch.frombuffer(bytearray(data), dtype=dtype).view(about.shape))


def _open_runner(files: Mapping[str, bytes], device: str) -> Any:
    """Load the library with torch's runner, from a private folder that is removed at once."""
    folder = workroom.room() / secrets.token_hex(16)
    folder.mkdir(mode=0o700)
    try:
        for name in (CODE, NODES):
            if name in files:
                (folder / name).write_bytes(files[name])
        return compat.package_runner(folder / CODE, device)
    finally:
        shutil.rmtree(
            folder, ignore_errors=True
        )  # the library is mapped by now; its file is not read again
