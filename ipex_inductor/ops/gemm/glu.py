"""`ipex::gated_linear`: two linear layers on one input, one of which gates the other (GLU)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common.defining import op
from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.ops.gemm.skinny import sum_dtype


def reference(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    gate_bias: Tensor | None,
    bias: Tensor | None,
    unary: str,
) -> Tensor:
    """Return `unary(linear(x, gate, gate_bias)) * linear(x, weight, bias)`, by one GEMM.

    A gated linear unit of Shazeer 2020 (arXiv:2002.05202).

    Args:
        x: [..., K].
        gate: weight of the gate, [N, K].
        weight: [N, K].
        gate_bias: [N]; None if `bias` is.
        bias: [N]; None if `gate_bias` is.
        unary: name in `ops/common/epilogue.py`.

    Returns:
        [..., N].
    """
    biases = [vector for vector in (gate_bias, bias) if vector is not None]
    joint = F.linear(x, torch.cat([gate, weight]), torch.cat(biases) if biases else None)
    gates, values = torch.split(joint, [gate.shape[0], weight.shape[0]], -1)
    result: Tensor = UNARY[unary].fn(gates) * values
    return result


def rows(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    gate_bias: Tensor | None,
    bias: Tensor | None,
    unary: str,
    tile: list[int],
) -> Tensor:
    """Return the gated linear unit of a matrix without rounding, in fp32 (fp64 for fp64).

    This is the reference of the template (`templates/triton/glu.py`).

    Args:
        x: [M, K].
        gate: weight of the gate, [N, K].
        weight: [N, K].
        gate_bias: [N]; None if `bias` is.
        bias: [N]; None if `gate_bias` is.
        unary: name in `ops/common/epilogue.py`.
        tile: parameters of the template.

    Returns:
        [M, N].
    """
    wide = sum_dtype(x)
    gate_bias, bias = (t if t is None else t.to(wide) for t in (gate_bias, bias))
    return reference(x.to(wide), gate.to(wide), weight.to(wide), gate_bias, bias, unary)


def _empty(x: Tensor, gate: Tensor, *rest: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], gate.shape[0]))


def _empty_rows(x: Tensor, gate: Tensor, *rest: object) -> Tensor:
    return x.new_empty((x.shape[0], gate.shape[0]), dtype=sum_dtype(x))


op("gated_linear")(reference).register_fake(_empty)
op("gated_rows")(rows).register_fake(_empty_rows)
