"""The parameters that one kernel steps, as tables of addresses: on the CPU, and on a GPU."""

import ctypes
import functools
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.optim.sent import Sent
from ipex_inductor.target import current
from ipex_inductor.templates import cuda
from ipex_inductor.templates.cpp import NotBuiltError
from ipex_inductor.templates.gpu import binary
from ipex_inductor.templates.step import StepKernel, assignments, cpp_source, scalars_of
from ipex_inductor.templates.step_cpp import Table, function_of
from ipex_inductor.templates.step_triton import (
    norms_signature,
    scalar_names,
    scalars_signature,
    signature,
    triton_source,
)

VECTOR = 16  # bytes, of which addresses are multiples where a GPU is to read whole vectors
# Elements and warps of a GPU's program, by the bytes of one row's element, at most: measured on an
# H200 (`benchmarks/optimizer_gpu.py --tiles`), where few bytes need more elements on their way.
TILES = ((6, 2048, 4), (math.inf, 1024, 8))
ROWS = 32  # whose scalars one program makes

NOT_FIRST = array("q", [0])
T = TypeVar("T")
CELLS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}  # steps counted on the host


@dataclass(frozen=True)
class Scale:
    """What gradients are multiplied by, a number; on GPUs by tensors as well, none of them read.

    `divisor`: GradScaler's scale; `found_inf`: of it too, the step is left out where that is 1.
    """

    number: float = 1.0
    factor: Tensor | None = None
    divisor: Tensor | None = None
    found_inf: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All that are there."""
        return [t for t in (self.factor, self.divisor, self.found_inf) if t is not None]

    def read(self) -> "Scale":
        """As a number; the host waits for a GPU."""
        number = self.number if self.divisor is None else self.number / float(self.divisor)
        return Scale(number if self.factor is None else number * float(self.factor))


class Batch(Protocol):
    """Parameters with a row of addresses each, in `rows`, that one call of a kernel steps."""

    rows: "array[int]"

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """One more parameter, with its step, if steps are counted; else `first` may matter."""

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """What the kernel is given of the groups; raises what a number that is none raises."""

    def prepare(self) -> None:
        """Have all memory that the first `run` needs."""

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """Step them."""


class CpuBatch:
    """Those of all groups."""

    def __init__(self, kernel: StepKernel) -> None:
        """Raises `NotBuiltError`."""
        self._kernel, self._function, self._table = kernel, library(kernel), Table()
        self.rows = self._table.rows

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """See `Batch`."""
        last = int(first) if step is None else step.data_ptr()
        self._table.add((*addresses, last, group), elements)

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """See `Batch`."""
        return numbers_of(groups, self._kernel.numbers, scale.number)

    def prepare(self) -> None:
        """See `Batch`; it needs none."""

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`."""
        self._table.step(self._function, self.rows, numbers)
        if not self._kernel.rule.counts:
            width = len(self.rows) // self._table.count
            self.rows[width - 2 :: width] = NOT_FIRST * self._table.count


class CudaBatch:
    """Those of one group and count of steps on an NVIDIA GPU: a launch, or two for norms."""

    def __init__(
        self, kernel: StepKernel, device: torch.device, aligned: bool, group: int, far: float
    ) -> None:
        """`far`: how many steps were before this one, or whether it is the first.

        Raises `NotBuiltError`.
        """
        self.rows, self._blocks = array("q"), array("q")
        self._kernel, self._device, self._group = kernel, device, group
        self._far = far
        self._block, _ = tile(kernel)
        self._step = kernel_of(kernel, device, aligned, "step")
        self._norms = kernel_of(kernel, device, aligned, "norms") if kernel.rule.norms else None
        self._sums: tuple[Tensor, ...] = ()  # where norms are added up
        self._cells: list[Any] = []
        self._rows = Sent(device)
        self._chunks: Tensor | None = None

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """See `Batch`."""
        self.rows.extend((*addresses, elements))
        self._blocks.append(-(-elements // self._block))
        if step is not None:
            self._cells.append(CELLS[step.dtype].from_address(step.data_ptr()))

    @property
    def counts(self) -> bool:
        """Whether the host counts their steps."""
        return bool(self._cells)

    def as_far(self) -> bool:
        """Whether all steps are as far as they were left here."""
        return [cell.value for cell in self._cells].count(self._far) == len(self._cells)

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """See `Batch`; with what the formula makes of them."""
        names = self._kernel.numbers
        given = dict(
            zip(names, numbers_of([groups[self._group]], names, scale.number), strict=True)
        )
        scalars = scalars_of(self._kernel, given, self._far + 1 if self._cells else self._far)
        return array("d", (scalars[name] for name in scalar_names(self._kernel)))

    def prepare(self) -> None:
        """See `Batch`."""
        if self._chunks is None:
            chunks = chunks_of(self._blocks, self._device)
            if self._norms is not None:
                rows = len(self._blocks)
                self._sums = sums_of(self._kernel, rows, len(chunks), self._device)
            self._chunks = chunks

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; on the current stream."""
        assert self._chunks is not None
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if len(self._chunks):
                self._launch(self._rows.address(self.rows, stream), stream.cuda_stream, numbers)
        self._far = self._far + 1 if self._cells else 0
        for cell in self._cells:
            cell.value = self._far

    def _launch(self, rows: int, stream: int, numbers: "array[float]") -> None:
        assert self._chunks is not None
        count, chunks = len(self._chunks), self._chunks.data_ptr()
        if self._norms is None:
            self._step(count, stream, (rows, chunks, *numbers))
            return
        ratios, *sums = (t.data_ptr() for t in self._sums)
        self._norms(count, stream, (rows, chunks, ratios, *numbers, *sums))
        self._step(count, stream, (rows, chunks, ratios, *numbers))


class CountingBatch:
    """Those of all groups on an NVIDIA GPU that counts their steps itself: two launches.

    Nothing is read back, so that a CUDA graph may have them.
    """

    def __init__(self, kernel: StepKernel, device: torch.device, aligned: bool) -> None:
        """Raises `NotBuiltError`."""
        self.rows, self._blocks, self._steps = array("q"), array("q"), array("q")
        self._kernel, self.device = kernel, device
        self._step = kernel_of(kernel, device, aligned, "step", tabled=True)
        self._scalars = kernel_of(kernel, device, aligned, "scalars", tabled=True)
        self._block, _ = tile(kernel)
        self._sent = [Sent(device) for _ in range(4)]
        self._rates: array[int] = array("q")
        self._chunks: Tensor | None = None
        self._table: Tensor | None = None

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """See `Batch`."""
        self._steps.extend((0 if step is None else step.data_ptr(), group, int(first)))
        self._blocks.append(-(-elements // self._block))
        self.rows.extend((*addresses, elements))

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """See `Batch`; rates that are on the device stay there."""
        rates = [rate_on(group, self.device) for group in groups]
        self._rates = array("q", (0 if rate is None else rate.data_ptr() for rate in rates))
        here = [
            group if rate is None else {**group, "lr": 0.0}
            for group, rate in zip(groups, rates, strict=True)
        ]
        return numbers_of(here, self._kernel.rule.numbers, 1.0)

    def prepare(self) -> None:
        """See `Batch`."""
        if self._table is None:
            size = len(self._blocks) * (len(scalar_names(self._kernel)) + 1)
            real = getattr(torch, self._kernel.real)
            self._chunks = chunks_of(self._blocks, self.device)
            self._table = torch.empty(size, dtype=real, device=self.device)

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; on the current stream."""
        assert self._chunks is not None
        assert self._table is not None
        count = len(self._blocks)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            tables: list[array[Any]] = [self.rows, self._steps, numbers, self._rates]
            sent = zip(self._sent, tables, strict=True)
            rows, steps, given, rates = (there.address(here, stream) for there, here in sent)
            around = (scale.divisor, scale.factor, scale.found_inf)
            looked = (0 if t is None else t.data_ptr() for t in around)
            table = self._table.data_ptr()
            arguments = (steps, count, given, rates, scale.number, *looked, table)
            self._scalars(-(-count // ROWS), stream.cuda_stream, arguments)
            if len(self._chunks):
                arguments = (rows, self._chunks.data_ptr(), table)
                self._step(len(self._chunks), stream.cuda_stream, arguments)
        if not self._kernel.rule.counts:
            self._steps[2::3] = NOT_FIRST * count


def rate_on(group: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """The group's rate, if that is a tensor over there that kernels read."""
    rate = group["lr"]
    there = isinstance(rate, Tensor) and rate.device == device and rate.dtype is torch.float32
    return rate if there else None


def numbers_of(
    groups: Iterable[Mapping[str, Any]], names: Sequence[str], scale: float
) -> "array[float]":
    """Those of all groups; raises what a number that is none raises."""
    return array("d", (number for group in groups for number in _numbers(group, names, scale)))


def has_kernels(device: torch.device) -> bool:
    """Whether steps on that device are launched here."""
    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)


def library(kernel: StepKernel) -> Callable[..., None]:
    """The function of that kernel on the CPU. Raises `NotBuiltError`."""
    return given(_library(kernel))


def kernel_of(
    kernel: StepKernel, device: torch.device, aligned: bool, name: str, tabled: bool = False
) -> cuda.Kernel:
    """The kernel `name` of that source on that GPU. Raises `NotBuiltError`."""
    return given(_kernel_of(kernel, device, aligned, name, tabled))


def given(found: T | str) -> T:
    """What was found; raises `NotBuiltError` with the reason that is there instead."""
    if isinstance(found, str):
        raise NotBuiltError(found)
    return found


@functools.lru_cache(maxsize=256)
def _library(kernel: StepKernel) -> Callable[..., None] | str:
    """Or why there is none: what failed once would cost every step as much."""
    try:
        return function_of(functools.partial(cpp_source, kernel), kernel.problem)
    except NotBuiltError as error:
        return str(error)


@functools.lru_cache(maxsize=256)
def _kernel_of(
    kernel: StepKernel, device: torch.device, aligned: bool, name: str, tabled: bool
) -> cuda.Kernel | str:
    signatures = {"norms": norms_signature, "scalars": scalars_signature}
    block, warps = (ROWS, 1) if name == "scalars" else tile(kernel)
    aligns = {} if name == "scalars" else {"ALIGNED": VECTOR if aligned else 1}
    return loaded(
        device,
        triton_source(kernel, tabled),
        name,
        {**kernel.problem, "tabled": tabled},
        signatures[name](kernel) if name in signatures else signature(kernel, tabled),
        {**aligns, "BLOCK": block},
        warps,
    )


def loaded(
    device: torch.device,
    source: str,
    name: str,
    problem: Mapping[str, Any],
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int,
) -> cuda.Kernel | str:
    """The kernel `name` of a module in Triton on that GPU, or why there is none."""
    try:
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # there is a current context from now on
            options = {"num_warps": warps}
            here = current(device)
            made = binary(source, name, here, pairs(problem), types, constants, options)
            if made is None:
                return "Triton is not installed, and no cache has the kernel"
            return cuda.Kernel(made)
    except Exception as error:  # Triton's, its assembler's, the driver's
        return f"a Triton kernel is not to be had: {type(error).__name__}: {error}"


def tile(kernel: StepKernel) -> tuple[int, int]:
    """The elements and warps of a program."""
    size = sum(getattr(torch, dtype).itemsize for _, dtype in kernel.columns)
    return next((block, warps) for most, block, warps in TILES if size <= most)


def sums_of(
    kernel: StepKernel, rows: int, chunks: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the ratios of each row, the sums of each chunk, and counters, which are 0."""
    real = getattr(torch, kernel.real)
    ratios = len(assignments(kernel.rule.ratios(kernel.on)))
    return (
        torch.empty(rows * ratios, dtype=real, device=device),
        torch.empty(chunks * len(kernel.rule.norms), dtype=real, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )


def chunks_of(blocks: "array[int]", device: torch.device) -> Tensor:
    """Which row a program is of, and which block of it: [programs, 2] int32."""
    counts = torch.tensor(blocks, device="cpu")
    row = torch.repeat_interleave(counts)
    block = torch.arange(len(row), device="cpu") - (counts.cumsum(0) - counts)[row]
    return torch.stack((row, block), dim=1).int().pin_memory().to(device, non_blocking=True)


def _numbers(group: Mapping[str, Any], names: Sequence[str], scale: float) -> list[float]:
    betas = group.get("betas", (0.0, 0.0))
    found = {**group, "beta1": betas[0], "beta2": betas[1], "scale": scale}
    return [float(found.get(name, 0.0)) for name in names]
