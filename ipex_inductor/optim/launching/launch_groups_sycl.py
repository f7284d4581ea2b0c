"""Launch groups on an Intel GPU: parameters that one SYCL kernel steps, as a table of addresses."""

import functools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.optim.launching.launch_groups import Scale, own_numbers
from ipex_inductor.templates.build.cpp import NotBuiltError, require_found
from ipex_inductor.templates.optimizer.step import StepKernel, scalars_function
from ipex_inductor.templates.optimizer.step_cpp import Table
from ipex_inductor.templates.sycl.step import CHUNK, Sent, Step, step_of
from ipex_inductor.templates.tensor_reader.step_counters import Cells


class SyclBatch:
    """Parameters of one group and one step count, which the host counts.

    Launches are asynchronous; the host never waits for them.
    """

    def __init__(
        self, kernel: StepKernel, device: torch.device, group: int, steps_before: float
    ) -> None:
        """Load the kernel; raises `NotBuiltError`.

        Args:
            kernel: the step kernel.
            device: the GPU.
            group: index of the parameter group.
            steps_before: number of steps before this one; if steps are not counted, whether it is
                the first.
        """
        self._kernel, self._device, self._group = kernel, device, group
        self._step = require_found(_step(kernel, device))
        self._scalars = scalars_function(kernel)
        self._table = Table(CHUNK)
        self.rows = self._table.rows
        self._cells = Cells(kernel.counted, steps_before)
        self.turn = self._cells.turn
        self._rows, self._chunks = Sent(device), Sent(device)

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
        self._table.add((*addresses, 0, 0), elements)  # the host handles steps and groups
        if step is not None:
            self._cells.add(step.data_ptr())

    def are_counters_unchanged(self) -> bool:
        """Return whether all step counters still hold the value that this batch wrote."""
        return self._cells.are_unchanged()

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """Return the numbers of the group and the derived scalars, once a row; see `Batch`."""
        return self._scalars_per_row(
            own_numbers(groups[self._group], self._kernel.numbers, scale.number)
        )

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """Return the numbers of the next step; see `Batch`.

        The numbers of the group itself come first in `numbers`.
        """
        return self._scalars_per_row(numbers[: len(self._kernel.numbers)])

    def _scalars_per_row(self, group_numbers: Sequence[float]) -> "array[float]":
        """Return the scalars of the next step, repeated for each row; norm slots are 0."""
        steps_before = self._cells.steps
        scalars = self._scalars(
            steps_before + 1 if len(self._cells) else steps_before, *group_numbers
        )
        norm_slots = (0.0,) * (self._step.scalars - len(scalars))  # for what norms make
        return array("d", (*scalars, *norm_slots) * self._table.count)

    def prepare(self) -> None:
        """Do nothing: the allocator reuses the memory of the last step; see `Batch`."""

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """Do nothing: shards with norms are left to torch; see `Batch`."""

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """Launch the step on the current stream; see `Batch`."""
        count, chunks = self._table.count, self._table.chunks
        table = torch.tensor(numbers, dtype=self._step.real).to(self._device, non_blocking=True)
        row_arguments = self._rows(self.rows), count, self._chunks(chunks), len(chunks) // 3
        self._step.run(*row_arguments, table)
        self._cells.write(self._cells.next_steps())


@functools.lru_cache(maxsize=256)
def _step(kernel: StepKernel, device: torch.device) -> Step | str:
    """Return the kernel, or the reason why it cannot be built.

    Failures are cached, as each attempt to compile would slow down every step.
    """
    try:
        return step_of(kernel, device)
    except NotBuiltError as error:
        return str(error)
