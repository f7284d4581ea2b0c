"""A table of who wrote each position of a cache, so that beams exchange rows of it and no keys.

A beam writes its tokens into its own text of the cache for good. Where beam search has it go on
from another beam, the row of that beam in the table is copied; attention reads the keys that its
row names.
"""

from typing import Any

import torch
from torch import Tensor

from ipex_inductor.ops.attention.decode_attention import QUERIES, why_not_supported
from ipex_inductor.target.device import architecture


class BeamTable:
    """Texts by position: key j of text b is key j of text `rows[b, j]` of the cache.

    Args:
        batch: the number of texts.
        length: the number of positions.
        device: of the cache.
    """

    def __init__(self, batch: int, length: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # later calls may write outside of inference mode
            texts = torch.arange(batch, device=device).unsqueeze(1)
            self.rows = texts.expand(batch, length).contiguous()

    def share(self, beams: int, length: int) -> None:
        """Let all beams of a text read the first `length` keys of its first beam: their prompt."""
        self.rows[:, :length] -= self.rows[:, :length] % beams

    def exchange(self, texts: Tensor, first: int, last: int) -> None:
        """Let each text go on from that of index `texts`, for positions `first` to `last` - 1."""
        live = self.rows[:, first:last]
        live.copy_(live.index_select(0, texts))

    def forget(self, first: int) -> None:
        """Let each text read its own keys from position `first` on."""
        rows = self.rows[:, first:]
        rows.copy_(torch.arange(len(rows), device=rows.device).unsqueeze(1))


def is_useful(config: Any, cache: Any) -> bool:
    """Return whether `cache` is of beams, and our attention reads its keys by a table.

    Other attention would gather all keys of the cache at each token.

    Args:
        config: the configuration of the text decoder.
        cache: a cache of the pool.
    """
    layouts = [layer.layout for layer in cache.attention if layer.is_initialized]
    if cache.beams == 1 or not layouts or len(layouts) < len(cache.layers):
        return False
    heads = getattr(config, "num_attention_heads", 0)
    return getattr(config, "_attn_implementation", "") == "sdpa" and all(
        layout.device.type == "cpu"
        and layout.dtype is layout.value_dtype
        and layout.key_width == layout.value_width
        and heads // layout.heads <= QUERIES
        and not why_not_supported(architecture(), layout.dtype, layout.key_width)
        for layout in layouts
    )
