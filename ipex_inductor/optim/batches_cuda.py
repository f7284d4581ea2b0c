"""The parameters that one kernel steps, as a table of addresses: on an NVIDIA GPU."""

import functools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.optim.batches import NOT_FIRST, Scalars, Scale, numbers_of, own_numbers
from ipex_inductor.templates import cuda
from ipex_inductor.templates.cells import Cells
from ipex_inductor.templates.cpp import NotBuiltError, given
from ipex_inductor.templates.step import (
    StepKernel,
    assignments,
    scalar_names,
    scalars_function,
)
from ipex_inductor.templates.step_cuda import (
    ROWS,
    VECTOR,
    On,
    Room,
    Sent,
    chunks_of,
    loaded,
    tile,
)
from ipex_inductor.templates.step_triton import (
    norms_signature,
    scalars_signature,
    signature,
    triton_source,
)


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
        self._block, _ = tile_of(kernel)
        self._step = kernel_of(kernel, device, aligned, "step")
        self._norms = kernel_of(kernel, device, aligned, "norms") if kernel.rule.norms else None
        self._scalars = scalars_function(kernel)
        self._ratios: tuple[Room, ...] = ()  # of norms that are whole here
        self._sums: tuple[Room, ...] = ()  # where norms are added up
        self._cells = Cells(kernel.counted)
        self.counts = False  # whether the host counts their steps
        self._rows = Sent(device)
        self._chunks: Room | None = None

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """See `Batch`."""
        self.rows.extend((*addresses, elements))
        self._blocks.append(-(-elements // self._block))
        if step is not None:
            self._cells.add(step.data_ptr())
            self.counts = True

    def as_far(self) -> bool:
        """Whether all steps are as far as they were left here."""
        return self._cells.are(self._far)

    def standing(self) -> bytes:
        """The same question, for `Reader.again`."""
        return self._cells.standing(self._far)

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """See `Batch`; with what the formula makes of them."""
        return self._made_of(own_numbers(groups[self._group], self._kernel.numbers, scale.number))

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """See `Batch`; the group's own come first."""
        return self._made_of(numbers[: len(self._kernel.numbers)])

    def _made_of(self, given: Sequence[float]) -> "array[float]":
        return array("d", self._scalars(self._far + 1 if self.counts else self._far, *given))

    def prepare(self) -> None:
        """See `Batch`."""
        if self._chunks is None:
            chunks = Room(chunks_of(self._blocks, self._device))
            if self._norms is not None:
                rows = len(self._blocks)
                self._ratios = ratios_of(self._kernel, rows, self._device)
                self._sums = sums_of(self._kernel, rows, len(chunks), self._device)
            self._chunks = chunks

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; on the current stream."""
        if self._kernel.sharded and self._chunks:
            with On(self._device) as stream:
                self._launch_norms(stream, self._tables(stream), numbers)

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; on the current stream."""
        if chunks := len(self._chunks or ()):
            with On(self._device) as stream:
                tables = self._tables(stream)
                if self._norms is not None and not self._kernel.sharded:
                    self._launch_norms(stream, tables, numbers)
                self._step(chunks, stream, (*tables, *numbers))
        self._far = self._far + 1 if self.counts else 0
        self._cells.become(self._far)

    def _tables(self, stream: int) -> tuple[int, ...]:
        """What kernels are given of addresses: rows, chunks, and where ratios of rows are."""
        assert self._chunks is not None
        rows, chunks = self._rows.address(self.rows, stream), self._chunks.address(stream)
        return rows, chunks, *[ratios.address(stream) for ratios in self._ratios]

    def _launch_norms(self, stream: int, tables: tuple[int, ...], numbers: "array[float]") -> None:
        assert self._norms is not None
        assert self._chunks is not None
        sums = (room.address(stream) for room in self._sums)
        self._norms(len(self._chunks), stream, (*tables, *numbers, *sums))


class CountingBatch:
    """Those of all groups on an NVIDIA GPU that counts their steps itself.

    Two launches, three with norms. Nothing is read back, so that a CUDA graph may have them.
    """

    def __init__(self, kernel: StepKernel, device: torch.device, aligned: bool) -> None:
        """Raises `NotBuiltError`."""
        self.rows, self._blocks, self._steps = array("q"), array("q"), array("q")
        self._kernel, self.device = kernel, device
        self._step, self._scalars, *norms = (
            kernel_of(kernel, device, aligned, name, tabled=True)
            for name in ("step", "scalars", *["norms"] * bool(kernel.rule.norms))
        )
        self._norms = norms[0] if norms else None
        self._ratios: tuple[Room, ...] = ()  # as in `CudaBatch`
        self._sums: tuple[Room, ...] = ()
        self._block, _ = tile_of(kernel)
        self._rows, *self._sent = (Sent(device) for _ in range(4))
        self._rates: array[int] = array("q")
        self._chunks: Room | None = None
        self._table: Room | None = None

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

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """See `Batch`; steps are counted by the kernel."""
        return numbers

    def prepare(self) -> None:
        """See `Batch`."""
        if self._table is None:
            size = len(self._blocks) * (len(scalar_names(self._kernel)) + 1)
            real = getattr(torch, self._kernel.real)
            self._chunks = Room(chunks_of(self._blocks, self.device))
            if self._norms is not None:
                rows = len(self._blocks)
                self._ratios = ratios_of(self._kernel, rows, self.device)
                self._sums = sums_of(self._kernel, rows, len(self._chunks), self.device)
            self._table = Room(torch.empty(size, dtype=real, device=self.device))

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; on the current stream."""
        if self._kernel.sharded:
            with On(self.device) as stream:
                self._begin(stream, self._tables(stream), numbers, scale)

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; on the current stream."""
        with On(self.device) as stream:
            tables = self._tables(stream)
            if not self._kernel.sharded:
                self._begin(stream, tables, numbers, scale)
            if self._chunks:
                self._step(len(self._chunks), stream, tables)
        if not self._kernel.rule.counts:
            self._steps[2::3] = NOT_FIRST * len(self._blocks)

    def _begin(
        self, stream: int, tables: tuple[int, ...], numbers: "array[float]", scale: Scale
    ) -> None:
        """Count, make scalars, take norms."""
        count, table = len(self._blocks), tables[-1]
        here: list[array[Any]] = [self._steps, numbers, self._rates]
        sent = zip(self._sent, here, strict=True)
        steps, given, rates = (there.address(values, stream) for there, values in sent)
        if not self._read(scale, Scalars(self._kernel, (steps, count, given, rates, table))):
            around = (scale.divisor, scale.factor, scale.found_inf)
            looked = (0 if t is None else t.data_ptr() for t in around)
            arguments = (steps, count, given, rates, scale.number, *looked, table)
            self._scalars(-(-count // ROWS), stream, arguments)
        if self._norms is not None and self._chunks:
            sums = (room.address(stream) for room in self._sums)
            self._norms(len(self._chunks), stream, (*tables, *sums))

    def _tables(self, stream: int) -> tuple[int, ...]:
        """As in `CudaBatch`; the last one is where scalars of rows are."""
        assert self._chunks is not None
        assert self._table is not None
        tables = (self._chunks, *self._ratios, self._table)
        return self._rows.address(self.rows, stream), *(each.address(stream) for each in tables)

    def _read(self, scale: Scale, scalars: Scalars) -> bool:
        """Launch what `scale` has yet to read; whether scalars were made in passing."""
        return scale.reading is not None and scale.reading.run(scalars, scale.found_inf)


def rate_on(group: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """The group's rate, if that is a tensor over there that kernels read."""
    rate = group["lr"]
    there = isinstance(rate, Tensor) and rate.device == device and rate.dtype is torch.float32
    return rate if there else None


def tile_of(kernel: StepKernel) -> tuple[int, int]:
    """The elements and warps of a program."""
    return tile(kernel.columns, norms=bool(kernel.rule.norms))


def kernel_of(
    kernel: StepKernel, device: torch.device, aligned: bool, name: str, tabled: bool = False
) -> cuda.Kernel:
    """The kernel `name` of that source on that GPU. Raises `NotBuiltError`."""
    return given(_kernel_of(kernel, device, aligned, name, tabled))


@functools.lru_cache(maxsize=256)
def _kernel_of(
    kernel: StepKernel, device: torch.device, aligned: bool, name: str, tabled: bool
) -> cuda.Kernel | str:
    signatures = {
        "step": signature,
        "norms": norms_signature,
        "scalars": lambda kernel, _: scalars_signature(kernel),
    }
    block, warps = (ROWS, 1) if name == "scalars" else tile_of(kernel)
    aligns = {} if name == "scalars" else {"ALIGNED": VECTOR if aligned else 1}
    try:
        return loaded(
            triton_source(kernel, tabled),
            name,
            device,
            {**kernel.problem, "tabled": tabled},
            signatures[name](kernel, tabled),
            {**aligns, "BLOCK": block},
            warps,
        )
    except NotBuiltError as error:
        return str(error)


def ratios_of(kernel: StepKernel, rows: int, device: torch.device) -> tuple[Room, ...]:
    """Room for the ratios of each row; none for shards, of which `step` makes them."""
    if kernel.sharded:
        return ()
    ratios = len(assignments(kernel.rule.ratios(kernel.on)))
    real = getattr(torch, kernel.real)
    return (Room(torch.empty(rows * ratios, dtype=real, device=device)),)


def sums_of(kernel: StepKernel, rows: int, chunks: int, device: torch.device) -> tuple[Room, Room]:
    """Room for the sums of each chunk, and a counter for each row, which is 0."""
    real = getattr(torch, kernel.real)
    return (
        Room(torch.empty(chunks * len(kernel.rule.norms), dtype=real, device=device)),
        Room(torch.zeros(rows, dtype=torch.int32, device=device)),
    )
