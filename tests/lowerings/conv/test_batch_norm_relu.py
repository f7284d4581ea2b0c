"""A norm and a relu in the kernel of the convolution behind: offers, graphs, values, code."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor.autotune import batches, nearest_shape
from ipex_inductor.autotune.space import why_unknown
from ipex_inductor.lowerings.conv import batch_norm_relu as lowering
from ipex_inductor.lowerings.problem import shapes
from ipex_inductor.lowerings.problem.node_problem import problem_of
from ipex_inductor.lowerings.problem.workload import inputs_of, operands_by_name
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import tuner
from ipex_inductor.ops.common import epilogue
from ipex_inductor.passes import pass_context
from ipex_inductor.passes.engine.whole_ops import reduced_table
from ipex_inductor.passes.fusion.batch_norm_relu import NAME, place
from ipex_inductor.passes.joint import RULE_NAMES, WHOLE, JointPass
from ipex_inductor.passes.pass_context import PassSettings
from ipex_inductor.passes.weights.weight_nodes import weight_only
from ipex_inductor.prebuild import described as described_gpu
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import find_target
from ipex_inductor.templates.triton import batch_norm_relu
from support import h200
from support.case_sampling import few_with_each
from support.cases import batch_norm_relu_cases
from support.meta_device import LAST, targets, traced
from support.rendered_templates import binary, signature, source, within_limits

pytestmark = pytest.mark.unit

aten = torch.ops.aten
A100, MI300X = "sm_80:NVIDIA-A100-SXM4-80GB", "gfx942:AMD-Instinct-MI300X"


def problem(
    x, columns, more=(), dtype="bfloat16", arch=h200.NAME, unary="relu", biased=True, layout=":L"
):
    """Of the first part `x` [B, C, H, W], and `more` channels behind it."""
    terms = x[1] + sum(more)
    parts = [f"{x[0]}x{width}x{x[2]}x{x[3]}{layout}" for width in (x[1], *more)]
    bias = columns if biased else "bias=None"
    line = (
        f"ipex.conv_preactivated.default {dtype} {parts[0]} {columns}x{terms}x1x1:L {bias} "
        f"{terms} {terms} {terms} {terms} {' '.join(parts[1:])} epsilon=1e-05 more={len(more)} "
        f"unary='{unary}' scalars=()"
    )
    (found,) = shapes.problems([line], arch, {})
    return found


DENSE = [64, 128, 28, 28], 128, (32, 32, 32)
OFFERED = {
    "DenseNet's": (problem(*DENSE), 3),
    "its first": (problem([64, 64, 56, 56], 128), 3),
    "its last of one image": (problem([1, 512, 7, 7], 128, [32] * 15), 1),
    "a transition": (problem([64, 256, 14, 14], 512, [32] * 24, unary="none", biased=False), 4),
    "fp16": (problem(*DENSE, dtype="float16"), 3),
    "an A100": (problem(*DENSE, arch=A100), 3),
    "parts that fill a step": (problem([64, 128, 28, 28], 128, (64, 64)), 1),
    "wide parts": (problem([64, 128, 28, 28], 128, (128, 128)), 0),
    "two widths": (problem([64, 128, 28, 28], 128, (32, 64)), 0),
    "odd widths": (problem([64, 128, 28, 28], 128, (12, 12)), 0),
    "contiguous": (problem(*DENSE, layout=""), 0),
    "fp32": (problem(*DENSE, dtype="float32"), 0),
    "no images": (problem([0, 128, 28, 28], 128, (32,)), 0),
    "an MI300X": (problem(*DENSE, arch=MI300X), 0),
}


@pytest.mark.parametrize("name", OFFERED)
def test_what_is_offered(name):
    """Together beside what there is apart, of which the first is Inductor's."""
    found, count = OFFERED[name]
    calls = library.calls(found)
    assert calls[0].name == "aten.convolution"
    assert [call.apart for call in calls] == [True] * (len(calls) - count) + [False] * count
    assert all(why_unknown(call.choice) is None for call in calls)


@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("unary", ["none", "relu", "silu"])
@pytest.mark.parametrize("biased", [False, True])
def test_every_call_computes_the_same(unary, biased, parts):
    """In fp64, so that only the order of the sums is another: what torch's own ops make."""
    found = problem([3, 16, 5, 4], 7, [8] * parts, unary=unary, biased=biased)
    small = tuner.to_float64(found)
    inputs = inputs_of(small, torch.device("cpu"), seed=0)
    given = dict(zip(operands_by_name(small), inputs, strict=True))
    more = [given[f"more{i}"] for i in range(parts)]
    stats = (given[name] for name in ("mean", "variance", "gamma", "beta"))
    image = F.relu(F.batch_norm(torch.cat([given["x"], *more], 1), *stats, eps=1e-5))
    wanted = F.conv2d(image, given["weight"], given.get("bias"))
    wanted = epilogue.apply(wanted, None, "none", unary, [])
    calls = [c for c in lowering.CALLS if c.name in ("aten.convolution", batch_norm_relu.NAME)]
    assert len(calls) == 1 + len(batch_norm_relu.TILES)
    for call in calls:
        made = tuner.function_of(small, call.compute)(*inputs)
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


def test_a_norm_of_its_own_without_scale_and_shift_is_one_too():
    x, mean = torch.randn(2, 8, 3, 3, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    variance, weight = mean.abs() + 1, torch.randn(4, 8, 1, 1, dtype=torch.float64)
    given = x, weight, None, None, None, mean, variance, 1e-5, [], "none", []
    wanted = F.conv2d(F.relu(F.batch_norm(x, mean, variance, eps=1e-5)), weight)
    (call,) = (c for c in lowering.CALLS if c.parameters == vars(batch_norm_relu.TILES[0]))
    for made in (torch.ops.ipex.conv_preactivated(*given), call.compute(*given)):
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


def test_neighbors_differ_in_batches_parts_and_weights():
    ours, alone = problem(*DENSE), problem([64, 256, 14, 14], 128)
    family, images = batches.family(ours)
    assert batches.family(problem([8, 128, 28, 28], 128, (32, 32, 32))) == (family, 8)
    assert images == 64
    assert nearest_shape.kind(ours) == nearest_shape.kind(
        problem([64, 256, 14, 14], 128, [32] * 20)
    )
    assert nearest_shape.kind(ours) != nearest_shape.kind(alone)
    assert nearest_shape.kind(alone) == nearest_shape.kind(problem([64, 512, 7, 7], 128))
    assert nearest_shape.kind(alone) != nearest_shape.kind(problem([64, 512, 7, 7], 256))
    assert nearest_shape.kind(ours) != nearest_shape.kind(problem(*DENSE, biased=False))
    assert nearest_shape._sizes(ours)[1] == nearest_shape._sizes(problem([64, 224, 28, 28], 128))[1]


def test_variances_are_above_zero():
    found = tuner.to_float64(problem(*DENSE))
    given = dict(
        zip(operands_by_name(found), inputs_of(found, torch.device("cpu"), seed=0), strict=True)
    )
    assert given["variance"].min() >= 1
    assert given["mean"].min() < 0


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def errors(request, tmp_path_factory):
    """Of each case by itself, in one process in which Triton interprets."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path_factory.mktemp("home"))}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, batch_norm_relu_cases.__file__, request.param]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", batch_norm_relu_cases.INTERPRETED)
def test_values_by_the_interpreter(dtype, errors):
    """Into memory full of NaN."""
    assert len(errors[dtype]) >= len(batch_norm_relu_cases.INTERPRETED[dtype])
    assert max(errors[dtype]) <= batch_norm_relu_cases.CLOSE[dtype]


def test_what_is_not_finite_stays_so(errors):
    assert max(errors["odd"]) <= batch_norm_relu_cases.CLOSE["float32"]


SPILLED = 80  # bytes of the largest tiles, and none by Triton 3.6
# Whole steps, and a last one that is half empty; narrow parts; none.
COMPILED = [
    *itertools.product(
        batch_norm_relu.TILES,
        ((256, 32, 24), (64, 32, 3), (200, 24, 5), (128, 0, 0)),
        ("bfloat16", "float16"),
    )
]


@pytest.mark.parametrize(
    ("tile", "widths", "dtype"), few_with_each(COMPILED, lambda *each: each), ids=str
)
def test_compiled_for_hopper(tile, widths, dtype):
    """What is scaled goes from registers to the tensor cores; all is on its way some steps before,
    by vectors of 16 bytes."""
    constants = batch_norm_relu.constants(4099, 520, *widths, True, tile) | {"ALLOW_TF32": False}
    text = source(batch_norm_relu.SOURCE, constants, 520, epilogue=False)
    types = signature(("X", "A", "W", *(f"P{i}" for i in range(widths[2]))), dtype)
    made = binary(text, types | {"A": "*fp32"}, tile, "h200")
    within_limits(made, "h200", SPILLED)
    ptx = made.asm["ptx"]
    if tile.BLOCK_M >= 64:
        products = re.findall(r"wgmma\.mma_async\.sync[^;]+;", ptx)
        left = {re.search(r"\}\s*,\s*(\{|%rd)", product)[1] for product in products}
        assert left == {"{"}, "it comes from shared memory"
    copied = {int(size, 16) for size in re.findall(r"cp\.async\.c.+\], (0x\w+)", ptx)}
    assert 16 in copied
    assert min(copied) >= 4  # of what scales and shifts; a number of 16 bits comes by no copy
    assert made.metadata.shared <= tile.shared(itemsize=2)


def together(node):
    """Our kernel, whatever is offered."""
    if node.target is not torch.ops.ipex.conv_preactivated.default:
        return None, "choice", "Inductor's"
    problem = problem_of(node, h200.NAME, {})
    assert len(operands_by_name(problem)) == len(problem.operands), "each operand has a name"
    call = next(call for call in lowering.CALLS if call.name == batch_norm_relu.NAME)
    return call.compute, "choice", call.name


def rewritten(fn, *sizes, choose=together, changing=(), dtype=torch.bfloat16):
    """The graph of `fn` on a described H200 after the pass, and what that reports.

    Its inputs are weights but for those numbered as `changing`, and images.
    """
    report = GraphReport()
    with described_gpu.device(find_target("h200")), FakeTensorMode() as mode, torch.no_grad():
        inputs = [torch.empty(size, dtype=dtype, device="cuda") for size in sizes]
        inputs = [x.to(memory_format=LAST) if x.dim() == 4 else x for x in inputs]
        gm = make_fx(fn, decomposition_table=reduced_table(WHOLE))(*inputs)
        gm.graph.eliminate_dead_code()
        given = gm.graph.find_nodes(op="placeholder")
        weights = {n for i, n in enumerate(given) if i not in changing}
        with V.set_fake_mode(mode):
            place(gm.graph, choose, weights, reduced_table(WHOLE), report)
    gm.graph.lint()
    return gm, report


def images(gm, op):
    """The nodes of that op that make images."""
    found = gm.graph.find_nodes(op="call_function", target=op)
    return [node for node in found if node.meta["val"].dim() == 4]


def norm(x, *stats):
    return aten._native_batch_norm_legit_no_training(x, *stats, 0.1, 1e-5)[0]


IMAGE, PART, STATS, WEIGHT = (4, 32, 7, 7), (4, 16, 7, 7), [(64,)] * 4, (24, 64, 1, 1)
SIZES = (IMAGE, PART, PART, WEIGHT, *STATS)


def dense(x, y, z, weight, *stats):
    return F.conv2d(F.relu(norm(torch.cat([x, y, z], 1), *stats)), weight)


def activated(x, y, z, weight, *stats):
    return F.relu(dense(x, y, z, weight, *stats))


def alone(x, weight, *stats):
    return F.conv2d(F.relu(norm(x, *stats)), weight)


def alone_beside_nothing(x, weight, *stats):
    return F.conv2d(F.relu(norm(torch.cat([x], 1), *stats)), weight)


def twice_one(x, y, weight, *stats):
    return F.conv2d(F.relu(norm(torch.cat([x, y, y], 1), *stats)), weight)


def also_read(x, y, z, weight, *stats):
    whole = torch.cat([x, y, z], 1)
    return F.conv2d(F.relu(norm(whole, *stats)), weight), whole


def along_lines(x, y, weight, *stats):
    return F.conv2d(F.relu(norm(torch.cat([x, y], 2), *stats)), weight)


# With the number of images that the kernel reads.
FORMS = {
    "side by side": (dense, SIZES, 3),
    "with a relu behind": (activated, SIZES, 3),
    "one image": (alone, ((4, 64, 7, 7), WEIGHT, *STATS), 1),
    "one image side by side": (alone_beside_nothing, ((4, 64, 7, 7), WEIGHT, *STATS), 1),
    "one twice": (twice_one, (IMAGE, PART, WEIGHT, *STATS), 3),
    "read elsewhere": (also_read, SIZES, 1),
    "along lines": (along_lines, ((4, 64, 7, 7), (4, 64, 7, 7), WEIGHT, *STATS), 1),
}


@pytest.mark.parametrize("name", FORMS)
def test_one_op_reads_the_parts(name):
    """Nobody writes them side by side, but where somebody else reads that, or lines are joined."""
    fn, sizes, parts = FORMS[name]
    asked = []

    def choose(node):
        asked.append(node)
        return together(node)

    gm, report = rewritten(fn, *sizes, choose=choose)
    ops = targets(gm)
    assert ops.count("ipex.preactivated_rows.default") == 1
    assert "aten.convolution.default" not in ops
    assert len(images(gm, aten.cat.default)) == (fn in (also_read, along_lines))
    assert not images(gm, aten.clone.default)
    assert not [op for op in ops if "batch_norm" in op]
    assert [event.subject for event in report.events if event.kind == "choice"] == [NAME]
    (node,) = asked
    assert 1 + len(node.args[8]) == parts


@pytest.mark.parametrize("name", FORMS)
def test_the_graph_computes_the_same(name):
    """In fp64, rewritten as that of another device and called on the CPU."""
    fn, sizes, _ = FORMS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(size, dtype=torch.float64) for size in sizes]
    inputs = [x.to(memory_format=LAST) if x.dim() == 4 else x for x in inputs]
    inputs[-1] = inputs[-1].abs() + 0.5
    mode, gm = traced(fn, *inputs, table=reduced_table(WHOLE))
    gm.graph.eliminate_dead_code()
    weights = {n for n in gm.graph.nodes if n.op == "placeholder"}
    with V.set_fake_mode(mode):
        place(gm.graph, together, weights, reduced_table(WHOLE), GraphReport())
    gm.recompile()
    assert "ipex.preactivated_rows.default" in targets(gm)
    torch.testing.assert_close(gm(*inputs), fn(*inputs), rtol=1e-12, atol=1e-12)


def test_nothing_known_leaves_the_graph():
    gm, report = rewritten(dense, *SIZES, choose=library.Chooser({}))
    assert len(images(gm, aten.cat.default)) == len(images(gm, aten.convolution.default)) == 1
    assert "ipex.preactivated_rows.default" not in targets(gm)
    (event,) = report.events
    assert "nothing is recorded" in event.reason or "does not fit" in event.reason


@pytest.mark.parametrize("off", [(), (NAME,), ("*",)])
def test_among_all_rules_it_can_be_left_out(off, monkeypatch):
    """Behind the fold of the norm that follows, whose relu is the convolution's."""

    def layer(x, y, z, weight, gamma, beta, mean, variance, *others):
        made = dense(x, y, z, weight, gamma, beta, mean, variance)
        return F.relu(norm(made, *others))

    def weights_of(graph):
        given = graph.find_nodes(op="placeholder")[3:]
        return {*given, *weight_only(graph, given)}

    monkeypatch.setattr(pass_context, "weights_of", weights_of)
    assert NAME in RULE_NAMES
    report, settings = GraphReport(), PassSettings(frozenset(off), choose=together)
    with described_gpu.device(find_target("h200")), FakeTensorMode() as mode, torch.no_grad():
        inputs = [
            torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in (*SIZES, *[(24,)] * 4)
        ]
        inputs = [x.to(memory_format=LAST) if x.dim() == 4 else x for x in inputs]
        gm = make_fx(layer, decomposition_table=reduced_table(WHOLE))(*inputs)
        gm.graph.eliminate_dead_code()
        with V.set_fake_mode(mode):
            JointPass("", settings, report, [])(gm.graph)
    ops = targets(gm)
    assert ("ipex.preactivated_rows.default" in ops) == (not off)
    assert len(images(gm, aten.cat.default)) == bool(off)
    if not off:
        assert "aten.convolution.default" not in ops
        assert ops.count("aten.relu.default") == 1


def relu_read(x, y, z, weight, *stats):
    image = F.relu(norm(torch.cat([x, y, z], 1), *stats))
    return F.conv2d(image, weight), image


def norm_read(x, y, z, weight, *stats):
    image = norm(torch.cat([x, y, z], 1), *stats)
    return F.conv2d(F.relu(image), weight), image


def another_activation(x, y, z, weight, *stats):
    return F.conv2d(F.silu(norm(torch.cat([x, y, z], 1), *stats)), weight)


def added(x, y, z, weight, *stats):
    return F.conv2d(F.relu(torch.cat([x, y, z], 1) + 1), weight)


def of_the_batch(x, y, z, weight, gamma, beta, *stats):
    normed = aten._native_batch_norm_legit.no_stats
    image = normed(torch.cat([x, y, z], 1), gamma, beta, True, 0.1, 1e-5)[0]
    return F.conv2d(F.relu(image), weight)


def rounded_elsewhere(x, y, z, weight, *stats):
    wide = norm(torch.cat([x, y, z], 1).float(), *(s.float() for s in stats))
    return F.conv2d(F.relu(wide).bfloat16(), weight)


def around(**window):
    def fn(x, y, z, weight, *stats):
        return F.conv2d(F.relu(norm(torch.cat([x, y, z], 1), *stats)), weight, **window)

    return fn


NEAR = {
    "who reads the relu too": (relu_read, SIZES),
    "who reads the norm too": (norm_read, SIZES),
    "another activation": (another_activation, SIZES),
    "no norm": (added, SIZES),
    "statistics of the batch": (of_the_batch, SIZES),
    "another dtype": (rounded_elsewhere, SIZES),
    "a window": (around(padding=1), (*SIZES[:3], (24, 64, 3, 3), *STATS)),
    "a stride": (around(stride=2), SIZES),
    "padding": (around(padding=1), SIZES),
    "groups": (around(groups=2), (*SIZES[:3], (24, 32, 1, 1), *STATS)),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay_apart(name):
    fn, sizes = NEAR[name]
    gm, report = rewritten(fn, *sizes)
    assert "ipex.preactivated_rows.default" not in targets(gm)
    assert not report.events


def test_sizes_that_vary_stay_apart():
    """A batch that is a symbol."""
    inputs = [torch.empty(size, device="meta") for size in SIZES]
    gm = make_fx(dense, reduced_table(WHOLE), tracing_mode="symbolic")(*inputs)
    gm.graph.eliminate_dead_code()
    report, weights = GraphReport(), {*gm.graph.find_nodes(op="placeholder")}
    (relu,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    assert isinstance(relu.meta["val"].shape[0], torch.SymInt)
    place(gm.graph, together, weights, reduced_table(WHOLE), report)
    assert "ipex.preactivated_rows.default" not in targets(gm)
    assert not report.events


@pytest.mark.parametrize("number", [4, 7])
def test_a_norm_of_what_may_change_stays_apart(number):
    gm, _ = rewritten(dense, *SIZES, changing=[number])
    assert "ipex.preactivated_rows.default" not in targets(gm)


@pytest.mark.sampled("DenseNet's")
@pytest.mark.parametrize("name", ["DenseNet's", "a transition"])
def test_one_kernel_with_its_epilogue(name, tmp_path, monkeypatch):
    """Beside what makes the norm's vectors, which is work on weights."""
    found, _ = OFFERED[name]
    call = next(c for c in library.calls(found) if not c.apart)
    code = h200.code_of_call(found, call, tmp_path, monkeypatch)
    kernels = re.findall(r"(triton_\w+?)_fused(\w*)\.run\(", code)
    (what,) = [what for kind, what in kernels if kind == "triton_tem"]
    assert ("relu" in what) == (name == "DenseNet's")
    assert not [kind for kind, what in kernels if "cat" in what]
    assert "extern_kernels" not in code.split("def call")[1]
