"""Inductor's compile workers: how many, and code that does not wait for their kernels."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from ipex_inductor.compat.inductor import compiles_in_this_process


def compilers() -> int:
    """Return how many kernels Inductor compiles at once: by its option, else one per core."""
    from torch._inductor.async_compile import get_compile_threads

    return max(1, get_compile_threads())


def start_workers() -> None:
    """Begin to start workers for Triton's kernels; until they run this process compiles."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.wakeup()


@contextlib.contextmanager
def kernels_put_off() -> Iterator[Callable[[], None]]:
    """Compile in this thread without waiting for kernels, and yield a function that waits for them.

    The function raises the error of a failed kernel, and must have returned before the code runs.
    """
    from torch._inductor.async_compile import AsyncCompile

    kind: Any = AsyncCompile
    usual_wait, usual_triton = kind.wait, kind.triton
    code: list[tuple[Any, dict[str, Any]]] = []

    def wait(self: Any, scope: dict[str, Any]) -> None:
        put_off = _put_off.get()
        if put_off is None or "__file__" not in scope:  # code that runs at once is in no file
            usual_wait(self, scope)
        else:
            put_off.append((self, scope))

    def triton(self: Any, kernel_name: str, source_code: str, *more: Any, **how: Any) -> Any:
        # Inductor hands a template's kernel over without the end of its last line, then the code
        # does with it, and two workers would compile it.
        if _put_off.get() is not None:
            source_code = source_code.rstrip() + "\n"
        return usual_triton(self, kernel_name, source_code, *more, **how)

    def finish() -> None:
        for self, scope in code:
            usual_wait(self, scope)

    token = _put_off.set(code)
    kind.wait, kind.triton = wait, triton
    try:
        yield finish
    finally:
        kind.wait, kind.triton = usual_wait, usual_triton
        _put_off.reset(token)


@contextlib.contextmanager
def compiles_anew_in_this_process() -> Iterator[None]:
    """Compile in this process, also kernels that failed in a worker, which Inductor remembers."""
    from torch._inductor.async_compile import CompiledTritonKernels

    kernels: Any = CompiledTritonKernels
    kernels.cache_clear()
    with compiles_in_this_process():
        yield


_put_off: contextvars.ContextVar[list[tuple[Any, dict[str, Any]]] | None] = contextvars.ContextVar(
    "put_off", default=None
)
