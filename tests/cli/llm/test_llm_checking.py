"""Exact logits, forced tokens and random weights of `ipex-inductor llm bench`."""

import pytest
import torch

from ipex_inductor.cli.llm import checking, memory
from ipex_inductor.cli.llm.jobs import Job
from ipex_inductor.cli.llm.models import load_model, read_config
from ipex_inductor.cli.llm.variant import Variant, load

pytest.importorskip("transformers")
BF16, PROMPT = torch.bfloat16, 6


@pytest.fixture(scope="module")
def reference():
    tokens = checking.draw_tokens(256, 2, PROMPT)
    return checking.make_reference(load_model("tiny", BF16, "cpu"), tokens, BF16)


def eager(model):
    return Variant(Job("tiny", "eager", batch=2, prompt=PROMPT, new=9), model)


def test_an_eager_model_is_right_and_one_with_another_weight_is_wrong(reference):
    model = load_model("tiny", BF16, "cpu")
    facts = eager(model).check(reference)
    assert 0 < facts["logits_error"] <= facts["logits_limit"] < 0.03  # bf16 rounds by 0.4 %
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3] *= 2
    facts = eager(model).check(reference)
    assert facts["logits_error"] > facts["logits_limit"]


def test_a_cache_that_loses_a_token_is_wrong(reference):
    variant = eager(load_model("tiny", BF16, "cpu"))
    own = variant.model.forward

    def forget(*args, **kwargs):
        output = own(*args, **kwargs)
        for layer in output.past_key_values.layers:
            layer.keys[:, :, 0] = 0
        return output

    variant.model.forward = forget
    facts = variant.check(reference)
    assert facts["logits_error"] > facts["logits_limit"]


def test_beams_are_scored_again(reference):
    variant = eager(load_model("tiny", BF16, "cpu"))
    variant.job = Job("tiny", "eager", batch=2, prompt=PROMPT, new=9, beams=3)
    facts = variant.check(reference)
    assert facts["beam_error"] <= facts["beam_limit"]
    prompt = reference.tokens[:, :PROMPT]
    kept = {"return_dict_in_generate": True, "output_scores": True}
    output = variant.generate(prompt, 8, num_beams=3, **kept)
    output.sequences = output.sequences.clone()
    output.sequences[:, -4] = (output.sequences[:, -4] + 1) % 256
    assert checking.measure_beam_error(variant.model, output, PROMPT) > facts["beam_limit"]


def test_the_limit_of_int8_gemms_has_their_rounding(reference):
    """Quantized weights are compared with what they stand for, and int8 rounding is let in."""
    job = Job("tiny", "ours", weights="int4", group_size=32, lowp_mode="INT8", batch=2)
    exact = checking.make_reference(load(job), reference.tokens, BF16)
    assert exact.limit > reference.limit
    assert exact.error(reference.logits) > exact.limit  # the plain weights are other ones


def test_references_are_read_back(reference, tmp_path):
    file = str(tmp_path / "reference.npz")
    reference.save(file)
    again = checking.Reference.load(file)
    assert torch.equal(again.tokens, reference.tokens)
    assert torch.equal(again.logits, reference.logits)
    assert again.limit == reference.limit


def test_a_turn_has_a_time_for_each_token():
    variant = eager(load_model("tiny", BF16, "cpu"))
    turn = variant.take_turn(checking.draw_tokens(256, 2, PROMPT)[:, :PROMPT])
    assert len(turn["steps"]) == 8
    assert min(turn["steps"]) > 0
    assert turn["prefill"] > 0


def test_random_weights_are_equal_in_each_process_and_rows_differ():
    first, second = (load_model("tiny", BF16, "cpu") for _ in range(2))
    for (name, one), two in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two), name
    weight = first.lm_head.weight
    assert len(weight.unique(dim=0)) == len(weight)
    assert weight.std().item() == pytest.approx(0.125, rel=0.05)  # 64 ** -0.5, of 16384 values
    assert bool((first.model.norm.weight == 1).all())
    assert not any(buffer.is_meta for buffer in first.buffers())


def test_fewer_layers_and_tied_heads():
    assert read_config("tiny:1").num_hidden_layers == 1
    config = read_config("qwen2.5-0.5b:1")
    assert config.tie_word_embeddings
    assert config.hidden_size == 896


def test_bytes_that_a_token_reads():
    model = load_model("tiny", BF16, "cpu")
    table = model.model.embed_tokens.weight.nbytes
    assert memory.count_bytes(model) - memory.count_read_bytes(model) == table
    model.lm_head.weight = model.model.embed_tokens.weight
    assert memory.count_bytes(model) == memory.count_read_bytes(model)
    # 2 tensors, 2 layers, 2 heads of 16, 3 texts of 5 tokens, 2 bytes
    assert memory.count_cache_bytes(model.config, 3, 5, 2) == 2 * 2 * 2 * 16 * 3 * 5 * 2
    model.config.num_local_experts = 8
    assert memory.count_read_bytes(model) is None
