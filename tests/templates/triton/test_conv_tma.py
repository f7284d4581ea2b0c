"""Convolutions by boxes of a copy engine: what they are offered for, their boxes, what is compiled.

Their values by the interpreter are in `test_conv_templates.py`.
"""

import re

import pytest
import torch

from ipex_inductor.autotune.space import why_unknown
from ipex_inductor.lowerings.problem import shapes
from ipex_inductor.lowerings.select import library
from ipex_inductor.templates.triton import conv_tma
from support import h200
from support.case_sampling import few_with_each
from support.rendered_templates import compiled, ready, within_limits

pytestmark = pytest.mark.unit

NAME = "ipex.triton.boxes"
RESNET = "128x128x28x28:L 128x128x3x3:L 128"


def problem(sizes=RESNET, stride=1, padding=1, groups=1, dtype="bfloat16", arch=h200.NAME):
    added = sizes.count(":L") == 3
    other = "" if added else " other=None"
    line = (
        f"ipex.conv.default {dtype} {sizes}{other} stride={stride},{stride} "
        f"padding={padding},{padding} dilation=1,1 transposed=False output_padding=0,0 "
        f"groups={groups} binary='{'add' if added else 'none'}' unary='relu' scalars=() packed=''"
    )
    (found,) = shapes.problems([line], arch, {})
    return found


def offered(found):
    return [call for call in library.calls(found) if call.name == NAME]


NOT = {
    "an A100": {"arch": "sm_80:NVIDIA-A100-SXM4-80GB"},
    "fp32": {"dtype": "float32"},
    "contiguous": {"sizes": RESNET.replace(":L", "")},
    "groups": {"sizes": "128x128x28x28:L 128x64x3x3:L 128", "groups": 2},
    "channels of no whole step": {"sizes": "128x136x28x28:L 128x136x3x3:L 128"},
    "a large window": {"sizes": "128x128x28x28:L 128x128x9x9:L 128"},
    "a stride that leaves a line": {"sizes": "128x128x29x29:L 128x128x3x3:L 128", "stride": 2},
    "few blocks": {"sizes": "1x128x28x28:L 128x128x3x3:L 128"},
    "a streamed product": {"sizes": "128x128x28x28:L 128x128x1x1:L 128", "padding": 0},
}


@pytest.mark.parametrize("why", NOT)
def test_not_offered_for(why):
    assert not offered(problem(**NOT[why]))


OFFERED = {
    "3x3": ({}, 4),  # all but that of 256 channels
    "3x3 by 2": ({"stride": 2}, 4),
    "fp16": ({"dtype": "float16"}, 4),
    "64 channels": ({"sizes": "128x64x56x56:L 64x64x3x3:L 64"}, 1),
    "to 32 channels": ({"sizes": "64x128x28x28:L 32x128x3x3:L 32"}, 1),
    "added": ({"sizes": "128x512x7x7:L 512x512x3x3:L 512 128x512x7x7:L"}, 5),
    "a deep 1x1": ({"sizes": "128x1024x14x14:L 2048x1024x1x1:L 2048", "padding": 0}, 5),
}


@pytest.mark.parametrize("name", OFFERED)
def test_offered_for(name):
    given, count = OFFERED[name]
    calls = offered(problem(**given))
    assert len(calls) == count
    assert all(why_unknown(call.choice) is None for call in calls)


@pytest.mark.parametrize(
    ("pixels", "sizes", "sides"),
    [
        (128, (128, 56, 56), (2, 8, 8)),
        (256, (128, 28, 28), (16, 4, 4)),
        (128, (128, 14, 14), (32, 2, 2)),
        (128, (128, 7, 7), (128, 1, 1)),
        (256, (64, 224, 224), (1, 16, 16)),
        (128, (1, 1, 3), (1, 8, 16)),  # more than there is
    ],
)
def test_a_box_leaves_little_empty(pixels, sizes, sides):
    assert conv_tma.box(pixels, *sizes) == sides


@pytest.mark.parametrize(
    "sizes", [pytest.param(RESNET, marks=pytest.mark.slow), f"{RESNET} 128x128x28x28:L"]
)
def test_one_kernel_with_bias_and_epilogue(sizes, tmp_path, monkeypatch):
    found = problem(sizes)
    code = h200.code_of_call(found, offered(found)[0], tmp_path, monkeypatch)
    last = re.findall(r"(triton_\w+?)_fused(\w*)\.run\(", code)[-1]
    assert last[0] == "triton_tem"
    assert "relu" in last[1]


# Image, weight, stride.
SHAPES = [
    ([128, 256, 28, 28], [256, 256, 3, 3], 1),
    ([128, 128, 56, 56], [128, 128, 3, 3], 2),
]
GPUS = ("h200", "a100-80gb", "b200", "mi300x")
EVERY = [
    (shape, tile, dtype, gpu)
    for gpu in GPUS
    for dtype in ("bfloat16", "float16")
    for shape in SHAPES
    for tile in conv_tma.TILES
    if conv_tma.fits(tile, shape[1][0])
]


@pytest.mark.parametrize(
    ("shape", "tile", "dtype", "gpu"),
    few_with_each(EVERY, lambda *_: ["the first"]),  # for Hopper, which is asked
    ids=str,
)
def test_compiled_where_there_is_no_gpu(shape, tile, dtype, gpu):
    """On Hopper both factors are multiplied where the copy engine put them."""
    x, weight, stride = shape
    given = ready("boxes", x, weight, tile, [stride] * 2, [1, 1], getattr(torch, dtype))
    made = compiled(tile, dtype, gpu, given)
    if gpu == "h200":
        within_limits(made, gpu)
        text = made.asm["ttgir"]
        assert made.asm["ptx"].count("wgmma.mma_async")
        assert text.count("async_tma_copy_global_to_local") == 2 * tile.num_stages
        assert "memdesc_reshape" in text, "a box becomes rows where it lies"
        assert "ttg.local_load" not in text, "no factor goes through registers"
