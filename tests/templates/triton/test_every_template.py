"""Every template in every dtype for every GPU that it is offered on: compiled, within limits.

By a small tile for a small window, which takes a second: each time in each dtype and for each GPU,
and slowly in all pairs of them. Larger ones, and what else is seen in their code, are in the tests
of each template.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton

from ipex_inductor.lowerings.common.conv_templates import NO_TF32
from ipex_inductor.lowerings.problem import shapes
from ipex_inductor.lowerings.problem.spaces import INT8, OURS, WEIGHT_ONLY
from ipex_inductor.lowerings.select import library
from ipex_inductor.target.device import find_target
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
    moments,
    persistent,
    pool,
    residual,
    skinny,
    software_pipelined,
    transpose,
    weight_stationary,
)
from support.case_sampling import few_with_each
from support.cases import pool_cases
from support.rendered_templates import (
    binary,
    compiled,
    modules,
    ready,
    shortcut_compiled,
    signature,
    source,
    within_limits,
)

pytestmark = pytest.mark.unit

GPUS = ("a100-80gb", "h200", "b200", "mi300x")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Small:
    """A problem, a tile that is offered for it, and the kernel of both.

    `left`: why it is not offered, by dtype or GPU. `spills`: bytes that are allowed.
    """

    module: str
    name: str  # of the choice; "" of what a rule of training has without one
    line: str  # of the problem, but for its dtype
    tile: Callable[[str], Any]  # by architecture
    make: Callable[[Any, str, str], Any]  # by tile, dtype and GPU
    left: Mapping[str, str] = field(default_factory=dict)
    spills: int = 0


def text_of(op, sizes, *, stride, padding=None, rest=""):
    """A line of a record without its dtype: {} stands for that."""
    around = f"stride={stride},{stride}"
    around += "" if padding is None else f" padding={padding},{padding}"
    return f"ipex.{op}.default {{}} {sizes} {around}{rest}"


def by(sizes):
    return "x".join(map(str, sizes))


def conv(kind, x, weight, tile, stride=1, padding=0, groups=1, left=()):
    """A convolution with bias, addend and relu."""

    def make(tile, dtype, gpu):
        around = [stride] * 2, [padding] * 2, getattr(torch, dtype)
        return compiled(tile, dtype, gpu, ready(kind, x, weight, tile, *around, groups=groups))

    rest = f" dilation=1,1 transposed=False output_padding=0,0 groups={groups} "
    rest += "binary='none' unary='relu' scalars=() packed=''"
    sizes = f"{by(x)}:L {by(weight)}:L {weight[0]} other=None"
    line = text_of("conv", sizes, stride=stride, padding=padding, rest=rest)
    module = {"stem": "conv_small_channel", "boxes": "conv_tma"}.get(kind, f"conv_{kind}")
    return Small(module, f"ipex.triton.{kind}", line, lambda _: tile, make, dict(left))


def stem_pool(x, weight, tile, left):
    def make(tile, dtype, gpu):
        given = ready("stem_pool", x, weight, tile, [2, 2], [1, 1], getattr(torch, dtype))
        return compiled(tile, dtype, gpu, given, epilogue=False)

    line = text_of("conv_pool", f"{by(x)}:L {by(weight)}:L {weight[0]}", stride=2, padding=1)
    name = "ipex.triton.stem_pool"
    return Small("conv_small_channel_pool", name, line, lambda _: tile, make, left)


def stem_weight(x, weight, tile, left):
    def make(tile, dtype, gpu):
        around = [2, 2], [1, 1], True, 48, tile
        constants = conv_small_channel_weight.constants(x[0], x[1:], weight[0], weight[2:], *around)
        given = {**constants, "ALLOW_TF32": False}
        text = source(conv_small_channel_weight.SOURCE, given, constants["TERMS"], epilogue=False)
        return binary(text, signature(("GRAD", "X"), dtype, "float32"), tile, gpu)

    grad = [x[0], weight[0], *(side // 2 for side in x[2:])]
    sizes = f"{by(grad)}:L {by(x)}:L {by(weight)}:L"
    rest = " dilation=1,1 groups=1"
    line = text_of("conv_weight_grad", sizes, stride=2, padding=1, rest=rest)
    name = conv_small_channel_weight.NAME
    return Small("conv_small_channel_weight", name, line, lambda _: tile, make, left)


def ending(kind, x, columns, tile, left):
    """A block's last convolution with its shortcut, which reads as many channels."""

    def make(tile, dtype, gpu):
        return shortcut_compiled(kind, (x, columns, x), tile, dtype, gpu)

    weight = by([columns, x[1], 1, 1])
    line = text_of(
        "conv_shortcut", f"{by(x)}:L {weight}:L {columns} {by(x)}:L {weight}:L", stride=1
    )
    return Small("residual", f"ipex.triton.shortcut_{kind}", line, lambda _: tile, make, left)


def linear(rows, columns, terms):
    return (
        f"ipex.linear.default {{}} {rows}x{terms} {columns}x{terms} {columns} other=None "
        "binary='none' unary='gelu' scalars=() packed=False"
    )


def product(template, sizes, tile, left, spills=0):
    """Of rows, with a bias, an addend and a relu."""

    def make(tile, dtype, gpu):
        programs = () if template is software_pipelined else (find_target(gpu).multiprocessors,)
        constants = template.constants(*sizes, True, tile, *programs) | {"ALLOW_TF32": False}
        text = source(template.SOURCE, constants, sizes[1])
        return binary(text, signature(("X", "W"), dtype), tile, gpu)

    module = template.__name__.rpartition(".")[2]
    return Small(module, template.NAME, linear(*sizes), tile, make, left, spills)


def of_few_rows(rows, tile, left):
    def make(tile, dtype, gpu):
        types = dict.fromkeys(("x", "weight"), signature((), dtype)["OUT"]) | {"y": "*fp32"}
        types |= {"work": "*u8"} if tile.joined else {}
        constants = {"M": rows, "N": 4096, "K": 4096}
        constants |= {"x_stride": 4096, "x_step": 1, "weight_stride": 4096}
        constants |= tile.parameters(rows, 4096, getattr(torch, dtype).itemsize)
        return binary(skinny.source(rows == 1, tile), types, tile, gpu, "product", **constants)

    line = linear(rows, 4096, 4096)
    return Small("skinny", skinny.NAME, line, lambda _: tile, make, left)


def gated_pair(sizes, tile, left):
    def make(tile, dtype, gpu):
        constants = glu.constants(*sizes, False, "silu", tile, 132) | {"ALLOW_TF32": False}
        text = source(glu.SOURCE, constants, sizes[1], epilogue=False)
        return binary(text, signature(("X", "G", "W"), dtype), tile, gpu)

    rows, columns, terms = sizes
    line = f"ipex.gated_linear.default {{}} {rows}x{terms} {columns}x{terms} {columns}x{terms} "
    line += "gate_bias=None bias=None unary='silu'"
    return Small("glu", glu.NAME, line, lambda _: tile, make, left)


def preactivation(sizes, tile, left):
    """A convolution of one pixel behind a norm and a relu, of several images side by side."""

    def make(tile, dtype, gpu):
        images, pixels, columns, *widths = sizes
        constants = batch_norm_relu.constants(images * pixels, columns, *widths, True, tile)
        text = source(batch_norm_relu.SOURCE, constants | {"ALLOW_TF32": False}, columns)
        types = signature(("X", "A", "W", *(f"P{i}" for i in range(widths[2]))), dtype)
        return binary(text, types | {"A": "*fp32"}, tile, gpu)

    images, pixels, columns, first, each, parts = sizes
    terms = first + each * parts
    operands = [f"{images}x{first}x{pixels}x1:L", f"{columns}x{terms}x1x1:L", columns]
    operands += [*[terms] * 4, *[f"{images}x{each}x{pixels}x1:L"] * parts]
    line = f"ipex.conv_preactivated.default {{}} {' '.join(map(str, operands))} "
    line += f"epsilon=1e-05 more={parts} unary='relu' scalars=()"
    return Small("batch_norm_relu", batch_norm_relu.NAME, line, lambda _: tile, make, left)


def pooling(text, operands, tile):
    """Of two by two pixels; `operands` are the image's or the gradient's, and of channels."""
    case = {"window": [2, 2], "stride": [2, 2], "padding": [0, 0], "tile": [*vars(tile).values()]}

    def make(tile, dtype, gpu):
        _, rendered = pool_cases.rendered(case, [128, 64, 112, 112], [56, 56], text)
        kind, *channels = operands
        types = signature((kind,), dtype)
        types = {kind: types[kind], **dict.fromkeys(channels, "*fp32"), "OFFSETS": "*i8", **types}
        return binary(rendered, types | {"BIAS": "*fp32"}, tile, gpu)

    return Small("pool", "", "", lambda _: tile, make)


def column_moments(rows, columns, tile):
    def make(tile, dtype, gpu):
        parts = moments.parts_of(rows, columns, tile, find_target(gpu).multiprocessors)
        constants = moments.constants(rows, columns, parts, tile)
        text = source(moments.SOURCE, constants, 2 * parts + 1, epilogue=False)
        return binary(text, signature(("X",), dtype, "float32"), tile, gpu)

    return Small("moments", "", "", lambda _: tile, make)


def transposition(rows, columns, tile):
    def make(tile, dtype, gpu):
        constants = transpose.constants(rows, columns, tile)
        text = source(transpose.SOURCE, constants, rows, epilogue=False)
        return binary(text, signature(("X",), dtype), tile, gpu)

    return Small("transpose", "", "", lambda _: tile, make)


# What is not offered, by whom it is not. Intel's GPUs: `benchmarks/studies/triton_xe.py`.
MI300X = str(find_target("mi300x"))
HALVES = {"float32": NO_TF32}
NO_OTHERS = {"mi300x": f"the template is not for {MI300X}"}
ENGINE = "it is for Hopper's copy engine"
ON_HOPPER = dict.fromkeys(("a100-80gb", "b200", "mi300x"), ENGINE) | HALVES
ON_NVIDIA = {"mi300x": f"our template is not for {MI300X}"}
PAIRS = {"float32": "two of float32 do not fill a register", **NO_OTHERS}
IMAGE = [128, 3, 224, 224]

SMALL = {
    "stem": conv("stem", IMAGE, [16, 3, 3, 3], conv_small_channel.TILES[0], 2, 1),
    "stem and pool": stem_pool(IMAGE, [32, 3, 3, 3], conv_small_channel_pool.TILES[3], PAIRS),
    "stem's weight": stem_weight(IMAGE, [16, 3, 3, 3], conv_small_channel_weight.TILES[0], HALVES),
    "depthwise": conv(
        *("depthwise", [64, 96, 56, 56], [96, 1, 3, 1], conv_depthwise.TILES[2]), groups=96
    ),
    "strips": conv("strips", [64, 96, 56, 56], [96, 1, 3, 1], conv_strips.TILES[1], groups=96),
    "fprop": conv(
        *("fprop", [128, 64, 56, 56], [32, 64, 1, 1], conv_fprop.TILES[5], 2), left=HALVES
    ),
    "boxes": conv(
        *("boxes", [128, 128, 56, 56], [64, 128, 3, 3], conv_tma.TILES[0], 1, 1), left=ON_HOPPER
    ),
    "grouped": conv(  # two groups a block, so that a second look is compiled too
        *("grouped", [64, 96, 14, 14], [96, 8, 1, 1], conv_grouped.TILES[0], 2),
        groups=12,
        left=HALVES,
    ),
    "shortcut, streamed": ending(
        *("streamed", [128, 16, 56, 56], 128, residual.STREAMED_TILES[0]), HALVES
    ),
    "shortcut, by boxes": ending(
        *("boxes", [128, 64, 56, 56], 128, residual.BOXES_TILES[0]), ON_HOPPER
    ),
    "streamed": product(
        weight_stationary, (401408, 64, 64), lambda _: weight_stationary.TILES[4], HALVES
    ),
    "persistent": product(  # 72 bytes with an addend, and none by Triton 3.6
        *(persistent, (4096, 3072, 768), lambda _: persistent.TILES[1], ON_HOPPER), spills=80
    ),
    "pipelined": product(  # 24 with an addend number by number for sm_100, by Triton 3.7 and 3.8
        *(
            software_pipelined,
            (4099, 3001, 776),
            lambda arch: software_pipelined.tiles(arch)[-1],
            HALVES,
        ),
        spills=24,
    ),
    "gated": gated_pair((4096, 3072, 768), glu.TILES[1], ON_HOPPER),
    "preactivated": preactivation(
        (4, 784, 128, 128, 32, 5), batch_norm_relu.TILES[4], HALVES | NO_OTHERS
    ),
    "one row": of_few_rows(1, skinny.ONE_ROW[0], ON_NVIDIA),
    "few rows": of_few_rows(16, skinny.ROWS[0], ON_NVIDIA),
    "few rows, joined": of_few_rows(16, skinny.JOINED[0], ON_NVIDIA),
    "pool": pooling(pool.FORWARD, ("X", "MEAN", "RSTD", "WEIGHT"), pool.TILES[2]),
    "pool's backward": pooling(pool.BACKWARD, ("GRAD",), pool.TILES[2]),
    "moments": column_moments(401408, 256, moments.TILE),
    "transpose": transposition(8192, 4096, transpose.Tile(64, 64, 8, 1)),  # of bytes, 128 x 128
}


def test_each_template_is_here():
    """Those of 8-bit integers are in `test_int8_templates.py`, FP8's in `test_fp8_scaling.py`.

    Quantized weights are in `test_weight_only_template.py`, attention in
    `test_decode_attention_template.py`.
    """
    others = {name.rpartition(".")[2] for name in (*INT8, WEIGHT_ONLY)}
    others |= {"fp8_scaling", "decode_attention"}
    assert {small.module for small in SMALL.values()} | others == modules()
    names = {small.name for small in SMALL.values()}
    names |= {f"ipex.triton.{name}" for name in (*INT8, WEIGHT_ONLY)}
    assert names == {*OURS, skinny.NAME, ""}


def reasons(name, dtype, gpu):
    """Why it is not offered, as the table above has it."""
    return [SMALL[name].left[each] for each in (dtype, gpu) if each in SMALL[name].left]


def offered(name):
    """Return the dtypes and GPUs that a template is offered for, as parameters.

    Slow are all but few of them that have each of its dtypes and each of its GPUs.
    """
    cases = [(name, *each) for each in itertools.product(DTYPES, GPUS) if not reasons(name, *each)]
    return few_with_each(cases, lambda name, *others: others)


@pytest.mark.parametrize("name", [name for name, small in SMALL.items() if small.name])
def test_it_is_offered_where_it_is_compiled(name):
    """And nowhere else, for the reason that is said."""
    small = SMALL[name]
    for dtype, gpu in itertools.product(DTYPES, GPUS):
        (problem,) = shapes.problems([small.line.format(dtype)], str(find_target(gpu)), {})
        tile = small.tile(find_target(gpu).arch)
        fields = getattr(tile, "fields", lambda tile=tile: {**vars(tile)})()
        calls = (c for c in library.CALLS[problem.op] if c.name == small.name)
        (call,) = (c for c in calls if c.parameters == fields)
        assert call.why_not(problem) in (reasons(name, dtype, gpu) or [None]), (dtype, gpu)


VERSION = (*map(int, triton.__version__.split(".")[:2]),)
# Tritons before do not compile it: a block of several groups looks whether a sum is NaN, which is
# a reduction of tensor memory ("parent layout must have at least rank >= 2").
NOT_BEFORE = {("grouped", "b200"): (3, 8)}


@pytest.mark.parametrize(
    ("name", "dtype", "gpu"),
    [*itertools.chain.from_iterable(map(offered, SMALL))],
)
def test_compiled_within_limits(name, dtype, gpu):
    """Registers, spills and shared memory as the binary has them."""
    small = SMALL[name]
    if NOT_BEFORE.get((name, gpu), VERSION) > VERSION:
        with pytest.raises(RuntimeError, match="PassManager"):
            small.make(small.tile(find_target(gpu).arch), dtype, gpu)
        return
    made = small.make(small.tile(find_target(gpu).arch), dtype, gpu)
    within_limits(made, gpu, small.spills)
