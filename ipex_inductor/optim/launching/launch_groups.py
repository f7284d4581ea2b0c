"""Interfaces of the launches that step parameters on any device, and the numbers that they get."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ipex_inductor.templates.optimizer.step import StepKernel

NOT_FIRST = array("q", [0])  # the second to last word of a row: the step is not its first


class Scalars(NamedTuple):
    """The kernel whose scalars are to be computed, and its arguments as in `parts_signature`."""

    kernel: StepKernel
    arguments: tuple[int, ...]


class Reading(Protocol):
    """A launch that writes tensors of a `Scale`; it has to precede every reader of them."""

    def run(self, scalars: Scalars | None = None, found_inf: Tensor | None = None) -> bool:
        """Launch it unless it has run; return whether it computed `scalars` as well."""

    def makes(self, kernel: StepKernel) -> bool:
        """Return whether it can compute the scalars of `kernel`; loads the code for them."""


@dataclass(frozen=True)
class Scale:
    """Factor of the gradients: a number, and on GPUs tensors that the host has not read.

    Args:
        number: multiplies the gradients.
        factor: multiplies the gradients, as a tensor (clipping).
        divisor: GradScaler's scale, by which gradients are divided.
        found_inf: GradScaler's flag; the step is skipped where it is 1.
        reading: the launch that writes these tensors.
    """

    number: float = 1.0
    factor: Tensor | None = None
    divisor: Tensor | None = None
    found_inf: Tensor | None = None
    reading: Reading | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are set."""
        return [t for t in (self.factor, self.divisor, self.found_inf) if t is not None]

    def is_on(self, device: torch.device) -> bool:
        """Return whether kernels on `device` can read all tensors that are set."""
        scaler_tensors = (t for t in (self.divisor, self.found_inf) if t is not None)
        readable = all(t.dtype is torch.float32 for t in scaler_tensors)
        return readable and all(t.device == device for t in self.tensors)

    def launch_reading(self) -> None:
        """Launch what writes the tensors, if it has not run yet."""
        if self.reading is not None:
            self.reading.run(found_inf=self.found_inf)

    def read(self) -> "Scale":
        """Return the scale as one number; the host waits for the GPU."""
        self.launch_reading()
        number = self.number if self.divisor is None else self.number / float(self.divisor)
        return Scale(number if self.factor is None else number * float(self.factor))


UNSCALED = Scale()


class Batch(Protocol):
    """Parameters with a row of addresses each, in `rows`, that one call of a kernel steps."""

    rows: "array[int]"

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """Add one parameter.

        Args:
            addresses: of the parameter, its low bits or master weight, gradient, states and norms.
            elements: number of elements of the parameter.
            step: its step counter; None if steps are not counted.
            first: whether this is its first step; read only if steps are not counted.
            group: index of its parameter group.
        """

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """Return the kernel's numbers of the groups; a hyperparameter that is no number raises."""

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """Return the numbers of the next step, for groups that have not changed."""

    def prepare(self) -> None:
        """Allocate all memory that the first `run` needs."""

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """Write local sums of sharded norms; `run` reads the totals of all processes later."""

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """Step the parameters."""


def numbers_of(
    groups: Iterable[Mapping[str, Any]], names: Sequence[str], scale: float
) -> "array[float]":
    """Return a kernel's numbers of all groups; a hyperparameter that is no number raises."""
    return array("d", (number for group in groups for number in own_numbers(group, names, scale)))


def own_numbers(group: Mapping[str, Any], names: Sequence[str], scale: float) -> list[float]:
    """Return a kernel's numbers of one group; a hyperparameter that is no number raises."""
    betas = group.get("betas", (0.0, 0.0))
    values = {**group, "beta1": betas[0], "beta2": betas[1], "scale": scale}
    return [float(values.get(name, 0.0)) for name in names]
