"""The parameters that one kernel steps, as a table of addresses: on an NVIDIA GPU."""

import functools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipex_inductor.optim.launch_groups import Scalars, Scale, numbers_of, own_numbers
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.build.cpp import NotBuiltError, given
from ipex_inductor.templates.optimizer.step import (
    StepKernel,
    assignments,
    scalar_names,
    scalars_function,
)
from ipex_inductor.templates.optimizer.step_cuda import (
    ROWS,
    VECTOR,
    On,
    Room,
    Sent,
    chunks_of,
    loaded,
    stream_on,
    tile,
    turns_of,
)
from ipex_inductor.templates.optimizer.step_triton import (
    blocks_of,
    norms_signature,
    scalars_signature,
    signature,
    triton_source,
)
from ipex_inductor.templates.tensor_reader.step_counters import Cells

RATES = (torch.float32, torch.float64)  # that kernels read


class CudaBatch:
    """Those of one group and count of steps on an NVIDIA GPU: a launch, two for norms of shards."""

    def __init__(
        self, kernel: StepKernel, device: torch.device, aligned: bool, group: int, far: float
    ) -> None:
        """`far`: how many steps were before this one, or whether it is the first.

        Raises `NotBuiltError`.
        """
        self.rows, self._counts = array("q"), array("q")
        self._kernel, self.device, self._group = kernel, device, group
        self._chunk = chunk_of(kernel)
        self._step = kernel_of(kernel, device, aligned, "step")
        self._norms = kernel_of(kernel, device, aligned, "norms") if adds_up(kernel) else None
        self._scalars = scalars_function(kernel)
        self._cells = Cells(kernel.counted, far)
        self.turn = self._cells.turn
        self._rows = Sent(device)
        self._rooms: Rooms | None = None
        self._last: cuda.Launch | None = None
        self._ahead = array("d")

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """See `Batch`."""
        self.rows.extend((*addresses, elements))
        self._counts.append(-(-elements // self._chunk))
        if step is not None:
            self._cells.add(step.data_ptr())

    @property
    def counts(self) -> bool:
        """Whether the host counts their steps."""
        return len(self._cells) > 0

    def as_far(self) -> bool:
        """Whether all steps are as far as they were left here."""
        return self._cells.stand()

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """See `Batch`; with what the formula makes of them."""
        self.turn.left = 0
        own = own_numbers(groups[self._group], self._kernel.numbers, scale.number)
        return array("d", self._scalars(self._next(self._cells.far), *own))

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """See `Batch`; the group's own come first."""
        turn, count = self.turn, len(numbers)
        if not (turn.left and turn.at == turn.far):
            own = numbers[: len(self._kernel.numbers)]
            return array("d", self._scalars(self._next(turn.far), *own))
        first = len(self._ahead) - turn.left * count
        turn.left, turn.at = turn.left - 1, self._cells.after()
        turn.ahead += count * self._ahead.itemsize
        return self._ahead[first : first + count]

    def look_ahead(self, numbers: "array[float]", steps: int) -> None:
        """Have those of so many steps, of groups that hold what they held at the last."""
        own, far = numbers[: len(self._kernel.numbers)], self._cells.far
        made = array("d")
        for _ in range(steps):
            next_ = self._next(far)
            made.extend(self._scalars(next_, *own))
            far = next_ if self.counts else 0.0
        self.have(made, steps)

    def have(self, numbers: "array[float]", steps: int) -> None:
        """Those of the next so many."""
        self._ahead = numbers
        self.turn.ahead, _ = numbers.buffer_info()
        self.turn.left, self.turn.at = steps, self._cells.far

    def _next(self, far: float) -> float:
        """What the formula is told of a step: its number, or whether it is the first."""
        return far + 1 if self.counts else far

    def prepare(self) -> None:
        """See `Batch`."""
        if self._rooms is None:
            self._rooms = rooms_of(self._kernel, self._counts, self.device)

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; on the current stream."""
        assert self._rooms is not None
        if self._norms is not None and self._rooms.programs:
            with On(self.device) as stream:
                tables = self._tables(stream, *self._rooms.norms)
                self._norms(self._rooms.programs, stream, (*tables, *numbers))

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; on the current stream."""
        assert self._rooms is not None
        last, self._last = self._last, None
        if programs := self._rooms.programs:
            with On(self.device) as stream:
                tables = self._tables(stream, *self._rooms.step)
                self._step(programs, stream, (*tables, *numbers))
                if last is None or (last.stream, last.tables) != (stream, tables):
                    last = self._step.launch(programs, stream, tables, len(numbers))
                    for name, value in {**last.fields, "kept": id(last)}.items():
                        setattr(self.turn, name, value)
                if not torch.cuda.is_current_stream_capturing():  # else its table is the graph's
                    self._last = last
        self._cells.become(self._cells.after())

    def ready(self) -> bool:
        """Whether `Reader.again` may take its turn: the last launch with numbers known ahead."""
        return self.turn.left > 0 and self.turn.at == self.turn.far and self.stays()

    def stays(self) -> bool:
        """Whether it would be launched as it was last, but for its numbers."""
        return self._last is not None and stream_on(self.device) == self._last.stream

    def _tables(self, stream: int, *rooms: Room) -> tuple[int, ...]:
        """What kernels are given of addresses."""
        rows = self._rows.address(self.rows, stream)
        return rows, *(room.address(stream) for room in rooms)


class CountingBatch:
    """Those of all groups on an NVIDIA GPU that makes their scalars itself.

    Two launches, three for norms of shards; nothing is read back, so CUDA graphs may have them
    where it counts steps as well.
    """

    def __init__(
        self, kernel: StepKernel, device: torch.device, aligned: bool, far: float | None = None
    ) -> None:
        """`far`: how many steps were before this one, if it is the host that counts them.

        Raises `NotBuiltError`.
        """
        self.rows, self._counts, self._steps = array("q"), array("q"), array("q")
        self.kernel, self.device = kernel, device
        self._step, self._scalars, *norms = (
            kernel_of(kernel, device, aligned, name, tabled=True)
            for name in ("step", "scalars", *["norms"] * adds_up(kernel))
        )
        self._norms = norms[0] if norms else None
        self._chunk = chunk_of(kernel)
        self.counts = far is not None  # that is, the host does
        self._cells = Cells(kernel.counted, far or 0.0)
        self.turn = self._cells.turn
        self._rows, *self._sent = (Sent(device) for _ in range(4))
        self._rates: array[int] = array("q")
        self._rooms: Rooms | None = None
        self._table: Room | None = None

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """See `Batch`."""
        address, far = 0 if step is None else step.data_ptr(), int(first)
        if self.counts:
            self._cells.add(address)
            address, far = 0, int(self._cells.far)
        self._steps.extend((address, group, far))
        self._counts.append(-(-elements // self._chunk))
        self.rows.extend((*addresses, elements))

    def as_far(self) -> bool:
        """As in `CudaBatch`."""
        return self._cells.stand()

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """See `Batch`; rates that are on the device stay there."""
        rates = [rate_on(group, self.device) for group in groups]
        self._rates = array("q", map(_told, rates))
        here = [
            group if rate is None else {**group, "lr": 0.0}
            for group, rate in zip(groups, rates, strict=True)
        ]
        return numbers_of(here, self.kernel.rule.numbers, 1.0)

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """See `Batch`; steps are no part of them."""
        return numbers

    def prepare(self) -> None:
        """See `Batch`."""
        if self._table is None:
            size = len(self._counts) * (len(scalar_names(self.kernel)) + 1)
            real = getattr(torch, self.kernel.real)
            self._rooms = rooms_of(self.kernel, self._counts, self.device)
            self._table = Room(torch.empty(size, dtype=real, device=self.device))

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; on the current stream."""
        assert self._rooms is not None
        if self._norms is not None:
            with On(self.device) as stream:
                table = self._made(stream, numbers, scale)
                if self._rooms.programs:
                    arguments = (*self._tables(stream, *self._rooms.norms), table)
                    self._norms(self._rooms.programs, stream, arguments)

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; on the current stream."""
        assert self._rooms is not None
        assert self._table is not None
        with On(self.device) as stream:
            made = self._norms is not None  # by `take_norms`
            table = self._table.address(stream) if made else self._made(stream, numbers, scale)
            if self._rooms.programs:
                arguments = (*self._tables(stream, *self._rooms.step), table)
                self._step(self._rooms.programs, stream, arguments)
        far = self._cells.after()
        self._cells.become(far)
        self._steps[2::3] = array("q", [int(far)]) * len(self._counts)

    def _made(self, stream: int, numbers: "array[float]", scale: Scale) -> int:
        """Count, and make scalars: where they are."""
        assert self._table is not None
        count, table = len(self._counts), self._table.address(stream)
        here: list[array[Any]] = [self._steps, numbers, self._rates]
        sent = zip(self._sent, here, strict=True)
        steps, given, rates = (there.address(values, stream) for there, values in sent)
        if not self._read(scale, Scalars(self.kernel, (steps, count, given, rates, table))):
            around = (scale.divisor, scale.factor, scale.found_inf)
            looked = (0 if t is None else t.data_ptr() for t in around)
            arguments = (steps, count, given, rates, scale.number, *looked, table)
            self._scalars(-(-count // ROWS), stream, arguments)
        return table

    def _tables(self, stream: int, *rooms: Room) -> tuple[int, ...]:
        """As in `CudaBatch`."""
        rows = self._rows.address(self.rows, stream)
        return rows, *(room.address(stream) for room in rooms)

    def _read(self, scale: Scale, scalars: Scalars) -> bool:
        """Launch what `scale` has yet to read; whether scalars were made in passing."""
        return scale.reading is not None and scale.reading.run(scalars, scale.found_inf)


def rate_on(group: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """The group's rate, if that is a tensor over there that kernels read."""
    rate = group["lr"]
    there = isinstance(rate, Tensor) and rate.device == device and rate.dtype in RATES
    return rate if there else None


def _told(rate: Tensor | None) -> int:
    """Where it lies, as `scalars` is told: odd if it is fp64."""
    return 0 if rate is None else rate.data_ptr() + (rate.dtype is torch.float64)


def tile_of(kernel: StepKernel) -> tuple[int, int]:
    """The elements of a block, and warps."""
    return tile(kernel.columns, norms=bool(kernel.rule.norms))


def chunk_of(kernel: StepKernel) -> int:
    """The elements of a chunk."""
    block, _ = tile_of(kernel)
    return block * blocks_of(kernel)


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


def adds_up(kernel: StepKernel) -> bool:
    """Whether norms are sums that other processes add to, which a launch of its own takes."""
    return bool(kernel.rule.norms) and kernel.sharded


class Rooms(NamedTuple):
    """How many programs a launch has, and what `step` and `norms` are given of memory."""

    programs: int
    step: tuple[Room, ...]
    norms: tuple[Room, ...]


def rooms_of(kernel: StepKernel, counts: "array[int]", device: torch.device) -> Rooms:
    """For rows of so many chunks: these, ratios of rows, sums of chunks, counters from 0 on."""
    both = bool(kernel.rule.norms) and not kernel.sharded
    held = (turns_of if both else chunks_of)(counts, device)
    chunks, programs = Room(held), len(held)
    if not kernel.rule.norms:
        return Rooms(programs, (chunks,), ())
    real, rows = getattr(torch, kernel.real), len(counts)
    ratios = rows * len(assignments(kernel.rule.ratios(kernel.on)))
    sums = sum(counts) * len(kernel.rule.norms)
    parts = Room(torch.empty(sums, dtype=real, device=device))
    counters = Room(torch.zeros(rows + 1, dtype=torch.int64, device=device))
    if not both:
        return Rooms(programs, (chunks,), (chunks, parts, counters))
    made = Room(torch.empty(ratios, dtype=real, device=device))
    return Rooms(programs, (chunks, made, parts, counters), ())
