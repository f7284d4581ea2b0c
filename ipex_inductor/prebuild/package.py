"""The metadata of a package: how its code is called, and what it takes, as plain JSON data."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from ipex_inductor.errors import ArgumentError
from ipex_inductor.passes.weights.program import Program, Ref, Step

KIND = "package"
CODE, NODES = "model.so", "model.json"  # the library, and calls in it that torch dispatches by name
CONSTANT = "constant "  # and a name: the elements of a tensor, in order
FORMAT = 1
Tensor = torch.Tensor


class Described(msgspec.Struct, frozen=True):
    """The dtype, shape, strides and device of a tensor that code was compiled for."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str = "cpu"

    def why_not(self, value: object, device: torch.device) -> str:
        """Return why a value cannot be passed to code on `device`, "" if it can."""
        if not isinstance(value, Tensor):
            return f"a {type(value).__name__}"
        same = short_name(value.dtype) == self.dtype and tuple(value.shape) == self.shape
        if same and value.device == device and value.layout == torch.strided:
            return ""
        return f"{short_name(value.dtype)}{list(value.shape)} on {value.device}"

    def lay_out(self, value: Tensor) -> Tensor:
        """Return the tensor, or a copy that has the required strides."""
        value = value.detach().resolve_conj().resolve_neg()
        if value.stride() == self.strides or not value.numel():
            return value
        return value.new_empty_strided(self.shape, self.strides).copy_(value)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{f' on {self.device}' * (self.device != 'cpu')}"


class Call(msgspec.Struct, frozen=True):
    """A `Step` as JSON; see `encode` for its arguments."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Part(msgspec.Struct, frozen=True):
    """A `Program` on weights by name."""

    weights: tuple[str, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]

    @property
    def program(self) -> Program:
        """Return the program to run on the weights."""
        steps = (
            Step(c.op, decode(c.args), tuple((n, decode(v)) for n, v in c.kwargs.items()))
            for c in self.calls
        )
        numbers = tuple(range(len(self.weights)))
        return Program(numbers, (), tuple(steps), tuple(map(Ref, self.outputs)))


class Package(msgspec.Struct, frozen=True):
    """The metadata of a package's entry.

    A leaf of the arguments is a tensor, or the constant that the code was compiled for. Leaves of
    the result are tensors, given as their number among the code's outputs, or constants.
    """

    format: int
    needs: tuple[str, ...]  # capabilities of the CPU, beyond those of its architecture
    keywords: tuple[str, ...]
    arguments: str  # tree structure of arguments and result, as torch serializes it
    results: str
    leaves: tuple[Described | None, ...]
    fixed: tuple[Any, ...]
    returned: tuple[int | None, ...]
    returned_fixed: tuple[Any, ...]
    weights: dict[str, Described]  # of the state dict
    constants: dict[str, Described]  # tensors of the model that its state dict does not have
    parts: tuple[Part, ...]
    takes: tuple[tuple[str, int | str], ...]  # inputs of the code: ("input", 0), ("weight", "w")
    events: tuple[tuple[str, str, str, str], ...]  # decisions of the compilation
    device: str = "cpu"  # or "cuda": the device that computes


def describe(value: Tensor) -> Described:
    """Return the description of a tensor; sizes and strides become plain integers."""
    shape, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    return Described(short_name(value.dtype), shape, strides, value.device.type)


def part_of(program: Program, names: Mapping[int, str]) -> Part:
    """Return a program with its inputs by name; raise `ArgumentError` if it is not plain data."""
    calls = (
        Call(s.op, tuple(map(encode, s.args)), {n: encode(v) for n, v in s.kwargs})
        for s in program.steps
    )
    weights = tuple(names[number] for number in program.inputs)
    return Part(weights, tuple(calls), tuple(ref.index for ref in program.outputs))


def short_name(value: object) -> str:
    """Return the name of a torch value without the prefix: `float32` for `torch.float32`."""
    return str(value).removeprefix("torch.")


# torch values that ops take, by their key in JSON, which no user's value can have.
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def encode(value: Any) -> Any:
    """Return an op's argument as JSON: lists, plain values, or one-key objects, as {"ref": 3}.

    Raises `ArgumentError` for other values.
    """
    if isinstance(value, Ref):
        return {"ref": value.index}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [encode(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for name, kind in _NAMED.items():
        if isinstance(value, kind):
            return {name: short_name(value)}
    actual = f"a {type(value).__name__}"
    raise ArgumentError(
        "weight preprocessing with plain values", actual, "Compile it without packaging."
    )


def decode(value: Any) -> Any:
    """Return the argument that `encode` wrote."""
    if isinstance(value, list | tuple):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    if kind == "ref":
        return Ref(text)
    if kind == "float":
        return float(text)
    return torch.device(text) if kind == "device" else getattr(torch, text)
