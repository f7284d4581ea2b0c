"""Attention over a cache in which beams read rows that other beams wrote."""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.errors import ArgumentError
from ipex_inductor.ops.common.defining import light_op


def _fake(query: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: Any) -> Tensor:
    check_indirect(query, key_cache, value_cache, *rest)
    return query.new_empty(query.shape)


@light_op(
    "indirect_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor parents,"
    " Tensor? mask, SymInt length, float scale) -> Tensor",
    _fake,
)
def indirect_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    parents: Tensor,
    mask: Tensor | None,
    length: int,
    scale: float,
) -> Tensor:
    """Return attention of the last tokens of beams over all keys so far.

    A beam wrote the last tokens itself. Key j of row r follows key j - 1 of row parents[j - 1, r].

    Args:
        query: [beams, tokens, heads, width], of the last tokens.
        key_cache: [positions, beams, key heads, width].
        value_cache: as `key_cache`.
        parents: [positions or more, beams] of int64.
        mask: added to the scores, broadcasts to [beams, heads, tokens, length]; or None.
        length: the number of keys, the last tokens included.
        scale: factor of the scores.

    Returns:
        [beams, tokens, heads, width].
    """
    check_indirect(query, key_cache, value_cache, parents, mask, length, scale)
    rows = trace_beams(parents, length, query.shape[1])
    return attend_rows(query, key_cache, value_cache, rows, mask, scale)


def trace_beams(parents: Tensor, length: int, tokens: int) -> Tensor:
    """Return the row in which each key of each beam was written, [beams, length].

    Args:
        parents: [positions or more, beams].
        length: the number of keys.
        tokens: the number of last keys that each beam wrote itself.
    """
    beams = parents.shape[1]
    rows = parents[:length].clone()
    live = rows[: length - tokens]
    if rows.device.type == "cpu" and ((live < 0) | (live >= beams)).any():
        raise_parents(beams)
    rows[length - tokens :] = torch.arange(beams, device=rows.device)
    step = 1
    while step < length:  # rows j to j + step - 1 are combined, then twice as many
        rows = torch.cat((rows[:-step].gather(1, rows[step:]), rows[-step:]))
        step *= 2
    return rows.t().contiguous()


def raise_parents(beams: int) -> NoReturn:
    """Raise `ArgumentError` for a parent that is no row of a cache of beams."""
    raise ArgumentError(
        f"rows 0 to {beams - 1} of the cache in beam_idx",
        "another number",
        "Write the row that each beam follows.",
    )


def attend_rows(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Return attention over the keys that `rows` [beams, keys] names, in plain ops of torch."""
    positions = torch.arange(rows.shape[1], device=rows.device)
    groups = query.shape[2] // key_cache.shape[2]
    k, v = (
        cache[positions, rows].transpose(1, 2).repeat_interleave(groups, 1)
        for cache in (key_cache, value_cache)
    )
    added = hide_later_keys(mask, query.shape[1], rows.shape[1], query)
    result = F.scaled_dot_product_attention(query.transpose(1, 2), k, v, added, scale=scale)
    return result.transpose(1, 2).contiguous()


def hide_later_keys(mask: Tensor | None, tokens: int, keys: int, query: Tensor) -> Tensor | None:
    """Return a mask in the dtype of the query which hides from each of the last tokens later keys.

    Args:
        mask: added to the scores, or None.
        tokens: the number of last tokens.
        keys: the number of keys.
        query: the query.
    """
    added = None if mask is None else mask.to(query.dtype)
    if tokens == 1:
        return added
    hidden = torch.full((tokens, keys), -torch.inf, dtype=query.dtype, device=query.device)
    causal = hidden.triu(1 + keys - tokens)
    return causal[None, None] if added is None else added + causal


def check_indirect(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    parents: Tensor,
    mask: Tensor | None,
    length: int,
    scale: float,
) -> None:
    """Raise `ArgumentError` if `indirect_attention` cannot read these."""
    beams, tokens, heads, width = query.shape
    if (
        key_cache.dim() != 4
        or key_cache.shape != value_cache.shape
        or key_cache.shape[1] != beams
        or key_cache.shape[3] != width
        or heads % key_cache.shape[2]
    ):
        raise ArgumentError(
            f"caches [positions, {beams}, key heads, {width}] whose key heads divide {heads}",
            f"{list(key_cache.shape)} and {list(value_cache.shape)}",
            "Pass the caches that the last call returned.",
        )
    if {key_cache.dtype, value_cache.dtype} != {query.dtype}:
        raise ArgumentError(
            f"caches in {query.dtype}, as the query",
            f"{key_cache.dtype} and {value_cache.dtype}",
            "Cast the query, key and value to the dtype of the caches.",
        )
    if parents.dtype is not torch.int64 or parents.dim() != 2 or parents.shape[1] != beams:
        raise ArgumentError(
            f"beam_idx [positions, {beams}] of torch.int64",
            f"{list(parents.shape)} of {parents.dtype}",
            "Write rows of the beam_idx that the last call returned in place.",
        )
    if mask is not None and (mask.dim() != 4 or mask.shape[3] not in (1, length)):
        raise ArgumentError(
            f"attention_mask that broadcasts to [{beams}, {heads}, {tokens}, {length}]",
            f"shape {list(mask.shape)}",
            "Pass an additive mask of four dimensions.",
        )
