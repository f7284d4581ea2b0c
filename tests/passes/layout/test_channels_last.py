"""Convolutions in channels-last: the same function, and the same strides of what leaves the graph.

No GPU is needed: the pass takes the graph of a CPU for one, too.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ipex_inductor import ops  # noqa: F401  registers the ipex:: ops
from ipex_inductor.passes.engine.whole_ops import reduced_table
from ipex_inductor.passes.joint import WHOLE
from ipex_inductor.passes.layout import channels_last
from ipex_inductor.reporting.decisions import GraphReport
from support.rewritten import rewrite, trace

pytestmark = pytest.mark.unit

aten, LAST = torch.ops.aten, torch.channels_last


@pytest.fixture(autouse=True, params=[0, 1], ids=["images alone", "with weights"])
def each_weight(request, monkeypatch):
    """How often each is copied: on a GPU once."""
    monkeypatch.setattr(channels_last, "_on_gpu", lambda node: bool(request.param))
    return request.param


def converted(fn, *inputs):
    """The rewritten graph of `fn`, held against `fn`, and what was said."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # sizes of an upsampling are constants
    gm = make_fx(fn, reduced_table(WHOLE))(*map(mode.from_tensor, inputs))
    gm.graph.eliminate_dead_code()  # a pool's indices
    report = GraphReport()
    with V.set_fake_mode(mode), torch.no_grad():
        channels_last.convert(gm.graph, report)
    gm.graph.lint()
    gm.recompile()
    got, want = gm(*inputs), fn(*inputs)
    for ours, theirs in zip(
        *(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True
    ):
        # Another order of the same sums of some 100 products in fp32.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert ours.stride() == theirs.stride()
    return gm, [str(event) for event in report.events]


def copies(gm):
    """Of each copy: whether it is to channels-last."""
    return [n.kwargs["memory_format"] is LAST for n in gm.graph.find_nodes(
        op="call_function", target=aten.clone.default)]  # fmt: skip


def images_of(gm):
    """The layouts of the images that convolutions read."""
    found = (n.args[0].meta["val"] for n in gm.graph.nodes if n.target in channels_last.IMAGES)
    return [image.is_contiguous(memory_format=LAST) for image in found]


def weights(*shapes):
    return [torch.randn(shape) for shape in shapes]


X = torch.randn(2, 8, 9, 9)


def test_one_copy_of_the_input_and_one_of_each_weight(each_weight):
    def fn(x, first, second):
        y = F.conv2d(x, first, padding=1).relu()
        return F.conv2d(F.max_pool2d(y, 2), second).mean((2, 3))

    gm, said = converted(fn, X, *weights((16, 8, 3, 3), (4, 16, 3, 3)))
    assert copies(gm) == [True] * (1 + 2 * each_weight)
    assert images_of(gm) == [True, True]
    assert said == ["choice: channels-last (2 convolutions, as Inductor would have it)"]


def test_what_leaves_the_graph_keeps_its_strides():
    def fn(x, weight):
        y = F.conv2d(x, weight)
        return y, y.relu(), y.sum((2, 3), keepdim=True)

    gm, _ = converted(fn, X, *weights((4, 8, 3, 3)))
    assert copies(gm).count(False) >= 2


def test_views_are_of_what_they_were_of():
    """A channel shuffle, and the rows of a linear layer."""

    def fn(x, weight):
        y = F.conv2d(x, weight, padding=1)
        b, c, h, w = y.shape
        shuffled = y.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        return F.conv2d(shuffled, weight, padding=1).view(b, -1) * 2

    gm, _ = converted(fn, X, *weights((8, 8, 3, 3)))
    assert images_of(gm) == [True, True]


def test_a_single_pixel_is_viewed_without_a_copy():
    def fn(x, weight):
        return F.adaptive_avg_pool2d(F.conv2d(x, weight), 1).view(2, -1)

    gm, _ = converted(fn, X, *weights((4, 8, 3, 3)))
    assert False not in copies(gm)


def test_an_op_of_ours_with_an_addend(each_weight):
    def fn(x, weight, other):
        window = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return torch.ops.ipex.conv(x, weight, None, other, *window, "add", "relu", [], "")

    gm, _ = converted(fn, X, *weights((8, 8, 3, 3)), torch.randn(2, 8, 9, 9))
    assert copies(gm) == [*[True] * (2 + each_weight), False]


def test_a_pool_and_upsampling_follow(each_weight):
    """In the forms that Inductor's decompositions leave of them."""

    def fn(x, weight):
        y = F.max_pool2d(F.conv2d(x, weight, padding=1).relu(), 3, 2, 1)
        y = F.interpolate(F.conv2d(y, weight, padding=1), scale_factor=2)
        return F.conv2d(y, weight).mean((2, 3))

    gm, _ = converted(fn, X, *weights((8, 8, 3, 3)))
    # The input, the weight, and what upsampling gives; nothing on the way back.
    assert copies(gm) == [True] * (2 + each_weight)


def test_parts_have_the_strides_that_they_had():
    """Of a whole that lies as it did, also where another view counts from its beginning."""

    def fn(x, weight):
        y = F.conv2d(x, weight)
        first, second = y.chunk(2, 1)
        return y[:, 2:6], first, second, torch.as_strided(y[:, 2:6], (2, 16), (16, 1), 0)

    converted(fn, X, *weights((8, 8, 3, 3)))


def test_what_is_read_as_it_was_is_not_run_again():
    """An op that counts makes another symbol each time it is traced."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fn(x, weight):
        return torch.nonzero(F.conv2d(x, weight) > 0)

    given = (X, *weights((8, 8, 3, 3)))
    gm = make_fx(fn)(*map(mode.from_tensor, given))
    (count,) = gm.graph.find_nodes(op="call_function", target=aten.nonzero.default)
    before = count.meta["val"]
    with V.set_fake_mode(mode):
        channels_last.convert(gm.graph, GraphReport())
    assert count.meta["val"] is before
    gm.recompile()
    assert torch.equal(gm(*given), fn(*given))


def test_branches_and_sums_of_both_layouts():
    def fn(x, weight, other):
        y = F.conv2d(x, weight, padding=1)
        return torch.cat([y + x, y * other, F.conv2d(y + other, weight, padding=1)], 1).sigmoid()

    converted(fn, X, *weights((8, 8, 3, 3)), torch.randn(2, 8, 9, 9))


def test_a_permuted_result_comes_back_permuted():
    def fn(x, weight):
        return F.conv2d(x.permute(0, 1, 3, 2), weight).permute(0, 1, 3, 2).unsqueeze(0)

    converted(fn, X, *weights((4, 8, 3, 3)))


def test_nothing_to_convert():
    weight = torch.randn(4, 8, 3, 3).to(memory_format=LAST)
    gm, said = converted(F.conv2d, X.to(memory_format=LAST), weight)
    assert not copies(gm)
    assert not said


def test_random_draws_are_made_in_their_order():
    """Where pixels lie is where the generator's numbers go."""

    def fn(x, weight):
        return torch.rand_like(F.conv2d(x, weight))

    mode = FakeTensorMode()
    given = (X, *weights((4, 8, 3, 3)))
    gm = make_fx(fn)(*map(mode.from_tensor, given))
    with V.set_fake_mode(mode):
        channels_last.convert(gm.graph, GraphReport())
    gm.recompile()
    torch.manual_seed(0)
    got = gm(*given)
    torch.manual_seed(0)
    torch.testing.assert_close(got, fn(*given), rtol=0, atol=0)


VIDEO = torch.randn(2, 8, 3, 9, 9).bfloat16()


def convert_videos(fn, *inputs):
    """Return the graph of `fn` behind the pass, for a GPU."""
    run = functools.partial(channels_last.convert, with_images=False)
    gm, events = rewrite(run, fn, *inputs)
    assert all("3D convolutions" in reason for _, _, reason in events)
    return gm


def videos_of(gm):
    found = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    last = torch.channels_last_3d
    return [
        node.args[0].meta["val"].is_contiguous(memory_format=last)
        for node in found
        if node.meta["val"].dim() == 5
    ]


def test_videos_on_a_gpu_are_converted_once(each_weight):
    def fn(x, first, second):
        y = F.conv3d(x, first, padding=1).relu()
        return F.conv3d(F.max_pool3d(y, (1, 2, 2)), second, padding=1)

    gm = convert_videos(
        fn, VIDEO, *(w.bfloat16() for w in weights((16, 8, 3, 3, 3), (8, 16, 3, 3, 3)))
    )
    assert videos_of(gm) == [bool(each_weight)] * 2  # images alone stand for a CPU
    clones = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert len(clones) == 4 * each_weight  # input, weights, and the result's former layout


@pytest.mark.parametrize(("channels", "dtype"), [(3, torch.bfloat16), (8, torch.float32)])
def test_other_videos_keep_their_layout(channels, dtype):
    x, weight = torch.randn(2, channels, 3, 9, 9), torch.randn(4, channels, 3, 3, 3)
    gm = convert_videos(lambda x, w: F.conv3d(x, w), x.to(dtype), weight.to(dtype))
    assert videos_of(gm) == [False]


def test_images_stay_where_only_videos_are_converted(each_weight):
    gm = convert_videos(lambda x, w: F.conv2d(x, w), X, *weights((4, 8, 3, 3)))
    assert images_of(gm) == [False]


def test_videos_are_found_behind_rules(each_weight):
    """A convolution with an activation is an op of ours by then."""

    def fn(x, weight):
        window = ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
        return torch.ops.ipex.conv(x, weight, None, None, *window, "none", "relu", [], "")

    gm, _ = trace(fn, VIDEO, weights((8, 8, 3, 3, 3))[0].bfloat16())
    assert channels_last.has_videos(gm.graph) == bool(each_weight)
