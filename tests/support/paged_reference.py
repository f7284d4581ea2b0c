"""Attention over caches in pages and of beams, written out in fp64."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Texts in a cache of pages.

    `entry` is the dtype of a cache of 8 bits, with the scales `k_scale` and `v_scale`. `queries`
    are the numbers of last tokens of the texts; None is one of each, by the function for those.
    """

    heads: int = 4
    key_heads: int = 2
    width: int = 32
    size: int = 16
    lengths: tuple[int, ...] = (5, 33, 300)
    queries: tuple[int, ...] | None = None
    alibi: bool = False
    window: int = -1
    right: int = -1
    causal: bool = True
    softcap: float = -1.0
    entry: torch.dtype | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass
class Texts:
    """Operands of a case."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    tables: Tensor
    slopes: Tensor | None


def make_texts(case: Case, dtype: torch.dtype) -> Texts:
    """Return operands of a case; entries of pages that no text has are NaN, as are dead ones."""
    texts, pages = len(case.lengths), -(-max(case.lengths) // case.size)
    blocks = texts * pages + 2
    shape = blocks, case.key_heads, case.size, case.width
    tables = torch.randperm(blocks)[: texts * pages].view(texts, pages).int()
    caches = []
    for scale in (case.k_scale, case.v_scale):
        values = torch.randn(shape)
        if case.entry is torch.int8:
            cache = (values / scale).round().clamp(-128, 127).to(torch.int8)
        else:
            cache = (values / scale).to(case.entry or dtype)
            poison(cache, case, tables)
        caches.append(cache)
    for text, length in enumerate(case.lengths):
        tables[text, -(-length // case.size) :] = 1_000_000  # no block, and not to be read
    tokens = texts if case.queries is None else sum(case.queries)
    query = torch.randn(tokens, case.heads, case.width).to(dtype)
    return Texts(query, *caches, tables, torch.rand(case.heads) if case.alibi else None)


def poison(cache: Tensor, case: Case, tables: Tensor) -> None:
    """Write NaN wherever no text has a key."""
    live = torch.zeros(len(cache), case.size, dtype=torch.bool)
    for text, length in enumerate(case.lengths):
        position = torch.arange(length)
        live[tables[text][position // case.size].long(), position % case.size] = True
    wide = cache.float().masked_fill(~live[:, None, :, None], torch.nan)
    cache.copy_(wide.to(cache.dtype))


def gather(cache: Tensor, case: Case, table: Tensor, length: int, scale: float) -> Tensor:
    """Return the entries of a text [key heads, length, width], as fp64."""
    position = torch.arange(length)
    block, row = table[position // case.size].long(), position % case.size
    return cache.float()[block, :, row].transpose(0, 1).double() * scale


def compute_exactly(case: Case, texts: Texts, mapping: list[int] | None = None) -> Tensor:
    """Return attention of all queries, zeros where no key is visible."""
    groups = case.heads // case.key_heads
    mapping = mapping or [head // groups for head in range(case.heads)]
    results, first = [], 0
    for text, length in enumerate(case.lengths):
        count = 1 if case.queries is None else case.queries[text]
        q = texts.query[first : first + count].double().transpose(0, 1)
        first += count
        k, v = (
            gather(cache, case, texts.tables[text], length, scale)[mapping]
            for cache, scale in (
                (texts.key_cache, case.k_scale),
                (texts.value_cache, case.v_scale),
            )
        )
        scores = q @ k.transpose(1, 2) * case.width**-0.5
        if case.softcap > 0:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        distance = torch.arange(length) - (torch.arange(count)[:, None] + length - count)
        if texts.slopes is not None:
            scores = scores - texts.slopes.double()[:, None, None] * distance.abs()
        hidden = distance > 0 if case.causal else torch.zeros_like(distance, dtype=torch.bool)
        if case.window > 0:  # of one query the window has its own key, of many it is beside it
            hidden = hidden | (distance < -(case.window - (case.queries is None)))
        if case.right >= 0:
            hidden = hidden | (distance > case.right)
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0)
        results.append((shares @ v).transpose(0, 1))
    return torch.cat(results)


def distance_from(result: Tensor, truth: Tensor) -> float:
    """Return the distance of `result` from `truth`, as a share of its size."""
    return float((result.double() - truth).norm() / truth.norm().clamp(min=1e-30))
