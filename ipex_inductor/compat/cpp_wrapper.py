"""Inductor's C++ that calls a graph's kernels."""

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils._filelock import FileLock

BY_NAME = "generate_fallback_kernel_with_runtime_lookup"
_wrapping: contextvars.ContextVar[bool] = contextvars.ContextVar("wrapping", default=False)
_usual: dict[str, Any] = {}  # Inductor's own, which others get


@contextlib.contextmanager
def wrapping() -> Iterator[None]:
    """C++ that calls kernels, and the kernels, which lie in two sources then, compile together.

    Where it has an op by its name alone, it ends with `NotImplementedError`: what such an op raises
    becomes a RuntimeError, and a call takes long. What others compile meanwhile is as ever.
    """
    _stand_in()
    token = _wrapping.set(True)
    try:
        yield
    finally:
        _wrapping.reset(token)


@functools.cache
def _stand_in() -> None:
    from torch._inductor import codecache
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    _usual.update(compile=codecache._worker_compile_cpp, by_name=getattr(CppWrapperCpu, BY_NAME))
    codecache._worker_compile_cpp = _compile_cpp
    setattr(CppWrapperCpu, BY_NAME, _by_name)


def _by_name(self: Any, buf_name: str, python_kernel_name: str, *more: Any, **named: Any) -> None:
    if _wrapping.get():
        raise NotImplementedError(f"Inductor has {python_kernel_name} in C++ by its name alone")
    _usual["by_name"](self, buf_name, python_kernel_name, *more, **named)


def _compile_cpp(lock_path: str, cpp_builders: Sequence[Any]) -> None:
    *halves, _ = cpp_builders  # the last one links
    if _wrapping.get() and len(halves) == 2:
        from torch._inductor import codecache

        calls, kernels = halves
        here = contextvars.copy_context()
        with FileLock(lock_path, timeout=codecache.LOCK_TIMEOUT):
            beside = threading.Thread(target=here.run, args=(_try, kernels))
            beside.start()
            try:
                _build(calls)
            finally:
                beside.join()
    _usual["compile"](lock_path, cpp_builders)  # tells what failed beside


def _try(builder: Any) -> None:
    with contextlib.suppress(Exception):
        _build(builder)


def _build(builder: Any) -> None:
    if not os.path.exists(builder.get_target_file_path()):
        builder.build()
