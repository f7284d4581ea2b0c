"""`llm.optimize(drop_plain_weights=True)`: packed weights alone, for prompts of any length."""

import copy

import pytest
import torch
from torch import nn

from ipex_inductor.llm import optimize, steps
from ipex_inductor.passes.weights.blocked import FASTER
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.tensor_reader import freed
from support.llm_families import FAMILIES, prompt

GREEDY = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture
def wide():
    """A Llama whose layers have as many columns and rows as our GEMM kernel needs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


def test_the_table_has_what_one_kernel_serves_for_any_number_of_rows():
    for key in steps.PACKED_ALIKE:
        bounds = FASTER[key][0]
        assert bounds.depth <= steps.LEAST_DEPTH, key
        assert bounds.rows >= 16 * 256, key  # 16 texts in chunks of 256
        assert bounds.products == float("inf"), key


def test_weights_that_other_lengths_pack_differently_are_kept(monkeypatch):
    arch, dtype = next(iter(steps.PACKED_ALIKE))
    monkeypatch.setattr(steps, "architecture", lambda: arch)
    small = FAMILIES["llama"].build().to(dtype)
    assert "pack model.layers.0" in steps.why_not_dropped(small)
    model = optimize(small, dtype=dtype, drop_plain_weights=True)
    (event,) = [e for e in model.ipex_report.events if e.subject == "drop_plain_weights"]
    assert "differently" in event.reason
    assert not model.forward.steps._options.get("drop_plain_weights")
    monkeypatch.setattr(steps, "architecture", lambda: "x86-64:amx")
    assert "on this CPU" in steps.why_not_dropped(small)
    monkeypatch.setattr(steps, "architecture", lambda: arch)
    assert "is a convolution" in steps.why_not_dropped(nn.Conv1d(1, 1, 1).to(dtype))


@pytest.mark.slow
def test_plain_weights_are_released_and_tokens_stay(wide):
    if (architecture(), torch.float32) not in steps.PACKED_ALIKE:
        pytest.skip("weights in fp32 are packed differently for prompts and tokens here")
    texts = [prompt(1, length) for length in (40, 3)]
    expected = [wide.generate(text, max_new_tokens=6, **GREEDY) for text in texts]
    model = optimize(copy.deepcopy(wide), inplace=True, drop_plain_weights=True)
    decisions.clear()
    for text, tokens in zip(texts, expected, strict=True):
        assert torch.equal(model.generate(text, max_new_tokens=6, **GREEDY), tokens)
    weights = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    kept = [name for name, weight in weights.items() if not freed.is_freed(weight)]
    assert kept == []
    assert not freed.is_freed(model.model.embed_tokens.weight)
    with pytest.raises(RuntimeError, match="drop_plain_weights"):
        model.lm_head.weight.sum()


@pytest.mark.slow
def test_prompts_and_tokens_share_packed_weights(wide):
    """Joined layers are packed once, for many rows and for one."""
    if (architecture(), torch.float32) not in steps.PACKED_ALIKE:
        pytest.skip("weights in fp32 are packed differently for prompts and tokens here")
    from ipex_inductor.passes.weights.weight_results import all_parts

    before = {id(part) for part in all_parts()}
    model = optimize(wide, inplace=True)
    model.generate(prompt(1, 40), max_new_tokens=4, **GREEDY)
    parts = [part for part in all_parts() if id(part) not in before]
    packed = sum(value.nbytes for part in parts for value in part.values)
    linear = sum(m.weight.nbytes for m in wide.modules() if isinstance(m, nn.Linear))
    assert packed <= 1.1 * linear  # rotary tables and masks beside them
