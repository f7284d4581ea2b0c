"""The methods of an optimizer that steps by kernels, or whose parameters have master weights."""

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
    displaced,
    has_tables,
    refuse_strangers,
)


def wrap(optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained] | None = None) -> None:
    """Have `optimizer` step `weights` in fp32 and keep its state of them in fp32.

    `optimizer._original_step` is the step it had. Wrapped twice, it learns of more weights.
    """
    own = vars(optimizer)
    known = own.get(TABLE)
    own[TABLE] = {**(known or {}), **(weights or {})}
    replicas.watch()
    if known is None:
        own["_original_step"] = optimizer.step
        methods = METHODS if users_step(optimizer) is None else {**METHODS, "step": _patched_step}
        for name, method in methods.items():
            own[name] = MethodType(method, optimizer)


def users_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """What somebody had put in the place of the class's step; LR schedulers alone do not count."""
    original = vars(optimizer).get("_original_step", optimizer.step)
    scheduled = hasattr(original, "_wrapped_by_lr_sched")
    below = getattr(original, "__wrapped__" if scheduled else "__func__", None)
    return None if below is type(optimizer).step else original


def steps_alone(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` is ours, and nothing of anybody's around it but hooks."""
    return getattr(vars(optimizer).get("step"), "__func__", None) is METHODS["step"]


@_disable_dynamo  # torch 2.11's raises at attributes of an optimizer that are new
def _called(optimizer: Optimizer) -> None:
    """Tell LR schedulers."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch does not declare it


def _step(
    optimizer: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any
) -> Any:
    """One step of the optimizer's class."""
    if not vars(optimizer).get("_opt_called"):
        _called(optimizer)
    plain = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # hooks ran already
    weights, fused = _live(optimizer), kernels.wanted(optimizer)
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

    def own(only: Container[nn.Parameter]) -> None:
        step_in_chunks(optimizer, weights, plain, only)

    kernels.step(optimizer, weights, own)
    return loss


def _patched_step(
    optimizer: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any
) -> Any:
    """One step of what somebody has put there, which calls the class's, with its hooks."""
    _before_step(optimizer)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    given = users_step(optimizer)
    assert given is not None
    return whole_step(optimizer, _live(optimizer), given, closure, args, kwargs)


def _live(optimizer: Optimizer) -> dict[nn.Parameter, Trained]:
    """The weights this optimizer steps, each as its parameter stands now."""
    known = vars(optimizer)[TABLE]
    if not known:  # a parameter's hash takes longer than all else here
        return {}
    weights = {p: known[p] for g in optimizer.param_groups for p in g["params"] if p in known}
    weights = {p: weight for p, weight in weights.items() if weight.live()}
    if weights:
        refuse_differentiable(optimizer)  # groups come and change
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
    """torch's own, which casts state to the parameter's dtype; state of our weights stays fp32."""
    follow(optimizer)
    loaded: dict[str, Any] = {}

    def note(_: Optimizer, given: dict[str, Any]) -> None:
        loaded.update(given)

    def widen(_: Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        keys = [key for group in loaded["param_groups"] for key in group["params"]]
        weights = _live(optimizer)
        for key, param in zip(keys, params, strict=True):
            if param in weights and key in loaded["state"]:
                state, given = optimizer.state[param], loaded["state"][key]
                state.update({name: _wide(state[name], given[name], param) for name in given})

    first = optimizer.register_load_state_dict_pre_hook(note)  # after all others
    second = optimizer.register_load_state_dict_post_hook(widen, prepend=True)
    try:
        type(optimizer).load_state_dict(optimizer, state_dict)
    finally:
        first.remove()
        second.remove()


def _state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """torch's own, of the parameters as they stand now."""
    follow(optimizer)
    return type(optimizer).state_dict(optimizer)


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """torch's own, of the parameters as they stand now."""
    follow(optimizer)
    type(optimizer).zero_grad(optimizer, set_to_none)


def _wide(cast: Any, given: Any, param: Tensor) -> Any:
    """What torch made of `given`, but fp32 and no alias where torch went for the param's dtype."""
    if not isinstance(given, Tensor) or not given.is_floating_point() or cast.dtype != param.dtype:
        return cast
    return given.to(param.device, torch.float32, copy=True)


def _reduce(optimizer: Optimizer, _: Any) -> tuple[Any, ...]:
    """Copies and pickles are wrapped as well; torch keeps three attributes of an optimizer."""
    own = vars(optimizer)
    state = {**optimizer.__getstate__(), TABLE: own[TABLE]}
    return _revive, (type(optimizer), {k: own[k] for k in kernels.KEPT if k in own}), state


def _revive(kind: type[Optimizer], own: dict[str, Any]) -> Optimizer:
    optimizer = kind.__new__(kind)
    wrap(optimizer)
    vars(optimizer).update(own)
    return optimizer


_profiled_step = Optimizer.profile_hook_step(_step)  # step hooks, profiler


@functools.wraps(_step)
def _hooked_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """The same in less time, where this thread has no profiler and nobody else a hook before it."""
    if torch._C._autograd._profiler_enabled() or hooked(optimizer):
        return _profiled_step(optimizer, *args, **kwargs)
    after = optimizer._optimizer_step_post_hooks, optimizers._global_optimizer_post_hooks
    with torch._C._profiler._RecordFunctionFast(f"Optimizer.step#{type(optimizer).__name__}.step"):
        out = None
        if args or kwargs or not kernels.at_once(optimizer):
            _before_step(optimizer)
            out = _step(optimizer, *args, **kwargs)
        optimizer._optimizer_step_code()
        for hooks in after:
            for hook in hooks.values():
                hook(optimizer, (optimizer, *args), kwargs)
    return out


def hooked(optimizer: Optimizer) -> bool:
    """Whether others asked to be called before a step of it."""
    of_all = len(optimizers._global_optimizer_pre_hooks) - OWN_HOOKS
    return of_all > 0 or bool(optimizer._optimizer_step_pre_hooks)


for _ours in (_hooked_step, _patched_step):
    vars(_ours)["_wrapped_by_lr_sched"] = True  # or they warn

METHODS: dict[str, Callable[..., Any]] = {
    "step": _hooked_step,
    "zero_grad": _zero_grad,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "__reduce_ex__": _reduce,
}


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Look where the parameters are now, and whether this is the optimizer to step them."""
    if torch.compiler.is_compiling():
        return
    if has_tables() or Place.sharded:
        follow(optimizer)
        _refuse_displaced([p for group in optimizer.param_groups for p in group["params"]])
    if not kernels.wanted(optimizer):  # else wherever a plan is made
        refuse_strangers(optimizer)


def _refuse_displaced(params: list[Tensor]) -> None:
    """What came for a low-precision parameter would train without its lower bits."""
    for module, name in displaced(params):
        raise ArgumentError(
            "the parameters that `optimize` gave master weights, or what fully_shard made of them",
            f"a {type(module).__name__} whose {name!r} was replaced or flattened",
            "So do FullyShardedDataParallel, tensor parallelism, parametrizations, and fully_shard "
            "where only one of tied modules is in the call. Use fully_shard (FSDP2) on all, or "
            "leave the model in fp32, by `optimize` without dtype, and let FSDP's mixed precision "
            "or autocast compute in low precision.",
        )


optimizers.register_optimizer_step_pre_hook(_before_step)
OWN_HOOKS = 1  # of all optimizers
