"""Kinds of a model's inputs in a file: nested containers of shapes, types and plain values."""

from typing import Any

import msgspec
import torch
from torch import Tensor

from ipex_inductor.errors import SummaryFileError
from ipex_inductor.quantization.files.tensor_file import DTYPES, NAMES

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
PLAIN = (bool, int, float, str, type(None))


class InputEntry(msgspec.Struct, omit_defaults=True):
    """One value: `kind` is "tensor", "tuple", "list", "dict", "plain", or the name of a class."""

    kind: str
    dtype: str = ""
    shape: list[int] = []
    items: list["InputEntry"] = []
    keys: list[str] = []
    value: bool | int | float | str | None = None


def describe_inputs(value: Any) -> InputEntry:
    """Return the description of a value."""
    if isinstance(value, Tensor) and value.dtype in NAMES:
        return InputEntry("tensor", dtype=NAMES[value.dtype], shape=list(value.shape))
    if type(value) in (tuple, list):
        return InputEntry(type(value).__name__, items=[describe_inputs(each) for each in value])
    if type(value) is dict and all(isinstance(key, str) for key in value):
        items = [describe_inputs(each) for each in value.values()]
        return InputEntry("dict", keys=list(value), items=items)
    if type(value) in PLAIN:
        return InputEntry("plain", value=value)
    return InputEntry(type(value).__qualname__)


def make_inputs(entry: InputEntry, file: str) -> Inputs:
    """Return inputs of zeros that fit a description.

    Raises:
        SummaryFileError: for a value of a class that a file cannot describe.
    """
    value: Inputs = _make(entry, file)
    return value


def _make(entry: InputEntry, file: str) -> Any:
    items = [_make(item, file) for item in entry.items]
    if entry.kind == "tensor":
        return torch.zeros(entry.shape, dtype=DTYPES[entry.dtype])
    if entry.kind == "plain":
        return entry.value
    if entry.kind == "dict":
        return dict(zip(entry.keys, items, strict=True))
    if entry.kind in ("tuple", "list"):
        return tuple(items) if entry.kind == "tuple" else items
    raise SummaryFileError(
        "inputs of tensors, numbers and containers",
        f"{entry.kind} in {file}",
        "Pass example_inputs to load.",
    )
