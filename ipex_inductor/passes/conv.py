"""Rules of the convolution family: conv2d x addend x activation, one table."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.ops import conv
from ipex_inductor.passes.packing import why_not
from ipex_inductor.passes.rule import ACTIVATIONS, Constant, Rule

reference: Callable[..., Tensor] = conv.reference


def _rule(addend: bool, unary: str) -> Rule:
    def pattern(*args: Any) -> Tensor:
        return reference(*args, unary)

    def replacement(*args: Any) -> Tensor:
        result: Tensor = torch.ops.ipex.conv(*args, unary, "")
        return result

    parts = ["conv2d"] + ["add"] * addend + [unary] * (unary != "none")
    return Rule(
        equation=f"{' + '.join(parts)} => ipex.conv",
        pattern=pattern,
        replacement=replacement,
        examples=tuple(functools.partial(_example, bias, addend) for bias in (True, False)),
        anchor="add" if unary == "none" else ACTIVATIONS[unary],
        when=_has_kernel,
    )


def _example(bias: bool, addend: bool) -> dict[str, Any]:
    """x [1, 34, 64, 64] and weight [68, 2, 3, 3] with a window of numbers met nowhere else."""
    window = {"stride": [2, 3], "padding": [5, 7], "dilation": [11, 13], "groups": 17}
    x, weight = torch.empty(1, 34, 64, 64), torch.empty(68, 2, 3, 3)
    tensors = {"x": x, "weight": weight, "bias": torch.empty(68) if bias else None}
    args: list[Any] = [x, weight, None, None, *window.values(), "none"]
    other = torch.empty_like(reference(*args)) if addend else None
    return {**tensors, "other": other, **{k: Constant(v) for k, v in window.items()}}


def _has_kernel(values: Mapping[str, Any]) -> str | None:
    x, other = values["x"], values["other"]
    if x.dim() != 4:
        return f"a convolution over {x.dim() - 2} dimensions: only two are fused so far"
    if other is not None and other.shape != conv.conv(**values, unary="none", packed="").shape:
        return "the addend is broadcast"
    return why_not(x, values["weight"], values["bias"], other)


RULES = (
    *(_rule(True, unary) for unary in ("relu", "none")),
    *(_rule(False, unary) for unary in ACTIVATIONS),
)
