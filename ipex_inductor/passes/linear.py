"""Rules of the linear family: producer x activation, one table."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ipex_inductor.ops.linear import UNARY
from ipex_inductor.passes.rule import Rule

# activation -> the ops its pattern needs whole
ACTIVATIONS = {"gelu": ("gelu",), "gelu_tanh": ("gelu",)}


def _examples(*lead: int) -> list[torch.Tensor]:
    """x [*lead, 16], weight [32, 16] and bias [32]: any sizes do."""
    return [torch.empty(*lead, 16), torch.empty(32, 16), torch.empty(32)]


@functools.cache
def _onednn_dtypes() -> frozenset[torch.dtype]:
    """The dtypes in which this CPU's oneDNN has a linear kernel (fp64 has none)."""
    supported = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        supported.add(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        supported.add(torch.float16)
    return frozenset(supported)


def _has_kernel(values: Mapping[str, Any]) -> str | None:
    x, weight, bias = values["x"], values["weight"], values["bias"]
    if x.device.type != "cpu":
        return f"no fused kernel for {x.device.type} yet: Inductor fuses the activation itself"
    if not (x.dtype == weight.dtype == bias.dtype and x.dtype in _onednn_dtypes()):
        return f"oneDNN has no linear kernel for {x.dtype} x {weight.dtype} on this CPU"
    if bias.dim() != 1:
        return f"the addend has {bias.dim()} dimensions, a bias has one"
    if any(isinstance(size, int) and size == 0 for size in (*x.shape, *weight.shape)):
        return "a size is zero"
    return None


def _rule(unary: str, whole: tuple[str, ...]) -> Rule:
    activation = UNARY[unary]

    def pattern(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return activation(F.linear(x, weight, bias))

    def replacement(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.ipex.linear_unary(x, weight, bias, unary)
        return result

    return Rule(
        equation=f"linear + {unary} => ipex.linear_unary",
        pattern=pattern,
        replacement=replacement,
        examples=tuple(functools.partial(_examples, *lead) for lead in ((4,), (2, 4))),
        whole=whole,
        when=_has_kernel,
    )


RULES = tuple(_rule(unary, whole) for unary, whole in ACTIVATIONS.items())
