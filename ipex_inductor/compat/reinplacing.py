"""Which functional ops Inductor writes in place of their operand."""

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
    """Inside, Inductor leaves the nodes out of place that `unsafe` names.

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
    """Put a check before Inductor's pass; it does nothing outside `reinplacing_checked`."""
    from torch._inductor.fx_passes import reinplace

    module: Any = reinplace
    usual = module.reinplace_inplaceable_ops_core

    def written(op: Any) -> Collection[int]:
        found = module.inplaceable_ops.get(op) or module.inplaceable_foreach_ops.get(op)
        numbers: Collection[int] = ()
        if found is not None:
            numbers = getattr(found, "mutated_args", None) or (found.mutated_arg,)
        return numbers

    def checked(graph: torch.fx.Graph) -> Any:
        unsafe = _unsafe.get()
        held = unsafe(graph, written) if unsafe else []
        targets = {node: node.target for node in held}
        for node in held:  # under a name that the pass does not know
            node.target = functools.partial(_call, node.target)
        try:
            return usual(graph)
        finally:
            for node, target in targets.items():
                node.target = target

    module.reinplace_inplaceable_ops_core = checked


def _call(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)
