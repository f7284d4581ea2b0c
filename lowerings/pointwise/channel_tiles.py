"""2-D tiles of rows and channels for Inductor's loops over channels-last activations on a GPU.

Inductor loops over such an activation in one dimension, so a thread loads the per-channel elements
of the few pixels that it computes. A batch norm has four of them and its gradient six. They are
more than the activation itself, and the first-level cache is the limit. In a 2-D tile a thread has
equal channels in all its rows, and loads and processes their elements once.
"""

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V

from ipex_inductor.target.device import nvidia

NAME = "channel-tiles"
# Channels, rows and warps of each tile. The first tile whose channels divide the activation's is
# used. On an H200 they are the best of 22, or within 5 %, for batch norms of ResNet-50 and their
# gradients.
TILES = ((128, 16, 2), (64, 32, 2))
# By architecture, the least elements of an activation for which tiles gained in measurements.
FASTER = {"sm_90": 128 * 1024 * 7 * 7}
# Limits of what was measured. OUTWEIGHS is the least ratio of a pixel's per-channel bytes to its
# bytes of activations. MOST is the largest number of per-channel vectors: two norms' gradients have
# so many, and with many more registers run out. HALVES and IMAGES are the dtypes of activations: at
# least one has 16 bits, and masks and 32-bit ones may be among them.
OUTWEIGHS, MOST = 4, 10
HALVES = {torch.bfloat16, torch.float16}
IMAGES = HALVES | {torch.float32, torch.bool}


def find_tiling(features: Any) -> tuple[dict[str, Any], tuple[int, int, int]] | None:
    """Return the tiling by rows and channels of a loop that gains, and its tile, or None."""
    gpu, count = nvidia(V.graph.get_current_device_or_throw()), features.numel
    # Only loops of static size without a reduction gain.
    is_loop = isinstance(count, sympy.Integer) and features.reduction_numel == 1
    if not is_loop or gpu is None or count < FASTER.get(gpu.arch, sympy.oo):
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
    """Return a node's reads that depend on the innermost loop alone: one element a channel."""
    loops = [size for size in node.get_ranges()[0] if size != 1]
    if len(loops) < 2:
        return []
    return [
        dep
        for dep in node.read_writes.reads
        # A dependency has no sizes for inner loops that its index does not use.
        if isinstance(dep, MemoryDep) and [*dep.size] == loops and dep.index == dep.var_names[-1]
    ]


def _outweigh(features: Any, vectors: set[str]) -> bool:
    """Return whether a pixel loads enough more of its channels' elements than of activations.

    Args:
        features: features of the kernel's loops.
        vectors: names of the buffers with one element a channel.
    """
    nodes = features.scheduler_nodes()
    written = {dep.name for node in nodes for dep in node.read_writes.writes}
    read = {dep for node in nodes for dep in node.read_writes.reads if isinstance(dep, MemoryDep)}
    images = {dep.name for dep in read if dep.get_numel() == features.numel} - written - vectors
    dtypes = [V.graph.get_dtype(name) for name in images]
    if len(vectors) > MOST or not {*dtypes} & HALVES or not {*dtypes} <= IMAGES:
        return False
    numbers = sum(V.graph.get_dtype(name).itemsize for name in vectors)
    return numbers >= OUTWEIGHS * sum(dtype.itemsize for dtype in dtypes)
