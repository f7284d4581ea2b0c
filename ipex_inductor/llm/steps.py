"""Compiled steps of a model: one graph for each set of argument shapes, compiled at its first call.

Dynamo keeps at most eight graphs of a function by default, and all models of one class share their
functions. So every step is a function of its own, with shapes that do not vary.
"""

import threading
from collections.abc import Callable, Hashable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.llm.compile_lock import CompileLock

BACKEND = "ipex"
MOST_STEPS = 96  # graphs of one model; each holds code and, on CPUs, no weights of its own

LOCK = CompileLock()


class Steps:
    """The compiled steps of one model, by the shapes of their arguments.

    Args:
        eager: the function that every step computes.
    """

    def __init__(self, eager: Callable[..., Any]) -> None:
        self._eager = eager
        self._steps: dict[Hashable, Callable[..., Any]] = {}
        self._whole: Callable[..., Any] | None = None
        self._called: set[Hashable] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_whole(self) -> bool:
        """Return whether a call without a cache was compiled."""
        return self._whole is not None

    def call(self, arguments: Mapping[str, Any], cache_shape: Hashable) -> Any:
        """Call the step for these arguments, compiled for their shapes alone.

        Args:
            arguments: keyword arguments of the model's forward.
            cache_shape: what code depends on of the cache among them.

        Returns:
            The model's output, or None if the model has `MOST_STEPS` graphs already.
        """
        key = (cache_shape, *modes(), *((name, shape_of(each)) for name, each in arguments.items()))
        with self._lock:
            step = self._steps.get(key)
            if step is None:
                if len(self._steps) >= MOST_STEPS:
                    return None
                step = self._steps[key] = compile_alone(self._eager, dynamic=False)
        return self._run(step, key, (), arguments)

    def call_whole(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the model without a cache, compiled once for its first shape, then for any."""
        with self._lock:
            if self._whole is None:
                self._whole = compile_alone(self._eager, dynamic=None)
        key = ("whole", *modes(), *map(shape_of, args), *map(shape_of, kwargs.values()))
        return self._run(self._whole, key, args, kwargs)

    def _run(
        self,
        step: Callable[..., Any],
        key: Hashable,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if key in self._called:
            with LOCK.running():
                return step(*args, **kwargs)
        with LOCK.compiling():
            result = step(*args, **kwargs)
        self._called.add(key)
        return result


def compile_alone(eager: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    """Return `eager` compiled, with Dynamo's limits and state of a function of its own."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return eager(*args, **kwargs)

    code = step.__code__.replace(
        co_name=step.__code__.co_name
    )  # Dynamo keeps graphs by code object
    own = FunctionType(code, step.__globals__, "step", None, step.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, backend=BACKEND, dynamic=dynamic)
    return compiled


def modes() -> tuple[Hashable, ...]:
    """Return the modes of this thread that code depends on."""
    device_types = ("cpu", "cuda", "xpu")
    autocasts = tuple(t for t in device_types if torch.is_autocast_enabled(t))
    dtypes = tuple(torch.get_autocast_dtype(t) for t in autocasts)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocasts, dtypes


def shape_of(value: Any) -> Any:
    """Return what compiled code depends on of an argument."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, shape_of(each)) for key, each in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(shape_of, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value)
