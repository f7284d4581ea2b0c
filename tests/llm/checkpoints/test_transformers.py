"""Models of transformers: quantized, saved, and loaded into a model without memory."""

import pytest
import torch

from ipex_inductor import quantization
from ipex_inductor.llm.checkpoints import load_quantized
from ipex_inductor.quantization import WeightOnlyLinear

transformers = pytest.importorskip("transformers", reason="transformers has the models")

pytestmark = pytest.mark.unit

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama, tied": lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=False),
    "gpt2, Conv1D": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32
    ),
}


def build(config):
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_of_gptq_goes_into_a_model_without_memory(name, tmp_path):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    tokens = torch.randint(0, 96, (2, 12))
    model = build(config)
    quantized = quantization.gptq(model, [tokens], group_size=32, save_dir=tmp_path)
    kinds = [m for m in quantized.modules() if isinstance(m, WeightOnlyLinear)]
    assert len(kinds) == (8 if "gpt2" in name else 14)
    assert not isinstance(quantized.lm_head, WeightOnlyLinear)
    assert config.use_cache
    with torch.device("meta"):
        empty = build(transformers.AutoConfig.from_pretrained(tmp_path))
    loaded = load_quantized(empty, tmp_path)
    assert not any(t.is_meta for t in [*loaded.parameters(), *loaded.buffers()])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, quantized(tokens).logits)
    is_tied = loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert is_tied == config.tie_word_embeddings


def test_a_quantized_head_is_saved_by_transformers_although_it_was_tied(tmp_path):
    torch.manual_seed(0)
    model = build(CONFIGS["llama, tied"]())
    quantized = quantization.quantize_weights(model, quantization.QConfigWoq(weight_dtype=2))
    assert isinstance(quantized.lm_head, WeightOnlyLinear)
    tokens = torch.randint(0, 96, (1, 5))
    logits = quantized(tokens).logits
    quantized.save_pretrained(tmp_path)
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors")
    state = safetensors.load_file(tmp_path / "model.safetensors")
    assert "lm_head.quantized_weight" in state
    quantized.load_state_dict(state)
    assert torch.equal(quantized(tokens).logits, logits)
    assert isinstance(model.lm_head, torch.nn.Linear)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_quantized_model_generates_text():
    torch.manual_seed(0)
    model = build(CONFIGS["llama"]())
    quantized = quantization.quantize_weights(model, quantization.QConfigWoq(weight_dtype=1))
    tokens = torch.randint(3, 96, (1, 5))
    text = quantized.generate(tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert text.shape == (1, 9)
