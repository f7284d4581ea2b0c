"""Inductor's C++ that calls a graph's kernels."""

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._filelock import FileLock

BY_NAME = "generate_fallback_kernel_with_runtime_lookup"
_wrapping: contextvars.ContextVar[bool] = contextvars.ContextVar("wrapping", default=False)
_usual: dict[str, Any] = {}  # Inductor's own, which others get
_standing_in = threading.Lock()


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


def _stand_in() -> None:
    from torch._inductor import codecache
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    with _standing_in:
        if _usual:
            return
        _usual["compile"] = codecache._worker_compile_cpp
        _usual["by_name"] = getattr(CppWrapperCpu, BY_NAME)
        _usual["write_end"] = CppWrapperCpu.generate_end
        codecache._worker_compile_cpp = _compile_cpp
        setattr(CppWrapperCpu, BY_NAME, _by_name)
        CppWrapperCpu.generate_end = _write_end  # type: ignore[method-assign]


def convert_size(size: int) -> torch.Tensor:
    """Return `size` as a tensor, the one that it became before where it did.

    Inductor's C++ takes dynamic sizes as tensors, which it only reads. To make one takes 2 to 3
    microseconds, and a graph has several sizes. Under a dispatch mode or a transform a new one is
    made, as that may be a fake or wrapped one.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or torch._C._len_torch_dispatch_stack():
        return torch.tensor(size, device="cpu")
    return cached_size(size)


@functools.lru_cache(maxsize=4096)
def cached_size(size: int) -> torch.Tensor:
    """Return the tensor of `size` that later calls get too."""
    return torch.tensor(size, device="cpu")


# Inputs of a graph that become tensors; others are objects, as the device meshes of DTensors are.
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
PASSED = (torch.Tensor, *SYMBOLS, int, float, bool, type(None))
CONVERT = "torch.tensor(arg, device='cpu')"
IMPORT = "from ipex_inductor.compat.cpp_wrapper import convert_size\n"


class _CachesSizes:
    """A buffer of source text in which dynamic sizes become tensors by `convert_size`."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)

    def splice(self, text: Any, *more: Any, **named: Any) -> None:
        """Append `text`."""
        if isinstance(text, str) and CONVERT in text:
            self.buffer.splice(IMPORT)
            text = text.replace(CONVERT, f"convert_size(arg) if type(arg) is int else {CONVERT}")
        self.buffer.splice(text, *more, **named)


def _write_end(self: Any, result: Any) -> None:
    from torch._inductor.ir import TensorBox
    from torch._inductor.virtualized import V

    has_sizes = not all(isinstance(x, TensorBox) for x in V.graph.graph_inputs.values())
    buffer = _CachesSizes(result) if has_sizes and _wrapping.get() else result
    _usual["write_end"](self, buffer)


def check_has_cpp(gm: torch.fx.GraphModule) -> None:
    """Raise `NotImplementedError` if `wrapping` would, once `gm` is lowered and its code written.

    Not for what a lowering itself may fall back to: of that only the written code tells.
    """
    if not _wrapping.get():
        return
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, PASSED):
            raise NotImplementedError(f"C++ takes no input of type {type(value).__name__}")
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if _is_called_by_name(node.target):
                raise _refusal(node.target)


def _is_called_by_name(target: Any) -> bool:
    """Return whether Inductor calls an op as it is, without a function for it in C++.

    By the conditions of `FallbackKernel.codegen`.
    """
    from torch._inductor import config
    from torch._inductor.lowering import lowerings
    from torchgen.aoti.fallback_ops import inductor_fallback_ops  # type: ignore[import-untyped]

    if not isinstance(target, torch._ops.OpOverload) or target.namespace == "_quantized":
        return False
    lowering = lowerings.get(target)
    if lowering is not None and not getattr(lowering, "_is_fallback_handler", False):
        return False
    if target.namespace == "aten":
        return str(target) not in inductor_fallback_ops
    return target not in config.aot_inductor.custom_ops_to_c_shims


def _refusal(name: Any) -> NotImplementedError:
    return NotImplementedError(f"Inductor has {name} in C++ by its name alone")


def _by_name(self: Any, buf_name: str, python_kernel_name: str, *more: Any, **named: Any) -> None:
    if _wrapping.get():
        raise _refusal(python_kernel_name)
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
