"""One step by kernels, and what is done with the gradients in the same pass."""

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

from ipex_inductor.optim.launch_groups import UNSCALED, Scale
from ipex_inductor.optim.launch_groups_cuda import CountingBatch, CudaBatch
from ipex_inductor.optim.launch_groups_sycl import SyclBatch
from ipex_inductor.optim.norms import Clip, deferred, read_of
from ipex_inductor.optim.plan import Plan, numbers_of, run
from ipex_inductor.optim.plan_replay import (
    Asked,
    apart,
    capturing,
    keep,
    looked,
    planned,
    repeated,
    unchanged,
)
from ipex_inductor.optim.sharded_norms import total_norm
from ipex_inductor.optim.shards import is_sharded
from ipex_inductor.optim.state_fingerprint import Look
from ipex_inductor.optim.weights import Place, Trained, has_tables
from ipex_inductor.reporting.decisions import Event, GraphReport
from ipex_inductor.templates.optimizer.formulas import FORMULAS

log = logging.getLogger("ipex_inductor")

# Attributes of an optimizer: IPEX's name for one that is fused, ours, and GradScaler's.
FUSED, OPTIONS, SCALES = "fused", "_ipex_step_options", "_step_supports_amp_scaling"
KNOB = "fuse_update_step"  # of `optimize`
KEPT = (FUSED, OPTIONS, SCALES)  # by copies and pickles
_said: set[tuple[str, str]] = set()


@dataclass
class Options:
    """What a step does beside stepping; see `FusedStep`."""

    clip_norm: float | None = None
    zero_grad: bool = False
    grad_norm: Tensor | None = None  # of the last step
    report: GraphReport | None = None  # of the model, where it is noted what torch itself steps


def wanted(optimizer: Optimizer) -> bool:
    """Whether the step is to be done by kernels where they can."""
    return OPTIONS in vars(optimizer)


def at_once(optimizer: Optimizer) -> bool:
    """Whether the step is like the last one and of nothing beside; it is done then."""
    if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
        return False  # see `step`
    given = vars(optimizer)
    options = given.get(OPTIONS)
    if options is None or "_opt_called" not in given or has_tables() or Place.sharded:
        return False
    if _around(optimizer, options) or not unchanged(optimizer):
        return False
    options.grad_norm = None
    return True


def step(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    own: Callable[[Container[nn.Parameter]], None],
) -> None:
    """Kernels for the parameters they can take; `own` for the rest, first, as it may raise."""
    # Dynamo is to stay out, as kernels are called by address; where it is not there, for nothing.
    followed = torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None
    (_undisturbed if followed else _look_and_step)(optimizer, weights, own)


def _look_and_step(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    own: Callable[[Container[nn.Parameter]], None],
) -> None:
    options: Options = vars(optimizer)[OPTIONS]
    if _around(optimizer, options) or not repeated(optimizer, weights):
        _step(optimizer, options, weights, own)
    else:
        options.grad_norm = None


_undisturbed = _disable_dynamo(_look_and_step)  # torch.compiler.disable would import Dynamo now


def _around(optimizer: Optimizer, options: Options) -> bool:
    """Whether something is to be done to gradients, or what GradScaler found is to be read."""
    given = vars(optimizer)
    asked = options.zero_grad or options.clip_norm is not None
    return asked or "grad_scale" in given or "found_inf" in given or deferred(optimizer) is not None


@torch.no_grad()
def _step(
    optimizer: Optimizer,
    options: Options,
    weights: Mapping[nn.Parameter, Trained],
    own: Callable[[Container[nn.Parameter]], None],
) -> None:
    """Any step: a new plan, or what is to be done around one."""
    seen, last = looked(optimizer, weights)
    if seen is None:
        grads = _gradients(optimizer)
    else:
        grads = seen.grads if options.zero_grad or options.clip_norm is not None else []
    norm, scale = _scale(optimizer, options, seen, grads)
    # What is one's gradient in part would be 0 before the other has read it.
    zeroed = options.zero_grad and apart(last, seen, grads)

    asked = Asked(scale is not None, zeroed, waits=scale is None or _waits(optimizer, scale))
    made = planned(optimizer, weights, asked, last, seen)
    _refuse_capture(optimizer, made)
    if scale and not made.looks_itself(scale):
        scale.written()
        options.grad_norm = norm
        if scale.found_inf is not None and scale.found_inf.item():
            made.written = []
            _zero(grads if options.zero_grad else ())
            return
        made.load_ahead(scale)
        scale = scale.read()
    scale = scale or UNSCALED
    numbers = numbers_of(made, optimizer, scale)
    if made.left:
        _tell(optimizer, made)
        with _unscaled(optimizer, made.left, scale.number):
            own(made.left)
    run(made, optimizer, numbers, scale)
    options.grad_norm = norm
    keep(optimizer, weights, asked, made)
    if options.zero_grad:
        _zero([*made.copied, *(p.grad for p in made.left)] if zeroed else grads)


def _waits(optimizer: Optimizer, scale: Scale) -> bool:
    """Whether the host has to know if the step is left out, as it counts them."""
    rule, groups = FORMULAS[type(optimizer).__name__], optimizer.param_groups
    there = all(group.get("capturable") or group.get("fused") for group in groups)
    return rule.counts and scale.found_inf is not None and not there


def _scale(
    optimizer: Optimizer, options: Options, seen: Look | None, grads: list[Tensor]
) -> tuple[Tensor | None, Scale | None]:
    """The norm of gradients, and what they are to be multiplied by: GradScaler's, what clips them.

    As `torch.nn.utils.clip_grad_norm_` does: by `clip / (norm + 1e-6)`, never by more than 1, and
    by NaN if that is the norm. That of scaled fp16 would often be beyond fp16.
    """
    given = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    # Of no gradients at all, GradScaler makes the number 0.
    divisor, found_inf = (value if isinstance(value, Tensor) else None for value in given)
    norm, factor = None, None
    late = deferred(optimizer)  # and what GradScaler has handed over is not written yet
    if late is not None:
        found_inf = late.found_inf
    read = read_of(optimizer, options.clip_norm, divisor, seen)
    if late is not None and late is not read:
        late.run()
    if options.clip_norm is not None:
        clipped = read.clipped if read else None
        norm, factor = clipped or _clipped(options.clip_norm, grads, divisor)
    if factor is None and divisor is None and found_inf is None:
        return norm, None
    return norm, Scale(factor=factor, divisor=divisor, found_inf=found_inf, reading=read)


def _clipped(clip: float, grads: list[Tensor], divisor: Tensor | None) -> Clip:
    """The same by torch's operations."""
    norm: Any = total_norm(grads) if any(map(is_sharded, grads)) else None
    if norm is None:
        wide = [grad.float() if grad.dtype is torch.float16 else grad for grad in grads]
        norm = torch.nn.utils.get_total_norm(wide)
        norm = norm.full_tensor() if is_sharded(norm) else norm
    norm = norm if divisor is None else norm / divisor.to(norm.device)
    return Clip(norm, (clip / (norm.double() + 1e-6)).clamp(max=1.0))


@contextmanager
def _unscaled(optimizer: Optimizer, params: Iterable[nn.Parameter], scale: float) -> Iterator[None]:
    """While open, torch's own step finds gradients times `scale`, and nothing of GradScaler's."""
    own = vars(optimizer)
    theirs: dict[str, Any] = {
        name: own.pop(name) for name in ("grad_scale", "found_inf") if name in own
    }
    grads: dict[nn.Parameter, Any] = {p: p.grad for p in params if scale != 1.0}
    try:
        for param, grad in grads.items():
            param.grad = grad * scale
        yield
    finally:
        for param, grad in grads.items():
            param.grad = grad
        own.update(theirs)


def _refuse_capture(optimizer: Optimizer, made: Plan) -> None:
    """As torch does for Adam: a graph would count no steps that the host counts."""
    if not capturing():
        return
    name = type(optimizer).__name__
    if any(isinstance(b, CudaBatch | CountingBatch) and b.counts for b in made.batches.values()):
        raise RuntimeError(f"a CUDA graph of a step of {name} needs groups with capturable=True")
    if any(isinstance(b, SyclBatch) for b in made.batches.values()):
        raise RuntimeError(f"no graph can have a step of {name}, whose scalars the host makes")


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """All there are; refuses sparse ones as torch does, but before anything is updated."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    refuse_sparse(optimizer, grads)
    return grads


def refuse_sparse(optimizer: Optimizer, grads: list[Tensor]) -> None:
    """Raise what torch's step would, for gradients that it does not take."""
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
    for grad in grads:
        grad.zero_()


def _tell(optimizer: Optimizer, made: Plan) -> None:
    """Each reason once; a warning where something of the machine is missing."""
    name, report = type(optimizer).__name__, vars(optimizer)[OPTIONS].report
    for reason, count in Counter(made.left.values()).items():
        said = f"torch itself steps {count} parameters: {reason}"
        missed = Event("missed", KNOB, said, name)
        if report is not None and missed not in report.events:
            report.events.append(missed)
        if (name, reason) not in _said:
            _said.add((name, reason))
            level = logging.WARNING if reason in made.unbuilt else logging.INFO
            log.log(level, "%s: %s", name, said)
