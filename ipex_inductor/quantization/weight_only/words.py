"""Layouts of quantized checkpoints: integers in words of 32 bits, zero points, orders of groups."""

import torch
from torch import Tensor

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant.weight_only import SYMMETRIC
from ipex_inductor.quantization.weight_only.storage import (
    QuantizedWeight,
    pack_nibbles,
    unpack_nibbles,
)

WORD = 32  # bits
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word, lowest first
TYPES = {4: "int4", 8: "int8"}  # by bits of a stored integer


def weight_type(bits: int) -> str:
    """Return the op's name of integers of so many bits.

    Raises:
        QuantizationError: for other widths than 4 and 8.
    """
    if bits not in TYPES:
        advice = "Quantize the model to 4 or 8 bits."
        raise QuantizationError("weights of 4 or 8 bits", f"{bits} bits", advice)
    return TYPES[bits]


def as_octets(words: Tensor) -> Tensor:
    """Return the bytes of words, [R, C] int32 to [R, 4 C] uint8, lowest first."""
    return words.reshape(-1).view(torch.uint8).view(len(words), -1)


def split_words(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers of words, [R, C] int32 to [R, C * 32 / bits] uint8.

    The lowest bits of a word come first.
    """
    octets = as_octets(words)
    return octets if bits == 8 else unpack_nibbles(octets, 2 * octets.shape[1])


def join_words(values: Tensor, bits: int) -> Tensor:
    """Return unsigned integers [R, C] as words, [R, C * bits / 32] int32, lowest bits first."""
    octets = values.to(torch.uint8) if bits == 8 else pack_nibbles(values)
    return octets.reshape(-1).view(torch.int32).view(len(octets), -1)


def sort_awq(values: Tensor) -> Tensor:
    """Return integers [R, N] of AWQ's words with their columns in order; N divides by 8."""
    rows, columns = values.shape
    in_words = values.view(rows, columns // 8, 8)
    inverse = torch.tensor(AWQ_COLUMNS).argsort().to(values.device)
    return in_words[:, :, inverse].reshape(rows, columns)


def build_weight(
    octets: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    g_idx: Tensor | None,
    bits: int,
    group_size: int,
    in_features: int,
) -> QuantizedWeight:
    """Return a quantized weight of the unsigned integers of a checkpoint.

    Args:
        octets: uint8 [N, K * bits / 8], two integers in a byte for 4 bits.
        scales: [N, G] in floating point.
        zero_points: integers [N, G] in the range of the unsigned weights, int32; None for their
            middle.
        g_idx: [K], the group of each column; None if they are in order.
        bits: 4 or 8.
        group_size: columns of a group; -1 is the whole row.
        in_features: K.

    Raises:
        QuantizationError: for zero points or groups that kernels do not serve.
    """
    weight_dtype = weight_type(bits)
    size = in_features if group_size == -1 else min(group_size, in_features)
    order = order_of_groups(g_idx, size, in_features)
    if order is not None:
        values = octets if bits == 8 else unpack_nibbles(octets, in_features)
        values = values[:, order.long()]
        octets = values if bits == 8 else pack_nibbles(values)
    weight = octets.contiguous()
    if bits == 8:
        weight = (weight ^ 128).view(torch.int8)
    quantized = QuantizedWeight(
        weight=weight,
        scales=scales.contiguous(),
        zeros=_store_zero_points(zero_points, weight_dtype),
        order=order,
        weight_dtype=weight_dtype,
        group_size=size,
        in_features=in_features,
    )
    quantized.check()
    return quantized


def _store_zero_points(zero_points: Tensor | None, weight_dtype: str) -> Tensor | None:
    """Return zero points in the dtype of the op, None if all are the middle of the range."""
    if zero_points is None:
        return None
    stored = zero_points.to(torch.int32)
    if weight_dtype == "int8":
        stored = stored - 128
    if bool((stored == SYMMETRIC[weight_dtype]).all()):
        return None
    limits = (-128, 127) if weight_dtype == "int8" else (0, 16)
    if bool((stored < limits[0]).any()) or bool((stored > limits[1]).any()):
        raise QuantizationError(
            f"zero points of {weight_dtype} weights within {limits[0]} and {limits[1]}",
            f"{int(stored.min())} to {int(stored.max())}",
            "Quantize the model symmetrically, or check the checkpoint's format (gptq, gptq_v2).",
        )
    return stored.to(torch.int8 if weight_dtype == "int8" else torch.uint8).contiguous()


def order_of_groups(g_idx: Tensor | None, group_size: int, columns: int) -> Tensor | None:
    """Return the order that sorts columns by their group, [K] int32; None if they are sorted.

    Args:
        g_idx: [K], the group of each column. All zeros and all -1 stand for sorted columns.
        group_size: columns of a group.
        columns: K.

    Raises:
        QuantizationError: if the groups have other sizes.
    """
    if g_idx is None or not bool((g_idx > 0).any()):
        return None
    groups = g_idx.to(torch.int64)
    expected = torch.arange(columns, device=groups.device) // group_size
    if torch.equal(groups, expected):
        return None
    order = torch.argsort(groups, stable=True)
    if groups.shape != expected.shape or not torch.equal(groups[order], expected):
        raise QuantizationError(
            f"g_idx with {group_size} columns in each group of {columns}",
            f"groups {int(groups.min())} to {int(groups.max())} of other sizes",
            "Check group_size of the checkpoint.",
        )
    return order.to(torch.int32)


def read_gptq(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None,
    g_idx: Tensor | None,
    bits: int,
    group_size: int,
    offset: int,
) -> QuantizedWeight:
    """Return the weight of a layer in GPTQ's layout.

    Args:
        qweight: int32 [K * bits / 32, N], packed along K.
        scales: [G, N].
        qzeros: int32 [G, N * bits / 32], packed along N; None for the middle of the range.
        g_idx: [K], or None.
        bits: 4 or 8.
        group_size: columns of a group; -1 is the whole row.
        offset: added to zero points: 1 in version 1 of the format, 0 in version 2.
    """
    columns, rows = qweight.shape[0] * WORD // bits, qweight.shape[1]
    zero_points = None
    if qzeros is not None:
        zero_points = split_words(qzeros, bits)[:, :rows].int().t() + offset
    octets = as_octets(qweight.t())
    return build_weight(octets, scales.t(), zero_points, g_idx, bits, group_size, columns)


def read_awq(
    qweight: Tensor, scales: Tensor, qzeros: Tensor | None, bits: int, group_size: int
) -> QuantizedWeight:
    """Return the weight of a layer in AWQ's layout.

    Args:
        qweight: int32 [K, N / 8], packed along N in the order of `AWQ_COLUMNS`.
        scales: [G, N].
        qzeros: int32 [G, N / 8], packed likewise; None for the middle of the range.
        bits: 4.
        group_size: columns of a group; -1 is the whole row.

    Raises:
        QuantizationError: for 8 bits, whose order AWQ does not define.
    """
    if bits != 4:
        advice = "Save 8-bit weights in GPTQ's layout."
        raise QuantizationError("AWQ's layout with 4 bits", f"{bits} bits", advice)
    values = sort_awq(split_words(qweight, bits))
    zero_points = None if qzeros is None else sort_awq(split_words(qzeros, bits)).int().t()
    octets = pack_nibbles(values.t())
    return build_weight(octets, scales.t(), zero_points, None, bits, group_size, qweight.shape[0])
