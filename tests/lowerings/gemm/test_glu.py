"""A gated pair of layers in one kernel: offers, graphs, values by the interpreter, code."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor.autotune import batches, nearest_shape
from ipex_inductor.autotune.space import why_unknown
from ipex_inductor.lowerings.gemm import glu as lowering
from ipex_inductor.lowerings.problem import shapes
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import tuner
from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.passes.engine.rule import apply_rules
from ipex_inductor.passes.engine.whole_ops import WHOLE, reduced_table
from ipex_inductor.passes.fusion.joined import GATED
from ipex_inductor.passes.fusion.library import place
from ipex_inductor.passes.fusion.linear import RULES
from ipex_inductor.prebuild import described as described_gpu
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import find_target
from ipex_inductor.templates.triton import glu
from support import h200
from support.case_sampling import few_with_each
from support.cases import glu_cases
from support.meta_device import targets
from support.rendered_templates import binary, signature, source, usage

pytestmark = pytest.mark.unit

A100, MI300X = "sm_80:NVIDIA-A100-SXM4-80GB", "gfx942:AMD-Instinct-MI300X"


def problem(rows, columns, terms, unary="silu", dtype="bfloat16", arch=h200.NAME, biased=False):
    """`rows` may be several sizes."""
    sizes = "x".join(map(str, (*rows, terms) if isinstance(rows, tuple) else (rows, terms)))
    biases = f"{columns} {columns}" if biased else "gate_bias=None bias=None"
    weights = f"{columns}x{terms} {columns}x{terms}"
    line = f"ipex.gated_linear.default {dtype} {sizes} {weights} {biases} unary='{unary}'"
    (found,) = shapes.problems([line], arch, {})
    return found


LLAMA = (8192, 8192, 2048)
OFFERED = {
    "Llama's": (problem(*LLAMA), 2),
    "fp16, with biases": (problem(*LLAMA, "gelu", "float16", biased=True), 2),
    "rows by texts": (problem((8, 1024), 8192, 2048), 2),
    "narrow": (problem(8192, 64, 2048), 1),
    "fp32": (problem(*LLAMA, dtype="float32"), 0),
    "few rows": (problem(512, 8192, 2048), 0),
    "few terms": (problem(8192, 8192, 128), 0),
    "odd terms": (problem(8192, 8192, 2047), 0),
    "no rows": (problem(0, 8192, 2048), 0),
    "another activation": (problem(*LLAMA, "relu"), 0),
    "an A100": (problem(*LLAMA, arch=A100), 0),
    "an MI300X": (problem(*LLAMA, arch=MI300X), 0),
}


@pytest.mark.parametrize("name", OFFERED)
def test_what_is_offered(name):
    found, count = OFFERED[name]
    calls = library.calls(found)
    assert [call.name for call in calls] == ["aten.addmm", *[glu.NAME] * count]
    assert all(why_unknown(call.choice) is None for call in calls)


def test_a_bias_of_one_layer_alone_is_not_the_templates():
    both = problem(4096, 1024, 512, biased=True)
    constants = {**both.constants, "bias": None}
    one = replace(both, operands=both.operands[:4], constants=constants)
    assert len(library.calls(both)) == 3
    assert [call.name for call in library.calls(one)] == ["aten.addmm"]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("unary", glu.UNARY)
def test_every_call_computes_the_same(unary, biased):
    """In fp64, so that only the order of the sums is another: what two layers of torch's make."""
    small = tuner.to_float64(problem((3, 5), 7, 16, unary, biased=biased))
    inputs = inputs_of(small, torch.device("cpu"), seed=0)
    x, gate, weight, *biases = inputs
    opening, opened = (
        F.linear(x, factor, bias)
        for factor, bias in zip((gate, weight), biases or (None, None), strict=True)
    )
    wanted = UNARY[unary].fn(opening) * opened
    for call in lowering.CALLS:
        made = tuner.function_of(small, call.compute)(*inputs)
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


def test_what_is_random_hides_neither_product():
    x, gate, weight, *_ = inputs_of(
        tuner.to_float64(problem(64, 96, 256)), torch.device("cpu"), seed=0
    )
    for factor in (gate, weight):
        assert F.linear(x, factor).std().item() == pytest.approx(1.0, abs=0.1)


def test_neighbors_differ_in_rows_and_weights():
    ours, more = problem(8192, 8192, 2048), problem((2, 8192), 8192, 2048)
    assert batches.family(ours)[0] == batches.family(problem(4096, 8192, 2048))[0]
    assert batches.family(more) == batches.family(problem(16384, 8192, 2048))
    assert nearest_shape.kind(ours) == nearest_shape.kind(problem(8192, 14336, 4096))
    assert nearest_shape.kind(ours) != nearest_shape.kind(problem(8192, 8192, 2048, biased=True))
    assert nearest_shape.kind(ours) != nearest_shape.kind(problem(8192, 8191, 2048))  # uneven rows


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def errors(request, tmp_path_factory):
    """Of each case by itself, in one process in which Triton interprets."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path_factory.mktemp("home"))}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, glu_cases.__file__, request.param]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", glu_cases.DTYPES)
def test_values_by_the_interpreter(dtype, errors):
    """Into memory full of NaN."""
    assert len(glu_cases.CASES) >= 40
    assert len(errors[dtype]) in map(len, glu_cases.INTERPRETED.values())
    assert max(errors[dtype]) <= glu_cases.CLOSE[dtype]


def test_what_is_not_finite_stays_so(errors):
    assert max(errors["odd"]) <= glu_cases.CLOSE["float32"]


COMPILED = [*itertools.product(glu.TILES, glu.UNARY, (False, True), ("bfloat16", "float16"))]


@pytest.mark.parametrize(
    ("tile", "unary", "biased", "dtype"), few_with_each(COMPILED, lambda *each: each), ids=str
)
def test_compiled_for_hopper(tile, unary, biased, dtype):
    """Nothing spills, and as many programs as the lowering starts fit on a multiprocessor."""
    target = find_target("h200")
    constants = glu.constants(4096, 3000, 768, biased, unary, tile, 132) | {"ALLOW_TF32": False}
    names = ("X", "G", "W", "GATE_BIAS") if biased else ("X", "G", "W")
    rendered = source(glu.SOURCE, constants, 3000, epilogue=False)
    made = binary(rendered, signature(names, dtype), tile, "h200")
    registers, spilled = usage(made)
    programs = target.shared_memory // tile.shared(2)
    assert spilled == 0
    assert registers * 32 * tile.num_warps * programs <= target.registers
    assert made.metadata.shared <= tile.shared(2)
    assert "wgmma" in made.asm["ptx"]
    assert "cp.async.bulk.tensor" in made.asm["ptx"]


def mlp(x, gate, weight, *gate_bias):
    return F.silu(F.linear(x, gate, *gate_bias)) * F.linear(x, weight)


def together(node):
    """Our kernel of a pair, whatever is offered."""
    if node.target is not torch.ops.ipex.gated_linear.default:
        return None, "choice", "Inductor's"
    (call, *_) = (call for call in lowering.CALLS if call.parameters)
    return call.compute, "choice", call.name


def rewritten(fn, *sizes, choose=together, dtype=torch.bfloat16, known=4):
    """The graph of `fn` on a described H200 after our rules, and what they report.

    Of its inputs those after the first are weights, `known` of them.
    """
    table, report = reduced_table(frozenset(WHOLE)), GraphReport()
    with described_gpu.device(find_target("h200")), FakeTensorMode() as mode, torch.no_grad():
        inputs = [torch.empty(size, dtype=dtype, device="cuda") for size in sizes]
        gm = make_fx(fn, decomposition_table=table)(*inputs)
        gm.graph.eliminate_dead_code()
        weights = {n for n in gm.graph.nodes if n.op == "placeholder"}
        weights = {*[n for n in gm.graph.nodes if n in weights][1 : 1 + known]}
        with V.set_fake_mode(mode):
            apply_rules(RULES, gm.graph, weights, frozenset(), report)
            place(gm.graph, choose, weights, table, report)
    gm.graph.lint()
    return targets(gm), report


MANY, WEIGHT, BIAS = (2, 1024, 64), (128, 64), (128,)


@pytest.mark.parametrize("unary", ["silu", "gelu"])
@pytest.mark.parametrize("biases", [0, 2])
def test_both_are_one_op(unary, biases):
    def fn(x, gate, weight, *biases):
        opening, opened = map(F.linear, (x, x), (gate, weight), biases or (None, None))
        return getattr(F, unary)(opening) * opened

    ops, report = rewritten(fn, MANY, WEIGHT, WEIGHT, *[BIAS] * biases)
    assert ops.count("ipex.gated_rows.default") == 1
    assert not {"aten.mm.default", "aten.addmm.default"} & {*ops}
    said = [(event.kind, event.subject) for event in report.events]
    assert said == [("fired", f"{unary}(linear)*linear"), ("choice", GATED)]


def test_layers_of_no_columns_are_left_to_torch():
    ops, _ = rewritten(mlp, MANY, (0, 64), (0, 64), choose=library.Chooser({}))
    assert "ipex.gated_rows.default" not in ops


def test_nothing_known_makes_one_product_of_both():
    ops, _ = rewritten(mlp, MANY, WEIGHT, WEIGHT, choose=library.Chooser({}))
    assert ops.count("aten.cat.default") == 1
    assert ops.count("aten.mm.default") == 1


def read_twice(x, gate, weight):
    opening = F.silu(F.linear(x, gate))
    return opening * F.linear(x, weight), opening


NEAR = {
    "few rows": (mlp, (2, 16, 64), WEIGHT, WEIGHT),
    "one bias": (mlp, MANY, WEIGHT, WEIGHT, BIAS),
    "who reads the gate too": (read_twice, MANY, WEIGHT, WEIGHT),
    "two inputs": (
        lambda x, gate, weight, y: F.silu(F.linear(x, gate)) * F.linear(y, weight),
        *(MANY, WEIGHT, WEIGHT, MANY),
    ),
    "another activation": (
        lambda x, gate, weight: F.relu(F.linear(x, gate)) * F.linear(x, weight),
        *(MANY, WEIGHT, WEIGHT),
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay_apart(name):
    fn, *sizes = NEAR[name]
    ops, report = rewritten(fn, *sizes, known=2)
    assert "ipex.gated_rows.default" not in ops
    assert GATED not in [event.subject for event in report.events]
