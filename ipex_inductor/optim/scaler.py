"""torch's GradScaler, which leaves to fused steps what they do anyway: read all gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ipex_inductor.optim import kernels
from ipex_inductor.optim.norms import found_inf, settle
from ipex_inductor.optim.step import hooked, steps_alone


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, in every argument, error, state dict and decision about the scale.

    For an optimizer with a `FusedStep` on a GPU of NVIDIA, `step` reads gradients once to see
    whether one is infinite or NaN, and writes none, as torch does there; the norm that is clipped
    comes out of the same reading. Finite gradients are never called infinite, whatever their norm.
    Everything else (other optimizers, CPUs, sparse or sharded gradients, parameters on several
    GPUs, graphs captured before such a step ran, after `unscale_`) is torch's own.

    `scaler.scale(loss).backward(); scaler.step(fused.optimizer); scaler.update()`
    """

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See `torch.amp.GradScaler.step`."""
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            found = settle(optimizer)
            if found is not None and hasattr(optimizer, "found_inf"):  # by a step that raised
                optimizer.found_inf = found

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        """What torch asks before a step that unscales by itself."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        found = None
        if _is_fused(optimizer):
            options: kernels.Options = vars(optimizer)[kernels.OPTIONS]
            found = found_inf(optimizer, scale, options.clip_norm, defer=_is_next(optimizer))
        if found is None:
            return super()._check_inf_per_device(optimizer)
        per_device = {found.device: found}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = per_device
        return per_device


def _is_fused(optimizer: Optimizer) -> bool:
    return kernels.wanted(optimizer) and kernels.SCALES in vars(optimizer)


def _is_next(optimizer: Optimizer) -> bool:
    """Whether our step is what comes next, and nothing of others that would look or write."""
    scaled = getattr(optimizer, "grad_scale", None) is not None  # of which more is not known yet
    return not (scaled or hooked(optimizer)) and steps_alone(optimizer)
