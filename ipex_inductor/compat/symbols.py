"""Sizes that are symbols."""

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

# The channels-last format by the number of dimensions.
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def sizes(value: Any) -> Any:
    """Return the sizes of a tensor or a size; a symbolic size stays symbolic, with its range.

    Otherwise torch would use code compiled for a narrower range, and raise for this one.
    """
    if isinstance(value, torch.SymInt):
        node: Any = value.node
        return f"{node.expr} in {node.shape_env.bound_sympy(node.expr)}"
    return tuple(map(sizes, value.shape)) if isinstance(value, torch.Tensor) else hints(value)


def hints(value: Any) -> Any:
    """Return the current sizes of a tensor or a size, symbols included; None for an unknown one."""
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if isinstance(value, torch.Tensor):
        return tuple(map(hints, value.shape))
    return value if isinstance(value, int) else None


def range_of(size: Any) -> tuple[int, int | None] | None:
    """Return the least and largest value of a symbol, None for no bound; None for a constant."""
    if not isinstance(size, torch.SymInt):
        return None
    node: Any = size.node
    bounds = node.shape_env.bound_sympy(node.expr)
    return int(bounds.lower), int(bounds.upper) if bounds.upper.is_Integer else None


def is_channels_last(value: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous in the channels-last format of its dimensions.

    Torch 2.11 denies it of fake tensors with symbolic sizes, once an op has reordered their
    dimensions. There the strides are compared as expressions, which adds no guard.
    """
    last = _LAST.get(value.dim())
    if last is None:
        return False
    if value.is_contiguous(memory_format=last):
        return True
    if all(isinstance(number, int) for number in (*value.shape, *value.stride())):
        return False
    wanted: Any = 1
    for dim in (1, *range(value.dim() - 1, 1, -1), 0):
        size, step = _expression(value.shape[dim]), _expression(value.stride(dim))
        if size != 1 and sympy.expand(step - wanted) != 0:
            return False
        wanted *= size
    return True


def _expression(number: Any) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)
