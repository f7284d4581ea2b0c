"""Step kernels of NVIDIA GPUs as launches, and the tables that a launch takes."""

import math
from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.errors import DeviceError
from ipex_inductor.target import current
from ipex_inductor.templates import cuda
from ipex_inductor.templates.cpp import NotBuiltError
from ipex_inductor.templates.gpu import binary

VECTOR = 16  # bytes, of which addresses are multiples where a GPU is to read whole vectors
# Elements and warps of a GPU's program, by the bytes of one row's element, at most: measured on an
# H200 (`benchmarks/optimizer_gpu.py --tiles`), where few bytes need more elements on their way.
TILES = ((6, 2048, 4), (math.inf, 1024, 8))
ROWS = 32  # whose scalars one program makes


def has_kernels(device: torch.device) -> bool:
    """Whether steps on that device are launched here."""
    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)


def tile(columns: tuple[tuple[str, str], ...]) -> tuple[int, int]:
    """The elements and warps of a program for rows of those names and dtypes."""
    size = sum(getattr(torch, dtype).itemsize for _, dtype in columns)
    return next((block, warps) for most, block, warps in TILES if size <= most)


def loaded(
    source: str,
    name: str,
    device: torch.device,
    problem: Mapping[str, Any],
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    warps: int,
) -> cuda.Kernel:
    """The kernel `name` of that source on that GPU. Raises `NotBuiltError`."""
    try:
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # there is a current context from now on
            options = {"num_warps": warps}
            made = binary(
                source, name, current(device), pairs(problem), signature, constants, options
            )
            if made is not None:
                return cuda.Kernel(made)
    except Exception as error:  # Triton's, its assembler's, the driver's
        said = f"a Triton kernel is not to be had: {type(error).__name__}: {error}"
        raise NotBuiltError(said) from error
    raise NotBuiltError("Triton is not installed, and no cache has the kernel")


def chunks_of(blocks: "array[int]", device: torch.device) -> Tensor:
    """Which row a program is of, and which block of it: [programs, 2] int32."""
    counts = torch.tensor(blocks, device="cpu")
    row = torch.repeat_interleave(counts)
    block = torch.arange(len(row), device="cpu") - (counts.cumsum(0) - counts)[row]
    return torch.stack((row, block), dim=1).int().pin_memory().to(device, non_blocking=True)


class Sent:
    """A table on a GPU as it was last sent there; the host never waits for it.

    A CUDA graph sends its own at each replay, from memory that is its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: tuple[array[Any], torch.cuda.Stream] | None = None
        self._there: Tensor | None = None
        self._spare: Tensor | None = None  # pinned: none can be had while a graph is captured
        self._captured: list[Tensor] = []

    def address(self, values: "array[Any]", stream: torch.cuda.Stream) -> int:
        """Where kernels on `stream`, the current one, find `values`."""
        if torch.cuda.is_current_stream_capturing():
            return self._capture(values)
        if self._known is None or self._known != (values, stream):
            pinned = _bytes(values).pin_memory()
            self._there = pinned.to(self._device, non_blocking=True)
            self._known = values[:], stream
        if self._spare is None or len(self._spare) != len(values) * values.itemsize:
            self._spare = _bytes(values).pin_memory()
        assert self._there is not None
        return self._there.data_ptr()

    def _capture(self, values: "array[Any]") -> int:
        spare, self._spare = self._spare, None
        if spare is None or len(spare) != len(values) * values.itemsize:
            todo = "Take a step outside of the graph first, and between two captures."
            raise DeviceError("a step that ran before", "one that is captured", todo)
        spare.copy_(_bytes(values))
        there = spare.to(self._device, non_blocking=True)
        self._captured += [spare, there]
        return there.data_ptr()


def _bytes(values: "array[Any]") -> Tensor:
    return torch.frombuffer(values, dtype=torch.uint8)
