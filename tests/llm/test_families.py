"""Families of language models: the logits and tokens of eager execution, compiled by backend ipex.

Graphs as traced show what is padded, cached and reordered; backend ipex adds its kernels.
"""

import logging
from dataclasses import replace

import pytest
import torch

from ipex_inductor.llm import families, optimize
from support.llm_families import FAMILIES, left_padded, prompt

NEW = {"max_new_tokens": 20, "min_new_tokens": 20, "pad_token_id": 0}

# Families whose prompts run eagerly, with the reason that is logged.
EAGER_PROMPTS = {
    "jamba": "its layers hold states",
    "mamba": "its layers hold states",
    "t5": "the decoder of an encoder-decoder",
    "whisper": "the decoder of an encoder-decoder",
    "llava": "they come with pixel_values",
    "maira2": "they come with pixel_values",
}
# Families that are not compiled at all.
EAGER = {"falcon_alibi", "git", "mllama", "mpt", "yuan"}
TEXT_ALONE = [name for name, family in FAMILIES.items() if family.inputs is None]
QUICK = {name for name, family in FAMILIES.items() if not family.slow}
PADDED = [name for name in TEXT_ALONE if name not in EAGER | EAGER_PROMPTS.keys()]


def cases(names):
    """Return parameters, all but a few of them slow."""
    return [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in names]


def words_of(name):
    return {key: value for key, value in NEW.items() if name != "whisper" or key != "pad_token_id"}


def check_tokens(name, **words):
    """Compare tokens, and check that graphs ran unless the family has a reason."""
    model = FAMILIES[name].build()
    optimized = optimize(model)
    expected = model.generate(**words, **words_of(name))
    assert torch.equal(optimized.generate(**words, **words_of(name)), expected)
    reasons = " ".join(optimized.forward.reasons)
    if name in EAGER:
        assert not len(optimized.forward.steps)
        return
    assert len(optimized.forward.steps) == (1 if name in EAGER_PROMPTS else 2)
    assert EAGER_PROMPTS.get(name, "") in reasons
    assert bool(reasons) == (name in EAGER_PROMPTS)


def inputs_of(name):
    make = FAMILIES[name].inputs
    return make() if make else {"input_ids": prompt(1, 20)}


@pytest.mark.sampled("gemma2")
@pytest.mark.parametrize("name", cases(FAMILIES))
def test_greedy_tokens(name):
    """In fp32; random weights, spread so that no tie decides."""
    check_tokens(name, **inputs_of(name))


@pytest.mark.usefixtures("traced_only")
class TestAsTraced:
    @pytest.mark.sampled("llama")
    @pytest.mark.parametrize("name", cases(FAMILIES))
    def test_four_beams(self, name):
        check_tokens(name, num_beams=4, **inputs_of(name))

    @pytest.mark.sampled("gemma2")
    @pytest.mark.parametrize("name", cases([n for n in TEXT_ALONE if n != "falcon_alibi"]))
    def test_left_padded_batch(self, name):
        check_tokens(name, **left_padded(3, 12))

    @pytest.mark.sampled("gpt2")
    @pytest.mark.parametrize("name", cases(TEXT_ALONE))
    def test_logits_in_fp32(self, name):
        """Sums in another order: a few ulps of the largest logit."""
        model = FAMILIES[name].build()
        optimized = optimize(model)
        words = {"return_dict_in_generate": True, "output_logits": True, **NEW}
        ours = torch.stack(optimized.generate(prompt(1, 20), **words).logits)
        theirs = torch.stack(model.generate(prompt(1, 20), **words).logits)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())

    @pytest.mark.slow
    @pytest.mark.parametrize("name", PADDED)
    def test_prompts_of_any_length_share_few_graphs(self, name):
        """A graph for each rounded length and one for tokens; a longer cache has three more."""
        model = FAMILIES[name].build()
        optimized = optimize(model)
        words = {**NEW, "max_new_tokens": 3, "min_new_tokens": 3}
        for length, most in ((1, 2), (2, 3), (16, 3), (17, 4), (100, 5), (250, 6), (300, 9)):
            tokens = prompt(1, length)
            expected = model.generate(tokens, **words)
            assert torch.equal(optimized.generate(tokens, **words), expected), length
            assert len(optimized.forward.steps) <= most, length
        is_whole = any("depend" in r or "grows" in r for r in optimized.forward.reasons)
        assert bool(optimized.forward.reasons) == is_whole == (name == "qwen")

    def test_a_longer_text_of_the_encoder_adds_no_graph(self):
        model = FAMILIES["t5"].build()
        optimized = optimize(model)
        for length in (17, 20, 31, 32):
            tokens = prompt(1, length)
            assert torch.equal(optimized.generate(tokens, **NEW), model.generate(tokens, **NEW))
        assert len(optimized.forward.steps) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", PADDED)
def test_errors_in_bf16_are_those_of_eager(name):
    """The prompt's logits beside fp32's: at most 1.5 of eager's error, in root mean square."""
    truth = FAMILIES[name].build()
    eager = FAMILIES[name].build(torch.bfloat16)
    ours = optimize(truth, dtype=torch.bfloat16)
    words = {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
    exact, *others = (
        torch.stack(model.generate(prompt(16, 60), max_new_tokens=1, **words).logits).float()
        for model in (truth, eager, ours)
    )
    eagers, own = ((other - exact).square().mean().sqrt().item() for other in others)
    assert own <= 1.5 * eagers


GROWING = {
    "phi3": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 280,
        "factor": 4.0,
    },
    "llama": {"rope_type": "dynamic", "factor": 2.0},
}


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("name", GROWING)
def test_frequencies_that_depend_on_the_text_see_all_of_it(name):
    """A prompt of two chunks: by chunks, keys of the first would have other frequencies."""
    family = FAMILIES[name]
    settings = {"rope_theta": 10000.0, **GROWING[name]}
    sizes = {**family.sizes, "rope_parameters": settings, "max_position_embeddings": 280}
    model = replace(family, sizes=sizes).build()
    optimized = optimize(model)
    for length in (20, 270, 300):
        tokens = prompt(1, length)
        assert torch.equal(optimized.generate(tokens, **NEW), model.generate(tokens, **NEW))
    assert "frequencies depend on the length" in " ".join(optimized.forward.reasons)


def test_rotary_settings_of_several_layers_are_read():
    config = type("Config", (), {})()
    assert not families.why_not_cut(families.COMPILED, config)
    config.rope_parameters = {"full_attention": {"rope_type": "longrope"}}
    assert "length of the text" in families.why_not_cut(families.COMPILED, config)
    config.rope_parameters = {"full_attention": {"rope_type": "yarn"}}
    assert not families.why_not_cut(families.COMPILED, config)
    assert "grows" in families.why_not_cut(families.ROWS["qwen"], config)


def test_rows_have_reasons_and_are_logged(caplog):
    caplog.set_level(logging.INFO, "IPEX")
    assert all(row.reason or row.whole for row in families.ROWS.values())
    assert families.find(FAMILIES["falcon"].build()) is families.COMPILED
    model = optimize(FAMILIES["falcon_alibi"].build())
    model.generate(prompt(1, 5), max_new_tokens=2, pad_token_id=0)
    assert "FalconForCausalLM runs eagerly: static caches of transformers fail" in caplog.text


def test_a_family_is_found_by_its_class_not_its_config():
    model = FAMILIES["llama"].build()
    model.config.architectures = None
    assert families.find(model) is families.COMPILED
    assert families.find(torch.nn.Linear(2, 2)) is None
