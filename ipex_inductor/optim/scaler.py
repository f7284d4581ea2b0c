"""torch's GradScaler, which leaves reading all gradients to fused steps."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ipex_inductor.optim import kernels
from ipex_inductor.optim.norms import found_inf, settle
from ipex_inductor.optim.step import has_pre_hooks, steps_alone


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, with equal arguments, errors, state dicts and scale decisions.

    For an optimizer with a `FusedStep` on an NVIDIA GPU, `step` reads gradients once to detect
    infinite values and NaN, and does not write them, as torch does there. The clipped norm comes
    out of that reading. Finite gradients are never reported as infinite, whatever their norm.
    Everything else (other optimizers, CPUs, sparse or sharded gradients, parameters on several
    GPUs, graphs captured before such a step ran, after `unscale_`) is torch's own.

    `scaler.scale(loss).backward(); scaler.step(fused.optimizer); scaler.update()`
    """

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step `optimizer` unless a gradient is not finite; see `torch.amp.GradScaler.step`."""
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            flag = settle(optimizer)
            if flag is not None and hasattr(optimizer, "found_inf"):  # left by a step that raised
                optimizer.found_inf = flag

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        """Return the flags of non-finite values by device, before a step that unscales."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        flag = None
        if _is_fused(optimizer):
            options: kernels.Options = vars(optimizer)[kernels.OPTIONS]
            flag = found_inf(optimizer, scale, options.clip_norm, defer=_is_next(optimizer))
        if flag is None:
            return super()._check_inf_per_device(optimizer)
        per_device = {flag.device: flag}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = per_device
        return per_device


def _is_fused(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` has a `FusedStep`."""
    return kernels.uses_kernels(optimizer) and kernels.SCALES in vars(optimizer)


def _is_next(optimizer: Optimizer) -> bool:
    """Return whether our step reads gradients next, without hooks or wrappers before it."""
    # If the user has set a scale, the product with it is not known yet.
    scale_set = getattr(optimizer, "grad_scale", None) is not None
    return not (scale_set or has_pre_hooks(optimizer)) and steps_alone(optimizer)
