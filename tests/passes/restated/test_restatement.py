"""Ops that are restated: which are, what the others compute, and why some stay as they are.

No GPU is needed: the passes take the graph of a CPU for one.
"""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from ipex_inductor.passes.restated import embedding_bags, frames, patches, restatement, upsampled
from ipex_inductor.reporting.decisions import GraphReport
from support.rewritten import count, rewrite, trace

pytestmark = pytest.mark.unit

aten = torch.ops.aten
BF16, LAST = torch.bfloat16, torch.channels_last


@pytest.fixture(autouse=True)
def taken_for_a_gpu(monkeypatch):
    monkeypatch.setattr(restatement, "on_nvidia_gpu", lambda node: True)


def restated(fn, *inputs, off=()):
    return rewrite(lambda graph, report: restatement.restate(graph, off, report), fn, *inputs)


def convolve(**arguments):
    return lambda x, weight, bias: F.conv2d(x, weight, bias, **arguments)


def windows(channels=3, outputs=24, side=8, dtype=BF16, last=False):
    """Return a weight of square windows and a bias."""
    weight, bias = torch.randn(outputs, channels, side, side, dtype=dtype), torch.randn(outputs)
    return weight.to(memory_format=LAST) if last else weight, bias.to(dtype)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_patches_become_rows_of_a_gemm(last, dtype):
    x = torch.randn(2, 3, 35, 32, dtype=dtype)  # three rows of pixels are left over
    x = x.to(memory_format=LAST) if last else x
    gm, events = restated(convolve(stride=8), x, *windows(dtype=dtype))
    assert events == [("fired", patches.NAME, "")]
    assert (count(gm, aten.convolution.default), count(gm, aten.addmm.default)) == (0, 1)


def test_patches_without_a_bias_and_of_rectangles():
    def fn(x, weight):
        return F.conv2d(x, weight, None, (2, 4)).flatten(2).transpose(1, 2)

    gm, _ = restated(fn, torch.randn(2, 16, 8, 8).to(BF16), torch.randn(8, 16, 2, 4).to(BF16))
    assert (count(gm, aten.convolution.default), count(gm, aten.mm.default)) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "side"),
    [
        ({"stride": 4}, 8),
        ({"stride": 8, "padding": 1}, 8),
        ({"stride": 8, "dilation": 2}, 8),
        ({"stride": 1}, 1),
        ({"stride": 4}, 4),
    ],
    ids=["overlapping", "padded", "dilated", "1x1", "for the small-channel template"],
)
def test_other_windows_are_no_patches(arguments, side):
    x = torch.randn(1, 3, 40, 40, dtype=BF16)
    gm, events = restated(convolve(**arguments), x, *windows(side=side))
    assert (count(gm, aten.convolution.default), events) == (1, [])


def test_groups_are_no_patches():
    x, (weight, bias) = torch.randn(1, 6, 16, 16, dtype=BF16), windows()
    gm, events = restated(convolve(stride=8, groups=2), x, weight, bias)
    assert (count(gm, aten.convolution.default), events) == (1, [])


def test_patches_in_single_precision_stay():
    x = torch.randn(1, 3, 16, 16)
    gm, events = restated(convolve(stride=8), x, *windows(dtype=torch.float32))
    assert (count(gm, aten.convolution.default), events) == (1, [])


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels-last"])
def test_patches_of_videos_become_rows_too(last):
    x, weight = torch.randn(2, 3, 4, 9, 8), torch.randn(8, 3, 2, 4, 4)
    x = x.to(memory_format=torch.channels_last_3d) if last else x
    fn = convolve_videos(stride=(2, 4, 4))
    gm, events = restated(fn, x.to(BF16), weight.to(BF16), torch.randn(8).to(BF16))
    assert events == [("fired", patches.NAME, "")]
    assert (count(gm, aten.convolution.default), count(gm, aten.addmm.default)) == (0, 1)


def test_one_number_stands_for_all_dimensions():
    def fn(x, weight):
        window = ([2], [1], [1], False, [0], 1)
        return aten.convolution.default(x, weight, None, *window)

    x, weight = torch.randn(1, 3, 5, 8, 8).to(BF16), torch.randn(4, 3, 3, 3, 3).to(BF16)
    assert restated(fn, x, weight)[1] == [("fired", frames.NAME, "")]


def convolve_videos(**arguments):
    return lambda x, weight, bias: F.conv3d(x, weight, bias, **arguments)


@pytest.mark.parametrize(
    ("window", "arguments"),
    [
        ((3, 5, 5), {"stride": (1, 2, 2), "padding": (1, 2, 2)}),
        ((1, 5, 5), {"stride": (2, 2, 2), "padding": (0, 2, 2)}),
        ((2, 3, 3), {"stride": 2, "padding": 1, "dilation": (1, 2, 2)}),
    ],
)
def test_frames_of_videos_become_images(window, arguments):
    x = torch.randn(2, 3, 6, 16, 16, dtype=BF16)
    weight, bias = torch.randn(16, 3, *window).to(BF16), torch.randn(16).to(BF16)
    gm, events = restated(convolve_videos(**arguments), x, weight, bias)
    (convolution,) = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert events == [("fired", frames.NAME, "")]
    assert convolution.meta["val"].dim() == 4
    assert convolution.args[0].meta["val"].shape[1] % 8 == 0


@pytest.mark.parametrize(("channels", "dtype"), [(8, BF16), (3, torch.float32)])
def test_other_videos_stay(channels, dtype):
    x, weight = torch.randn(1, channels, 4, 8, 8), torch.randn(4, channels, 3, 3, 3)
    fn = convolve_videos(padding=1)
    gm, events = restated(fn, x.to(dtype), weight.to(dtype), torch.randn(4).to(dtype))
    (convolution,) = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert convolution.meta["val"].dim() == 5
    assert events == []


def look_up(mode, **arguments):
    return lambda weight, rows: F.embedding_bag(rows, weight, mode=mode, **arguments)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_equal_bags_are_gathered(mode, dtype):
    rows = torch.randint(50, (8, 2, 5))[:, 0]
    gm, events = restated(look_up(mode), torch.randn(50, 16, dtype=dtype), rows)
    assert events == [("fired", embedding_bags.NAME, "")]
    assert not any(count(gm, op) for op in embedding_bags.OPS)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (look_up("max"), "of maxima: torch's kernel computes them"),
        (look_up("sum", padding_idx=0), "it leaves out rows: torch's kernel computes it"),
    ],
    ids=["maxima", "padding"],
)
def test_bags_that_stay(fn, reason):
    gm, events = restated(fn, torch.randn(50, 16), torch.randint(1, 50, (8, 5)))
    assert events == [("missed", embedding_bags.NAME, reason)]
    assert any(count(gm, op) for op in embedding_bags.OPS)


def test_weighted_bags_stay():
    def fn(weight, rows, factors):
        return F.embedding_bag(rows, weight, mode="sum", per_sample_weights=factors)

    _, events = restated(fn, torch.randn(50, 16), torch.randint(50, (8, 5)), torch.randn(8, 5))
    assert [event[0] for event in events] == ["missed"]


def test_bags_of_other_lengths_are_not_concerned():
    def fn(weight, rows, offsets):
        return F.embedding_bag(rows, weight, offsets, mode="sum")

    offsets = torch.tensor([0, 3, 4])
    _, events = restated(fn, torch.randn(50, 16), torch.randint(50, (9,)), offsets)
    assert events == []


def test_a_rule_that_is_off_restates_nothing():
    x = torch.randn(1, 3, 16, 16, dtype=BF16)
    gm, events = restated(convolve(stride=8), x, *windows(), off={patches.NAME})
    assert (count(gm, aten.convolution.default), events) == (1, [])


def test_nothing_is_restated_on_a_cpu(monkeypatch):
    monkeypatch.undo()
    gm, _ = trace(convolve(stride=8), torch.randn(1, 3, 16, 16, dtype=BF16), *windows())
    restatement.restate(gm.graph, (), report := GraphReport())
    assert (count(gm, aten.convolution.default), report.events) == (1, [])


class AllKinds(torch.nn.Module):
    """Patches, frames, bags and an upsampled image."""

    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 8, 8, 8, dtype=BF16)
        self.frames = torch.nn.Conv3d(3, 8, 3, padding=1, dtype=BF16)
        self.bags = torch.nn.EmbeddingBag(20, 8, mode="mean")
        self.mix = torch.nn.Conv2d(6, 4, 1)

    def forward(self, image, video, rows, small, large):
        mixed = self.mix(torch.cat([F.interpolate(small, scale_factor=2.0), large], 1))
        return self.patches(image), self.frames(video), self.bags(rows), mixed


@pytest.mark.slow
def test_a_batch_that_varies_is_one_graph():
    inputs = (
        torch.randn(4, 3, 17, 16, dtype=BF16),
        torch.randn(4, 3, 3, 8, 8, dtype=BF16),
        torch.randint(20, (4, 5)),
        torch.randn(4, 4, 3, 3),
        torch.randn(4, 2, 6, 6),
    )
    for each in inputs:
        torch._dynamo.mark_dynamic(each, 0)
    model = AllKinds().eval()
    counters.clear()
    compiled = torch.compile(model, backend="ipex", fullgraph=True, options={"strict": True})
    with torch.no_grad():
        for some in (inputs, [each[:3] for each in inputs]):
            for result, expected in zip(compiled(*some), model(*some), strict=True):
                # Each result is rounded once, from sums of some hundred products in fp32.
                bound = 1e-5 if expected.dtype is torch.float32 else 1e-2
                torch.testing.assert_close(result, expected, rtol=bound, atol=bound)
                assert result.stride() == expected.stride()
    assert counters["stats"]["unique_graphs"] == 1
    fired = {name: counters["ipex"][name] for name in (*restatement.NAMES, upsampled.NAME)}
    assert fired == dict.fromkeys(fired, 1)
