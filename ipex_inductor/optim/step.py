"""Methods of an optimizer that steps by kernels, or whose parameters have master weights."""

import functools
from collections.abc import Callable, Container, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim import kernels, replicas
from ipex_inductor.optim.fsdp_migration import follow
from ipex_inductor.optim.stand_ins import step_in_chunks, whole_step
from ipex_inductor.optim.tables import SPLIT_OPTIMIZERS
from ipex_inductor.optim.weights import (
    TABLE,
    Place,
    Trained,
    find_displaced,
    has_tables,
    refuse_strangers,
)


def wrap(optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained] | None = None) -> None:
    """Have `optimizer` step `weights` in fp32 and keep its state of them in fp32.

    `optimizer._original_step` is the step it had. Wrapping it again adds more weights.
    """
    attributes = vars(optimizer)
    held_weights = attributes.get(TABLE)
    attributes[TABLE] = {**(held_weights or {}), **(weights or {})}
    replicas.watch()
    if held_weights is None:
        attributes["_original_step"] = optimizer.step
        methods = METHODS if users_step(optimizer) is None else {**METHODS, "step": _patched_step}
        for name, method in methods.items():
            attributes[name] = MethodType(method, optimizer)


def users_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Return the step that replaces the one of the class, or None; LR schedulers do not count."""
    original = vars(optimizer).get("_original_step", optimizer.step)
    scheduled = hasattr(original, "_wrapped_by_lr_sched")
    original_function = getattr(original, "__wrapped__" if scheduled else "__func__", None)
    return None if original_function is type(optimizer).step else original


def steps_alone(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step` is ours, with no wrapper around it except hooks."""
    return getattr(vars(optimizer).get("step"), "__func__", None) is METHODS["step"]


@_disable_dynamo  # Dynamo of torch 2.11 raises at new attributes of an optimizer
def _mark_called(optimizer: Optimizer) -> None:
    """Mark the step as called, for LR schedulers."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch does not declare it


def _step(
    optimizer: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Do one step of the optimizer's class."""
    if not vars(optimizer).get("_opt_called"):
        _mark_called(optimizer)
    plain = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # hooks have run
    weights, fused = _live(optimizer), kernels.uses_kernels(optimizer)
    if not (weights or fused) or (type(optimizer) in SPLIT_OPTIMIZERS and (args or kwargs)):
        return plain(optimizer, closure, *args, **kwargs)
    if type(optimizer) not in SPLIT_OPTIMIZERS:
        return whole_step(optimizer, weights, MethodType(plain, optimizer), closure, args, kwargs)
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()

    if not fused:
        step_in_chunks(optimizer, weights, plain)
        return loss

    def step_rest(only: Container[nn.Parameter]) -> None:
        """Step the parameters in `only` by torch."""
        step_in_chunks(optimizer, weights, plain, only)

    kernels.step(optimizer, weights, step_rest)
    return loss


def _patched_step(
    optimizer: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Do one step of a user's function, which calls the step of the class, with its hooks."""
    _before_step(optimizer)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    user_step = users_step(optimizer)
    assert user_step is not None
    return whole_step(optimizer, _live(optimizer), user_step, closure, args, kwargs)


def _live(optimizer: Optimizer) -> dict[nn.Parameter, Trained]:
    """Return the weights this optimizer steps, without parameters that have left low precision."""
    held_weights = vars(optimizer)[TABLE]
    if not held_weights:  # early exit: hashing parameters is the slowest part
        return {}
    weights = {
        p: held_weights[p] for g in optimizer.param_groups for p in g["params"] if p in held_weights
    }
    weights = {p: weight for p, weight in weights.items() if weight.live()}
    if weights:
        refuse_differentiable(optimizer)  # groups may have changed
    return weights


def refuse_differentiable(optimizer: Optimizer) -> None:
    """Raise `ArgumentError` if autograd is to follow the step."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ArgumentError(
            "groups with differentiable=False",
            "a differentiable step on master weights",
            "Autograd cannot follow a cast in place: leave the model in fp32.",
        )


def _load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state dict by torch, but keep the state of our weights in fp32.

    torch itself casts state to the dtype of the parameter.
    """
    follow(optimizer)
    loaded: dict[str, Any] = {}

    def note(_: Optimizer, raw_state: dict[str, Any]) -> None:
        """Store the state dict as other hooks have left it."""
        loaded.update(raw_state)

    def widen(_: Optimizer) -> None:
        """Replace state that torch has cast to low precision by the loaded values in fp32."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        keys = [key for group in loaded["param_groups"] for key in group["params"]]
        weights = _live(optimizer)
        for key, param in zip(keys, params, strict=True):
            if param in weights and key in loaded["state"]:
                state, loaded_state = optimizer.state[param], loaded["state"][key]
                state.update(
                    {name: _wide(state[name], loaded_state[name], param) for name in loaded_state}
                )

    first = optimizer.register_load_state_dict_pre_hook(note)  # runs after all other hooks
    second = optimizer.register_load_state_dict_post_hook(widen, prepend=True)
    try:
        type(optimizer).load_state_dict(optimizer, state_dict)
    finally:
        first.remove()
        second.remove()


def _state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return torch's state dict of the parameters, or of their shards."""
    follow(optimizer)
    return type(optimizer).state_dict(optimizer)


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Run torch's `zero_grad` on the parameters, or on their shards."""
    follow(optimizer)
    type(optimizer).zero_grad(optimizer, set_to_none)


def _wide(cast_value: Any, value: Any, param: Tensor) -> Any:
    """Return `cast_value`, which torch made of `value`, or an fp32 copy of `value`.

    It is a copy if torch has cast floating-point values to the dtype of the parameter.
    """
    if (
        not isinstance(value, Tensor)
        or not value.is_floating_point()
        or cast_value.dtype != param.dtype
    ):
        return cast_value
    return value.to(param.device, torch.float32, copy=True)


def _reduce(optimizer: Optimizer, _: Any) -> tuple[Any, ...]:
    """Return how to copy and pickle a wrapped optimizer, as torch keeps only three attributes."""
    attributes = vars(optimizer)
    state = {**optimizer.__getstate__(), TABLE: attributes[TABLE]}
    kept_attributes = {k: attributes[k] for k in kernels.KEPT if k in attributes}
    return _revive, (type(optimizer), kept_attributes), state


def _revive(kind: type[Optimizer], attributes: dict[str, Any]) -> Optimizer:
    """Return a wrapped optimizer of `kind`, without state."""
    optimizer = kind.__new__(kind)
    wrap(optimizer)
    vars(optimizer).update(attributes)
    return optimizer


_profiled_step = Optimizer.profile_hook_step(_step)  # step hooks, profiler


@functools.wraps(_step)
def _hooked_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Do one step with its hooks, faster than torch's wrapper.

    With a profiler in this thread or others' pre-hooks, torch's wrapper runs.
    """
    if torch._C._autograd._profiler_enabled() or has_pre_hooks(optimizer):
        return _profiled_step(optimizer, *args, **kwargs)
    post_hooks = optimizer._optimizer_step_post_hooks, optimizers._global_optimizer_post_hooks
    with torch._C._profiler._RecordFunctionFast(f"Optimizer.step#{type(optimizer).__name__}.step"):
        out = None
        if args or kwargs or not kernels.at_once(optimizer):
            _before_step(optimizer)
            out = _step(optimizer, *args, **kwargs)
        optimizer._optimizer_step_code()
        for hooks in post_hooks:
            for hook in hooks.values():
                hook(optimizer, (optimizer, *args), kwargs)
    return out


def has_pre_hooks(optimizer: Optimizer) -> bool:
    """Return whether pre-hooks other than ours are registered for the step of `optimizer`."""
    global_hooks = len(optimizers._global_optimizer_pre_hooks) - _own_hooks
    return global_hooks > 0 or bool(optimizer._optimizer_step_pre_hooks)


for _ours in (_hooked_step, _patched_step):
    vars(_ours)["_wrapped_by_lr_sched"] = True  # LR schedulers warn without it

METHODS: dict[str, Callable[..., Any]] = {
    "step": _hooked_step,
    "zero_grad": _zero_grad,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "__reduce_ex__": _reduce,
}


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Find shards of the parameters, and check that this optimizer may step them."""
    if torch.compiler.is_compiling():
        return
    if has_tables() or Place.sharded:
        follow(optimizer)
        _refuse_displaced([p for group in optimizer.param_groups for p in group["params"]])
    if not kernels.uses_kernels(optimizer):  # otherwise each new plan checks it
        refuse_strangers(optimizer)


def _refuse_displaced(params: list[Tensor]) -> None:
    """Raise `ArgumentError` for a low-precision parameter that has been replaced.

    The replacement would train without the lower bits.
    """
    for module, name in find_displaced(params):
        raise ArgumentError(
            "the parameters that `optimize` gave master weights, or what fully_shard made of them",
            f"a {type(module).__name__} whose {name!r} was replaced or flattened",
            "So do FullyShardedDataParallel, tensor parallelism, parametrizations, and fully_shard "
            "where only one of tied modules is in the call. Use fully_shard (FSDP2) on all, or "
            "leave the model in fp32, by `optimize` without dtype, and let FSDP's mixed precision "
            "or autocast compute in low precision.",
        )


def check_steps() -> None:
    """Do `_before_step` before each step of any optimizer, from now on in this process.

    Dynamo guards the hooks, so steps that other backends compiled before are compiled again once.
    """
    global _own_hooks
    if not _own_hooks:
        _own_hooks = 1
        optimizers.register_optimizer_step_pre_hook(_before_step)


_own_hooks = 0  # our hooks that are global to all optimizers
