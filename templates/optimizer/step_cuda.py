"""Launches of step kernels on NVIDIA GPUs, and the tables that a launch takes."""

import ctypes
import math
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.errors import DeviceError
from ipex_inductor.target.device import current
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.build.gpu import binary

VECTOR = 16  # bytes; the alignment of addresses at which a GPU can read whole vectors
Tiles = tuple[tuple[float, int, int], ...]
# Elements of a block and warps of its program, by the bytes of one row's element, at most, on an
# H200 (`benchmarks/studies/optimizer_gpu.py --tiles`): few bytes need whole vectors of each.
TILES: Tiles = ((6, 512, 2), (8, 1024, 2), (math.inf, 1024, 8))
# With norms, which are added up once a program, by a row's tensors, at most (on an H100); of fp64
# such a program would take all registers.
WITH_NORMS: Tiles = ((3, 4096, 8), (5, 2048, 4))
ROWS = 32  # rows whose scalars one program computes
# Sums take rounded products, so an operation folded into a step rounds as it does on its own.
APART = {"enable_fp_fusion": False}


def has_kernels(device: torch.device) -> bool:
    """Return whether there are step kernels for a device: in C++, Triton or SYCL."""
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda or device.type in ("cpu", "xpu")


def tile(columns: tuple[tuple[str, str], ...], norms: bool = False) -> tuple[int, int]:
    """Return the elements of a block, and warps, for rows of these names and dtypes."""
    if norms and all(dtype != "float64" for _, dtype in columns):
        size, tiles = len(columns), WITH_NORMS
    else:
        size, tiles = sum(getattr(torch, dtype).itemsize for _, dtype in columns), TILES
    return next((block, warps) for most, block, warps in tiles if size <= most)


def load_triton_kernel(
    source: str,
    name: str,
    device: torch.device,
    problem: Mapping[str, Any],
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    warps: int,
    registers: int | None = None,
) -> cuda.Kernel:
    """Return the kernel `name` of a Triton module, loaded on a GPU. Raises `NotBuiltError`.

    Args:
        source: the module's text.
        name: the kernel's name.
        device: the GPU.
        problem: names the kernel in the cache.
        signature: Triton's type of each argument that is no constant.
        constants: the constant arguments.
        warps: of a program.
        registers: of a thread, at most; None: no limit.
    """
    try:
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # there is a current context from now on
            options = {"num_warps": warps, **APART} | ({"maxnreg": registers} if registers else {})
            entry = binary(
                source, name, current(device), pairs(problem), signature, constants, options
            )
            if entry is not None:
                return cuda.Kernel(entry)
    except Exception as error:  # Triton's, its assembler's, the driver's
        message = f"a Triton kernel is not to be had: {type(error).__name__}: {error}"
        raise NotBuiltError(message) from error
    raise NotBuiltError("Triton is not installed, and no cache has the kernel")


def chunks_of(counts: "array[int]", device: torch.device) -> Tensor:
    """Return the row and the chunk of each program, on the GPU: [programs, 2] int32."""
    return _send_chunks(_count_chunks(counts), device)


def turns_of(counts: "array[int]", device: torch.device) -> Tensor:
    """Return the row and the chunk of programs that process all rows twice: [programs, 2] int32.

    The second time the chunk is inverted (`~`).
    """
    chunks = _count_chunks(counts)
    row, part = chunks.unbind(1)
    return _send_chunks(torch.cat((chunks, torch.stack((row, ~part), dim=1))), device)


def _count_chunks(counts: "array[int]") -> Tensor:
    chunk_counts = torch.tensor(counts, device="cpu")
    row = torch.repeat_interleave(chunk_counts)
    part = torch.arange(len(row), device="cpu") - (chunk_counts.cumsum(0) - chunk_counts)[row]
    return torch.stack((row, part), dim=1)


def _send_chunks(chunks: Tensor, device: torch.device) -> Tensor:
    return chunks.int().pin_memory().to(device, non_blocking=True)


class On:
    """A context in which a GPU is the current one; it returns its current stream's address."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._guard: Any = None

    def __enter__(self) -> int:
        # CUDA is initialised by now, as there is a kernel.
        if torch._C._cuda_getDevice() != self._device.index:
            self._guard = torch.cuda.device(self._device)
            self._guard.__enter__()
        return int(torch._C._cuda_getCurrentRawStream(self._device.index))

    def __exit__(self, *raised: Any) -> None:
        if self._guard is not None:
            self._guard.__exit__(*raised)


def stream_on(device: torch.device) -> int | None:
    """Return the address of a GPU's current stream; None if another GPU is current."""
    is_current = torch._C._cuda_getDevice() == device.index
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if is_current else None


class Room:
    """GPU memory from the current stream; the allocator is informed of other streams' use."""

    def __init__(self, held: Tensor) -> None:
        self._held, self._address, self._count = held, held.data_ptr(), len(held)
        with On(held.device) as stream:
            self._streams = {stream}

    def __len__(self) -> int:
        return self._count

    def address(self, stream: int) -> int:
        """Return its address for kernels on `stream`, the current one."""
        if stream not in self._streams:
            self._held.record_stream(torch.cuda.current_stream(self._held.device))
            self._streams.add(stream)
        return self._address


class _Stage(NamedTuple):
    """Pinned memory, and the event that ends a copy from it."""

    memory: Tensor
    sent: Any  # an event


class Sent:
    """A table on a GPU as it was last copied there; the host never waits for the copy.

    Its address stays as long as the stream does, which orders copies after the kernels that read
    the last table. A CUDA graph copies a table of its own at each replay, from memory of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: array[Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._there: Tensor | None = None
        self._stages: deque[_Stage] = deque()  # in the order of their copies
        self._spare: Tensor | None = None  # pinned: none can be had while a graph is captured
        self._captured: list[Tensor] = []

    def address(self, values: "array[Any]", stream: int) -> int:
        """Return the address of `values` for kernels on `stream`, the current one."""
        if torch.cuda.is_current_stream_capturing():
            return self._capture(values)
        if self._stream is None or self._stream.cuda_stream != stream:
            self._stream, self._there = torch.cuda.current_stream(self._device), None
        if self._there is None or self._known != values:
            self._there = self._send(values, self._there, self._stream)
            self._known = values[:]
        elif self._spare is None:  # a graph has it
            self._spare = _allocate_pinned(len(values) * values.itemsize)
        return self._there.data_ptr()

    def _send(
        self, values: "array[Any]", buffer: Tensor | None, stream: torch.cuda.Stream
    ) -> Tensor:
        size = len(values) * values.itemsize
        if buffer is None or buffer.numel() != size or buffer.is_inference():
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        stage = self._stage(size)
        ctypes.memmove(stage.memory.data_ptr(), values.buffer_info()[0], size)
        buffer.copy_(stage.memory, non_blocking=True)
        stage.sent.record(stream)
        self._stages.append(stage)
        if self._spare is None or self._spare.numel() != size:
            self._spare = _allocate_pinned(size)
        return buffer

    def _stage(self, size: int) -> _Stage:
        """Return pinned memory with no copy in progress: the host may be many steps ahead."""
        if self._stages and self._stages[0].memory.numel() != size:
            self._stages.clear()
        if self._stages and self._stages[0].sent.query():
            return self._stages.popleft()
        event: Any = torch.cuda.Event
        return _Stage(_allocate_pinned(size), event())

    def _capture(self, values: "array[Any]") -> int:
        size = len(values) * values.itemsize
        spare, self._spare = self._spare, None
        if spare is None or spare.numel() != size:
            remedy = "Take a step outside of the graph first, and between two captures."
            raise DeviceError("a step that ran before", "one that is captured", remedy)
        ctypes.memmove(spare.data_ptr(), values.buffer_info()[0], size)
        buffer = spare.to(self._device, non_blocking=True)
        self._captured += [spare, buffer]
        return buffer.data_ptr()


def _allocate_pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
