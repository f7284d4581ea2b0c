"""Launch groups on an NVIDIA GPU: parameters that one kernel steps, as a table of addresses."""

import functools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipex_inductor.optim.launching.launch_groups import Scalars, Scale, numbers_of, own_numbers
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.build.cpp import NotBuiltError, require_found
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
    load_triton_kernel,
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

RATES = (torch.float32, torch.float64)  # dtypes of learning rates that kernels read


class CudaBatch:
    """Parameters of one group and one step count on an NVIDIA GPU.

    One launch steps them; sharded norms take a second one.
    """

    def __init__(
        self,
        kernel: StepKernel,
        device: torch.device,
        aligned: bool,
        group: int,
        steps_before: float,
    ) -> None:
        """Load the kernels; raises `NotBuiltError`.

        Args:
            kernel: the step kernel.
            device: the GPU.
            aligned: whether all addresses are aligned for vector loads.
            group: index of the parameter group.
            steps_before: number of steps before this one; if steps are not counted, whether it is
                the first.
        """
        self.rows, self._counts = array("q"), array("q")
        self._kernel, self.device, self._group = kernel, device, group
        self._chunk = chunk_of(kernel)
        self._step = kernel_of(kernel, device, aligned, "step")
        self._norms = kernel_of(kernel, device, aligned, "norms") if adds_up(kernel) else None
        self._scalars = scalars_function(kernel)
        self._cells = Cells(kernel.counted, steps_before)
        self.turn = self._cells.turn
        self._rows = Sent(device)
        self._rooms: Rooms | None = None
        self._last: cuda.Launch | None = None  # the launch that a replay would repeat
        self._ahead = array("d")  # precomputed numbers of the next steps

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """Add one parameter; see `Batch`.

        Args:
            addresses: of its tensors, in the order of the kernel's columns.
            elements: number of elements of the parameter.
            step: its step counter on the host; None if steps are not counted.
            first: not used.
            group: not used: a batch belongs to one group.
        """
        self.rows.extend((*addresses, elements))
        self._counts.append(-(-elements // self._chunk))
        if step is not None:
            self._cells.add(step.data_ptr())

    @property
    def counts(self) -> bool:
        """Return whether the host counts the steps of its parameters."""
        return len(self._cells) > 0

    def are_counters_unchanged(self) -> bool:
        """Return whether all step counters still hold the value that this batch wrote."""
        return self._cells.are_unchanged()

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """Return the numbers of the group and the scalars that the formula derives; see `Batch`."""
        self.turn.left = 0
        group_numbers = own_numbers(groups[self._group], self._kernel.numbers, scale.number)
        return array("d", self._scalars(self._next(self._cells.steps), *group_numbers))

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """Return the numbers of the next step, precomputed ones where they fit; see `Batch`.

        The numbers of the group itself come first in `numbers`.
        """
        turn, count = self.turn, len(numbers)
        if not (turn.left and turn.at == turn.far):
            group_numbers = numbers[: len(self._kernel.numbers)]
            return array("d", self._scalars(self._next(turn.far), *group_numbers))
        first = len(self._ahead) - turn.left * count
        turn.left, turn.at = turn.left - 1, self._cells.next_steps()
        turn.ahead += count * self._ahead.itemsize
        return self._ahead[first : first + count]

    def look_ahead(self, numbers: "array[float]", steps: int) -> None:
        """Precompute the numbers of the next `steps` steps of groups that have not changed."""
        group_numbers, steps_before = numbers[: len(self._kernel.numbers)], self._cells.steps
        ahead = array("d")
        for _ in range(steps):
            next_step = self._next(steps_before)
            ahead.extend(self._scalars(next_step, *group_numbers))
            steps_before = next_step if self.counts else 0.0
        self.have(ahead, steps)

    def have(self, numbers: "array[float]", steps: int) -> None:
        """Store `numbers` for the next `steps` steps."""
        self._ahead = numbers
        self.turn.ahead, _ = numbers.buffer_info()
        self.turn.left, self.turn.at = steps, self._cells.steps

    def _next(self, steps_before: float) -> float:
        """Return the formula's step argument: the step number, or whether it is the first step."""
        return steps_before + 1 if self.counts else steps_before

    def prepare(self) -> None:
        """Allocate the tables of a launch; see `Batch`."""
        if self._rooms is None:
            self._rooms = rooms_of(self._kernel, self._counts, self.device)

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """Launch the local sums of sharded norms on the current stream; see `Batch`."""
        assert self._rooms is not None
        if self._norms is not None and self._rooms.programs:
            with On(self.device) as stream:
                tables = self._tables(stream, *self._rooms.norms)
                self._norms(self._rooms.programs, stream, (*tables, *numbers))

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """Launch the step on the current stream; see `Batch`."""
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
                if not torch.cuda.is_current_stream_capturing():  # else the graph owns its table
                    self._last = last
        self._cells.write(self._cells.next_steps())

    def ready(self) -> bool:
        """Return whether `Reader.check_and_count` may replay the last launch, numbers set."""
        return self.turn.left > 0 and self.turn.at == self.turn.far and self.stays()

    def stays(self) -> bool:
        """Return whether the next launch would equal the last one except for its numbers."""
        return self._last is not None and stream_on(self.device) == self._last.stream

    def _tables(self, stream: int, *rooms: Room) -> tuple[int, ...]:
        """Return the addresses of the rows and of `rooms` for kernels on `stream`."""
        rows = self._rows.address(self.rows, stream)
        return rows, *(room.address(stream) for room in rooms)


class CountingBatch:
    """Parameters of all groups on an NVIDIA GPU that computes their scalars itself.

    Two launches step them, three with sharded norms. Nothing is read back, so CUDA graphs can
    capture them even where the GPU counts steps.
    """

    def __init__(
        self,
        kernel: StepKernel,
        device: torch.device,
        aligned: bool,
        steps_before: float | None = None,
    ) -> None:
        """Load the kernels; raises `NotBuiltError`.

        Args:
            kernel: the step kernel.
            device: the GPU.
            aligned: whether all addresses are aligned for vector loads.
            steps_before: number of steps before this one if the host counts them, else None.
        """
        self.rows, self._counts, self._steps = array("q"), array("q"), array("q")
        self.kernel, self.device = kernel, device
        self._step, self._scalars, *norms = (
            kernel_of(kernel, device, aligned, name, tabled=True)
            for name in ("step", "scalars", *["norms"] * adds_up(kernel))
        )
        self._norms = norms[0] if norms else None
        self._chunk = chunk_of(kernel)
        self.counts = steps_before is not None  # the host counts the steps
        self._cells = Cells(kernel.counted, steps_before or 0.0)
        self.turn = self._cells.turn
        self._rows, *self._sent = (Sent(device) for _ in range(4))
        self._rates: array[int] = array("q")
        self._rooms: Rooms | None = None
        self._table: Room | None = None

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """Add one parameter; see `Batch`.

        Args:
            addresses: of its tensors, in the order of the kernel's columns.
            elements: number of elements of the parameter.
            step: its step counter; None if steps are not counted.
            first: written to the table if steps are not counted.
            group: index of its parameter group.
        """
        address, steps_before = 0 if step is None else step.data_ptr(), int(first)
        if self.counts:
            self._cells.add(address)
            address, steps_before = 0, int(self._cells.steps)
        self._steps.extend((address, group, steps_before))
        self._counts.append(-(-elements // self._chunk))
        self.rows.extend((*addresses, elements))

    def are_counters_unchanged(self) -> bool:
        """Return whether all step counters still hold the value that this batch wrote."""
        return self._cells.are_unchanged()

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """Return the numbers of all groups; learning rates on the device stay there."""
        rates = [rate_on(group, self.device) for group in groups]
        self._rates = array("q", map(_rate_address, rates))
        host_groups = [
            group if rate is None else {**group, "lr": 0.0}
            for group, rate in zip(groups, rates, strict=True)
        ]
        return numbers_of(host_groups, self.kernel.rule.numbers, 1.0)

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """Return `numbers`, which do not depend on the step; see `Batch`."""
        return numbers

    def prepare(self) -> None:
        """Allocate the tables of a launch; see `Batch`."""
        if self._table is None:
            size = len(self._counts) * (len(scalar_names(self.kernel)) + 1)
            real = getattr(torch, self.kernel.real)
            self._rooms = rooms_of(self.kernel, self._counts, self.device)
            self._table = Room(torch.empty(size, dtype=real, device=self.device))

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """Launch scalars and the local sums of sharded norms on the current stream."""
        assert self._rooms is not None
        if self._norms is not None:
            with On(self.device) as stream:
                table = self._launch_scalars(stream, numbers, scale)
                if self._rooms.programs:
                    arguments = (*self._tables(stream, *self._rooms.norms), table)
                    self._norms(self._rooms.programs, stream, arguments)

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """Launch the step on the current stream, after its scalars; see `Batch`."""
        assert self._rooms is not None
        assert self._table is not None
        with On(self.device) as stream:
            has_scalars = self._norms is not None  # `take_norms` has computed them
            table = (
                self._table.address(stream)
                if has_scalars
                else self._launch_scalars(stream, numbers, scale)
            )
            if self._rooms.programs:
                arguments = (*self._tables(stream, *self._rooms.step), table)
                self._step(self._rooms.programs, stream, arguments)
        steps = self._cells.next_steps()
        self._cells.write(steps)
        # Each row holds the address of a counter, a group and the number of steps.
        self._steps[2::3] = array("q", [int(steps)]) * len(self._counts)

    def _launch_scalars(self, stream: int, numbers: "array[float]", scale: Scale) -> int:
        """Count the step and compute the scalars; return the address of their table."""
        assert self._table is not None
        count, table = len(self._counts), self._table.address(stream)
        host_tables: list[array[Any]] = [self._steps, numbers, self._rates]
        copies = zip(self._sent, host_tables, strict=True)
        steps, group_numbers, rates = (copy.address(values, stream) for copy, values in copies)
        if not self._read(scale, Scalars(self.kernel, (steps, count, group_numbers, rates, table))):
            scale_tensors = (scale.divisor, scale.factor, scale.found_inf)
            scale_addresses = (0 if t is None else t.data_ptr() for t in scale_tensors)
            arguments = (steps, count, group_numbers, rates, scale.number, *scale_addresses, table)
            self._scalars(-(-count // ROWS), stream, arguments)
        return table

    def _tables(self, stream: int, *rooms: Room) -> tuple[int, ...]:
        """Return the addresses of the rows and of `rooms` for kernels on `stream`."""
        rows = self._rows.address(self.rows, stream)
        return rows, *(room.address(stream) for room in rooms)

    def _read(self, scale: Scale, scalars: Scalars) -> bool:
        """Launch the pending reading of `scale`; return whether it computed the scalars as well."""
        return scale.reading is not None and scale.reading.run(scalars, scale.found_inf)


def rate_on(group: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """Return the learning rate of `group` if it is a tensor that kernels on `device` can read.

    Otherwise return None.
    """
    rate = group["lr"]
    readable = isinstance(rate, Tensor) and rate.device == device and rate.dtype in RATES
    return rate if readable else None


def _rate_address(rate: Tensor | None) -> int:
    """Return the address of the rate for `scalars`: odd if it is fp64, 0 if there is none."""
    return 0 if rate is None else rate.data_ptr() + (rate.dtype is torch.float64)


def tile_of(kernel: StepKernel) -> tuple[int, int]:
    """Return the elements of a block and the number of warps."""
    return tile(kernel.columns, norms=bool(kernel.rule.norms))


def chunk_of(kernel: StepKernel) -> int:
    """Return the elements of a chunk."""
    block, _ = tile_of(kernel)
    return block * blocks_of(kernel)


def kernel_of(
    kernel: StepKernel, device: torch.device, aligned: bool, name: str, tabled: bool = False
) -> cuda.Kernel:
    """Return the kernel `name` of the source of `kernel` on `device`.

    Args:
        kernel: the step kernel.
        device: the GPU.
        aligned: whether all addresses are aligned for vector loads.
        name: `step`, `norms` or `scalars`.
        tabled: whether scalars are read from a table on the GPU.

    Raises:
        NotBuiltError: the kernel cannot be compiled or loaded.
    """
    return require_found(_kernel_of(kernel, device, aligned, name, tabled))


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
        return load_triton_kernel(
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
    """Return whether norms are summed over processes, which needs a launch of its own."""
    return bool(kernel.rule.norms) and kernel.sharded


class Rooms(NamedTuple):
    """Number of programs of a launch, and the GPU memory that `step` and `norms` use."""

    programs: int
    step: tuple[Room, ...]
    norms: tuple[Room, ...]


def rooms_of(kernel: StepKernel, counts: "array[int]", device: torch.device) -> Rooms:
    """Return the GPU memory for rows of `counts` chunks each.

    That is the table of chunks, the ratios of rows, the sums of chunks, and counters that start at
    0.
    """
    in_one_launch = bool(kernel.rule.norms) and not kernel.sharded
    chunk_table = (turns_of if in_one_launch else chunks_of)(counts, device)
    chunks, programs = Room(chunk_table), len(chunk_table)
    if not kernel.rule.norms:
        return Rooms(programs, (chunks,), ())
    real, rows = getattr(torch, kernel.real), len(counts)
    ratios = rows * len(assignments(kernel.rule.ratios(kernel.on)))
    sums = sum(counts) * len(kernel.rule.norms)
    sum_room = Room(torch.empty(sums, dtype=real, device=device))
    counters = Room(torch.zeros(rows + 1, dtype=torch.int64, device=device))
    if not in_one_launch:
        return Rooms(programs, (chunks,), (chunks, sum_room, counters))
    ratio_room = Room(torch.empty(ratios, dtype=real, device=device))
    return Rooms(programs, (chunks, ratio_room, sum_room, counters), ())
