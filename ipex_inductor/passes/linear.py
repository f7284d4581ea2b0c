"""Rules of the linear family: linear x activation, one table."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.ops import linear
from ipex_inductor.passes.packing import why_not_linear
from ipex_inductor.passes.rule import ACTIVATIONS, Rule


def _rule(unary: str) -> Rule:
    def pattern(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear.reference(x, weight, bias, unary)

    def replacement(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.ipex.linear(x, weight, bias, unary, False)
        return result

    return Rule(
        equation=f"linear + {unary} => ipex.linear",
        pattern=pattern,
        replacement=replacement,
        examples=tuple(
            functools.partial(_example, lead, bias)
            for lead in ((4,), (2, 4))
            for bias in (True, False)
        ),
        anchor=ACTIVATIONS[unary],
        when=_has_kernel,
    )


def _example(lead: tuple[int, ...], bias: bool) -> dict[str, Any]:
    """x [*lead, 16], weight [32, 16] and bias [32] or None: any sizes do."""
    return {
        "x": torch.empty(*lead, 16),
        "weight": torch.empty(32, 16),
        "bias": torch.empty(32) if bias else None,
    }


def _has_kernel(values: Mapping[str, Any]) -> str | None:
    return why_not_linear(values["x"], values["weight"], values["bias"])


RULES = tuple(map(_rule, ACTIVATIONS))
