"""Attention over a cache in pages, and over one of beams, for CPUs: `paged_attention.cpp`."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ipex_inductor.ops.attention import indirect_attention as indirect
from ipex_inductor.ops.attention import paged_attention as paged
from ipex_inductor.ops.attention import paged_checks as checks
from ipex_inductor.ops.attention.decode_attention import why_not_supported
from ipex_inductor.ops.common.defining import implement_on_cpu
from ipex_inductor.reporting.decisions import warn_once
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu import cpu_library
from ipex_inductor.templates.cpu.kernel_library import KernelLibrary

PARTS = ("vectors.cpp", "attention_parts.cpp", "paged_attention.cpp")
# By their numbers in paged_attention.cpp.
NUMBERS = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float8_e5m2: 4,
    torch.float8_e4m3fn: 5,
    torch.int8: 6,
}
EVERY_KEY = 1 << 40  # keys that a query sees before or behind its place, where all are

LIBRARY = KernelLibrary(
    "paged attention",
    lambda settings: cpu_library.source(parts=PARTS),
    lambda: [{"bf16 products": cpu_library.is_paired()}],
)
library, why_not, begin = LIBRARY.library, LIBRARY.why_not, LIBRARY.begin


@functools.cache
def _kernel(name: str, pointers: int) -> Any:
    kernel = library()[name]
    kernel.restype, kernel.argtypes = ctypes.c_int32, [ctypes.c_void_p] * pointers
    return kernel


def why_no_kernel(query: Tensor) -> str | None:
    """Return why no kernel attends heads like these, None if one does.

    Args:
        query: [..., width].
    """
    return why_not_supported(architecture(), query.dtype, query.shape[-1]) or why_not()


def attend(*arguments: Any) -> None:
    """Compute `ipex::paged_attention` on CPUs: by the kernel, or by torch's ops without one.

    Args:
        arguments: those of the op.
    """
    call = checks.read_call(arguments)
    out, query = call.out, call.query
    mapping = _drop_plain_mapping(call.heads.mapping, query.shape[1], call.cache.keys.shape[1])
    call = call._replace(heads=call.heads._replace(mapping=mapping))
    if (reason := why_no_kernel(query)) is not None:
        warn_once(f"paged attention runs slowly, without a kernel: {reason}")
        paged.compute_reference(call)
        return
    result = out if out.stride(-1) == 1 else torch.empty(out.shape, dtype=out.dtype)
    _run(call._replace(out=result))
    if result is not out:
        out.copy_(result)


def _run(call: checks.Call, mask: Tensor | None = None) -> None:
    """Call the kernel.

    Args:
        call: the call; rows of `out` have no gaps.
        mask: [texts, heads, tokens, keys] in the dtype of the query, added to the scores; or None.
    """
    cache, heads = call.cache, call.heads
    read = [_close_rows(t) for t in (call.query, cache.keys, cache.values)]
    integers = [_as_int32(t) for t in (cache.tables, cache.lengths, call.starts, heads.mapping)]
    if mask is not None and mask.stride(3) not in (0, 1):
        mask = mask.contiguous()
    strides = (
        *(read[0].stride()[:2], call.out.stride()[:2], read[1].stride()[:3], read[2].stride()[:3]),
        *(cast(Tensor, integers[0]).stride()[:1], (0,) * 4 if mask is None else mask.stride()),
    )
    slopes = None if heads.slopes is None else heads.slopes.float().contiguous()
    tensors = (*read, *integers, slopes, mask, call.out)
    pointers = (None if t is None else t.data_ptr() for t in tensors)
    kernel = _kernel("paged_attention", 12)
    checks.raise_fault(kernel(_list_sizes(call, strides), _list_factors(call), *pointers))


def _drop_plain_mapping(head_mapping: Tensor | None, heads: int, key_heads: int) -> Tensor | None:
    """Return None for a mapping of equal groups, whose heads share what they read."""
    if head_mapping is None or heads % key_heads:
        return head_mapping
    groups = heads // key_heads
    is_plain = head_mapping.tolist() == [head // groups for head in range(heads)]
    return None if is_plain else head_mapping


def _as_int32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _close_rows(tensor.to(torch.int32))


def _close_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _list_sizes(call: checks.Call, strides: Sequence[Sequence[int]]) -> Any:
    """Return the numbers of `PagedSizes` of the C++."""
    cache, query, settings = call.cache, call.query, call.settings
    blocks, key_heads, size, width = cache.keys.shape
    bounds = (EVERY_KEY if keys < 0 else keys for keys in (settings.before, settings.behind))
    numbers = (
        *(len(cache.lengths), len(query), query.shape[1], key_heads, width),
        *(blocks, size, cache.tables.shape[1], call.longest, *bounds),
        *(NUMBERS[query.dtype], NUMBERS[cache.keys.dtype]),
        *(step for each in strides for step in each),
    )
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _list_factors(call: checks.Call) -> Any:
    """Return the numbers of `PagedFactors` of the C++."""
    scale, values = paged.list_factors(call.cache.keys.dtype, call.settings)
    return (ctypes.c_float * 3)(scale, max(call.settings.softcap, 0.0), values)


def attend_beams(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    parents: Tensor,
    mask: Tensor | None,
    length: int,
    scale: float,
) -> Tensor:
    """Compute `ipex::indirect_attention` on CPUs: by the kernel, or by torch's ops without one.

    Key j of row r is block j * beams + r of a cache with blocks of one key.

    Args:
        query: [beams, tokens, heads, width].
        key_cache: [positions, beams, key heads, width].
        value_cache: as `key_cache`.
        parents: [positions or more, beams].
        mask: added to the scores, or None.
        length: the number of keys.
        scale: factor of the scores.
    """
    indirect.check_indirect(query, key_cache, value_cache, parents, mask, length, scale)
    beams, tokens, count, _ = query.shape
    if (reason := why_no_kernel(query)) is not None:
        warn_once(f"attention over a cache of beams runs slowly, without a kernel: {reason}")
        rows = indirect.trace_beams(parents, length, tokens)
        return indirect.attend_rows(query, key_cache, value_cache, rows, mask, scale)
    keys, values = (cache.flatten(0, 1).unsqueeze(2) for cache in (key_cache, value_cache))
    lengths = torch.full((beams,), length, dtype=torch.int32)
    starts = torch.arange(0, (beams + 1) * tokens, tokens, dtype=torch.int32)
    cache = checks.Cache(keys, values, trace_blocks(parents, length, tokens), lengths)
    if mask is not None:
        mask = mask.to(query.dtype).expand(beams, count, tokens, length)
    out = query.new_empty(query.shape)
    settings, heads = checks.Settings(scale, 1.0, 1.0, 0.0, -1, 0), checks.Heads(None, None)
    rows, states = out.flatten(0, 1), query.flatten(0, 1)
    _run(checks.Call(rows, states, cache, heads, starts, length, settings), mask)
    return out


def trace_blocks(parents: Tensor, length: int, tokens: int) -> Tensor:
    """Return j * beams + row for the row of each key j of each beam, [beams, length] of int32.

    Args:
        parents: [positions or more, beams].
        length: the number of keys.
        tokens: the number of last keys that each beam wrote itself.
    """
    parents, beams = parents.contiguous(), parents.shape[1]
    blocks = torch.empty(beams, length, dtype=torch.int32)
    kernel = _kernel("trace_beams", 5)
    is_right = kernel(parents.data_ptr(), beams, length, tokens, blocks.data_ptr())
    if not is_right:
        indirect.raise_parents(beams)
    return blocks


@functools.cache
def register() -> None:
    """Register the kernels as implementations of the ops on CPUs."""
    implement_on_cpu("paged_attention", attend)
    implement_on_cpu("indirect_attention", attend_beams)
