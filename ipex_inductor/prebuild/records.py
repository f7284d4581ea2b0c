"""Recorded calls of a run (`ipex_inductor.record`, `IPEX_RECORD`), read back as model inputs."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from ipex_inductor.compiler.arguments import Decoder
from ipex_inductor.errors import ArgumentError
from ipex_inductor.prebuild.graphs import Dynamic

Tensor = torch.Tensor


@dataclass(frozen=True)
class Record:
    """One line of a record: arguments of a call, ranges of sizes, and whether it was training."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic: Dynamic
    training: bool

    @classmethod
    def of(cls, line: str) -> Self:
        """Read a line; raise `ArgumentError` for an invalid record or an unrecordable call."""
        try:
            data = json.loads(line)
            if "untold" in data:
                advice = "Give such arguments in Python: prebuild.graphs.prebuild(..., kwargs=)."
                wanted = "tensors, numbers, texts, flags, and lists, tuples and dicts of them"
                raise ArgumentError(wanted, str(data["untold"]), advice)
            training = bool(data["training"])
            reader = Decoder()
            args, kwargs = _call(reader, data["call"]) if "call" in data else _graph(reader, data)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            actual = f"{type(error).__name__}: {error}"
            wanted = "a record of ipex_inductor.record or IPEX_RECORD"
            raise ArgumentError(wanted, actual, "Record the run again.") from None
        # An argument itself goes by its number or name alone.
        dynamic = {path if path[1:] else path[0]: dims for path, dims in reader.ranges.items()}
        return cls(args, kwargs, dynamic, training)

    def check(self, forward: Callable[..., Any]) -> None:
        """Raise `ArgumentError` if `forward` does not take these arguments."""
        try:
            inspect.signature(forward).bind(*self.args, **self.kwargs)
        except TypeError as error:
            actual = (
                f"inputs {', '.join([*map(str, range(len(self.args))), *self.kwargs])}: {error}"
            )
            advice = "Give its run's records alone."
            raise ArgumentError("a record of this model", actual, advice) from None

    def __str__(self) -> str:
        """Return the sizes of tensors, and other values, one after another."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return " ".join(_word(leaf) for leaf in leaves if leaf is not None)


def _call(reader: Decoder, call: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a recorded call; raise `ValueError` if it is malformed."""
    if type(call["args"]) is not list or type(call["kwargs"]) is not dict:
        raise ValueError(f"no call: {str(call)[:100]}")
    args = tuple(reader.read(part, (number,)) for number, part in enumerate(call["args"]))
    return args, {name: reader.read(part, (name,)) for name, part in call["kwargs"].items()}


def _graph(reader: Decoder, graph: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a recorded graph: tensors by number or name of the argument."""
    inputs = graph["inputs"]
    if type(inputs) is not dict:
        raise ValueError(f"no inputs: {str(inputs)[:100]}")
    numbers = sorted(int(name) for name in inputs if name.isdecimal())
    args = tuple(reader.tensor(inputs[str(number)], (number,)) for number in numbers)
    names = [name for name in inputs if not name.isdecimal()]
    return args, {name: reader.tensor(inputs[name], (name,)) for name in names}


def _word(leaf: Any) -> str:
    """Return the sizes of a tensor, as `8x3x224x224`, or another value's text."""
    return "x".join(map(str, leaf.shape)) if isinstance(leaf, Tensor) else str(leaf)[:20]
