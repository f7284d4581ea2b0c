"""Predict the best template of an unmeasured size from its nearest measured neighbors.

Neighbors share op, constants, dtypes, layouts and kernel size, and their channels are of one kind.
In both or in neither, the rows that a linear layer writes start at whole vectors: libraries are
slow if they do not.
Only templates are taken this way, since everything else is the default anyway. In the nearest
problems of two weights other than the problem's own, a template must have won clearly, or both best
choices must be templates. The gain of a small-channel convolution does not depend on its kernel
size, so the second neighbor may have another one there.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ipex_inductor.autotune import batches
from ipex_inductor.autotune.batches import LAYERS
from ipex_inductor.autotune.record import Choice, Operand, Problem

CONVOLUTION = "ipex.conv.default"
SHORTCUT, POOL = "ipex.conv_shortcut.default", "ipex.conv_pool.default"
PREACTIVATED = "ipex.conv_preactivated.default"
AGREE = 2  # neighbors of different weights that must agree
MARGIN = 1.15  # gain over the library, if its time is among the two best that a table has
FARTHEST = 4.0  # doublings of all sizes together, to the nearest neighbor
# Held-out templates won even there; of 62 measured depthwise convolutions all but one.
FARTHER = {"few": math.inf, "each": math.inf, "others": 6.0}
TILE = 3.0  # doublings of a tile's sizes
DILATED = 12  # least dilation for which cuDNN 9.19 has no kernel for Hopper; at 4 it has one
FEW = 4  # input channels of a small-channel convolution
VECTOR = {"float16": 8, "bfloat16": 8, "float32": 4}  # elements in 16 bytes
# Constants that neighbors need not share: groups are part of the channels' kind, and pointwise
# epilogues and the number of channel parts change no choice.
UNLIKE = ("groups", "unary", "scalars", "more")
WINDOW = ("padding", "stride")
Kind = tuple[object, ...]


def kind(problem: Problem, window: bool = True) -> Kind | None:
    """Return the properties that neighbors share; None if the problem can have none.

    With `window` they include the kernel size, padding and stride of a convolution.
    """
    sizes = [n for o in problem.operands for n in o.shape]
    if problem.symbols or not all(isinstance(n, int) and n for n in sizes):
        return None
    left_out = UNLIKE if window else UNLIKE + WINDOW
    constants = tuple(
        sorted(item for item in _constants(problem).items() if item[0] not in left_out)
    )
    operands = tuple((o.dtype, len(o.shape), _layout(o)) for o in problem.operands)
    if problem.op == PREACTIVATED:
        operands = tuple(dict.fromkeys(operands))
        single = not problem.constants["more"]  # one part: no concatenated activations
        constants += (("columns", problem.operands[1].shape[0] if single else 0),)
    settings = tuple(sorted(problem.settings.items()))
    shared = problem.op, problem.arch, constants, problem.epilogue, settings, operands
    if problem.op in LAYERS:
        weight = problem.operands[1]
        return *shared, _product(weight.shape[:1]) % VECTOR.get(weight.dtype, 1) == 0
    channels = _channels(problem)
    if channels is None:
        return None
    windows = tuple(o.shape[2:] for o in _weights(problem)) if window else ()
    return *shared, channels, windows


def _constants(problem: Problem) -> dict[str, object]:
    """Return a problem's constants; of a widely dilated window that keeps all pixels, one text.

    For these cuDNN has only kernels of an earlier architecture, which took 1.4 to 1.6 times as long
    as a template for all that were measured. How far apart the taps are changes little.
    """
    constants: dict[str, object] = {**problem.constants}
    dilation, padding = problem.constants.get("dilation"), problem.constants.get("padding")
    weights = _weights(problem)
    if isinstance(dilation, tuple) and min(dilation, default=1) >= DILATED and weights:
        taps = weights[0].shape[2:]
        if isinstance(padding, tuple) and len(padding) == len(dilation) == len(taps):
            pairs = zip(padding, dilation, taps, strict=True)
            if all(2 * p == d * (int(t) - 1) for p, d, t in pairs):
                constants["dilation"] = constants["padding"] = "of equal size"
    return constants


class Known(NamedTuple):
    """A measured problem and its position among problems of its kind."""

    problem: Problem
    weights: Kind  # their sizes
    place: tuple[float, ...]


def by_kind(problems: Iterable[Problem]) -> dict[Kind, list[Known]]:
    """Return the problems that may be neighbors, by kind."""
    neighbors: dict[Kind, list[Known]] = {}
    for problem in problems:
        for shared in {kind(problem), _judged_by(problem)}:
            if shared is not None:
                neighbor = Known(problem, _shapes(problem), _sizes(problem))
                neighbors.setdefault(shared, []).append(neighbor)
    return neighbors


def find_neighbors(
    problem: Problem, measured: Mapping[Kind, Sequence[Known]], won: Callable[[Problem], bool]
) -> list[Problem]:
    """Return the neighbors with the problem's kernel size, nearest first, if the nearest all `won`.

    The list is empty if fewer than `AGREE` weights were measured.
    """
    own_kind, judging_kind = kind(problem), _judged_by(problem)
    if own_kind is None or judging_kind is None or own_kind not in measured:
        return []
    nearest_by_weights: dict[Kind, Problem] = {}
    candidates = _rank_neighbors(problem, measured[judging_kind])
    for candidate in candidates:
        nearest_by_weights.setdefault(candidate.weights, candidate.problem)
    nearest = [*nearest_by_weights.values()][:AGREE]
    if len(nearest) < AGREE or not all(map(won, nearest)):
        return []
    return [
        n.problem
        for n in (
            candidates if judging_kind == own_kind else _rank_neighbors(problem, measured[own_kind])
        )
    ]


def nearest_tile(of: Choice, offered: Iterable[Choice]) -> Choice | None:
    """Return the offered choice of this template with the closest tile sizes.

    None if the sizes differ by more than `TILE` doublings in all.
    """

    def distance(tile: Choice) -> float:
        """Return the difference of the tile's sizes, in doublings."""
        sizes = ((n, of.parameters[name]) for name, n in tile.parameters.items())
        both = [(a, b) for a, b in sizes if isinstance(a, int) and isinstance(b, int)]
        return sum(abs(math.log2((a or 0.5) / (b or 0.5))) for a, b in both)

    tiles = [
        c for c in offered if c.name == of.name and c.parameters.keys() == of.parameters.keys()
    ]
    return min((tile for tile in tiles if distance(tile) <= TILE), key=distance, default=None)


def _judged_by(problem: Problem) -> Kind | None:
    """Return the kind of the neighbors that decide whether a template wins."""
    return kind(problem, window=problem.op in LAYERS or _channels(problem) != "few")


def _rank_neighbors(problem: Problem, neighbors: Sequence[Known]) -> list[Known]:
    """Return the neighbors of other weights, nearest first; none if the nearest is too far."""
    weights, place = _shapes(problem), _sizes(problem)
    rows = math.log2(batches.FARTHEST[problem.op])
    ranked = []
    for neighbor in neighbors:
        differences = [*map(abs, map(operator.sub, place, neighbor.place))]
        if neighbor.weights != weights and differences[0] <= rows:
            ranked.append((sum(differences), neighbor.weights, neighbor))
    ranked.sort(key=lambda entry: entry[:2])
    farthest = FARTHER.get(_channels(problem) or "", FARTHEST)
    return [neighbor for *_, neighbor in ranked] if ranked and ranked[0][0] <= farthest else []


def words(problem: Problem) -> str:
    """Return the sizes of a neighbor as text."""
    weights = " and ".join("x".join(map(str, o.shape)) for o in _weights(problem))
    return f"{weights} on {'x'.join(map(str, problem.operands[0].shape))}"


def _channels(problem: Problem) -> str | None:
    """Return the kind of a convolution's channels; None for other ops.

    "few" and "all" are dense convolutions, "each" is depthwise. In grouped convolutions, cuDNN has
    a fast kernel if each group reads and writes a power of two channels ("powers"). For "others" it
    took two to eight times as long as our template.
    """
    if problem.op not in (CONVOLUTION, SHORTCUT, POOL, PREACTIVATED):
        return None
    groups = problem.constants.get("groups", 1)
    channels = problem.operands[0].shape[1]
    if groups == 1:
        return "few" if isinstance(channels, int) and channels <= FEW else "all"
    outputs, width = problem.operands[1].shape[:2]
    if groups == channels == outputs:
        return "each"
    sizes = (
        [width, outputs // groups] if isinstance(groups, int) and isinstance(outputs, int) else []
    )
    powers = all(isinstance(size, int) and size.bit_count() == 1 for size in sizes)
    return "powers" if powers else "others"


def _weights(problem: Problem) -> list[Operand]:
    """Return the operands that are weights."""
    return [problem.operands[n] for n in batches.WEIGHTS.get(problem.op, (1,))]


def _shapes(problem: Problem) -> Kind:
    """Return the shapes of the weights."""
    return tuple(o.shape for o in _weights(problem))


def _sizes(problem: Problem) -> tuple[float, ...]:
    """Return the logarithms of M, or of batch and pixels, and of input and output channels."""
    x = problem.operands[0].shape
    parts = [x[:-1], x[-1:]] if problem.op in LAYERS else [x[:1], x[1:2], x[2:]]
    if problem.op == PREACTIVATED:  # the channels of all parts
        parts[1] = problem.operands[1].shape[1:2]
    parts += [o.shape[:1] for o in _weights(problem)]
    return tuple(math.log2(_product(part)) for part in parts)


def _product(sizes: Iterable[object]) -> int:
    """Return the product of the sizes that are numbers."""
    return math.prod(n for n in sizes if isinstance(n, int))


def _layout(operand: Operand) -> bool:
    """Return True for a channels-last activation, or for contiguous rows."""
    dim = 1 if len(operand.shape) == 4 else len(operand.shape) - 1
    return not operand.shape or operand.stride[dim] == 1
