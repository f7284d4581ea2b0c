"""Tiny models of the families of `ipex.llm`, made from configs, with random weights."""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 199
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class TinyFamily:
    """A model by the names of its classes.

    Args:
        config: the class of the config.
        model: the class of the model.
        sizes: arguments of the config.
        inputs: inputs of `generate` beside, or instead of, tokens; None for tokens.
        slow: whether its test runs in the slow tier.
        module: where the classes are.
    """

    config: str
    model: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[], dict[str, Tensor]] | None = None
    slow: bool = True
    module: str = "transformers"

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the model in eval mode, with the same weights every time."""
        module = self._import_module()
        torch.manual_seed(0)
        config = getattr(module, self.config)(**self.sizes)
        model = getattr(module, self.model)(config).eval()
        spread(model)
        return model.to(dtype) if dtype is not torch.float32 else model

    def _import_module(self) -> Any:
        """Return the module of the classes, or skip the test if this transformers has none."""
        version = importlib.metadata.version("transformers")
        if self.module != "transformers" and version.startswith("4."):
            pytest.skip("look-alikes make masks as transformers 5 does")
        module = importlib.import_module(self.module)
        if not hasattr(module, self.model):
            pytest.skip(f"transformers {version} has no {self.model}")
        return module


@torch.no_grad()
def spread(model: nn.Module) -> None:
    """Draw weights so large that logits differ: no tie decides a token."""
    for name, param in model.named_parameters():
        if param.dim() > 1:
            is_table = any(word in name for word in ("embed", "wte", "shared"))
            fan = 1 if is_table else param.shape[-1]
            param.normal_(0, (1.5 if fan > 1 else 1.0) / fan**0.5)


def prompt(batch: int, length: int, seed: int = 0) -> Tensor:
    """Return tokens [batch, length] without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def left_padded(batch: int, length: int) -> dict[str, Tensor]:
    """Return a batch of prompts of different lengths, padded on the left, and its mask."""
    tokens = prompt(batch, length)
    mask = torch.ones_like(tokens)
    for row in range(batch - 1):
        mask[row, : 2 * row + 3] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


def sound() -> dict[str, Tensor]:
    """Return features of a second of sound for Whisper."""
    return {"input_features": torch.randn(1, 16, 60, generator=torch.Generator().manual_seed(0))}


def picture() -> dict[str, Tensor]:
    """Return a picture and a prompt with its place, for Git and Llava."""
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "input_ids": prompt(1, 6)}


def tiles() -> dict[str, Tensor]:
    """Return a picture of one tile for Mllama, which the third token stands for."""
    tokens = prompt(1, 8)
    tokens[0, 2] = 190
    pixels = torch.randn(1, 1, 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 8, 1, 2, dtype=torch.long)
    mask[:, 2:, :, :1] = 1
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1, 0]]]),
        "cross_attention_mask": mask,
    }


def llava() -> dict[str, Tensor]:
    """Return a picture of four patches and a prompt that holds them."""
    tokens = prompt(1, 10).clamp(max=189)
    tokens[0, 2:6] = 190
    return {**picture(), "input_ids": tokens}


VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
}

HERE = "support.lookalikes"

FAMILIES: dict[str, TinyFamily] = {
    "llama": TinyFamily("LlamaConfig", "LlamaForCausalLM", SIZES, slow=False),
    "mistral": TinyFamily("MistralConfig", "MistralForCausalLM", {**SIZES, "sliding_window": 16}),
    "qwen2": TinyFamily("Qwen2Config", "Qwen2ForCausalLM", SIZES),
    "qwen3": TinyFamily("Qwen3Config", "Qwen3ForCausalLM", {**SIZES, "head_dim": 16}),
    "phi": TinyFamily("PhiConfig", "PhiForCausalLM", SIZES),
    "phi3": TinyFamily("Phi3Config", "Phi3ForCausalLM", SIZES),
    "gptj": TinyFamily("GPTJConfig", "GPTJForCausalLM", {**GPT, "rotary_dim": 8}),
    "gpt_neox": TinyFamily("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES),
    "codegen": TinyFamily("CodeGenConfig", "CodeGenForCausalLM", {**GPT, "rotary_dim": 8}),
    "falcon": TinyFamily("FalconConfig", "FalconForCausalLM", SIZES),
    "falcon_alibi": TinyFamily("FalconConfig", "FalconForCausalLM", {**SIZES, "alibi": True}),
    "opt": TinyFamily(
        "OPTConfig", "OPTForCausalLM", {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64}
    ),
    "gpt_bigcode": TinyFamily("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT),
    "gpt2": TinyFamily("GPT2Config", "GPT2LMHeadModel", GPT, slow=False),
    "bloom": TinyFamily("BloomConfig", "BloomForCausalLM", {**SIZES, "n_layer": 2, "n_head": 4}),
    "stablelm": TinyFamily("StableLmConfig", "StableLmForCausalLM", SIZES),
    "glm": TinyFamily("GlmConfig", "GlmForCausalLM", {**SIZES, "head_dim": 16}),
    "glm4": TinyFamily("Glm4Config", "Glm4ForCausalLM", {**SIZES, "head_dim": 16}),
    "mixtral": TinyFamily(
        "MixtralConfig", "MixtralForCausalLM", {**SIZES, "num_local_experts": 4, **EXPERTS}
    ),
    "qwen3_moe": TinyFamily(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**SIZES, "head_dim": 16, "num_experts": 4, **EXPERTS},
    ),
    "gpt_oss": TinyFamily(
        "GptOssConfig",
        "GptOssForCausalLM",
        {**SIZES, "head_dim": 16, "num_local_experts": 4, "sliding_window": 16, **EXPERTS},
    ),
    "deepseek_v2": TinyFamily(
        "DeepseekV2Config", "DeepseekV2ForCausalLM", {**MLA, "topk_method": "greedy"}
    ),
    "deepseek_v3": TinyFamily("DeepseekV3Config", "DeepseekV3ForCausalLM", MLA),
    "jamba": TinyFamily(
        "JambaConfig",
        "JambaForCausalLM",
        {
            **SIZES,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "mamba": TinyFamily(
        "MambaConfig",
        "MambaForCausalLM",
        {**SIZES, "state_size": 8, "time_step_rank": 4, "use_mambapy": False},
    ),
    "mpt": TinyFamily(
        "MptConfig",
        "MptForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 1024,
            "use_cache": True,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "t5": TinyFamily(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "whisper": TinyFamily(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "num_mel_bins": 16,
            "max_source_positions": 30,
            "max_target_positions": 100,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        sound,
    ),
    "git": TinyFamily(
        "GitConfig",
        "GitForCausalLM",
        {**SIZES, "num_key_value_heads": 4, "vision_config": VISION},
        picture,
    ),
    "llava": TinyFamily(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**SIZES, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
            "image_token_index": 190,
            "image_token_id": 190,
            "image_seq_length": 4,
        },
        llava,
    ),
    "gemma2": TinyFamily(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**SIZES, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
        slow=False,
    ),
    "gemma3": TinyFamily(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**SIZES, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
    ),
    "mllama": TinyFamily(
        "MllamaConfig",
        "MllamaForConditionalGeneration",
        {
            "text_config": {
                **SIZES,
                "num_hidden_layers": 3,
                "cross_attention_layers": [1],
                "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "image_size": 32,
                "patch_size": 16,
                "max_num_tiles": 2,
                "vision_output_dim": 96,
                "intermediate_layers_indices": [0, 1],
                "supported_aspect_ratios": [[1, 1], [1, 2]],
            },
            "image_token_index": 190,
        },
        tiles,
    ),
    # Look-alikes of families whose code is published beside their weights.
    "baichuan_rotary": TinyFamily(
        "TinyConfig", "BaichuanForCausalLM", {"alibi": False}, module=f"{HERE}.modeling_baichuan"
    ),
    "baichuan_alibi": TinyFamily(
        "TinyConfig", "BaichuanForCausalLM", {"alibi": True}, module=f"{HERE}.modeling_baichuan"
    ),
    "chatglm": TinyFamily(
        "TinyConfig",
        "ChatGLMForConditionalGeneration",
        {"kv_heads": 2},
        module=f"{HERE}.modeling_chatglm",
    ),
    "qwen": TinyFamily(
        "TinyConfig", "QWenLMHeadModel", {"train_length": 12}, module=f"{HERE}.modeling_qwen"
    ),
    "yuan": TinyFamily("TinyConfig", "YuanForCausalLM", module=f"{HERE}.yuan_hf_model"),
    "maira2": TinyFamily(
        "LlavaConfig",
        "Maira2ForConditionalGeneration",
        {
            "text_config": {**SIZES, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
            "image_token_index": 190,
            "image_token_id": 190,
            "image_seq_length": 4,
        },
        llava,
        module=f"{HERE}.modeling_maira2",
    ),
}
