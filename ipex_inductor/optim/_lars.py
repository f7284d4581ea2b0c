"""Lars: SGD with momentum, with a learning rate for each parameter that fits its norm."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ipex_inductor.optim.checks import not_negative


class Lars(Optimizer):
    """Layer-wise adaptive rate scaling; You et al. 2017, arXiv:1708.03888.

    `t = eeta |w| / (|g| + weight_decay |w| + epsilon)`, 1 if |w| or |g| is 0; then SGD with
    momentum and weight decay at the rate `lr t`. A group with `lars=False` keeps its rate. `fused`
    is in old code: `fuse_step` fuses. Sparse gradients raise.
    """

    fused = True

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
        """One step; `closure` computes the loss anew and returns it."""
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
            own = self.state[param]
            if own.get("momentum_buffer") is None:
                own["momentum_buffer"] = update
            else:
                own["momentum_buffer"].mul_(group["momentum"]).add_(update)
            update = own["momentum_buffer"]
        if isinstance(rate, Tensor):
            param.addcmul_(update, rate, value=-1)
        else:
            param.add_(update, alpha=-rate)


def _trust(param: Tensor, grad: Tensor, group: Any) -> Tensor:
    weight, slope = param.norm(), grad.norm()
    below = slope + group["weight_decay"] * weight + group["epsilon"]
    return torch.where((weight > 0) & (slope > 0), group["eeta"] * weight / below, 1.0)


def create_optimizer_lars(
    model: nn.Module,
    lr: float,
    momentum: float,
    weight_decay: float,
    bn_bias_separately: bool,
    epsilon: float,
    fused: bool = True,
) -> Lars:
    """`Lars` on all parameters of `model`.

    `bn_bias_separately`: normalisation layers and biases get plain SGD without weight decay.
    """
    plain = _norms_and_biases(model) if bn_bias_separately else []
    scaled = [p for p in model.parameters() if all(p is not other for other in plain)]
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
    own = (
        (name, param, isinstance(module, NORMS))
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
    )
    return list(dict.fromkeys(p for name, p, norm in own if norm or name.endswith("bias")))
