"""Values of nodes that depend on no input of their graph, computed now."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

Node = torch.fx.Node

LARGEST = 1 << 22  # the most elements of a tensor that is computed


class _Varies(Exception):
    """Raised if a value depends on an input, or is too large."""


def number(node: Any) -> float | None:
    """Return `node` if it is a number, or the element of a one-element constant; else None."""
    if isinstance(node, (int, float)):
        return node
    with unset_fake_temporarily():
        value = constant(node, 1)
        return None if value is None else value.item()


def constant(node: Any, elements: int = LARGEST) -> Tensor | None:
    """Return the value of `node` if it depends on no input and is small enough; else None."""
    try:
        with unset_fake_temporarily(), torch.no_grad():
            return _compute(node, elements)  # type: ignore[no-any-return]
    except _Varies:
        return None


def _compute(node: Any, elements: int = LARGEST) -> Any:
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        raise _Varies
    if not all(isinstance(n, int) for n in value.shape) or value.numel() > elements:
        raise _Varies
    if torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable:
        raise _Varies
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _compute)
    return node.target(*args, **kwargs)
