"""Tiles of rows and channels for Inductor's loops over channels-last images on a GPU.

Inductor goes over such an image in one dimension, so a thread loads the numbers of its channels
for the few pixels that it computes: where a batch norm has four of them, or its gradient six, they
are more than the image itself, and the first cache is what binds. In a tile of two dimensions a
thread has the same channels in all its rows, whose numbers it loads, and computes with, once.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.utils import counters
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V

from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import nvidia

NAME = "channel-tiles"
# Channels, rows and warps; of those whose channels are a multiple the first. On an H200 the best of
# 22, or within 5 %, for batch norms of ResNet-50 and their gradients.
TILES = ((128, 16, 2), (64, 32, 2))
# By architecture, how many numbers an image has at least that was measured: fewer gain nothing.
FASTER = {"sm_90": 128 * 1024 * 7 * 7}
# Of what was measured: how many times what a pixel loads of images its channels' numbers are at
# least, how many there are at most (two norms' gradients; of many more registers run out), and what
# images are of: one at least of 16 bits, masks and some of 32 beside them.
OUTWEIGHS, MOST = 4, 10
HALVES = {torch.bfloat16, torch.float16}
IMAGES = HALVES | {torch.float32, torch.bool}


@contextlib.contextmanager
def tiled(off: frozenset[str], report: GraphReport) -> Iterator[None]:
    """Loops of graphs compiled meanwhile, in this thread, have such tiles where they gain.

    A handler of choices that is not Inductor's own is left alone, which is said. Reported is what
    was generated: of code from a cache, nothing.
    """
    is_off = bool({"*", NAME} & off)
    if type(V.choices) not in (InductorChoices, _Choices):
        if not is_off:
            report.add("missed", NAME, "Inductor's choices have a handler of somebody else")
        yield
        return
    choices = InductorChoices() if is_off else _Choices()
    with V.set_choices_handler(choices):
        yield
    if isinstance(choices, _Choices) and choices.count:
        report.add("fired", NAME, f"kernels: {choices.count}")


class _Choices(InductorChoices):
    def __init__(self) -> None:
        self.count = 0

    def triton_kernel_kwargs(
        self, kernel_cls: Any, features: Any, groups: list[Any], kernel_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """`groups` has the tiling alone, and nobody but the kernel reads it behind this.

        In the order of the kernel's own axes, by which torch 2.11 tells what is broadcast.
        """
        usual = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        found = _tiling(features)
        if found is None:
            return usual
        self.count += 1
        counters["ipex"][NAME] += 1
        tiling, (channels, rows, warps) = found
        groups[:] = [{axis: tiling[axis] for axis in ("x", "y", "r0_")}]
        sizes = {"XBLOCK": channels, "YBLOCK": rows, "num_warps": warps, "num_stages": 1}
        return {**usual, "fixed_config": FixedTritonConfig(sizes)}


def _tiling(features: Any) -> tuple[dict[str, Any], tuple[int, int, int]] | None:
    """Rows and channels of a loop that gains, and its tile."""
    here, count = nvidia(V.graph.get_current_device_or_throw()), features.numel
    known = isinstance(count, sympy.Integer) and features.reduction_numel == 1  # a loop, no sum
    if not known or here is None or count < FASTER.get(here.arch, sympy.oo):
        return None
    vectors = [dep for node in features.scheduler_nodes() for dep in _of_channels(node)]
    channels = {dep.size[-1] for dep in vectors}
    if len(channels) != 1 or not isinstance(width := channels.pop(), sympy.Integer):
        return None
    tile = next((tile for tile in TILES if width % tile[0] == 0), None)
    if tile is None or not _outweigh(features, {dep.name for dep in vectors}):
        return None
    tiling = SIMDScheduling.create_tiling([count // width, width], [sympy.S.One])
    schedule = features.node_schedule
    fits = SIMDScheduling.tiling_is_compatible(schedule, count, sympy.S.One, tiling)
    return (tiling, tile) if fits else None


def _of_channels(node: Any) -> list[Any]:
    """What it reads by the place in its innermost loop alone: a number for each channel."""
    loops = [size for size in node.get_ranges()[0] if size != 1]
    if len(loops) < 2:
        return []
    return [
        dep
        for dep in node.read_writes.reads
        # Of inner loops that an index does not go by a dependency has no size.
        if isinstance(dep, MemoryDep) and [*dep.size] == loops and dep.index == dep.var_names[-1]
    ]


def _outweigh(features: Any, vectors: set[str]) -> bool:
    """Whether a pixel loads so much more of its channels' numbers, `vectors`, than of images."""
    nodes = features.scheduler_nodes()
    made = {dep.name for node in nodes for dep in node.read_writes.writes}
    read = {dep for node in nodes for dep in node.read_writes.reads if isinstance(dep, MemoryDep)}
    images = {dep.name for dep in read if dep.get_numel() == features.numel} - made - vectors
    dtypes = [V.graph.get_dtype(name) for name in images]
    if len(vectors) > MOST or not {*dtypes} & HALVES or not {*dtypes} <= IMAGES:
        return False
    numbers = sum(V.graph.get_dtype(name).itemsize for name in vectors)
    return numbers >= OUTWEIGHS * sum(dtype.itemsize for dtype in dtypes)
