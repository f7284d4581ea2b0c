"""Encode the arguments of a call as JSON and decode them: tensors by metadata, the rest by value.

A tensor is `{"tensor": {...}}`; a tensor that occurred before is `{"same": its index}`. Lists,
tuples, dicts, dtypes, devices and numbers that JSON lacks are objects with one such key too.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from ipex_inductor import compat

Tensor = torch.Tensor
Where = tuple[int | str, ...]  # index or name of an argument, then keys into its containers
Span = tuple[int, int] | None  # smallest and largest size; None: any size

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class UnencodableError(Exception):
    """Raised for a value that JSON cannot represent; the message has its place and its type."""


def tensor_facts(value: Tensor) -> dict[str, Any]:
    """Return shape, strides, dtype, `requires_grad` and the ranges of dynamic sizes of a tensor."""
    # Ranges are read first: reading a symbolic size as a number specializes it for good.
    spans = ranges(value)
    return {
        "shape": list(compat.hints(value)),
        "strides": [compat.hints(stride) for stride in value.stride()],
        "dtype": str(value.dtype).removeprefix("torch."),
        "requires_grad": value.requires_grad,
        "ranges": spans,
    }


def ranges(value: Tensor) -> dict[int, tuple[int, int | None]]:
    """Return the ranges of the symbolic sizes, by dimension."""
    return {dim: span for dim, size in enumerate(value.shape) if (span := compat.range_of(size))}


class Encoder:
    """Encode values one after another.

    `tensors` and `facts` list the tensors met and their metadata, which callers may complete.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.facts: list[dict[str, Any]] = []

    def encode(self, value: Any, where: str) -> Any:
        """Return `value` as data for JSON.

        Raises:
            UnencodableError: with `where`, if the type of `value` has no JSON form.
        """
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        kind = type(value)
        if kind is float and not math.isfinite(value):
            return {"float": repr(value)}
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in (torch.dtype, torch.device):
            return {kind.__name__: str(value).removeprefix("torch.")}
        if kind in (list, tuple):
            return {kind.__name__: [self.encode(v, f"{where}[{n}]") for n, v in enumerate(value)]}
        if kind is dict and all(type(key) in (bool, int, str) for key in value):
            return {"dict": [[k, self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        raise UnencodableError(f"{where} is a {kind.__name__}")

    def _tensor(self, value: Tensor, where: str) -> dict[str, Any]:
        for number, tensor in enumerate(self.tensors):
            if tensor is value:
                return {"same": number}
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise UnencodableError(f"{where} is a {value.layout} {type(value).__name__}")
        self.tensors.append(value)
        self.facts.append(tensor_facts(value))
        return {"tensor": self.facts[-1]}


class Decoder:
    """Decode what an `Encoder` encoded, in its order.

    `ranges` has the ranges of dynamic sizes, by the path of the tensor.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ranges: dict[Where, dict[int, Span]] = {}

    def read(self, encoded: Any, path: Where) -> Any:
        """Return the decoded value; tensors are uninitialized and on the CPU.

        Raises:
            ValueError: if `encoded` is no encoded argument.
        """
        if encoded is None or isinstance(encoded, (bool, int, float, str)):
            return encoded
        match encoded:
            case {"tensor": Mapping() as facts}:
                return self.tensor(facts, path)
            case {"same": int(number)} if 0 <= number < len(self.tensors):
                return self.tensors[number]
            case {"float": "inf" | "-inf" | "nan" as word}:
                return float(word)
            case {"dtype": str(name)} if name in DTYPES:
                return DTYPES[name]
            case {"device": str(name)}:
                return torch.device(name)
            case {"list": list(parts)}:
                return self._parts(parts, path)
            case {"tuple": list(parts)}:
                return tuple(self._parts(parts, path))
            case {"dict": list(pairs)}:
                return {key: self.read(part, (*path, key)) for key, part in pairs}
        raise ValueError(f"no argument: {str(encoded)[:100]}")

    def _parts(self, parts: list[Any], path: Where) -> list[Any]:
        return [self.read(part, (*path, n)) for n, part in enumerate(parts)]

    def tensor(self, facts: Mapping[str, Any], path: Where) -> Tensor:
        """Return an uninitialized CPU tensor with these facts, and record the ranges of its sizes.

        Raises:
            ValueError: if a range or the dtype is invalid.
        """
        spans = {
            int(dim): (least, most) if most else None
            for dim, (least, most) in facts["ranges"].items()
        }
        for dim, (least, most) in facts["ranges"].items():
            numbers = type(least) is int and (most is None or type(most) is int)
            if not numbers or not 0 <= int(dim) < len(facts["shape"]):
                raise ValueError(f"no range of dimension {dim}: {least!r} to {most!r}")
        if facts["dtype"] not in DTYPES:
            raise ValueError(f"no dtype: {facts['dtype']}")
        value = torch.empty_strided(facts["shape"], facts["strides"], dtype=DTYPES[facts["dtype"]])
        self.tensors.append(value.requires_grad_(facts["requires_grad"]))
        if spans:
            self.ranges[path] = spans
        return value
