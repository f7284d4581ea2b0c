"""Records for tests: of two library calls and a template that only tests know."""

from ipex_inductor.autotune import space
from ipex_inductor.autotune.record import (
    Choice,
    Operand,
    Outcome,
    Problem,
    Provenance,
    Record,
    Timing,
)

space.register("library", "aten.mm")
space.register("library", "aten.addmm")
space.register("template", "tiled", warps=(2, 4, 8), tile=("64x64", "128x64"), flat=(True, False))

LIBRARY = Choice("library", "aten.mm")
TILES = [
    Choice("template", "tiled", {"warps": warps, "tile": tile, "flat": False}, template="0a1b")
    for warps in (2, 4)
    for tile in ("64x64", "128x64")
]
PROVENANCE = Provenance("2026-11-21T12:00:00Z", "test device", "2.13.0", "00")


def problem(rows=64, arch="sm_90"):
    shape = ((rows, 32), (32, 16))
    operands = tuple(Operand(s, (s[1], 1), "bfloat16") for s in shape)
    return Problem("aten.mm.default", operands, arch, {"out_dtype": None}, "relu")


def timed(choice, p50, noise=0.01, rounds=50):
    timing = Timing(p50 * 0.99, p50, p50 * 1.02, rounds, noise)
    return Outcome(choice, timing, error=1e-3, tolerance=1e-2, registers=128, spills=0)


def failed(choice, reason="wrong by 0.5"):
    return Outcome(choice, reason=reason)


def record(*outcomes, rows=64, arch="sm_90", provenance=PROVENANCE):
    return Record(problem(rows, arch), outcomes or (timed(LIBRARY, 10.0),), provenance)


def plant(database, run):
    """Records that say our templates are the fastest of what `run` asks about; the problems."""
    import torch

    from ipex_inductor.autotune.database import Shard
    from ipex_inductor.compiler.kernel_selection import problems_of
    from ipex_inductor.lowerings.select import library
    from ipex_inductor.reporting import decisions

    shard = Shard(database)
    found = [p for p in problems_of(run) if p.op in library.CALLS]
    for problem in found:
        calls = library.calls(problem)
        ours = [bool(c.parameters) and not c.apart for c in calls]
        times = (50.0 if own else 100.0 for own in ours)
        outcomes = (timed(c.choice, t, noise=0.001) for c, t in zip(calls, times, strict=True))
        shard.append(Record(problem, tuple(outcomes), PROVENANCE))
    shard.close()
    torch.compiler.reset()
    decisions.clear()
    return found
