"""Lamb: Adam's direction, with a step length for each parameter that fits its norm."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ipex_inductor.optim.optimizers.checks import in_range, not_negative


class Lamb(Optimizer):
    """Layer-wise adaptive moments; You et al. 2020, arXiv:1904.00962, algorithm 2.

    `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`, `u = m' / (sqrt(v') + eps) + weight_decay w`
    with bias-corrected m' and v', `w -= lr |w| / |u| u`. The ratio is 1 if either norm is 0, and is
    not clamped. Sparse gradients raise `RuntimeError`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay rates of the first and the second moment, in [0, 1).
        eps: added to the square root of the second moment.
        weight_decay: factor of the parameter that is added to the update.
        fused: kept as an attribute for old code; `fuse_step` fuses the step.
        capturable: keep the step counters on the device of the parameters, for CUDA graphs.
    """

    fused = False

    __module__ = "ipex_inductor.optim"  # by which pickles name it

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        fused: bool = False,
        capturable: bool = False,
    ) -> None:
        not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        in_range(betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults["capturable"] = capturable
        super().__init__(params, defaults)
        self.fused = fused

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state; step counts that IPEX checkpoints store as int become tensors."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("capturable", False)
        for param_state in self.state.values():
            if "step" in param_state and not isinstance(param_state["step"], Tensor):
                param_state["step"] = torch.tensor(float(param_state["step"]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters once; `closure` recomputes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, self.state[param], group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if grad.is_sparse:
            raise RuntimeError("Lamb does not support sparse gradients")
        if not state:
            step_device = param.device if group["capturable"] else torch.device("cpu")
            state["step"] = torch.zeros((), device=step_device)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        first, second = group["betas"]
        state["step"] += 1
        step = state["step"] if group["capturable"] else state["step"].item()
        m = state["exp_avg"].lerp_(grad, 1 - first)
        v = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        update = (v / (1 - second**step)).sqrt_().add_(group["eps"])
        update = torch.div(m / (1 - first**step), update, out=update)
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        weight_norm, update_norm = param.norm(), update.norm()
        # `where` stays on the device, so the host does not wait for a GPU.
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        param.addcmul_(update, ratio * group["lr"], value=-1)
