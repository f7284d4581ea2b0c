"""ChatGLM: tokens first, one layer for query, key and value, few key heads, half of a head rotated.

Rotated elements are neighbors, and the MLP's gate and up are one layer.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.lookalikes.common import Layer, LookAlike, TinyConfig, angles_of

__all__ = ["TinyConfig"]


def rotate_neighbors(states, sin, cos):
    """Return states whose first half of each head is rotated; sin and cos [batch, 1, tokens, n]."""
    width = states.shape[-1] // 2
    pairs = states[..., :width].unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((turned, states[..., width:]), -1)


class Attention(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.index, self.heads = index, config.num_attention_heads
        self.kv_heads, self.width = config.num_key_value_heads, config.head_dim
        total = (self.heads + 2 * self.kv_heads) * self.width
        self.query_key_value = nn.Linear(config.hidden_size, total)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, mask, positions, cache):
        mixed = self.query_key_value(x.transpose(0, 1))  # [tokens, batch, all heads]
        sizes = [self.heads * self.width, *[self.kv_heads * self.width] * 2]
        query, key, value = (
            part.unflatten(-1, (-1, self.width)).permute(1, 2, 0, 3)
            for part in mixed.split(sizes, -1)
        )
        angles = angles_of(positions, self.width // 2)
        sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
        query, key = rotate_neighbors(query, sin, cos), rotate_neighbors(key, sin, cos)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        groups = self.heads // self.kv_heads
        key, value = (
            part.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for part in (key, value)
        )
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None and query.shape[2] > 1
        )
        return self.dense(out.permute(2, 0, 1, 3).flatten(2)).transpose(0, 1)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.dense_h_to_4h = nn.Linear(width, 2 * inner, bias=False)
        self.dense_4h_to_h = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        gate, up = self.dense_h_to_4h(x).chunk(2, -1)
        return self.dense_4h_to_h(F.silu(gate) * up)


class ChatGLMForConditionalGeneration(LookAlike):
    def make_layer(self, config, index):
        return Layer(Attention(config, index), MLP(config), config)
