"""Attention over a cache in pages, and writing into one.

`ipex::paged_write` and `ipex::paged_attention` write into arguments. This file has the reference in
plain torch, for every device. `templates/cpu/paged_attention.py` registers the kernel for CPUs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.attention.paged_checks import (
    FP8,
    SMALL,
    Cache,
    Call,
    Heads,
    Settings,
    check_slots,
    check_write,
    find_fault,
    raise_fault,
    read_call,
)
from ipex_inductor.ops.common.defining import light_op

CHUNK = 256  # queries of a text whose scores are computed at once


def quantize(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return `x` as entries of a cache: divided by the scale and rounded if they have 8 bits.

    Args:
        x: keys or values.
        dtype: dtype of the cache.
        scale: what an entry is multiplied by when it is read.
    """
    if dtype not in SMALL:
        return x.to(dtype)
    exact = x.float() / scale
    if dtype is torch.int8:
        return exact.round().clamp(-128, 127).to(dtype)
    largest = torch.finfo(dtype).max
    return exact.clamp(-largest, largest).to(dtype)


def _as_bytes(x: Tensor) -> Tensor:
    """Return a view of FP8 tensors as bytes, which indexing takes on every device."""
    return x.view(torch.uint8) if x.dtype in FP8 else x


def _fake_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *_: Any
) -> None:
    check_write(key, value, key_cache, value_cache, slots)


@light_op(
    "paged_write(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slots, float k_scale, float v_scale) -> ()",
    _fake_write,
)
def paged_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Write keys and values of tokens into their slots of a cache in pages.

    Args:
        key: [tokens, key heads, width].
        value: [tokens, key heads, width].
        key_cache: [blocks, key heads, block size, width], of the dtype of `key`, FP8 or int8.
        value_cache: as `key_cache`.
        slots: [tokens] of integers: block * block size + row. Tokens of negative slots are skipped.
        k_scale: what keys with 8 bits are multiplied by when they are read.
        v_scale: what values with 8 bits are multiplied by.

    Raises:
        ArgumentError: for shapes, dtypes, and on CPUs for slots behind the last one.
    """
    check_write(key, value, key_cache, value_cache, slots)
    if not slots.numel():
        return
    size = key_cache.shape[2]
    if slots.device.type == "cpu":
        check_slots(slots, key_cache.shape[0] * size)
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        _write_rows(quantize(new, cache.dtype, scale), cache, slots.long(), size)


def _write_rows(entries: Tensor, cache: Tensor, slots: Tensor, size: int) -> None:
    """Write entries of tokens with a slot, without a copy of the slots to the host."""
    target, entries = _as_bytes(cache), _as_bytes(entries)
    has_slot = slots >= 0
    # Tokens without a slot repeat the first one that has a slot, so all of them write the same.
    numbers = torch.arange(len(slots), device=slots.device)
    token = torch.where(has_slot, numbers, has_slot.byte().argmax())
    chosen, new = slots[token], entries[token]
    if_any = chosen >= 0
    chosen = chosen.clamp_min(0)
    block, row = chosen // size, chosen % size
    new = torch.where(if_any[:, None, None], new, target[block, :, row])
    target[block, :, row] = new


def _fake_attention(*arguments: Any) -> None:
    read_call(arguments)


@light_op(
    "paged_attention(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache,"
    " Tensor? head_mapping, Tensor tables, Tensor lengths, Tensor? starts, Tensor? slopes,"
    " SymInt longest, float scale, float k_scale, float v_scale, float softcap, int before,"
    " int behind) -> ()",
    _fake_attention,
)
def paged_attention(*arguments: Any) -> None:
    """Write attention of queries over the pages of their texts, as `Call` describes it, to `out`.

    Args:
        arguments: those of the schema; the fields of `Call`, `Cache`, `Heads` and `Settings`.
    """
    compute_reference(read_call(arguments))


def compute_reference(call: Call) -> None:
    """Write `ipex::paged_attention` in plain ops of torch."""
    out, query, cache, heads, starts, longest, settings = call
    if query.device.type == "cpu":
        raise_fault(find_fault(call))
    size = cache.keys.shape[2]
    if starts is None:
        live = cache._replace(tables=cache.tables[:, : -(-longest // size)])
        result = _attend_pages(query[:, None], live, heads, cache.lengths - 1, settings)
        out.copy_(result[:, 0])
        return
    begins = starts.tolist()
    for text, length in enumerate(cache.lengths.tolist()):
        for first in range(begins[text], begins[text + 1], CHUNK):
            last = min(first + CHUNK, begins[text + 1])
            place = length - (begins[text + 1] - first)
            page = max(0, place - settings.before) // size if settings.before >= 0 else 0
            tables = cache.tables[text : text + 1, page : -(-length // size)]
            lengths = cache.lengths[text : text + 1] - page * size
            live, places = Cache(*cache[:2], tables, lengths), lengths - (length - place)
            result = _attend_pages(query[None, first:last], live, heads, places, settings)
            out[first:last] = result[0]


def _attend_pages(
    query: Tensor, cache: Cache, heads: Heads, places: Tensor, settings: Settings
) -> Tensor:
    """Return attention of queries [texts, tokens, heads, width] over all pages of a cache.

    Args:
        query: the queries.
        cache: the cache.
        heads: key head and slope of each head.
        places: [texts], the place of the first query among the keys.
        settings: factors and limits of the scores.
    """
    pages = [gather_pages(t, cache.tables, cache.lengths) for t in cache[:2]]
    k, v = (_spread_heads(t.to(query.dtype), query.shape[2], heads.mapping) for t in pages)
    position = torch.arange(k.shape[2], device=k.device)
    token = torch.arange(query.shape[1], device=k.device)
    distance = position - (places[:, None, None] + token[:, None])
    visible = _see(distance, settings) & (position < cache.lengths[:, None, None])
    added = torch.zeros((), device=k.device)
    if heads.slopes is not None:
        added = heads.slopes[:, None, None].float() * -distance[:, None].abs()
    mask = torch.where(visible[:, None], added, -torch.inf)
    factors = list_factors(cache.keys.dtype, settings)
    result = _weigh(query.transpose(1, 2), k, v, mask, factors[0], settings.softcap)
    result = torch.where(visible.any(-1)[:, None, :, None], result, 0)
    return (result * factors[1]).transpose(1, 2)


def _see(distance: Tensor, settings: Settings) -> Tensor:
    """Return whether keys at distances from a query's own place are seen."""
    visible = torch.ones_like(distance, dtype=torch.bool)
    if settings.before >= 0:
        visible = visible & (distance >= -settings.before)
    return visible & (distance <= settings.behind) if settings.behind >= 0 else visible


def list_factors(dtype: torch.dtype, settings: Settings) -> tuple[float, float]:
    """Return the factors of scores and of values of a cache in `dtype`."""
    if dtype in SMALL:
        return settings.scale * settings.k_scale, settings.v_scale
    return settings.scale, 1.0


def _weigh(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Return attention of [texts, heads, tokens, width]; rows that see no key hold any number."""
    if softcap <= 0:
        return F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype), scale=scale)
    scores = q.float() @ k.float().transpose(2, 3) * scale
    capped = softcap * torch.tanh(scores / softcap) + mask
    return capped.softmax(-1) @ v.float()


def _spread_heads(states: Tensor, heads: int, head_mapping: Tensor | None) -> Tensor:
    """Return keys or values [texts, key heads, keys, width] for each head of queries."""
    if head_mapping is None:
        return states.repeat_interleave(heads // states.shape[1], 1)
    return states[:, head_mapping.long()]


def gather_pages(cache: Tensor, pages: Tensor, lengths: Tensor) -> Tensor:
    """Return keys or values of texts, [texts, key heads, pages * block size, width].

    Args:
        cache: [blocks, key heads, block size, width].
        pages: [texts, pages], blocks; those behind a text's length may be any number.
        lengths: [texts]; entries behind a length are zeros.
    """
    _, heads, size, width = cache.shape
    position = torch.arange(pages.shape[1] * size, device=pages.device)
    dead = position >= lengths[:, None]
    blocks = torch.where(dead[:, ::size], 0, pages).long()
    found = _as_bytes(cache)[blocks].permute(0, 2, 1, 3, 4)
    rows = found.reshape(len(pages), heads, -1, width)
    return rows.masked_fill(dead[:, None, :, None], 0).view(cache.dtype)
