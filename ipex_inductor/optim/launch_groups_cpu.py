"""The parameters that one kernel steps, as a table of addresses: on the CPU."""

import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ipex_inductor.optim.launch_groups import NOT_FIRST, Scale, numbers_of
from ipex_inductor.templates.build.cpp import NotBuiltError, given
from ipex_inductor.templates.optimizer.step import StepKernel, cpp_source
from ipex_inductor.templates.optimizer.step_cpp import Table, function_of


class CpuBatch:
    """Those of all groups."""

    def __init__(self, kernel: StepKernel) -> None:
        """Raises `NotBuiltError`."""
        self._kernel, self._function, self._table = kernel, library(kernel), Table()
        self._norms = library(kernel, "norms") if kernel.sharded else None
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

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """See `Batch`; steps are counted by the kernel."""
        return numbers

    def prepare(self) -> None:
        """See `Batch`; it needs none."""

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`."""
        if self._norms is not None:
            self._table.step(self._norms, self.rows, numbers)

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """See `Batch`."""
        self._table.step(self._function, self.rows, numbers)
        if not self._kernel.rule.counts:
            width = len(self.rows) // self._table.count
            self.rows[width - 2 :: width] = NOT_FIRST * self._table.count


def library(kernel: StepKernel, name: str = "step") -> Callable[..., None]:
    """The function `name` of that kernel on the CPU. Raises `NotBuiltError`."""
    return given(_library(kernel, name))


@functools.lru_cache(maxsize=256)
def _library(kernel: StepKernel, name: str) -> Callable[..., None] | str:
    """Or why there is none: what failed once would cost every step as much."""
    try:
        return function_of(functools.partial(cpp_source, kernel), kernel.problem, name)
    except NotBuiltError as error:
        return str(error)
