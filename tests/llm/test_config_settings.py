"""Settings that scripts of IPEX put on a model's config."""

import pytest
import torch

from ipex_inductor.llm import optimize
from support.llm_families import FAMILIES, prompt

NEW = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}


@pytest.fixture
def llama():
    return FAMILIES["llama"].build()


@pytest.mark.usefixtures("traced_only")
class TestTokenLatency:
    @pytest.mark.parametrize(
        "words",
        [
            {},
            pytest.param({"num_beams": 4}, marks=pytest.mark.slow),
            pytest.param({"do_sample": True}, marks=pytest.mark.slow),
            pytest.param({"return_dict_in_generate": True}, marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_generate_returns_seconds_too(self, llama, words):
        optimized, tokens = optimize(llama), prompt(1, 9)
        torch.manual_seed(0)
        expected = optimized.generate(tokens, **NEW, **words)
        optimized.config.token_latency = True
        torch.manual_seed(0)
        result, seconds = optimized.generate(tokens, **NEW, **words)
        ours, theirs = (getattr(each, "sequences", each) for each in (result, expected))
        assert torch.equal(ours, theirs)
        assert len(seconds) == 6
        assert min(seconds) > 0

    @pytest.mark.slow
    def test_criteria_of_the_caller_still_stop(self, llama):
        optimized = optimize(llama)
        optimized.config.token_latency = True

        def stop(input_ids, scores, **words):
            return torch.full((1,), input_ids.shape[1] >= 11)

        result, seconds = optimized.generate(prompt(1, 9), stopping_criteria=[stop], **NEW)
        assert result.shape == (1, 11)
        assert len(seconds) == 2

    @pytest.mark.slow
    def test_criteria_may_be_given_by_position(self, llama):
        optimized = optimize(llama)
        optimized.config.token_latency = True

        def stop(input_ids, scores, **words):
            return torch.full((1,), input_ids.shape[1] >= 11)

        settings = optimized.generation_config
        result, seconds = optimized.generate(prompt(1, 9), settings, None, [stop], **NEW)
        assert result.shape == (1, 11)
        assert len(seconds) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_the_last_logits_alone(llama):
    tokens = prompt(2, 9)
    expected = llama(tokens).logits
    optimized = optimize(llama)
    optimized.config.lm_head_generation = True
    logits = optimized(tokens).logits
    torch.testing.assert_close(logits, expected[:, -1:])  # fp32: a GEMM of other rows
    assert optimized(tokens, logits_to_keep=3).logits.shape[1] == 3
    assert optimized(tokens, labels=tokens).logits.shape[1] == 9
    assert torch.equal(optimized.generate(tokens, **NEW), llama.generate(tokens, **NEW))


@pytest.mark.usefixtures("traced_only")
def test_other_settings_say_once_what_replaces_them(llama, caplog):
    optimized = optimize(llama)
    optimized.config.kv_cache_dtype = torch.float8_e5m2
    optimized.config.text_max_length = 40
    for _ in range(2):
        optimized.generate(prompt(1, 9), **NEW)
    lines = [record.getMessage() for record in caplog.records if "no effect" in record.message]
    assert len(lines) == 2
    assert "kv_cache_dtype = torch.float8_e5m2 has no effect: caches hold the dtype" in lines[0]
    assert "generation_config.max_cache_len" in lines[1]
