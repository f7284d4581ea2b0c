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
    """Have `optimizer`, of exactly one of the fused types, step by kernels.

    One call steps all parameters of a kind (dtypes and flags; on an NVIDIA GPU, of a group).
    Kernels compute in fp32, and in fp64 for fp64 parameters. State, hooks, closures and state
    dicts are as torch's. Parameters that no kernel supports are stepped by torch itself, which is
    logged once and noted in `report`. As with IPEX, `optimizer._original_step` is the step before,
    and `optimizer.fused` says that a fused step was requested.

    Returns:
        None, or the reason why the step is not fused.
    """
    kind = type(optimizer)
    if kind not in FUSED_OPTIMIZERS:
        return f"no fused step for {kind.__name__}, only for {names(FUSED_OPTIMIZERS)}"
    attributes = vars(optimizer)
    if no_kernel := _why_no_kernel(optimizer):
        attributes.setdefault("_original_step", optimizer.step)
        attributes[kernels.FUSED] = True
        return f"{no_kernel}: the step of {kind.__name__} itself stands in, exact"
    if users_step(optimizer):
        return f"this {kind.__name__} was given a step of its own, which is called as it is"
    wrap(optimizer)
    attributes[kernels.FUSED] = True
    options = attributes.setdefault(kernels.OPTIONS, kernels.Options())
    options.report = report or options.report
    return None


def _why_no_kernel(optimizer: Optimizer) -> str | None:
    """Return the reason if no parameter is on a device with kernels, else None."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    if any(map(has_kernels, devices)):
        return None
    return f"no kernel for {', '.join(sorted({device.type for device in devices}))} yet"


class FusedStep:
    """The fused step of `optimizer` (`fuse_step`), with gradient clipping and zeroing in one pass.

    GradScaler's unscaling is folded in as well.
    `step = FusedStep(optimizer, clip_norm=1.0)`; then `step()`, which is `optimizer.step()` now.

    Args:
        optimizer: one of `FUSED_OPTIMIZERS`.
        clip_norm: scale gradients as `torch.nn.utils.clip_grad_norm_` would, without writing them;
            `grad_norm` is what it would return.
        zero_grad: set gradients to 0 after the step.

    Raises:
        ArgumentError: the step cannot be fused, or `clip_norm` is not positive.
    """

    def __init__(
        self, optimizer: Optimizer, clip_norm: float | None = None, zero_grad: bool = False
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ArgumentError("a positive norm", str(clip_norm), "None clips nothing.")
        if reason := _why_no_kernel(optimizer) or fuse_step(optimizer):
            raise ArgumentError("an optimizer with a fused step", type(optimizer).__name__, reason)
        self.optimizer = optimizer
        options = vars(optimizer)[kernels.OPTIONS]
        self._options = kernels.Options(clip_norm, zero_grad, report=options.report)
        vars(optimizer).update({kernels.OPTIONS: self._options, kernels.SCALES: True})

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters once; `closure` recomputes the loss, which is returned."""
        return self.optimizer.step(closure)

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients at the last step, before clipping."""
        return self._options.grad_norm
