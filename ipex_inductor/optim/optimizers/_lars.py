"""Lars: SGD with momentum, with a learning rate for each parameter that fits its norm."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ipex_inductor.optim.optimizers.checks import not_negative


class Lars(Optimizer):
    """Layer-wise adaptive rate scaling; You et al. 2017, arXiv:1708.03888.

    `t = eeta |w| / (|g| + weight_decay |w| + epsilon)`, 1 if |w| or |g| is 0; then SGD with
    momentum and weight decay at the rate `lr t`. A group with `lars=False` keeps its rate. Sparse
    gradients raise `RuntimeError`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        momentum: momentum factor of SGD.
        eeta: trust coefficient.
        weight_decay: factor of the parameter that is added to the gradient.
        epsilon: added to the denominator of the trust ratio.
        fused: kept as an attribute for old code; `fuse_step` fuses the step.
    """

    fused = True

    __module__ = "ipex_inductor.optim"  # by which pickles name it

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
        fused: bool = True,
    ) -> None:
        not_negative(
            lr=lr, momentum=momentum, eeta=eeta, weight_decay=weight_decay, epsilon=epsilon
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "eeta": eeta,
            "weight_decay": weight_decay,
            "epsilon": epsilon,
            "lars": True,
        }
        super().__init__(params, defaults)
        self.fused = fused

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
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: Any) -> None:
        if grad.is_sparse:
            raise RuntimeError("Lars does not support sparse gradients")
        decay = group["weight_decay"]
        update = grad.add(param, alpha=decay) if decay else grad.clone()
        rate = group["lr"] * _trust(param, grad, group) if group["lars"] else group["lr"]
        if group["momentum"]:
            state = self.state[param]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = update
            else:
                state["momentum_buffer"].mul_(group["momentum"]).add_(update)
            update = state["momentum_buffer"]
        if isinstance(rate, Tensor):
            param.addcmul_(update, rate, value=-1)
        else:
            param.add_(update, alpha=-rate)


def _trust(param: Tensor, grad: Tensor, group: Any) -> Tensor:
    """Return the trust ratio of a parameter as a tensor on its device."""
    weight_norm, grad_norm = param.norm(), grad.norm()
    scaled_norm = grad_norm + group["weight_decay"] * weight_norm + group["epsilon"]
    return torch.where(
        (weight_norm > 0) & (grad_norm > 0), group["eeta"] * weight_norm / scaled_norm, 1.0
    )


def create_optimizer_lars(
    model: nn.Module,
    lr: float,
    momentum: float,
    weight_decay: float,
    bn_bias_separately: bool,
    epsilon: float,
    fused: bool = True,
) -> Lars:
    """Return a `Lars` optimizer of all parameters of `model`.

    Args:
        model: the module whose parameters are stepped.
        lr: learning rate.
        momentum: momentum factor of SGD.
        weight_decay: factor of the parameter that is added to the gradient.
        bn_bias_separately: step normalization layers and biases by plain SGD without weight decay.
        epsilon: added to the denominator of the trust ratio.
        fused: see `Lars`.
    """
    plain = _norms_and_biases(model) if bn_bias_separately else []
    scaled = [p for p in model.parameters() if all(p is not excluded for excluded in plain)]
    groups: list[dict[str, Any]] = [{"params": scaled}]
    if bn_bias_separately:
        groups.append({"params": plain, "weight_decay": 0, "lars": False})
    return Lars(groups, lr, momentum, weight_decay=weight_decay, epsilon=epsilon, fused=fused)


NORMS = (
    nn.modules.batchnorm._NormBase,  # batch and instance norms
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def _norms_and_biases(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of normalization layers and all biases, each once."""
    params = (
        (name, param, isinstance(module, NORMS))
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
    )
    return list(dict.fromkeys(p for name, p, norm in params if norm or name.endswith("bias")))
