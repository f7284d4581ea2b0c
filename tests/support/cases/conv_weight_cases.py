"""Shapes that the gradient of a stem's weight is tested with, on a CPU and on a GPU."""

import itertools
import random

from ipex_inductor.ops.conv.small_channel import runs
from ipex_inductor.templates.triton.conv_small_channel_weight import TILES, fits


def case(x, weight, stride, padding, tile=(32, 16, 32, 4, 2, 1), **given):
    usual = {"template": "stem_weight", "dilation": [1, 1], "groups": 1, "dtype": "float32"}
    usual |= {"last": True, "warps": tile[3], "steps": 2}
    return {
        "x": x,
        "weight": weight,
        "stride": [stride] * 2 if isinstance(stride, int) else stride,
        "padding": [padding] * 2 if isinstance(padding, int) else padding,
        "tile": list(tile),
        **usual,
        **given,
    }


# Image, weight, stride, padding: windows of nets, then odd ones.
SHAPES = [
    ([2, 3, 23, 29], [64, 3, 7, 7], 2, 3),
    ([1, 3, 24, 26], [64, 3, 7, 7], 2, 3),
    ([1, 3, 20, 18], [32, 3, 3, 3], 2, 1),
    ([2, 3, 17, 19], [16, 3, 3, 3], 2, 1),
    ([3, 3, 15, 15], [24, 3, 3, 3], 1, 1),
    ([2, 3, 16, 16], [128, 3, 4, 4], 4, 0),
    ([1, 3, 18, 19], [96, 3, 4, 4], 4, 0),
    ([1, 3, 32, 32], [37, 3, 16, 16], 16, 0),
    ([2, 4, 16, 48], [17, 4, 16, 16], 16, 0),
    ([1, 1, 17, 19], [5, 1, 5, 3], [1, 2], [0, 2]),
    ([2, 1, 28, 28], [6, 1, 5, 5], 1, 2),
    ([1, 4, 13, 11], [7, 4, 3, 5], [3, 2], [2, 1]),
    ([1, 2, 7, 7], [1, 2, 7, 7], 1, 0),
    ([1, 3, 1, 1], [3, 3, 1, 1], 1, 0),
    ([7, 3, 1, 1], [19, 3, 3, 3], 1, 1),
    ([1, 3, 5, 130], [8, 3, 3, 3], 1, [2, 0]),
    ([5, 3, 2, 2], [113, 3, 3, 3], 2, 1),
    ([1, 2, 9, 31], [31, 2, 2, 6], [2, 3], [1, 2]),
    ([1, 4, 8, 8], [61, 4, 3, 3], 1, 1),
    ([1, 3, 12, 10], [129, 3, 3, 3], 2, 1),
    ([2, 3, 9, 9], [13, 3, 2, 2], 3, 0),
    ([1, 1, 40, 3], [67, 1, 11, 1], [4, 1], [5, 0]),
]
CASES = [
    case(*shape, last=last, dtype=("float32", "float16")[number % 2])
    for number, (shape, last) in enumerate(itertools.product(SHAPES, (True, False)))
]
# Every tile; of one step, so that there are most parts, and of more steps than there are pixels.
CASES += [
    case(*SHAPES[1], tile=[*vars(tile).values()], steps=steps, dtype=dtype)
    for tile, (steps, dtype) in zip(TILES, itertools.cycle(((1, "float16"), (99, "float32"))))
]
# Between windows that are four apart; rows of whole vectors, so that it is loaded with them.
APART = [
    (
        [2, 3, 12, 12],
        [13, 3, 2, 2],
        4,
        0,
        [[0, 2, 0, 2], [0, 0, 4, 3], [1, 1, 2, 0], [1, 2, 9, 11]],
    ),
    (
        [2, 3, 12, 12],
        [13, 3, 3, 3],
        4,
        1,
        [[0, 2, 0, 2], [1, 0, 3, 6], [0, 0, 8, 2], [1, 2, 9, 10]],
    ),
]
CASES += [
    case(*shape, beside=beside, planted=planted, last=last)
    for (*shape, beside), planted, last in itertools.product(APART, ("inf", "nan"), (True, False))
]
# Nothing is aligned.
CASES += [case(*SHAPES[1], moved=True, dtype="float16", last=last) for last in (True, False)]


def drawn(seed):
    """Of no net's sizes, by a tile that is offered for it."""
    draw = random.Random(seed)
    window, stride, padding = (
        [draw.randint(*ends) for _ in "hw"] for ends in ((1, 7), (1, 4), (0, 3))
    )
    sides = [draw.randint(reach, 40) for reach in window]
    image, last = [draw.randint(1, 4), draw.randint(1, 4), *sides], draw.random() < 0.5
    weight = [draw.randint(1, 200), image[1], *window]
    found = runs(image[1:], window, stride, padding, last)
    tile = draw.choice([tile for tile in TILES if fits(tile, weight[0], found)])
    how = {"warps": tile.num_warps, "steps": draw.randint(1, 9), "last": last}
    dtype = ("float32", "float16")[seed % 2]
    return case(image, weight, stride, padding, [*vars(tile).values()], dtype=dtype, **how)


SEEDS = range(40)  # as many shapes at least
RANDOM = [drawn(seed) for seed in SEEDS]
# Sums in fp32 of parts that are not rounded, against fp64.
CLOSE = 2e-6
