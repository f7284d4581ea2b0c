"""What steps the parameters that one kernel takes, wherever they are, and what it is given."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ipex_inductor.templates.optimizer.step import StepKernel

NOT_FIRST = array("q", [0])  # where a row says whether a step is its first


class Scalars(NamedTuple):
    """What runs the `scalars` of a kernel: arguments, as `parts_signature` has them."""

    kernel: StepKernel
    arguments: tuple[int, ...]


class Reading(Protocol):
    """A launch that writes tensors of a `Scale`; it is to come before whatever reads them."""

    def run(self, scalars: Scalars | None = None, found_inf: Tensor | None = None) -> bool:
        """Launch it, unless that is done; whether `scalars` were made by it."""

    def makes(self, kernel: StepKernel) -> bool:
        """Whether it can make the scalars of that kernel; what does so is loaded then."""


@dataclass(frozen=True)
class Scale:
    """What gradients are multiplied by, a number; on GPUs by tensors as well, none of them read.

    `divisor`: GradScaler's scale; `found_inf`: of it too, the step is left out where that is 1.
    `reading` is what writes them.
    """

    number: float = 1.0
    factor: Tensor | None = None
    divisor: Tensor | None = None
    found_inf: Tensor | None = None
    reading: Reading | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All that are there."""
        return [t for t in (self.factor, self.divisor, self.found_inf) if t is not None]

    def is_on(self, device: torch.device) -> bool:
        """Whether kernels there can read all that is there."""
        theirs = (t for t in (self.divisor, self.found_inf) if t is not None)
        readable = all(t.dtype is torch.float32 for t in theirs)
        return readable and all(t.device == device for t in self.tensors)

    def written(self) -> None:
        """Have all that is there written."""
        if self.reading is not None:
            self.reading.run(found_inf=self.found_inf)

    def read(self) -> "Scale":
        """As a number; the host waits for a GPU."""
        self.written()
        number = self.number if self.divisor is None else self.number / float(self.divisor)
        return Scale(number if self.factor is None else number * float(self.factor))


UNSCALED = Scale()


class Batch(Protocol):
    """Parameters with a row of addresses each, in `rows`, that one call of a kernel steps."""

    rows: "array[int]"

    def add(
        self, addresses: list[int], elements: int, step: Tensor | None, first: bool, group: int
    ) -> None:
        """One more parameter, with its step, if steps are counted; else `first` may matter."""

    def numbers(self, groups: Sequence[Mapping[str, Any]], scale: Scale) -> "array[float]":
        """What the kernel is given of the groups; raises what a number that is none raises."""

    def next_numbers(self, numbers: "array[float]") -> "array[float]":
        """The same at the next step, of groups that hold what they held."""

    def prepare(self) -> None:
        """Have all memory that the first `run` needs."""

    def take_norms(self, numbers: "array[float]", scale: Scale) -> None:
        """Put the sums of shards where their rows say, before `run` reads those of all."""

    def run(self, numbers: "array[float]", scale: Scale) -> None:
        """Step them."""


def numbers_of(
    groups: Iterable[Mapping[str, Any]], names: Sequence[str], scale: float
) -> "array[float]":
    """What a kernel is given of all groups; raises what a number that is none raises."""
    return array("d", (number for group in groups for number in own_numbers(group, names, scale)))


def own_numbers(group: Mapping[str, Any], names: Sequence[str], scale: float) -> list[float]:
    """What a kernel is given of one group; raises what a number that is none raises."""
    betas = group.get("betas", (0.0, 0.0))
    own = {**group, "beta1": betas[0], "beta2": betas[1], "scale": scale}
    return [float(own.get(name, 0.0)) for name in names]
