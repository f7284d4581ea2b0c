"""Check the arguments of `ipex::paged_write` and `ipex::paged_attention`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipex_inductor.errors import ArgumentError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e5m2, torch.float8_e4m3fn)
SMALL = (*FP8, torch.int8)  # entries with a scale
INTEGERS = (torch.int32, torch.int64)
# What was expected, and the argument to check, by the numbers of faults in paged_attention.cpp.
FAULTS = (
    ("", ""),
    ("starts of queries that begin with 0, rise, and end with the number of queries", "starts"),
    ("lengths from 0 to the longest one, of texts whose pages are in the table", "context lengths"),
    ("live pages that are blocks of the cache", "block tables"),
    ("a head mapping to key heads of the cache", "head mapping"),
)
STARTS, LENGTH, BLOCK, HEAD = range(1, len(FAULTS))


class Cache(NamedTuple):
    """Keys and values of texts in pages.

    Args:
        keys: [blocks, key heads, block size, width].
        values: as `keys`.
        tables: [texts, blocks of a text]: block of each page; those behind a length are not read.
        lengths: [texts], the numbers of keys.
    """

    keys: Tensor
    values: Tensor
    tables: Tensor
    lengths: Tensor


class Settings(NamedTuple):
    """Factors and limits of the scores.

    Args:
        scale: factor of the scores.
        k_scale: factor of keys with 8 bits.
        v_scale: factor of values with 8 bits.
        softcap: scores become softcap * tanh(scores / softcap); none at or below 0.
        before: keys before a query's own place that it sees, -1 for all.
        behind: keys behind it that it sees, -1 for all.
    """

    scale: float
    k_scale: float
    v_scale: float
    softcap: float
    before: int
    behind: int


class Heads(NamedTuple):
    """Key head and slope of each head.

    Args:
        mapping: [heads], the key head of each; None for equal groups.
        slopes: [heads], subtracted for each key of distance, or None.
    """

    mapping: Tensor | None
    slopes: Tensor | None


class Call(NamedTuple):
    """Attention of queries over the pages of their texts.

    The last query of a text has the place of its last key. Queries that see no key get zeros.

    Args:
        out: [tokens, heads, width], where the result goes.
        query: [tokens, heads, width].
        cache: keys and values.
        heads: key head and slope of each head.
        starts: [texts + 1], the first query of each text; None for one query a text.
        longest: the largest length, or more.
        settings: factors and limits of the scores.
    """

    out: Tensor
    query: Tensor
    cache: Cache
    heads: Heads
    starts: Tensor | None
    longest: int
    settings: Settings


def read_call(arguments: Sequence[Any]) -> Call:
    """Return a checked call of `ipex::paged_attention`, from arguments in its schema's order."""
    out, query, keys, values, mapping, tables, lengths, starts, slopes, longest, *rest = arguments
    cache, heads = Cache(keys, values, tables, lengths), Heads(mapping, slopes)
    call = Call(out, query, cache, heads, starts, longest, Settings(*rest))
    _check_call(call)
    return call


def check_slots(slots: Tensor, count: int) -> None:
    """Raise `ArgumentError` if a slot is behind the last one of `count`."""
    highest = int(slots.max())
    if highest >= count:
        raise ArgumentError(
            f"slots up to {count - 1}, of the cache's blocks",
            f"slot {highest}",
            "Allocate more blocks, or check the slot mapping.",
        )


def check_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Raise `ArgumentError` if `paged_write` cannot write these."""
    _check_cache(key, key_cache, value_cache)
    _expect(
        key.dim() == 3 and key.shape == value.shape,
        "keys and values of one shape [tokens, key heads, width]",
        f"{list(key.shape)} and {list(value.shape)}",
    )
    _expect(
        key.shape[1] == key_cache.shape[1] and key.shape[2] == key_cache.shape[3],
        f"keys of {key_cache.shape[1]} heads of width {key_cache.shape[3]}, as the cache has",
        f"{key.shape[1]} heads of width {key.shape[2]}",
    )
    _expect(
        slots.shape == key.shape[:1] and slots.dtype in INTEGERS,
        f"a slot mapping of {len(key)} integers, one a token",
        f"{list(slots.shape)} of {slots.dtype}",
    )
    _expect(value.dtype is key.dtype, f"values in {key.dtype}, as keys", str(value.dtype))


def _check_cache(states: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise `ArgumentError` unless caches have the layout and a dtype for these states."""
    _expect(
        key_cache.dim() == 4 and key_cache.shape == value_cache.shape,
        "two caches of one shape [blocks, key heads, block size, width]",
        f"{list(key_cache.shape)} and {list(value_cache.shape)}",
    )
    _expect(states.dtype in FLOATS, "float32, bfloat16 or float16", str(states.dtype))
    dtype = key_cache.dtype
    _expect(
        dtype is value_cache.dtype and (dtype is states.dtype or dtype in SMALL),
        f"caches in {states.dtype}, float8_e5m2, float8_e4m3fn or int8",
        f"{dtype} and {value_cache.dtype}",
        "Bytes of an FP8 cache are read by cache.view(torch.float8_e5m2).",
    )


def _expect(holds: bool, expected: str, actual: str, to_do: str = "") -> None:
    if not holds:
        raise ArgumentError(expected, actual, to_do or "See docs/guides/llm.md, paged attention.")


def _check_call(call: Call) -> None:
    """Raise `ArgumentError` for shapes and dtypes of which there is no attention."""
    query, out, cache = call.query, call.out, call.cache
    _check_cache(query, cache.keys, cache.values)
    _expect(
        query.dim() == 3 and query.shape == out.shape and query.dtype is out.dtype,
        "a query [tokens, heads, width], and an output of its shape and dtype",
        f"{list(query.shape)} of {query.dtype} and {list(out.shape)} of {out.dtype}",
    )
    _expect(
        query.shape[2] == cache.keys.shape[3],
        f"heads of width {cache.keys.shape[3]}, as the cache has",
        f"width {query.shape[2]}",
    )
    _check_heads(call.heads, query.shape[1], cache.keys.shape[1])
    texts = len(query) if call.starts is None else len(call.starts) - 1
    _expect_integers("block_tables", cache.tables, (texts, cache.tables.shape[-1]))
    _expect_integers("lengths of texts", cache.lengths, (texts,))
    if call.starts is not None:
        _expect_integers("starts of queries", call.starts, (texts + 1,))


def _check_heads(heads: Heads, count: int, key_heads: int) -> None:
    if heads.mapping is None:
        expected = f"heads in groups, one for each of {key_heads} key heads"
        _expect(count % key_heads == 0, expected, f"{count} heads")
    else:
        _expect_integers("head_mapping", heads.mapping, (count,))
    if heads.slopes is not None:
        shape = heads.slopes.shape
        _expect(shape == (count,), f"{count} ALiBi slopes", str(list(shape)))


def _expect_integers(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    _expect(
        tensor.shape == shape and tensor.dtype in INTEGERS,
        f"{name} of integers, {list(shape)}",
        f"{list(tensor.shape)} of {tensor.dtype}",
    )


def raise_fault(number: int) -> None:
    """Raise `ArgumentError` for a fault, unless its number is 0."""
    expected, name = FAULTS[number]
    if number:
        raise ArgumentError(expected, f"others in {name}", f"Check the {name}.")


def find_fault(call: Call) -> int:
    """Return the number of what is wrong with numbers in tensors on a CPU, 0 for nothing."""
    cache, mapping, starts = call.cache, call.heads.mapping, call.starts
    blocks, key_heads, size, _ = cache.keys.shape
    if starts is not None and (
        starts[0] != 0 or starts[-1] != len(call.query) or (starts.diff() < 0).any()
    ):
        return STARTS
    if mapping is not None and ((mapping < 0) | (mapping >= key_heads)).any():
        return HEAD
    most = min(call.longest, cache.tables.shape[1] * size)
    if ((cache.lengths < 0) | (cache.lengths > most)).any():
        return LENGTH
    is_live = torch.arange(cache.tables.shape[1]) * size < cache.lengths[:, None]
    is_wrong = (cache.tables < 0) | (cache.tables >= blocks)
    return BLOCK if (is_live & is_wrong).any() else 0
