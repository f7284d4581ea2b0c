"""Yuan: two causal convolutions over neighboring tokens before query and key.

The last two tokens of each layer are kept beside the cache.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.lookalikes.common import (
    GatedMLP,
    Layer,
    LookAlike,
    RMSNorm,
    TinyConfig,
    angles_of,
    rotate_halves,
    split_heads,
)

__all__ = ["TinyConfig"]


class LocalFilter(nn.Module):
    """Two convolutions of two taps each, added to their input."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Conv1d(width, width // 2, 2), nn.Conv1d(width // 2, width, 2)
        self.norm = RMSNorm(width)

    def forward(self, x, before):
        """Return the result of x, [batch, tokens, width], behind two tokens `before` it."""
        joined = torch.cat((before, x), 1).transpose(1, 2)
        out = self.second(self.first(joined)).transpose(1, 2)
        return self.norm(out + x), joined.transpose(1, 2)[:, -2:]


class Attention(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        width = config.hidden_size
        self.index, self.heads = index, config.num_attention_heads
        self.filter = LocalFilter(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x, mask, positions, cache):
        states = {} if cache is None else vars(cache).setdefault("filter_states", {})
        before = states.get(self.index)
        before = x.new_zeros(x.shape[0], 2, x.shape[2]) if before is None else before
        filtered, states[self.index] = self.filter(x, before)
        query, key, value = (
            split_heads(part, self.heads)
            for part in (self.q_proj(filtered), self.k_proj(filtered), self.v_proj(x))
        )
        angles = angles_of(positions, query.shape[-1]).repeat(1, 1, 1, 2)
        sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
        query, key = rotate_halves(query, sin, cos), rotate_halves(key, sin, cos)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None and query.shape[2] > 1
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class YuanForCausalLM(LookAlike):
    def make_layer(self, config, index):
        return Layer(Attention(config, index), GatedMLP(config), config)
