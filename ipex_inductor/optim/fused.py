"""Optimizer steps as one kernel for all parameters of a kind."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim import kernels
from ipex_inductor.optim.step import users_step, wrap
from ipex_inductor.optim.tables import FUSED_OPTIMIZERS, names
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.templates.optimizer.step_cuda import has_kernels


def fuse_step(optimizer: Optimizer, report: GraphReport | None = None) -> str | None:
    """Have `optimizer`, of exactly one of the fused types, step by kernels; None, or why not.

    One call steps all parameters of a kind (dtypes and flags; on a GPU of NVIDIA, of a group) in
    fp32 inside, fp64 for fp64 parameters. State, hooks, closures and state dicts are as torch's.
    What no kernel takes is stepped by torch itself, which the log says once, and `report`. As with
    IPEX, `optimizer._original_step` is the step there was, and `optimizer.fused` says that a fused
    one was asked for.
    """
    kind = type(optimizer)
    if kind not in FUSED_OPTIMIZERS:
        return f"no fused step for {kind.__name__}, only for {names(FUSED_OPTIMIZERS)}"
    own = vars(optimizer)
    if nowhere := _nowhere(optimizer):
        own.setdefault("_original_step", optimizer.step)
        own[kernels.FUSED] = True
        return f"{nowhere}: the step of {kind.__name__} itself stands in, exact"
    if users_step(optimizer):
        return f"this {kind.__name__} was given a step of its own, which is called as it is"
    wrap(optimizer)
    own[kernels.FUSED] = True
    options = own.setdefault(kernels.OPTIONS, kernels.Options())
    options.report = report or options.report
    return None


def _nowhere(optimizer: Optimizer) -> str | None:
    """Why there are kernels for none of its parameters, where they are."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    if any(map(has_kernels, devices)):
        return None
    return f"no kernel for {', '.join(sorted({device.type for device in devices}))} yet"


class FusedStep:
    """`optimizer`'s step, fused (`fuse_step`), with what surrounds it in the same pass.

    `clip_norm`: gradients are scaled as `torch.nn.utils.clip_grad_norm_` would, but not written;
    `grad_norm` is what it would return. `zero_grad`: they are 0 afterwards. GradScaler's unscaling
    is folded in as well. Raises `ArgumentError` if the step cannot be fused.

    `step = FusedStep(optimizer, clip_norm=1.0)`; then `step()`, which is `optimizer.step()` now.
    """

    def __init__(
        self, optimizer: Optimizer, clip_norm: float | None = None, zero_grad: bool = False
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ArgumentError("a positive norm", str(clip_norm), "None clips nothing.")
        if reason := _nowhere(optimizer) or fuse_step(optimizer):
            raise ArgumentError("an optimizer with a fused step", type(optimizer).__name__, reason)
        self.optimizer = optimizer
        known = vars(optimizer)[kernels.OPTIONS]
        self._options = kernels.Options(clip_norm, zero_grad, report=known.report)
        vars(optimizer).update({kernels.OPTIONS: self._options, kernels.SCALES: True})

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure` computes the loss anew and returns it."""
        return self.optimizer.step(closure)

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients at the last step, before it was clipped."""
        return self._options.grad_norm
