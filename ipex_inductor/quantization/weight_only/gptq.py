"""GPTQ: rounding of one weight so that errors of the layer's outputs cancel.

"GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv
2210.17323. Columns are rounded one after the other, and each error is spread over the columns that
follow, by the Cholesky factor of the inverse Hessian of the squared output error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant.weight_only import INTEGERS, NIBBLES, STORED
from ipex_inductor.quantization.weight_only.rounding import (
    compute_steps,
    compute_zero_points,
    dequantize_groups,
    round_groups,
    store_scales,
)
from ipex_inductor.quantization.weight_only.storage import QuantizedWeight, pack_nibbles

COLUMNS = 128  # rounded before their errors are spread over all columns that follow
SHARES = tuple(1 - step / 40 for step in range(13))  # of a group's range, down to 0.7
MOST_DAMPING = 1.0  # of the mean of the diagonal, beyond which a Hessian is refused


@dataclass(frozen=True)
class GPTQSettings:
    """Settings of GPTQ.

    `percdamp` is added to the diagonal of the Hessian, as a share of its mean. With `act_order`
    columns are rounded in the order of falling diagonals, and groups count in this order. With
    `search` the range of a group is the share of `SHARES` with the least error.
    """

    weight_dtype: str = "int4"
    group_size: int = 128
    symmetric: bool = False
    percdamp: float = 0.01
    act_order: bool = False
    search: bool = True


class Hessian:
    """The sum of x^T x over rows of activations of a layer, [K, K] in fp32, and their number."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.total = torch.zeros(columns, columns, device=device)
        self.rows = 0

    def add(self, gram: Tensor, rows: int) -> None:
        """Add a product x^T x of so many rows."""
        self.total += gram
        self.rows += rows


@torch.no_grad()
def round_by_gptq(weight: Tensor, hessian: Tensor, settings: GPTQSettings) -> QuantizedWeight:
    """Return a weight rounded by GPTQ.

    A column whose activations are all zero is rounded to nearest.

    Args:
        weight: [N, K] in floating point.
        hessian: [K, K], the sum of x^T x over rows x of activations. It is not changed.
        settings: of GPTQ.

    Raises:
        QuantizationError: for a weight or a Hessian with NaN or infinite values.
    """
    if not bool(torch.isfinite(hessian).all()):
        advice = "Check the calibration data, and the model's outputs in this dtype."
        raise QuantizationError("finite activations", "NaN or infinite ones", advice)
    weight, columns = weight.detach().float(), weight.shape[1]
    size = columns if settings.group_size == -1 else min(settings.group_size, columns)
    diagonal = hessian.diagonal()
    order = None
    if settings.act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
        weight, hessian = weight[:, order], hessian[order][:, order]
    factor = factorize_inverse(hessian, settings.percdamp)
    work = weight.clone()
    parts = [
        _round_group(work, factor, first, min(first + size, columns), settings)
        for first in range(0, columns, size)
    ]
    scales = torch.cat([scale for _, scale, _ in parts], 1)
    zeros = torch.cat([zero for _, _, zero in parts], 1)
    values = torch.cat([value for value, _, _ in parts], 1)
    if order is not None and size == columns:  # one scale a row: any order of columns will do
        values, order = values[:, order.argsort()], None
    name = settings.weight_dtype
    has_zeros = name in INTEGERS and not settings.symmetric
    return QuantizedWeight(
        weight=pack_nibbles(values) if name in NIBBLES else values.to(STORED[name]),
        scales=scales,
        zeros=zeros.to(INTEGERS[name]) if has_zeros else None,
        order=None if order is None else order.to(torch.int32),
        weight_dtype=name,
        group_size=size,
        in_features=columns,
    )


def factorize_inverse(hessian: Tensor, percdamp: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a damped Hessian, [K, K] in fp32.

    Damping grows tenfold while the matrix is not positive definite in fp32.

    Raises:
        QuantizationError: if damping by the whole mean of the diagonal is not enough.
    """
    damped = hessian.double() if hessian.shape[0] <= COLUMNS else hessian.clone()
    unused = damped.diagonal() == 0
    damped.diagonal()[unused] = 1
    mean = damped.diagonal().mean()
    share = max(percdamp, 1e-6)
    while share <= MOST_DAMPING:
        shifted = damped.clone()
        shifted.diagonal().add_(share * mean)
        lower, failure = torch.linalg.cholesky_ex(shifted)
        if not int(failure):
            inverse = torch.cholesky_inverse(lower)
            upper, failure = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failure):
                result: Tensor = upper.float()
                return result
        share *= 10
    raise QuantizationError(
        "a Hessian that damping makes positive definite",
        "one that is not",
        "Pass more calibration data, or leave this layer in floating point.",
    )


def _round_group(
    work: Tensor, factor: Tensor, first: int, last: int, settings: GPTQSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Round one group of columns and spread the errors; return integers, scales, zero points.

    Args:
        work: [N, K]; columns behind the group are changed.
        factor: of `factorize_inverse`.
        first: first column of the group.
        last: the column behind it.
        settings: of GPTQ.
    """
    name = settings.weight_dtype
    group = work[:, first:last].unsqueeze(1)
    steps, low = compute_steps(group, name, settings.symmetric)
    whole_row = last - first == work.shape[1]
    if settings.search:
        importance = factor.diagonal()[first:last].square().reciprocal()
        share = _search_range(group, steps, low, importance, settings)
        steps, low = steps * share, low * share
    scales = store_scales(steps, name, whole_row)
    zeros = compute_zero_points(low, scales, name, settings.symmetric)
    integers = torch.empty(work.shape[0], last - first, dtype=STORED[name], device=work.device)
    for start in range(first, last, COLUMNS):
        stop = min(start + COLUMNS, last)
        errors = torch.empty(work.shape[0], stop - start, device=work.device)
        for column in range(start, stop):
            exact = work[:, column]
            stored = round_groups(exact.view(-1, 1, 1), scales, zeros, name)
            value = dequantize_groups(stored, scales, zeros, name).view(-1)
            error = (exact - value) / factor[column, column]
            work[:, column:stop] -= torch.outer(error, factor[column, column:stop])
            integers[:, column - first] = stored.view(-1)
            errors[:, column - start] = error
        work[:, stop:] -= errors @ factor[start:stop, stop:]
    return integers, scales, zeros


def _search_range(
    group: Tensor, steps: Tensor, low: Tensor, importance: Tensor, settings: GPTQSettings
) -> Tensor:
    """Return the share of its range with which each row of a group is rounded best, [N, 1].

    A narrower range rounds large weights worse and all others better.

    Args:
        group: [N, 1, group_size].
        steps: scales of the whole range, [N, 1].
        low: lowest values, [N, 1].
        importance: [group_size], the output error of a unit error in each column.
        settings: of GPTQ.
    """
    name = settings.weight_dtype
    best = torch.ones_like(steps)
    least = torch.full_like(steps, torch.inf)
    for share in SHARES:
        scales = store_scales(steps * share, name, whole_row=True)
        zeros = compute_zero_points(low * share, scales, name, settings.symmetric)
        values = dequantize_groups(round_groups(group, scales, zeros, name), scales, zeros, name)
        error = ((values - group).square() * importance).sum(2)
        is_better = error < least
        least = torch.where(is_better, error, least)
        best = torch.where(is_better, share, best)
    return best
