"""Paged attention and attention over caches of beams on a GPU: values by fp64 on the host."""

from dataclasses import replace

import pytest
import torch

from ipex_inductor.llm.modules import IndirectAccessKVCacheAttention, PagedAttention
from support.paged_reference import Case, Texts, compute_exactly, distance_from, make_texts

pytestmark = pytest.mark.gpu

# Shares and the result are rounded to 8 or 11 bits; torch may compute fp32 in TF32.
LIMIT = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-3}
CASES = {
    "grouped heads": Case(),
    "an empty text": Case(lengths=(0, 7)),
    "all at once": Case(alibi=True, window=40, softcap=0.5),
    "e5m2": Case(entry=torch.float8_e5m2),
    "e4m3 and scales": Case(entry=torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0),
    "int8 and scales": Case(entry=torch.int8, k_scale=0.03, v_scale=0.02),
}
PROMPTS = {"tokens": (3, 20, 70), "a long prompt": (3, 33, 300)}


def move(texts: Texts) -> Texts:
    """Return the operands on the GPU."""
    fields = {name: t.cuda() for name, t in vars(texts).items() if t is not None}
    return replace(texts, **fields)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@torch.no_grad()
def test_a_token_of_each_text(name, dtype):
    case = CASES[name]
    texts = make_texts(case, dtype)
    own = move(texts)
    out = torch.full_like(own.query, torch.nan)
    mapping = torch.arange(case.heads, device="cuda") // (case.heads // case.key_heads)
    lengths, longest = torch.tensor(case.lengths, device="cuda"), max(case.lengths)
    PagedAttention.single_query_cached_kv_attention(
        *(out, own.query, own.key_cache, own.value_cache, mapping, case.width**-0.5),
        *(own.tables, lengths, case.size, longest, own.slopes, case.window),
        *(case.k_scale, case.v_scale, case.softcap),
    )
    assert distance_from(out.cpu(), compute_exactly(case, texts)) < LIMIT[dtype]


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("window", [-1, 20])
@torch.no_grad()
def test_tokens_of_texts(name, window):
    case = Case(queries=PROMPTS[name], lengths=(5, 33, 300), window=window)
    case = replace(case, lengths=(5, 33, 300) if name == "a long prompt" else (5, 33, 100))
    texts = make_texts(case, torch.bfloat16)
    own = move(texts)
    out = torch.full_like(own.query, torch.nan)
    starts, ends = (
        torch.tensor([0, *counts], device="cuda").cumsum(0)
        for counts in (case.queries, case.lengths)
    )
    PagedAttention.flash_attn_varlen_func(
        *(out, own.query, own.key_cache, own.value_cache, starts, ends, 300, 300),
        *(case.width**-0.5, True, own.tables, None, case.window),
    )
    assert distance_from(out.cpu(), compute_exactly(case, texts)) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize("slots", [[17, -1, 0], [-1, -1, -1]])
@pytest.mark.parametrize("entry", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_writing(slots, entry):
    states = torch.randn(2, 3, 2, 16).bfloat16()
    host, own = ([torch.zeros(4, 2, 8, 16).to(entry).to(d) for _ in "kv"] for d in ("cpu", "cuda"))
    PagedAttention.reshape_and_cache(*states, *host, torch.tensor(slots))
    PagedAttention.reshape_and_cache(*states.cuda(), *own, torch.tensor(slots, device="cuda"))
    for ours, theirs in zip(own, host, strict=True):
        assert torch.equal(ours.cpu().float(), theirs.float())


@torch.no_grad()
def test_beams():
    """Exchanged beams give what the host gives, compiled as well."""
    module = IndirectAccessKVCacheAttention(16)
    compiled = torch.compile(module, backend="ipex", fullgraph=True, dynamic=True)
    pasts, states = [None] * 3, torch.randn(3, 4, 5, 4, 32)
    for step in range(5):
        states = torch.randn(3, 4, 1, 4, 32) if step else states
        own = states.cuda()
        calls = ((module, states), (module, own), (compiled, own))
        found = [run(*given, 7.0, past) for (run, given), past in zip(calls, pasts, strict=True)]
        pasts = [past for _, _, past in found]
        for past in pasts:
            past[3][past[0].shape[-2] - 1] = torch.tensor([1, 0, 3, 3], device=past[3].device)
        for result, _, _ in found[1:]:
            assert distance_from(result.cpu(), found[0][0].double()) < LIMIT[torch.float32]
