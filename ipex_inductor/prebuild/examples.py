"""What is to be compiled ahead: models with the inputs that they will get."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from ipex_inductor.compiler.arguments import Where
from ipex_inductor.errors import ArgumentError
from ipex_inductor.prebuild.graphs import Dynamic, Range
from ipex_inductor.prebuild.records import Record

Tensor = torch.Tensor


@dataclass(frozen=True)
class Example:
    """A model on the CPU with one set of inputs; `dynamic` as for `graphs.prebuild`."""

    name: str
    model: nn.Module
    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic: Dynamic | None = None
    optimizer: Optimizer | None = None
    training: bool = False

    @classmethod
    def all_of(cls, name: str, made: object) -> list[Self]:
        """Of what a function returns: a model, its inputs or a list of such tuples, and more.

        More are ranges of sizes (`Dynamic`) and an optimizer. Raises `ArgumentError` for others.
        """
        match made:
            case (nn.Module() as model, (tuple() | list()) as given, *more):
                sets = [given] if isinstance(given, tuple) else given
                ranges = [each for each in more if isinstance(each, Mapping)]
                steps = [each for each in more if isinstance(each, Optimizer)]
                plain = len(more) == len(ranges) + len(steps) and len(ranges) < 2 > len(steps)
                if sets and plain and all(isinstance(each, tuple) for each in sets):
                    dynamic: Dynamic | None = next(iter(ranges), None)
                    optimizer: Optimizer | None = next(iter(steps), None)
                    return [
                        cls(f"{name} #{n}" if n else name, model, each, {}, dynamic, optimizer)
                        for n, each in enumerate(sets)
                    ]
        came = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else made
        raise ArgumentError(
            f"{name} to return (model, tuple of inputs), the model a torch.nn.Module",
            str(came),
            "Return such a pair; ranges of sizes and an optimizer may follow.",
        )

    def as_asked(self, dtype: torch.dtype | None, training: bool) -> Self:
        """In train mode or eval mode, floating point in `dtype`; an optimizer only in training."""

        def cast(value: Any) -> Any:
            floats = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if floats else value

        model = self.model.train(training).to(dtype=dtype)
        inputs = tuple(map(cast, self.inputs))
        optimizer = self.optimizer if training else None
        return replace(self, model=model, inputs=inputs, training=training, optimizer=optimizer)

    def sized(self, line: str) -> Self:
        """With inputs of these sizes, as `8x3x224x224 8` or `1x16..512`, a range, at its end.

        Raises `ArgumentError` for what is no size, or not one for each tensor.
        """
        words, inputs = line.split(), list(self.inputs)
        dynamic: dict[int | str | Where, dict[int, Range]] = {}
        tensors = [n for n, value in enumerate(inputs) if isinstance(value, Tensor)]
        try:
            for n, word in zip(tensors, words, strict=True):
                ranges = [[int(size) for size in part.split("..")] for part in word.split("x")]
                inputs[n] = _alike(inputs[n], [sizes[-1] for sizes in ranges])
                dims: dict[int, Range] = {
                    d: (s[0], s[1]) for d, s in enumerate(ranges) if len(s) == 2
                }
                dynamic |= {n: dims} if dims else {}
        except (IndexError, RuntimeError, ValueError) as error:
            todo = f"Give sizes as 8x3x224x224 for each of {len(tensors)} tensors."
            raise ArgumentError("sizes of inputs", f"{line!r}: {error}", todo) from None
        return replace(
            self, name=f"{self.name} {line}", inputs=tuple(inputs), dynamic=dynamic or None
        )

    def recorded(self, line: str) -> Self:
        """With inputs as a run recorded them (`ipex_inductor.record`, `IPEX_RECORD`).

        Raises `ArgumentError` for a record of another model, or what is none.
        """
        record = Record.of(line)
        record.check(self.model.forward)
        return replace(
            self,
            name=f"{self.name} {record}",
            inputs=record.args,
            kwargs=record.kwargs,
            dynamic=record.dynamic or None,
            training=record.training,
            optimizer=self.optimizer if record.training else None,
        )


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file, or of all in a folder, each once; but for comments.

    Raises `ArgumentError` where there are none.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    try:
        lines = [_plain(line) for f in files for line in f.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("a file of text", f"{path}: {error}", "Check the path.") from None
    if not any(lines):
        raise ArgumentError("lines to read", f"none in {path}", "Check the path.")
    yield from dict.fromkeys(filter(None, lines))


def _plain(line: str) -> str:
    """Without a comment; records, in JSON, have none, but perhaps a text with that sign."""
    return line.strip() if line.startswith("{") else line.partition("#")[0].strip()


def _alike(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    made = torch.zeros(shape, dtype=tensor.dtype)
    last = torch.channels_last
    turned = tensor.dim() == 4 and tensor.is_contiguous(memory_format=last)
    plain = tensor.is_contiguous()
    return made.to(memory_format=last) if turned and not plain else made
