"""`ipex::gated_linear`: two linear layers on one input, one of which opens the other."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.defining import op
from ipex_inductor.ops.epilogue import UNARY
from ipex_inductor.ops.few_rows import unrounded


def reference(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    gate_bias: Tensor | None,
    bias: Tensor | None,
    unary: str,
) -> Tensor:
    """`unary(linear(x, gate, gate_bias)) * linear(x, weight, bias)`, by one product.

    x [..., K], gate and weight [N, K], both biases [N] or neither -> [..., N]. What Shazeer 2020
    (arXiv:2002.05202) calls a gated linear unit.
    """
    biases = [each for each in (gate_bias, bias) if each is not None]
    joint = F.linear(x, torch.cat([gate, weight]), torch.cat(biases) if biases else None)
    opening, opened = torch.split(joint, [gate.shape[0], weight.shape[0]], -1)
    result: Tensor = UNARY[unary].fn(opening) * opened
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
    """The same of a matrix, rounded nowhere: x [M, K] -> [M, N] in fp32, of fp64 in fp64.

    `tile` is for the template (`templates/triton/glu.py`). This is the reference.
    """
    wide = unrounded(x)
    gate_bias, bias = (t if t is None else t.to(wide) for t in (gate_bias, bias))
    return reference(x.to(wide), gate.to(wide), weight.to(wide), gate_bias, bias, unary)


def _empty(x: Tensor, gate: Tensor, *rest: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], gate.shape[0]))


def _empty_rows(x: Tensor, gate: Tensor, *rest: object) -> Tensor:
    return x.new_empty((x.shape[0], gate.shape[0]), dtype=unrounded(x))


op("gated_linear")(reference).register_fake(_empty)
op("gated_rows")(rows).register_fake(_empty_rows)
