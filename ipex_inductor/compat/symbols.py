"""Sizes that are symbols."""

from typing import Any

import torch


def sizes(value: Any) -> Any:
    """As `hints`, but a size that is a symbol stays one, with its range.

    What torch compiled for a narrower one it would take, and then raise for what was asked for.
    """
    if isinstance(value, torch.SymInt):
        node: Any = value.node
        return f"{node.expr} in {node.shape_env.bound_sympy(node.expr)}"
    return tuple(map(sizes, value.shape)) if isinstance(value, torch.Tensor) else hints(value)


def hints(value: Any) -> Any:
    """The sizes that a tensor, or a size, has now, symbols and all; None for one nobody knows."""
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if isinstance(value, torch.Tensor):
        return tuple(map(hints, value.shape))
    return value if isinstance(value, int) else None


def range_of(size: Any) -> tuple[int, int | None] | None:
    """The least and largest value of a symbol, None for none; None for a constant."""
    if not isinstance(size, torch.SymInt):
        return None
    node: Any = size.node
    bounds = node.shape_env.bound_sympy(node.expr)
    return int(bounds.lower), int(bounds.upper) if bounds.upper.is_Integer else None
