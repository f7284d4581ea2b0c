"""Baichuan: query, key and value of one layer `W_pack`; rotary (7B) or ALiBi (13B)."""

import torch
import torch.nn.functional as F
from torch import nn

from support.lookalikes.common import (
    GatedMLP,
    Layer,
    LookAlike,
    TinyConfig,
    angles_of,
    rotate_halves,
    split_heads,
)

__all__ = ["TinyConfig"]


class Attention(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        width = config.hidden_size
        self.index, self.heads, self.alibi = index, config.num_attention_heads, config.alibi
        self.W_pack = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x, mask, positions, cache):
        packed = self.W_pack(x).unflatten(-1, (3, -1)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        query, key, value = (split_heads(part, self.heads) for part in packed)
        if not self.alibi:
            angles = angles_of(positions, query.shape[-1]).repeat(1, 1, 1, 2)
            sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
            query, key = rotate_halves(query, sin, cos), rotate_halves(key, sin, cos)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class BaichuanForCausalLM(LookAlike):
    """Its head divides each row of the weight by its length, as of version 2."""

    def make_layer(self, config, index):
        return Layer(Attention(config, index), GatedMLP(config), config)

    def head(self, x):
        return F.linear(x, F.normalize(self.lm_head.weight)) * 4

    def make_mask(self, embeds, attention_mask, cache, positions):
        """Return the causal mask, with a slope of each head times the key's place for ALiBi."""
        words = {"allow_is_causal_skip": False}
        mask = super().make_mask(embeds, attention_mask, cache, positions, **words)
        if mask.dtype is torch.bool:
            low = torch.finfo(embeds.dtype).min
            mask = torch.zeros_like(mask, dtype=embeds.dtype).masked_fill(~mask, low)
        if not self.config.alibi:
            return mask
        heads = self.config.num_attention_heads
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=embeds.device) / heads)
        places = torch.arange(mask.shape[-1], device=embeds.device)
        return mask + (slopes[:, None, None] * places).to(embeds.dtype)
