"""The parameters that one kernel in SYCL steps, as a table of addresses: on an Intel GPU."""

import functools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.optim.launch_groups import Scale, own_numbers
from ipex_inductor.templates.build.cpp import NotBuiltError, given
from ipex_inductor.templates.optimizer.step import StepKernel, scalars_function
from ipex_inductor.templates.optimizer.step_cpp import Table
from ipex_inductor.templates.sycl.step import CHUNK, Sent, Step, step_of
from ipex_inductor.templates.tensor_reader.step_counters import Cells


class SyclBatch:
    """Those of one group and count of steps, which the host counts; launched, never waited for."""

    def __init__(self, kernel: StepKernel, device: torch.device, group: int, far: float) -> None:
        """`far`: how many steps were before this one, or whether it is the first.

        Raises `NotBuiltError`.
        """
        self._kernel, self._device, self._group = kernel, device, group
        self._step = given(_step(kernel, device))
        self._scalars = scalars_function(kernel)
        self._table = Table(CHUNK)
        self.rows = self._table.rows
        self._cells = Cells(kernel.counted, far)
        self.turn = self._cells.turn
        self._rows, self._chunks = Sent(device), Sent(device)

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """See `Batch`."""
        self._table.add((*addresses, 0, 0), elements)  # steps and groups are the host's
        if step is not None:
            self._cells.add(step.data_ptr())

    def as_far(self) -> bool:
        """Whether all steps are as far as they were left here."""
        return self._cells.stand()

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """See `Batch`; with what the formula makes of them, once a row."""
        return self._made_of(own_numbers(groups[self._group], self._kernel.numbers, scale.number))

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """See `Batch`; the group's own come first."""
        return self._made_of(numbers[: len(self._kernel.numbers)])

    def _made_of(self, own: Sequence[float]) -> "array[float]":
        far = self._cells.far
        made = self._scalars(far + 1 if len(self._cells) else far, *own)
        left = (0.0,) * (self._step.scalars - len(made))  # for what norms make
        return array("d", (*made, *left) * self._table.count)

    def prepare(self) -> None:
        """See `Batch`; the allocator has what a step needs from the last one."""

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; shards with norms are left to torch."""

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`; on the current stream."""
        count, chunks = self._table.count, self._table.chunks
        table = torch.tensor(numbers, dtype=self._step.real).to(self._device, non_blocking=True)
        places = self._rows(self.rows), count, self._chunks(chunks), len(chunks) // 3
        self._step.run(*places, table)
        self._cells.become(self._cells.after())


@functools.lru_cache(maxsize=256)
def _step(kernel: StepKernel, device: torch.device) -> Step | str:
    """Or why there is none: what failed once would cost every step as much."""
    try:
        return step_of(kernel, device)
    except NotBuiltError as error:
        return str(error)
