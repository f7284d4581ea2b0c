"""A step that is planned: kernels with what they take of an optimizer, to be run and run again."""

import ctypes
import functools
from array import array
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ipex_inductor.optim.launch_groups import Batch, Scale
from ipex_inductor.optim.launch_groups_cuda import CountingBatch, CudaBatch
from ipex_inductor.optim.launch_groups_sycl import SyclBatch
from ipex_inductor.optim.sharded_norms import Key, Shares
from ipex_inductor.templates.tensor_reader.look_cpp import bump

OnGpu = CudaBatch | CountingBatch | SyclBatch  # whose steps the host may count


@dataclass
class Plan:
    """One step: kernels with what they take, and whom the optimizer's own step is to take.

    `held` and `written` are let go when the kernels have run.
    """

    batches: dict[tuple[Any, ...], Batch] = field(default_factory=dict)  # by kernel, and device
    left: dict[nn.Parameter, str] = field(default_factory=dict)
    unbuilt: set[str] = field(default_factory=set)  # of the reasons, those that a user may mend
    written: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # alive until the kernels have run
    copied: list[Tensor] = field(default_factory=list)  # gradients of which kernels get copies
    fresh: dict[nn.Parameter, dict[str, Tensor]] = field(default_factory=dict)  # states to begin
    grads: list[tuple["array[int]", int]] = field(default_factory=list)  # where addresses stand
    shares: dict[Key, Shares] = field(default_factory=dict)  # of norms that other processes add to
    _columns: "list[Column] | None" = None
    _ran: list[CudaBatch] | None = None  # where nothing else ran, and as it stands

    @property
    def lasts(self) -> bool:
        """Whether it holds for the next step, if nothing but gradients' addresses changes."""
        return not (self.left or self.fresh or self.copied)

    @property
    def as_far(self) -> bool:
        """Whether steps that the host counts are where this left them."""
        for batch in self.batches.values():  # before each step
            if isinstance(batch, OnGpu) and not batch.as_far():
                return False
        return True

    @functools.cached_property
    def turns(self) -> bytes:
        """Of those whose steps the host counts, for `Reader.again`: where they lie."""
        counting = (b for b in self.batches.values() if isinstance(b, OnGpu))
        return bytes(array("q", [ctypes.addressof(batch.turn) for batch in counting]))

    def ready(self) -> bool:
        """Whether `Reader.again` may take all turns, which is the whole step then."""
        return self._ran is not None and all(batch.ready() for batch in self._ran)

    def have(self, numbers: list["array[float]"]) -> bool:
        """Have `Reader.again` launch the next step with these; whether that may."""
        if self._ran is None or not all(batch.stays() for batch in self._ran):
            return False
        for batch, its in zip(self._ran, numbers, strict=True):
            batch.have(its, 1)
        return True

    def withdraw(self) -> None:
        """Nobody launches what is known ahead: a step that is not the expected one comes first."""
        for batch in self._ran or ():
            batch.turn.left = 0

    def look_ahead(self, numbers: list["array[float]"], steps: int) -> None:
        """Have numbers of so many steps, unless some are known, of groups that stay as they are."""
        for batch, its in zip(self._ran or (), numbers, strict=False):
            if not batch.turn.left:
                batch.look_ahead(its, steps)

    def load_ahead(self, scale: Scale) -> None:
        """Have what the next step launches instead where it need not wait, as states have begun.

        That may be captured, and nothing can be loaded then.
        """
        batches = [*self.batches.values()]
        if self.fresh and len(batches) == 1 and scale.reading is not None:
            (batch,) = batches
            if isinstance(batch, CountingBatch) and not batch.counts:
                scale.reading.makes(batch.kernel)

    def move(self, addresses: "array[int]") -> None:
        """Gradients lie there now."""
        self._ran = None
        if self._columns is None:
            self._columns = _columns(self.grads)
        for rows, places, numbers in self._columns:
            whole = len(numbers) == len(addresses)
            rows[places] = addresses if whole else array("q", [addresses[n] for n in numbers])

    def looks_itself(self, scale: Scale) -> bool:
        """Whether the host need not read any tensor of `scale`: one GPU takes all, and reads it.

        Where that may find that the step is left out, it is to count, and states cannot begin.
        """
        batches = [b for b in self.batches.values() if isinstance(b, CountingBatch)]
        if self.left or len(batches) < len(self.batches):
            return False
        if scale.found_inf is not None and (self.fresh or any(b.counts for b in batches)):
            return False
        return len({b.device for b in batches}) == 1 and scale.is_on(batches[0].device)


# Of a table of addresses: where the gradients' stand, and which of all gradients they are.
Column = tuple["array[int]", slice, list[int]]


def _columns(grads: list[tuple["array[int]", int]]) -> list[Column]:
    tables: dict[int, tuple[array[int], list[int], list[int]]] = {}
    for number, (rows, place) in enumerate(grads):
        _, places, numbers = tables.setdefault(id(rows), (rows, [], []))
        places.append(place)
        numbers.append(number)
    return [  # rows of one table are of one width
        (rows, slice(places[0], None, len(rows) // len(places)), numbers)
        for rows, places, numbers in tables.values()
    ]


def numbers_of(made: Plan, optimizer: Optimizer, scale: Scale) -> list["array[float]"]:
    """What each kernel is given of the groups; raises what a number that is none raises."""
    return [batch.numbers(optimizer.param_groups, scale) for batch in made.batches.values()]


def next_numbers(made: Plan, last: list["array[float]"]) -> list["array[float]"]:
    """The same at the next step, of groups that hold what they held at the `last`."""
    given = zip(made.batches.values(), last, strict=True)
    return [batch.next_numbers(numbers) for batch, numbers in given]


def run(made: Plan, optimizer: Optimizer, numbers: list["array[float]"], scale: Scale) -> None:
    """Step all that is not left; what was fresh is not any more."""
    given = [*zip(made.batches.values(), numbers, strict=True)]
    for batch, _ in given:  # memory may be short: before anything is handed over
        batch.prepare()
    if len(given) != 1:  # several kernels, of which none could do it in passing
        scale.written()
    for param, state in made.fresh.items():
        optimizer.state[param].update(state)
    if made.shares:
        for batch, its in given:
            batch.take_norms(its, scale)
        for shares in made.shares.values():
            shares.add_up()
    for batch, its in given:
        batch.run(its, scale)
    if made.written:
        bump(made.written)
    made.held, made.written, made.fresh = [], [], {}
    ran = [batch for batch, _ in given if isinstance(batch, CudaBatch)]
    made._ran = ran if len(ran) == len(given) and made.lasts else None
