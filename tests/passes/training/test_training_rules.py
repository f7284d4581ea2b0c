"""Rules on training graphs: they fire where the backward reads the result, and gradients are right.

Right is what torch's own benchmarks call right, `torch._dynamo.utils.same`: as near to eager as the
tolerance, or to a float64 run as eager is.
"""

import copy
import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters, same
from torch._inductor import lowering

from ipex_inductor import compat, lowerings
from ipex_inductor.passes.training import training
from ipex_inductor.reporting import decisions
from support.helpers import has_kernels

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # torch's own, of its benchmarks

ADDEND = torch.randn(2, 3, 16)
# Epilogues whose backward reads the result, or nothing: a product has one of oneDNN's words.
FIRE = {
    "linear+relu": lambda y, x: F.relu(y),
    "linear+sigmoid": lambda y, x: torch.sigmoid(y),
    "linear+tanh": lambda y, x: torch.tanh(y),
    "linear+add": lambda y, x: y + x,
    "linear+sub": lambda y, x: y - x,
}


class Layers(nn.Module):
    """A layer of its own before each epilogue, and one result of each."""

    def __init__(self, epilogues, make=lambda: nn.Linear(16, 16)):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in epilogues)
        self.epilogues = list(epilogues)

    def forward(self, x):
        pairs = zip(self.epilogues, self.layers, strict=True)
        return [epilogue(layer(x), x) for epilogue, layer in pairs]


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="ipex", options={"strict": True}, **kwargs)


def step(model, x, fn):
    """Results and all gradients: of the input and of every parameter."""
    x = x.clone().requires_grad_()
    results = fn(x)
    sum(r.float().square().mean() for r in results).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    named = {f"result {i}": r.detach() for i, r in enumerate(results)}
    return {**named, "input": x.grad, **grads}


def check(model, x, **kwargs):
    """The rules that fired in a step of `model`, whose every number is right."""
    models = [model, copy.deepcopy(model), copy.deepcopy(model).double()]
    fns = [compiled(model, **kwargs), models[1], models[2]]
    inputs = [x, x, x.double()]
    ours, eager, truth = map(step, models, inputs, fns)
    for name, want in eager.items():
        got = ours[name]
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride()), name
        assert same(want, got, truth[name], tol=TOLERANCE[x.dtype]), name
    return Counter(counters["ipex"])


def events(kind):
    return {e.subject: e.reason for r in decisions.reports() for e in r.events if e.kind == kind}


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that reach the inner compiler, which runs them op by op."""
    seen = []

    def run(gm, example_inputs, **kwargs):
        seen.append(gm)

        def call(inputs):
            given = list(inputs)
            inputs.clear()
            return gm(*given)

        call._boxed_call = True
        return call

    monkeypatch.setattr(compat, "compile_inner", run)
    return seen


# Every two of the three.
PAIRS = {("2d", torch.float32, "static"), ("2d", torch.bfloat16, "dynamic")}
PAIRS |= {("3d", torch.float32, "dynamic"), ("3d", torch.bfloat16, "static")}
SHAPES, DYNAMIC = {"2d": (4, 16), "3d": (2, 3, 16)}, {"static": False, "dynamic": True}
HOW = [
    pytest.param(
        SHAPES[how[0]],
        how[1],
        DYNAMIC[how[2]],
        marks=[] if how in PAIRS else [pytest.mark.slow],
        id=f"{how[0]}-{how[1]}-{how[2]}",
    )
    for how in itertools.product(SHAPES, TOLERANCE, DYNAMIC)
]


@pytest.mark.parametrize(("shape", "dtype", "dynamic"), HOW)
def test_every_rule_fires_once_and_in_the_forward(graphs, shape, dtype, dynamic):
    model = Layers(FIRE.values()).to(dtype)
    fired = check(model, torch.randn(shape, dtype=dtype), dynamic=dynamic)
    assert fired == (dict.fromkeys(FIRE, 1) if has_kernels(dtype, training=True) else {})
    if not fired:
        return
    forward, backward = graphs
    ours = {"op": "call_function", "target": torch.ops.ipex.linear.default}
    assert len(forward.graph.find_nodes(**ours)) == len(FIRE)
    assert not backward.graph.find_nodes(**ours)  # saved, not computed again


# Quickly one; every pair of them runs op by op above.
CODE = {(torch.float32, False, True)}


@pytest.mark.parametrize(
    ("dtype", "dynamic", "bias"),
    [
        pytest.param(*how, marks=[] if how in CODE else [pytest.mark.slow])
        for how in itertools.product(TOLERANCE, (False, True), (False, True))
    ],
    ids=str,
)
def test_every_rule_in_generated_code(dtype, dynamic, bias):
    model = Layers(FIRE.values(), lambda: nn.Linear(16, 16, bias=bias)).to(dtype)
    x = torch.randn(2, 3, 16, dtype=dtype)
    wanted = dict.fromkeys(FIRE, 1) if has_kernels(dtype, training=True) else {}
    assert check(model, x, dynamic=dynamic) == wanted


def test_the_table_is_what_is_tested():
    assert {r.name for r in training.RULES if r.replacement} >= set(FIRE)


NEAR_MISSES = {
    "linear+gelu": (lambda y, x: F.gelu(y), "the backward reads"),
    "linear+silu": (lambda y, x: F.silu(y), "the backward reads"),
    "linear+mul": (lambda y, x: y * x, "the backward reads"),
    "linear+relu": (lambda y, x: F.relu(y) + y.sum(), "has 2 users"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_the_backward_reads_is_kept(op_by_op, name):
    epilogue, reason = NEAR_MISSES[name]
    assert not check(Layers([epilogue]), torch.randn(2, 3, 16))
    assert reason in events("missed")[name]


def conv():
    return nn.Conv2d(4, 4, 3, padding=1)


IMAGE = torch.randn(2, 4, 5, 5)
LEFT = {
    "linear+exp": (lambda y, x: torch.exp(y), nn.Linear, "oneDNN has no such epilogue"),
    "linear+add+relu": (lambda y, x: F.relu(y + x), nn.Linear, "not both"),
    "conv+relu": (lambda y, x: F.relu(y), conv, "training_rules.py"),
    "conv+add": (lambda y, x: y + x, conv, "training_rules.py"),
    "conv+add+relu": (lambda y, x: F.relu(y + x), conv, "training_rules.py"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_inductor_is_said(op_by_op, name):
    epilogue, make, reason = LEFT[name]
    model = Layers([epilogue], make if make is conv else lambda: make(16, 16))
    fired = check(model, IMAGE if make is conv else torch.randn(2, 3, 16))
    assert name not in fired
    assert reason in events("left")[name]


def test_a_weight_without_gradient(op_by_op):
    """Frozen, on an input without gradient: no backward reads the product, so GELU is fused."""
    model = nn.Sequential(nn.Linear(16, 16).requires_grad_(False), nn.GELU(), nn.Linear(16, 16))
    x, twin = torch.randn(4, 16), copy.deepcopy(model)
    for fn in (compiled(model), twin):
        fn(x).square().sum().backward()
    assert counters["ipex"] == {"linear+gelu": 1}
    torch.testing.assert_close(model[2].weight.grad, twin[2].weight.grad)


def test_frozen_weights_below_an_input_with_gradient(op_by_op):
    model = Layers([FIRE["linear+relu"], NEAR_MISSES["linear+gelu"][0]]).requires_grad_(False)
    assert check(model, torch.randn(4, 16)) == {"linear+relu": 1}
    assert "the backward reads" in events("missed")["linear+gelu"]


def test_eval_with_grad_on_is_training(op_by_op):
    assert check(Layers([FIRE["linear+relu"]]).eval(), torch.randn(4, 16)) == {"linear+relu": 1}
    assert not events("hoisted")  # nothing is packed


def test_the_weight_of_the_moment_is_used(op_by_op):
    """Nothing derived from a weight is kept between steps."""
    model = Layers([FIRE["linear+relu"], FIRE["linear+tanh"]])
    twin = copy.deepcopy(model)
    x = torch.randn(4, 16)
    fns = [compiled(model), twin]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin)]
    for _ in range(3):
        losses = []
        for fn, optimizer in zip(fns, optimizers, strict=True):
            losses.append(sum(r.square().mean() for r in fn(x)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_under_autocast_the_cast_weight_is_taken(op_by_op):
    model = Layers([FIRE["linear+relu"]])
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        (want,), (got,) = model(x), compiled(model)(x)
    fires = has_kernels(torch.bfloat16, training=True)
    assert counters["ipex"] == ({"linear+relu": 1} if fires else {})
    assert got.dtype == want.dtype == torch.bfloat16
    assert same(want, got, tol=1e-2)


def test_a_transposed_weight_is_not_copied_at_every_step(op_by_op):
    w = nn.Parameter(torch.randn(16, 16))
    compiled(lambda x: F.relu(F.linear(x, w.t())))(torch.randn(4, 16)).sum().backward()
    assert events("missed") == {"linear+relu": "the weight is not contiguous"}


def test_a_rule_can_be_switched_off(op_by_op):
    model = Layers([FIRE["linear+relu"], FIRE["linear+tanh"]])
    torch.compile(model, backend="ipex", options={"rules": "-linear+relu"})(torch.randn(4, 16))
    assert counters["ipex"] == {"linear+tanh": 1}


@pytest.mark.parametrize("backend", ["inductor", "ipex"])
def test_attention_is_for_inductors_own_patterns(backend):
    def attend(q, k, v):
        return F.softmax(q @ k.transpose(-1, -2) / 8.0, -1) @ v

    q, k, v = (torch.randn(2, 4, 8, 64, requires_grad=True) for _ in range(3))
    torch.compile(attend, backend=backend)(q, k, v).sum().backward()
    assert counters["inductor"]["fuse_attention"] == 2  # what it counts for one
    assert not counters["ipex"]
    assert backend != "ipex" or "patterns of attention" in events("left")["softmax(q@k)@v"]


class Streamed(torch.autograd.Function):
    """A product whose gradient of x calls an op of ours."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        tile = [128, 128, 8, 3, 1]
        return torch.ops.ipex.streamed(grad, weight.t().contiguous(), None, tile), None


@pytest.fixture
def uncompilable(monkeypatch):
    """No kernel comes of `ipex::streamed`; the names of Inductor's lowerings, afterwards too."""
    lowerings.register()
    op = torch.ops.ipex.streamed.default

    def planted(*_):
        raise RuntimeError("no kernel of it")

    monkeypatch.setitem(lowering.lowerings, op, planted)
    yield
    assert lowering.lowerings[op] is planted
    assert op not in lowering.fallbacks
    assert op not in lowering._maybe_layout_constraints
    assert op not in lowering.needs_realized_inputs


def test_a_kernel_of_ours_that_does_not_compile_in_a_backward_is_torchs_ops(uncompilable, caplog):
    """Nothing behind a backward falls back to Inductor, and the user's step would raise."""
    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(8, 16)
    fn = torch.compile(lambda x: Streamed.apply(x, weight).sin(), backend="ipex")
    fn(x).sum().backward()
    torch.testing.assert_close(x.grad, (F.linear(x, weight).cos() @ weight).detach())
    reason = events("missed")["kernels of ours"]
    assert "no kernel of it" in reason
    assert reason.endswith("ops of ours run as torch's ops")
    assert any("ops of ours run as torch's ops instead" in m for m in caplog.messages)
    assert not any(r.count("fallback") for r in decisions.reports())


def test_no_cache_keeps_it(uncompilable, monkeypatch):
    """A key is that of the kernels, which compile again once what they lacked is there."""
    real, off = compat.compile_inner, []

    def watched(*args, **kwargs):
        off.append(compat.graph_caches_are_off())
        return real(*args, **kwargs)

    monkeypatch.setattr(compat, "compile_inner", watched)
    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(8, 16)
    torch.compile(lambda x: Streamed.apply(x, weight).sin(), backend="ipex")(x).sum().backward()
    assert off == [False, False, True]  # forward, backward, backward again


def test_strict_compilation_raises_it(uncompilable):
    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(8, 16)
    with pytest.raises(Exception, match="no kernel of it"):
        compiled(lambda x: Streamed.apply(x, weight).sin())(x).sum().backward()
