"""Workaround for sums stored to several 16-bit tensors, in C++ of torch 2.13.

It declares a name twice there.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_in_blocks: ContextVar[bool] = ContextVar("stores of reductions in blocks", default=False)


@contextlib.contextmanager
def stores_in_blocks() -> Iterator[None]:
    """Put a reduction's store that declares a name again into a block of its own, meanwhile."""
    _install()
    token = _in_blocks.set(True)
    try:
        yield
    finally:
        _in_blocks.reset(token)


@functools.cache
def _install() -> None:
    """Wrap the stores of reductions; nothing changes outside `stores_in_blocks`."""
    from torch._inductor.codegen.common import DeferredLine
    from torch._inductor.codegen.cpp import CppVecKernel

    kernel: Any = CppVecKernel
    usual = kernel.store_reduction

    @functools.wraps(usual)
    def store(self: Any, name: str, index: Any, value: Any) -> None:
        lines = self.reduction_suffix._lines
        before = len(lines)
        usual(self, name, index, value)
        declared = {_text(line) for line in lines[before:] if _text(line).startswith("auto ")}
        if _in_blocks.get() and any(_text(line) in declared for line in lines[:before]):
            lines[before:] = [DeferredLine(name, "{"), *lines[before:], DeferredLine(name, "}")]

    kernel.store_reduction = store


def _text(line: Any) -> str:
    return str(getattr(line, "line", line)).strip()
