"""Optimizer-step kernels in SYCL, with the formula lines and calling form of the C++ ones."""

import re
from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.errors import DeviceError, SyclError
from ipex_inductor.ops.optimizer.update import Update
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.optimizer.step import (
    StepKernel,
    parts_of,
    parts_of_update,
    render_template,
)
from ipex_inductor.templates.sycl.device import device_of
from ipex_inductor.templates.sycl.source import Entry, Source

CHUNK = 1 << 12  # elements that a work-group of a GPU processes
ROWS = 32  # work-items of a group in kernels with a work-item a row
GROUP = 256  # work-items of a GPU's work-group, which share a chunk
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
    """Return `kernel` on SYCL's CPU device, callable as in C++. Raises `NotBuiltError`."""
    return Step(step_source(kernel), parts_of(kernel), torch.device("cpu"))


def update_function(update: Update) -> "Step":
    """Return an update read from a graph, on SYCL's CPU device. Raises `NotBuiltError`."""
    return update_of(update, torch.device("cpu"))


def update_of(update: Update, device: torch.device) -> "Step":
    """Return an update read from a graph, on a device, with numbers in that device's memory.

    Raises `NotBuiltError`.
    """
    return Step(update_source(update), parts_of_update(update), device)


def step_of(kernel: StepKernel, device: torch.device) -> "Step":
    """Return `kernel` on a device; the host makes all scalars. Raises `NotBuiltError`."""
    return Step(step_source(kernel, counting=False), parts_of(kernel), device)


def step_source(kernel: StepKernel, counting: bool = True) -> Source:
    """Return the source of a step of all parameters of a kind, as `step` in C++.

    Kernels in order: `scalars` counts steps and computes in fp64 the scalars shared by all elements
    of a row; `before` and `ratios` if norms take part; `update`. Without `counting` there is no
    `scalars`: the caller provides its table, and fp64 is needed for fp64 parameters alone.
    """
    parts = parts_of(kernel)
    # Pairs of bf16 are read as words on a CPU alone: a GPU needs them aligned, and bf16 may not be.
    return _source(parts | {"paired": parts["paired"] and counting}, kernel.problem, counting)


def update_source(update: Update) -> Source:
    """Return the source of an update that was read from a graph."""
    problem = {"template": "update", **vars(update)}
    return _source(parts_of_update(update) | {"paired": False}, problem, counting=True)


def _source(parts: dict[str, Any], problem: dict[str, Any], counting: bool) -> Source:
    lines = ("before_lines", "update_lines", "ratio_lines")
    parts |= {name: [(n, _type_literals(value)) for n, value in parts[name]] for name in lines}
    names = [*["scalars"] * counting, *["before", "ratios"] * bool(parts["norms"]), "update"]
    types = {kind for _, kind in parts["columns"]} | {*parts["held"].values(), parts["counted"]}
    doubles = counting or parts["real"] == "double"
    return Source(
        render_template("sycl/step.cpp.jinja", kept="Real", counting=counting, **parts),
        tuple(Entry(name, ARGUMENTS[name]) for name in names),
        native=PRECISE,
        needs=(*["fp16"] * ("_Float16" in types), *["fp64"] * doubles),
        problem=pairs({**problem, "counting": counting}),
    )


def _type_literals(line: str) -> str:
    """Give literals in a line the arithmetic's type, not C++'s fp64, which a GPU may lack."""
    return re.sub(r"(?<![\w.])(\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+)", r"Real(\1)", line)


class Step:
    """The kernels of a step on a device. Raises `NotBuiltError`.

    `scalars` is the number of scalars of a row, of the dtype `real`.
    """

    def __init__(self, source: Source, parts: Mapping[str, Any], device: torch.device) -> None:
        try:
            self._on = device_of(device)
            module = self._on.load(source)
            self._kernels = [module.kernel(entry.name) for entry in source.entries]
        except (SyclError, DeviceError) as error:
            raise NotBuiltError(f"a SYCL kernel is not to be had: {error}") from error
        self._device, self.real = device, REALS[parts["real"]]
        self.scalars = max(1, len(parts["scalars"]))  # a struct is never empty
        self._norms = len(parts["norms"])
        # Of the CPU one vector: several each go through the chunk (64 took three times as long).
        self._group = self._on.facts["vector"] if self._on.waits else GROUP

    def __call__(
        self, rows: int, row_count: int, chunks: int, chunk_count: int, numbers: int, _: int = 0
    ) -> None:
        """Run the step on host tables, with the argument order of C++'s `step`.

        Args:
            rows: address of the table of rows.
            row_count: the number of rows.
            chunks: address of the table of chunks.
            chunk_count: the number of chunks.
            numbers: address of the groups' numbers.
            _: the number of threads in C++, unused: SYCL uses its own threads.
        """
        self.run(rows, row_count, chunks, chunk_count, self.table(row_count), numbers)

    def table(self, rows: int) -> Tensor:
        """Return uninitialised memory for the scalars of that many rows."""
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
        """Run the step on tables that the device reads.

        Args:
            rows: the table of rows, or its address.
            row_count: the number of rows.
            chunks: the table of chunks, or its address.
            chunk_count: the number of chunks.
            table: the scalars of each row, written by the kernel `scalars` or complete already.
            numbers: the groups' numbers, or their address, from which `scalars` computes the table.
        """
        parts = torch.empty(chunk_count * max(1, self._norms), dtype=self.real, device=self._device)
        arguments: dict[str, tuple[Tensor | float, ...]] = {
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
                kernel.enqueue(arguments[kernel.name], (whole,), (group,))
        if self._on.waits:
            self._on.wait()


class Sent:
    """A table in a device's memory, copied again only if its values have changed.

    The host does not wait for the copy: torch copies to an Intel GPU from memory of its own. On
    another stream the table is copied again, as neither the copy nor the allocator would wait for
    that stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on = device, device_of(device)
        self._known: tuple[int, array[Any]] | None = None
        self._there = torch.empty(0)

    def __call__(self, table: "array[Any]") -> Tensor:
        """Return the table on the device, for kernels launched on the current stream."""
        if self._known != (queue := self._on.queue, table):
            self._known = queue, table[:]
            dtype = {"q": torch.int64, "d": torch.float64}[table.typecode]
            host_table = (
                torch.frombuffer(table[:], dtype=dtype) if table else torch.empty(0, dtype=dtype)
            )
            self._there = host_table.to(self._device, non_blocking=True)
        return self._there
