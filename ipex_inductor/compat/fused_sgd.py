"""Workaround for torch's fused SGD on the CPU in bf16 and fp16, which skips whole vectors.

Its kernel (torch 2.11 to 2.15) computes whole vectors and stores nothing; only the remainder after
the last whole vector is updated.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)
PACKAGE, OPTIMIZERS = "ipex_inductor.", "ipex_inductor.optim."  # modules of backend and optimizers


@functools.cache
def skips_vectors() -> bool:
    """Return whether this torch's kernel leaves whole vectors unchanged."""
    with torch.no_grad():
        param, grad = (torch.ones(256, dtype=torch.bfloat16) for _ in range(2))
        numbers: dict[str, Any] = {
            "weight_decay": 0.0,
            "momentum": 0.0,
            "lr": 1.0,
            "dampening": 0.0,
        }
        numbers |= {"nesterov": False, "maximize": False, "is_first_step": False}
        torch._fused_sgd_([param], [grad], [], **numbers)
        return bool(param.any())


def needs_mended_sgd(param: Any) -> bool:
    """Return whether `mended_sgd` has to step this parameter."""
    low = isinstance(param, Tensor) and param.dtype in LOW and param.device.type == "cpu"
    return low and skips_vectors()


@torch.no_grad()
def mended_sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: float | Tensor,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Do the step of `torch._fused_sgd_`, computed in fp32 and rounded once at each store.

    Args:
        params: parameters, updated in place.
        grads: their gradients; unscaled in place if there is a `grad_scale`.
        buffers: their momentum buffers, empty without momentum.
        weight_decay: the factor of the parameter that is added to the gradient.
        momentum: the momentum factor.
        lr: the learning rate.
        dampening: the share of the gradient that is kept out of the momentum.
        nesterov: whether the momentum is Nesterov's.
        maximize: whether the step ascends.
        is_first_step: whether the momentum buffers are to be initialized.
        grad_scale: the scale by which the gradients are divided, None for none.
        found_inf: nothing is stored if it is positive.
    """
    for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
        unscaled = grad.float() if grad_scale is None else grad.float() / grad_scale
        if grad_scale is not None:
            _store(grad, unscaled, found_inf)
        step = -unscaled if maximize else unscaled
        step = step + weight_decay * param.float()
        if momentum:
            buffer = buffers[number]
            first = step if is_first_step else momentum * buffer.float() + (1 - dampening) * step
            _store(buffer, first, found_inf)
            step = step + momentum * first if nesterov else first
        _store(param, param.float() - lr * step, found_inf)


def _store(target: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    """Store `value`, unless `found_inf` is positive."""
    target.copy_(value if found_inf is None else torch.where(found_inf > 0, target, value))


@functools.cache
def mend_fused_sgd() -> None:
    """Have steps of this package step affected parameters by `mended_sgd`, from now on.

    These are steps compiled with its backend, and those of its optimizers. Dynamo does not trace
    torch's function, so a compiled step calls the replacement; other steps pass through it.
    """
    if not skips_vectors():
        return
    from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_code_exec_strategy
    from torch._dynamo.eval_frame import TorchPatcher
    from torch._dynamo.types import (  # type: ignore[attr-defined]
        FrameAction,
        FrameExecStrategy,
    )
    from torch.optim import sgd

    TorchPatcher.patch()  # it disables torch's function, and would disable the replacement
    module: Any = sgd
    usual = module._fused_sgd
    disable: Any = torch.compiler.disable
    choose = disable(functools.partial(_step_params, usual))

    def step_params(*args: Any, **kwargs: Any) -> None:
        choose(get_eval_frame_callback(), *args, **kwargs)  # None below `disable`

    # Dynamo compiles what this function calls, but not the function itself.
    skipped = FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT)
    set_code_exec_strategy(step_params.__code__, skipped)
    # With the mark by which Dynamo does not trace it.
    module._fused_sgd = functools.wraps(usual)(step_params)


def _is_own(callback: Any) -> bool:
    """Return whether a step is compiled with this package's backend, or is of its optimizers.

    Args:
        callback: Dynamo's, of the frame that steps; it leads to the backend.
    """
    names = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn")
    while inner := next((_vars(callback)[n] for n in names if n in _vars(callback)), None):
        callback = inner
    if (getattr(callback, "__module__", None) or "").startswith(PACKAGE):
        return True
    frame: Any = sys._getframe(1)
    while frame and not frame.f_globals.get("__name__", "").startswith(OPTIMIZERS):
        frame = frame.f_back
    return frame is not None


def _vars(thing: Any) -> dict[str, Any]:
    return getattr(thing, "__dict__", {})


def _step_params(
    usual: Callable[..., None],
    callback: Any,
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffer_list: list[Tensor | None],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    has_sparse_grad: bool,
    **options: Any,
) -> None:
    """Step affected parameters by `mended_sgd` if the step is this package's, all others by torch.

    Args:
        usual: torch's function; the arguments behind `callback` are its own.
        callback: Dynamo's, of the frame that steps.
        params: see `mended_sgd`.
        grads: see `mended_sgd`.
        momentum_buffer_list: see `mended_sgd`; filled at the first step with momentum.
        grad_scale: see `mended_sgd`.
        found_inf: see `mended_sgd`.
        has_sparse_grad: whether there is a sparse gradient, which torch refuses.
        options: numbers of the step.
    """
    affected = [] if has_sparse_grad else [n for n, p in enumerate(params) if needs_mended_sgd(p)]
    if not affected or not _is_own(callback):
        lists = params, grads, momentum_buffer_list
        usual(*lists, grad_scale, found_inf, has_sparse_grad=has_sparse_grad, **options)
        return
    unaffected = [n for n in range(len(params)) if n not in {*affected}]
    first = bool(options["momentum"]) and all(b is None for b in momentum_buffer_list)
    if unaffected:
        buffers = [momentum_buffer_list[n] for n in unaffected if momentum_buffer_list]
        chosen = [params[n] for n in unaffected], [grads[n] for n in unaffected], buffers
        usual(*chosen, grad_scale, found_inf, has_sparse_grad=has_sparse_grad, **options)
        for n, buffer in zip(unaffected, buffers, strict=False):  # none without momentum
            momentum_buffer_list[n] = buffer
    for n in affected if first else ():
        momentum_buffer_list[n] = torch.empty_like(grads[n])
    mended_sgd(
        [params[n] for n in affected],
        [grads[n] for n in affected],
        [momentum_buffer_list[n] for n in affected if momentum_buffer_list],  # type: ignore[misc]
        is_first_step=first,
        grad_scale=grad_scale,
        found_inf=found_inf,
        **options,
    )
