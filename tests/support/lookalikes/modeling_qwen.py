"""Qwen of version 1: `c_attn`, queries scaled by the logarithm of their place, dynamic NTK.

Beyond the length of training, the base of the rotary frequencies grows with the text.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from support.lookalikes.common import (
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
        self.index, self.heads, self.train_length = (
            index,
            config.num_attention_heads,
            (config.train_length),
        )
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x, mask, positions, cache):
        query, key, value = (split_heads(part, self.heads) for part in self.c_attn(x).chunk(3, -1))
        width = query.shape[-1]
        length = (positions.max() + 1).clamp(min=self.train_length)
        growth = 2.0 ** torch.ceil(torch.log2(length / self.train_length) + 1) - 1
        alpha = torch.where(length > self.train_length, growth, 1.0)
        base = 10000.0 * alpha ** (width / (width - 2))
        angles = angles_of(positions, width, base).repeat(1, 1, 1, 2)
        sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
        query, key = rotate_halves(query, sin, cos), rotate_halves(key, sin, cos)
        places = (positions[:, None, :, None] + 1).float()
        scale = (places.log() / math.log(self.train_length)).clamp(min=1.0)
        query = query * scale.to(x.dtype)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None and query.shape[2] > 1
        )
        return self.c_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.w1, self.w2 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.c_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.c_proj(self.w1(x) * F.silu(self.w2(x)))


class QWenLMHeadModel(LookAlike):
    def make_layer(self, config, index):
        return Layer(Attention(config, index), MLP(config), config)
