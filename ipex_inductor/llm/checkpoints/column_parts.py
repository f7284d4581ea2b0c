"""Parts of layers whose columns have groups in another order: all scales, and some columns.

Tensor parallelism cuts such layers along K. A part has columns of any groups, and as many of each
as it happens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ipex_inductor.errors import CheckpointError, QuantizationError
from ipex_inductor.quantization.weight_only.words import order_of_groups, split_words


def select_groups(tensors: Mapping[str, Tensor], group_size: int) -> dict[str, Tensor] | None:
    """Return the tensors with the scales of their own groups alone, None for parts of groups.

    Args:
        tensors: `qweight`, `scales`, `g_idx` and perhaps `qzeros`, in GPTQ's layout.
        group_size: columns of a group.
    """
    used, renumbered = torch.unique(tensors["g_idx"], return_inverse=True)
    try:
        order_of_groups(renumbered, group_size, len(renumbered))
    except QuantizationError:
        return None
    rows = {key: tensors[key][used] for key in ("scales", "qzeros") if key in tensors}
    return {**tensors, **rows, "g_idx": renumbered}


def dequantize_columns(tensors: Mapping[str, Tensor], bits: int, offset: int) -> Tensor:
    """Return the weight in fp32, [N, K], of columns of any groups.

    Args:
        tensors: as of `select_groups`.
        bits: of a stored integer.
        offset: added to zero points.
    """
    groups = tensors["g_idx"].long()
    stored = split_words(tensors["qweight"].t().contiguous(), bits).float()
    scales = tensors["scales"].t()
    zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.float32)
    if "qzeros" in tensors:
        zeros = split_words(tensors["qzeros"], bits)[:, : len(stored)].t().float() + offset
    return (stored - zeros[:, groups]) * scales.float()[:, groups]


def check_groups(name: str, g_idx: Tensor, groups: int) -> None:
    """Raise `CheckpointError` for columns of groups that have no scales."""
    if bool((g_idx < 0).any()) or bool((g_idx >= groups).any()):
        came = f"groups {int(g_idx.min())} to {int(g_idx.max())}"
        raise CheckpointError(f"groups of {name} below {groups}", came, "Check the checkpoint.")
