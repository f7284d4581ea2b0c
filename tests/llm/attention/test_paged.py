"""`llm.modules.PagedAttention`: values by fp64 written out, by the kernel and by torch's ops."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ipex_inductor.errors import ArgumentError
from ipex_inductor.llm.modules import PagedAttention
from ipex_inductor.ops.attention import paged_attention as ops
from ipex_inductor.ops.attention import paged_checks as checks
from ipex_inductor.templates.cpu import paged_attention
from support.paged_reference import Case, Texts, compute_exactly, distance_from, make_texts

WHY_NOT = paged_attention.why_no_kernel(torch.empty(1, 1, 16))
# Sums and shares are in fp32 and the result is rounded once: at most 2^-9 in bf16 and 2^-12 in fp16
# of each element. In fp32 exponentials are within two units of the last place.
LIMIT = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 2e-6}
# Torch's kernels round shares to the dtype as well.
LIMIT_TORCH = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}
FP8 = torch.float8_e5m2, torch.float8_e4m3fn
MANY = (3, 20, 70)
CASES = {
    "grouped heads": Case(),
    "equal heads": Case(heads=3, key_heads=3, width=48),
    "one head of keys": Case(heads=16, key_heads=1, width=64),
    "blocks of 24": Case(size=24, lengths=(1, 24, 25, 100)),
    "long texts": Case(heads=2, key_heads=2, width=16, lengths=(1500, 3)),
    "an empty text": Case(lengths=(0, 7)),
    "ALiBi": Case(alibi=True),
    "a window": Case(window=20),
    "a window of one": Case(window=1),
    "softcap": Case(softcap=2.0),
    "all at once": Case(alibi=True, window=40, softcap=0.5),
    "e5m2": Case(entry=torch.float8_e5m2),
    "e4m3 and scales": Case(entry=torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0),
    "int8 and scales": Case(entry=torch.int8, k_scale=0.03, v_scale=0.02, alibi=True),
    "tokens": Case(queries=MANY),
    "tokens of equal heads": Case(heads=2, queries=(5, 33, 41)),
    "tokens, not causal": Case(queries=MANY, causal=False),
    "tokens, ALiBi": Case(queries=MANY, alibi=True),
    "tokens, a window": Case(queries=MANY, window=20),
    "tokens, both windows": Case(queries=MANY, causal=False, window=9, right=5),
    "tokens, softcap": Case(queries=MANY, softcap=2.0, window=30),
    "tokens before all keys": Case(queries=(8, 1, 2), lengths=(5, 33, 40)),
    "a prompt": Case(queries=(300,), lengths=(320,), window=30),
    "tokens, e5m2": Case(queries=MANY, entry=torch.float8_e5m2, k_scale=0.5, v_scale=2.0),
}


@pytest.fixture(params=["kernel", "torch"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    """Run the kernel alone, or torch's ops alone; the largest distances from fp64."""
    if request.param == "torch":
        monkeypatch.setattr(paged_attention, "why_no_kernel", lambda query: "for this test")
        return LIMIT_TORCH
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    monkeypatch.setattr(ops, "compute_reference", None)
    return LIMIT


def attend(case: Case, texts: Texts, mapping: Tensor | None = None) -> Tensor:
    """Return what the class computes, over NaNs."""
    out = torch.full_like(texts.query, torch.nan)
    operands = out, texts.query, texts.key_cache, texts.value_cache
    lengths, scale = torch.tensor(case.lengths), case.width**-0.5
    scales = case.k_scale, case.v_scale, case.softcap
    if case.queries is None:
        if mapping is None:
            mapping = torch.arange(case.heads) // (case.heads // case.key_heads)
        numbers = scale, texts.tables, lengths.int(), case.size, max(case.lengths)
        PagedAttention.single_query_cached_kv_attention(
            *(*operands, mapping.int(), *numbers, texts.slopes, case.window, *scales)
        )
        return out
    starts = [torch.tensor([0, *counts]).cumsum(0).int() for counts in (case.queries, case.lengths)]
    longest = max(case.queries), max(case.lengths)
    windows = case.window, case.right, "auto"
    PagedAttention.flash_attn_varlen_func(
        *(*operands, *starts, *longest, scale, case.causal, texts.tables, texts.slopes),
        *(*windows, *scales),
    )
    return out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_attention(name: str, dtype: torch.dtype, limits: dict[Any, float]) -> None:
    texts = make_texts(CASES[name], dtype)
    result = attend(CASES[name], texts)
    assert distance_from(result, compute_exactly(CASES[name], texts)) < limits[dtype]


def test_heads_in_any_order(limits: dict[Any, float]) -> None:
    texts = make_texts(Case(), torch.float32)
    mapping = [1, 0, 0, 1]
    result = attend(Case(), texts, torch.tensor(mapping))
    assert distance_from(result, compute_exactly(Case(), texts, mapping)) < limits[torch.float32]


def test_tensors_with_gaps(limits: dict[Any, float]) -> None:
    case = Case()
    texts = make_texts(case, torch.float32)
    truth = compute_exactly(case, texts)
    wide = torch.full((3, 4, 2 * case.width), torch.nan)
    gaps = wide[..., : case.width].copy_(texts.query)
    across = texts.key_cache.transpose(1, 2).contiguous().transpose(1, 2)
    odd = texts.value_cache.transpose(2, 3).contiguous().transpose(2, 3)
    tables = texts.tables.t().contiguous().t()
    result = attend(case, Texts(gaps, across, odd, tables, None))
    assert distance_from(result, truth) < limits[torch.float32]


@pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_parts_of_a_text_are_merged(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name in ("long texts", "one head of keys", "all at once", "a prompt"):
            texts = make_texts(CASES[name], torch.float32)
            result = attend(CASES[name], texts)
            truth = compute_exactly(CASES[name], texts)
            assert distance_from(result, truth) < LIMIT[torch.float32]
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))
def test_every_byte_of_fp8_is_read_as_torch_reads_it() -> None:
    """One key a text, so that the result is its value; a NaN stays one."""
    values = torch.arange(256, dtype=torch.uint8).view(16, 1, 1, 16)
    case = Case(heads=1, key_heads=1, width=16, size=1, lengths=(1,) * 16)
    tables, query = torch.arange(16).view(16, 1), torch.zeros(16, 1, 16)
    for dtype in FP8:
        cache = values.view(dtype)
        texts = Texts(query, torch.zeros_like(values).view(dtype), cache, tables, None)
        expected = cache.float().view(16, 1, 16)
        torch.testing.assert_close(attend(case, texts), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("entry", [torch.bfloat16, *FP8, torch.int8], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_writing(entry: torch.dtype, index: torch.dtype) -> None:
    scales = (0.25, 2.0) if entry in checks.SMALL else (1.0, 1.0)
    states = torch.randn(2, 5, 3, 16).bfloat16() * 100
    states[0, 1, 0, 0] = 1e6  # more than an entry holds
    caches = [torch.ones(4, 3, 8, 16).to(entry) for _ in range(2)]
    slots = torch.tensor([17, -1, 0, 31, -5], dtype=index)
    PagedAttention.reshape_and_cache_flash(*states, *caches, slots, "auto", *scales)
    for cache, new, scale in zip(caches, states, scales, strict=True):
        expected = torch.ones(4, 3, 8, 16)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                limit = 128 if entry is torch.int8 else torch.finfo(entry).max
                rows = (new[token].float() / scale).clamp(-limit, limit)
                rows = rows.round().clamp(max=127) if entry is torch.int8 else rows
                expected[slot // 8, :, slot % 8] = rows.to(entry).float()
        torch.testing.assert_close(cache.float(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_nothing_to_write(slots: list[int]) -> None:
    caches = [torch.ones(2, 1, 4, 16) for _ in range(2)]
    states = torch.randn(2, len(slots), 1, 16)
    PagedAttention.reshape_and_cache(*states, *caches, torch.tensor(slots, dtype=torch.int64))
    assert all(cache.eq(1).all() for cache in caches)


def step(texts: Texts, states: Tensor, slots: Tensor, lengths: Tensor, mapping: Tensor) -> Tensor:
    """Write a token of each text, and attend."""
    key, value = states
    PagedAttention.reshape_and_cache(key, value, texts.key_cache, texts.value_cache, slots)
    out = torch.empty_like(texts.query)
    PagedAttention.single_query_cached_kv_attention(
        *(out, texts.query * 2, texts.key_cache, texts.value_cache, mapping, 0.2),
        *(texts.tables, lengths, 16, int(lengths.shape[0]) * 64, None),
    )
    return out + 1


@torch.no_grad()
def test_a_compiled_step_is_one_graph_and_writes_in_place() -> None:
    case = Case(lengths=(5, 33))
    texts = make_texts(case, torch.float32)
    states, mapping = torch.randn(2, 2, 2, 32), torch.tensor([0, 0, 1, 1])
    lengths = torch.tensor(case.lengths)
    slots = texts.tables[[0, 1], (lengths - 1) // 16] * 16 + (lengths - 1) % 16
    other = replace_caches(texts)
    expected = step(texts, states, slots, lengths, mapping)
    compiled = torch.compile(step, backend="ipex", fullgraph=True, options={"strict": True})
    torch.testing.assert_close(compiled(other, states, slots, lengths, mapping), expected)
    for own, cache in ((other.key_cache, texts.key_cache), (other.value_cache, texts.value_cache)):
        torch.testing.assert_close(own, cache, rtol=0, atol=0, equal_nan=True)


def replace_caches(texts: Texts) -> Texts:
    """Return the same texts in other caches."""
    caches = texts.key_cache.clone(), texts.value_cache.clone()
    return Texts(texts.query, *caches, texts.tables, texts.slopes)


def fail_with(**changes: Any) -> None:
    """Attend with changed operands."""
    case = Case(lengths=(5, 33))
    texts = make_texts(case, torch.float32)
    operands = {
        "output": torch.empty_like(texts.query),
        "query": texts.query,
        "key_cache": texts.key_cache,
        "value_cache": texts.value_cache,
        "head_mapping": torch.tensor([0, 0, 1, 1]),
        "scale": 1.0,
        "block_tables": texts.tables,
        "context_lens": torch.tensor(case.lengths),
        "block_size": 16,
        "max_context_len": 33,
        "alibi_slopes": None,
    }
    PagedAttention.single_query_cached_kv_attention(**{**operands, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 8}, "block_size 16"),
        ({"query": torch.zeros(2, 4, 32).double()}, "float64"),
        ({"query": torch.zeros(2, 4, 16)}, "width 16|output"),
        ({"query": torch.zeros(2, 128)}, r"\[tokens, heads, width\]"),
        ({"output": torch.zeros(2, 4, 32).half()}, "float16"),
        ({"key_cache": torch.zeros(8, 2, 16, 32).bfloat16()}, "bfloat16"),
        ({"key_cache": torch.zeros(3, 2, 16, 32)}, "two caches of one shape"),
        ({"head_mapping": torch.tensor([0, 1])}, "head_mapping"),
        ({"head_mapping": torch.tensor([0, 0, 1, 2])}, "head mapping"),
        ({"block_tables": torch.zeros(2, 3)}, "block_tables of integers"),
        ({"block_tables": torch.full((2, 3), 99)}, "blocks of the cache"),
        ({"context_lens": torch.tensor([5])}, "lengths of texts"),
        ({"context_lens": torch.tensor([5, 60])}, "longest"),
        ({"context_lens": torch.tensor([5, -1])}, "longest"),
        ({"max_context_len": 20}, "longest"),
        ({"alibi_slopes": torch.ones(2)}, "ALiBi"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_errors_of_attention(changes: dict[str, Any], words: str, limits: dict[Any, float]) -> None:
    with pytest.raises(ArgumentError, match=words):
        fail_with(**changes)


@pytest.mark.parametrize("starts", [[0, 3, 2], [1, 2, 3], [0, 1, 4], [0, 1]])
def test_errors_of_starts(starts: list[int], limits: dict[Any, float]) -> None:
    case = Case(lengths=(5, 33), queries=(1, 2))
    texts = make_texts(case, torch.float32)
    operands = torch.empty_like(texts.query), texts.query, texts.key_cache, texts.value_cache
    ends = torch.tensor([0, 5, 38])
    with pytest.raises(ArgumentError, match=r"starts|block_tables"):
        PagedAttention.flash_attn_varlen_func(
            *(*operands, torch.tensor(starts), ends, 2, 33, 1.0, True, texts.tables, None)
        )


@pytest.mark.parametrize(
    ("entry", "slots", "name", "words"),
    [
        (torch.float32, [32], "auto", "slot 32"),
        (torch.float32, [1, 2], "auto", "slot mapping"),
        (torch.float32, [1.0], "auto", "integers"),
        (torch.float32, [1], "fp8", "kv_cache_dtype"),
        (torch.float8_e5m2, [1], "fp8_e4m3", "float8_e5m2"),
        (torch.int8, [1], "int4", "'int4'"),
        (torch.uint8, [1], "auto", "view"),
        (torch.bfloat16, [1], "auto", "bfloat16"),
    ],
)
def test_errors_of_writing(entry: torch.dtype, slots: list[Any], name: str, words: str) -> None:
    caches = [torch.zeros(4, 2, 8, 16).to(entry) for _ in range(2)]
    states = torch.zeros(2, 1, 2, 16)
    with pytest.raises(ArgumentError, match=words):
        PagedAttention.reshape_and_cache(*states, *caches, torch.tensor(slots), name)
