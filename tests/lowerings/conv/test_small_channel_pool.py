"""A stem and its pool in one kernel: offers, graphs, values, code.

Values of the template by the interpreter are in `test_conv_templates.py`.
"""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor.autotune import batches, nearest_shape
from ipex_inductor.autotune.pool import Estimate
from ipex_inductor.autotune.record import encode
from ipex_inductor.autotune.select import Selection
from ipex_inductor.autotune.space import why_unknown
from ipex_inductor.lowerings.conv import small_channel_pool
from ipex_inductor.lowerings.problem import selector_hook, shapes
from ipex_inductor.lowerings.problem.selector_hook import Choosing, choosing
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import tuner
from ipex_inductor.passes.engine.whole_ops import WHOLE, reduced_table
from ipex_inductor.passes.fusion.joined import POOLED
from ipex_inductor.target.device import find_target
from ipex_inductor.templates.triton.conv_small_channel_pool import TILES
from support import h200
from support.case_sampling import few_with_each
from support.meta_device import H200, LAST, conv, image, placed
from support.rendered_templates import compiled, ready, usage

pytestmark = pytest.mark.unit

A100 = "sm_80:NVIDIA-A100-SXM4-80GB"
INTEL = "xe:20.1"


def problem(x, weight, around=(2, 3), dtype="bfloat16", arch=H200, layout=":L", biased=True):
    image, window = ("x".join(map(str, sizes)) for sizes in (x, weight))
    stride, padding = (f"{n},{n}" for n in around)
    bias = str(weight[0]) if biased else ""
    line = f"ipex.conv_pool.default {dtype} {image}{layout} {window}:L {bias} "
    line += f"stride={stride} padding={padding}" + ("" if biased else " bias=None")
    (found,) = shapes.problems([line], arch, {})
    return found


RESNET = [128, 3, 224, 224], [64, 3, 7, 7]
OURS = [small_channel_pool.NAME] * 4  # one for each number of lines
OFFERED = {
    "ResNet-50": (problem(*RESNET), OURS),
    "without a bias": (problem(*RESNET, biased=False), OURS),
    "contiguous": (problem(*RESNET, layout=""), OURS),
    "fp16": (problem(*RESNET, dtype="float16"), OURS),
    "an A100": (problem(*RESNET, arch=A100), OURS),
    "of few channels": (problem([8, 1, 64, 64], [24, 1, 3, 3], (1, 1)), OURS),
    "of more channels than a block has": (problem([8, 3, 64, 64], [96, 3, 7, 7]), OURS),
    "fp32": (problem(*RESNET, dtype="float32"), []),
    "an Intel GPU": (problem(*RESNET, arch=INTEL), []),
    "more than a few channels": (problem([8, 5, 64, 64], [64, 5, 7, 7]), []),
    "a window of many terms": (problem([8, 4, 99, 99], [64, 4, 31, 31]), []),
    "an image of more than 32 bits": (problem([1, 3, 27000, 27000], [64, 3, 7, 7]), []),
    "no image": (problem([0, 3, 224, 224], [64, 3, 7, 7]), []),
}


@pytest.mark.parametrize("name", OFFERED)
def test_what_is_offered(name):
    found, names = OFFERED[name]
    calls = library.calls(found)
    assert calls[0].name == "aten.convolution"
    assert [call.name for call in calls if not call.apart] == names
    assert all(why_unknown(call.choice) is None for call in calls)


def test_apart_is_what_a_convolution_with_relu_is_offered():
    found = OFFERED["ResNet-50"][0]
    apart = [(call.name, call.parameters) for call in library.calls(found) if call.apart]
    offered = library.calls(small_channel_pool.extract_convolution(found))
    assert apart == [(call.name, call.parameters) for call in offered]
    assert {"cudnn.convolution_relu", "ipex.triton.stem"} <= {name for name, _ in apart}


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("layout", [":L", ""])
def test_every_call_computes_the_same(layout, biased):
    """In fp64, so that only the order of the sums is another."""
    calls = library.calls(problem(*RESNET, layout=layout, biased=biased))
    small = tuner.to_float64(problem([2, 3, 23, 30], [64, 3, 7, 7], layout=layout, biased=biased))
    inputs = inputs_of(small, torch.device("cpu"), seed=0)
    wanted = tuner.function_of(small)(*inputs)
    assert wanted.shape == (2, 64, 6, 8)
    for call in calls:
        made = tuner.function_of(small, call.compute)(*inputs)
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12, check_stride=True)


def test_of_another_batch_only_near_ones_say_something():
    """Of few images it is slower than apart, however alike all else is."""
    sizes = {n: problem([n, *RESNET[0][1:]], RESNET[1]) for n in (1, 32, 64)}
    (ours, found), (other, _) = (batches.family(sizes[n]) for n in (64, 32))
    assert (ours, found) == (other, 64)
    known = {ours: [(n, encode(each)) for n, each in sizes.items()]}
    assert [n for n, _ in batches.find_nearest_sizes(sizes[64], known)] == [32]
    assert batches.find_nearest_sizes(problem([8, *RESNET[0][1:]], RESNET[1]), known) == []


@pytest.mark.parametrize(("images", "found"), [(64, True), (32, True), (8, False), (1, False)])
def test_neighbors_have_other_weights_and_nearly_as_many_images(images, found):
    known = [problem([64, 3, 96, 96], [n, 3, 7, 7]) for n in (64, 128)]
    asked = problem([images, 3, 99, 99], [32, 3, 7, 7])
    near = nearest_shape.find_neighbors(asked, nearest_shape.by_kind(known), lambda _: True)
    assert near == (known if found else [])


def test_where_only_apart_is_offered_a_reason_is_given(h200_nodes):
    x, weight, bias = (t.float() for t in large_inputs())
    _, report = placed(other(), x, weight, bias, choose=library.Chooser({}))
    said = next(event for event in report.events if event.subject == POOLED)
    assert (said.kind, said.reason) == ("missed", "two of float32 do not fill a register")


# Graphs.


def pooled(x, weight, bias, window=3, **around):
    made = conv(x, weight, bias, stride=2, padding=3)
    return F.max_pool2d(made, window, **{"stride": 2, "padding": 1, **around})


def stem_inputs(channels=3):
    """In fp64, in which nothing is refused that the graph says."""
    weight = image(32, channels, 7, 7, dtype=torch.float64)
    bias = torch.randn(32, dtype=torch.float64)
    return image(2, channels, 26, 21, dtype=torch.float64), weight, bias


def together(node):
    """Who chooses the template wherever it is asked."""
    if node.target is torch.ops.ipex.conv_pool.default:
        call = next(c for c in small_channel_pool.CALLS if c.name == small_channel_pool.NAME)
        return call.compute, "choice", "as told"
    return None, "choice", "left"


def targets(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


# As it is traced, and as Inductor hands it on.
FORMS = {"whole": None, "decomposed": reduced_table(frozenset(WHOLE))}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("biased", [True, False])
def test_both_are_one_op(biased, form):
    x, weight, bias = stem_inputs()
    given = x, weight, bias if biased else None

    def fn(x, weight, bias):
        return pooled(x, weight, bias if biased else None) * 2

    gm, report = placed(fn, x, weight, bias, choose=together, table=FORMS[form])
    assert "ipex.stem_pool_rows.default" in targets(gm)
    assert not {t for t in targets(gm) if "convolution" in t or "max_pool" in t}
    (event,) = report.events
    assert (event.kind, event.subject) == ("choice", POOLED)
    inputs = x, weight, bias
    wanted = pooled(*given) * 2
    torch.testing.assert_close(gm(*inputs), wanted, rtol=1e-12, atol=1e-12, check_stride=True)


def seen(x, weight, bias):
    made = conv(x, weight, bias, stride=2, padding=3)
    return F.max_pool2d(made, 3, 2, 1), made


def places(x, weight, bias):
    return F.max_pool2d(conv(x, weight, bias, stride=2, padding=3), 3, 2, 1, return_indices=True)


def of_another_activation(x, weight, bias):
    return F.max_pool2d(conv(x, weight, bias, stride=2, padding=3, unary="silu"), 3, 2, 1)


def many_channels(x, weight, bias):
    """As many as a stem's image does not have."""
    wide, window = x.repeat(1, 2, 1, 1), weight.repeat(1, 2, 1, 1)
    return pooled(wide.contiguous(memory_format=LAST), window, bias)


def in_groups(x, weight, bias):
    made = conv(x, weight[:30, :1], bias[:30], stride=2, padding=3, groups=3)
    return F.max_pool2d(made, 3, 2, 1)


def other(**around):
    def fn(x, weight, bias):
        return pooled(x, weight, bias, **around)

    return fn


NEAR = {
    "who reads the convolution too": seen,
    "who asks where a value was": places,
    "another activation": of_another_activation,
    "many channels": many_channels,
    "groups": in_groups,
    "another window": other(window=2),
    "another stride": other(stride=1),
    "no padding": other(padding=0),
    "a dilated window": other(dilation=2),
    "a part of a window at the end": other(ceil_mode=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay_apart(name, form):
    inputs = stem_inputs()
    gm, report = placed(NEAR[name], *inputs, choose=together, table=FORMS[form])
    assert "ipex.stem_pool_rows.default" not in targets(gm)
    assert POOLED not in [event.subject for event in report.events]
    torch.testing.assert_close(gm(*inputs), NEAR[name](*inputs), rtol=1e-12, atol=1e-12)


def large_inputs():
    wide = {"dtype": torch.bfloat16, "device": "meta"}
    x, weight = (torch.empty(*size, **wide).to(memory_format=LAST) for size in RESNET)
    return x, weight, torch.empty(64, **wide)


@pytest.fixture
def h200_nodes(monkeypatch):
    monkeypatch.setattr(selector_hook, "arch_of", lambda device: H200)


def test_nothing_known_leaves_both_and_asks_of_each(h200_nodes):
    with choosing(Choosing()) as now:
        gm, report = placed(other(), *large_inputs(), choose=library.Chooser({}))
    assert targets(gm).count("aten.convolution.default") == 1
    assert [event.subject for event in report.events] == [POOLED, "conv+relu"]
    assert "nothing is recorded" in report.events[0].reason
    assert problem(*RESNET) in [offer.problem for offer in now.offers.values()]


@pytest.mark.parametrize(
    ("name", "fused"), [(small_channel_pool.NAME, True), ("cudnn.convolution_relu", False)]
)
def test_what_is_recorded_decides(name, fused, h200_nodes):
    found = problem(*RESNET)
    choice = next(c.choice for c in library.calls(found) if c.name == name)
    known = {encode(found): Selection(Estimate(choice, 5.0, 0.01), None, "recorded")}
    gm, report = placed(other(), *large_inputs(), choose=library.Chooser(known))
    assert ("ipex.stem_pool_rows.default" in targets(gm)) == fused
    assert report.events[0].reason.startswith("apart, ") != fused


# Code.


@pytest.mark.parametrize(
    "name", ["ResNet-50", pytest.param("without a bias", marks=pytest.mark.slow)]
)
def test_one_kernel(name, tmp_path, monkeypatch):
    found, _ = OFFERED[name]
    call = next(c for c in library.calls(found) if not c.apart)
    code = h200.code_of_call(found, call, tmp_path, monkeypatch)
    kinds = re.findall(r"(triton_\w+?)_fused(\w*)\.run\(", code)
    assert [kind for kind, _ in kinds].count("triton_tem") == 1
    assert "extern_kernels" not in code.split("def call")[1]


# The first each time: test_every_template.py has a small tile of each dtype for each of them.
EVERY = itertools.product([torch.bfloat16, torch.float16], ["h200", "a100-80gb", "b200"])


@pytest.mark.parametrize(("dtype", "gpu"), few_with_each(EVERY, lambda *_: ["the first"]), ids=str)
def test_compiled_where_there_is_no_gpu(dtype, gpu):
    tile = TILES[-1]
    given = ready("stem_pool", *RESNET, tile, [2, 2], [3, 3], dtype)
    made = compiled(tile, str(dtype).split(".")[1], gpu, given, epilogue=False)
    registers, spilled = usage(made)
    assert not spilled or gpu != "h200"
    assert made.metadata.shared <= find_target(gpu).shared_memory
    if gpu == "h200":
        assert registers <= 128, "four programs a multiprocessor"
        assert "warp_group_dot" in made.asm["ttgir"]
        loads = re.findall(r"ld\.global\.\S+", made.asm["ptx"])
        assert not [kind for kind in loads if "v" not in kind and "b16" in kind], "two at a time"
