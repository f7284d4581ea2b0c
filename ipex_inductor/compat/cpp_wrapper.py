"""Inductor's C++ that calls a graph's kernels."""

import contextlib
import contextvars
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.utils._filelock import FileLock

BY_NAME = "generate_fallback_kernel_with_runtime_lookup"


@contextlib.contextmanager
def wrapping() -> Iterator[None]:
    """C++ that calls kernels, and the kernels, which lie in two sources then, compile together.

    Where it has an op by its name alone, it ends with `NotImplementedError`: what such an op raises
    becomes a RuntimeError, and a call takes long.
    """
    from torch._inductor import codecache as torchs
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    codecache: Any = torchs
    wrapper: Any = CppWrapperCpu
    usual, by_name = codecache._worker_compile_cpp, vars(wrapper)[BY_NAME]

    def refuse(self: Any, buf_name: str, python_kernel_name: str, *more: Any) -> None:
        raise NotImplementedError(f"Inductor has {python_kernel_name} in C++ by its name alone")

    def compile_cpp(lock_path: str, builders: Sequence[Any]) -> None:
        *halves, _ = builders  # the last one links
        if len(halves) == 2:
            with FileLock(lock_path, timeout=codecache.LOCK_TIMEOUT), ThreadPoolExecutor() as pool:
                runs = [pool.submit(contextvars.copy_context().run, _build, it) for it in halves]
                for run in runs:
                    run.result()
        usual(lock_path, builders)

    codecache._worker_compile_cpp = compile_cpp
    setattr(wrapper, BY_NAME, refuse)
    try:
        yield
    finally:
        codecache._worker_compile_cpp = usual
        setattr(wrapper, BY_NAME, by_name)


def _build(builder: Any) -> None:
    if not os.path.exists(builder.get_target_file_path()):
        builder.build()
