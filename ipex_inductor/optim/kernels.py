"""One optimizer step by kernels, and the work on gradients that is done in one pass with it."""

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ipex_inductor.optim.launching.launch_groups import UNSCALED, Scale
from ipex_inductor.optim.launching.launch_groups_cuda import CountingBatch, CudaBatch
from ipex_inductor.optim.launching.launch_groups_sycl import SyclBatch
from ipex_inductor.optim.norms import Clip, get_deferred, read_of
from ipex_inductor.optim.plan import Plan, numbers_of, run
from ipex_inductor.optim.plan_replay import (
    Asked,
    are_disjoint,
    find_plan,
    is_capturing,
    keep,
    look_and_compare,
    repeat_plain_step,
    repeat_step,
)
from ipex_inductor.optim.sharded_norms import total_norm
from ipex_inductor.optim.shards import is_sharded
from ipex_inductor.optim.state_fingerprint import Look
from ipex_inductor.optim.weights import Place, Trained, has_tables
from ipex_inductor.reporting.decisions import Event, GraphReport
from ipex_inductor.templates.optimizer.formulas import FORMULAS

log = logging.getLogger("ipex_inductor")

# Attributes of an optimizer: IPEX's name for a fused one, our options, and GradScaler's.
FUSED, OPTIONS, SCALES = "fused", "_ipex_step_options", "_step_supports_amp_scaling"
KNOB = "fuse_update_step"  # the option of `optimize`
KEPT = (FUSED, OPTIONS, SCALES)  # attributes that copies and pickles keep
_said: set[tuple[str, str]] = set()


@dataclass
class Options:
    """Extra work of a step: clipping, zeroing and reports; see `FusedStep`."""

    clip_norm: float | None = None
    zero_grad: bool = False
    grad_norm: Tensor | None = None  # of the last step
    report: GraphReport | None = None  # of the model; notes the parameters that torch steps


def uses_kernels(optimizer: Optimizer) -> bool:
    """Return whether kernels step what they support of `optimizer`."""
    return OPTIONS in vars(optimizer)


def at_once(optimizer: Optimizer) -> bool:
    """Repeat the last step if nothing changed and no extra work is pending.

    Returns whether the step was done.
    """
    if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
        return False  # see `step`
    attributes = vars(optimizer)
    options = attributes.get(OPTIONS)
    if options is None or "_opt_called" not in attributes or has_tables() or Place.sharded:
        return False
    if _has_extra_work(optimizer, options) or not repeat_plain_step(optimizer):
        return False
    options.grad_norm = None
    return True


def step(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    step_rest: Callable[[Container[nn.Parameter]], None],
) -> None:
    """Step parameters by kernels where they are supported, and the others by `step_rest`.

    Args:
        optimizer: the fused optimizer.
        weights: master weights by parameter.
        step_rest: steps the parameters it gets by torch's code; called first, as it may raise.
    """
    # Kernels are called by address, so Dynamo must not trace them. Disabling it costs time, so
    # that is only done where Dynamo is active.
    traced = torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None
    (_undisturbed if traced else _look_and_step)(optimizer, weights, step_rest)


def _look_and_step(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    step_rest: Callable[[Container[nn.Parameter]], None],
) -> None:
    """Repeat the last step if nothing changed, else plan a new one."""
    options: Options = vars(optimizer)[OPTIONS]
    if _has_extra_work(optimizer, options) or not repeat_step(optimizer, weights):
        _step(optimizer, options, weights, step_rest)
    else:
        options.grad_norm = None


_undisturbed = _disable_dynamo(_look_and_step)  # torch.compiler.disable would import Dynamo here


def _has_extra_work(optimizer: Optimizer, options: Options) -> bool:
    """Return whether gradients are to be changed, or state of GradScaler is to be read."""
    attributes = vars(optimizer)
    changes_grads = options.zero_grad or options.clip_norm is not None
    return (
        changes_grads
        or "grad_scale" in attributes
        or "found_inf" in attributes
        or get_deferred(optimizer) is not None
    )


@torch.no_grad()
def _step(
    optimizer: Optimizer,
    options: Options,
    weights: Mapping[nn.Parameter, Trained],
    step_rest: Callable[[Container[nn.Parameter]], None],
) -> None:
    """Do one step with a new or a reused plan, and the extra work around it."""
    fingerprint, last = look_and_compare(optimizer, weights)
    if fingerprint is None:
        grads = _gradients(optimizer)
    else:
        grads = fingerprint.grads if options.zero_grad or options.clip_norm is not None else []
    norm, scale = _scale(optimizer, options, fingerprint, grads)
    # A gradient that shares memory would be 0 before its other owner has read it.
    zeroed = options.zero_grad and are_disjoint(last, fingerprint, grads)

    request = Asked(scale is not None, zeroed, waits=scale is None or _waits(optimizer, scale))
    step_plan = find_plan(optimizer, weights, request, last, fingerprint)
    _refuse_capture(optimizer, step_plan)
    if scale and not step_plan.looks_itself(scale):
        scale.launch_reading()
        options.grad_norm = norm
        if scale.found_inf is not None and scale.found_inf.item():
            step_plan.written = []
            _zero(grads if options.zero_grad else ())
            return
        step_plan.load_ahead(scale)
        scale = scale.read()
    scale = scale or UNSCALED
    numbers = numbers_of(step_plan, optimizer, scale)
    if step_plan.left:
        _tell(optimizer, step_plan)
        with _hide_scaler(optimizer, step_plan.left, scale.number):
            step_rest(step_plan.left)
    run(step_plan, optimizer, numbers, scale)
    options.grad_norm = norm
    keep(optimizer, weights, request, step_plan)
    if options.zero_grad:
        _zero([*step_plan.copied, *(p.grad for p in step_plan.left)] if zeroed else grads)


def _waits(optimizer: Optimizer, scale: Scale) -> bool:
    """Return whether the host must know if the step is skipped, because it counts the steps."""
    rule, groups = FORMULAS[type(optimizer).__name__], optimizer.param_groups
    counts_on_device = all(group.get("capturable") or group.get("fused") for group in groups)
    return rule.counts and scale.found_inf is not None and not counts_on_device


def _scale(
    optimizer: Optimizer, options: Options, fingerprint: Look | None, grads: list[Tensor]
) -> tuple[Tensor | None, Scale | None]:
    """Return the norm of gradients and their scale: GradScaler's, and the one that clips them.

    As `torch.nn.utils.clip_grad_norm_` does: the factor is `clip / (norm + 1e-6)`, at most 1, and
    NaN if the norm is NaN. The norm of scaled fp16 gradients would often overflow in fp16.
    """
    tensors = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    # Without any gradient, GradScaler passes the number 0 instead of a tensor.
    divisor, found_inf = (value if isinstance(value, Tensor) else None for value in tensors)
    norm, factor = None, None
    pending = get_deferred(optimizer)  # what GradScaler has passed is not written yet
    if pending is not None:
        found_inf = pending.found_inf
    read = read_of(optimizer, options.clip_norm, divisor, fingerprint)
    if pending is not None and pending is not read:
        pending.run()
    if options.clip_norm is not None:
        clipped = read.clipped if read else None
        norm, factor = clipped or _clip_with_torch(options.clip_norm, grads, divisor)
    if factor is None and divisor is None and found_inf is None:
        return norm, None
    return norm, Scale(factor=factor, divisor=divisor, found_inf=found_inf, reading=read)


def _clip_with_torch(clip: float, grads: list[Tensor], divisor: Tensor | None) -> Clip:
    """Return the norm of `grads` over `divisor` and its clip factor by torch operations."""
    norm: Any = total_norm(grads) if any(map(is_sharded, grads)) else None
    if norm is None:
        upcast = [grad.float() if grad.dtype is torch.float16 else grad for grad in grads]
        norm = torch.nn.utils.get_total_norm(upcast)
        norm = norm.full_tensor() if is_sharded(norm) else norm
    norm = norm if divisor is None else norm / divisor.to(norm.device)
    return Clip(norm, (clip / (norm.double() + 1e-6)).clamp(max=1.0))


@contextmanager
def _hide_scaler(
    optimizer: Optimizer, params: Iterable[nn.Parameter], scale: float
) -> Iterator[None]:
    """Scale gradients of `params` and hide GradScaler's attributes while torch's step runs.

    Gradients and attributes are restored afterwards.
    """
    attributes = vars(optimizer)
    scaler_attributes: dict[str, Any] = {
        name: attributes.pop(name) for name in ("grad_scale", "found_inf") if name in attributes
    }
    grads: dict[nn.Parameter, Any] = {p: p.grad for p in params if scale != 1.0}
    try:
        for param, grad in grads.items():
            param.grad = grad * scale
        yield
    finally:
        for param, grad in grads.items():
            param.grad = grad
        attributes.update(scaler_attributes)


def _refuse_capture(optimizer: Optimizer, step_plan: Plan) -> None:
    """Raise `RuntimeError` if a captured graph would not count steps that the host counts.

    torch does so for Adam.
    """
    if not is_capturing():
        return
    name = type(optimizer).__name__
    if any(
        isinstance(b, CudaBatch | CountingBatch) and b.counts for b in step_plan.batches.values()
    ):
        raise RuntimeError(f"a CUDA graph of a step of {name} needs groups with capturable=True")
    if any(isinstance(b, SyclBatch) for b in step_plan.batches.values()):
        raise RuntimeError(f"no graph can have a step of {name}, whose scalars the host makes")


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return all gradients of `optimizer`.

    Sparse gradients are refused as by torch, but before anything is updated.
    """
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    refuse_sparse(optimizer, grads)
    return grads


def refuse_sparse(optimizer: Optimizer, grads: list[Tensor]) -> None:
    """Raise the error of torch's step for sparse gradients that it does not support."""
    if not any(grad.is_sparse for grad in grads):
        return
    name = type(optimizer).__name__
    if name not in ("SGD", "Adagrad"):
        raise RuntimeError(f"{name} does not support sparse gradients")
    for group in optimizer.param_groups:
        if group["weight_decay"] and any(
            p.grad is not None and p.grad.is_sparse for p in group["params"]
        ):
            raise RuntimeError("weight_decay option is not compatible with sparse gradients")


def _zero(grads: Any) -> None:
    """Fill gradients with zeros."""
    for grad in grads:
        grad.zero_()


def _tell(optimizer: Optimizer, step_plan: Plan) -> None:
    """Log and report each reason once; warn if a tool of the machine is missing."""
    name, report = type(optimizer).__name__, vars(optimizer)[OPTIONS].report
    for reason, count in Counter(step_plan.left.values()).items():
        message = f"torch itself steps {count} parameters: {reason}"
        event = Event("missed", KNOB, message, name)
        if report is not None and event not in report.events:
            report.events.append(event)
        if (name, reason) not in _said:
            _said.add((name, reason))
            level = logging.WARNING if reason in step_plan.unbuilt else logging.INFO
            log.log(level, "%s: %s", name, message)
