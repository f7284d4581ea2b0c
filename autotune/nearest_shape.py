"""What is likely best for sizes that nobody measured: what the nearest neighbors agree on.

Neighbors have the same op, constants, dtypes, layouts and window, and channels of the same kind;
the rows that a linear layer makes begin at whole vectors in both, or in neither, which libraries
are slow at.
Only templates are taken so, as all else is what is taken anyway: where one was the best, or the two
best were, in the nearest problems of two weights that are not the problem's own. A stem's kernel
gains what it gains whatever its window is, so there the second may have another.
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
AGREE = 2  # neighbors of weights of their own
MARGIN = 1.15  # over the library, where its time was kept: it is where no two templates won
FARTHEST = 4.0  # doublings of sizes in all, to the nearest
FARTHER = {"few": math.inf, "others": 6.0}  # where templates won that were held out beyond, too
TILE = 3.0  # of a tile's sizes
FEW = 4  # channels of an image, as a stem has
VECTOR = {"float16": 8, "bfloat16": 8, "float32": 4}  # numbers in 16 bytes
# Of windows and groups; what follows element by element changes no choice, nor in how many parts
# channels come.
UNLIKE = ("groups", "unary", "scalars", "more")
WINDOW = ("padding", "stride")
Kind = tuple[object, ...]


def kind(problem: Problem, window: bool = True) -> Kind | None:
    """What neighbors have in common, with their `window` or without; None where none may say."""
    sizes = [n for o in problem.operands for n in o.shape]
    if problem.symbols or not all(isinstance(n, int) and n for n in sizes):
        return None
    left_out = UNLIKE if window else UNLIKE + WINDOW
    constants = tuple(sorted(each for each in problem.constants.items() if each[0] not in left_out))
    operands = tuple((o.dtype, len(o.shape), _layout(o)) for o in problem.operands)
    if problem.op == PREACTIVATED:
        operands = tuple(dict.fromkeys(operands))
        alone = not problem.constants["more"]  # what is apart then reads no images side by side
        constants += (("columns", problem.operands[1].shape[0] if alone else 0),)
    settings = tuple(sorted(problem.settings.items()))
    alike = problem.op, problem.arch, constants, problem.epilogue, settings, operands
    if problem.op in LAYERS:
        weight = problem.operands[1]
        return *alike, _product(weight.shape[:1]) % VECTOR.get(weight.dtype, 1) == 0
    channels = _channels(problem)
    if channels is None:
        return None
    windows = tuple(o.shape[2:] for o in _weights(problem)) if window else ()
    return *alike, channels, windows


class Known(NamedTuple):
    """A problem that was measured, and where it stands."""

    problem: Problem
    weights: Kind  # their sizes
    place: tuple[float, ...]


def by_kind(problems: Iterable[Problem]) -> dict[Kind, list[Known]]:
    """Those that may be neighbors, for `near`."""
    found: dict[Kind, list[Known]] = {}
    for problem in problems:
        for each in {kind(problem), _judged_by(problem)}:
            if each is not None:
                there = Known(problem, _shapes(problem), _sizes(problem))
                found.setdefault(each, []).append(there)
    return found


def near(
    problem: Problem, known: Mapping[Kind, Sequence[Known]], won: Callable[[Problem], bool]
) -> list[Problem]:
    """The `known` neighbors with its own window, the nearest first, if the nearest all `won`.

    None where fewer than `AGREE` weights were measured.
    """
    mine, judged = kind(problem), _judged_by(problem)
    if mine is None or judged is None or mine not in known:
        return []
    judges: dict[Kind, Problem] = {}
    found = _sorted(problem, known[judged])
    for other in found:
        judges.setdefault(other.weights, other.problem)
    nearest = [*judges.values()][:AGREE]
    if len(nearest) < AGREE or not all(map(won, nearest)):
        return []
    return [n.problem for n in (found if judged == mine else _sorted(problem, known[mine]))]


def nearest_tile(of: Choice, offered: Iterable[Choice]) -> Choice | None:
    """Of the same template that of which the sizes are the least times larger or smaller.

    None where that is more than `TILE` doublings.
    """

    def apart(tile: Choice) -> float:
        sizes = ((n, of.parameters[name]) for name, n in tile.parameters.items())
        both = [(a, b) for a, b in sizes if isinstance(a, int) and isinstance(b, int)]
        return sum(abs(math.log2((a or 0.5) / (b or 0.5))) for a, b in both)

    alike = [
        c for c in offered if c.name == of.name and c.parameters.keys() == of.parameters.keys()
    ]
    return min((tile for tile in alike if apart(tile) <= TILE), key=apart, default=None)


def _judged_by(problem: Problem) -> Kind | None:
    """What those have in common that are asked whether a template wins."""
    return kind(problem, window=problem.op in LAYERS or _channels(problem) != "few")


def _sorted(problem: Problem, others: Sequence[Known]) -> list[Known]:
    """Those of other weights, the nearest first; none if that is too far off."""
    weights, place = _shapes(problem), _sizes(problem)
    rows = math.log2(batches.FARTHEST[problem.op])
    found = []
    for other in others:
        apart = [*map(abs, map(operator.sub, place, other.place))]
        if other.weights != weights and apart[0] <= rows:
            found.append((sum(apart), other.weights, other))
    found.sort(key=lambda each: each[:2])
    farthest = FARTHER.get(_channels(problem) or "", FARTHEST)
    return [other for *_, other in found] if found and found[0][0] <= farthest else []


def words(problem: Problem) -> str:
    """The sizes of a neighbor."""
    weights = " and ".join("x".join(map(str, o.shape)) for o in _weights(problem))
    return f"{weights} on {'x'.join(map(str, problem.operands[0].shape))}"


def _channels(problem: Problem) -> str | None:
    """How a convolution takes them.

    In groups of several cuDNN has a fast kernel where each takes and makes a power of two; of
    others it took two to eight times what our template took.
    """
    if problem.op not in (CONVOLUTION, SHORTCUT, POOL, PREACTIVATED):
        return None
    groups = problem.constants.get("groups", 1)
    channels = problem.operands[0].shape[1]
    if groups == 1:
        return "few" if isinstance(channels, int) and channels <= FEW else "all"
    made, width = problem.operands[1].shape[:2]
    if groups == channels == made:
        return "each"
    sizes = [width, made // groups] if isinstance(groups, int) and isinstance(made, int) else []
    powers = all(isinstance(size, int) and size.bit_count() == 1 for size in sizes)
    return "powers" if powers else "others"


def _weights(problem: Problem) -> list[Operand]:
    return [problem.operands[n] for n in batches.WEIGHTS.get(problem.op, (1,))]


def _shapes(problem: Problem) -> Kind:
    return tuple(o.shape for o in _weights(problem))


def _sizes(problem: Problem) -> tuple[float, ...]:
    """Logarithms of rows, or of images and pixels; of channels that go in and come out."""
    x = problem.operands[0].shape
    parts = [x[:-1], x[-1:]] if problem.op in LAYERS else [x[:1], x[1:2], x[2:]]
    if problem.op == PREACTIVATED:  # of all parts
        parts[1] = problem.operands[1].shape[1:2]
    parts += [o.shape[:1] for o in _weights(problem)]
    return tuple(math.log2(_product(part)) for part in parts)


def _product(sizes: Iterable[object]) -> int:
    return math.prod(n for n in sizes if isinstance(n, int))


def _layout(operand: Operand) -> bool:
    """Whether images are channels-last, and rows follow one another."""
    place = 1 if len(operand.shape) == 4 else len(operand.shape) - 1
    return not operand.shape or operand.stride[place] == 1
