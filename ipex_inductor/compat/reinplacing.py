"""Control over which functional ops Inductor rewrites in place."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

import torch

Unsafe = Callable[[torch.fx.Graph, Callable[[Any], Collection[int]]], list[torch.fx.Node]]
_unsafe: ContextVar[Unsafe | None] = ContextVar("unsafe", default=None)


@contextlib.contextmanager
def reinplacing_checked(unsafe: Unsafe) -> Iterator[None]:
    """Keep the nodes that `unsafe` names out of place, meanwhile.

    Args:
        unsafe: Gets the graph that Inductor is about to rewrite, and a function that gives the
            numbers of the arguments an op would be written into, none for other ops.
    """
    _install()
    token = _unsafe.set(unsafe)
    try:
        yield
    finally:
        _unsafe.reset(token)


@functools.cache
def _install() -> None:
    """Insert a check before Inductor's pass; it does nothing outside `reinplacing_checked`."""
    from torch._inductor.fx_passes import reinplace

    module: Any = reinplace
    usual = module.reinplace_inplaceable_ops_core

    def list_mutated_args(op: Any) -> Collection[int]:
        inplace_op = module.inplaceable_ops.get(op) or module.inplaceable_foreach_ops.get(op)
        numbers: Collection[int] = ()
        if inplace_op is not None:
            numbers = getattr(inplace_op, "mutated_args", None) or (inplace_op.mutated_arg,)
        return numbers

    def reinplace_checked(graph: torch.fx.Graph) -> Any:
        unsafe = _unsafe.get()
        held = unsafe(graph, list_mutated_args) if unsafe else []
        targets = {node: node.target for node in held}
        for node in held:  # the pass does not recognize the new target
            node.target = functools.partial(_call, node.target)
        try:
            return usual(graph)
        finally:
            for node, target in targets.items():
                node.target = target

    module.reinplace_inplaceable_ops_core = reinplace_checked


def _call(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)
