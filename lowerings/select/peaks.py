"""Share of the device's peak bandwidth and peak rate that a kernel reaches."""

import functools
import math
import statistics
from collections.abc import Sequence

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ipex_inductor.autotune.record import Problem, decode_problem, encode
from ipex_inductor.errors import TargetError
from ipex_inductor.lowerings.problem.workload import empty, function_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.target import device as target

_RATES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def shares(problems: Sequence[Problem], microseconds: float) -> tuple[float | None, float | None]:
    """Return the shares of the peak bandwidth and of the peak rate that a kernel reaches.

    A share is None if the device's peak is not known. Every operand and the result count as moved
    once.

    Args:
        problems: one problem at several sizes.
        microseconds: mean time over `problems`.
    """
    first = problems[0]
    try:
        device = target.find_target(first.arch)
    except TargetError:
        return None, None
    dtype = _RATES.get(first.operands[0].dtype, "")
    if dtype == "fp32" and first.settings.get("fp32 cuda products", "ieee") != "ieee":
        dtype = "tf32"
    moved, operations = (
        statistics.fmean(values) for values in zip(*map(work, problems), strict=True)
    )
    seconds, rate = microseconds * 1e-6, device.rate(dtype)
    return (
        device.bandwidth and moved / seconds / device.bandwidth,
        rate and operations / seconds / rate,
    )


def floor(problem: Problem) -> float:
    """Return a lower bound in seconds of the time on the problem's device; 0 if unknown."""
    try:
        device = target.find_target(problem.arch)
    except TargetError:
        return 0.0
    if problem.symbols:
        return 0.0
    try:
        moved, operations = work(problem)
    except Exception:  # An op that needs a real device only gets a low priority.
        return 0.0
    rate = device.rate(_RATES.get(problem.operands[0].dtype, ""))
    return max(
        moved / device.bandwidth if device.bandwidth else 0.0, operations / rate if rate else 0.0
    )


def work(problem: Problem) -> tuple[int, int]:
    """Return the bytes moved and the operations of a problem's op; an FMA counts as two.

    Operations of the epilogue are not counted.
    """
    return _work(encode(problem))


@functools.lru_cache(1024)
def _work(key: bytes) -> tuple[int, int]:
    # A problem holds dicts and has no hash, so its encoded form is the cache's key.
    problem = decode_problem(key)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        operands = [empty(o, torch.device("cpu")) for o in problem.operands]
        result = function_of(problem, library.default_body(problem))(*operands)
    moved = sum(
        getattr(torch, o.dtype).itemsize
        * math.prod(int(n) for n, step in zip(o.shape, o.stride, strict=True) if step)
        for o in problem.operands
    )
    return moved + result.numel() * result.itemsize, int(counter.get_total_flops())
