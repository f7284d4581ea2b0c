"""Calls of a GPU's libraries with the epilogue: which may be chosen, what they compute, who says.

No GPU is needed: problems are data, bodies run on any device, and a graph on the meta device is
rewritten as one on a GPU is.
"""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace as changed
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ipex_inductor import lowerings
from ipex_inductor.autotune import select
from ipex_inductor.autotune.database import write
from ipex_inductor.autotune.pool import Estimate
from ipex_inductor.autotune.record import Choice, Record, decode_problem, encode
from ipex_inductor.autotune.select import Selection
from ipex_inductor.autotune.space import why_refused, why_unknown
from ipex_inductor.autotune.table import file_name
from ipex_inductor.lowerings.problem import selector_hook, shapes
from ipex_inductor.lowerings.problem.node_problem import problem_of
from ipex_inductor.lowerings.problem.selector_hook import Choosing, choosing
from ipex_inductor.lowerings.problem.settings import settings_of
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.select import competing_templates, library
from ipex_inductor.lowerings.tune import tuner
from ipex_inductor.passes.engine.whole_ops import WHOLE, reduced_table
from ipex_inductor.passes.fusion.library import place
from ipex_inductor.reporting.decisions import GraphReport
from support.autotune.autotune_records import PROVENANCE, timed
from support.meta_device import CONV, H200, LAST, conv, image, placed, selected, targets, traced

pytestmark = pytest.mark.unit

LINEAR = torch.ops.ipex.linear.default


def linear(x, weight, bias, unary="relu", binary="none", other=None):
    return LINEAR(x, weight, bias, other, binary, unary, [], False)


def problem_in(fn, *inputs, arch=H200):
    _, gm = traced(fn, *inputs)
    (node,) = [n for n in gm.graph.nodes if n.target in (CONV, LINEAR)]
    return problem_of(node, arch, {})


def conv_problem(window=3, with_bias=True, other=False, dtype=torch.bfloat16, format=LAST, **how):
    how = {"padding": window // 2, **how}
    weight = image(16, 8 // how.get("groups", 1), window, window, dtype=dtype)
    given = [image(2, 8, 6, 6, dtype=dtype, format=format), weight]
    given += [torch.randn(16, dtype=dtype)] * with_bias + [image(2, 16, 6, 6, dtype=dtype)] * other

    def fn(x, weight, *more):
        bias, addend = (*more, None)[:2] if with_bias else (None, (*more, None)[0])
        return conv(x, weight, bias, addend, **how)

    return problem_in(fn, *given)


def stem_problem(format=LAST, channels=3, **how):
    weight = image(64, channels, 7, 7)
    how = {"stride": 2, "padding": 3, **how}
    return problem_in(
        lambda *given: conv(*given, **how), image(2, channels, 18, 16, format=format), weight,
        torch.randn(64).bfloat16(),
    )  # fmt: skip


def separate_problem(window=3, other=False, made=8, format=LAST, **how):
    how = {"padding": window // 2, "groups": 8, **how}
    given = [image(2, 8, 12, 12, format=format), image(made, 1, window, window)]
    given += [torch.randn(made).bfloat16()] + [image(2, made, 12, 12)] * other
    return problem_in(lambda *args: conv(*args, **how), *given)


def grouped_problem(each, made=None, other=False, **how):
    made, dtype = made or each, how.get("dtype", torch.bfloat16)
    given = [image(2, 4 * each, 6, 6, **how), image(4 * made, each, 3, 3, dtype=dtype)]
    given += [torch.randn(4 * made, dtype=dtype)]
    given += [image(2, 4 * made, 6, 6, dtype=dtype)] * other
    return problem_in(lambda *args: conv(*args, padding=1, groups=4), *given)


def many_problem(window=1, other=False, format=LAST, channels=24):
    given = [image(2, channels, 6, 6, format=format), image(16, channels, window, window)]
    given += [torch.randn(16).bfloat16()] + [image(2, 16, 6, 6)] * other
    return problem_in(lambda *args: conv(*args, padding=window // 2), *given)


def linear_problem(*lead, unary="relu", with_bias=True, dtype=torch.bfloat16):
    given = [torch.randn(*lead, 32, dtype=dtype), torch.randn(48, 32, dtype=dtype)]
    given += [torch.randn(48, dtype=dtype)] * with_bias
    return problem_in(lambda x, w, *b: linear(x, w, *(b or [None]), unary), *given)


def test_numbers_of_an_activation_are_kept():
    given = image(2, 8, 6, 6), image(16, 8, 1, 1)
    found = problem_in(lambda x, w: conv(x, w, None, unary="hardtanh", scalars=[0.0, 6.5]), *given)
    assert found.constants["scalars"] == (0.0, 6.5)
    assert decode_problem(encode(found)) == found
    none = problem_in(lambda x, w: conv(x, w, None, unary="pow", scalars=[math.nan]), *given)
    assert none is None


PLAIN, RELU, ADD = "aten.convolution", "cudnn.convolution_relu", "cudnn.convolution_add_relu"
PRODUCT, ACTIVATION = "aten.mm", "cublaslt.addmm_activation"
FPROP = ["ipex.triton.fprop"]  # the tile for few terms
GROUPED = ["ipex.triton.grouped"]
SEPARATE = ["ipex.triton.depthwise"] * 3 + ["ipex.triton.strips"] * 2
STEM = ["ipex.triton.stem"] * 4  # tiles for 64 channels
OFFERED = {
    "3x3": (conv_problem(), [PLAIN, RELU]),
    "3x3 no bias": (conv_problem(with_bias=False), [PLAIN, RELU]),
    "3x3 fp16": (conv_problem(dtype=torch.float16), [PLAIN, RELU]),
    "3x3 fp32": (conv_problem(dtype=torch.float32), [PLAIN, RELU]),
    "3x3 add": (conv_problem(other=True), [PLAIN, ADD]),
    "strided": (conv_problem(1, stride=2), [PLAIN, RELU]),
    "1x1": (conv_problem(1), [PLAIN, RELU, PRODUCT, ACTIVATION]),
    "1x1 no bias": (conv_problem(1, with_bias=False), [PLAIN, RELU, PRODUCT]),
    "1x1 add": (conv_problem(1, other=True), [PLAIN, ADD, PRODUCT]),
    "1x1 gelu": (conv_problem(1, unary="gelu_tanh"), [PLAIN, PRODUCT, ACTIVATION]),
    "1x1 erf gelu": (conv_problem(1, unary="gelu"), [PLAIN, PRODUCT]),
    "padded 1x1": (conv_problem(1, padding=1), [PLAIN, RELU]),
    "sigmoid": (conv_problem(unary="sigmoid"), [PLAIN]),
    "gelu": (conv_problem(unary="gelu_tanh"), [PLAIN]),
    "fp64": (conv_problem(dtype=torch.float64), [PLAIN]),
    "grouped": (conv_problem(groups=2), [PLAIN, *GROUPED * 2]),  # blocks of 16 by 16
    "grouped of 24": (grouped_problem(24), [PLAIN, *GROUPED * 5]),  # of 32 and of 64
    "grouped of 32": (grouped_problem(32), [PLAIN, *GROUPED * 5]),
    "grouped of 80": (grouped_problem(80), [PLAIN, *GROUPED]),
    "grouped of 80 on an A100": (
        changed(grouped_problem(80), arch="sm_80:NVIDIA-A100-SXM4-80GB"),
        [PLAIN],
    ),
    "grouped of 144": (grouped_problem(144), [PLAIN]),
    "grouped to few": (grouped_problem(48, 8), [PLAIN]),
    "grouped add": (grouped_problem(4, other=True), [PLAIN, *GROUPED * 2]),
    "grouped contiguous": (grouped_problem(4, format=torch.contiguous_format), [PLAIN]),
    "grouped fp32": (grouped_problem(4, dtype=torch.float32), [PLAIN]),
    "contiguous": (conv_problem(format=torch.contiguous_format), [PLAIN]),
    "AMD": (changed(conv_problem(), arch="gfx942:AMD"), [PLAIN]),
    "deterministic": (changed(conv_problem(), settings={"deterministic": True}), [PLAIN]),
    "stem": (stem_problem(), [PLAIN, RELU, *STEM]),
    "stem contiguous": (stem_problem(torch.contiguous_format), [PLAIN, *STEM]),
    "stem gelu": (stem_problem(unary="gelu"), [PLAIN, *STEM]),
    "stem of five": (stem_problem(channels=5), [PLAIN, RELU, "aten.convolution_padded"]),
    "stem on AMD": (changed(stem_problem(), arch="gfx942:AMD"), [PLAIN, *STEM]),
    "depthwise": (separate_problem(), [PLAIN, *SEPARATE]),
    "depthwise 7x7 silu": (separate_problem(7, unary="silu"), [PLAIN, *SEPARATE]),
    "depthwise add": (separate_problem(5, other=True), [PLAIN, *SEPARATE]),
    "depthwise 9x9": (separate_problem(9), [PLAIN]),
    "depthwise contiguous": (separate_problem(format=torch.contiguous_format), [PLAIN]),
    "two a channel": (separate_problem(made=16), [PLAIN, *GROUPED * 2]),
    "many": (many_problem(), [PLAIN, RELU, PRODUCT, ACTIVATION]),
    "many 3x3 add": (many_problem(3, True), [PLAIN, ADD, *FPROP]),
    # To few channels, so the tiles for those alone.
    "many 3x3 of arithmetic": (many_problem(3, channels=512), [PLAIN, RELU, *FPROP * 2]),
    "many contiguous": (many_problem(format=torch.contiguous_format), [PLAIN]),
    "linear": (linear_problem(4), ["aten.addmm", ACTIVATION]),
    "linear 3-D": (linear_problem(2, 4), ["aten.addmm", ACTIVATION]),
    "linear tanh": (linear_problem(4, unary="gelu_tanh"), ["aten.addmm", ACTIVATION]),
    "linear erf": (linear_problem(4, unary="gelu"), ["aten.addmm"]),
    "linear no bias": (linear_problem(4, with_bias=False), ["aten.addmm"]),
    "linear fp64": (linear_problem(4, dtype=torch.float64), ["aten.addmm"]),
}


@pytest.mark.parametrize("name", OFFERED)
def test_what_may_be_chosen(name):
    problem, names = OFFERED[name]
    assert [call.name for call in library.calls(problem)] == names


def test_problems_can_be_written_by_hand():
    (line,) = shapes.problems(
        [
            "ipex.conv.default bfloat16 2x8x6x6:L 16x8x3x3:L 16 other=None stride=1,1 padding=1,1 "
            "dilation=1,1 transposed=False output_padding=0,0 groups=1 binary='none' unary='relu' "
            "scalars=() packed=''"
        ],
        H200,
        {},
    )
    assert line == OFFERED["3x3"][0]


@pytest.mark.parametrize(
    ("name", "value"), [("cudnn.enabled", False), ("cudnn.deterministic", True)]
)
def test_a_cudnn_that_is_not_to_be_asked_is_not(name, value):
    problem = changed(OFFERED["1x1"][0], settings={name: value})
    assert [call.name for call in library.calls(problem)] == [PLAIN, PRODUCT, ACTIVATION]


@pytest.mark.parametrize("name", [n for n, (_, names) in OFFERED.items() if len(names) > 1])
def test_records_may_name_what_is_offered(name):
    problem, _ = OFFERED[name]
    outcomes = tuple(timed(call.choice, 10.0) for call in library.calls(problem))
    record = Record(problem, outcomes, PROVENANCE)
    assert why_refused(record) is None


# A CPU's cuBLASLt knows the other GELU, so that its values are for tests on a GPU.
HERE = [n for n, (p, names) in OFFERED.items() if len(names) > 1 and p.constants["unary"] == "relu"]


@pytest.mark.parametrize("name", HERE)
def test_every_call_computes_the_same(name):
    problem = tuner.to_float64(OFFERED[name][0])
    inputs = inputs_of(problem, torch.device("cpu"), seed=0)
    calls = library.calls(OFFERED[name][0])
    wanted, *others = (tuner.function_of(problem, call.compute)(*inputs) for call in calls)
    torch.testing.assert_close(wanted, tuner.function_of(problem)(*inputs))
    for other in others:  # in fp64, so that only the order of the sums is another
        torch.testing.assert_close(other, wanted, rtol=1e-12, atol=1e-12, check_stride=True)


@pytest.fixture
def h200(monkeypatch):
    """Nodes on the meta device are of an H200."""
    monkeypatch.setattr(selector_hook, "arch_of", lambda device: H200)


def last_image(*sizes):
    return torch.empty(sizes, dtype=torch.bfloat16, device="meta").to(memory_format=LAST)


def window(size):
    """Of one number for both sides, which torch allows."""
    return [size], [1], [1], False, [0]


ODD = {
    "grouped": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), (16, 4)),
    "to few": (lambda x, w: F.conv2d(x, w, padding=1), (32, 64)),
    "to few, by one number": (lambda x, w: torch.convolution(x, w, None, *window(2), 1), (32, 64)),
    "grouped, by one number": (lambda x, w: torch.convolution(x, w, None, *window(1), 4), (32, 16)),
}


@pytest.mark.parametrize("varying", [(), (0,), (0, 1)], ids=["fixed", "image", "weight too"])
@pytest.mark.parametrize("name", ODD)
def test_what_nothing_is_recorded_of_comes_back_as_it_was(monkeypatch, name, varying):
    """Also of sizes that vary, of whose weights nothing is asked."""
    monkeypatch.setattr(selector_hook, "arch_of", lambda device: H200)
    call, (made, each) = ODD[name]
    groups = 4 if "grouped" in name else 1
    inputs = last_image(2, each * groups, 8, 8), last_image(made, each, 3, 3)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kinds = [DimDynamic.DYNAMIC if n in varying else DimDynamic.STATIC for n in range(2)]
    fakes = [
        mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=[kind] * 4))
        for x, kind in zip(inputs, kinds, strict=True)
    ]
    gm = make_fx(call)(*fakes)
    before = [(n.target, n.args[2:], n.meta.get("val")) for n in gm.graph.nodes if n.args]
    guards = len(mode.shape_env.guards)
    with V.set_fake_mode(mode):
        place(gm.graph, library.Chooser({}), (), reduced_table(frozenset(WHOLE)), GraphReport())
    after = [(n.target, n.args[2:], n.meta.get("val")) for n in gm.graph.nodes if n.args]
    assert [each[:2] for each in after] == [each[:2] for each in before]
    assert [v.stride() for _, _, v in after[:-1]] == [v.stride() for _, _, v in before[:-1]]
    assert len(mode.shape_env.guards) == guards


def given(dtype=torch.bfloat16):
    x, weight = image(2, 8, 6, 6, dtype=dtype), image(16, 8, 3, 3, dtype=dtype)
    return x, weight, torch.randn(16, dtype=dtype)


def fn(x, weight, bias):
    return conv(x, weight, bias, padding=1)


@pytest.fixture
def usual_of_users():
    """Switches that scripts often set, whatever dtype their models have."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.benchmark = before[1]


@pytest.mark.parametrize(
    ("op", "dtype", "obeyed"),
    [
        ("linear", torch.bfloat16, {}),
        ("linear", torch.float32, {"fp32 cuda products": "tf32"}),
        ("conv", torch.bfloat16, {"cudnn.benchmark": True}),
        ("conv", torch.float32, {"cudnn.benchmark": True, "fp32 cuda products": "tf32"}),
    ],
)
def test_a_problem_is_known_by_the_switches_that_it_obeys(op, dtype, obeyed, usual_of_users):
    """Or a script that has TF32 on would have no record of its layers in bf16."""
    if op == "conv":
        _, gm = traced(fn, *given(dtype))
    else:
        layer = (torch.randn(size, dtype=dtype) for size in ((4, 8), (16, 8), (16,)))
        _, gm = traced(lambda x, weight, bias: linear(x, weight, bias), *layer)
    (node,) = [n for n in gm.graph.nodes if n.target in (CONV, LINEAR)]
    assert problem_of(node, H200, settings_of("cuda")).settings == obeyed


def test_a_window_of_one_channel_is_known_by_one_layout(h200):
    """Of a depthwise convolution whose weight is contiguous, as no batch norm is folded into it."""

    def fn(x, weight, bias):
        return conv(x, weight, bias, padding=1, groups=8)

    x, bias = image(2, 8, 6, 6), torch.randn(8).bfloat16()
    last = image(8, 1, 3, 3)
    plain = last.clone(memory_format=torch.contiguous_format)
    assert (last.stride(), plain.stride()) == ((9, 1, 3, 1), (9, 9, 3, 1))
    known, found = (problem_in(fn, x, weight, bias) for weight in (last, plain))
    assert encode(found) == encode(known)


def test_a_window_of_one_pixel_is_known_by_one_layout(h200):
    """Of a model that is not in channels-last too, whose images alone are turned."""

    def fn(x, weight, bias):
        return conv(x, weight, bias)

    x, bias = image(2, 8, 6, 6), torch.randn(16).bfloat16()
    last = image(16, 8, 1, 1)
    plain = last.contiguous().clone(memory_format=torch.contiguous_format)
    assert plain.stride() != last.stride()
    known, found = (problem_in(fn, x, weight, bias) for weight in (last, plain))
    assert encode(found) == encode(known)
    assert known.operands[1].stride == last.stride()
    line = "ipex.conv.default bfloat16 2x8x6x6:L 16x8x1x1{} 16 other=None stride=1,1 padding=0,0 "
    line += "dilation=1,1 transposed=False output_padding=0,0 groups=1 binary='none' unary='relu' "
    lines = [line.format(layout) + "scalars=() packed=''" for layout in (":L", "")]
    assert [*shapes.problems(lines, H200, {})] == [known, known]
    window = image(16, 8, 3, 3)
    for apart, left, right in ((x, window, window.contiguous()), (x.contiguous(), last, plain)):
        known, found = (problem_in(fn, apart, each, bias) for each in (left, right))
        assert encode(found) != encode(known)


def test_nothing_known_leaves_torchs_own_ops(h200):
    gm, report = placed(fn, *given(), choose=library.Chooser({}))
    assert targets(gm) == ["aten.convolution.default", "aten.relu.default"]
    (event,) = report.events
    assert (event.kind, event.subject) == ("choice", "conv+relu")
    assert event.reason == "aten.convolution: nothing is recorded of 2 choices"


def test_what_is_recorded_is_called(h200):
    problem = problem_in(fn, *given())
    gm, report = placed(fn, *given(), choose=library.Chooser(selected(problem, RELU)))
    assert targets(gm) == ["ipex.cudnn_conv_relu.default"]
    assert report.events[0].reason == "cudnn.convolution_relu: 5 us, recorded"
    x, weight, bias = given()
    assert torch.equal(gm(x, weight, bias), F.relu(F.conv2d(x, weight, bias, padding=1)))


OTHERS = {"sm_80:NVIDIA-A100-SXM4-80GB": f"derived from {H200}", "sm_100:NVIDIA-B200": ""}


def test_what_a_table_of_the_package_says_is_called_where_it_may_be_asked(
    h200, tmp_path, monkeypatch
):
    problem = problem_in(fn, *given())
    (each,) = selected(problem, RELU).values()
    record = Record(problem, (timed(each.choice, 5.0),), PROVENANCE)
    write(tmp_path / file_name(H200), [record])
    monkeypatch.setattr(select, "SHIPPED", tmp_path)
    gm, report = placed(fn, *given(), choose=library.Chooser({}, tables={H200}))
    assert targets(gm) == ["ipex.cudnn_conv_relu.default"]
    assert report.events[0].reason == "cudnn.convolution_relu: 5 us, shipped"
    for arch, said in OTHERS.items():
        monkeypatch.setattr(selector_hook, "arch_of", lambda device, arch=arch: arch)
        gm, report = placed(fn, *given(), choose=library.Chooser({}, tables={arch}))
        assert targets(gm)[0] == ("ipex.cudnn_conv_relu.default" if said else PLAIN + ".default")
        assert report.events[0].reason.endswith(said or "nothing is recorded of 2 choices")
    monkeypatch.setattr(selector_hook, "arch_of", lambda device: H200)
    own = {
        encode(problem): Selection(Estimate(Choice("library", PLAIN), 4, 0.01), None, "recorded")
    }
    _, report = placed(fn, *given(), choose=library.Chooser(own, tables={H200}))
    assert report.events[0].reason.endswith("recorded"), "one's own records come first"


@pytest.mark.parametrize("choice", [
    Choice("library", "cudnn.convolution_add_relu"),  # of another epilogue
    Choice("library", "cublaslt.addmm_activation"),  # of another window
    Choice("library", "cudnn.convolution_relu", template="torch 2.0.0"),  # of another cuDNN
], ids=str)  # fmt: skip
def test_a_record_of_what_may_not_compute_it_is_refused_and_said(choice, h200):
    problem = problem_in(fn, *given())
    planted = {encode(problem): Selection(Estimate(choice, 5.0, 0.01), None, "recorded")}
    gm, report = placed(fn, *given(), choose=library.Chooser(planted))
    assert targets(gm) == ["aten.convolution.default", "aten.relu.default"]
    wanted = f"aten.convolution: {choice.name} (recorded) is not offered here"
    assert report.events[0].reason == wanted


def plain_problem(problem, epilogue):
    """As Inductor's own list of kernels has it."""
    ours = ("binary", "unary", "scalars", "packed", "other")
    constants = {n: value for n, value in problem.constants.items() if n not in ours}
    op = "aten.convolution.default"
    return changed(problem, op=op, constants=constants, epilogue=epilogue)


@pytest.mark.parametrize(
    ("epilogue", "p50", "wins"),
    [("aten.relu.default(y)", 4.0, True), ("aten.relu.default(y)", 6.0, False), ("", 4.0, False)],
)
def test_a_template_with_the_epilogue_that_is_faster_is_left_to_inductor(epilogue, p50, wins, h200):
    problem = problem_in(fn, *given())
    template = Choice("template", "inductor.triton.convolution2d")
    beside = Selection(Estimate(template, p50, 0.01), None, "recorded")
    known = selected(problem, RELU) | {encode(plain_problem(problem, epilogue)): beside}
    settled = competing_templates.prefer_templates(
        known, {key: [each.choice] for key, each in known.items()}
    )
    told, of_times = (
        select.digest((key, each.choice) for key, each in s.items()) for s in (settled, known)
    )
    assert (told != of_times) == wins, "a key that is made of the choices tells"
    gm, report = placed(fn, *given(), choose=library.Chooser(settled))
    assert (targets(gm)[0] == "aten.convolution.default") == wins
    assert report.events[0].reason.startswith("aten.convolution" if wins else RELU)
    assert ("as a template is faster than cudnn" in report.events[0].reason) == wins


def test_the_reason_why_there_is_no_choice_is_said(h200):
    x, weight, bias = given()
    _, report = placed(fn, x.contiguous(), weight, bias, choose=library.Chooser({}))
    assert str(report.events[0]) == "missed: conv+relu (its tensors are not channels-last)"


def test_who_learns_a_graph_hears_what_there_is_to_choose(h200):
    with choosing(Choosing()) as now:
        placed(fn, *given(), choose=library.Chooser({}))
    (offer,) = now.offers.values()
    assert [c.name for c in offer.choices] == [PLAIN, RELU]
    assert offer.taken.name == PLAIN


def two(x, y, weight, bias, own_weight, own_bias):
    """A block's last convolution, which adds that of its shortcut."""
    shortcut = torch.conv2d(y, own_weight, own_bias)
    return conv(x, weight, bias, shortcut, padding=1)


def two_inputs():
    x, weight, bias = given(torch.float64)
    own = image(16, 4, 1, 1, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    return x, image(2, 4, 6, 6, dtype=torch.float64), weight, bias, *own


class Fused:
    """Chooses cuDNN's call whatever it is asked."""

    def __call__(self, node):
        return library.conv.CALLS[1].body, "choice", "as told"


BIASES = ("bias_1", "own_bias_1")


@pytest.mark.parametrize(("weights", "moves"), [(BIASES, True), (BIASES[:1], False), ((), False)])
def test_the_bias_of_an_addend_is_added_to_the_calls_own(weights, moves):
    gm, report = placed(two, *two_inputs(), choose=Fused(), weights=weights)
    (addend,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert (addend.args[2] is None) == moves
    assert report.events[0].reason.endswith("is added to its own") == moves
    inputs = two_inputs()
    torch.testing.assert_close(gm(*inputs), two(*inputs))


def test_a_bias_that_others_see_stays_where_it_is():
    def seen(x, y, weight, bias, own_weight, own_bias):
        shortcut = torch.conv2d(y, own_weight, own_bias)
        return conv(x, weight, bias, shortcut, padding=1), shortcut.neg()

    gm, _ = placed(seen, *two_inputs(), choose=Fused(), weights=BIASES)
    (addend,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert addend.args[2] is not None


def plain_stem(x, weight, bias):
    return torch.conv2d(x, weight, bias, 2, 3).tanh()


def stem_inputs(dtype=torch.bfloat16):
    return (
        image(2, 3, 18, 16, dtype=dtype),
        image(64, 3, 7, 7, dtype=dtype),
        torch.randn(64).to(dtype),
    )


def test_a_stem_without_an_op_behind_it_that_libraries_know_may_be_a_template(h200):
    with choosing(Choosing()) as now:
        gm, report = placed(plain_stem, *stem_inputs(), choose=library.Chooser({}))
    assert targets(gm) == ["aten.convolution.default", "aten.tanh.default"]
    (offer,) = now.offers.values()
    assert offer.problem.epilogue == "aten.tanh.default(y)"
    assert [c.name for c in offer.choices] == [PLAIN, *STEM]
    chosen = Selection(Estimate(offer.choices[2], 5.0, 0.01), None, "recorded")
    known = {encode(offer.problem): chosen}
    gm, report = placed(plain_stem, *stem_inputs(), choose=library.Chooser(known))
    assert "ipex.conv_stem.default" in targets(gm)
    assert report.events[0].reason.startswith("ipex.triton.stem ")
    given = [t.double() for t in stem_inputs()]
    gm, _ = placed(
        plain_stem,
        *given,
        choose=lambda node: (library.calls(offer.problem)[2].compute, "choice", ""),
    )
    torch.testing.assert_close(gm(*given), plain_stem(*given), rtol=1e-12, atol=1e-12)


def test_a_stem_of_another_source_is_not_offered(h200):
    problem = stem_problem()
    (*_, last) = library.calls(problem)
    stale = changed(last.choice, template=f"{last.choice.template[:-1]}?")
    known = {encode(problem): Selection(Estimate(stale, 5.0, 0.01), None, "recorded")}
    window = {"stride": 2, "padding": 3}
    gm, report = placed(
        lambda *given: conv(*given, **window), *stem_inputs(), choose=library.Chooser(known)
    )
    assert targets(gm) == ["aten.convolution.default", "aten.relu.default"]
    assert report.events[0].reason.endswith("is not offered here")


SQUARE = ((8, 8, 3, 3), (8, 8, 1, 1))


def test_a_bias_that_the_convolution_itself_sees_stays_where_it_is():
    def seen(x, weight, bias, own_weight, own_bias):
        shortcut = torch.conv2d(x, own_weight, own_bias)
        return conv(shortcut, weight, bias, shortcut, padding=1)

    x, window, pixel = (image(*of, dtype=torch.float64) for of in ((2, 8, 6, 6), *SQUARE))
    bias, own_bias = torch.randn(2, 8, dtype=torch.float64)
    gm, _ = placed(seen, x, window, bias, pixel, own_bias, choose=Fused(), weights=BIASES)
    (addend,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert addend.args[2] is not None


def test_what_a_call_is_in_generated_code(monkeypatch):
    """aten's own op, its arguments in their order; and channels-last whatever comes."""
    lowerings.register()
    code = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(code.append))
    op = torch.ops.ipex.cudnn_conv_relu
    window = [1, 1], [1, 1], [1, 1], 1

    def call(x, weight, bias, other):
        return op(op(x, weight, bias, None, *window), weight, None, other, *window)

    x, weight = image(2, 8, 6, 6, dtype=torch.float32), image(8, 8, 3, 3, dtype=torch.float32)
    with torch.no_grad(), pytest.raises(NotImplementedError):  # a CPU has no cuDNN
        torch.compile(call)(x, weight, torch.randn(8), x.clone())
    first = "torch.ops.aten.cudnn_convolution_relu.default(arg"
    then = "torch.ops.aten.cudnn_convolution_add_relu.default(buf0, arg"
    assert first in code[0]
    assert then in code[0]
    assert ", 1.0, None, [1, 1], [1, 1], [1, 1], 1)" in code[0]
    assert re.search(r"assert_\w+\(buf0, \(2, 8, 6, 6\), \(288, 1, 48, 8\)", code[0])


def test_records_may_name_every_call():
    known = [call.choice for family in library.CALLS.values() for call in family]
    assert not {choice.name: why for choice in known if (why := why_unknown(choice))}
