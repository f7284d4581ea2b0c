"""Hashes of the contents of weights on an NVIDIA GPU, computed and compared by one kernel a call.

The kernel runs in the current stream. It writes its result to pinned host memory, so the host need
not wait for work put into the stream after it.
"""

import ctypes
import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.errors import DeviceError
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.optimizer.step_cuda import On, load_triton_kernel

WORD, WORDS = 4, 128  # bytes of a word, words that share one hash
ROWS, WARPS = 32, 4  # hashes that one program computes
MOST = 1 << 23  # bytes that a launch compares in turn, at most
SLOTS = 64  # unfinished launches of a comparer, at most
# Seconds of a wait: spinning, yielding to other threads, in all.
SPIN, BUSY, PATIENCE = 30e-6, 1e-3, 2.0
NAP = 50e-6  # seconds between checks after `BUSY`
WEIGHT = 4  # numbers of a weight in the table: address, words, address of its hashes, first block

SOURCE = '''\
@triton.jit
def mix(x):
    """Mix the bits of 32-bit words: a bijection (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def hash_blocks(
    table, state, found, count, steps, samples, rows, begin, seed, slot, ticket, programs,
    WRITES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):
    """Hash a block of memory a row: a drawn one of each weight, then blocks in turn.

    A binary search of `steps` steps finds the weight of a block.

    `table` has four numbers of each of `count` weights, and the number of all blocks behind. Hashes
    are written if `WRITES`, else compared: `found` gets a weight's number plus 1. Behind it, the
    slot of this launch gets the ticket from the program that ends last.
    """
    row = ROWS * tl.program_id(0) + tl.arange(0, ROWS)
    inside = row < rows
    total = tl.load(table + 4 * count + 3)
    turn = (begin + row - samples) % total
    number = tl.zeros([ROWS], tl.int32)
    end = number + count
    for _ in range(steps):
        middle = (number + end) // 2
        is_behind = tl.load(table + 4 * middle + 3) <= turn
        number, end = tl.where(is_behind, middle, number), tl.where(is_behind, end, middle)
    is_drawn = row < samples
    number = tl.where(is_drawn, row, number)
    number = tl.where(inside, number, 0)
    first = tl.load(table + 4 * number + 3)
    blocks = tl.load(table + 4 * number + 7) - first
    drawn = mix((row + seed).to(tl.uint32)).to(tl.int64) * blocks >> 32
    block = tl.where(is_drawn, drawn, turn - first)
    address = tl.load(table + 4 * number).to(tl.pointer_type(tl.int32))
    words = tl.load(table + 4 * number + 1)
    column = tl.arange(0, WORDS)
    place = WORDS * block[:, None] + column[None, :]
    mask = inside[:, None] & (place < words[:, None])
    word = tl.load(address[:, None] + place, mask=mask, other=0).to(tl.uint32, bitcast=True)
    key = mix((column + 1).to(tl.uint32))
    hashed = tl.sum(mix(word ^ key[None, :]).to(tl.int32, bitcast=True), 1)
    target = tl.load(table + 4 * number + 2).to(tl.pointer_type(tl.int32)) + block
    if WRITES:
        tl.store(target, hashed, mask=inside)
    else:
        is_other = inside & (tl.load(target, mask=inside, other=0) != hashed)
        differing = tl.max(tl.where(is_other, number + 1, 0), 0)
        if differing > 0:
            tl.store(found, differing.to(tl.int64))
    if tl.atomic_add(state + slot, 1, sem="acq_rel", scope="sys") + 1 == programs:
        tl.atomic_xchg(state + slot, 0, sem="acq_rel", scope="sys")
        tl.store(found + 1 + slot, ticket)
'''
SOURCE = "import triton\nimport triton.language as tl\n\n\n" + SOURCE
SIGNATURE = {
    **dict.fromkeys(("table", "state", "found"), "*i64"),
    **dict.fromkeys(("count", "steps", "samples", "rows"), "i32"),
    "begin": "i64",
    **dict.fromkeys(("seed", "slot"), "i32"),
    **dict.fromkeys(("ticket", "programs"), "i64"),
}


@dataclass(frozen=True)
class DeviceHashes:
    """The contents of one weight's memory on a GPU: a hash for each block.

    Attributes:
        address: of the first byte.
        size: bytes.
        words: the hashes, int32 on that GPU.
    """

    address: int
    size: int
    words: Tensor

    def is_same(self) -> bool:
        """Return whether the memory is known to be as it was; wait for the current stream."""
        return not is_captured(self.words.device) and Comparer([self]).are_same()


class Comparer:
    """The contents of weights on one GPU, compared by a launch a call.

    Args:
        weights: what each was when the results in use were computed from it.
        sweep: launches in which all contents are compared, if that is no more than `MOST` each.
    """

    def __init__(self, weights: Sequence[DeviceHashes], sweep: int = 1) -> None:
        self._device = weights[0].words.device
        self._weights = tuple(weights)  # the kernel reads their hashes
        begins = [0, *itertools.accumulate(len(weight.words) for weight in weights)]
        self.total = begins[-1]  # blocks
        self._steps = (len(weights) - 1).bit_length()
        rows = [
            (*_whole_words(weight.address, weight.size), weight.words.data_ptr(), begin)
            for weight, begin in zip(weights, begins, strict=False)
        ]
        with torch.inference_mode(False):
            table = torch.tensor([*rows, (0, 0, 0, self.total)], device="cpu")
            self._table = table.to(self._device)
            self._state = torch.zeros(SLOTS, dtype=torch.int64, device=self._device)
            self._found = torch.zeros(1 + SLOTS, dtype=torch.int64, device="cpu", pin_memory=True)
        self._seen = _map_found(self._found)
        self._last = [0] * SLOTS  # ticket of each slot
        self._memory = tuple(t.data_ptr() for t in (self._table, self._state, self._found))
        self._tickets = itertools.count(1)
        self._begin = 0
        self._in_turn = min(-(-self.total // sweep), MOST // (WORD * WORDS))
        self._kernels: dict[bool, cuda.Kernel] = {}
        self._waits = True
        self._has_launched = False  # by the last call of `launch`

    def launch(self) -> int | None:
        """Launch a comparison of samples and of some blocks in turn; return its ticket.

        None while a program captures a graph of its own, or if no slot is free.
        """
        samples = len(self._weights)
        ticket = self._launch(False, samples=samples, rows=samples + self._in_turn)
        self._has_launched = ticket is not None
        if ticket is not None:
            self._begin = (self._begin + self._in_turn) % self.total
        return ticket

    def is_answered(self) -> bool:
        """Return whether the last comparison was made, has ended, and found no difference."""
        seen = self._seen
        has_ended = all(seen[1 + slot] >= ticket for slot, ticket in enumerate(self._last))
        return self._has_launched and has_ended and not seen[0]

    def find_differing(self, ticket: int) -> int | None:
        """Wait for a launch; return the number of a weight that differs, or None.

        The result stays until `forget`, as several threads may read it. The stream may be waiting
        for this thread's next work, so a wait ends after `PATIENCE`, and later calls do not wait
        until a launch has been faster: a difference then shows at one of the next calls.
        """
        results, slot = self._seen, 1 + ticket % SLOTS
        if results[slot] >= ticket:
            self._waits = True
        elif self._waits and not _wait(lambda: results[slot] >= ticket):
            self._waits = False
            decisions.warn_once(
                f"a stream of {self._device} was busy for {PATIENCE:.0f} s. Writes to weights that "
                "torch does not see show a call later there. Call "
                "ipex_inductor.refresh(model) after such writes."
            )
        return results[0] - 1 if results[0] else None

    def forget(self) -> None:
        """Clear the difference that was found: the weights are as they were."""
        self._seen[0] = 0

    def are_same(self) -> bool:
        """Compare all contents, and wait for the result; False while a graph is captured."""
        if self._launch(False, samples=0, rows=self.total) is None:
            return False
        torch.cuda.current_stream(self._device).synchronize()
        return not self._seen[0]

    def hash_all(self) -> bool:
        """Write the hashes of all contents; return False while a graph is captured."""
        return self._launch(True, samples=0, rows=self.total) is not None

    def _launch(self, writes: bool, samples: int, rows: int) -> int | None:
        """Launch the kernel; return its ticket."""
        kernel = self._kernels.get(writes)
        if kernel is None:
            kernel = self._kernels[writes] = _kernel(self._device, writes)
        programs = -(-rows // ROWS)
        ticket = next(self._tickets)
        slot = ticket % SLOTS
        if self._seen[1 + slot] < self._last[slot]:
            return None
        seed = 977 * ticket & 0x3FFFFFFF
        numbers = len(self._weights), self._steps, samples, rows, self._begin, seed, slot
        with On(self._device) as stream:
            if torch.cuda.is_current_stream_capturing():
                return None
            kernel(programs, stream, (*self._memory, *numbers, ticket, programs))
        self._last[slot] = ticket
        return ticket

    def __del__(self) -> None:
        """Keep the memory of unfinished launches alive until they are done."""
        last = getattr(self, "_last", None)
        if not last or not any(last) or sys.is_finalizing():
            return
        for number, (arrived, _) in reversed([*enumerate(_pending)]):
            if arrived():
                _pending.pop(number)
        arrived = functools.partial(_have_arrived, self._found, last)
        if not arrived():
            _pending.append((arrived, (self._table, self._state, self._weights)))


def _map_found(pinned: Tensor) -> "ctypes.Array[ctypes.c_int64]":
    return (ctypes.c_int64 * (1 + SLOTS)).from_address(pinned.data_ptr())


def _have_arrived(pinned: Tensor, tickets: Sequence[int]) -> bool:
    return all(
        arrived >= ticket for arrived, ticket in zip(_map_found(pinned)[1:], tickets, strict=True)
    )


def _wait(is_done: Callable[[], bool]) -> bool:
    """Wait until `is_done`; return whether it was true within `PATIENCE`."""
    begin = time.perf_counter()
    while not is_done():
        waited = time.perf_counter() - begin
        if waited > PATIENCE:
            return False
        if waited > SPIN:
            time.sleep(0 if waited < BUSY else NAP)  # other threads of Python run meanwhile
    return True


_pending: list[tuple[Callable[[], bool], object]] = []
_kernels: dict[tuple[torch.device, bool], cuda.Kernel] = {}


def _kernel(device: torch.device, writes: bool) -> cuda.Kernel:
    """Return the kernel that writes hashes, or that compares them. Raises `NotBuiltError`."""
    key = device, writes
    if key not in _kernels:
        _kernels[key] = load_kernel(device, writes)
    return _kernels[key]


def load_kernel(device: torch.device, writes: bool) -> cuda.Kernel:
    """Return that kernel from the kernel cache, or compile it. Raises `NotBuiltError`."""
    constants = {"WRITES": int(writes), "ROWS": ROWS, "WORDS": WORDS}
    problem: dict[str, Any] = {"template": "weights"}
    return load_triton_kernel(SOURCE, "hash_blocks", device, problem, SIGNATURE, constants, WARPS)


def hash_on_device(address: int, size: int, device: torch.device) -> DeviceHashes | None:
    """Return the contents of `size` bytes of a GPU; None if no kernel for it can be built.

    None, too, while a program captures a graph of its own.
    """
    if device.type != "cuda" or torch.version.hip:
        decisions.log.info("contents of weights on %s are not compared: there is no kernel", device)
        return None
    if is_captured(device):
        decisions.log.info("contents of weights are not compared: a program captures its graph")
        return None
    _, count = _whole_words(address, size)
    with torch.inference_mode(False):
        hash_tensor = torch.empty(-(-count // WORDS), dtype=torch.int32, device=device)
    hashes = DeviceHashes(address, size, hash_tensor)
    try:
        return hashes if Comparer([hashes]).hash_all() else None
    except (NotBuiltError, DeviceError) as error:
        decisions.warn_once(f"contents of weights on {device} are not compared: {error}")
        return None


def is_captured(device: torch.device) -> bool:
    """Return whether a program captures the current stream of a GPU."""
    with On(device):
        return torch.cuda.is_current_stream_capturing()


def _whole_words(address: int, size: int) -> tuple[int, int]:
    """Return the address and the number of the words that hold these bytes."""
    begin = address // WORD * WORD
    return begin, -(-(address + size - begin) // WORD)
