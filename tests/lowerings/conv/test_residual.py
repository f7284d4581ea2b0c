"""A block's last convolution and that of its shortcut in one kernel: offers, graphs, values, code.

Values of the templates by the interpreter are in `test_conv_templates.py`.
"""

import itertools
import re

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ipex_inductor.autotune import batches
from ipex_inductor.autotune.pool import Estimate
from ipex_inductor.autotune.record import encode
from ipex_inductor.autotune.select import Selection
from ipex_inductor.autotune.space import why_unknown
from ipex_inductor.lowerings.conv import residual as shortcut
from ipex_inductor.lowerings.problem import selector_hook, shapes
from ipex_inductor.lowerings.problem.selector_hook import Choosing, choosing
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import tuner
from ipex_inductor.passes.engine.whole_ops import inline
from ipex_inductor.passes.fusion.joined import SHORTCUT
from ipex_inductor.target.device import find_target
from ipex_inductor.templates.triton.residual import BOXES_TILES, STREAMED_TILES, shared
from support import h200
from support.case_sampling import few_with_each
from support.meta_device import H200, LAST, conv, image, placed, traced
from support.rendered_templates import shortcut_compiled, within_limits

pytestmark = pytest.mark.unit

A100 = "sm_80:NVIDIA-A100-SXM4-80GB"


def problem(x, columns, source, stride=1, dtype="bfloat16", arch=H200, layouts=(":L", ":L")):
    image, beside = ("x".join(map(str, sizes)) for sizes in (x, source))
    line = (
        f"ipex.conv_shortcut.default {dtype} {image}{layouts[0]} {columns}x{x[1]}x1x1:L {columns} "
        f"{beside}{layouts[1]} {columns}x{source[1]}x1x1:L stride={stride},{stride}"
    )
    (found,) = shapes.problems([line], arch, {})
    return found


FIRST = ([128, 64, 56, 56], 256, [128, 64, 56, 56])
SECOND = ([128, 128, 28, 28], 512, [128, 256, 56, 56], 2)
LAST_ONE = ([128, 512, 7, 7], 2048, [128, 1024, 14, 14], 2)
STREAMED, BOXES = [shortcut.STREAMED] * 3, [shortcut.BOXES] * 2
OFFERED = {
    "ResNet-50's first": (problem(*FIRST), [*STREAMED, *BOXES]),
    "its second": (problem(*SECOND), BOXES),
    "its last": (problem(*LAST_ONE), BOXES),
    "fp16": (problem(*FIRST, dtype="float16"), [*STREAMED, *BOXES]),
    "an A100": (problem(*FIRST, arch=A100), STREAMED),
    "fp32": (problem(*FIRST, dtype="float32"), []),
    "fp64": (problem(*FIRST, dtype="float64"), []),
    "contiguous": (problem(*FIRST, layouts=("", ":L")), []),
    "a contiguous source": (problem(*FIRST, layouts=(":L", "")), []),
    "few rows": (problem([1, 64, 28, 28], 256, [1, 64, 28, 28]), []),
    "odd channels": (problem([32, 63, 56, 56], 256, [32, 65, 56, 56]), STREAMED),
    "a stride that leaves a line": (problem([32, 64, 28, 28], 256, [32, 64, 55, 55], 2), STREAMED),
    "no image": (problem([0, 64, 56, 56], 256, [0, 64, 56, 56]), []),
}


@pytest.mark.parametrize("name", OFFERED)
def test_what_is_offered(name):
    found, names = OFFERED[name]
    calls = library.calls(found)
    assert calls[0].name == "aten.convolution"
    assert [call.name for call in calls if not call.apart] == names
    assert all(why_unknown(call.choice) is None for call in calls)


def test_apart_what_a_library_adds_and_what_is_streamed_are_measured_too():
    names = {call.name for call in library.calls(OFFERED["ResNet-50's first"][0]) if call.apart}
    wanted = {"cudnn.convolution_add_relu", "aten.mm", "ipex.triton.streamed"}
    assert names == {"aten.convolution", *wanted}


@pytest.mark.parametrize("stride", [1, 2])
def test_every_call_computes_the_same(stride):
    """In fp64, so that only the order of the sums is another."""
    size = [6, 10, 8] if stride == 2 else [6, 5, 4]
    found = problem([4096, 16, 5, 4], 128, [4096, *size], stride)
    calls = library.calls(found)
    assert {call.name for call in calls} >= {shortcut.STREAMED, "aten.mm"}
    small = tuner.to_float64(problem([3, 16, 5, 4], 128, [3, *size], stride))
    inputs = inputs_of(small, torch.device("cpu"), seed=0)
    wanted = tuner.function_of(small)(*inputs)
    assert wanted.count_nonzero() > wanted.numel() / 3
    for call in [*calls, *(c for c in shortcut.CALLS if c.name == shortcut.BOXES)]:
        made = tuner.function_of(small, call.compute)(*inputs)
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12, check_stride=True)


def test_what_is_random_hides_neither_product():
    """Both are of the size of the bias."""
    x, weight, _, source, projection = inputs_of(
        tuner.to_float64(problem([2, 64, 9, 9], 96, [2, 256, 9, 9])), torch.device("cpu"), seed=0
    )
    for read, factor in ((x, weight), (source, projection)):
        assert torch.conv2d(read, factor).std().item() == pytest.approx(1.0, abs=0.1)


def test_another_batch_has_the_nearest_ones_record():
    ours, other = (
        problem([n, 64, 56, 56], 256, [n, 64, 56, 56]) for n in (256, 128)
    )  # as many images as channels are made
    assert batches.family(ours) == (batches.family(other)[0], 256)


def block(x, y, weight, bias, own_weight, own_bias):
    return conv(x, weight, bias, torch.conv2d(y, own_weight, own_bias, 2))


def block_inputs():
    """In fp64, in which nothing is refused that the graph says."""
    x, y, weight, own_weight = (
        image(*size, dtype=torch.float64)
        for size in ((2, 16, 5, 4), (2, 16, 9, 7), (16, 16, 1, 1), (16, 16, 1, 1))
    )
    bias, own_bias = torch.randn(2, 16, dtype=torch.float64)
    return x, y, weight, bias, own_weight, own_bias


def together(node):
    """Who chooses the template wherever it is asked."""
    if node.target is torch.ops.ipex.conv_shortcut.default:
        call = next(c for c in shortcut.CALLS if c.name == shortcut.BOXES)
        return call.compute, "choice", "as told"
    return None, "choice", "left"


def without_its_own(x, y, weight, bias, own_weight, own_bias):
    return conv(x, weight, bias, torch.conv2d(y, own_weight, None, 2))


def without_the_blocks(x, y, weight, bias, own_weight, own_bias):
    return conv(x, weight, None, torch.conv2d(y, own_weight, own_bias, 2))


def targets(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


BIASES = ("bias_1", "own_bias_1")


@pytest.mark.parametrize("fn", [block, without_its_own, without_the_blocks])
def test_both_are_one_op_and_the_biases_one(fn):
    gm, report = placed(fn, *block_inputs(), choose=together, weights=BIASES)
    assert "ipex.shortcut_rows.default" in targets(gm)
    assert "aten.convolution.default" not in targets(gm)
    (event,) = report.events
    assert (event.kind, event.subject) == ("choice", SHORTCUT)
    inputs = block_inputs()
    torch.testing.assert_close(gm(*inputs), fn(*inputs), rtol=1e-12, atol=1e-12)


def seen(x, y, weight, bias, own_weight, own_bias):
    shortcut = torch.conv2d(y, own_weight, own_bias, 2)
    return conv(x, weight, bias, shortcut), shortcut.neg()


def itself(x, y, weight, bias, own_weight, own_bias):
    shortcut = torch.conv2d(y, own_weight, own_bias, 2)
    return conv(shortcut, weight, bias, shortcut)


def bare(x, y, weight, bias, own_weight, own_bias):
    return conv(x, weight, None, torch.conv2d(y, own_weight, None, 2))


def by_two(x, y, weight, bias, own_weight, own_bias):
    return conv(y, weight, bias, torch.conv2d(x, own_weight, own_bias), stride=2)


def padded(x, y, weight, bias, own_weight, own_bias):
    return conv(x, weight, bias, torch.conv2d(y, own_weight, own_bias, 3, 2))


def windowed(x, y, weight, bias, own_weight, own_bias):
    wide = own_weight.expand(-1, -1, 3, 3)
    return conv(x, weight, bias, torch.conv2d(y, wide, own_bias, 2, 1))


def in_groups(x, y, weight, bias, own_weight, own_bias):
    shortcut = torch.conv2d(y, own_weight[:, :8], own_bias, 2, groups=2)
    return conv(x, weight, bias, shortcut)


def turned(x, y, weight, bias, own_weight, own_bias):
    return conv(y, weight, bias, torch.conv_transpose2d(x, own_weight, own_bias, 2))


def of_another_activation(x, y, weight, bias, own_weight, own_bias):
    return conv(x, weight, bias, torch.conv2d(y, own_weight, own_bias, 2), unary="silu")


NEAR = {
    "who reads the shortcut too": seen,
    "the shortcut itself": itself,
    "no bias": bare,
    "a stride of its own": by_two,
    "padding": padded,
    "a window": windowed,
    "groups": in_groups,
    "transposed": turned,
    "another activation": of_another_activation,
}


def stays_apart(fn, weights):
    inputs = block_inputs()
    if fn is by_two:
        inputs = image(2, 16, 5, 4, dtype=torch.float64), *inputs[1:]
    gm, report = placed(fn, *inputs, choose=together, weights=weights)
    assert "ipex.shortcut_rows.default" not in targets(gm)
    assert SHORTCUT not in [event.subject for event in report.events]
    torch.testing.assert_close(gm(*inputs), fn(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay_apart(name):
    stays_apart(NEAR[name], BIASES)


@pytest.mark.parametrize("weights", [(), BIASES[:1], BIASES[1:]])
def test_biases_that_may_change_stay_apart(weights):
    stays_apart(block, weights)


@pytest.fixture
def h200_nodes(monkeypatch):
    monkeypatch.setattr(selector_hook, "arch_of", lambda device: H200)


def large_inputs():
    """Of ResNet-50's first block."""
    wide = {"dtype": torch.bfloat16, "device": "meta"}
    x, y = (torch.empty(128, 64, 56, 56, **wide).to(memory_format=LAST) for _ in "xy")
    weight, own_weight = (torch.empty(256, 64, 1, 1, **wide).to(memory_format=LAST) for _ in "wo")
    return x, y, weight, torch.empty(256, **wide), own_weight, torch.empty(256, **wide)


def large(x, y, weight, bias, own_weight, own_bias):
    return conv(x, weight, bias, torch.conv2d(y, own_weight, own_bias))


def test_nothing_known_leaves_both_and_asks_of_each(h200_nodes):
    with choosing(Choosing()) as now:
        gm, report = placed(large, *large_inputs(), choose=library.Chooser({}), weights=BIASES)
    assert targets(gm).count("aten.convolution.default") == 2
    assert [event.subject for event in report.events] == [SHORTCUT, "conv+add+relu"]
    assert "nothing is recorded" in report.events[0].reason
    (offer,) = now.offers.values()  # the meta device has no channels-last convolution for another
    assert offer.problem == problem(*FIRST)


@pytest.mark.parametrize(
    ("name", "fused"), [(shortcut.STREAMED, True), ("cudnn.convolution_add_relu", False)]
)
def test_what_is_recorded_decides(name, fused, h200_nodes):
    found = problem(*FIRST)
    choice = next(c.choice for c in library.calls(found) if c.name == name)
    known = {encode(found): Selection(Estimate(choice, 5.0, 0.01), None, "recorded")}
    gm, report = placed(large, *large_inputs(), choose=library.Chooser(known), weights=BIASES)
    assert ("ipex.shortcut_rows.default" in targets(gm)) == fused
    assert targets(gm).count("aten.convolution.default") == (0 if fused else 2)
    assert report.events[0].reason.startswith("apart, ") != fused


@pytest.mark.sampled("its second")
@pytest.mark.parametrize(
    "name",
    ["ResNet-50's first", "its second", pytest.param("odd channels", marks=pytest.mark.slow)],
)
def test_one_kernel_with_its_epilogue(name, tmp_path, monkeypatch):
    found, _ = OFFERED[name]
    call = next(c for c in library.calls(found) if not c.apart)
    code = h200.code_of_call(found, call, tmp_path, monkeypatch)
    ((kind, what),) = re.findall(r"(triton_\w+?)_fused(\w*)\.run\(", code)
    assert kind == "triton_tem"
    assert "relu" in what
    assert "extern_kernels" not in code.split("def call")[1]


# The first each time: test_every_template.py has a small tile of each dtype for each of them.
GPUS = ("h200", "a100-80gb", "b200", "mi300x")
EVERY = [
    (*each, tile, dtype, gpu)
    for gpu, dtype in itertools.product(GPUS, ("bfloat16", "float16"))
    for each, tiles in (
        (("streamed", FIRST), STREAMED_TILES),
        (("boxes", SECOND), BOXES_TILES),
    )
    for tile in tiles
]


@pytest.mark.parametrize(
    ("kind", "sizes", "tile", "dtype", "gpu"),
    few_with_each(EVERY, lambda kind, *others: [kind]),
    ids=str,
)
def test_compiled_where_there_is_no_gpu(kind, sizes, tile, dtype, gpu):
    made = shortcut_compiled(kind, sizes, tile, dtype, gpu)
    terms, room = (sizes[0][1], sizes[2][1]), find_target(gpu).shared_memory
    if gpu == "h200" or (kind == "streamed" and shared(tile, *terms, itemsize=2) <= room):
        # The widest keeps some words of a thread's sums elsewhere where no wgmma has them: 128.
        within_limits(made, gpu, 0 if gpu == "h200" else 128)
    if gpu != "h200":
        return
    text = made.asm["ttgir"]
    assert text.count("warp_group_dot ") == 2
    assert "ttg.local_load" not in text, "no factor goes through registers"
    copies = {"boxes": "async_tma_copy_global_to_local", "streamed": "async_copy_global_to_local"}
    assert text.count(copies[kind]) >= 2 * tile.num_stages
    if kind == "streamed":
        assert made.metadata.shared <= shared(tile, *terms, itemsize=2)


def test_numbers_with_one_value_to_stand_for_both_are_inputs_as_they_were():
    """Of sizes that vary; there is nothing to tell apart in them."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    gm = make_fx(lambda x: torch.ops.aten.view.default(x, [x.shape[0], x.shape[0]]))(
        mode.from_tensor(torch.ones(6, 6), symbolic_context=dynamic)
    )
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    first, second = node.args[1]
    if first is second:  # one node for both: another, with the same value
        with gm.graph.inserting_after(first):
            second = gm.graph.node_copy(first)
        second.meta["val"] = first.meta["val"]
        node.args = (node.args[0], [first, second])
    inline(gm.graph, node, lambda x, sizes: x.reshape(sizes).neg())
    gm.recompile()
    assert torch.equal(gm(torch.ones(5, 5)), -torch.ones(5, 5))


def test_weights_with_one_value_to_stand_for_both_are_told_apart(monkeypatch):
    """What folds of two layers of one shape are, as nodes of one graph share their fakes."""

    def shared(fn, *inputs, table=None):
        mode, gm = traced(fn, *inputs)
        (weight,) = [n for n in gm.graph.nodes if n.name == "weight_1"]
        (other,) = [n for n in gm.graph.nodes if n.name == "own_weight_1"]
        other.meta["val"] = weight.meta["val"]
        return mode, gm

    monkeypatch.setattr("support.meta_device.traced", shared)
    gm, _ = placed(block, *block_inputs(), choose=together, weights=BIASES)
    inputs = block_inputs()
    torch.testing.assert_close(gm(*inputs), block(*inputs), rtol=1e-12, atol=1e-12)
