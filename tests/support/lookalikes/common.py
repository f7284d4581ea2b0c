"""Parts of look-alikes: models of the structure of families whose code transformers has not.

Their code is published beside their weights. These models are written anew, with random weights.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast


class TinyConfig(PretrainedConfig):
    """A config of two layers with four heads of 16 elements."""

    model_type = "look_alike"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]

    def __init__(self, vocab_size=199, hidden_size=64, inner=128, kv_heads=4, **more):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, inner
        self.num_hidden_layers, self.num_attention_heads = 2, 4
        self.num_key_value_heads, self.head_dim = kv_heads, hidden_size // 4
        self.train_length = more.pop("train_length", 1024)
        super().__init__(pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * (
            self.weight
        )


class GatedMLP(nn.Module):
    """Gate and up in two linear layers."""

    def __init__(self, config):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def split_heads(states, heads):
    """Return [batch, tokens, heads * width] as [batch, heads, tokens, width]."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotate_halves(states, sin, cos):
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat((-second, first), -1) * sin


def angles_of(positions, width, base=10000.0):
    """Return the angle of each pair, [batch, 1, tokens, width / 2]."""
    exponents = torch.arange(0, width, 2, device=positions.device).float() / width
    return positions[:, None, :, None].float() / base**exponents


class Layer(nn.Module):
    """Norm, attention, norm, MLP."""

    def __init__(self, attention, mlp, config):
        super().__init__()
        self.input_norm, self.post_norm = RMSNorm(config.hidden_size), RMSNorm(config.hidden_size)
        self.attention, self.mlp = attention, mlp

    def forward(self, x, mask, positions, cache):
        x = x + self.attention(self.input_norm(x), mask, positions, cache)
        return x + self.mlp(self.post_norm(x))


class LookAlike(PreTrainedModel, GenerationMixin):
    """A decoder of layers that subclasses make."""

    config_class = TinyConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            self.make_layer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def make_layer(self, config, index):
        """Return the decoder layer of this number; each family has its own."""
        raise NotImplementedError

    def make_mask(self, embeds, attention_mask, cache, positions, **words):
        """Return the mask that is added to scores, as transformers makes it; None if causal."""
        return create_causal_mask(self.config, embeds, attention_mask, cache, positions, **words)

    def head(self, x):
        return self.lm_head(x)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        logits_to_keep=0,
        cache=None,
        **_,
    ):
        past_key_values = cache if past_key_values is None else past_key_values
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + past)[None]
        mask = self.make_mask(x, attention_mask, past_key_values, position_ids)
        for layer in self.layers:
            x = layer(x, mask, position_ids, past_key_values)
        x = self.norm(x)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.head(x[:, rows]), past_key_values=past_key_values)
