"""Attention of new tokens over static caches, written as transformers writes it."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Decoder(nn.Module):
    """Layers of attention alone, each with a cache of two heads of keys.

    Args:
        groups: heads of queries that share a head of keys.
        keys: the room of each cache.
        width: of a head.
        layers: their number.
        dtype: of the caches.
    """

    def __init__(self, groups=4, keys=256, width=64, layers=2, dtype=torch.bfloat16):
        super().__init__()
        self.groups, self.width = groups, width
        for name in ("keys", "values"):
            for layer in range(layers):
                self.register_buffer(f"{name}{layer}", torch.zeros(1, 2, keys, width, dtype=dtype))
        self.layers = layers

    def mask(self, position):
        keys = torch.arange(self.keys0.shape[2], device=position.device)
        return (keys <= position[:, None])[None, None]

    def repeat(self, states):
        batch, heads, keys, width = states.shape
        wide = states[:, :, None].expand(batch, heads, self.groups, keys, width)
        return wide.reshape(batch, heads * self.groups, keys, width)

    def forward(self, x, position):
        mask = self.mask(position)
        for layer in range(self.layers):
            caches = [getattr(self, f"{name}{layer}") for name in ("keys", "values")]
            for cache, share in zip(caches, (0.5, 0.25), strict=True):
                cache.index_copy_(2, position, x[:, :2] * share)
            states = [self.repeat(cache) for cache in caches]
            attended = scaled_dot_product_attention(x, *states, attn_mask=mask)
            x = attended.transpose(1, 2).contiguous().transpose(1, 2) + 1
        return x


class Added(Decoder):
    """The mask is added, and has other numbers than 0 and -inf."""

    def mask(self, position):
        return super().mask(position).to(self.keys0.dtype) * position[:, None]


class Unmasked(Decoder):
    """All keys are visible."""

    def mask(self, position):
        return None
