"""Compare attention over a cache in pages on a CPU: our kernel, and torch on gathered pages.

    python -m benchmarks paged_attention [--threads N] [--only WORDS] [--json FILE]

Minima of interleaved rounds, in microseconds of processor time a call with one thread, of the clock
with more. The other side gathers the pages of all texts by one index and calls torch's attention,
with the heads that share a key as rows. Errors are relative to fp64.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from ipex_inductor.llm.modules import PagedAttention
from ipex_inductor.templates.cpu import paged_attention

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu_kernels import append_row, least_times, make_parser

ROUNDS = 15
BLOCK = 16  # keys, as vLLM's default has on CPUs and GPUs
HEADS = ((8, 4, 128), (4, 8, 64), (32, 1, 128))  # of keys, queries a head, width
# Texts, keys of each, last tokens of each: decoding, a chunk of a prompt, a prompt.
TEXTS = ((1, 1024, 1), (8, 1024, 1), (1, 8192, 1), (1, 1024, 16), (1, 512, 512))
DTYPES = (torch.float32, torch.bfloat16)
ENTRIES = (None, torch.float8_e5m2, torch.float8_e4m3fn, torch.int8)


def gather_and_attend(q, caches, tables, groups: int, tokens: int):
    """Return attention by torch on gathered pages, [texts, key heads, groups * tokens, width]."""
    texts, pages = tables.shape
    heads, size, width = caches[0].shape[1:]
    k, v = (
        _index(cache, tables).transpose(1, 2).reshape(texts, heads, pages * size, width).to(q.dtype)
        for cache in caches
    )
    rows = q.view(texts, tokens, heads, groups, width).permute(0, 2, 3, 1, 4)
    if tokens == 1:
        return F.scaled_dot_product_attention(rows.reshape(texts, heads, groups, width), k, v)
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    rows = rows.reshape(texts, heads * groups, tokens, width)
    hidden = torch.ones(tokens, k.shape[2], dtype=torch.bool).tril(k.shape[2] - tokens)
    return F.scaled_dot_product_attention(rows, k, v, hidden)


def _index(cache, tables):
    return (
        cache.view(torch.uint8)[tables].view(cache.dtype) if cache.itemsize == 1 else cache[tables]
    )


def call_ours(out, q, caches, tables, lengths, starts, slopes=None):
    """Call the class as a serving engine does."""
    scale, length = q.shape[2] ** -0.5, int(tables.shape[1]) * BLOCK
    if starts is None:
        groups = q.shape[1] // caches[0].shape[1]
        mapping = torch.arange(q.shape[1], dtype=torch.int32) // groups
        PagedAttention.single_query_cached_kv_attention(
            *(out, q, *caches, mapping, scale, tables, lengths, BLOCK, length, slopes)
        )
        return
    ends = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    PagedAttention.flash_attn_varlen_func(
        *(out, q, *caches, starts, ends, 1, length, scale, True, tables, slopes)
    )


@torch.no_grad()
def main() -> None:
    """Print a row a case; with --json also append it to FILE."""
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    if reason := paged_attention.why_no_kernel(torch.empty(1, 16)):
        raise SystemExit(reason)
    for heads in HEADS:
        for texts in TEXTS:
            for dtype in DTYPES:
                for entry in ENTRIES if dtype is torch.bfloat16 else ENTRIES[:1]:
                    measure(options, dtype, entry, heads, texts)


def measure(options, dtype, entry, heads, texts) -> None:
    """Print the row of one case, unless the options leave it out."""
    row = {
        "dtype": str(dtype),
        "entries": str(entry or dtype),
        "key heads, queries, width": heads,
        "texts, keys, tokens": texts,
    }
    if options.only not in str(row):
        return
    (key_heads, groups, width), (count, keys, tokens) = heads, texts
    blocks = count * keys // BLOCK
    shape = blocks + 1, key_heads, BLOCK, width
    caches = [
        (torch.randn(shape) * (20 if entry is torch.int8 else 1)).to(entry or dtype) for _ in "kv"
    ]
    tables = torch.randperm(blocks).view(count, -1).int()
    q = torch.randn(count * tokens, key_heads * groups, width).to(dtype) / 20
    lengths = torch.full((count,), keys, dtype=torch.int32)
    starts = None if tokens == 1 else torch.arange(0, len(q) + 1, tokens, dtype=torch.int32)
    out = torch.empty_like(q)
    calls = {
        "torch": partial(gather_and_attend, q, caches, tables, groups, tokens),
        "paged": partial(call_ours, out, q, caches, tables, lengths, starts),
    }
    best = least_times(calls, "torch", ROUNDS, wall=options.threads > 1)
    for name in calls:
        row[f"{name}, us"] = round(best[name], 1)
    row["torch / paged"] = round(best["torch"] / best["paged"], 2)
    wide = [cache.double() for cache in caches]
    truth = gather_and_attend(q.double(), wide, tables, groups, tokens)
    truth = truth.view(count, key_heads, groups, tokens, width).permute(0, 3, 1, 2, 4)
    truth = truth.reshape(q.shape)
    row["paged, error"] = float((out.double() - truth).norm() / truth.norm())
    append_row(row, options)


if __name__ == "__main__":
    main()
