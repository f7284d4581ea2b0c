"""Convolutions that differ in their batch alone: what is best for one is likely for another."""

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ipex_inductor.autotune.record import Operand, Problem, encode

OP = "ipex.conv.default"
WEIGHT = 1  # which operand it is; all others of four dimensions are images
Batches = Mapping[bytes, Sequence[tuple[int, bytes]]]


def family(problem: Problem) -> tuple[bytes, int] | None:
    """What problems have in common that differ in their batch alone, and its batch; else None."""
    sizes = problem.operands[0].shape if problem.operands else ()
    batch = sizes[0] if sizes else None
    if problem.op != OP or not isinstance(batch, int) or problem.symbols:
        return None
    operands = enumerate(problem.operands)
    rest = tuple(o if i == WEIGHT else _without(o, batch) for i, o in operands)
    return encode(replace(problem, operands=rest)), batch


def _without(operand: Operand, batch: int) -> Operand:
    is_image = len(operand.shape) == 4 and operand.shape[0] == batch
    return replace(operand, shape=(0, *operand.shape[1:])) if is_image else operand


def near(problem: Problem, known: Batches) -> list[tuple[int, bytes]]:
    """The batches and canonical forms of the same problem that are `known`, the nearest first."""
    found = family(problem)
    if found is None or found[1] == 0:
        return []
    others = (other for other in known.get(found[0], ()) if other[0] not in (0, found[1]))
    return sorted(others, key=lambda other: (abs(math.log(other[0] / found[1])), -other[0]))
