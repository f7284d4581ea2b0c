"""Sizes that are symbols."""

from typing import Any

import torch


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
