"""Quantized weights as tensors: packed nibbles, groups of K, and the values that they stand for."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant.weight_only import (
    FLOATS,
    INTEGERS,
    NIBBLES,
    STORED,
    Scheme,
    dequantize_weight,
)

WITH_ZEROS = tuple(INTEGERS)


@dataclass(frozen=True)
class QuantizedWeight:
    """The tensors of a quantized weight, as `ipex::weight_only_linear` reads them.

    weight: [N, K] int8 or E4M3, or [N, ceil(K / 2)] uint8 with k = 2j in the low nibble of byte j.
    scales: [N, G] in fp32, fp16 or bf16.
    zeros: [N, G] int8 or uint8, None for symmetric weights.
    order: [K] int32, the column of the activation that column k of the weight multiplies; or None.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    weight_dtype: str
    group_size: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        tensors = (self.weight, self.scales, self.zeros, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def check(self) -> None:
        """Raise `QuantizationError` if shapes or dtypes do not go together."""
        rows, columns = self.weight.shape[0], self.in_features
        groups = count_groups(columns, self.group_size)
        stored_columns = -(-columns // 2) if self.weight_dtype in NIBBLES else columns
        zeros_dtype = INTEGERS.get(self.weight_dtype)
        rules: dict[str, tuple[Tensor | None, tuple[int, ...], tuple[Any, ...]]] = {
            "weight": (self.weight, (rows, stored_columns), (STORED[self.weight_dtype],)),
            "scales": (self.scales, (rows, groups), FLOATS),
            "zeros": (self.zeros, (rows, groups), (zeros_dtype,)),
            "order": (self.order, (columns,), (torch.int32,)),
        }
        for name, (tensor, shape, dtypes) in rules.items():
            if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype not in dtypes):
                raise QuantizationError(
                    f"{name} {list(shape)} in {' or '.join(map(str, dtypes))} for"
                    f" {self.weight_dtype} weights in groups of {self.group_size}",
                    f"{list(tensor.shape)} in {tensor.dtype}",
                    "Check in_features, group_size and the weight's type.",
                )


def count_groups(columns: int, group_size: int) -> int:
    """Return the number of groups of a row; the last may be shorter."""
    return -(-columns // group_size)


def pack_nibbles(values: Tensor) -> Tensor:
    """Return integers [N, K] of 0 to 15 as uint8 [N, ceil(K / 2)], even k in the low nibbles."""
    values = values.to(torch.uint8)
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return values[:, 0::2] | (values[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor, columns: int) -> Tensor:
    """Return the integers [N, columns] in uint8 of packed nibbles [N, ceil(columns / 2)]."""
    pairs = torch.stack((packed & 15, packed >> 4), dim=2)
    return pairs.flatten(1)[:, :columns]


def dequantize(quantized: QuantizedWeight) -> Tensor:
    """Return the weight in fp32, [N, K], its columns in the order of the activation's."""
    values = dequantize_weight(
        quantized.weight,
        quantized.scales,
        quantized.zeros,
        Scheme(quantized.weight_dtype, quantized.group_size, "float32"),
        quantized.in_features,
    )
    if quantized.order is None:
        return values
    in_order = torch.empty_like(values)
    in_order[:, quantized.order.long()] = values
    return in_order
