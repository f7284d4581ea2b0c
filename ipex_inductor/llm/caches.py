"""Static KV caches that a pool keeps: allocated once, reset in place, reordered where live.

This module imports transformers. Other modules of this package import it at first use.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.llm import buckets
from ipex_inductor.llm.beam_table import BeamTable
from ipex_inductor.ops.attention.decode_attention import gather_rows

cache_utils: Any = importlib.import_module("transformers.cache_utils")
Cache, EncoderDecoderCache = cache_utils.Cache, cache_utils.EncoderDecoderCache
StaticCache, StaticLayer = cache_utils.StaticCache, cache_utils.StaticLayer

# Layers replaced by `PooledLayer`. Sliding layers are kept at full length: the mask hides what left
# the window, so decoding needs no second graph once the window is full.
PLAIN_LAYERS = (StaticLayer, cache_utils.StaticSlidingWindowLayer)

# In transformers 5 `crop(0)` removes no token, in 4.x all of them.
ZERO_CROPS_NOTHING = "tokens_to_remove" in inspect.signature(Cache.crop).parameters

# transformers 5.4 and later count in a tensor of the layer, earlier ones in `cache_position`.
COUNTS_IN_TENSOR = hasattr(StaticLayer(max_cache_len=1), "cumulative_length")


@dataclass(frozen=True)
class LayerLayout:
    """Shapes of one layer's keys and values, without batch and length."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    value_dtype: torch.dtype  # under autocast rotated keys may be wider than values
    device: torch.device


class PooledLayer(cache_utils.StaticLayer):  # type: ignore[misc]
    """A static attention layer that can be allocated early, cropped, and reordered where live."""

    is_croppable = True
    max_cache_len: int
    cumulative_length: Any  # the number of tokens: a tensor, in versions that count in one
    table: BeamTable | None = None  # of beams, shared by all layers of a cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate keys and values for states of these shapes, [batch, heads, any, width]."""
        value_states = key_states if value_states is None else value_states
        batch, heads, _, key_width = key_states.shape
        self.allocate(
            batch,
            LayerLayout(
                heads,
                key_width,
                value_states.shape[-1],
                key_states.dtype,
                value_states.dtype,
                key_states.device,
            ),
        )

    def allocate(self, batch: int, layout: LayerLayout) -> None:
        """Allocate keys and values for `batch` texts."""
        self.layout = layout
        self.dtype, self.device = layout.dtype, layout.device
        self.batch_size = self.max_batch_size = batch
        self.num_heads, self.head_dim = layout.heads, layout.key_width
        self.k_head_dim, self.v_head_dim = layout.key_width, layout.value_width
        shape = (batch, layout.heads, self.max_cache_len)
        widths = ((layout.key_width, layout.dtype), (layout.value_width, layout.value_dtype))
        self.keys, self.values = (
            torch.zeros((*shape, width), dtype=dtype, device=layout.device)
            for width, dtype in widths
        )
        if COUNTS_IN_TENSOR:
            self.cumulative_length = self.cumulative_length.to(layout.device)
        self.is_initialized = True

    def grow(self, ceiling: int) -> None:
        """Make room for `ceiling` tokens; those that it holds stay."""
        held = (self.keys, self.values) if self.is_initialized else ()
        self.max_cache_len = ceiling
        if not held:
            return
        length = held[0].shape[2]
        self.allocate(held[0].shape[0], self.layout)
        for old, new in zip(held, (self.keys, self.values), strict=True):
            new[:, :, :length].copy_(old)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens; return those of all tokens of each text."""
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        if self.table is None:
            return states
        return gather_rows(states[0], self.table.rows), gather_rows(states[1], self.table.rows)

    def get_seq_length(self) -> Any:
        """Return the number of tokens: in a graph the tensor that counts them, else its value now.

        Callers keep the result over later writes, so they must not see the tensor change.
        """
        length = super().get_seq_length()
        if not isinstance(length, Tensor) or torch.compiler.is_compiling():
            return length
        return int(length) if length.device.type == "cpu" else length.clone()

    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if COUNTS_IN_TENSOR:
            self.cumulative_length.fill_(length)
        else:  # these versions count the keys that are not zero
            self.keys[:, :, length:].zero_()
            self.values[:, :, length:].zero_()

    def crop(self, length: int) -> None:
        """Keep `length` tokens, or remove as many as a negative `length` says."""
        live = int(self.get_seq_length())
        if length < 0:
            self.trim(live + length)
        elif length > 0 or not ZERO_CROPS_NOTHING:
            self.trim(min(live, length))

    def copy_rows(self, rows: Tensor, first: int, last: int) -> None:
        """Replace texts by those of index `rows`, for the tokens from `first` to before `last`."""
        for states in (self.keys, self.values):
            live = states[:, :, first:last]
            live.copy_(live.index_select(0, rows))

    def copy_by_table(self, table: BeamTable, last: int) -> None:
        """Replace the tokens before `last` of each text by those that a table names."""
        for states in (self.keys, self.values):
            live = states[:, :, :last]
            live.copy_(gather_rows(live, table.rows[:, :last]))


class PooledCache(cache_utils.StaticCache):  # type: ignore[misc]
    """A static cache of one ceiling whose attention layers are `PooledLayer`s.

    Args:
        config: the configuration of the text decoder.
        ceiling: the most tokens it holds, until it grows.
        beams: texts of a beam search that begin with one prompt, 1 without beam search.
    """

    layers: list[Any]
    table: BeamTable | None = None

    def __init__(self, config: Any, ceiling: int, beams: int = 1) -> None:
        super().__init__(config=config, max_cache_len=ceiling)
        self.layers = [
            PooledLayer(ceiling) if type(layer) in PLAIN_LAYERS else layer for layer in self.layers
        ]
        self.ceiling, self.beams = ceiling, beams
        self.prompt_length = 0
        self._share_table(None)  # of each layer's own from the first call on, as guards look there

    @property
    def attention(self) -> list[PooledLayer]:
        """Return the layers that hold keys and values alone."""
        return [layer for layer in self.layers if isinstance(layer, PooledLayer)]

    @property
    def is_attention_alone(self) -> bool:
        """Return whether no layer holds a state: padding behind a prompt leaves no trace then."""
        return all(isinstance(layer, PooledLayer) for layer in self.layers)

    @property
    def is_allocated(self) -> bool:
        """Return whether every attention layer has its memory."""
        return all(layer.is_initialized for layer in self.attention)

    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens in every attention layer."""
        for layer in self.attention:
            if layer.is_initialized:
                layer.trim(length)
        if self.table is not None:
            self.table.forget(length)

    def reserve(self, length: int) -> None:
        """Grow if `length` tokens are more than the ceiling."""
        if length <= self.ceiling:
            return
        self.detach_table()
        self.ceiling = buckets.round_ceiling(length)
        with torch.inference_mode(False), torch.no_grad():
            for layer in self.attention:
                layer.grow(self.ceiling)

    def count_tokens(self) -> int:
        """Return the number of tokens that it holds."""
        return int(self.attention[0].get_seq_length()) if self.attention else 0

    def crop(self, length: int) -> None:
        """Keep `length` tokens, or remove as many as a negative `length` says."""
        for layer in self.layers:
            layer.crop(length)
        if self.table is not None:
            self.table.forget(self.count_tokens())

    def reset(self) -> None:
        """Forget all tokens, and the table of beams."""
        self._share_table(None)
        super().reset()

    def attach_table(self) -> None:
        """Let beams exchange rows of a table from now on, and read their prompt in one place."""
        first = self.attention[0]
        table = BeamTable(first.batch_size, self.ceiling, first.device)
        table.share(self.beams, self.count_tokens())
        self._share_table(table)

    def detach_table(self) -> None:
        """Copy tokens to the texts that read them, after which no table is needed."""
        if self.table is not None:
            with torch.no_grad():
                for layer in self.attention:
                    layer.copy_by_table(self.table, self.count_tokens())
        self._share_table(None)

    def _share_table(self, table: BeamTable | None) -> None:
        self.table = table
        for layer in self.attention:
            layer.table = table

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each text."""
        self.detach_table()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the texts of these indices."""
        self.detach_table()
        super().batch_select_indices(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace texts by those of index `beam_idx`.

        With a table only its rows are copied. Without one, those tokens are that may differ: beams
        of one text have one prompt, so it is not copied as long as no index leaves its text.
        """
        rows = beam_idx.tolist()
        if rows == list(range(len(rows))):
            return
        if self.table is not None:
            self.table.exchange(beam_idx.to(self.table.rows.device), 0, self.count_tokens())
        within = all(row // self.beams == here // self.beams for here, row in enumerate(rows))
        if not within:
            self.beams = 1  # beams of one text may have several prompts from now on
        first = self.prompt_length if self.beams > 1 else 0
        for layer in self.layers:
            if not isinstance(layer, PooledLayer):
                layer.reorder_cache(beam_idx)
            elif layer.is_initialized and layer.table is None:
                layer.copy_rows(beam_idx.to(layer.device), first, int(layer.get_seq_length()))

    def layouts(self) -> tuple[LayerLayout | None, ...]:
        """Return the layout of each layer, None for layers without keys and values."""
        return tuple(getattr(layer, "layout", None) for layer in self.layers)

    def allocate(self, batch: int, layouts: tuple[LayerLayout | None, ...]) -> None:
        """Allocate every layer of a known layout for `batch` texts."""
        for layer, layout in zip(self.layers, layouts, strict=True):
            if layout is not None:
                layer.allocate(batch, layout)


def decoder_part(cache: Any) -> Any:
    """Return the cache of the decoder's own tokens, also of an encoder-decoder."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def is_pooled(cache: Any) -> bool:
    """Return whether `cache` is of the pool."""
    return isinstance(decoder_part(cache), PooledCache)


def is_replaceable(cache: Any) -> bool:
    """Return whether `cache` is one that `generate` made by default, or a static one."""
    part = decoder_part(cache)
    kinds = (cache_utils.DynamicCache, StaticCache)
    return type(part) in kinds and not getattr(part, "offloading", False)


def new_cache(config: Any, ceiling: int, beams: int, encoder_length: int | None) -> Any:
    """Return an empty cache, one for an encoder-decoder if the length of the encoder is given."""
    own = PooledCache(config, ceiling, beams)
    if encoder_length is None:
        return own
    return EncoderDecoderCache(own, PooledCache(config, encoder_length, beams))
