"""Compiled steps of a model: one graph for each set of argument shapes, compiled at its first call.

Dynamo keeps at most eight graphs of a function by default, and all models of one class share their
functions. So every step is a function of its own, with shapes that do not vary.
"""

import threading
from collections.abc import Callable, Hashable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor import compat
from ipex_inductor.llm.compile_lock import CompileLock
from ipex_inductor.llm.greedy import choosing
from ipex_inductor.ops.gemm.blocked import COLUMNS
from ipex_inductor.runtime.untouched_weights import assume_untouched
from ipex_inductor.target.device import architecture

BACKEND = "ipex"
# Prompts and single tokens read one packed copy of the weights.
OPTIONS = {"shared_packing": True}
LEAST_DEPTH = 128  # K; below it few and many rows may have different kernels
# CPUs and dtypes whose GEMMs pack a weight alike for any number of rows, so that plain weights can
# be released: a graph for another number of rows needs no other packing.
PACKED_ALIKE = {
    ("x86-64:avx2", torch.float32),
    ("x86-64:avx2", torch.bfloat16),
    ("x86-64:avx512_bf16", torch.float32),
    ("x86-64:avx512_bf16", torch.bfloat16),
    ("x86-64:avx512_bf16", torch.float16),
}
MOST_STEPS = 96  # graphs of one model; each holds code and, on CPUs, no weights of its own

LOCK = CompileLock()

Checked = dict[Hashable, Callable[..., Any] | None]


class Steps:
    """The compiled steps of one model, by the shapes of their arguments.

    Args:
        eager: the function that every step computes.
        drops: release plain weights that compiled code reads packed.
    """

    def __init__(self, eager: Callable[..., Any], drops: bool = False) -> None:
        self._eager = eager
        self._options = {**OPTIONS, "drop_plain_weights": True} if drops else OPTIONS
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

    def call(
        self,
        arguments: Mapping[str, Any],
        cache_shape: Hashable,
        checked: Checked | None = None,
        untouched: bool = False,
        chooses: bool = False,
    ) -> Any:
        """Call the step for these arguments, compiled for their shapes alone.

        Args:
            arguments: keyword arguments of the model's forward.
            cache_shape: what code depends on of the cache among them.
            checked: the steps that were called since the model last changed, by what they are found
                by, without their guards; receives this one. None checks the guards.
            untouched: whether the contents of weights cannot have changed since the model was
                called by one of those steps.
            chooses: whether the step returns the most likely tokens alone, [batch].

        Returns:
            The model's output or the tokens; None if the model has `MOST_STEPS` graphs already.
        """
        key = (chooses, key_of(arguments, cache_shape))
        if checked and (repeated := checked.get(key)) is not None:
            with LOCK.running(), assume_untouched(untouched):
                return repeated(**arguments)
        with self._lock:
            step = self._steps.get(key)
            if step is None:
                if len(self._steps) >= MOST_STEPS:
                    return None
                eager = choosing(self._eager) if chooses else self._eager
                step = compile_alone(eager, self._options, dynamic=False)
                self._steps[key] = step
        result = self._run(step, key, (), arguments)
        if checked is not None:
            checked[key] = compat.drop_guards(step)
        return result

    def call_whole(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the model without a cache, compiled once for its first shape, then for any."""
        with self._lock:
            if self._whole is None:
                self._whole = compile_alone(self._eager, self._options, dynamic=None)
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


def why_not_dropped(model: Any) -> str:
    """Return why the plain weights of a model are kept, "" if they can be released."""
    param = next(model.parameters(), None)
    if param is None or param.device.type != "cpu":
        return "plain weights are read as they are on this device"
    if (architecture(), param.dtype) not in PACKED_ALIKE:
        return f"prompts and single tokens pack weights in {param.dtype} differently on this CPU"
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not _is_packed_alike(module):
            sizes = f"[{module.out_features}, {module.in_features}]"
            return f"prompts and single tokens pack {name} {sizes} differently"
        if isinstance(module, nn.modules.conv._ConvNd):
            return f"{name} is a convolution, which other lengths may pack differently"
    return ""


def _is_packed_alike(linear: nn.Linear) -> bool:
    """Return whether one kernel serves a layer for any number of rows."""
    return linear.in_features >= LEAST_DEPTH and linear.out_features % COLUMNS == 0


def compile_alone(
    eager: Callable[..., Any], options: Mapping[str, Any], dynamic: bool | None
) -> Callable[..., Any]:
    """Return `eager` compiled, with Dynamo's limits and state of a function of its own."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return eager(*args, **kwargs)

    code = step.__code__.replace(
        co_name=step.__code__.co_name
    )  # Dynamo keeps graphs by code object
    own = FunctionType(code, step.__globals__, "step", None, step.__closure__)
    ours = dict(options) if BACKEND == "ipex" else None  # other backends have others
    return torch.compile(own, backend=BACKEND, dynamic=dynamic, options=ours)


def key_of(arguments: Mapping[str, Any], cache_shape: Hashable) -> Hashable:
    """Return what a step is found by."""
    return (cache_shape, *modes(), *((name, shape_of(each)) for name, each in arguments.items()))


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
