"""`IndirectAccessKVCacheAttention`: beams exchanged several times, values by fp64 written out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ipex_inductor.errors import ArgumentError
from ipex_inductor.llm import functional
from ipex_inductor.llm.modules import IndirectAccessKVCacheAttention
from ipex_inductor.ops.attention import indirect_attention
from ipex_inductor.templates.cpu import paged_attention
from support.paged_reference import distance_from

WHY_NOT = paged_attention.why_no_kernel(torch.empty(1, 16))
# As of test_paged.py; torch's kernels round shares to the dtype as well.
LIMIT = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}


@dataclass(frozen=True)
class Case:
    """Beams of texts, whose prompt has `prompt` tokens and each later call `tokens`."""

    texts: int = 2
    beams: int = 3
    prompt: int = 5
    tokens: int = 1
    heads: int = 4
    key_heads: int = 2
    width: int = 32
    room: int = 64
    steps: int = 8
    repeated: bool = False  # the prompt's rows are the beams
    mask: str = "padding"


CASES = {
    "beams": Case(),
    "one beam": Case(beams=1),
    "repeated prompts": Case(repeated=True),
    "prompts of one token": Case(prompt=1, texts=1, mask="none"),
    "a cache that grows": Case(room=4),
    "no room": Case(room=0),
    "three tokens a call": Case(tokens=3, beams=2),
    "masks of heads": Case(mask="heads", tokens=2),
    "ALiBi": Case(mask="alibi"),
    "many queries": Case(heads=20, key_heads=1, width=16),
    "wide": Case(texts=1, beams=4, width=128, prompt=200, steps=4, room=256),
}


@pytest.fixture(params=["kernel", "torch"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels where they take the case, or torch's ops alone."""
    if request.param == "torch":
        monkeypatch.setattr(paged_attention, "why_no_kernel", lambda query: "for this test")
    elif WHY_NOT:
        pytest.skip(WHY_NOT)
    else:
        monkeypatch.setattr(indirect_attention, "attend_rows", None)


def compute_exactly(q: Tensor, k: Tensor, v: Tensor, added: Tensor, is_causal: bool) -> Tensor:
    """Return attention of the last tokens [rows, heads, tokens, width]."""
    groups, tokens, keys = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = (t.double().repeat_interleave(groups, 2) for t in (k, v))
    scores = torch.einsum("rthw,rkhw->rhtk", q.double(), k) / 7 + added.double()
    later = torch.ones(tokens, keys, dtype=torch.bool).triu(1 + keys - tokens)
    scores = scores.masked_fill(later, -torch.inf) if is_causal else scores
    return torch.einsum("rhtk,rkhw->rhtw", scores.softmax(-1), v)


def make_mask(case: Case, rows: int, tokens: int, keys: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments that add to the scores."""
    if case.mask == "none":
        return {}
    if case.mask == "alibi":
        return {"alibi": torch.randn(rows * case.heads, 1, keys)}
    if case.mask == "heads":
        return {"attention_mask": torch.randn(1, case.heads, tokens, keys).to(dtype)}
    mask = torch.zeros(rows, 1, tokens, keys, dtype=dtype)
    mask[: rows // case.texts, ..., 1:2] = torch.finfo(dtype).min  # the second key is padding
    return {"attention_mask": mask}


def sum_masks(added: dict[str, Any], rows: int, heads: int) -> Tensor:
    """Return the sum of what is added to the scores, in four dimensions."""
    mask, alibi = added.get("attention_mask"), added.get("alibi")
    total = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    total = total if mask is None else total + mask
    return total if alibi is None else total + alibi.view(rows, heads, 1, -1)


def begin(case: Case) -> tuple[Tensor, ...] | None:
    """Return the cache of a prompt whose rows are texts, None for one whose rows are beams."""
    if case.repeated:
        return None
    beams = torch.zeros(1, case.texts * case.beams, dtype=torch.int64)
    return torch.zeros(1, 0, 0, 1, dtype=torch.int64), torch.zeros(1), torch.zeros(1), beams


@torch.no_grad()
def search(
    case: Case, dtype: torch.dtype, run: Callable[..., Any] | None = None
) -> tuple[float, tuple[Tensor, ...]]:
    """Attend to a prompt and to beams that are exchanged after each call.

    Returns the largest distance from fp64, and the last cache.
    """
    run = IndirectAccessKVCacheAttention(case.room) if run is None else run
    past, worst, rows = begin(case), 0.0, case.texts * case.beams
    all_keys = all_values = torch.empty(0)
    for step in range(case.steps):
        count = case.tokens if step else case.prompt
        batch = rows if step or case.repeated else case.texts
        shapes = [(batch, count, n, case.width) for n in (case.heads, *[case.key_heads] * 2)]
        q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
        if step:
            parents = torch.randint(case.beams, (case.texts, case.beams))
            parents = (parents + torch.arange(case.texts)[:, None] * case.beams).flatten()
            past[3][past[0].shape[-2] - 1] = parents
            all_keys, all_values = (
                torch.cat((old[parents], new), 1) for old, new in ((all_keys, k), (all_values, v))
            )
        else:
            all_keys, all_values = k, v
        added = make_mask(case, batch, count, all_keys.shape[1], dtype)
        result, weights, past = run(q, k, v, 7.0, past, **added)
        total = sum_masks(added, batch, case.heads)
        truth = compute_exactly(q, all_keys, all_values, total, True)
        assert weights is None
        assert result.shape == truth.shape
        worst = max(worst, distance_from(result, truth))
        if not step:
            all_keys, all_values = (
                t.repeat_interleave(rows // batch, 0) for t in (all_keys, all_values)
            )
    return worst, past


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_beams(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    worst, past = search(case, dtype)
    assert worst < LIMIT[dtype]
    tokens = case.prompt + (case.steps - 1) * case.tokens
    assert past[0].shape == (1, tokens, tokens, 1)
    assert past[3].shape == (past[1].shape[0] + 2, case.texts * case.beams)
    rows = case.texts * (case.beams if case.repeated else 1)
    assert past[3][-2:, 0].tolist() == [case.prompt, rows]


def test_tokens_are_written_in_place() -> None:
    module, states = IndirectAccessKVCacheAttention(16), torch.randn(3, 2, 1, 4, 32)
    _, _, past = module(*states, 7.0)
    _, _, later = module(*states, 7.0, past)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(past[1:], later[1:], strict=True))
    assert torch.equal(later[1][:2], states[1].transpose(0, 1).expand(2, 2, 4, 32))
    assert not later[1][2:].any()


def test_a_prompt_that_sees_later_tokens() -> None:
    q, k, v = torch.randn(3, 2, 5, 4, 32)
    run = functional.indirect_access_kv_cache_attention
    result, _, past = run(q, k, v, 7.0, add_casual_mask=False)
    truth = compute_exactly(q, k, v, torch.zeros(1), False)
    assert distance_from(result, truth) < LIMIT[torch.float32]
    assert past[1].shape[0] == 5


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("tokens", [1, 2])
def test_both_traces_follow_parents(length: int, tokens: int) -> None:
    """By a loop over the keys, by doubling, and as the definition says."""
    if tokens > length:
        return
    parents = torch.randint(5, (40, 5))
    expected = torch.empty(5, length, dtype=torch.int64)
    for beam in range(5):
        row = beam
        for j in reversed(range(length)):
            row = int(parents[j, row]) if j < length - tokens else beam
            expected[beam, j] = row
    assert torch.equal(indirect_attention.trace_beams(parents, length, tokens), expected)
    if not WHY_NOT:
        blocks = paged_attention.trace_blocks(parents, length, tokens)
        assert torch.equal(blocks, (torch.arange(length) * 5 + expected).int())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a cache that grows", "three tokens a call"])
def test_compiled_calls_are_one_graph(name: str) -> None:
    module = IndirectAccessKVCacheAttention(CASES[name].room)
    options = {"strict": True}
    run = torch.compile(module, backend="ipex", fullgraph=True, dynamic=True, options=options)
    worst, _ = search(CASES[name], torch.float32, run)
    assert worst < LIMIT[torch.float32]


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_call_writes_in_place() -> None:
    module, states = IndirectAccessKVCacheAttention(16), torch.randn(3, 2, 1, 4, 32)
    run = torch.compile(module, backend="ipex", fullgraph=True, options={"strict": True})
    _, _, past = module(*states, 7.0)
    others = tuple(t.clone() for t in past)
    expected, _, _ = module(*states * 2, 7.0, past)
    result, _, later = run(*states * 2, 7.0, others)
    torch.testing.assert_close(result, expected)
    for own, before, after in zip(past[1:], others[1:], later[1:], strict=True):
        assert before.data_ptr() == after.data_ptr()
        assert torch.equal(after, own)


def fail_with(**changes: Any) -> None:
    """Attend to a second token with changed arguments."""
    module, states = IndirectAccessKVCacheAttention(16), torch.randn(3, 2, 1, 4, 32)
    _, _, past = module(*states, 7.0)
    arguments = {
        **dict(zip(("query", "key", "value"), states, strict=True)),
        "scale_attn": 7.0,
        "layer_past": past,
        "attention_mask": torch.zeros(2, 1, 1, 2),
    }
    if parents := changes.pop("parents", None):
        past[3][0] = torch.tensor(parents)
    module(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"query": torch.zeros(2, 4, 32)}, "rows, tokens, heads, width"),
        ({"key": torch.zeros(2, 1, 3, 32), "value": torch.zeros(2, 1, 3, 32)}, "divide 4"),
        ({"key": torch.zeros(2, 1, 4, 16), "value": torch.zeros(2, 1, 4, 16)}, "width 32"),
        ({"value": torch.zeros(2, 2, 4, 32)}, "query, key and value"),
        ({"query": torch.zeros(2, 1, 4, 32).half()}, "float16"),
        ({"attention_mask": torch.zeros(2, 1, 1, 9)}, "attention_mask"),
        ({"attention_mask": torch.zeros(2, 2)}, "four dimensions"),
        ({"alibi": torch.zeros(4)}, "alibi"),
        ({"parents": [0, 2]}, "rows 0 to 1"),
        (dict.fromkeys(("query", "key", "value"), torch.zeros(3, 1, 4, 32)), "3 rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
@pytest.mark.usefixtures("_kernels")
def test_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        fail_with(**changes)


def test_prompts_that_do_not_divide_the_beams() -> None:
    past = torch.zeros(1, 0, 0, 1), torch.zeros(1), torch.zeros(1), torch.zeros(1, 3).long()
    with pytest.raises(ArgumentError, match="2 texts"):
        IndirectAccessKVCacheAttention(16)(*torch.randn(3, 2, 5, 4, 32), 7.0, past)
