"""Peak memory of a process, bytes that one token reads, and the bandwidth they are read with."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

BUFFER = 256 << 20  # bytes that the bandwidth is measured with; caches hold at most 32 MiB here
REPEATS = 5


def read_peak(device: str) -> int:
    """Return the largest memory in bytes: the process's on a CPU, torch's tensors on a GPU."""
    if device == "cpu":
        return _status("VmHWM")
    return int(getattr(torch, device).max_memory_allocated())


def read_resident() -> int:
    """Return the bytes of memory that the process has now."""
    return _status("VmRSS")


def _status(key: str) -> int:
    """Return a row of /proc/self/status in bytes, 0 where there is no such file."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    rows = (line.split() for line in status.read_text().splitlines())
    return next((int(row[1]) * 1024 for row in rows if row[:1] == [f"{key}:"]), 0)


def count_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, each counted once."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(tensor.nbytes for tensor in tensors.values())


def count_read_bytes(model: Any) -> int | None:
    """Return the bytes of weights that a token reads: all but embeddings that are no head too.

    None for models with experts, of which a token reads a few.
    """
    config = model.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts")):
        return None
    if getattr(config, "n_routed_experts", None):
        return None
    used = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return count_bytes(model) - sum(t.nbytes for key, t in tables.items() if key not in used)


def count_cache_bytes(config: Any, texts: int, tokens: int, itemsize: int) -> int:
    """Return the bytes of keys and values of `tokens` tokens in each of `texts` texts.

    Args:
        config: of the text decoder.
        texts: batch times beams.
        tokens: of each text.
        itemsize: bytes of an element.
    """
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    layers: int = config.num_hidden_layers
    return 2 * layers * heads * width * texts * tokens * itemsize


def measure_bandwidth(device: str) -> float:
    """Return GB/s: of reading on a CPU, of a copy (read and written) on a GPU."""
    if device == "cpu":
        values = torch.ones(BUFFER // 4)
        return BUFFER / _least_seconds(lambda: values.sum()) / 1e9
    source = torch.ones(4 * BUFFER, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    synchronize = getattr(torch, device).synchronize

    def copy() -> None:
        target.copy_(source)
        synchronize()

    return 2 * source.nbytes / _least_seconds(copy) / 1e9


def _least_seconds(call: Any) -> float:
    call()
    least = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - begin)
    return least
