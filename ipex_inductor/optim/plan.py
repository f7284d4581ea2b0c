"""The plan of a step: kernels and what they read of an optimizer, to be run repeatedly."""

import ctypes
import functools
from array import array
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ipex_inductor.optim.launching.launch_groups import Batch, Scale
from ipex_inductor.optim.launching.launch_groups_cuda import CountingBatch, CudaBatch
from ipex_inductor.optim.launching.launch_groups_sycl import SyclBatch
from ipex_inductor.optim.sharded_norms import Key, Shares
from ipex_inductor.templates.tensor_reader.look_cpp import bump

OnGpu = CudaBatch | CountingBatch | SyclBatch  # launches whose steps the host may count


@dataclass
class Plan:
    """One step: kernels with their tensors, and the parameters that torch's own step takes.

    `held` and `written` are released when the kernels have run.
    """

    batches: dict[tuple[Any, ...], Batch] = field(default_factory=dict)  # by kernel, and device
    left: dict[nn.Parameter, str] = field(default_factory=dict)
    unbuilt: set[str] = field(default_factory=set)  # the reasons that a user can fix
    written: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # alive until the kernels have run
    copied: list[Tensor] = field(default_factory=list)  # gradients that kernels get copies of
    fresh: dict[nn.Parameter, dict[str, Tensor]] = field(default_factory=dict)  # first states
    grads: list[tuple["array[int]", int]] = field(default_factory=list)  # table, position in it
    shares: dict[Key, Shares] = field(default_factory=dict)  # sums of norms over processes
    _columns: "list[Column] | None" = None
    _ran: list[CudaBatch] | None = None  # set if only these batches ran and nothing has moved

    @property
    def lasts(self) -> bool:
        """Return whether the plan holds for the next step if only gradient addresses change."""
        return not (self.left or self.fresh or self.copied)

    @property
    def counters_unchanged(self) -> bool:
        """Return whether step counters on the host still hold the values that this plan wrote."""
        for batch in self.batches.values():  # runs before each step
            if isinstance(batch, OnGpu) and not batch.are_counters_unchanged():
                return False
        return True

    @functools.cached_property
    def turns(self) -> bytes:
        """Addresses of the turns whose steps the host counts, for `Reader.check_and_count`."""
        counting = (b for b in self.batches.values() if isinstance(b, OnGpu))
        return bytes(array("q", [ctypes.addressof(batch.turn) for batch in counting]))

    def ready(self) -> bool:
        """Return whether `Reader.check_and_count` may replay the whole step: all its launches."""
        return self._ran is not None and all(batch.ready() for batch in self._ran)

    def have(self, numbers: list["array[float]"]) -> bool:
        """Pass the next `numbers` to `Reader.check_and_count`; return whether it may launch."""
        if self._ran is None or not all(batch.stays() for batch in self._ran):
            return False
        for batch, group_numbers in zip(self._ran, numbers, strict=True):
            batch.have(group_numbers, 1)
        return True

    def withdraw(self) -> None:
        """Drop precomputed numbers, because another step than the expected one comes first."""
        for batch in self._ran or ():
            batch.turn.left = 0

    def look_ahead(self, numbers: list["array[float]"], steps: int) -> None:
        """Precompute numbers of `steps` steps of unchanged groups, unless some are left."""
        for batch, group_numbers in zip(self._ran or (), numbers, strict=False):
            if not batch.turn.left:
                batch.look_ahead(group_numbers, steps)

    def load_ahead(self, scale: Scale) -> None:
        """Load the code that the next step launches instead, once states exist.

        That step need not wait for the GPU. It may be captured, and nothing can be loaded during
        capture.
        """
        batches = [*self.batches.values()]
        if self.fresh and len(batches) == 1 and scale.reading is not None:
            (batch,) = batches
            if isinstance(batch, CountingBatch) and not batch.counts:
                scale.reading.makes(batch.kernel)

    def move(self, addresses: "array[int]") -> None:
        """Write the new addresses of gradients to the tables of the launches."""
        self._ran = None
        if self._columns is None:
            self._columns = _columns(self.grads)
        for rows, columns, numbers in self._columns:
            takes_all = len(numbers) == len(addresses)
            rows[columns] = addresses if takes_all else array("q", [addresses[n] for n in numbers])

    def looks_itself(self, scale: Scale) -> bool:
        """Return whether the host need not read any tensor of `scale`, as the only GPU reads it.

        If the GPU may find that the step is skipped, it has to count steps, and states cannot
        begin.
        """
        batches = [b for b in self.batches.values() if isinstance(b, CountingBatch)]
        if self.left or len(batches) < len(self.batches):
            return False
        if scale.found_inf is not None and (self.fresh or any(b.counts for b in batches)):
            return False
        return len({b.device for b in batches}) == 1 and scale.is_on(batches[0].device)


# A table of addresses, the slice that holds gradients, and the indices of these gradients.
Column = tuple["array[int]", slice, list[int]]


def _columns(grads: list[tuple["array[int]", int]]) -> list[Column]:
    """Return where each table of addresses holds gradients; rows of a table have one width."""
    tables: dict[int, tuple[array[int], list[int], list[int]]] = {}
    for number, (rows, column) in enumerate(grads):
        _, columns, numbers = tables.setdefault(id(rows), (rows, [], []))
        columns.append(column)
        numbers.append(number)
    return [  # rows of one table are of one width
        (rows, slice(columns[0], None, len(rows) // len(columns)), numbers)
        for rows, columns, numbers in tables.values()
    ]


def numbers_of(plan: Plan, optimizer: Optimizer, scale: Scale) -> list["array[float]"]:
    """Return each kernel's numbers of the groups; a hyperparameter that is no number raises."""
    return [batch.numbers(optimizer.param_groups, scale) for batch in plan.batches.values()]


def next_numbers(plan: Plan, last: list["array[float]"]) -> list["array[float]"]:
    """Return the numbers of the next step, for groups that have not changed since the `last`."""
    pairs = zip(plan.batches.values(), last, strict=True)
    return [batch.next_numbers(numbers) for batch, numbers in pairs]


def run(plan: Plan, optimizer: Optimizer, numbers: list["array[float]"], scale: Scale) -> None:
    """Step all parameters that are not left to torch; states of the plan's `fresh` begin."""
    launches = [*zip(plan.batches.values(), numbers, strict=True)]
    for batch, _ in launches:  # allocation may fail, so it comes before anything is written
        batch.prepare()
    if len(launches) != 1:  # several kernels: none of them can write it in passing
        scale.launch_reading()
    for param, state in plan.fresh.items():
        optimizer.state[param].update(state)
    if plan.shares:
        for batch, batch_numbers in launches:
            batch.take_norms(batch_numbers, scale)
        for shares in plan.shares.values():
            shares.add_up()
    for batch, batch_numbers in launches:
        batch.run(batch_numbers, scale)
    if plan.written:
        bump(plan.written)
    plan.held, plan.written, plan.fresh = [], [], {}
    ran = [batch for batch, _ in launches if isinstance(batch, CudaBatch)]
    plan._ran = ran if len(ran) == len(launches) and plan.lasts else None
