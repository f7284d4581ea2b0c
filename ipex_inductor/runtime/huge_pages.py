"""Memory for packed weights on huge pages, which a processor reads faster, without waste.

A weight that is read once per call is read at 28 GB/s instead of 17 (GPT-2, one thread of a Zen 4).
"""

import contextlib
import ctypes
import math
import mmap
import threading
import weakref
from pathlib import Path

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of a huge page
ROOM = 32 * HUGE  # bytes of a mapping that weights share, so that few pages are part empty
PAGE = 4096

_last: weakref.ref[mmap.mmap] | None = None  # a mapping lives as long as a weight in it
_taken = 0  # used bytes of the last mapping
_lock = threading.Lock()


def on_huge_pages(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of that shape, on huge pages if it fills half of one."""
    count, dtype = math.prod(shape), dtype or like.dtype
    size = count * dtype.itemsize
    if like.device.type != "cpu" or not is_large(size):
        return like.new_empty(shape, dtype=dtype)
    with _lock:
        room, start = _reserve(size)
        return torch.frombuffer(room, dtype=dtype, count=count, offset=start).view(shape)


def copy_to_huge_pages(weight: Tensor) -> Tensor:
    """Return a copy of a weight on huge pages, or the weight itself where they do not help.

    Small weights, those in shared memory or on other devices, and tensors without numbers of their
    own (fake and traced ones) stay where they are.
    """
    is_plain = (
        type(weight) is Tensor
        and weight.device.type == "cpu"
        and not weight.untyped_storage().is_shared()
    )
    if not is_plain or not is_large(weight.nbytes):
        return weight
    return on_huge_pages(weight, tuple(weight.shape)).copy_(weight)


def is_large(size: int) -> bool:
    """Return whether so many bytes fill half of a huge page, on a system that has some."""
    return size >= HUGE // 2 and hasattr(mmap, "MADV_HUGEPAGE")


def begin_mapping() -> None:
    """Start a new mapping for the next weights, which may live longer than earlier ones."""
    global _last
    with _lock:
        _last = None


def _reserve(size: int) -> tuple[mmap.mmap, int]:
    """Return a mapping, the last or a new one, and the offset of `size` free bytes in it."""
    global _last, _taken
    room = _last() if _last else None
    if room is None or _taken + size > len(room):
        room, _taken = _map(max(size, ROOM))
        _last = weakref.ref(room)
    start, _taken = _taken, _taken + -(-size // PAGE) * PAGE
    return room, start


def _map(size: int) -> tuple[mmap.mmap, int]:
    """Return a mapping of at least `size` bytes, and the offset of its first huge page."""
    pages = -(-size // HUGE) * HUGE
    room = mmap.mmap(-1, pages + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % HUGE
    with contextlib.suppress(OSError):  # pages stay small if Linux was built without huge ones
        room.madvise(mmap.MADV_HUGEPAGE, start, pages)
    return room, start


def available_memory(device: torch.device) -> float:
    """Return the bytes that can still be allocated on a device; infinite if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return math.inf
    return min(_available_of_machine(), _available_of_group())


def _available_of_machine() -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    return math.inf


def _available_of_group() -> float:
    """Return the free bytes of the control group of a container (version 2), or infinity."""
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit ("max")
        group = Path("/sys/fs/cgroup")
        bound = float((group / "memory.max").read_text())
        return bound - float((group / "memory.current").read_text())
    return math.inf


def trim_heap() -> None:
    """Have the allocator return free memory to the system, which glibc would retain."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
