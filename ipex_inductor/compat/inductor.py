"""Inductor's inner compiler, its graph caches and its compile workers."""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ipex_inductor.compat import versions


def compile_inner(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """Run Inductor's inner compiler with its graph cache on, also below a bundled autograd cache.

    The exception is a graph without a call, for which Inductor then returns a bare function that a
    bundle cannot hold.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx_inner

    bundled = functorch_config.bundled_autograd_cache
    calls = any(node.op == "call_function" for node in gm.graph.nodes)
    with functorch_config.patch(bundled_autograd_cache=bundled and not calls):
        return compile_fx_inner(gm, example_inputs, **plain_decompositions(kwargs))


def plain_decompositions(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `inner_compile` with Inductor's own decomposition table.

    From 2.13 on `compile_fx` hands a reduced table down to the inner compiler, where it makes
    FxGraphCache give up ("unpicklable type"). By then our joint pass has decomposed everything.
    """
    from torch._inductor.decomposition import select_decomp_table

    if "get_decomp_fn" in kwargs:
        kwargs["get_decomp_fn"] = select_decomp_table
    return kwargs


def decomposition_table() -> dict[Any, Any]:
    """Return Inductor's decompositions under its current options.

    With `fallback_random` eager's kernels draw all random numbers. Torch 2.11 decomposes RReLU all
    the same, and Inductor then draws other numbers; it is left out of the table here.
    """
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    table: dict[Any, Any] = select_decomp_table()
    if not config.fallback_random:
        return table
    rrelu = torch.ops.aten.rrelu_with_noise_functional.default
    return {op: fn for op, fn in table.items() if op is not rrelu}


def computes_shared_parts_again() -> bool:
    """Return whether a GPU concatenation stays one kernel if other ops read its operands.

    That kernel computes each operand for all elements. 2.13 copies operands with other readers.
    """
    return versions.torch_minor() < (2, 13)


class _Lowered(BaseException):
    """Signal that ends a compilation after lowering; no `except Exception` catches it."""


def _stop(_: Any) -> Any:
    raise _Lowered


# Options of `compile_fx` for `lower_inner`: the scheduler calls this before it fuses anything.
LOWER_ONLY: dict[str, Any] = {"_pre_fusion_custom_pass": _stop}


def lower_inner(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """Run `compile_inner` up to the lowering, under the options LOWER_ONLY; the result is no code.

    AOT autograd accepts the result as code, so that it continues with the backward graph.
    """
    try:
        return compile_inner(gm, example_inputs, **kwargs)
    except _Lowered:
        return read_inner(gm, example_inputs)


def read_inner(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """Replace `compile_inner` and compile nothing: earlier passes have given all the facts."""

    def never(inputs: Any) -> Any:
        raise AssertionError("not compiled")

    never._boxed_call = True  # type: ignore[attr-defined]
    return never


def reload_graph(graph: Any, constants: Any) -> Any:
    """Return code from a cache, ready for its `post_compile`; our code is returned as it is.

    Raises `RuntimeError` for a `CompiledFxGraph` that cannot be made callable again.
    """
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(graph, CompiledFxGraph):
        return graph
    loaded, _ = FxGraphCache.cache_hit_post_compile(graph, {}, constants)
    if loaded is None:
        raise RuntimeError("the cached graph could not be reloaded; it is compiled again")
    return loaded


@contextlib.contextmanager
def graph_caches_off() -> Iterator[None]:
    """Run all passes for what is compiled inside, and store nothing in Inductor's graph caches."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    inductor: Any = config
    remote = {"fx_graph_remote_cache": False}
    before = _caches_off.set(True)
    try:
        with (
            inductor.patch(fx_graph_cache=False, **remote),
            functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
        ):
            yield
    finally:
        _caches_off.reset(before)


KEPT_GRAPHS = ("aotautograd/", "fxgraph/")  # begin the names of these caches' files


def graph_caches_are_off() -> bool:
    """Return whether the caller is inside `graph_caches_off`."""
    return _caches_off.get()


_caches_off = contextvars.ContextVar("caches_off", default=False)


@functools.cache
def name_system() -> None:
    """Make Inductor name this system for the process, without a hash of Triton that is dropped.

    The hash takes 0.3 s, and without a CUDA or ROCm device 2.13 and 2.14 drop it. The name is
    equal.
    """
    from torch._inductor import codecache

    if versions.torch_minor() in ((2, 13), (2, 14)) and not torch.cuda.is_available():
        module: Any = codecache
        hashing, module.triton_key = module.triton_key, lambda: None
        try:
            codecache.CacheBase.get_system()
        finally:
            module.triton_key = hashing


@contextlib.contextmanager
def compiles_in_this_process() -> Iterator[None]:
    """Stop Inductor from starting workers for Triton's kernels."""
    from torch._inductor import config

    inductor: Any = config
    with inductor.patch(compile_threads=1):
        yield


@contextlib.contextmanager
def no_early_workers() -> Iterator[None]:
    """Start compile workers only when there is a kernel to compile.

    Otherwise they start with a GPU graph, or when a cached one is loaded: one per core, each of
    which imports torch, for a graph that compiles nothing.
    """
    global _insiders
    with _workers_lock:
        if not _insiders:
            for kind, name, replacement in _put_off():
                _put_back.callback(setattr, kind, name, vars(kind)[name])
                setattr(kind, name, replacement)
        _insiders += 1
    inside = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(inside)
        with _workers_lock:
            _insiders -= 1
            if not _insiders:
                _put_back.close()


def _put_off() -> list[tuple[Any, str, Any]]:
    """Return the replacements in Inductor's classes as (class, name, function).

    Outside of `no_early_workers` they behave as the originals.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.output_code import CompiledFxGraph

    kind: Any = AsyncCompile
    wakeup, uses, loads = kind.wakeup, kind.use_process_pool, CompiledFxGraph.after_deserialization

    def unless_inside(cls: Any) -> None:
        if not _inside.get():
            wakeup()

    def if_begun(cls: Any) -> Any:
        return uses() if cls._ready_future or not _loading.get() else False

    @functools.wraps(loads)
    def load_graph(self: Any, constants: Any) -> str:
        token = _loading.set(_inside.get())
        try:
            return loads(self, constants)
        finally:
            _loading.reset(token)

    return [
        (kind, "wakeup", classmethod(unless_inside)),
        (kind, "use_process_pool", classmethod(if_begun)),
        (CompiledFxGraph, "after_deserialization", load_graph),
    ]


_inside = contextvars.ContextVar("inside", default=False)
_loading = contextvars.ContextVar("loading", default=False)  # a cached graph
_insiders, _put_back = 0, contextlib.ExitStack()
_workers_lock = threading.Lock()
