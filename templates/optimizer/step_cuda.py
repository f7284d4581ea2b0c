"""Step kernels of NVIDIA GPUs as launches, and the tables that a launch takes."""

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

VECTOR = 16  # bytes, of which addresses are multiples where a GPU is to read whole vectors
Tiles = tuple[tuple[float, int, int], ...]
# Elements of a block and warps of its program, by the bytes of one row's element, at most, on an
# H200 (`benchmarks/optimizer_gpu.py --tiles`): few bytes need whole vectors of each.
TILES: Tiles = ((6, 512, 2), (8, 1024, 2), (math.inf, 1024, 8))
# With norms, which are added up once a program, by a row's tensors, at most (on an H100); of fp64
# such a program would take all registers.
WITH_NORMS: Tiles = ((3, 4096, 8), (5, 2048, 4))
ROWS = 32  # whose scalars one program makes
# A sum takes rounded products, so what is folded into a step is rounded as it is by itself.
APART = {"enable_fp_fusion": False}


def has_kernels(device: torch.device) -> bool:
    """Whether there are steps for that device: in C++, Triton or SYCL."""
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda or device.type in ("cpu", "xpu")


def tile(columns: tuple[tuple[str, str], ...], norms: bool = False) -> tuple[int, int]:
    """The elements of a block, and warps, for rows of those names and dtypes."""
    if norms and all(dtype != "float64" for _, dtype in columns):
        size, tiles = len(columns), WITH_NORMS
    else:
        size, tiles = sum(getattr(torch, dtype).itemsize for _, dtype in columns), TILES
    return next((block, warps) for most, block, warps in tiles if size <= most)


def loaded(
    source: str,
    name: str,
    device: torch.device,
    problem: Mapping[str, Any],
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    warps: int,
    registers: int | None = None,
) -> cuda.Kernel:
    """The kernel `name` of that source on that GPU. Raises `NotBuiltError`.

    `registers`: of a thread, at most.
    """
    try:
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # there is a current context from now on
            options = {"num_warps": warps, **APART} | ({"maxnreg": registers} if registers else {})
            made = binary(
                source, name, current(device), pairs(problem), signature, constants, options
            )
            if made is not None:
                return cuda.Kernel(made)
    except Exception as error:  # Triton's, its assembler's, the driver's
        said = f"a Triton kernel is not to be had: {type(error).__name__}: {error}"
        raise NotBuiltError(said) from error
    raise NotBuiltError("Triton is not installed, and no cache has the kernel")


def chunks_of(counts: "array[int]", device: torch.device) -> Tensor:
    """Which row a program is of, and which chunk of it: [programs, 2] int32."""
    return _sent(_counted(counts), device)


def turns_of(counts: "array[int]", device: torch.device) -> Tensor:
    """The same for programs that go through all rows twice; the second time `~` of the chunk."""
    chunks = _counted(counts)
    row, part = chunks.unbind(1)
    return _sent(torch.cat((chunks, torch.stack((row, ~part), dim=1))), device)


def _counted(counts: "array[int]") -> Tensor:
    each = torch.tensor(counts, device="cpu")
    row = torch.repeat_interleave(each)
    part = torch.arange(len(row), device="cpu") - (each.cumsum(0) - each)[row]
    return torch.stack((row, part), dim=1)


def _sent(chunks: Tensor, device: torch.device) -> Tensor:
    return chunks.int().pin_memory().to(device, non_blocking=True)


class On:
    """While open, a GPU is the current one; the address of its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._guard: Any = None

    def __enter__(self) -> int:
        if torch._C._cuda_getDevice() != self._device.index:  # CUDA runs, or there were no kernel
            self._guard = torch.cuda.device(self._device)
            self._guard.__enter__()
        return int(torch._C._cuda_getCurrentRawStream(self._device.index))

    def __exit__(self, *raised: Any) -> None:
        if self._guard is not None:
            self._guard.__exit__(*raised)


def stream_on(device: torch.device) -> int | None:
    """The address of a GPU's current stream, if it is the current one."""
    there = torch._C._cuda_getDevice() == device.index
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if there else None


class Room:
    """Memory of a GPU, made on the current stream; the allocator hears of others that use it."""

    def __init__(self, held: Tensor) -> None:
        self._held, self._address, self._count = held, held.data_ptr(), len(held)
        with On(held.device) as stream:
            self._streams = {stream}

    def __len__(self) -> int:
        return self._count

    def address(self, stream: int) -> int:
        """Where kernels on `stream`, the current one, find it."""
        if stream not in self._streams:
            self._held.record_stream(torch.cuda.current_stream(self._held.device))
            self._streams.add(stream)
        return self._address


class _Stage(NamedTuple):
    """Pinned memory, and when a copy from it is through."""

    memory: Tensor
    sent: Any  # an event


class Sent:
    """A table on a GPU as it was last sent there; the host never waits for it.

    It lies where it lay as long as the stream is the same, which orders copies behind the kernels
    that read the last one. A CUDA graph sends its own at each replay, from memory that is its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: array[Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._there: Tensor | None = None
        self._stages: deque[_Stage] = deque()  # the one that was sent first is the first
        self._spare: Tensor | None = None  # pinned: none can be had while a graph is captured
        self._captured: list[Tensor] = []

    def address(self, values: "array[Any]", stream: int) -> int:
        """Where kernels on `stream`, the current one, find `values`."""
        if torch.cuda.is_current_stream_capturing():
            return self._capture(values)
        if self._stream is None or self._stream.cuda_stream != stream:
            self._stream, self._there = torch.cuda.current_stream(self._device), None
        if self._there is None or self._known != values:
            self._there = self._send(values, self._there, self._stream)
            self._known = values[:]
        elif self._spare is None:  # a graph has it
            self._spare = _pinned(len(values) * values.itemsize)
        return self._there.data_ptr()

    def _send(
        self, values: "array[Any]", there: Tensor | None, stream: torch.cuda.Stream
    ) -> Tensor:
        size = len(values) * values.itemsize
        if there is None or there.numel() != size or there.is_inference():
            there = torch.empty(size, dtype=torch.uint8, device=self._device)
        stage = self._stage(size)
        ctypes.memmove(stage.memory.data_ptr(), values.buffer_info()[0], size)
        there.copy_(stage.memory, non_blocking=True)
        stage.sent.record(stream)
        self._stages.append(stage)
        if self._spare is None or self._spare.numel() != size:
            self._spare = _pinned(size)
        return there

    def _stage(self, size: int) -> _Stage:
        """One that nothing is read from any more: the host may be many steps ahead."""
        if self._stages and self._stages[0].memory.numel() != size:
            self._stages.clear()
        if self._stages and self._stages[0].sent.query():
            return self._stages.popleft()
        event: Any = torch.cuda.Event
        return _Stage(_pinned(size), event())

    def _capture(self, values: "array[Any]") -> int:
        size = len(values) * values.itemsize
        spare, self._spare = self._spare, None
        if spare is None or spare.numel() != size:
            todo = "Take a step outside of the graph first, and between two captures."
            raise DeviceError("a step that ran before", "one that is captured", todo)
        ctypes.memmove(spare.data_ptr(), values.buffer_info()[0], size)
        there = spare.to(self._device, non_blocking=True)
        self._captured += [spare, there]
        return there.data_ptr()


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
