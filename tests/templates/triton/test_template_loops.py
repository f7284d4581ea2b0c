"""No product of ours is in the form of loop that Triton 3.6 compiles wrongly with eight warps.

That is one loop over places of a window and channels at once, as Inductor's convolutions have it
(triton#1254, pytorch#173068): it sums up, and divides its own counter to see where it is.
"""

import ast
import itertools
from functools import partial

import pytest
import torch

from ipex_inductor.lowerings.problem.spaces import OURS
from ipex_inductor.lowerings.select import library
from ipex_inductor.templates.triton import (
    batch_norm_relu,
    conv_depthwise,
    conv_fprop,
    conv_grouped,
    conv_small_channel,
    conv_small_channel_pool,
    conv_small_channel_weight,
    conv_strips,
    conv_tma,
    glu,
    int8_boxes,
    int8_conv,
    int8_gemm,
    int8_streamed,
    persistent,
    skinny,
    software_pipelined,
    weight_only,
    weight_stationary,
)
from support.case_sampling import covering
from support.rendered_templates import ready, shortcut, source

pytestmark = pytest.mark.unit

MOST_WARPS = 4  # with which nobody saw it go wrong
MANY_TILES = 50  # which take seconds to be rendered and parsed
# It reads by TMA, and not from addresses that are computed from the counter: none of 644 kernels of
# ten convolutions was wrong (docs/internals/contracts.md). As all choices, each is verified against
# fp64 before it may be timed.
BY_ENGINE = "ipex.triton.boxes"
BOTH_BY_ENGINE = (BY_ENGINE, "ipex.triton.int8_boxes")


def names(node):
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def calls(node, name):
    found = (each for each in ast.walk(node) if isinstance(each, ast.Call))
    return [call for call in found if ast.unparse(call.func) == name]


def sums_up(loop):
    """Whether a product in it is added to what one of its turns before has made."""
    begun = set()
    for statement in loop.body:
        if added_to(statement) - begun:
            return True
        stored = (each for each in ast.walk(statement) if isinstance(each, ast.Name))
        begun |= {each.id for each in stored if isinstance(each.ctx, ast.Store)}
    return False


def added_to(statement):
    """Names that products in it are added to."""
    added = set()
    for each in ast.walk(statement):
        if isinstance(each, ast.AugAssign) and calls(each.value, "tl.dot"):
            added |= names(each.target)
        if isinstance(each, ast.Assign) and calls(each.value, "tl.dot"):
            added |= names(each.value).intersection(*map(names, each.targets))
    return added


def divides(loop):
    """Whether its counter, or what is computed of it, is divided."""
    known, inside = names(loop.target), [each for line in loop.body for each in ast.walk(line)]
    for _ in loop.body:  # until all is known that hangs on it
        for each in inside:
            if isinstance(each, ast.Assign) and names(each.value) & known:
                known.update(*map(names, each.targets))
    parts = (each for each in inside if isinstance(each, ast.BinOp))
    return any(isinstance(e.op, ast.FloorDiv | ast.Mod) and names(e.left) & known for e in parts)


def flattened(text):
    """The loops of that form in a module."""
    loops = (each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.For))
    return [loop for loop in loops if sums_up(loop) and divides(loop)]


# Image, weight, stride, padding, groups: of windows, of one pixel, of groups narrow and wide.
FEW = [([2, 3, 16, 16], [32, 3, 7, 7], 2, 3, 1), ([2, 3, 16, 16], [32, 3, 4, 4], 4, 0, 1)]
ALONE = [([2, 64, 8, 8], [64, 1, 3, 3], 1, 1, 64)]
MANY = [([2, 64, 8, 8], [64, 64, 3, 3], 2, 1, 1), ([2, 64, 8, 8], [64, 64, 1, 1], 1, 0, 1)]
GROUPS = [([2, 64, 8, 8], [64, 8, 3, 3], 2, 1, 8), ([2, 256, 8, 8], [256, 128, 3, 3], 1, 1, 2)]


def convolution(kind, problems, tile):
    for x, weight, stride, padding, groups in problems:
        if kind != "grouped" or tile.blocks(weight, groups) is not None:
            around = tile, [stride] * 2, [padding] * 2, torch.float16
            yield ready(kind, x, weight, *around, groups=groups)[:2]


def weight_gradient(tile):
    for x, weight, stride, padding, _ in FEW:
        around = weight[2:], [stride] * 2, [padding] * 2, True, 7, tile
        constants = conv_small_channel_weight.constants(x[0], x[1:], weight[0], *around)
        yield conv_small_channel_weight.SOURCE, constants


def block_end(kind, tile):
    for stride in (1, 2):
        sizes = [2, 64, 8, 8], [2, 64, 8 * stride, 8 * stride]
        x, beside = (torch.empty(size, device="meta") for size in sizes)
        case = {"kind": kind, "tile": [*vars(tile).values()], "stride": [stride] * 2}
        yield shortcut(x, beside, 64, case)[:2]


def product(template, tile):
    programs = () if template is software_pipelined else (132,)
    unary = ("silu",) if template is glu else ()
    for sizes in ((4096, 128, 768), (4099, 129, 776)):
        yield template.SOURCE, template.constants(*sizes, True, *unary, tile, *programs)


def preactivation(tile):
    """Of parts that fill a step, or do not, and of none."""
    for widths in ((256, 32, 24), (200, 24, 5), (64, 0, 0)):
        yield batch_norm_relu.SOURCE, batch_norm_relu.constants(4099, 129, *widths, True, tile)


def integers(template, tile):
    """With an addend and without one."""
    for added in (False, True):
        if template in (int8_gemm, int8_streamed):
            constants = template.constants(4099, 129, 776, tile, 132)
            yield template.SOURCE, {**constants, "ADDED": added}
            continue
        programs = (132,) if template is int8_boxes else ()
        for channels, window, stride in ((64, 3, 2), (64, 1, 1), (4, 7, 1)):
            lines = template is int8_conv and channels * window > tile.BLOCK_K
            if channels < 16 and (lines or template is int8_boxes):
                continue
            geometry = [window] * 2, [stride] * 2, [window // 2] * 2, [1, 1]
            constants = template.constants(2, [channels, 8, 8], 64, *geometry, tile, *programs)
            yield template.SOURCE, {**constants, "ADDED": added}


def of_few_rows(tile):
    for one_row in (True, False):
        yield skinny.source(one_row, tile), {}


def on_quantized_weights(tile):
    """In rows and in groups of all sizes."""
    for name, group in itertools.product(("int4", "int8"), (32, 64, 128, 256, 4096)):
        if weight_only.fits(tile, tile.BLOCK_M, 4096, group):
            decoding = weight_only.Decoding(name, "bfloat16", "float16", True)
            sizes = tile.BLOCK_M, 4096, 4096, group
            yield weight_only.source(decoding), weight_only.constants(*sizes, decoding, tile)


# By the name of a choice what makes a tile of its parameters, and the texts and constants of that.
TEMPLATES = {
    "stem": (conv_small_channel.Tile, partial(convolution, "stem", FEW)),
    "stem_pool": (conv_small_channel_pool.Tile, partial(convolution, "stem_pool", FEW)),
    "stem_weight": (conv_small_channel_weight.Tile, weight_gradient),
    "depthwise": (conv_depthwise.Tile, partial(convolution, "depthwise", ALONE)),
    "strips": (conv_strips.Tile, partial(convolution, "strips", ALONE)),
    "fprop": (conv_fprop.Tile, partial(convolution, "fprop", MANY)),
    "boxes": (conv_tma.Tile, partial(convolution, "boxes", MANY)),
    "grouped": (conv_grouped.Tile, partial(convolution, "grouped", GROUPS)),
    "shortcut_streamed": (weight_stationary.Tile, partial(block_end, "streamed")),
    "shortcut_boxes": (conv_tma.Tile, partial(block_end, "boxes")),
    "preactivated": (batch_norm_relu.Tile, preactivation),
    "streamed": (weight_stationary.Tile, partial(product, weight_stationary)),
    "persistent": (persistent.Tile, partial(product, persistent)),
    "pipelined": (software_pipelined.Tile, partial(product, software_pipelined)),
    "gated": (glu.Tile, partial(product, glu)),
    "int8_gemm": (persistent.Tile, partial(integers, int8_gemm)),
    "int8_streamed": (weight_stationary.Tile, partial(integers, int8_streamed)),
    "int8_conv": (conv_fprop.Tile, partial(integers, int8_conv)),
    "int8_boxes": (conv_tma.Tile, partial(integers, int8_boxes)),
    "weight_only": (weight_only.Tile, on_quantized_weights),
}
TEMPLATES = {f"ipex.triton.{name}": found for name, found in TEMPLATES.items()}
TEMPLATES[skinny.NAME] = skinny.Tile, of_few_rows


def tiles(name):
    """All that a record may name, Intel's GPUs' too: those of the library's own calls."""
    every = (call for calls in library.CALLS.values() for call in calls if call.name == name)
    return dict.fromkeys(TEMPLATES[name][0](**call.parameters) for call in every)


def loops(name, tile):
    """Those of that form, in all that is rendered of it."""
    rendered = [
        source(text, {**constants, "ALLOW_TF32": False}, 64)
        for text, constants in TEMPLATES[name][1](tile)
    ]
    assert rendered
    assert any("tl.dot(" in text for text in rendered) or "depthwise" in name or "strips" in name
    return [loop for text in rendered for loop in flattened(text)]


def test_each_that_multiplies_is_looked_at():
    assert {*TEMPLATES} == {*OURS, skinny.NAME}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_no_tile_of_many_warps_has_such_a_loop(name, which):
    """Some are few tiles with each value of each parameter; one template has 120 in ten forms."""
    every = [*tiles(name)]
    some = covering([fields(tile) for tile in every])
    chosen = every if which == "all" or len(every) < MANY_TILES else [every[n] for n in some]
    found = {tile: loops(name, tile) for tile in chosen}
    assert found
    wrong = [tile for tile, each in found.items() if each and warps_of(tile) > MOST_WARPS]
    assert not wrong or name in BOTH_BY_ENGINE


def fields(tile):
    """Return the values of a tile's parameters."""
    return tile if isinstance(tile, tuple) else tuple(vars(tile).values())


def warps_of(tile):
    return tile.warps if isinstance(tile, skinny.Tile) else tile.num_warps


@pytest.mark.parametrize("name", BOTH_BY_ENGINE)
def test_by_boxes_there_is_one_and_nothing_is_loaded_from_addresses(name):
    (tile, *_) = (tile for tile in tiles(name) if tile.num_warps > MOST_WARPS)
    found = loops(name, tile)
    assert found
    for loop in found:
        assert not calls(loop, "tl.load")
        assert calls(loop, "image.load")
        assert calls(loop, "weights.load")


def test_the_gradient_of_a_stem_has_one_over_pixels_with_four_warps():
    """So the form is seen where addresses are computed, too."""
    name = conv_small_channel_weight.NAME
    assert all(loops(name, tile) for tile in tiles(name))
    assert {tile.num_warps for tile in tiles(name)} == {MOST_WARPS}


INDUCTORS = """
for step in range(PLACES * STEPS):
    k = step % STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
    place = step // STEPS
    given = tl.load(X + place // WINDOW_W * LINE + k)
    acc += tl.dot(given, tl.load(W + k))
"""
OF_CHANNELS = """
for block in tl.range(0, BLOCKS, 1):
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    top = block // BLOCKS_N
    for k in range(0, CHANNELS, BLOCK_K):
        acc = tl.dot(tl.load(X + top + k), tl.load(W + k), acc)
"""


def test_what_is_of_that_form():
    assert len(flattened(INDUCTORS)) == 1
    other = INDUCTORS.replace("acc += tl.dot(given, tl.load(W + k)", "acc = tl.dot(given, w, acc")
    assert other != INDUCTORS
    assert len(flattened(other)) == 1
    assert not flattened(OF_CHANNELS)
