"""BatchNorm2d with constant statistics and affine parameters."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FrozenBatchNorm2d(nn.Module):
    """`nn.BatchNorm2d(num_features, eps)`, always in eval mode: it has buffers and learns nothing.

    Input and result [N, C, H, W]. Backend `ipex` folds it into the convolution before it. It also
    loads the state of a BatchNorm2d.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name in ("weight", "running_var"):
            self.register_buffer(name, torch.ones(num_features))
        for name in ("bias", "running_mean"):
            self.register_buffer(name, torch.zeros(num_features))

    def forward(self, input: Tensor) -> Tensor:
        """Return the input normalized by the stored statistics, then scaled and shifted."""
        statistics = (self.running_mean, self.running_var)
        return F.batch_norm(input, *statistics, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        """Return channels and eps, as BatchNorm2d shows them."""
        return f"{len(self.weight)}, eps={self.eps}"

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state, prefix, *args)
