"""Kernels of optimizer steps in SYCL: the lines that C++ and Triton have, called as C++ is."""

import re
from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.errors import DeviceError, SyclError
from ipex_inductor.ops.update import Update
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.optimizer.step import StepKernel, parts_of, parts_of_update, rendered
from ipex_inductor.templates.sycl.device import device_of
from ipex_inductor.templates.sycl.source import Entry, Source

CHUNK = 1 << 12  # elements that a group of a GPU's takes
ROWS = 32  # of a group, where a work-item is a row
GROUP = 256  # work-items of a GPU's that share a chunk
ARGUMENTS = {
    "scalars": ("*", "i64", "*", "*"),
    "before": ("*", "*", "*", "*"),
    "ratios": ("*", "i64", "i64", "*", "*"),
    "update": ("*", "*", "*"),
}
# As torch divides and takes roots; a kernel that waits for memory has the time.
REALS = {"float": torch.float32, "double": torch.float64}
PRECISE = ("-cl-fp32-correctly-rounded-divide-sqrt",)


def step_function(kernel: StepKernel) -> "Step":
    """`kernel` on SYCL's CPU device, called as C++'s is. Raises `NotBuiltError`."""
    return Step(step_source(kernel), parts_of(kernel), torch.device("cpu"))


def update_function(update: Update) -> "Step":
    """The same for an update that was read from a graph."""
    return update_of(update, torch.device("cpu"))


def update_of(update: Update, device: torch.device) -> "Step":
    """The same on that device, with numbers that lie there. Raises `NotBuiltError`."""
    return Step(update_source(update), parts_of_update(update), device)


def step_of(kernel: StepKernel, device: torch.device) -> "Step":
    """`kernel` on that device; the host makes all scalars. Raises `NotBuiltError`."""
    return Step(step_source(kernel, counting=False), parts_of(kernel), device)


def step_source(kernel: StepKernel, counting: bool = True) -> Source:
    """A step of all parameters of a kind, as `step` in C++.

    Kernels in order: `scalars` counts steps and makes what all elements of a row share, in fp64;
    `before` and `ratios` where norms take part; `update`. Without `counting` there is no `scalars`:
    its table is the caller's, and no fp64 is needed but for parameters.
    """
    parts = parts_of(kernel)
    # By words on a CPU alone: a GPU may read them only where they are aligned, as bf16 may not be.
    return _source(parts | {"paired": parts["paired"] and counting}, kernel.problem, counting)


def update_source(update: Update) -> Source:
    """The same for an update that was read from a graph."""
    problem = {"template": "update", **vars(update)}
    return _source(parts_of_update(update) | {"paired": False}, problem, counting=True)


def _source(parts: dict[str, Any], problem: dict[str, Any], counting: bool) -> Source:
    lines = ("before_lines", "update_lines", "ratio_lines")
    parts |= {name: [(n, _typed(value)) for n, value in parts[name]] for name in lines}
    names = [*["scalars"] * counting, *["before", "ratios"] * bool(parts["norms"]), "update"]
    types = {kind for _, kind in parts["columns"]} | {*parts["held"].values(), parts["counted"]}
    doubles = counting or parts["real"] == "double"
    return Source(
        rendered("sycl/step.cpp.jinja", kept="Real", counting=counting, **parts),
        tuple(Entry(name, ARGUMENTS[name]) for name in names),
        native=PRECISE,
        needs=(*["fp16"] * ("_Float16" in types), *["fp64"] * doubles),
        problem=pairs({**problem, "counting": counting}),
    )


def _typed(line: str) -> str:
    """Numbers in it have the type of the arithmetic, not C++'s fp64, which a GPU may lack."""
    return re.sub(r"(?<![\w.])(\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+)", r"Real(\1)", line)


class Step:
    """Those kernels on a device. Raises `NotBuiltError`.

    `scalars` are how many a row has, of the dtype `real`.
    """

    def __init__(self, source: Source, parts: Mapping[str, Any], device: torch.device) -> None:
        try:
            self._on = device_of(device)
            module = self._on.load(source)
            self._kernels = [module.kernel(entry.name) for entry in source.entries]
        except (SyclError, DeviceError) as error:
            raise NotBuiltError(f"a SYCL kernel is not to be had: {error}") from error
        self._device, self.real = device, REALS[parts["real"]]
        self.scalars = max(1, len(parts["scalars"]))  # no struct has nothing in it
        self._norms = len(parts["norms"])
        # Of the CPU one vector: several each go through the chunk (64 took three times as long).
        self._group = self._on.facts["vector"] if self._on.waits else GROUP

    def __call__(
        self, rows: int, row_count: int, chunks: int, chunk_count: int, numbers: int, _: int = 0
    ) -> None:
        """As C++'s `step`, of which it counts them; it uses the threads that it has."""
        self.run(rows, row_count, chunks, chunk_count, self.table(row_count), numbers)

    def table(self, rows: int) -> Tensor:
        """Room for the scalars of so many."""
        return torch.empty(rows * self.scalars, dtype=self.real, device=self._device)

    def run(
        self,
        rows: Tensor | int,
        row_count: int,
        chunks: Tensor | int,
        chunk_count: int,
        table: Tensor,
        numbers: Tensor | int = 0,
    ) -> None:
        """On tables that the device reads; that of scalars is made of `numbers`, or is whole."""
        parts = torch.empty(chunk_count * max(1, self._norms), dtype=self.real, device=self._device)
        given: dict[str, tuple[Tensor | float, ...]] = {
            "scalars": (rows, row_count, numbers, table),
            "before": (rows, chunks, table, parts),
            "ratios": (chunks, chunk_count, row_count, table, parts),
            "update": (rows, chunks, table),
        }
        for kernel in self._kernels:
            a_row = kernel.name in ("scalars", "ratios")
            group = ROWS if a_row else self._group
            whole = -(-row_count // ROWS) * ROWS if a_row else chunk_count * group
            if whole:  # tensors without elements have steps too
                kernel.enqueue(given[kernel.name], (whole,), (group,))
        if self._on.waits:
            self._on.wait()


class Sent:
    """A table where kernels of a device read it, sent there when it is another than the last.

    The host does not wait for it: torch copies to an Intel GPU from memory of its own. On another
    stream it is sent again, as neither the copy nor the allocator would wait for that one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on = device, device_of(device)
        self._known: tuple[int, array[Any]] | None = None
        self._there = torch.empty(0)

    def __call__(self, table: "array[Any]") -> Tensor:
        """Where it is, for kernels that are launched on the current stream."""
        if self._known != (queue := self._on.queue, table):
            self._known = queue, table[:]
            dtype = {"q": torch.int64, "d": torch.float64}[table.typecode]
            here = torch.frombuffer(table[:], dtype=dtype) if table else torch.empty(0, dtype=dtype)
            self._there = here.to(self._device, non_blocking=True)
        return self._there
