"""The list of passes over a joint or inference graph: order, switches, errors, cached analyses."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ipex_inductor import backend
from ipex_inductor.config import CompileConfig
from ipex_inductor.errors import PassError
from ipex_inductor.passes import joint, pass_context
from ipex_inductor.passes.engine import packable
from ipex_inductor.passes.joint import BOTH, INFERENCE, PASSES, RULE_NAMES, SWITCHES, TRAINING
from ipex_inductor.passes.pass_context import ANY_RULE, Pass, PassContext, PassSettings
from ipex_inductor.reporting.decisions import GraphReport

pytestmark = pytest.mark.unit

aten = torch.ops.aten

IN_INFERENCE = """quantized values, attention copies, no-ops, fp8 linears, layout choice, batch
norm folding, convolutions before upsampling, activations, restatements, weight
transposes, attention, rules, int8 products, weight-only linears, linears on one
input, channels-last, strides, batch norm and relu, library calls, shared parts,
misread attention, decompositions, fp8, corrections"""
IN_TRAINING = """batch norm report, attention report, training rules, max pools, image calls,
weight gradient calls, misread attention, decompositions, fp8 cost, fp8 shared inputs,
fp8 records, fp8 report, corrections, moments, relu masks"""
UNSWITCHED = """weight transposes, library calls, image calls, weight gradient calls,
misread attention, decompositions, corrections"""
SWITCHED_ALONE = {
    "activations": "conv|view",
    "attention": "softmax(q@k)@v",
    "attention copies": "attention-copies",
    "batch norm and relu": "batch_norm+relu|conv",
    "channels-last": "channels-last",
    "convolutions before upsampling": "conv|upsample",
    "fp8": "fp8",
    "fp8 cost": "fp8 cost",
    "fp8 linears": "fp8",
    "fp8 records": "fp8",
    "fp8 report": "fp8",
    "fp8 shared inputs": "fp8 shared input",
    "int8 products": "int8",
    "layout choice": "channels-last",
    "linears on one input": "linear|linear",
    "max pools": "max-pool",
    "moments": "moments",
    "quantized values": "int8",
    "relu masks": "relu-mask",
    "shared parts": "shared-parts",
}


def names(text):
    return [name.strip() for name in text.replace("\n", " ").split(",")]


def small_graph(*inputs):
    """Return the graph of `softmax(x @ transpose(w))`, with fake values."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        values = torch.empty(3, 5), torch.empty(7, 5)
        x, w, *_ = (graph.placeholder(name) for name in ("x", "w", *inputs))
        for node, value in zip((x, w), values, strict=True):
            node.meta |= {"val": value, "desc": object()}
        transposed = graph.call_function(aten.permute.default, (w, [1, 0]))
        transposed.meta["val"] = values[1].t()
        product = graph.call_function(aten.mm.default, (x, transposed))
        product.meta["val"] = values[0] @ values[1].t()
        result = graph.call_function(aten._softmax.default, (product, -1, False))
        result.meta["val"] = product.meta["val"].softmax(-1)
    graph.output((result,))
    return graph


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def run(passes, monkeypatch, graph=None, report=None, **settings):
    monkeypatch.setattr(joint, "PASSES", tuple(passes))
    rewrite = joint.JointPass("a test", PassSettings(**settings), report or GraphReport(), [])
    rewrite(graph or small_graph())


def run_names(monkeypatch, off=(), graph=None, training=False):
    """Return the names of the passes that run, none of which does anything."""
    ran = []
    passes = [
        dataclasses.replace(each, run=lambda _, name=each.name: ran.append(name), condition=None)
        for each in PASSES
    ]
    run(passes, monkeypatch, graph, rules_off=frozenset(off), training=training)
    return ran


def test_inference_goes_through_its_passes_in_order(monkeypatch):
    assert run_names(monkeypatch) == names(IN_INFERENCE)


def test_training_goes_through_its_passes_in_order(monkeypatch):
    assert run_names(monkeypatch, training=True) == names(IN_TRAINING)


def test_a_traced_backward_makes_a_graph_one_for_training(monkeypatch):
    assert run_names(monkeypatch, graph=small_graph("tangents_1")) == names(IN_TRAINING)


def test_each_name_is_of_one_pass():
    assert len({each.name for each in PASSES}) == len(PASSES)


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_a_pass_is_off_with_its_switch_or_with_all_rules(each, monkeypatch):
    training = each.graphs is TRAINING
    everything = names(IN_TRAINING if training else IN_INFERENCE)
    switch = SWITCHED_ALONE.get(each.name)
    if switch:
        kept = [name for name in everything if SWITCHED_ALONE.get(name) != switch]
        assert each.name not in kept
        assert run_names(monkeypatch, {switch}, training=training) == kept
    assert each.switch == (switch or (None if each.name in names(UNSWITCHED) else ANY_RULE))
    kept = [name for name in everything if name in names(UNSWITCHED)]
    assert run_names(monkeypatch, {"*"}, training=training) == kept


def test_rules_of_other_names_switch_no_pass(monkeypatch):
    assert run_names(monkeypatch, {"conv+relu", "linear+gelu"}) == names(IN_INFERENCE)


def test_every_switch_is_a_name_that_users_may_give():
    assert {*SWITCHED_ALONE.values()} == SWITCHES
    given = ",".join(f"-{name}" for name in SWITCHES | RULE_NAMES)
    backend._check_rules(CompileConfig(rules=given))


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_an_error_names_the_pass_that_failed(each, monkeypatch):
    def fail(context):
        raise ZeroDivisionError("planted")

    passes = [
        dataclasses.replace(
            other, run=fail if other is each else lambda context: None, condition=None
        )
        for other in PASSES
    ]
    with pytest.raises(PassError) as raised:
        run(passes, monkeypatch, training=each.graphs is TRAINING)
    assert raised.value.came == f"ZeroDivisionError in pass {each.name!r}: planted"
    assert raised.value.todo == 'Please report it; options={"rules": "-*"} avoids the rules.'
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_condition_that_fails_names_its_pass(monkeypatch):
    passes = [Pass("first", BOTH, lambda c: None, condition=lambda c: 1 // 0)]
    with pytest.raises(PassError, match="ZeroDivisionError in pass 'first'"):
        run(passes, monkeypatch)


def test_a_graph_that_is_wrong_at_the_end_fails_in_the_lint(monkeypatch):
    def misplace(context):
        (product,) = context.graph.find_nodes(op="call_function", target=aten.mm.default)
        product.append(product.args[1])

    with pytest.raises(PassError, match=r"RuntimeError in the final lint: .*before"):
        run([Pass("misplacing", BOTH, misplace)], monkeypatch)


# Cached analyses.


@pytest.fixture
def static_weight(monkeypatch):
    monkeypatch.setattr(pass_context.compat, "static_inputs", lambda: [1])


def negate_weight(context):
    """Have the graph read the negated weight, which is a new weight-only node."""
    (w,) = (node for node in context.graph.nodes if node.target == "w")
    with context.graph.inserting_after(w):
        negated = context.graph.call_function(aten.neg.default, (w,))
    negated.meta["val"] = w.meta["val"]
    w.replace_all_uses_with(negated, delete_user_cb=lambda user: user is not negated)


def weights_seen(passes, monkeypatch):
    """Return the names of weights that are read before, between and behind `passes`."""
    seen = []

    def read(context):
        seen.append(sorted(node.name for node in context.weights))

    rows = [Pass("read", BOTH, read)]
    for each in passes:
        rows += [each, Pass("read", BOTH, read)]
    run(rows, monkeypatch)
    return seen


@pytest.mark.usefixtures("static_weight")
def test_weights_are_recomputed_after_a_pass_that_changes_them(monkeypatch):
    before, after = ["permute_default", "w"], ["neg_default", "permute_default", "w"]
    change = Pass("negation", BOTH, negate_weight, changes_weights=True)
    assert weights_seen([change], monkeypatch) == [before, after]
    other = Pass("negation", BOTH, negate_weight)
    assert weights_seen([other, change], monkeypatch)[:2] == [before, before]
    skipped = dataclasses.replace(change, condition=lambda c: False)
    assert weights_seen([other, skipped], monkeypatch) == [before] * 3


def test_weights_are_computed_once_when_they_are_read(monkeypatch):
    computed = []
    monkeypatch.setattr(pass_context, "weights_of", lambda graph: computed.append(graph) or set())
    nothing = Pass("nothing", BOTH, lambda c: None)
    run([nothing], monkeypatch)
    assert not computed
    assert weights_seen([nothing, nothing], monkeypatch) == [[]] * 3
    assert len(computed) == 1


def test_passes_that_make_other_weights_say_so():
    expected = ["batch norm folding", "convolutions before upsampling", "restatements"]
    expected += ["weight transposes", "channels-last"]
    assert [each.name for each in PASSES if each.changes_weights] == expected


@pytest.mark.usefixtures("static_weight")
def test_transposed_weights_are_among_the_weights(monkeypatch):
    """Of the two transposes in front of a product, the later passes see both."""
    graph = small_graph()
    (product,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    with FakeTensorMode(), graph.inserting_before(product):
        plain = graph.call_function(aten.relu.default, (product.args[1],))
        plain.meta["val"] = product.args[1].meta["val"]
    product.args = (product.args[0], plain)
    by_name = {each.name: each for each in PASSES}
    context = PassContext(graph, GraphReport(), PassSettings(), joint.WHOLE)
    count = len(context.weights)
    by_name["weight transposes"].apply(context)
    assert len(context.weights) == count + 2
    assert product.args[1] in context.weights


@pytest.mark.parametrize("is_preferred", [False, True])
def test_layout_is_converted_only_where_inductor_would(is_preferred, monkeypatch):
    converted = []
    monkeypatch.setattr(joint.channels_last, "is_preferred", lambda graph: is_preferred)
    monkeypatch.setattr(joint.channels_last, "convert", lambda *args: converted.append(args))
    run(PASSES, monkeypatch)
    assert len(converted) == is_preferred


# What surrounds the passes.


def test_a_report_shows_the_graph_before_rules_and_before_decompositions(monkeypatch):
    report, graph = GraphReport(stages={}), small_graph()
    run(PASSES, monkeypatch, graph, report, rules_off=frozenset("*"))
    assert [*report.stages] == ["traced", "rewritten"]
    assert all("aten._softmax" in text for text in report.stages.values())
    assert aten._softmax.default not in targets(graph)
    assert report.source == "passes"


@pytest.mark.parametrize("graphs", [INFERENCE, TRAINING])
def test_other_dtypes_of_products_are_for_inference_alone(graphs, monkeypatch):
    seen, dtypes = [], frozenset({torch.float16})
    look = Pass("look", BOTH, lambda c: seen.append(packable._besides.get()))
    run([look], monkeypatch, training=graphs is TRAINING, dtypes=dtypes)
    assert seen == [dtypes if graphs is INFERENCE else frozenset()]
    assert packable._besides.get() == frozenset()
