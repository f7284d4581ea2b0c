"""Rounding of weights to nearest: integers, NF4 and FP8, in groups along K."""

import torch
from torch import Tensor

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant.weight_only import INTEGERS, NF4, NIBBLES, STORED, SYMMETRIC
from ipex_inductor.quantization.weight_only.storage import (
    WITH_ZEROS,
    QuantizedWeight,
    count_groups,
    pack_nibbles,
)

LIMITS = {"int8": (-128, 127), "int4": (0, 15)}
E4M3_MAX = 448.0
# Scales of groups are fp16 where they are normal numbers of it, else of this dtype. Half a step of
# bf16 (2^-9) of the range is a whole step of int8, but little beside a step of the others.
WIDE_SCALES = {
    "int8": torch.float32,
    "int4": torch.bfloat16,
    "nf4": torch.bfloat16,
    "fp8": torch.bfloat16,
}
CHUNK = 1 << 24  # weights that are rounded at once: 64 MiB in fp32


def round_to_nearest(
    weight: Tensor, weight_dtype: str, group_size: int = -1, symmetric: bool = True
) -> QuantizedWeight:
    """Return a weight rounded to nearest, with a scale for each group of a row.

    Scales are rounded up to the dtype in which they are stored before weights are divided by them,
    so a range is always covered.

    Args:
        weight: [N, K] in floating point.
        weight_dtype: "int8", "int4", "nf4" or "fp8".
        group_size: weights of a row that share a scale; -1 is the whole row.
        symmetric: without zero points. NF4 and FP8 have none.

    Raises:
        QuantizationError: for a weight with NaN or infinite values, or without any.
    """
    if weight.dim() != 2 or weight.numel() == 0:
        advice = "Leave this layer in floating point."
        raise QuantizationError("a weight [N, K]", f"one of shape {list(weight.shape)}", advice)
    weight = weight.detach()
    rows, columns = weight.shape
    size = columns if group_size == -1 else min(group_size, columns)
    chunks = torch.split(weight, max(CHUNK // columns, 1))
    steps = [compute_steps(split_groups(c.float(), size), weight_dtype, symmetric) for c in chunks]
    scales = store_scales(torch.cat([scale for scale, _ in steps]), weight_dtype)
    width = -(-columns // 2) if weight_dtype in NIBBLES else columns
    values = torch.empty(rows, width, dtype=STORED[weight_dtype], device=weight.device)
    zeros = None
    if not symmetric and weight_dtype in WITH_ZEROS:
        dtype = INTEGERS[weight_dtype]
        zeros = torch.empty(rows, scales.shape[1], dtype=dtype, device=weight.device)
    first = 0
    for chunk, (_, low) in zip(chunks, steps, strict=True):
        part = slice(first, first + len(chunk))
        groups = split_groups(chunk.float(), size)
        zero_points = compute_zero_points(low, scales[part], weight_dtype, symmetric)
        integers = round_groups(groups, scales[part], zero_points, weight_dtype).flatten(1)
        integers = integers[:, :columns]
        values[part] = pack_nibbles(integers) if weight_dtype in NIBBLES else integers
        if zeros is not None:
            zeros[part] = zero_points.to(zeros.dtype)
        first += len(chunk)
    return QuantizedWeight(values, scales, zeros, None, weight_dtype, size, columns)


def split_groups(weight: Tensor, group_size: int) -> Tensor:
    """Return a weight [N, K] as groups [N, G, group_size], zeros behind the last of a row."""
    columns = weight.shape[1]
    padding = count_groups(columns, group_size) * group_size - columns
    if padding:
        weight = torch.nn.functional.pad(weight, (0, padding))
    return weight.view(weight.shape[0], -1, group_size)


def compute_steps(groups: Tensor, weight_dtype: str, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return exact scales and lowest values, [N, G] each; ranges contain zero.

    Args:
        groups: [N, G, group_size] in fp32.
        weight_dtype: name of the stored type.
        symmetric: without zero points.

    Raises:
        QuantizationError: for values that are NaN or infinite.
    """
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    if not bool(torch.isfinite(high - low).all()):
        advice = "Repair the weight, or leave this layer in floating point."
        raise QuantizationError("finite weights", "NaN or infinite ones", advice)
    largest = torch.maximum(high, -low)
    if weight_dtype == "nf4":
        return largest, low
    if weight_dtype == "fp8":
        return largest / E4M3_MAX, low
    levels = LIMITS[weight_dtype][1] - LIMITS[weight_dtype][0]
    return (2 * largest if symmetric else high - low) / levels, low


def store_scales(scales: Tensor, weight_dtype: str, whole_row: bool | None = None) -> Tensor:
    """Return scales [N, G] rounded up to the dtype in which they are stored.

    One scale a row is kept in fp32. Groups of zeros get the scale 1.

    Args:
        scales: [N, G] in fp32.
        weight_dtype: name of the stored type.
        whole_row: whether a row has one scale; None for what the shape says.
    """
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    if scales.shape[1] == 1 if whole_row is None else whole_row:
        return scales
    half = torch.finfo(torch.float16)
    is_half = bool(((scales >= half.tiny) & (scales <= half.max / 2)).all())
    return round_up(scales, torch.float16 if is_half else WIDE_SCALES[weight_dtype])


def round_up(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return positive fp32 numbers rounded up to numbers of a dtype of 16 bits, or as they are."""
    nearest = values.to(dtype)
    if dtype is torch.float32:
        return nearest
    bits = nearest.view(torch.int16)
    return torch.where(nearest.float() < values, bits + 1, bits).view(dtype)


def compute_zero_points(low: Tensor, scales: Tensor, weight_dtype: str, symmetric: bool) -> Tensor:
    """Return the integers that stand for zero, [N, G] in fp32; zeros for NF4 and FP8.

    Args:
        low: lowest values, [N, G].
        scales: of `store_scales`, [N, G].
        weight_dtype: name of the stored type.
        symmetric: without zero points of their own.
    """
    if symmetric or weight_dtype not in WITH_ZEROS:
        return torch.full_like(low, SYMMETRIC.get(weight_dtype, 0))
    smallest, largest = LIMITS[weight_dtype]
    return (smallest - torch.round(low / scales.float())).clamp(smallest, largest)


def round_groups(groups: Tensor, scales: Tensor, zero_points: Tensor, weight_dtype: str) -> Tensor:
    """Return what is stored for weights in groups, of the same shape.

    Args:
        groups: [N, G, group_size] in fp32.
        scales: [N, G], as they are stored.
        zero_points: [N, G] in fp32.
        weight_dtype: name of the stored type.
    """
    quotients = groups / scales.float().unsqueeze(2)
    if weight_dtype == "fp8":
        return quotients.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    if weight_dtype == "nf4":
        table = torch.tensor(NF4, device=groups.device)
        return torch.bucketize(quotients, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    rounded = torch.round(quotients) + zero_points.unsqueeze(2)
    return rounded.clamp(*LIMITS[weight_dtype]).to(STORED[weight_dtype])


def dequantize_groups(
    stored: Tensor, scales: Tensor, zero_points: Tensor, weight_dtype: str
) -> Tensor:
    """Return the values of what `round_groups` returned, in fp32.

    Args:
        stored: [N, G, group_size].
        scales: [N, G], as they are stored.
        zero_points: [N, G] in fp32.
        weight_dtype: name of the stored type.
    """
    if weight_dtype == "nf4":
        values = torch.tensor(NF4, device=stored.device)[stored.int()]
    else:
        values = stored.float() - zero_points.unsqueeze(2)
    return values * scales.float().unsqueeze(2)
