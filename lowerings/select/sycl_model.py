"""Which kernel in SYCL is worth trying on an Intel GPU where nobody measured: bytes and operations.

A product takes as long as its operations or its bytes, whichever is more. What kernels in SYCL save
is the way of the sums to memory and back for an epilogue; what they lack is oneDNN's tuning.
"""

import math
from collections.abc import Sequence

import torch

from ipex_inductor.autotune.record import Problem
from ipex_inductor.errors import TargetError
from ipex_inductor.lowerings.common.calls import Call
from ipex_inductor.lowerings.common.sycl import PRODUCT, arch_of
from ipex_inductor.lowerings.problem.workload import named
from ipex_inductor.ops.stem import sides
from ipex_inductor.target.device import Target, described
from ipex_inductor.templates.sycl.kernel import DTYPES
from ipex_inductor.templates.sycl.tiles import Tile, tiles

# Of the peak; measured on no Intel GPU: what such kernels reach elsewhere, on the safe side.
# Operations of oneDNN, of ours with a matrix engine, of ours without.
LIBRARY, ENGINE, LANES = 0.7, 0.4, 0.25
MOVED = 0.8  # bytes
LAUNCH = 5e-6  # seconds that a kernel takes at least
WORTH = 1.1  # times as fast, to be believed


def fastest(problem: Problem, offered: Sequence[Call]) -> tuple[Call, str] | None:
    """That of `offered` in SYCL, and why, if it should beat what Inductor does.

    None where nothing can be said, or where that should be as fast.
    """
    ours = [call for call in offered if call.name == PRODUCT]
    target = _target(problem) if ours and not problem.symbols else None
    if target is None:
        return None
    dtype = DTYPES[getattr(torch, named(problem)["x"].dtype)]
    known = {tile.block: tile for tile in tiles(arch_of(problem), dtype)}
    times = [_by_tile(problem, target, dtype, known[str(c.parameters["block"])]) for c in ours]
    best, usual = min(times), _by_library(problem, target, dtype)
    if usual < WORTH * best:
        return None
    call = ours[times.index(best)]
    block = call.parameters["block"]
    said = f"a model says {best * 1e6:.1f} us of {call.name} {block}, {usual * 1e6:.1f} us of that"
    return call, said


def _target(problem: Problem) -> Target | None:
    try:
        known = described(problem.arch)
    except TargetError:
        return None
    return known if known.bandwidth and known.rates else None


def _by_library(problem: Problem, target: Target, dtype: str) -> float:
    """oneDNN's product, and a kernel of Inductor's for what is behind it."""
    rows, columns, terms = _sizes(problem)
    rate, bandwidth = target.rate(dtype) or math.inf, target.bandwidth or math.inf
    operations, moved = 2 * rows * columns * terms, _moved(problem)
    product = max(operations / (rate * LIBRARY), moved / (bandwidth * MOVED)) + LAUNCH
    if problem.constants["binary"] == problem.constants["unary"] == "none":
        return product
    return product + 2 * _result(problem) / (bandwidth * MOVED) + LAUNCH


def _by_tile(problem: Problem, target: Target, dtype: str, tile: Tile) -> float:
    """All of it: what blocks at the edges compute for nothing, and what idles, included."""
    rows, columns, terms = _sizes(problem)
    rate, bandwidth = target.rate(dtype) or math.inf, target.bandwidth or math.inf
    if not tile.matrix:
        rate = target.rate("fp32") or math.inf
    groups = -(-rows // tile.rows) * -(-columns // tile.columns)
    rounds = -(-groups // target.multiprocessors)
    operations = 2 * tile.rows * tile.columns * terms * rounds * target.multiprocessors
    share = ENGINE if tile.matrix else LANES
    return max(operations / (rate * share), _moved(problem) / (bandwidth * MOVED)) + LAUNCH


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """Rows, columns and terms of the product."""
    operands = named(problem)
    x, weight = ([int(n) for n in operands[name].shape] for name in ("x", "weight"))
    if problem.op != str(torch.ops.ipex.conv.default):
        return math.prod(x[:-1]), weight[0], weight[1]
    given = ([*_ints(problem.constants[n])] for n in ("stride", "padding", "dilation"))
    stride, padding, dilation = (each * 2 if len(each) == 1 else each for each in given)
    image = sides(x[2:], weight[2:], stride, padding, dilation)
    return x[0] * math.prod(image), weight[0], math.prod(weight[1:])


def _ints(value: object) -> tuple[int, ...]:
    assert isinstance(value, (tuple, list))
    return tuple(value)


def _result(problem: Problem) -> int:
    """Its bytes."""
    rows, columns, _ = _sizes(problem)
    return rows * columns * _itemsize(problem)


def _moved(problem: Problem) -> int:
    """Bytes of all operands and the result, each once."""
    operands = named(problem).values()
    sizes = (math.prod(int(n) for n in operand.shape) for operand in operands)
    return sum(sizes) * _itemsize(problem) + _result(problem)


def _itemsize(problem: Problem) -> int:
    dtype: torch.dtype = getattr(torch, named(problem)["x"].dtype)
    return dtype.itemsize
