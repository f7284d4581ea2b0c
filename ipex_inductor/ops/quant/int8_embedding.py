"""Embedding bags on a table of 8-bit rows, each of which has a scale."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments, fake, op

MODES = ("sum", "mean", "max")  # by torch's numbers


@op("int8_embedding_bag")
def int8_embedding_bag(
    table: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    words: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """Return the sums, means or maxima of rows `table[i] * scales[i]` of each bag.

    Args:
        table: [rows, columns] in int8.
        scales: [rows] in fp32.
        indices: [count], int32 or int64.
        offsets: [bags] or, with an end of the last bag, [bags + 1], of the dtype of the indices.
        sample_weights: [count] in fp32, multiplied with the rows of sums; or None.
        words: 0 for sums, 1 for means, 2 for maxima; whether the last offset is the end of the last
            bag; and the row that counts for nothing, or -1.
        dtype: of the result, fp32 or bf16.

    Returns:
        [bags, columns]; zeros for bags without rows.
    """
    mode, includes_last, padding_idx = words
    used, places = torch.unique(indices, return_inverse=True)
    rows = table[used].float() * scales[used, None]
    padding = (used == padding_idx).nonzero().flatten().tolist() if padding_idx >= 0 else []
    bags: Tensor = F.embedding_bag(
        places.to(offsets.dtype),
        rows,
        offsets,
        mode=MODES[mode],
        per_sample_weights=sample_weights,
        include_last_offset=bool(includes_last),
        padding_idx=padding[0] if padding else None,
    )
    return bags.to(dtype)


@fake(int8_embedding_bag)
def _(call: Arguments) -> object:
    bags = call.offsets.shape[0] - call.words[1]
    return call.scales.new_empty((bags, call.table.shape[1]), dtype=call.dtype)
