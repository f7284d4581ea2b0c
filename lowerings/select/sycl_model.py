"""Cost model that selects SYCL kernels on Intel GPUs without measurements, by bytes and operations.

A GEMM takes as long as its operations or its bytes, whichever is more. SYCL kernels save writing
the sums to memory and reading them back for an epilogue. They lack oneDNN's tuning.
"""

import math
from collections.abc import Sequence

import torch

from ipex_inductor.autotune.record import Problem
from ipex_inductor.errors import TargetError
from ipex_inductor.lowerings.common.calls import Call
from ipex_inductor.lowerings.common.sycl import PRODUCT, arch_of
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.ops.conv.geometry import sides
from ipex_inductor.target.device import Target, find_target
from ipex_inductor.templates.sycl.kernel import DTYPES
from ipex_inductor.templates.sycl.tiles import Tile, tiles

# Shares of the peak rate that oneDNN, our kernels with a matrix engine and our kernels without one
# reach. They are not measured on an Intel GPU: they are conservative figures of such kernels
# elsewhere.
LIBRARY, ENGINE, LANES = 0.7, 0.4, 0.25
MOVED = 0.8  # share of the peak bandwidth
LAUNCH = 5e-6  # least seconds of a kernel
WORTH = 1.1  # least predicted speedup for which a SYCL kernel is selected


def fastest(problem: Problem, offered: Sequence[Call]) -> tuple[Call, str] | None:
    """Return the SYCL call in `offered` that should beat Inductor's default, and the reason.

    The result is None if the model cannot predict times, or if the default should be as fast.
    """
    sycl_calls = [call for call in offered if call.name == PRODUCT]
    target = _target(problem) if sycl_calls and not problem.symbols else None
    if target is None:
        return None
    dtype = DTYPES[getattr(torch, operands_by_name(problem)["x"].dtype)]
    tiles_by_block = {tile.block: tile for tile in tiles(arch_of(problem), dtype)}
    times = [
        _tile_seconds(problem, target, dtype, tiles_by_block[str(c.parameters["block"])])
        for c in sycl_calls
    ]
    best, default = min(times), _library_seconds(problem, target, dtype)
    if default < WORTH * best:
        return None
    call = sycl_calls[times.index(best)]
    block = call.parameters["block"]
    prediction = (
        f"a model says {best * 1e6:.1f} us of {call.name} {block}, {default * 1e6:.1f} us of that"
    )
    return call, prediction


def _target(problem: Problem) -> Target | None:
    """Return the description of the problem's device; None if its peaks are not known."""
    try:
        device = find_target(problem.arch)
    except TargetError:
        return None
    return device if device.bandwidth and device.rates else None


def _library_seconds(problem: Problem, target: Target, dtype: str) -> float:
    """Return the predicted seconds of oneDNN's GEMM and of Inductor's kernel for the epilogue."""
    rows, columns, terms = _sizes(problem)
    rate, bandwidth = target.rate(dtype) or math.inf, target.bandwidth or math.inf
    operations, moved = 2 * rows * columns * terms, _moved_bytes(problem)
    product = max(operations / (rate * LIBRARY), moved / (bandwidth * MOVED)) + LAUNCH
    if problem.constants["binary"] == problem.constants["unary"] == "none":
        return product
    return product + 2 * _result_bytes(problem) / (bandwidth * MOVED) + LAUNCH


def _tile_seconds(problem: Problem, target: Target, dtype: str, tile: Tile) -> float:
    """Return the predicted seconds of a SYCL kernel with this tile, epilogue included.

    Work that blocks at the edges compute in vain and idle multiprocessors are counted.
    """
    rows, columns, terms = _sizes(problem)
    rate, bandwidth = target.rate(dtype) or math.inf, target.bandwidth or math.inf
    if not tile.matrix:
        rate = target.rate("fp32") or math.inf
    groups = -(-rows // tile.rows) * -(-columns // tile.columns)
    rounds = -(-groups // target.multiprocessors)
    operations = 2 * tile.rows * tile.columns * terms * rounds * target.multiprocessors
    share = ENGINE if tile.matrix else LANES
    return max(operations / (rate * share), _moved_bytes(problem) / (bandwidth * MOVED)) + LAUNCH


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """Return M, N and K of the GEMM; a convolution counts as its implicit GEMM."""
    operands = operands_by_name(problem)
    x, weight = ([int(n) for n in operands[name].shape] for name in ("x", "weight"))
    if problem.op != str(torch.ops.ipex.conv.default):
        return math.prod(x[:-1]), weight[0], weight[1]
    values = ([*_ints(problem.constants[n])] for n in ("stride", "padding", "dilation"))
    stride, padding, dilation = (sizes * 2 if len(sizes) == 1 else sizes for sizes in values)
    activation = sides(x[2:], weight[2:], stride, padding, dilation)
    return x[0] * math.prod(activation), weight[0], math.prod(weight[1:])


def _ints(value: object) -> tuple[int, ...]:
    assert isinstance(value, (tuple, list))
    return tuple(value)


def _result_bytes(problem: Problem) -> int:
    """Return the bytes of the result."""
    rows, columns, _ = _sizes(problem)
    return rows * columns * _itemsize(problem)


def _moved_bytes(problem: Problem) -> int:
    """Return the bytes of all operands and of the result, each counted once."""
    operands = operands_by_name(problem).values()
    sizes = (math.prod(int(n) for n in operand.shape) for operand in operands)
    return sum(sizes) * _itemsize(problem) + _result_bytes(problem)


def _itemsize(problem: Problem) -> int:
    dtype: torch.dtype = getattr(torch, operands_by_name(problem)["x"].dtype)
    return dtype.itemsize
