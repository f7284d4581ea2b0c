"""Attention of a token over a cache on a GPU: values, where it fires, and tokens of a model."""

import pytest
import torch

from ipex_inductor.llm import optimize
from ipex_inductor.passes.attention import decode_attention as rule
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.triton import decode_attention
from support.cached_attention import Added, Decoder
from support.cases.decode_attention_cases import CASES, MASKS, Case, error
from support.llm_families import FAMILIES, left_padded

pytestmark = pytest.mark.gpu

# Shares and the result are rounded to 8 or 11 bits, and errors of elements average.
LIMIT = {torch.bfloat16: 3e-3, torch.float16: 4e-4}
CLOSE = 0.06  # of logits of a tiny model in bf16, beside those in fp32


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_small_cases(name, dtype):
    assert error(CASES[name], dtype, "cuda") < LIMIT[dtype]


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("keys", [256, 1000, 8192])
def test_tiles_that_are_chosen(width, keys):
    for batch in (1, 40):
        tile = decode_attention.choose_tile(4 * batch, keys, width, 132)
        for mask in MASKS:
            case = Case(batch, 4, 4, keys, width, mask, tile.parts, tile.BLOCK_N)
            assert error(case, torch.bfloat16, "cuda") < LIMIT[torch.bfloat16], (batch, mask)


@pytest.mark.parametrize("kind", [Decoder, Added])
@torch.no_grad()
def test_layers_over_caches(kind):
    """Several tokens, one after the other; caches and results as by torch."""
    model, plain = kind().cuda(), kind().cuda().double()
    run = torch.compile(model, backend="ipex", options={"strict": True})
    for step in range(9):
        x = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
        position = torch.tensor([step * 20], device="cuda")
        result, truth = run(x, position), plain(x.double(), position)
        # Results of the first layer are rounded to bf16, and go through the second.
        assert (result.double() - truth).norm() < 2 * 4e-3 * truth.norm()
    events = [e for report in decisions.reports() for e in report.events if e.subject == rule.NAME]
    assert [(e.kind, e.reason) for e in events] == [("choice", "2 by this package's kernel")]


@torch.no_grad()
def test_tokens_of_a_model_are_likely_ones():
    """By the logits of the plain model in fp32; the step chooses them."""
    plain = FAMILIES["llama"].build().cuda()
    model = optimize(plain.to(torch.bfloat16), dtype=torch.bfloat16, device="cuda")
    arguments = {name: each.cuda() for name, each in left_padded(3, 9).items()}
    decisions.clear()
    words = model.generate(**arguments, max_new_tokens=40, pad_token_id=0, eos_token_id=None)
    mask = torch.ones_like(words)
    mask[:, :9] = arguments["attention_mask"]
    logits = plain.float()(words, attention_mask=mask).logits[:, 8:-1]
    chosen = logits.gather(2, words[:, 9:, None]).squeeze(2)
    assert (logits.amax(2) - chosen).max() < CLOSE
    reasons = [
        e.reason for report in decisions.reports() for e in report.events if e.subject == rule.NAME
    ]
    assert any("by this package's kernel" in reason for reason in reasons)


@torch.no_grad()
def test_greedy_tokens_are_those_of_the_loop(monkeypatch):
    from ipex_inductor.llm import greedy

    plain = FAMILIES["llama"].build().cuda().to(torch.bfloat16)
    model = optimize(plain, dtype=torch.bfloat16, device="cuda")
    arguments = {name: each.cuda() for name, each in left_padded(3, 9).items()}
    arguments |= {"max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None}
    here = model.generate(**arguments)
    monkeypatch.setattr(greedy, "DEVICES", frozenset())
    assert torch.equal(model.generate(**arguments), here)


@pytest.mark.parametrize("words", [1, 1023, 32000, 128256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.no_grad()
def test_the_chosen_token_is_torchs(words, dtype):
    """In bf16 many words are equal: the first one is chosen."""
    from ipex_inductor.llm.greedy import choose_words

    logits = torch.randn(5, words, device="cuda").to(dtype)
    logits[1] = 0
    logits[2] = -torch.inf
    logits[3, words // 2 :] = torch.nan
    run = torch.compile(choose_words, backend="ipex", options={"strict": True})
    assert torch.equal(run(logits), logits.float().argmax(-1))
