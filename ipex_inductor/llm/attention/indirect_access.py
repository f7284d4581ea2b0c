"""Attention over a cache that beams share: `beam_idx` says whose keys each beam goes on from.

A cache is a tuple (seq_info, key_cache, value_cache, beam_idx):

- seq_info: [1, tokens, tokens, 1]; its shape alone is read, the number of tokens so far.
- key_cache, value_cache: [positions, beams of all texts, key heads, width].
- beam_idx: [positions + 2, beams of all texts] of int64. After the token at position j, beam search
  writes into row j which row of the cache each beam follows. The two last rows hold the number of
  tokens of the prompt and the number of texts in their first column.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor.errors import ArgumentError
from ipex_inductor.ops.attention.indirect_attention import hide_later_keys, indirect_attention
from ipex_inductor.templates.cpu.paged_attention import register

register()
Buffers = tuple[Tensor, Tensor, Tensor]  # keys, values, beam_idx
Past = tuple[Tensor, Tensor, Tensor, Tensor]  # seq_info before them
NOTES = 2  # rows of beam_idx behind those of positions


def indirect_access_kv_cache_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale_attn: float,
    layer_past: Past | None = None,
    head_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    alibi: Tensor | None = None,
    add_casual_mask: bool = True,
    seq_info: Tensor | None = None,
    text_max_length: int = 0,
) -> tuple[Tensor, None, Past]:
    """Attend to a prompt or to the tokens behind it, and write keys and values into the cache.

    Args:
        query: [rows, tokens, heads, width]. The rows of a prompt may be texts; those of later
            tokens are the beams of all texts.
        key: [rows, tokens, key heads, width].
        value: as `key`.
        scale_attn: what scores are divided by.
        layer_past: the cache; None for a prompt whose rows are the beams. For a prompt of texts:
            (zeros(1, 0, 0, 1), any, any, beam_idx) with beam_idx [1, beams of all texts].
        head_mask: must be None.
        attention_mask: added to the scores, broadcasts to [rows, heads, tokens, tokens so far].
        alibi: added to the scores as well: of such a shape, or [rows * heads, 1, tokens so far].
        add_casual_mask: hide later tokens within a prompt. Behind it they are always hidden.
        seq_info: accepted; the shape in `layer_past` says it.
        text_max_length: positions to allocate. A cache that is full is copied into a larger one.

    Returns:
        The result [rows, heads, tokens, width], None, and the cache with these tokens.

    Raises:
        ArgumentError: for a head mask, and for shapes and dtypes that do not fit.
    """
    _check(query, key, value, head_mask, layer_past)
    tokens, heads = query.shape[1], query.shape[2]
    before = 0 if layer_past is None else layer_past[0].shape[-2]
    mask = _add_alibi(attention_mask, alibi, query.shape[0], heads)
    if before == 0:
        beams = query.shape[0] if layer_past is None else layer_past[3].shape[-1]
        buffers = _allocate(key, beams, text_max_length)
        _write_prompt(buffers, key, value)
        result = _attend_prompt(query, key, value, scale_attn, mask, add_casual_mask)
    else:
        assert layer_past is not None
        buffers = _grow(layer_past[1:], before + tokens)
        for cache, new in zip(buffers[:2], (key, value), strict=True):
            cache.narrow(0, before, tokens).copy_(new.transpose(0, 1))
        result = indirect_attention(query, *buffers, mask, before + tokens, 1 / scale_attn)
    count = before + tokens
    shape = buffers[2].new_zeros(1).expand(1, count, count, 1)
    return result.transpose(1, 2), None, (shape, *buffers)


def _check(
    query: Tensor, key: Tensor, value: Tensor, head_mask: Tensor | None, past: Past | None
) -> None:
    rows, tokens, heads, width = query.shape if query.dim() == 4 else (0, 0, 0, 0)
    if query.dim() != 4 or key.shape != value.shape or key.shape[:2] != (rows, tokens):
        raise ArgumentError(
            "a query, key and value of [rows, tokens, heads, width]",
            ", ".join(str(list(t.shape)) for t in (query, key, value)),
            "Pass the states of the same tokens, before heads and tokens are transposed.",
        )
    if key.shape[3] != width or heads % key.shape[2]:
        raise ArgumentError(
            f"keys of heads that divide {heads}, of width {width}",
            f"{key.shape[2]} heads of width {key.shape[3]}",
            "Pass heads of one width, in equal groups.",
        )
    if head_mask is not None:
        raise ArgumentError("head_mask=None", "a head mask", "Leave it out.")
    if past is not None and past[0].shape[-2] and past[3].shape[-1] != rows:
        raise ArgumentError(
            f"a token of each of {past[3].shape[-1]} beams",
            f"{rows} rows",
            "Repeat the tokens for each beam, or begin with a beam_idx of fewer beams.",
        )


def _add_alibi(mask: Tensor | None, alibi: Tensor | None, rows: int, heads: int) -> Tensor | None:
    """Return the sum of what is added to the scores, None for nothing."""
    if alibi is None:
        return mask
    if alibi.dim() == 3 and alibi.shape[0] == rows * heads:
        alibi = alibi.view(rows, heads, *alibi.shape[1:])
    if alibi.dim() != 4:
        raise ArgumentError(
            f"alibi of [{rows * heads}, 1, tokens so far], or of four dimensions",
            f"shape {list(alibi.shape)}",
            "Add it to attention_mask and leave it out.",
        )
    return alibi if mask is None else mask + alibi


def _allocate(key: Tensor, beams: int, text_max_length: int) -> Buffers:
    """Return an empty cache for beams of all texts, each text's in neighboring rows."""
    texts, tokens, heads, width = key.shape
    if beams % texts:
        raise ArgumentError(
            f"a beam_idx whose number of beams is divided by {texts} texts",
            f"{beams} beams",
            "Give each text the same number of beams.",
        )
    length = text_max_length if tokens <= text_max_length else text_max_length + tokens
    key_cache = key.new_zeros(length, beams, heads, width)
    row = torch.arange(beams, device=key.device)
    beam_idx = row.repeat(length + NOTES, 1)
    beam_idx[:tokens] = row - row % (beams // texts)  # all beams read the prompt of the first one
    beam_idx[length:] = 0
    beam_idx[length, 0], beam_idx[length + 1, 0] = tokens, texts
    return key_cache, torch.zeros_like(key_cache), beam_idx


def _write_prompt(buffers: Buffers, key: Tensor, value: Tensor) -> None:
    """Write a prompt of texts into the rows of all their beams."""
    beams = buffers[0].shape[1] // key.shape[0]
    for cache, new in zip(buffers[:2], (key, value), strict=True):
        cache[: key.shape[1]] = new.transpose(0, 1).repeat_interleave(beams, 1)


def _attend_prompt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale_attn: float,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """Return attention within a prompt, [rows, tokens, heads, width]."""
    groups = query.shape[2] // key.shape[2]
    k, v = (states.transpose(1, 2).repeat_interleave(groups, 1) for states in (key, value))
    tokens = query.shape[1]
    added = None if mask is None else mask.to(query.dtype)
    if is_causal and mask is not None:
        added = hide_later_keys(mask, tokens, tokens, query)
    result = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        k,
        v,
        added,
        is_causal=is_causal and mask is None,
        scale=1 / scale_attn,
    )
    return result.transpose(1, 2)


def _grow(buffers: Buffers, needed: int) -> Buffers:
    """Return buffers with at least `needed` positions: the same, or copies with twice as many."""
    key_cache, value_cache, beam_idx = buffers
    length = key_cache.shape[0]
    if needed <= length:
        return buffers
    more = max(length, needed - length)
    empty = key_cache.new_zeros(more, *key_cache.shape[1:])
    row = torch.arange(beam_idx.shape[1], device=beam_idx.device).expand(more, -1)
    rows = torch.cat((beam_idx[:length], row, beam_idx[length:]))
    return torch.cat((key_cache, empty)), torch.cat((value_cache, empty)), rows


class IndirectAccessKVCacheAttention(nn.Module):
    """Attention over a cache that beams share, with the arguments of the function.

    Args:
        text_max_length: positions of the cache that is allocated for a prompt.
    """

    def __init__(self, text_max_length: int = 2048) -> None:
        super().__init__()
        self.text_max_length = text_max_length

    apply_function = staticmethod(indirect_access_kv_cache_attention)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale_attn: float,
        layer_past: Past | None = None,
        head_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        alibi: Tensor | None = None,
        add_casual_mask: bool = True,
        seq_info: Tensor | None = None,
    ) -> tuple[Tensor, None, Past]:
        """Return what `indirect_access_kv_cache_attention` returns, which see."""
        others = layer_past, head_mask, attention_mask, alibi, add_casual_mask, seq_info
        return indirect_access_kv_cache_attention(
            query, key, value, scale_attn, *others, self.text_max_length
        )
