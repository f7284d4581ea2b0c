"""Ops that are restated by others, on a GPU: the rule fired, and the result is as near as eager's.

The bound is a multiple of what eager is off from fp64, as both round in other places.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

pytestmark = pytest.mark.gpu

BF16, LAST, LAST_3D = torch.bfloat16, torch.channels_last, torch.channels_last_3d
FARTHER = 1.5


class Tokens(nn.Module):
    """Patches of images as tokens."""

    def __init__(self, channels, side):
        super().__init__()
        self.embed = nn.Conv2d(channels, 64, side, side)

    def forward(self, x):
        return self.embed(x).flatten(2).transpose(1, 2)


class Head(nn.Module):
    """Levels of several sizes, as the decoder of SegFormer has them."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Sequential(nn.Conv2d(96, 32, 1), nn.BatchNorm2d(32), nn.ReLU())

    def forward(self, *levels):
        size = levels[0].shape[2:]
        return self.mix(
            torch.cat([F.interpolate(x, size=size, mode="bilinear") for x in levels], 1)
        )


class Heads(nn.Module):
    """Attention over copies of heads, as Whisper has it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(128, 384)

    def forward(self, x):
        parts = self.layers(x).unflatten(-1, (3, 2, 64)).unbind(2)
        q, k, v = (part.transpose(1, 2).contiguous() for part in parts)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


def convolve_videos():
    return nn.Sequential(
        nn.Conv3d(3, 32, (3, 7, 7), (1, 2, 2), (1, 3, 3)),
        nn.ReLU(),
        nn.Conv3d(32, 64, 3, padding=1),
        nn.ReLU(),
    )


def images(*shape):
    return torch.randn(*shape, device="cuda")


CASES = {
    "patches": ("patch-conv", lambda: Tokens(3, 16), lambda: [images(4, 3, 64, 80)]),
    "channels-last patches": (
        "patch-conv",
        lambda: Tokens(16, 2),
        lambda: [images(4, 16, 32, 33).to(memory_format=LAST)],
    ),
    "patches of videos": (
        "patch-conv",
        lambda: nn.Conv3d(3, 64, (2, 16, 16), (2, 16, 16)),
        lambda: [images(2, 3, 8, 64, 64)],
    ),
    "videos": ("video-stem", convolve_videos, lambda: [images(2, 3, 8, 56, 56)]),
    "channels-last videos": (
        "video-stem",
        convolve_videos,
        lambda: [images(2, 3, 8, 56, 56).to(memory_format=LAST_3D)],
    ),
    "bags": (
        "embedding-bag",
        lambda: nn.EmbeddingBag(1000, 64, mode="mean"),
        lambda: [torch.randint(1000, (256, 9), device="cuda")],
    ),
    "levels": (
        "conv|upsample",
        Head,
        lambda: [images(2, 32, 32 >> level, 32 >> level) for level in range(3)],
    ),
    "copied heads": ("attention-copies", Heads, lambda: [images(2, 96, 128)]),
}


def cast(x, dtype):
    return x.to(dtype) if x.is_floating_point() else x


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_it_fires_and_is_as_near_as_eager(case):
    torch.manual_seed(0)
    rule, make, make_inputs = CASES[case]
    net, inputs = make().eval().cuda().to(BF16), [cast(x, BF16) for x in make_inputs()]
    exact = copy.deepcopy(net).double()(*(cast(x, torch.double) for x in inputs))
    counters.clear()
    result = torch.compile(net, backend="ipex", options={"strict": True})(*inputs)
    expected = net(*inputs)
    assert counters["ipex"][rule] == 1
    assert result.stride() == expected.stride()
    errors = [((y.double() - exact).norm() / exact.norm()).item() for y in (result, expected)]
    assert errors[0] <= FARTHER * errors[1]
