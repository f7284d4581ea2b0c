"""A pool of cores, and code that runs on it: a `with` block, a function, or a task."""

import contextvars
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec, Self, TypeVar

import torch

from ipex_inductor.cpu import cores
from ipex_inductor.cpu.cores import get_core_list_of_node_id
from ipex_inductor.errors import ArgumentError, CoresError, ThreadsError
from ipex_inductor.runtime import openmp

P = ParamSpec("P")
R = TypeVar("R")

AVAILABLE = openmp.openmp_places() or cores.available()  # before anything is pinned


class CPUPool:
    """Cores for the threads of one computation.

    Cores that this process may not use are left out, with a warning. Raises `CoresError` if none is
    left, or for invalid core numbers.

    Args:
        core_ids: the numbers of the cores; None for all that this process may use.
        node_id: a NUMA node, whose physical cores are used if `core_ids` is None.
    """

    def __init__(self, core_ids: Iterable[int] | None = None, node_id: int | None = None) -> None:
        if core_ids is not None and node_id is not None:
            warnings.warn("core_ids are given, so node_id is not looked at", stacklevel=2)
        if core_ids is None:
            requested = sorted(AVAILABLE) if node_id is None else _of_node(node_id)
        else:
            requested = _check_core_ids(core_ids)
        self.core_ids = [number for number in requested if number in AVAILABLE]
        usable = f"cores this process may use ({cores.text(AVAILABLE)})"
        if not self.core_ids:
            raise CoresError(usable, repr(requested), "Name some of them.")
        if len(self.core_ids) < len(requested):
            omitted = cores.text(set(requested) - set(self.core_ids))
            warnings.warn(f"not among the {usable}, and left out: {omitted}", stacklevel=2)

    def __repr__(self) -> str:
        return f"CPUPool({self.core_ids})"


class pin:
    """Pin the OpenMP threads of a `with pin(pool):` block, or of a function with `@pin(pool)`.

    One OpenMP thread per core; afterwards the previous state is restored. Other threads are not
    affected, except threads started inside, which inherit the first core. May be nested. Raises
    `ThreadsError` where threads cannot be pinned (`is_runtime_ext_enabled`).
    """

    def __init__(self, cpu_pool: CPUPool) -> None:
        _check(cpu_pool)
        self.cpu_pool = cpu_pool

    def __enter__(self) -> Self:
        pinned: AbstractContextManager[None] = _pin_threads(self.cpu_pool.core_ids)
        pinned.__enter__()
        _blocks().append(pinned)
        return self

    def __exit__(self, *error: Any) -> None:
        _blocks().pop().__exit__(*error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function`, pinned for each of its calls."""

        @functools.wraps(function)
        def run_pinned(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return run_pinned


class TaskFuture(Future[Any]):
    """Future of a task's call; a `concurrent.futures.Future`."""

    def get(self, timeout: float | None = None) -> Any:
        """Return the result once it is available; raise what the call raised."""
        return self.result(timeout)


class Task:
    """Module with its own thread on a pool: `task(x)` returns a `TaskFuture` at once.

    Calls run one after another, under the caller's grad mode, autocast and context variables.
    Raises `ThreadsError` as `pin` does.

    Args:
        module: an eager, compiled or TorchScript module, or any function.
        cpu_pool: the cores of its thread.
    """

    def __init__(self, module: Callable[..., Any], cpu_pool: CPUPool) -> None:
        _check(cpu_pool)
        if not callable(module):
            raise ArgumentError("a module or a function", repr(module), "Pass what is to run.")
        self.cpu_pool = cpu_pool
        self._module = module
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ipex-task")
        self._thread = self._worker.submit(_settle, cpu_pool.core_ids).result()

    def __call__(self, *args: Any, **kwargs: Any) -> TaskFuture:
        """Start a call without waiting; a call from the task's own thread runs immediately."""
        future = TaskFuture()
        call = functools.partial(_keep, future, _capture_state(self._module), args, kwargs)
        if threading.get_ident() == self._thread:
            call()
        else:
            self._worker.submit(call)
        return future

    def run_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call and wait for the result."""
        return self(*args, **kwargs).get()


def is_runtime_ext_enabled() -> bool:
    """Return whether threads can be pinned: on Linux, if torch uses OpenMP."""
    return openmp.can_bind()


def _check(cpu_pool: CPUPool) -> None:
    if not isinstance(cpu_pool, CPUPool):
        raise ArgumentError("a CPUPool", repr(cpu_pool), "Make one: CPUPool(core_ids=[0, 1]).")
    if not openmp.can_bind():
        requirement = "Linux, and a torch whose threads are OpenMP's"
        raise ThreadsError(
            requirement, "another", "Leave pools out here; `taskset` pins processes."
        )


def _check_core_ids(core_ids: Iterable[int]) -> list[int]:
    try:
        numbers = list(core_ids)
    except TypeError:
        raise ArgumentError("a list of numbers", repr(core_ids), "Pass one.") from None
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
    if not whole or len(set(numbers)) < len(numbers):
        raise CoresError("numbers of cores, each once", repr(numbers), "Mend the list.")
    return numbers


def _of_node(node_id: int) -> list[int]:
    """Return the usable cores of a NUMA node, or all if none is, without a warning about others."""
    ours = [core for core in get_core_list_of_node_id(node_id) if core in AVAILABLE]
    return ours or get_core_list_of_node_id(node_id)


_local = threading.local()


def _blocks() -> list[AbstractContextManager[None]]:
    """Return the pinned blocks that this thread is in."""
    blocks: list[AbstractContextManager[None]] = _local.__dict__.setdefault("blocks", [])
    return blocks


@contextmanager
def _pin_threads(core_ids: list[int]) -> Iterator[None]:
    """Pin this thread's OpenMP threads to the cores, unless they are already."""
    outer = getattr(_local, "cores", None)
    if outer == core_ids and torch.get_num_threads() == len(core_ids):
        yield
        return
    with openmp.bind_team(core_ids):
        _local.cores = core_ids
        try:
            yield
        finally:
            _local.cores = outer


def _settle(core_ids: list[int]) -> int:
    """Keep this thread on these cores; return its identifier."""
    openmp.bind(core_ids, AVAILABLE)
    _local.cores = core_ids
    return threading.get_ident()


def _capture_state(module: Callable[..., Any]) -> Callable[..., Any]:
    """Return `module` to be called in another thread under this thread's torch state."""
    context = contextvars.copy_context()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache_enabled = torch.is_autocast_cache_enabled()
    autocast_dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            if autocast_dtype:
                stack.enter_context(
                    torch.autocast("cpu", autocast_dtype, cache_enabled=cache_enabled)
                )
            return context.run(module, *args, **kwargs)

    return call


def _keep(
    future: TaskFuture, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run `call`, unless it was cancelled, and set the outcome of `future`.

    Args:
        future: the future of the call.
        call: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call(*args, **kwargs)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
