"""Choices of Inductor's generated kernels that this package makes otherwise on a GPU."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.pointwise import channel_tiles, row_reductions
from ipex_inductor.reporting.decisions import GraphReport

TILES, ROWS = channel_tiles.NAME, row_reductions.NAME


@contextlib.contextmanager
def choose_loops(off: frozenset[str], inference: bool, report: GraphReport) -> Iterator[None]:
    """Make these choices for graphs compiled within the context in this thread.

    A handler of choices that is not Inductor's own is left in place, and this is reported. The
    report counts generated kernels only, not code from a cache.

    Args:
        off: names of passes that are switched off.
        inference: whether graphs are for inference: wide rows were measured there alone.
        report: report of the graph.
    """
    names = {TILES, *([ROWS] if inference else [])}
    on = frozenset() if "*" in off else frozenset(names - off)
    if type(V.choices) not in (InductorChoices, _Choices):
        for name in sorted(on):
            report.add("missed", name, "Inductor's handler of choices was replaced by another one")
        yield
        return
    choices = _Choices(on) if on else InductorChoices()
    with V.set_choices_handler(choices):
        yield
    if isinstance(choices, _Choices):
        for name, count in sorted(choices.counts.items()):
            report.add("fired", name, f"kernels: {count}")


class _Choices(InductorChoices):
    """Choices of a graph.

    Args:
        on: names of the choices to make.
    """

    def __init__(self, on: frozenset[str]) -> None:
        self.on = on
        self.counts: Counter[str] = Counter()

    def triton_kernel_kwargs(
        self, kernel_cls: Any, features: Any, groups: list[Any], kernel_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Add a fixed tile to the arguments of a kernel whose loop gains from it.

        `groups` holds only the tiling, and after this only the kernel reads it. It is written in
        the order of the kernel's own axes, by which torch 2.11 determines what is broadcast.

        Args:
            kernel_cls: class of the kernel.
            features: features of the kernel's loops.
            groups: tiling, replaced in place.
            kernel_kwargs: arguments of the kernel.
        """
        default = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        if self._holds_rows(features):
            self._count(ROWS)
        tiling_and_tile = channel_tiles.find_tiling(features) if TILES in self.on else None
        if tiling_and_tile is None:
            return default
        self._count(TILES)
        tiling, (channels, rows, warps) = tiling_and_tile
        groups[:] = [{axis: tiling[axis] for axis in ("x", "y", "r0_")}]
        sizes = {"XBLOCK": channels, "YBLOCK": rows, "num_warps": warps, "num_stages": 1}
        return {**default, "fixed_config": FixedTritonConfig(sizes)}

    def should_use_persistent_reduction(  # type: ignore[override]
        self, features: Any, cooperative_reduction: bool
    ) -> bool:
        """Return whether a kernel holds the rows that it reduces in registers.

        Args:
            features: features of the kernel's loops.
            cooperative_reduction: whether several programs share a row.
        """
        usual = InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)
        return usual or (not cooperative_reduction and self._holds_rows(features))

    def _holds_rows(self, features: Any) -> bool:
        """Return whether a kernel holds wide rows in registers, as the user's options allow."""
        options = torch._inductor.config.triton
        is_free = options.persistent_reductions and not options.multi_kernel
        return ROWS in self.on and is_free and row_reductions.is_wide(features)

    def _count(self, name: str) -> None:
        self.counts[name] += 1
        counters["ipex"][name] += 1
