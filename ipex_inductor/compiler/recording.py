"""Record the arguments that a run calls its models with, for `prebuild --from-log`.

`IPEX_RECORD=FOLDER` records what backend `ipex` compiles: a backend sees tensors only. `record`
records the arguments of a model's calls.
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
from ipex_inductor.compiler.arguments import Encoder, UnencodableError, ranges, tensor_facts
from ipex_inductor.errors import ArgumentError

log = logging.getLogger("ipex_inductor")


@contextmanager
def record(model: nn.Module, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Record the arguments of each call of `model` inside the block, for `prebuild --from-log`.

    Tensors are recorded by shape, strides and dtype, also in lists, tuples and dicts; numbers,
    strings, bools, dtypes and devices by value. Each distinct call gets one line; once backend
    `ipex` has compiled something, only calls for which it compiled do. A call with any other
    argument is left out, with a warning.

    Args:
        model: the module that is called; if compiled, the object that `torch.compile` returned.
        folder: folder of the records, created if missing.

    Raises:
        ArgumentError: if `model` is no module, or the folder cannot be created.
    """
    if not isinstance(model, nn.Module):
        advice = "Give the module that is called, compiled or not."
        raise ArgumentError("a torch.nn.Module", type(model).__name__, advice)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError("a folder for records", str(error), "Check the path.") from error
    before = model.__dict__.get("_compiled_call_impl")  # set by `model.compile()`
    recorded = _Calls(model, Path(folder), before or model._call_impl)
    # The object that `torch.compile` returns forwards attribute assignment to the inner module.
    object.__setattr__(model, "_compiled_call_impl", recorded)
    try:
        yield
    finally:
        object.__setattr__(model, "_compiled_call_impl", before)
    if not recorded.calls:
        log.warning("record: the model was not called; what was compiled of it is another object")


@dataclass
class _Call:
    """A call in progress: its arguments, and whether something was compiled for it."""

    line: dict[str, Any]
    encoder: Encoder
    compiled: bool = False


_now: ContextVar[_Call | None] = ContextVar("ipex_recorded_call", default=None)


@dataclass
class _Calls:
    """Call the model and record its arguments."""

    model: nn.Module
    folder: Path
    call: Callable[..., Any]
    calls: int = 0
    compiled: bool = False
    known: set[str] = field(default_factory=set)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # as part of an outer compiled call
            return self.call(*args, **kwargs)
        self.calls += 1
        call = self._encode_call(args, kwargs)
        shown = json.dumps(call.line)  # before compilation adds ranges
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

    def _encode_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        """Return the call as data for JSON; a line "untold" if an argument cannot be encoded."""
        encoder = Encoder()
        try:
            call = {
                "args": [encoder.encode(value, f"argument {n}") for n, value in enumerate(args)],
                "kwargs": {name: encoder.encode(value, name) for name, value in kwargs.items()},
            }
        except UnencodableError as error:
            if str(error) not in self.known:
                log.warning("a call is not recorded: %s", error)
            self.known.add(str(error))
            return _Call({"untold": str(error)}, encoder)
        tensors = (*encoder.tensors, *self.model.parameters())
        training = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        return _Call({"call": call, "training": training}, encoder)


def note(gm: torch.fx.GraphModule, training: bool) -> None:
    """Record a graph that backend `ipex` compiles: ranges for the call being recorded, or a line.

    A line has the shape, strides, dtype and ranges of each tensor that the model's caller passed;
    it goes to this process's file in `IPEX_RECORD`. Graphs after a break are left out, as they
    follow from the first. Errors of the file system are never raised.
    """
    call = _now.get()
    if call is not None:
        call.compiled = True
        _add_ranges(call.encoder, gm)
        return
    folder = os.environ.get("IPEX_RECORD")
    if not folder:
        return
    inputs: dict[str, Any] = {}
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        value = placeholder.meta.get("example_value")
        name = compat.callers_name(placeholder)
        if name is None or not isinstance(value, torch.Tensor):
            continue
        if name.startswith("___"):  # an intermediate on the stack at a graph break
            return
        inputs[name] = tensor_facts(value)
    _write(Path(folder), {"inputs": inputs, "training": training})


def _add_ranges(encoder: Encoder, gm: torch.fx.GraphModule) -> None:
    """Add the ranges that Dynamo chose for sizes of the caller's tensors."""
    facts = {id(t): about for t, about in zip(encoder.tensors, encoder.facts, strict=True)}
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        value, graph_arg = placeholder.meta.get("example_value"), placeholder.meta.get("grapharg")
        if (
            isinstance(value, torch.Tensor)
            and graph_arg is not None
            and id(graph_arg.example) in facts
        ):
            facts[id(graph_arg.example)]["ranges"] |= ranges(value)


def _write(folder: Path, line: Mapping[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        log.warning("a call is not recorded: %s", error)
