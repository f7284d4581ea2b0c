"""Launch groups on the CPU: parameters that one kernel steps, as a table of addresses."""

import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ipex_inductor.optim.launching.launch_groups import NOT_FIRST, Scale, numbers_of
from ipex_inductor.templates.build.cpp import NotBuiltError, require_found
from ipex_inductor.templates.optimizer.step import StepKernel, cpp_source
from ipex_inductor.templates.optimizer.step_cpp import Table, function_of


class CpuBatch:
    """Parameters of all groups that one C++ kernel steps."""

    def __init__(self, kernel: StepKernel) -> None:
        """Load the functions of `kernel`; raises `NotBuiltError`."""
        self._kernel, self._function, self._table = kernel, library(kernel), Table()
        self._norms = library(kernel, "norms") if kernel.sharded else None
        self.rows = self._table.rows

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """Add one parameter; see `Batch`.

        Args:
            addresses: of its tensors, in the order of the kernel's columns.
            elements: number of elements of the parameter.
            step: its step counter, which the kernel increments; None if steps are not counted.
            first: written to the row if steps are not counted.
            group: index of its parameter group.
        """
        counter = int(first) if step is None else step.data_ptr()
        self._table.add((*addresses, counter, group), elements)

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """Return the numbers of all groups; see `Batch`."""
        return numbers_of(groups, self._kernel.numbers, scale.number)

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """Return `numbers`, as the kernel counts steps itself; see `Batch`."""
        return numbers

    def prepare(self) -> None:
        """Do nothing: a call needs no memory; see `Batch`."""

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """Write the local sums of sharded norms; see `Batch`."""
        if self._norms is not None:
            self._table.step(self._norms, self.rows, numbers)

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """Step the parameters; see `Batch`."""
        self._table.step(self._function, self.rows, numbers)
        if not self._kernel.rule.counts:
            width = len(self.rows) // self._table.count
            self.rows[width - 2 :: width] = NOT_FIRST * self._table.count


def library(kernel: StepKernel, name: str = "step") -> Callable[..., None]:
    """Return the function `name` of `kernel` on the CPU; raises `NotBuiltError`."""
    return require_found(_library(kernel, name))


@functools.lru_cache(maxsize=256)
def _library(kernel: StepKernel, name: str) -> Callable[..., None] | str:
    """Return the function, or the reason why it cannot be built.

    Failures are cached, as each attempt to compile would slow down every step.
    """
    try:
        return function_of(functools.partial(cpp_source, kernel), kernel.problem, name)
    except NotBuiltError as error:
        return str(error)
