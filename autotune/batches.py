"""Families of problems that differ only in batch (convolutions) or in rows (linear layers).

The best choice for one member of a family is likely the best for another.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ipex_inductor.autotune.record import Operand, Problem, encode

# The largest ratio of batches or rows at which one problem says something of another. A convolution
# has no limit: its activations are large. Few rows of a linear layer leave multiprocessors idle
# where many do not.
LAYERS = (
    "ipex.linear.default",
    "ipex.gated_linear.default",
)  # have rows, not activations
FARTHEST = {"ipex.conv.default": math.inf} | dict.fromkeys(LAYERS, 2.0)
FARTHEST |= {"ipex.conv_weight_grad.default": math.inf, "ipex.conv_shortcut.default": math.inf}
FARTHEST |= {"ipex.conv_preactivated.default": math.inf}
# Whether a fused pool pays off depends on the batch: one program walks down each activation.
FARTHEST |= {"ipex.conv_pool.default": 2.0}
WORDS = dict.fromkeys(FARTHEST, "a batch of {}") | dict.fromkeys(LAYERS, "{} rows")
# Positions of the weights among the operands; (1,) for all other ops.
WEIGHTS = {"ipex.conv_weight_grad.default": (2,), "ipex.conv_shortcut.default": (1, 4)}
WEIGHTS |= {"ipex.gated_linear.default": (1, 2)}
Batches = Mapping[bytes, Sequence[tuple[int, bytes]]]


def family(problem: Problem) -> tuple[bytes, int] | None:
    """Return the key of a problem's family and its batch or row count; None if it has none.

    Problems of one family differ in batch or rows alone. The key is the canonical form of the
    problem without that size. Contiguous rows count as equal whatever leading dimensions they have.
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
    """Return a 4-d operand of this batch with its batch set to 0; others unchanged."""
    is_image = len(operand.shape) == 4 and operand.shape[:1] == batch
    return replace(operand, shape=(0, *operand.shape[1:])) if is_image else operand


def _without_rows(operand: Operand, leading: tuple[int, ...]) -> Operand:
    """Return a contiguous operand of these leading sizes as 2-d with 0 rows; others unchanged."""
    sizes = [n for n in operand.shape if isinstance(n, int)]
    follow = [*operand.stride] == [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    if operand.shape[:-1] != leading or not follow:
        return operand
    return replace(operand, shape=(0, sizes[-1]), stride=(sizes[-1], 1))


def find_nearest_sizes(problem: Problem, batches_by_family: Batches) -> list[tuple[int, bytes]]:
    """Return the known members of the problem's family, the nearest first, without itself.

    Each is its batch or row count and its canonical form. Members further away than `FARTHEST`
    allows for the op are left out.
    """
    problem_family = family(problem)
    if problem_family is None or problem_family[1] == 0:
        return []
    own_key, farthest = encode(problem), math.log(FARTHEST[problem.op])
    distances = [
        (abs(math.log(batch / problem_family[1])), -batch, key)
        for batch, key in batches_by_family.get(problem_family[0], ())
        if batch and key != own_key
    ]
    return [(-negated, key) for distance, negated, key in sorted(distances) if distance <= farthest]
