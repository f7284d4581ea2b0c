"""With what a run called its models, written down for `prebuild --from-log`.

`IPEX_RECORD=FOLDER` has what backend `ipex` compiled: a backend sees tensors alone. `record` has
what a model was called with.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ipex_inductor import compat
from ipex_inductor.compiler.arguments import Teller, UntoldError, ranges, tensor_facts
from ipex_inductor.errors import ArgumentError

log = logging.getLogger("ipex_inductor")


@contextmanager
def record(model: nn.Module, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Write down with what `model` is called inside, for `prebuild --from-log FOLDER`.

    `model` is what is called: what `torch.compile` returned, if that. Tensors by shape, strides and
    dtype, in lists, tuples and dicts too; numbers, texts, flags, dtypes and devices by value. A
    line for each call unlike those before; once backend `ipex` compiled something, only for calls
    for which it did. Raises `ArgumentError` for what is no module, or a folder that cannot be made.
    A call with anything else among its arguments is left out, with a warning.
    """
    if not isinstance(model, nn.Module):
        todo = "Give the module that is called, compiled or not."
        raise ArgumentError("a torch.nn.Module", type(model).__name__, todo)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError("a folder for records", str(error), "Check the path.") from error
    before = model.__dict__.get("_compiled_call_impl")  # of `model.compile()`
    recorded = _Calls(model, Path(folder), before or model._call_impl)
    # What `torch.compile` returns hands what is set on to the module inside.
    object.__setattr__(model, "_compiled_call_impl", recorded)
    try:
        yield
    finally:
        object.__setattr__(model, "_compiled_call_impl", before)
    if not recorded.calls:
        log.warning("record: the model was not called; what was compiled of it is another object")


@dataclass
class _Call:
    """A call in progress: what it was given, and whether something was compiled for it."""

    line: dict[str, Any]
    teller: Teller
    compiled: bool = False


_now: ContextVar[_Call | None] = ContextVar("ipex_recorded_call", default=None)


@dataclass
class _Calls:
    """Calls the model, and tells with what."""

    model: nn.Module
    folder: Path
    call: Callable[..., Any]
    calls: int = 0
    compiled: bool = False
    known: set[str] = field(default_factory=set)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # as a part of what somebody else calls
            return self.call(*args, **kwargs)
        self.calls += 1
        call = self._told(args, kwargs)
        shown = json.dumps(call.line)  # before there are ranges
        token = _now.set(call)
        try:
            result = self.call(*args, **kwargs)
        finally:
            _now.reset(token)
        self.compiled |= call.compiled
        if call.compiled or not (self.compiled or shown in self.known):
            _write(self.folder, call.line)
        self.known.add(shown)
        return result

    def _told(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        teller = Teller()
        try:
            told = {
                "args": [teller.told(value, f"argument {n}") for n, value in enumerate(args)],
                "kwargs": {name: teller.told(value, name) for name, value in kwargs.items()},
            }
        except UntoldError as error:
            if str(error) not in self.known:
                log.warning("a call is not recorded: %s", error)
            self.known.add(str(error))
            return _Call({"untold": str(error)}, teller)
        given = (*teller.tensors, *self.model.parameters())
        training = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        return _Call({"call": told, "training": training}, teller)


def note(gm: torch.fx.GraphModule, training: bool) -> None:
    """What backend `ipex` compiles: ranges for the call that is recorded, or a line of its own.

    That has the shape, strides, dtype and ranges of each tensor that the model's caller gave, in
    this process's file in `IPEX_RECORD`. Graphs after a break are left out: they follow from the
    first. Never raises for what the disk says.
    """
    call = _now.get()
    if call is not None:
        call.compiled = True
        _complete(call.teller, gm)
        return
    folder = os.environ.get("IPEX_RECORD")
    if not folder:
        return
    found: dict[str, Any] = {}
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        value = placeholder.meta.get("example_value")
        name = compat.callers_name(placeholder)
        if name is None or not isinstance(value, torch.Tensor):
            continue
        if name.startswith("___"):  # of the stack at a break
            return
        found[name] = tensor_facts(value)
    _write(Path(folder), {"inputs": found, "training": training})


def _complete(teller: Teller, gm: torch.fx.GraphModule) -> None:
    """Add the ranges that Dynamo chose for sizes of the caller's tensors."""
    facts = {id(t): about for t, about in zip(teller.tensors, teller.facts, strict=True)}
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        value, given = placeholder.meta.get("example_value"), placeholder.meta.get("grapharg")
        if isinstance(value, torch.Tensor) and given is not None and id(given.example) in facts:
            facts[id(given.example)]["ranges"] |= ranges(value)


def _write(folder: Path, line: Mapping[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        log.warning("a call is not recorded: %s", error)
