"""A scaled image and its convolution in one kernel: offers, graphs, values by the interpreter."""

import itertools
import json
import os
import subprocess
import sys

import h200
import pytest
import scaled_cases
import torch
import torch.nn.functional as F
from placing import LAST, targets
from quick_ones import few_with_each
from rendered import binary, signature, source, within_limits
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor.autotune import batches, neighbors
from ipex_inductor.autotune.space import why_unknown
from ipex_inductor.decisions import GraphReport
from ipex_inductor.lowerings import library, shapes, tuner
from ipex_inductor.lowerings import scaled as lowering
from ipex_inductor.lowerings.workload import inputs_of
from ipex_inductor.ops import epilogue
from ipex_inductor.passes.conv import RULES
from ipex_inductor.passes.joined import SCALED
from ipex_inductor.passes.library import place
from ipex_inductor.passes.rule import apply_rules
from ipex_inductor.passes.whole_ops import WHOLE, reduced_table
from ipex_inductor.prebuild import described as described_gpu
from ipex_inductor.target import described
from ipex_inductor.templates import scaled

A100, XE = "sm_80:NVIDIA-A100-SXM4-80GB", "xe:bmg"


def problem(x, columns, dtype="bfloat16", arch=h200.NAME, unary="none", added=False, biased=True):
    """`x` [B, C, H, W]; with an addend or without."""
    by = "x".join
    image = by(map(str, x))
    made = by(map(str, (x[0], columns, *x[2:])))
    line = (
        f"ipex.conv_scaled.default {dtype} {image}:L {x[0]}x{x[1]}x1x1:L {columns}x{x[1]}x1x1:L "
        f"{columns if biased else 'bias=None'} {f'{made}:L' if added else 'other=None'} "
        f"binary='{'add' if added else 'none'}' unary='{unary}' scalars=()"
    )
    (found,) = shapes.problems([line], arch, {})
    return found


EFFICIENTNET = [64, 240, 28, 28], 40
OFFERED = {
    "EfficientNet's": (problem(*EFFICIENTNET), 2),
    "added": (problem(*EFFICIENTNET, added=True), 2),
    "RegNetY's, in fp16": (
        problem([64, 576, 14, 14], 576, "float16", unary="relu", added=True),
        3,
    ),
    "an A100": (problem(*EFFICIENTNET, arch=A100), 2),
    "fp32": (problem(*EFFICIENTNET, dtype="float32"), 0),
    "no images": (problem([0, 240, 28, 28], 40), 0),
}


@pytest.mark.parametrize("name", OFFERED)
def test_what_is_offered(name):
    """Together beside what there is apart, of which the first is Inductor's."""
    found, count = OFFERED[name]
    calls = library.calls(found)
    assert calls[0].name == "aten.convolution"
    assert [call.apart for call in calls] == [True] * (len(calls) - count) + [False] * count
    assert all(why_unknown(call.choice) is None for call in calls)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("added", "unary"), [(False, "none"), (True, "none"), (True, "relu")])
def test_every_call_computes_the_same(added, unary, biased):
    """In fp64, so that only the order of the sums is another: what torch's own ops make."""
    found = problem([3, 16, 5, 4], 7, unary=unary, added=added, biased=biased)
    small = tuner.widened(found)
    inputs = inputs_of(small, torch.device("cpu"), seed=0)
    x, scale, weight, *rest = inputs
    wanted = F.conv2d(x * scale, weight, rest.pop(0) if biased else None)
    binary = "add" if added else "none"
    wanted = epilogue.apply(wanted, rest[0] if added else None, binary, unary, [])
    fused = binary, unary
    calls = [c for c in lowering.CALLS if c.epilogues is None or fused in c.epilogues]
    assert len(calls) > len(scaled.TILES)
    for call in calls:
        if call.name.startswith(("aten.", "ipex.")) and not call.name.startswith("aten.mm"):
            made = tuner.function_of(small, call.whole)(*inputs)
            torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


def test_neighbors_differ_in_batches_and_weights():
    ours = problem(*EFFICIENTNET)
    assert batches.family(ours)[0] == batches.family(problem([8, 240, 28, 28], 40))[0]
    assert neighbors.kind(ours) == neighbors.kind(problem([64, 480, 14, 14], 80))
    assert neighbors.kind(ours) != neighbors.kind(problem(*EFFICIENTNET, added=True))


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Of each case by itself, in one process in which Triton interprets."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path_factory.mktemp("home"))}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, scaled_cases.__file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", scaled_cases.INTERPRETED)
def test_values_by_the_interpreter(dtype, errors):
    """Into memory full of NaN."""
    assert len(errors[dtype]) == len(scaled_cases.INTERPRETED[dtype])
    assert max(errors[dtype]) <= scaled_cases.CLOSE[dtype]


def test_what_is_not_finite_stays_so(errors):
    assert max(errors["odd"]) <= scaled_cases.CLOSE["float32"]


# Blocks of at most two images, and of many.
COMPILED = [*itertools.product(scaled.TILES, (784, 49), (False, True), ("bfloat16", "float16"))]


@pytest.mark.parametrize(
    ("tile", "pixels", "biased", "dtype"), few_with_each(COMPILED, lambda *each: each), ids=str
)
def test_compiled_for_hopper(tile, pixels, biased, dtype):
    constants = scaled.constants(64, pixels, 576, 200, biased, tile) | {"ALLOW_TF32": False}
    text = source(scaled.SOURCE, constants, 576)
    made = binary(text, signature(("X", "S", "W"), dtype), tile, "h200")
    within_limits(made, "h200", 0)
    assert "wgmma" in made.asm["ptx"]
    assert "cp.async" in made.asm["ptx"]
    assert made.metadata.shared <= tile.shared(pixels, 2) + 1024  # what layouts change through


def together(node):
    """Our kernel, whatever is offered."""
    if node.target is not torch.ops.ipex.conv_scaled.default:
        return None, "choice", "Inductor's"
    call = next(call for call in lowering.CALLS if call.name == scaled.NAME)
    return call.whole, "choice", call.name


def rewritten(fn, *sizes, choose=together):
    """The graph of `fn` on a described H200 after our rules, and what they report."""
    table, report = reduced_table(frozenset(WHOLE)), GraphReport()
    with described_gpu.device(described("h200")), FakeTensorMode() as mode, torch.no_grad():
        inputs = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
        inputs = [x.to(memory_format=LAST) if x.dim() == 4 else x for x in inputs]
        gm = make_fx(fn, decomposition_table=table)(*inputs)
        gm.graph.eliminate_dead_code()
        weights = {n for n in gm.graph.nodes if n.op == "placeholder"}
        with V.set_fake_mode(mode):
            apply_rules(RULES, gm.graph, weights, frozenset(), report)
            place(gm.graph, choose, weights, table, report)
    gm.graph.lint()
    return targets(gm), report


IMAGE, NUMBERS, WEIGHT, BIAS = (4, 32, 7, 7), (4, 32, 1, 1), (16, 32, 1, 1), (16,)
RESULT = (4, 16, 7, 7)


def plain(x, scale, weight, bias):
    return F.conv2d(x * scale.sigmoid(), weight, bias)


def turned(x, scale, weight, bias):
    return F.conv2d(scale.sigmoid() * x, weight, None)


def added(x, scale, weight, bias, other):
    return F.relu(F.conv2d(x * scale.sigmoid(), weight, bias) + other)


FORMS = {
    "plain": (plain, IMAGE, NUMBERS, WEIGHT, BIAS),
    "turned": (turned, IMAGE, NUMBERS, WEIGHT, BIAS),
    "added": (added, IMAGE, NUMBERS, WEIGHT, BIAS, RESULT),
}


@pytest.mark.parametrize("name", FORMS)
def test_both_are_one_op(name):
    fn, *sizes = FORMS[name]
    ops, report = rewritten(fn, *sizes)
    assert ops.count("ipex.scaled_rows.default") == 1
    assert not {"aten.convolution.default", "aten.mul.Tensor"} & {*ops}
    said = [event.subject for event in report.events if event.kind == "choice"]
    assert said == [SCALED]


def test_nothing_known_leaves_the_graph():
    ops, _ = rewritten(plain, IMAGE, NUMBERS, WEIGHT, BIAS, choose=library.Chooser({}))
    assert ops.count("aten.mul.Tensor") == ops.count("aten.convolution.default") == 1


def added_itself(x, scale, weight):
    product = x * scale
    return F.relu(F.conv2d(product, weight) + product)


def read_twice(x, scale, weight, bias):
    product = x * scale
    return F.conv2d(product, weight, bias), product


NEAR = {
    "who reads the product too": (read_twice, IMAGE, NUMBERS, WEIGHT, BIAS),
    "what it adds is the product": (
        added_itself,
        *(IMAGE, NUMBERS, (32, 32, 1, 1)),
    ),
    "a window": (
        lambda x, scale, weight: F.conv2d(x * scale, weight, padding=1),
        *(IMAGE, NUMBERS, (16, 32, 3, 3)),
    ),
    "a stride": (
        lambda x, scale, weight: F.conv2d(x * scale, weight, stride=2),
        *(IMAGE, NUMBERS, WEIGHT),
    ),
    "one number for all images": (
        lambda x, scale, weight: F.conv2d(x * scale, weight),
        *(IMAGE, (1, 32, 1, 1), WEIGHT),
    ),
    "two images": (
        lambda x, scale, weight: F.conv2d(x * scale, weight),
        *(IMAGE, IMAGE, WEIGHT),
    ),
    "groups": (
        lambda x, scale, weight: F.conv2d(x * scale, weight, groups=2),
        *(IMAGE, NUMBERS, (16, 16, 1, 1)),
    ),
    "another dtype": (
        lambda x, scale, weight: F.conv2d((x * scale.float()).bfloat16(), weight),
        *(IMAGE, NUMBERS, WEIGHT),
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay_apart(name):
    fn, *sizes = NEAR[name]
    ops, report = rewritten(fn, *sizes)
    assert "ipex.scaled_rows.default" not in ops
    assert SCALED not in [event.subject for event in report.events]
