"""`ipex.llm.modules`: linear layers with what follows them, norms, attention, experts, Mamba.

They are compositions of torch's ops. Backend `ipex` fuses them in compiled graphs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor.llm import functional, mamba
from ipex_inductor.llm.attention.indirect_access import (
    IndirectAccessKVCacheAttention as IndirectAccessKVCacheAttention,
)
from ipex_inductor.llm.attention.paged import PagedAttention as PagedAttention
from ipex_inductor.llm.experts import GatedMLPMOE as GatedMLPMOE
from ipex_inductor.llm.rotary import RotaryEmbedding as RotaryEmbedding


class _OfLinear(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear


class _Activated(_OfLinear):
    """An activation of a linear layer's result."""

    activation: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of linear(x)."""
        return type(self).activation(self.linear(x))


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class LinearSilu(_Activated):
    """silu(linear(x))."""

    activation = staticmethod(F.silu)


class LinearRelu(_Activated):
    """relu(linear(x))."""

    activation = staticmethod(F.relu)


class LinearGelu(_Activated):
    """gelu(linear(x))."""

    activation = staticmethod(F.gelu)


class LinearNewGelu(_Activated):
    """gelu(linear(x)) by its tanh formula."""

    activation = staticmethod(_tanh_gelu)


class LinearSiluMul(_OfLinear):
    """silu(linear(x)) * y."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return silu(linear(x)) * y."""
        return F.silu(self.linear(x)) * y


class LinearMul(_OfLinear):
    """linear(x) * y."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """Return linear(x) * y."""
        return self.linear(x) * y


class LinearAdd(_OfLinear):
    """linear(x) + y."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """Return linear(x) + y."""
        return self.linear(x) + y


class LinearAddAdd(_OfLinear):
    """linear(x) + y + z."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Any:
        """Return linear(x) + y + z."""
        return self.linear(x) + y + z


class Linear2SiluMul(nn.Module):
    """silu(linear_s(x)) * linear_m(x)."""

    def __init__(self, linear_s: nn.Module, linear_m: nn.Module) -> None:
        super().__init__()
        self.linear_s, self.linear_m = linear_s, linear_m

    def forward(self, x: Tensor) -> Any:
        """Return silu(linear_s(x)) * linear_m(x)."""
        return F.silu(self.linear_s(x)) * self.linear_m(x)


class RMSNorm(nn.Module):
    """Divide by the root mean square of the last dimension, and scale.

    Args:
        hidden_size: the width.
        eps: added to the mean square.
        weight: [hidden_size]; ones if None.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, weight: Tensor | None = None) -> None:
        super().__init__()
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.ones(hidden_size)) if weight is None else weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x, [..., hidden_size]."""
        return functional.rms_norm(x, self.weight, self.variance_epsilon)

    @classmethod
    def apply_function(cls, hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the norm of `hidden_states` by this weight."""
        return functional.rms_norm(hidden_states, weight, eps)


class FastLayerNorm(nn.Module):
    """Layer norm by given weights.

    Args:
        normalized_shape: shape of the last dimensions.
        eps: added to the variance.
        weight: of that shape.
        bias: of that shape, or None.
    """

    def __init__(
        self,
        normalized_shape: tuple[int, ...],
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = tuple(normalized_shape), eps
        self.weight, self.bias = weight, bias

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the norm of `hidden_states`."""
        shape, bias = self.normalized_shape, self.bias
        return functional.fast_layer_norm(hidden_states, shape, self.weight, bias, self.eps)

    @classmethod
    def apply_function(
        cls,
        hidden_states: Tensor,
        normalized_shape: tuple[int, ...],
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Return the norm of `hidden_states` by these weights."""
        return functional.fast_layer_norm(hidden_states, normalized_shape, weight, bias, eps)


class VarlenAttention(nn.Module):
    """Attention within each of several texts, with the arguments of `varlen_attention`."""

    forward = staticmethod(functional.varlen_attention)
    apply_function = staticmethod(functional.varlen_attention)


class MambaMixer:
    """Convolutions and state spaces of Mamba, with the arguments of mamba-ssm."""

    causal_conv1d_fn = staticmethod(mamba.causal_conv1d_fn)
    causal_conv1d_update = staticmethod(mamba.causal_conv1d_update)
    selective_state_update = staticmethod(mamba.selective_state_update)
    selective_scan_fn = staticmethod(mamba.selective_scan_fn)
