"""Models with example inputs, to be compiled ahead of time."""

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
    def all_of(cls, name: str, value: object) -> list[Self]:
        """Return an example for each set of inputs in the return value of a user's function.

        Args:
            name: Name of the function.
            value: (model, inputs), inputs being a tuple or a list of tuples; ranges of sizes
                (`Dynamic`) and an optimizer may follow.

        Raises:
            ArgumentError: the value has another form.
        """
        match value:
            case (nn.Module() as model, (tuple() | list()) as inputs, *more):
                sets = [inputs] if isinstance(inputs, tuple) else inputs
                ranges = [part for part in more if isinstance(part, Mapping)]
                steps = [part for part in more if isinstance(part, Optimizer)]
                is_complete = len(more) == len(ranges) + len(steps) and len(ranges) < 2 > len(steps)
                if sets and is_complete and all(isinstance(one, tuple) for one in sets):
                    dynamic: Dynamic | None = next(iter(ranges), None)
                    optimizer: Optimizer | None = next(iter(steps), None)
                    return [
                        cls(f"{name} #{n}" if n else name, model, one, {}, dynamic, optimizer)
                        for n, one in enumerate(sets)
                    ]
        actual = (
            ", ".join(type(part).__name__ for part in value) if isinstance(value, tuple) else value
        )
        raise ArgumentError(
            f"{name} to return (model, tuple of inputs), the model a torch.nn.Module",
            str(actual),
            "Return such a pair; ranges of sizes and an optimizer may follow.",
        )

    def with_mode(self, dtype: torch.dtype | None, training: bool) -> Self:
        """Return the example in train or eval mode, with floating point cast to `dtype`.

        The optimizer is kept only in training.
        """

        def cast(value: Any) -> Any:
            floats = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if floats else value

        model = self.model.train(training).to(dtype=dtype)
        inputs = tuple(map(cast, self.inputs))
        optimizer = self.optimizer if training else None
        return replace(self, model=model, inputs=inputs, training=training, optimizer=optimizer)

    def with_sizes(self, line: str) -> Self:
        """Return the example with inputs of other sizes, all zeros.

        `line`: sizes of each tensor, as `8x3x224x224 8`, or ranges, as `1x16..512`, whose inputs
        have the largest size. Raises `ArgumentError` for a text without sizes, or not one for each
        tensor.
        """
        texts, inputs = line.split(), list(self.inputs)
        dynamic: dict[int | str | Where, dict[int, Range]] = {}
        tensors = [n for n, value in enumerate(inputs) if isinstance(value, Tensor)]
        try:
            for n, text in zip(tensors, texts, strict=True):
                ranges = [[int(size) for size in part.split("..")] for part in text.split("x")]
                inputs[n] = _zeros_like(inputs[n], [sizes[-1] for sizes in ranges])
                dims: dict[int, Range] = {
                    d: (s[0], s[1]) for d, s in enumerate(ranges) if len(s) == 2
                }
                dynamic |= {n: dims} if dims else {}
        except (IndexError, RuntimeError, ValueError) as error:
            advice = f"Give sizes as 8x3x224x224 for each of {len(tensors)} tensors."
            raise ArgumentError("sizes of inputs", f"{line!r}: {error}", advice) from None
        return replace(
            self, name=f"{self.name} {line}", inputs=tuple(inputs), dynamic=dynamic or None
        )

    def with_record(self, line: str) -> Self:
        """Return the example with inputs recorded by a run (`ipex_inductor.record`, `IPEX_RECORD`).

        Raises `ArgumentError` for a record of another model, or an invalid one.
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
    """Yield the distinct lines of a file, or of all files in a folder, without comments.

    Raises `ArgumentError` where there are none.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    try:
        lines = [_strip_comment(line) for f in files for line in f.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("a file of text", f"{path}: {error}", "Check the path.") from None
    if not any(lines):
        raise ArgumentError("lines to read", f"none in {path}", "Check the path.")
    yield from dict.fromkeys(filter(None, lines))


def _strip_comment(line: str) -> str:
    """Return a line without its comment; records, in JSON, are kept whole as they have none."""
    return line.strip() if line.startswith("{") else line.partition("#")[0].strip()


def _zeros_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return zeros of that shape, with the dtype and memory format of a tensor."""
    zeros = torch.zeros(shape, dtype=tensor.dtype)
    channels_last = torch.channels_last
    is_channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=channels_last)
    is_contiguous = tensor.is_contiguous()
    return (
        zeros.to(memory_format=channels_last) if is_channels_last and not is_contiguous else zeros
    )
