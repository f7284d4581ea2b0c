"""Convolutions that differ in their batch alone, linear layers in their rows.

What is best for one is likely for another.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ipex_inductor.autotune.record import Operand, Problem, encode

# How many times more or less may say something. Of a convolution any: its images are large. Few
# rows of a linear layer leave multiprocessors idle where many do not.
LAYERS = ("ipex.linear.default", "ipex.gated_linear.default")  # of rows, not of images
FARTHEST = {"ipex.conv.default": math.inf} | dict.fromkeys(LAYERS, 2.0)
FARTHEST |= {"ipex.conv_weight_grad.default": math.inf, "ipex.conv_shortcut.default": math.inf}
FARTHEST |= {"ipex.conv_preactivated.default": math.inf}
# Whether a pool is worth it depends on how many images there are: a program goes down each.
FARTHEST |= {"ipex.conv_pool.default": 2.0}
WORDS = dict.fromkeys(FARTHEST, "a batch of {}") | dict.fromkeys(LAYERS, "{} rows")
# Which operands they are, else the second.
WEIGHTS = {"ipex.conv_weight_grad.default": (2,), "ipex.conv_shortcut.default": (1, 4)}
WEIGHTS |= {"ipex.gated_linear.default": (1, 2)}
Batches = Mapping[bytes, Sequence[tuple[int, bytes]]]


def family(problem: Problem) -> tuple[bytes, int] | None:
    """What problems have in common that differ in their batch or rows alone, and those; else None.

    Rows that follow one another are the same whatever dimensions number them.
    """
    shape = problem.operands[0].shape if problem.operands else ()
    images = problem.op not in LAYERS
    leading = shape[:1] if images else shape[:-1]
    numbers = [n for n in leading if isinstance(n, int)]
    if problem.op not in FARTHEST or problem.symbols or not leading or numbers != [*leading]:
        return None
    without = _without_batch if images else _without_rows
    operands, weights = enumerate(problem.operands), WEIGHTS.get(problem.op, (1,))
    rest = tuple(o if i in weights else without(o, (*numbers,)) for i, o in operands)
    return encode(replace(problem, operands=rest)), math.prod(numbers)


def _without_batch(operand: Operand, batch: tuple[int, ...]) -> Operand:
    is_image = len(operand.shape) == 4 and operand.shape[:1] == batch
    return replace(operand, shape=(0, *operand.shape[1:])) if is_image else operand


def _without_rows(operand: Operand, leading: tuple[int, ...]) -> Operand:
    sizes = [n for n in operand.shape if isinstance(n, int)]
    follow = [*operand.stride] == [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    if operand.shape[:-1] != leading or not follow:
        return operand
    return replace(operand, shape=(0, sizes[-1]), stride=(sizes[-1], 1))


def near(problem: Problem, known: Batches) -> list[tuple[int, bytes]]:
    """Batches or rows, and canonical forms of the same problem that are `known`, nearest first."""
    found = family(problem)
    if found is None or found[1] == 0:
        return []
    itself, farthest = encode(problem), math.log(FARTHEST[problem.op])
    distances = [
        (abs(math.log(batch / found[1])), -batch, other)
        for batch, other in known.get(found[0], ())
        if batch and other != itself
    ]
    return [(-less, other) for distance, less, other in sorted(distances) if distance <= farthest]
