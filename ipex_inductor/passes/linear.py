"""Rules of the linear family: linear x epilogue; linears over a batch are left to Inductor."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.passes.epilogue import Producer, family
from ipex_inductor.passes.packing import why_not_linear
from ipex_inductor.passes.rule import Form


def _fused(**arguments: Any) -> Tensor:
    result: Tensor = torch.ops.ipex.linear(**arguments, packed=False)
    return result


def _example(lead: tuple[int, ...], bias: bool) -> dict[str, Any]:
    """x [*lead, 16], weight [32, 16] and bias [32] or None: any sizes do."""
    return {
        "x": torch.empty(*lead, 16),
        "weight": torch.empty(32, 16),
        "bias": torch.empty(32) if bias else None,
    }


def _has_kernel(values: Mapping[str, Any]) -> str | None:
    tensors = (values["weight"], values["bias"], values.get("other"))
    return why_not_linear(values["x"], *tensors)


LINEAR = Producer(
    name="linear",
    product=F.linear,
    fused=_fused,
    forms=tuple(
        Form(frozenset({"addmm" if bias else "mm"}), functools.partial(_example, lead, bias))
        for lead in ((4,), (2, 4))
        for bias in (True, False)
    ),
    when=_has_kernel,
)

RULES = family(LINEAR)
