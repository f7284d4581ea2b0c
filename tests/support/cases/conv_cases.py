"""Shapes that our convolution templates are tested with, on a CPU and on a GPU."""

import itertools
import random

from ipex_inductor.templates.triton import (
    conv_depthwise,
    conv_fprop,
    conv_grouped,
    conv_small_channel,
    conv_small_channel_pool,
    conv_strips,
    conv_tma,
    persistent,
    software_pipelined,
    weight_stationary,
)
from ipex_inductor.templates.triton.residual import BOXES_TILES, STREAMED_TILES


def case(x, weight, tile, **given):
    usual = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
    kind = {"template": "stem", "dtype": "float32", "last": True, "warps": tile[3]}
    return {"x": x, "weight": weight, "tile": tile, **usual, **kind, **given}


SMALL = [128, 16, 32, 4]
# Image, weight, stride, padding: windows of nets, then odd ones.
STEMS = [
    ([2, 3, 23, 29], [64, 3, 7, 7], [2, 2], [3, 3]),
    ([1, 3, 20, 18], [13, 3, 3, 3], [2, 2], [1, 1]),
    ([2, 3, 16, 16], [24, 3, 4, 4], [4, 4], [0, 0]),
    ([1, 3, 32, 32], [19, 3, 16, 16], [16, 16], [0, 0]),
    ([3, 3, 15, 15], [16, 3, 3, 3], [1, 1], [1, 1]),
    ([1, 1, 17, 19], [5, 1, 5, 3], [1, 2], [0, 2]),
    ([2, 1, 28, 28], [6, 1, 5, 5], [1, 1], [2, 2]),
    ([1, 4, 13, 11], [7, 4, 3, 5], [3, 2], [2, 1]),
    ([1, 2, 7, 7], [1, 2, 7, 7], [1, 1], [0, 0]),
    ([1, 3, 1, 1], [3, 3, 1, 1], [1, 1], [0, 0]),
    ([1, 3, 5, 130], [8, 3, 3, 3], [1, 1], [2, 0]),
    ([5, 3, 2, 2], [17, 3, 3, 3], [2, 2], [1, 1]),
]
CASES = [
    case(x, weight, SMALL, stride=stride, padding=padding, dtype=dtype, last=last)
    for (x, weight, stride, padding), dtype, last in itertools.product(
        STEMS, ("float32", "float16"), (True, False)
    )
]
FIRST = dict(zip(("x", "weight", "stride", "padding"), STEMS[0], strict=True))
CASES += [
    case(**FIRST, tile=[*vars(tile).values()])
    for tile in (*conv_small_channel.TILES, *conv_small_channel.XE_TILES)
]
# What lies beside a window, and is loaded with it where sizes are even, is infinite.
EVEN = dict(zip(("x", "weight", "stride", "padding"), STEMS[1], strict=True))
CASES += [
    case(**EVEN, tile=SMALL, planted=place, last=last)
    for place, last in itertools.product((0, 302, 338), (True, False))
]
# Nothing is aligned.
CASES += [case(**FIRST, tile=SMALL, moved=True, dtype="float16")]

# With a pool behind it: of one line of blocks and of several.
POOLED = {"template": "stem_pool", "warps": 4}
WIDE = ([1, 3, 11, 150], [40, 3, 7, 7], [2, 2], [3, 3])
CASES += [
    case(x, weight, [64, 32, 32, 2, 4], stride=stride, padding=padding, dtype=dtype, last=last)
    | POOLED
    for (x, weight, stride, padding), dtype, last in itertools.product(
        (WIDE, *STEMS), ("float32", "float16"), (True, False)
    )
]
CASES += [
    case(**FIRST, tile=[*vars(tile).values()]) | POOLED for tile in conv_small_channel_pool.TILES
]
CASES += [
    case(**EVEN, tile=[64, 32, 32, 2, 4], planted=place, last=last) | POOLED
    for place, last in itertools.product((0, 302, 338), (True, False))
]
CASES += [case(**FIRST, tile=[64, 64, 32, 2, 4], moved=True, dtype="float16") | POOLED]

# Image, window, stride, padding, dilation, by as many channels as the image has.
DEPTHWISE = [
    ([2, 64, 9, 17], [3, 3], [1, 1], [1, 1], [1, 1]),
    ([1, 96, 12, 14], [3, 3], [2, 2], [1, 1], [1, 1]),
    ([2, 72, 11, 7], [5, 5], [1, 1], [2, 2], [1, 1]),
    ([1, 40, 15, 13], [5, 5], [2, 2], [2, 2], [1, 1]),
    ([1, 128, 8, 8], [7, 7], [1, 1], [3, 3], [1, 1]),
    ([3, 13, 7, 5], [3, 3], [1, 1], [0, 0], [1, 1]),
    ([1, 31, 19, 23], [3, 3], [1, 1], [2, 2], [2, 2]),
    ([1, 8, 17, 9], [5, 3], [3, 1], [2, 0], [1, 3]),
    ([2, 5, 1, 1], [3, 3], [1, 1], [1, 1], [1, 1]),
    ([1, 65, 6, 33], [1, 7], [1, 2], [0, 3], [1, 1]),
    ([1, 33, 33, 6], [7, 1], [2, 1], [3, 0], [1, 1]),
    ([2, 16, 5, 5], [5, 5], [1, 1], [0, 0], [1, 1]),
]


def by_itself(x, window, stride, padding, dilation, tile=(4, 8, 32, 1), **given):
    around = {"stride": stride, "padding": padding, "dilation": dilation, "groups": x[1]}
    kind = {"template": "depthwise", **around, **given}
    return case(x, [x[1], 1, *window], list(tile), **kind)


CASES += [
    by_itself(*shape, dtype=dtype)
    for shape, dtype in itertools.product(DEPTHWISE, ("float32", "float16", "bfloat16"))
]
CASES += [
    by_itself(*shape, tile=vars(tile).values())
    for shape, tile in itertools.product(
        DEPTHWISE[:2], (*conv_depthwise.TILES, *conv_depthwise.XE_TILES)
    )
]
CASES += [by_itself(*DEPTHWISE[0], planted=700), by_itself(*DEPTHWISE[1], moved=True)]

# Interpreted, a strip takes long: in float32 the small ones.
CASES += [
    by_itself(*shape, tile=(4, 2, 64, 1), template="strips", dtype=dtype)
    for shape, dtype in itertools.product(DEPTHWISE, ("float16", "bfloat16"))
]
CASES += [
    by_itself(*DEPTHWISE[number], tile=(4, 2, 16, 1), template="strips")
    for number in (5, 7, 8, 10, 11)
]
CASES += [
    by_itself(*DEPTHWISE[1], tile=vars(tile).values(), template="strips", dtype="float16")
    for tile in conv_strips.TILES
]
CASES += [
    by_itself(*DEPTHWISE[11], template="strips", planted=300),
    by_itself(*DEPTHWISE[5], template="strips", moved=True),
]

# Image, weight, stride, padding, dilation.
FPROP = [
    ([2, 64, 7, 9], [64, 64, 1, 1], [1, 1], [0, 0], [1, 1]),
    ([1, 64, 8, 8], [64, 64, 3, 3], [1, 1], [1, 1], [1, 1]),
    ([1, 96, 9, 7], [70, 96, 3, 3], [2, 2], [1, 1], [1, 1]),
    ([2, 17, 5, 11], [13, 17, 1, 1], [2, 2], [0, 0], [1, 1]),
    ([1, 40, 13, 6], [31, 40, 3, 3], [1, 2], [2, 0], [2, 1]),
    ([1, 130, 3, 3], [66, 130, 1, 3], [1, 1], [0, 1], [1, 1]),
    ([3, 24, 1, 1], [5, 24, 1, 1], [1, 1], [0, 0], [1, 1]),
    ([1, 16, 6, 6], [3, 16, 2, 2], [2, 2], [0, 0], [1, 1]),
    ([2, 23, 4, 5], [1, 23, 3, 1], [1, 1], [1, 0], [1, 1]),
    ([1, 64, 5, 5], [19, 64, 1, 1], [1, 1], [1, 1], [1, 1]),
]


def of_many(x, weight, stride, padding, dilation, tile=(64, 64, 32, 4, 2), **given):
    around = {"stride": stride, "padding": padding, "dilation": dilation}
    return case(x, weight, list(tile), **{"template": "fprop", **around, **given})


CASES += [
    of_many(*shape, dtype=dtype)
    for shape, dtype in itertools.product(FPROP, ("float32", "float16"))
]
CASES += [
    of_many(*FPROP[2], tile=vars(tile).values())
    for tile in (*conv_fprop.TILES, *conv_fprop.XE_TILES)
]
CASES += [of_many(*FPROP[1], planted=700), of_many(*FPROP[4], moved=True)]

# The same by boxes: whole steps of channels, images that boxes leave, strides that divide.
BOXES = [
    ([1, 64, 16, 16], [64, 64, 3, 3], [1, 1], [1, 1], [1, 1]),
    ([2, 64, 14, 14], [64, 64, 3, 3], [1, 1], [1, 1], [1, 1]),
    ([5, 128, 7, 7], [72, 128, 3, 3], [1, 1], [1, 1], [1, 1]),
    ([3, 32, 9, 11], [32, 32, 3, 3], [1, 1], [1, 1], [1, 1]),
    ([1, 48, 13, 6], [31, 48, 3, 3], [1, 1], [2, 0], [2, 1]),
    ([1, 144, 3, 3], [66, 144, 1, 3], [1, 1], [0, 1], [1, 1]),
    ([3, 32, 1, 1], [5, 32, 1, 1], [1, 1], [0, 0], [1, 1]),
    ([1, 64, 12, 10], [70, 64, 3, 3], [2, 2], [1, 1], [1, 1]),
    ([2, 32, 8, 6], [13, 32, 1, 1], [2, 2], [0, 0], [1, 1]),
    ([1, 64, 8, 12], [19, 64, 2, 2], [2, 2], [0, 0], [1, 1]),
    ([1, 32, 9, 12], [33, 32, 3, 5], [3, 2], [2, 3], [1, 1]),
    ([1, 64, 10, 9], [65, 64, 3, 3], [2, 1], [2, 2], [2, 3]),
    ([2, 16, 5, 130], [1, 16, 3, 3], [1, 1], [1, 0], [1, 1]),
    ([1, 320, 5, 5], [130, 320, 3, 3], [1, 1], [1, 1], [1, 1]),
    ([4, 256, 3, 2], [17, 256, 1, 1], [1, 1], [0, 0], [1, 1]),
    ([1, 64, 6, 6], [8, 64, 5, 5], [1, 1], [4, 4], [1, 1]),
]


def in_boxes(x, weight, stride, padding, dilation, tile=(64, 64, 4, 2), **given):
    around = {"stride": stride, "padding": padding, "dilation": dilation}
    kind = {"template": "boxes", "warps": tile[2], **around, **given}
    return case(x, weight, list(tile), **kind)


CASES += [
    in_boxes(*shape, dtype=dtype)
    for shape, dtype in itertools.product(BOXES, ("float32", "float16"))
]
CASES += [in_boxes(*BOXES[2], tile=[*vars(tile).values()]) for tile in conv_tma.TILES]
CASES += [in_boxes(*BOXES[n], planted=700) for n in (0, 5, 7)]
CASES += [in_boxes(*BOXES[1], programs=99)]

# The same by groups: those of nets, then blocks with room, channels that are made or used up.
GROUPED = [
    ([1, 72, 9, 7], [72, 24, 3, 3], [1, 1], [1, 1], [1, 1], 3),
    ([2, 72, 9, 8], [72, 24, 3, 3], [2, 2], [1, 1], [1, 1], 3),
    ([1, 128, 6, 7], [128, 4, 3, 3], [1, 1], [1, 1], [1, 1], 32),
    ([1, 64, 5, 9], [64, 8, 3, 3], [2, 2], [1, 1], [1, 1], 8),
    ([1, 64, 6, 6], [64, 16, 3, 3], [1, 1], [1, 1], [1, 1], 4),
    ([1, 96, 5, 5], [96, 32, 3, 3], [1, 1], [0, 0], [1, 1], 3),
    ([3, 10, 5, 6], [15, 2, 3, 3], [1, 1], [1, 1], [1, 1], 5),
    ([1, 33, 7, 6], [22, 3, 1, 1], [1, 2], [0, 0], [1, 1], 11),
    ([2, 20, 8, 5], [40, 5, 5, 3], [1, 1], [2, 0], [1, 2], 4),
    ([1, 18, 7, 7], [9, 6, 2, 2], [3, 1], [1, 1], [2, 1], 3),
    ([1, 56, 1, 1], [112, 7, 1, 1], [1, 1], [0, 0], [1, 1], 8),
    ([2, 34, 4, 3], [2, 17, 3, 3], [1, 1], [1, 1], [1, 1], 2),
    ([1, 14, 11, 3], [28, 1, 1, 7], [1, 1], [0, 3], [1, 1], 14),
]


def in_groups(x, weight, stride, padding, dilation, groups, tile=(64, 32, 32, 4), **given):
    around = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return case(x, weight, list(tile), **{"template": "grouped", **around, **given})


CASES += [
    in_groups(*shape, dtype=dtype)
    for shape, dtype in itertools.product(GROUPED, ("float32", "float16"))
]
CASES += [
    in_groups(*shape, tile=vars(tile).values())
    for shape, tile in itertools.product(
        GROUPED[2:4], (*conv_grouped.TILES, *conv_grouped.XE_TILES)
    )
    if tile.BLOCK_N <= conv_grouped.WIDE  # else not of several groups
]
WIDE = [1, 144, 6, 5], [144, 72, 3, 3], [1, 1], [1, 1], [1, 1], 2
CASES += [in_groups(*WIDE, tile=(128, 128, 128, 8))]
CASES += [in_groups(*GROUPED[0], planted=700), in_groups(*GROUPED[6], moved=True)]
# Beside a group's own channels lie infinite ones, in its block and in the next.
CASES += [in_groups(*GROUPED[n], planted=place) for n in (0, 2, 6) for place in (7, 8, 24)]

# Image and channels that are made of it: rows and columns behind whole blocks, terms that are few.
STREAMED = [
    ([2, 64, 12, 11], 64),
    ([1, 64, 16, 16], 256),
    ([3, 128, 9, 13], 130),
    ([1, 256, 17, 11], 64),
    ([1, 1, 1, 2], 3),
    ([1, 3, 7, 5], 2),
    ([2, 17, 11, 13], 61),
    ([1, 16, 1, 127], 65),
    ([5, 96, 8, 8], 97),
    ([1, 300, 5, 29], 7),
    ([1, 31, 1, 64], 128),
    ([4, 8, 16, 9], 300),
    ([1, 512, 8, 9], 33),
    ([1, 33, 23, 23], 1),
    ([7, 40, 3, 19], 67),
    ([1, 2, 64, 3], 5),
]


def streaming(x, columns, tile=(64, 64, 4, 2, 1), **given):
    kind = {"template": "streamed", "warps": tile[2], **given}
    return case(x, [columns, x[1], 1, 1], list(tile), **kind)


CASES += [
    streaming(*shape, dtype=dtype)
    for shape, dtype in itertools.product(STREAMED, ("float32", "float16"))
]
CASES += [streaming(*STREAMED[2], tile=[*vars(tile).values()]) for tile in weight_stationary.TILES]
CASES += [streaming(*STREAMED[0], planted=700), streaming(*STREAMED[6], moved=True)]
CASES += [streaming(*STREAMED[1], programs=99)]  # a block each, and no more


# What is multiplied, the channels that are made, what is multiplied beside it, the stride there.
SHORTCUTS = [
    ([2, 64, 12, 11], 64, [2, 32, 12, 11], [1, 1]),
    ([1, 64, 16, 16], 256, [1, 128, 32, 32], [2, 2]),
    ([3, 128, 9, 13], 130, [3, 16, 18, 26], [2, 2]),
    ([1, 16, 1, 2], 3, [1, 16, 1, 2], [1, 1]),
    ([5, 96, 8, 8], 97, [5, 48, 8, 16], [1, 2]),
    ([1, 32, 1, 64], 128, [1, 80, 3, 64], [3, 1]),
    ([4, 16, 16, 9], 300, [4, 64, 32, 18], [2, 2]),
    ([2, 112, 7, 7], 61, [2, 144, 14, 14], [2, 2]),
    ([7, 48, 3, 19], 67, [7, 32, 3, 19], [1, 1]),
    ([1, 128, 5, 5], 7, [1, 160, 10, 10], [2, 2]),
]
# Streamed, of any channels, and strides that leave a line or a column.
UNEVEN = [
    ([1, 3, 7, 5], 2, [1, 2, 13, 10], [2, 2]),
    ([2, 17, 11, 13], 61, [2, 33, 21, 25], [2, 2]),
    ([1, 31, 4, 9], 19, [1, 65, 10, 9], [3, 1]),
    ([1, 1, 1, 2], 3, [1, 1, 1, 2], [1, 1]),
    ([2, 5, 23, 3], 33, [2, 300, 23, 6], [1, 2]),
]


def shortened(x, columns, beside, stride, kind="streamed", tile=None, **given):
    usual = {"streamed": (64, 64, 4, 2, 1), "boxes": (64, 64, 4, 2)}
    tile = [*(tile or usual[kind])]
    weights = {"other": [columns, beside[1], 1, 1], "source": beside, "kind": kind}
    how = {"template": "shortcut", "warps": tile[2], "stride": stride, **weights, **given}
    return case(x, [columns, x[1], 1, 1], tile, **how)


CASES += [
    shortened(*shape, kind, dtype=dtype)
    for kind, shapes in (("streamed", [*SHORTCUTS, *UNEVEN]), ("boxes", SHORTCUTS))
    for shape, dtype in itertools.product(shapes, ("float32", "float16"))
]
CASES += [
    shortened(*SHORTCUTS[2], kind, vars(tile).values())
    for kind, tiles in (("streamed", STREAMED_TILES), ("boxes", BOXES_TILES))
    for tile in tiles
]
CASES += [
    shortened(*SHORTCUTS[2], kind, planted=place)
    for kind in ("streamed", "boxes")
    for place in (700, 7 * 16)  # a pixel that is read, and one that is not
]
CASES += [
    shortened(*SHORTCUTS[n], kind, programs=99) for n, kind in ((0, "streamed"), (1, "boxes"))
]

# The same of sizes that a copy engine takes: rows of whole vectors.
PERSISTENT = [
    ([1, 64, 12, 11], 64),
    ([2, 40, 17, 5], 130),
    ([1, 8, 1, 2], 3),
    ([3, 96, 9, 13], 61),
    ([1, 256, 8, 9], 7),
    ([1, 104, 1, 67], 65),
    ([5, 16, 7, 7], 200),
    ([1, 32, 23, 3], 2),
    ([1, 4096, 1, 35], 32),
    ([1, 8216, 1, 67], 70),  # 8209 terms are no whole vectors
    ([1, 200, 5, 13], 128),
    ([2, 24, 1, 31], 33),
]


def persistently(x, columns, tile=(64, 64, 32, 4, 2), **given):
    kind = {"template": "persistent", "warps": tile[3], **given}
    return case(x, [columns, x[1], 1, 1], list(tile), **kind)


CASES += [
    persistently(*shape, dtype=dtype)
    for shape, dtype in itertools.product(PERSISTENT, ("float32", "float16"))
]
CASES += [persistently(*PERSISTENT[1], tile=[*vars(tile).values()]) for tile in persistent.TILES]
CASES += [persistently(*PERSISTENT[0], planted=700), persistently(*PERSISTENT[3], programs=99)]

# By plain loads, of any sizes: blocks of rows in groups, the last of which is short.
PIPELINED = [
    ([0, 40, 5, 3], 16),
    ([2, 64, 12, 11], 64),
    ([1, 32, 32, 32], 96),
    ([3, 96, 9, 13], 61),
    ([1, 256, 8, 9], 7),
    ([5, 31, 7, 7], 200),
    ([1, 1, 1, 1], 3),
    ([1, 1, 7, 5], 2),
    ([2, 17, 11, 13], 131),
    ([1, 3, 29, 31], 5),
    ([1, 8209, 1, 3], 5),
    ([1, 4096, 1, 35], 32),
    ([1, 520, 3, 67], 129),
    ([7, 40, 3, 19], 67),
    ([1, 97, 1, 32], 64),
    ([1, 257, 1, 257], 33),
    ([4, 8, 16, 9], 300),
    ([1, 97, 17, 19], 37),
]


def pipelining(x, columns, tile=(32, 32, 32, 4, 2), **given):
    kind = {"template": "pipelined", "warps": tile[3], **given}
    return case(x, [columns, x[1], 1, 1], list(tile), **kind)


CASES += [
    pipelining(*shape, dtype=dtype)
    for shape, dtype in itertools.product(PIPELINED, ("float32", "float16"))
]
CASES += [
    pipelining(*PIPELINED[5], tile=[*vars(tile).values()])
    for tile in itertools.chain(*software_pipelined.TILES.values())
]
CASES += [
    pipelining(*PIPELINED[1], planted=700),
    pipelining(*PIPELINED[-1], planted=97 * 17 * 19 - 1),  # in the last row, which is read again
    pipelining(*PIPELINED[8], moved=True),
]


def drawn(seed):
    """One of each template, of no net's sizes."""
    draw = random.Random(seed)
    window = [draw.choice((1, 2, 3, 5, 7)) for _ in "hw"]
    stride, padding = ([draw.randint(low, 3) for _ in "hw"] for low in (1, 0))
    sides = [draw.randint(reach, 31) for reach in window]
    image = [draw.randint(1, 3), draw.randint(1, 4), *sides]
    dtype, last = draw.choice(("float32", "float16")), draw.random() < 0.5
    around = {"stride": stride, "padding": padding, "dtype": dtype}
    made = draw.randint(1, 40)
    stem = image, [made, image[1], *window]
    yield case(*stem, SMALL, last=last, **around)
    dilation = [draw.randint(1, 2) for _ in "hw"]
    sides = [side + reach for side, reach in zip(sides, window, strict=True)]
    image = [image[0], draw.randint(1, 70), *sides]
    yield by_itself(image, window, dilation=dilation, **around)
    few = [min(side, 2 * reach + 5) for side, reach in zip(sides, window, strict=True)]
    one = [1, image[1], *few]
    yield by_itself(one, window, dilation=dilation, template="strips", tile=(2, 4, 32, 1), **around)
    places = [min(reach, 3) for reach in window]
    image = [image[0], draw.randint(16, 90), *sides]
    yield streaming(image, draw.randint(1, 300), dtype=dtype)
    whole = [image[0], -(-image[1] // 8) * 8, *image[2:]]
    yield persistently(whole, draw.randint(1, 200), dtype=dtype)
    beside = [image[0], draw.randint(1, 90), *sides]
    yield shortened(image, draw.randint(1, 200), beside, [1, 1], dtype=dtype)
    yield of_many(image, [draw.randint(1, 90), image[1], *places], dilation=dilation, **around)
    by = [draw.randint(1, 2) for _ in "hw"]
    even = [-(-side // step) * step for side, step in zip(sides, by, strict=True)]
    whole = [image[0], -(-image[1] // 16) * 16, *even]
    boxed = [draw.randint(1, 90), whole[1], *places]
    yield in_boxes(whole, boxed, dilation=dilation, **{**around, "stride": by})
    groups, each, made = draw.randint(2, 9), draw.randint(2, 32), draw.randint(1, 32)
    image = [image[0], groups * each, *sides]
    weight = [groups * made, each, *places]
    yield in_groups(image, weight, dilation=dilation, groups=groups, **around)
    image = [1, draw.randint(1, 600), *sides]
    yield pipelining(image, draw.randint(1, 300), dtype=dtype)
    yield from ends_of_blocks(draw, [few[0], draw.randint(1, 9)], dtype)
    tile = [*vars(draw.choice(conv_small_channel_pool.TILES)).values()]
    (images, channels, high, wide), weight = stem
    image = [images, channels, high, wide + draw.randint(0, 150)]  # of several blocks across
    yield case(image, weight, tile, last=last, **around) | POOLED


def ends_of_blocks(draw, sides, dtype):
    """Both shortcuts in steps, streamed ones of which leave what they do not read."""
    by = [draw.randint(1, 3) for _ in "hw"]
    left = [(side - 1) * step + draw.randint(1, step) for side, step in zip(sides, by, strict=True)]
    image, made = [draw.randint(1, 4), draw.randint(1, 130), *sides], draw.randint(1, 200)
    yield shortened(image, made, [image[0], draw.randint(1, 130), *left], by, dtype=dtype)
    whole = [side * step for side, step in zip(sides, by, strict=True)]
    image, beside = [image[0], 16 * draw.randint(1, 12)], [image[0], 16 * draw.randint(1, 12)]
    yield shortened([*image, *sides], made, [*beside, *whole], by, "boxes", dtype=dtype)


SEEDS = range(40)  # as many shapes of each template at least


def is_pooled_in_fp32(case):
    """Of which there is none on a GPU: two numbers of 16 bits are masked at once there."""
    return (case["template"], case["dtype"]) == ("stem_pool", "float32")


RANDOM = [each for seed in SEEDS for each in drawn(seed)]
# On a GPU each is compiled: all shapes in bf16, which the interpreter cannot multiply.
COMPILED = [
    each | {"dtype": "bfloat16"}
    for each in (*CASES, *RANDOM[:9])
    if each["dtype"] == "float32" and "planted" not in each
]
COMPILED += [
    each | ({"dtype": "bfloat16"} if is_pooled_in_fp32(each) else {})
    for each in CASES
    if "planted" in each or "moved" in each
]
COMPILED += [c for c in CASES[:4] if c["dtype"] != "bfloat16"] + CASES[63:65]
IN_FP16 = [each for each in CASES if each["dtype"] == "float16" and each not in COMPILED]
HALVES = ("bfloat16", "float16")  # of many channels fp32 is left to libraries
DTYPES = dict.fromkeys(("stem", "depthwise", "strips"), (*HALVES, "float32"))


def in_each_dtype(cases):
    """Each in every dtype that its template is offered in."""
    for each in cases:
        for dtype in DTYPES.get(each["template"], HALVES):
            yield each | {"dtype": dtype}


# Sums in fp32, then one rounding; of bf16 the interpreter cuts off what hardware rounds.
CLOSE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 1.6e-2}
