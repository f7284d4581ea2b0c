"""`ipex.llm.modules.PagedAttention`: keys and values of many texts in blocks of one cache."""

import torch
from torch import Tensor

from ipex_inductor.errors import ArgumentError
from ipex_inductor.ops.attention.paged_attention import paged_attention, paged_write
from ipex_inductor.templates.cpu.paged_attention import register

register()
FORMATS = {  # dtypes of caches by `kv_cache_dtype`; "auto" takes the cache's own
    "fp8": (torch.float8_e5m2, torch.float8_e4m3fn),
    "fp8_e5m2": (torch.float8_e5m2,),
    "fp8_e4m3": (torch.float8_e4m3fn,),
    "int8": (torch.int8,),
}


def _check_format(kv_cache_dtype: str, cache: Tensor) -> None:
    if kv_cache_dtype == "auto" or cache.dtype in FORMATS.get(kv_cache_dtype, ()):
        return
    known = ", ".join(["auto", *FORMATS])
    raise ArgumentError(
        f"kv_cache_dtype of {known}, and a cache of that dtype",
        f"{kv_cache_dtype!r} and a cache in {cache.dtype}",
        'Pass "auto" to use the dtype of the cache.',
    )


class PagedAttention:
    """Attention over caches [blocks, key heads, block size, width] that texts fill page by page."""

    @classmethod
    def reshape_and_cache(
        cls,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write keys and values of tokens into their slots of the caches.

        Args:
            key: [tokens, key heads, width].
            value: as `key`.
            key_cache: [blocks, key heads, block size, width], in the dtype of `key`,
                float8_e5m2, float8_e4m3fn or int8.
            value_cache: as `key_cache`.
            slot_mapping: [tokens], block * block size + row; negative ones are skipped.
            kv_cache_dtype: "auto", "fp8", "fp8_e5m2", "fp8_e4m3" or "int8".
            k_scale: keys are divided by it before they are rounded to 8 bits.
            v_scale: the same of values.

        Raises:
            ArgumentError: for shapes, dtypes and slots that do not fit.
        """
        _check_format(kv_cache_dtype, key_cache)
        paged_write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)

    reshape_and_cache_flash = reshape_and_cache

    @classmethod
    def single_query_cached_kv_attention(
        cls,
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        head_mapping: Tensor,
        scale: float,
        block_tables: Tensor,
        context_lens: Tensor,
        block_size: int,
        max_context_len: int,
        alibi_slopes: Tensor | None,
        window_size: int = -1,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        softcap: float = -1.0,
    ) -> None:
        """Write attention of one query of each text over its keys to `output`.

        Args:
            output: [texts, heads, width]; receives the result.
            query: [texts, heads, width], of each text's last token.
            key_cache: [blocks, key heads, block size, width].
            value_cache: as `key_cache`.
            head_mapping: [heads], the key head of each head.
            scale: factor of the scores.
            block_tables: [texts, blocks of a text], the block of each page.
            context_lens: [texts], the numbers of keys.
            block_size: the block size of the caches.
            max_context_len: the largest number of keys, or more.
            alibi_slopes: [heads], or None.
            window_size: last keys that are seen, the query's own included; all at or below 0.
            k_scale: factor of keys with 8 bits.
            v_scale: factor of values with 8 bits.
            softcap: scores become softcap * tanh(scores / softcap); none at or below 0.

        Raises:
            ArgumentError: for shapes and dtypes, and on CPUs for numbers that do not fit.
        """
        if block_size != key_cache.shape[2]:
            raise ArgumentError(
                f"block_size {key_cache.shape[2]}, as caches of {list(key_cache.shape)} have",
                str(block_size),
                "Lay caches out as [blocks, key heads, block size, width].",
            )
        caches, tables = (key_cache, value_cache), (block_tables, context_lens)
        before = window_size - 1 if window_size > 0 else -1
        factors = scale, k_scale, v_scale, softcap, before, 0
        paged_attention(
            *(output, query, *caches, head_mapping, *tables, None, alibi_slopes),
            *(max_context_len, *factors),
        )

    @classmethod
    def flash_attn_varlen_func(
        cls,
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        scale: float,
        is_cusal: bool,
        block_tables: Tensor,
        alibi_slopes: Tensor | None,
        window_size_left: int = -1,
        window_size_right: int = -1,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        softcap: float = -1.0,
    ) -> None:
        """Write attention of the last tokens of each text over its keys to `output`.

        Args:
            output: [tokens of all texts, heads, width]; receives the result.
            query: [tokens of all texts, heads, width].
            key_cache: [blocks, key heads, block size, width], whose key heads divide the heads.
            value_cache: as `key_cache`.
            cu_seqlens_q: [texts + 1], the first token of each text, and the number of tokens.
            cu_seqlens_kv: [texts + 1], the same of keys.
            max_seqlen_q: accepted; `cu_seqlens_q` says it.
            max_seqlen_kv: the largest number of keys of a text, or more.
            scale: factor of the scores.
            is_cusal: hide later keys; the last token and the last key are aligned.
            block_tables: [texts, blocks of a text], the block of each page.
            alibi_slopes: [heads], or None.
            window_size_left: keys before a token's own that it sees; all at or below 0.
            window_size_right: keys behind it that it sees; all below 0.
            kv_cache_dtype: "auto", "fp8", "fp8_e5m2", "fp8_e4m3" or "int8".
            k_scale: factor of keys with 8 bits.
            v_scale: factor of values with 8 bits.
            softcap: scores become softcap * tanh(scores / softcap); none at or below 0.

        Raises:
            ArgumentError: for shapes and dtypes, and on CPUs for numbers that do not fit.
        """
        _check_format(kv_cache_dtype, key_cache)
        caches = key_cache, value_cache
        lengths = cu_seqlens_kv[1:] - cu_seqlens_kv[:-1]
        before = window_size_left if window_size_left > 0 else -1
        behind = 0 if is_cusal else max(window_size_right, -1)
        factors = scale, k_scale, v_scale, softcap, before, behind
        paged_attention(
            *(output, query, *caches, None, block_tables, lengths, cu_seqlens_q, alibi_slopes),
            *(max_seqlen_kv, *factors),
        )
