"""What a run recorded (`ipex_inductor.record`, `IPEX_RECORD`): the inputs of a model again."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from ipex_inductor.compiler.arguments import Reader
from ipex_inductor.errors import ArgumentError
from ipex_inductor.prebuild.graphs import Dynamic

Tensor = torch.Tensor


@dataclass(frozen=True)
class Record:
    """One line: the arguments of a call, ranges of sizes, and whether gradients were asked for."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic: Dynamic
    training: bool

    @classmethod
    def of(cls, line: str) -> Self:
        """Raises `ArgumentError` for what is no record, or a call that could not be told."""
        try:
            told = json.loads(line)
            if "untold" in told:
                todo = "Give such arguments in Python: prebuild.graphs.prebuild(..., kwargs=)."
                wanted = "tensors, numbers, texts, flags, and lists, tuples and dicts of them"
                raise ArgumentError(wanted, str(told["untold"]), todo)
            training = bool(told["training"])
            reader = Reader()
            args, kwargs = _call(reader, told["call"]) if "call" in told else _graph(reader, told)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            came = f"{type(error).__name__}: {error}"
            wanted = "a record of ipex_inductor.record or IPEX_RECORD"
            raise ArgumentError(wanted, came, "Record the run again.") from None
        # An argument itself goes by its number or name alone.
        dynamic = {path if path[1:] else path[0]: dims for path, dims in reader.ranges.items()}
        return cls(args, kwargs, dynamic, training)

    def check(self, forward: Callable[..., Any]) -> None:
        """Raise `ArgumentError` for what `forward` does not take."""
        try:
            inspect.signature(forward).bind(*self.args, **self.kwargs)
        except TypeError as error:
            came = f"inputs {', '.join([*map(str, range(len(self.args))), *self.kwargs])}: {error}"
            todo = "Give its run's records alone."
            raise ArgumentError("a record of this model", came, todo) from None

    def __str__(self) -> str:
        """Sizes of tensors, and other values, one after another."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return " ".join(_word(leaf) for leaf in leaves if leaf is not None)


def _call(reader: Reader, told: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(told["args"]) is not list or type(told["kwargs"]) is not dict:
        raise ValueError(f"no call: {str(told)[:100]}")
    args = tuple(reader.read(part, (number,)) for number, part in enumerate(told["args"]))
    return args, {name: reader.read(part, (name,)) for name, part in told["kwargs"].items()}


def _graph(reader: Reader, told: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of a graph, which has tensors alone, by the number or the name of the argument."""
    inputs = told["inputs"]
    if type(inputs) is not dict:
        raise ValueError(f"no inputs: {str(inputs)[:100]}")
    numbers = sorted(int(name) for name in inputs if name.isdecimal())
    args = tuple(reader.tensor(inputs[str(number)], (number,)) for number in numbers)
    names = [name for name in inputs if not name.isdecimal()]
    return args, {name: reader.tensor(inputs[name], (name,)) for name in names}


def _word(leaf: Any) -> str:
    return "x".join(map(str, leaf.shape)) if isinstance(leaf, Tensor) else str(leaf)[:20]
