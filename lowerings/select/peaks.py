"""How near a kernel comes to what its device can do."""

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
    """Of the peak bandwidth and of the peak rate; None where the device's is not known.

    Every operand and the result are counted as moved once; `microseconds` are the mean over
    `problems`, which are one at several sizes.
    """
    first = problems[0]
    try:
        device = target.described(first.arch)
    except TargetError:
        return None, None
    dtype = _RATES.get(first.operands[0].dtype, "")
    if dtype == "fp32" and first.settings.get("fp32 cuda products", "ieee") != "ieee":
        dtype = "tf32"
    moved, operations = (statistics.fmean(each) for each in zip(*map(work, problems), strict=True))
    seconds, rate = microseconds * 1e-6, device.rate(dtype)
    return (
        device.bandwidth and moved / seconds / device.bandwidth,
        rate and operations / seconds / rate,
    )


def floor(problem: Problem) -> float:
    """Seconds that it takes at least where it is measured, 0 if that is not known."""
    try:
        device = target.described(problem.arch)
    except TargetError:
        return 0.0
    if problem.symbols:
        return 0.0
    try:
        moved, operations = work(problem)
    except Exception:  # who cannot be run without a device is measured last, no more
        return 0.0
    rate = device.rate(_RATES.get(problem.operands[0].dtype, ""))
    return max(
        moved / device.bandwidth if device.bandwidth else 0.0, operations / rate if rate else 0.0
    )


def work(problem: Problem) -> tuple[int, int]:
    """Bytes moved and operations of the op, the epilogue's not counted (a FMA is two)."""
    return _work(encode(problem))


@functools.lru_cache(1024)
def _work(key: bytes) -> tuple[int, int]:
    problem = decode_problem(key)  # a problem has no hash: it holds dicts
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        operands = [empty(o, torch.device("cpu")) for o in problem.operands]
        result = function_of(problem, library.plain(problem))(*operands)
    moved = sum(
        getattr(torch, o.dtype).itemsize
        * math.prod(int(n) for n, step in zip(o.shape, o.stride, strict=True) if step)
        for o in problem.operands
    )
    return moved + result.numel() * result.itemsize, int(counter.get_total_flops())
