"""`llm.optimize`: its arguments, what it returns, and that results stay those of the model."""

import copy
import io
import logging

import pytest
import torch
from torch import nn

import ipex_inductor
from ipex_inductor.errors import ArgumentError, CheckpointError, DeviceError
from ipex_inductor.llm import load_low_precision_checkpoint, optimize, optimize_transformers
from ipex_inductor.ops.attention.decode_attention import why_not_supported
from ipex_inductor.passes.attention import decode_attention
from ipex_inductor.quantization import (
    WoqWeightDtype,
    get_weight_only_quant_qconfig_mapping,
    quantize_weights,
    save_gptq,
)
from ipex_inductor.quantization.weight_only import WeightOnlyLinear
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import current
from support.llm_families import FAMILIES, left_padded, prompt

NEW = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.fixture
def llama():
    return FAMILIES["llama"].build()


def test_a_copy_is_optimized_and_the_model_left_alone(llama):
    optimized = optimize(llama)
    assert optimized is not llama
    assert type(optimized) is type(llama)
    assert "forward" not in vars(llama)
    assert optimized.state_dict().keys() == llama.state_dict().keys()
    assert optimize(llama, inplace=True) is llama
    assert "forward" in vars(llama)


def test_the_old_name_is_an_alias():
    assert optimize_transformers is optimize is ipex_inductor.llm.optimize


def test_low_precision_casts_parameters_and_keeps_buffers_and_ties():
    model = FAMILIES["qwen2"].build()
    model.tie_weights()
    frequencies = model.model.rotary_emb.inv_freq
    for inplace in (False, True):
        cast = optimize(model, dtype=torch.bfloat16, inplace=inplace)
        assert {p.dtype for p in cast.parameters()} == {torch.bfloat16}
        assert torch.equal(cast.model.rotary_emb.inv_freq, frequencies)
        tied = cast.lm_head.weight is cast.model.embed_tokens.weight
        assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)


def test_what_a_model_keeps_in_fp32_stays(llama):
    llama._keep_in_fp32_modules = ["norm"]
    cast = optimize(llama, dtype=torch.bfloat16)
    assert cast.model.norm.weight.dtype is torch.float32
    assert cast.lm_head.weight.dtype is torch.bfloat16


def test_a_script_module_comes_back_as_it_is():
    script = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert optimize(script) is script


def test_training_gives_a_tuple_and_a_warning(llama, caplog):
    trained = llama.train()
    assert optimize(trained) == (trained, None)
    assert "prepares models for inference" in caplog.text
    sgd = torch.optim.SGD(trained.parameters(), lr=0.1)
    model, optimizer = optimize(trained, sgd)
    assert model is not trained
    assert optimizer is not sgd


def test_a_model_that_generates_nothing_gets_optimize(caplog):
    caplog.set_level(logging.INFO, "IPEX")
    model = optimize(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval())
    assert isinstance(model[1], nn.Identity)
    assert "Sequential has no generate of transformers" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dtype": torch.int8}, "torch.bfloat16 or torch.float16 as dtype"),
        ({"device": "mps"}, "'cpu', 'cuda' or 'xpu'"),
        ({"cache_weight_for_large_batch": True}, "weight-only quantization with cache_weight"),
        ({"quantization_config": object()}, "quantization_config=object"),
        ({"qconfig_summary_file": "x.json"}, "qconfig_summary_file"),
    ],
)
def test_arguments_that_cannot_be_met_raise(llama, arguments, error):
    with pytest.raises(ArgumentError, match=error):
        optimize(llama, **arguments)


def test_other_wrong_arguments(llama):
    with pytest.raises(DeviceError, match="parameters on 'cpu'"):
        optimize(llama, device="cuda")
    with pytest.raises(ArgumentError, match=r"torch.nn.Module"):
        optimize(lambda x: x)


def test_deployment_mode_off_leaves_calls_alone(llama):
    model = optimize(llama, dtype=torch.bfloat16, deployment_mode=False)
    assert "forward" not in vars(model)
    assert "deployment_mode=False" in str(ipex_inductor.report(model).events)


def test_optimizing_twice_hooks_once(llama):
    again = optimize(optimize(llama))
    assert again.forward.own is None
    assert again.forward.model is again


def test_generation_is_compiled_and_gives_the_models_tokens(llama):
    """By backend ipex: fp32, so near-ties alone could change a token."""
    optimized = optimize(llama)
    tokens = prompt(1, 20)
    decisions.clear()
    assert torch.equal(optimized.generate(tokens, **NEW), llama.generate(tokens, **NEW))
    assert len(optimized.forward.steps) == 2  # the prompt, and a token
    events = [event for report in decisions.reports() for event in report.events]
    live = [event.reason for event in events if event.subject == decode_attention.NAME]
    if not why_not_supported(current("cpu").arch, torch.float32, 16):
        assert live == ["2 by this package's kernel"]  # of a token, a layer each
    assert not optimized.forward.reasons
    assert "static caches" in str(ipex_inductor.report(optimized).events)


@pytest.mark.usefixtures("traced_only")
class TestGeneration:
    """Modes of `generate`, with graphs as traced."""

    @pytest.mark.sampled(
        "num_beams-num_return_sequences",
        "do_sample",
        "prompt_lookup_num_tokens",
        "use_cache",
        "cache_implementation",
        "output_hidden_states-return_dict_in_generate",
    )
    @pytest.mark.parametrize(
        "words",
        [
            {"num_beams": 4},
            {"num_beams": 3, "num_return_sequences": 2},
            {"do_sample": True},
            {"do_sample": True, "num_beams": 2},
            {"prompt_lookup_num_tokens": 3},
            {"use_cache": False},
            {"cache_implementation": "static"},
            {"output_hidden_states": True, "return_dict_in_generate": True},
        ],
        ids=lambda words: "-".join(words),
    )
    def test_modes(self, llama, words):
        optimized, tokens = optimize(llama), prompt(1, 20)
        results = []
        for model in (llama, optimized):
            torch.manual_seed(0)
            result = model.generate(tokens, **NEW, **words)
            results.append(getattr(result, "sequences", result))
        assert torch.equal(*results)
        calls = optimized.forward.steps
        assert len(calls) or "use_cache" in words

    def test_an_assistant(self, llama):
        optimized, tokens = optimize(llama), prompt(1, 20)
        result = optimized.generate(tokens, assistant_model=optimize(llama), **NEW)
        assert torch.equal(result, llama.generate(tokens, **NEW))

    def test_scores_and_their_caches_are_the_callers(self, llama):
        optimized, tokens = optimize(llama), prompt(1, 20)
        words = {"return_dict_in_generate": True, "output_logits": True, **NEW}
        first, truth = optimized.generate(tokens, **words), llama.generate(tokens, **words)
        for ours, theirs in zip(first.logits, truth.logits, strict=True):
            torch.testing.assert_close(ours, theirs)  # fp32: a few sums in another order
        kept = first.past_key_values.layers[0].keys.clone()
        optimized.generate(prompt(1, 20, seed=1), **NEW)
        assert torch.equal(first.past_key_values.layers[0].keys, kept)

    def test_a_model_may_be_cast_later(self, llama):
        optimized, tokens = optimize(llama), prompt(1, 20)
        optimized.generate(tokens, **NEW)
        optimized.to(torch.float64)
        assert torch.equal(optimized.generate(tokens, **NEW), llama.generate(tokens, **NEW))

    @pytest.mark.sampled("words0")
    @pytest.mark.parametrize(
        "words", [{"return_dict": False}, {"logits_to_keep": torch.tensor([3])}]
    )
    def test_calls_that_cannot_be_padded_run_eagerly(self, llama, words):
        optimized, tokens = optimize(llama), prompt(1, 20)
        with optimized.forward.pool.lease_scope():
            result = optimized.generate(tokens, return_dict_in_generate=True, **NEW)
            cache = result.past_key_values
            cache.reset()
            cache.prompt_length = 0
            with torch.no_grad():
                ours = optimized(tokens, past_key_values=cache, **words)[0]
                theirs = llama(tokens, **words)[0]
        torch.testing.assert_close(ours, theirs)
        assert len(optimized.forward.reasons) == 1

    def test_direct_calls(self, llama):
        optimized = optimize(llama)
        batch = left_padded(3, 12)
        with torch.no_grad():
            for inputs in (batch, {"input_ids": prompt(2, 7)}):
                torch.testing.assert_close(optimized(**inputs).logits, llama(**inputs).logits)
            torch.testing.assert_close(optimized(prompt(2, 9)).logits, llama(prompt(2, 9)).logits)
        assert not optimized.forward.reasons

    def test_a_cache_of_the_caller_that_grows_runs_eagerly_and_says_so(self, llama, caplog):
        from transformers import DynamicCache

        caplog.set_level(logging.INFO, "IPEX")
        optimized = optimize(llama)
        with torch.no_grad():
            ours = optimized(prompt(1, 7), past_key_values=DynamicCache()).logits
            theirs = llama(prompt(1, 7), past_key_values=DynamicCache()).logits
        assert torch.equal(ours, theirs)
        assert "LlamaForCausalLM runs eagerly: its cache" in caplog.text

    @pytest.mark.sampled("pickled")
    @pytest.mark.parametrize("remake", [copy.deepcopy, pickled])
    def test_copies_and_pickles_are_optimized_models(self, llama, remake):
        optimized, tokens = optimize(llama), prompt(1, 20)
        expected = optimized.generate(tokens, **NEW)
        again = remake(optimized)
        assert again.forward.model is again
        assert again.generate.forward is again.forward
        assert torch.equal(again.generate(tokens, **NEW), expected)
        assert len(again.forward.steps) == 2

    def test_a_saved_model_is_a_plain_one(self, llama, tmp_path):
        optimized, tokens = optimize(llama), prompt(1, 20)
        expected = optimized.generate(tokens, **NEW)
        optimized.save_pretrained(tmp_path)
        loaded = type(llama).from_pretrained(tmp_path)
        assert torch.equal(loaded.generate(tokens, **NEW), expected)

    def test_code_depends_on_autocast(self, llama):
        optimized, tokens = optimize(llama), prompt(1, 20)
        optimized.generate(tokens, **NEW)
        with torch.autocast("cpu", torch.bfloat16):
            result = optimized.generate(tokens, return_dict_in_generate=True, **NEW)
        assert result.past_key_values.layers[0].values.dtype is torch.bfloat16
        assert torch.equal(optimized.generate(tokens, **NEW), llama.generate(tokens, **NEW))


INT8 = get_weight_only_quant_qconfig_mapping(weight_dtype=WoqWeightDtype.INT8)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("inplace", [False, True])
def test_weights_are_quantized_and_tokens_are_those_of_the_quantized_model(llama, inplace):
    eager = quantize_weights(llama, INT8)
    weight = llama.lm_head.weight
    model = optimize(llama, quantization_config=INT8, inplace=inplace)
    assert (model is llama) == inplace
    assert isinstance(model.model.layers[0].mlp.gate_proj, WeightOnlyLinear)
    assert inplace or llama.lm_head.weight is weight
    ids = prompt(1, 9)
    assert torch.equal(model.generate(ids, **NEW), eager.generate(ids, **NEW))


@pytest.mark.usefixtures("traced_only")
def test_a_quantized_checkpoint_is_loaded(llama, tmp_path):
    int4 = get_weight_only_quant_qconfig_mapping(weight_dtype=WoqWeightDtype.INT4, group_size=32)
    eager = quantize_weights(copy.deepcopy(llama), int4, skip=["lm_head"])
    save_gptq(eager, tmp_path)
    before = copy.deepcopy(llama.state_dict())
    pair = load_low_precision_checkpoint(tmp_path)
    model = optimize(llama, low_precision_checkpoint=pair)
    assert all(map(torch.equal, llama.state_dict().values(), before.values()))
    ids = prompt(1, 9)
    assert torch.equal(model.generate(ids, **NEW), eager.generate(ids, **NEW))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_checkpoint_is_loaded_into_a_model_without_memory(llama, tmp_path, inplace):
    int4 = get_weight_only_quant_qconfig_mapping(weight_dtype=WoqWeightDtype.INT4, group_size=32)
    eager = quantize_weights(llama, int4, skip=["lm_head"])
    save_gptq(eager, tmp_path)
    with torch.device("meta"):
        empty = type(llama)(llama.config).eval()
    model = optimize(empty, low_precision_checkpoint=tmp_path, inplace=inplace)
    assert (model is empty) == inplace
    assert model.forward.model is model
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    with torch.no_grad():
        ours, theirs = model.forward.eager(prompt(1, 9)).logits, eager(prompt(1, 9)).logits
    torch.testing.assert_close(ours, theirs)


def test_a_checkpoint_of_another_model_leaves_the_model_alone(llama):
    before = list(llama.state_dict())
    with pytest.raises(CheckpointError):
        optimize(llama, low_precision_checkpoint={}, inplace=True)
    assert list(llama.state_dict()) == before
