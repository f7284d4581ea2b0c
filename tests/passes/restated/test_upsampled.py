"""1x1 convolutions before upsampling: which are moved, and that the result stays the same."""

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor.passes.restated import upsampled
from support.rewritten import rewrite

pytestmark = pytest.mark.unit

aten = torch.ops.aten
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def taken_for_a_gpu(monkeypatch):
    monkeypatch.setattr(upsampled, "is_on_cpu", lambda node: False)


def moved(fn, weight, *inputs):
    """Return the graph of `fn(weight, bias, *inputs)`, whose first input is a weight."""

    def run(graph, report):
        weights = [*graph.find_nodes(op="placeholder")][:2]
        upsampled.commute(graph, weights, report)

    return rewrite(run, fn, weight, torch.randn(weight.shape[0]).to(weight.dtype), *inputs)


def levels(dtype=torch.float32, last=False):
    """Return images of 8, 4 and 2 pixels a side."""
    sizes = ((2, 4, 8, 8), (2, 5, 4, 4), (2, 6, 2, 2))
    found = [torch.randn(size, dtype=dtype) for size in sizes]
    return [x.to(memory_format=LAST) if last else x for x in found]


def head(**mode):
    """Upsample all levels to the first one's size, and reduce the channels of all."""

    def fn(weight, bias, *images):
        sized = [F.interpolate(x, size=images[0].shape[2:], **mode) for x in images]
        return F.conv2d(torch.cat(sized, 1), weight, bias)

    return fn


def sizes(gm):
    """Return the pixels of a side of each convolution, in order."""
    found = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    return [node.meta["val"].shape[2] for node in found]


MODES = (
    {"mode": "bilinear", "align_corners": False},
    {"mode": "bilinear", "align_corners": True},
    {"mode": "bicubic"},
    {"mode": "nearest"},
)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels-last"])
def test_each_level_is_convolved_at_its_own_size(mode, last):
    gm, events = moved(head(**mode), torch.randn(3, 15, 1, 1), *levels(last=last))
    assert events == [("fired", upsampled.NAME, "")]
    assert sizes(gm) == [8, 4, 2]
    cats = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert not [cat for cat in cats if cat.meta["val"].shape[2:] == (8, 8)]


def test_in_low_precision_the_small_image_is_convolved_in_it():
    gm, events = moved(
        head(**MODES[0]), torch.randn(3, 15, 1, 1).bfloat16(), *levels(torch.bfloat16)
    )
    assert events == [("fired", upsampled.NAME, "")]
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        assert node.meta["val"].dtype is torch.bfloat16


def test_parts_that_are_not_upsampled_stay_side_by_side():
    def fn(weight, bias, first, second, small):
        parts = [first, F.interpolate(small, scale_factor=2.0), second.relu()]
        return F.conv2d(torch.cat(parts, 1), weight, bias)

    images = torch.randn(2, 4, 8, 8), torch.randn(2, 3, 8, 8), torch.randn(2, 5, 4, 4)
    gm, _ = moved(fn, torch.randn(3, 12, 1, 1), *images)
    assert sizes(gm) == [8, 4]


def test_a_single_upsampled_image_needs_no_concatenation():
    def fn(weight, bias, small):
        return F.conv2d(F.interpolate(small, scale_factor=2.0), weight, bias)

    gm, _ = moved(fn, torch.randn(3, 5, 1, 1), torch.randn(2, 5, 4, 4))
    assert sizes(gm) == [4]


def convolve_3x3(weight, bias, small):
    return F.conv2d(F.interpolate(small, scale_factor=2.0), weight, bias, padding=1)


def weigh_by_channel(weight, bias, small, factor):
    return F.conv2d(F.interpolate(small, scale_factor=2.0) * factor, weight, bias)


def square(weight, bias, small):
    large = F.interpolate(small, scale_factor=2.0)
    return F.conv2d(large * large, weight, bias)


def shift(weight, bias, small):
    return F.conv2d(F.interpolate(small, scale_factor=2.0) + 1, weight, bias)


def shrink(weight, bias, image):
    return F.conv2d(F.interpolate(image, scale_factor=0.5), weight, bias)


@pytest.mark.parametrize(
    ("fn", "side", "more"),
    [
        (convolve_3x3, 3, ()),
        (weigh_by_channel, 1, (torch.rand(5, 1, 1),)),
        (square, 1, ()),
        (shift, 1, ()),
        (shrink, 1, ()),
    ],
)
def test_what_does_not_commute_stays(fn, side, more):
    gm, events = moved(fn, torch.randn(3, 5, side, side), torch.randn(2, 5, 4, 4), *more)
    assert events == []
    assert len(sizes(gm)) == 1


def test_more_channels_are_not_upsampled_instead():
    def fn(weight, bias, small):
        return F.conv2d(F.interpolate(small, scale_factor=2.0), weight, bias)

    gm, events = moved(fn, torch.randn(9, 5, 1, 1), torch.randn(2, 5, 4, 4))
    assert [event[0] for event in events] == ["missed"]
    assert sizes(gm) == [8]


@pytest.mark.parametrize(("mode", "kinds"), [("nearest", ["fired"]), ("bilinear", [])])
def test_on_a_cpu_only_copied_pixels_are_convolved_before(monkeypatch, mode, kinds):
    monkeypatch.undo()
    _, events = moved(head(mode=mode), torch.randn(3, 15, 1, 1), *levels())
    assert [event[0] for event in events] == kinds


def halve(weight, bias, small):
    return F.conv2d(F.interpolate(small, scale_factor=2.0) * 0.5, weight, bias)


def weigh_by_pixel(weight, bias, small, mask):
    return F.conv2d(F.interpolate(small, scale_factor=2.0) * mask, weight, bias)


def add_modes(weight, bias, small):
    first, second = (F.interpolate(small, scale_factor=2.0, mode=m) for m in ("nearest", "bicubic"))
    return F.conv2d(first + second, weight, bias)


@pytest.mark.parametrize(
    ("fn", "more"), [(halve, ()), (weigh_by_pixel, (torch.rand(8, 8),)), (add_modes, ())]
)
def test_the_bias_is_added_once_whatever_the_factors_are(fn, more):
    gm, events = moved(fn, torch.randn(3, 5, 1, 1), torch.randn(2, 5, 4, 4), *more)
    assert ([event[0] for event in events], sizes(gm)) == (["fired"], [4])


def test_an_image_with_other_readers_is_upsampled_once():
    def fn(weight, bias, small):
        large = F.interpolate(small, scale_factor=2.0)
        return F.conv2d(large, weight, bias) + large[:, :3]

    gm, events = moved(fn, torch.randn(3, 5, 1, 1), torch.randn(2, 5, 4, 4))
    assert ([event[0] for event in events], sizes(gm)) == (["missed"], [8])


def test_long_sums_are_searched_once():
    def fn(weight, bias, small):
        for _ in range(60):  # two operands each: 2 ** 60 ways to its beginning
            small = small * 0.5 + small * 0.5
        return F.conv2d(small, weight, bias)

    _, events = moved(fn, torch.randn(3, 5, 1, 1), torch.randn(2, 5, 4, 4))
    assert events == []


def test_images_picked_from_more_dimensions_stay():
    def fn(weight, bias, x, rows):
        return F.conv2d(x[:, :, rows, rows], weight, bias)

    x, rows = torch.randn(2, 5, 2, 2, 2), torch.tensor([0, 1])
    _, events = moved(fn, torch.randn(3, 5, 1, 1), x, rows)
    assert events == []
