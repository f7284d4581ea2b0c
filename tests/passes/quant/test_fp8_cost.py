"""Layers that FP8 would slow down stay in floating point on a GPU, and the reason is stated.

The graphs are of this CPU, taken for an H200's.
"""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor import explain
from ipex_inductor.ops.quant.fp8_states import Settings
from ipex_inductor.passes.quant import fp8_cost
from ipex_inductor.quantization.fp8 import DelayedScaling, fp8_autocast, prepare_fp8
from ipex_inductor.quantization.fp8.multiply import multiply
from ipex_inductor.target.device import find_target

RECIPE = DelayedScaling(amax_history_len=4)
SETTINGS = Settings(0, False, 1, 4, "")


@pytest.fixture(autouse=True)
def h200(monkeypatch, tmp_path):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    monkeypatch.setattr(fp8_cost, "nvidia", lambda _: find_target("h200"))


def layer_of(m, k, n, weight_dtype=torch.bfloat16):
    """The layer of a graph of a product and both of its gradients."""
    with FakeTensorMode():
        x = torch.empty(m, k, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(n, k, dtype=weight_dtype, requires_grad=True)
        gradient, state = torch.empty(m, n, dtype=torch.bfloat16), torch.empty(7, 1)
        scales = torch.empty(2), torch.empty(2)

        def step(x, weight, a, b, state, gradient):
            dtypes = torch.float8_e4m3fn, torch.float8_e5m2
            y, *_ = multiply(x, weight, None, a, b, state, 0, -2, *dtypes, *SETTINGS)
            return torch.autograd.grad(y, (x, weight), gradient)

        graph = make_fx(step)(x, weight, *scales, state, gradient).graph
    (layer,) = fp8_cost.find_layers(graph)
    return layer


@pytest.mark.parametrize(("m", "k", "n"), [(256, 64, 128), (16, 4096, 512)])
def test_a_layer_has_three_gemms_and_their_operands(m, k, n):
    layer = layer_of(m, k, n)
    sizes = [fp8_cost._sizes(gemm, a) for gemm, a, _ in layer.gemms]
    assert sizes == [(m, n, k), (m, k, n), (n, k, m)]
    assert len(layer.sources) == 3


def test_estimates_are_near_measured_times():
    """4.1 ms in bf16 and 2.4 ms of kernels in FP8 (benchmarks/results/fp8_gpu.jsonl)."""
    cost = fp8_cost.estimate(layer_of(8192, 4096, 14336))
    assert 0.9 < cost.other / 4.055e-3 < 1.1
    assert 0.9 < cost.fp8 / 2.4e-3 < 1.15


@pytest.mark.parametrize(
    ("m", "k", "n", "pays"),
    [
        (8192, 4096, 14336, True),
        (8192, 4096, 4096, True),
        (8192, 4096, 1024, True),
        (4096, 4096, 1024, False),
        (8192, 256, 256, False),
        (64, 4096, 4096, False),
        (512, 1024, 1024, False),
    ],
)
def test_small_gemms_do_not_pay(m, k, n, pays):
    cost = fp8_cost.estimate(layer_of(m, k, n))
    assert (cost.fp8 < cost.other) is pays


def test_a_gpu_without_known_rates_keeps_fp8(monkeypatch):
    monkeypatch.setattr(fp8_cost, "nvidia", lambda _: None)
    assert fp8_cost.estimate(layer_of(64, 64, 64)) is None


def test_an_error_for_two_operands_in_e5m2_is_not_hidden():
    layer = layer_of(64, 64, 64)
    layer.gemms.append((layer.gemms[0][0], layer.gemms[1][1], layer.gemms[1][1]))
    assert fp8_cost.estimate(layer) is None


def mlp(dtype):
    layers = [nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16, bias=False)]
    return nn.Sequential(*layers).to(dtype)


def train(model, call, x, enabled=True, autocast=False):
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        fp8_autocast(enabled=enabled, fp8_recipe=RECIPE),
    ):
        y = call(x)
    y.float().square().sum().backward()
    return y


@pytest.mark.sampled("True")
@pytest.mark.parametrize("autocast", [False, True])
def test_layers_that_are_left_compute_what_they_do_without_fp8(autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    model = prepare_fp8(mlp(dtype))
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="ipex", fullgraph=True)
    x = torch.randn(24, 32, dtype=dtype)
    states = [state.clone() for state in twin.buffers()]
    want = train(model, model, x, enabled=False, autocast=autocast)
    got = train(twin, compiled, x, autocast=autocast)
    assert got.dtype is want.dtype is torch.bfloat16
    # A rounding to bf16 between kernels may move, each by 2^-8 of a number.
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert q.grad.dtype is p.grad.dtype
        error = (p.grad - q.grad).float().norm() / p.grad.float().norm()
        assert error < 2**-6, name
    for before, after in zip(states, twin.buffers(), strict=True):
        assert torch.equal(before, after)


def decisions(rules=""):
    model = prepare_fp8(mlp(torch.bfloat16))
    x = torch.randn(24, 32, dtype=torch.bfloat16)
    options = {"options": {"rules": rules}} if rules else {}
    with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        explanation = explain(model, x, compile_args=options)
    rows = [row for graph in explanation.graphs for row in graph.rows]
    return [(row.kind, row.reason) for row in rows if row.subject == fp8_cost.NAME]


def test_the_reason_is_stated(op_by_op):
    rows = decisions()
    assert [kind for kind, _ in rows] == ["missed", "missed"]
    assert {reason.partition(":")[0] for _, reason in rows} == {
        "M, N, K of 24, 48, 32",
        "M, N, K of 24, 16, 48",
    }
    assert all("host needs" in reason and "us in bfloat16" in reason for _, reason in rows)


def test_a_maximum_that_came_into_the_graph_is_still_recorded():
    graph = torch.fx.Graph()
    state, maximum = graph.placeholder("state"), graph.placeholder("maximum")
    functional = torch.ops.higher_order.auto_functionalized_v2
    fields = {fp8_cost.MAXIMA: [maximum], fp8_cost.COLUMNS: [0], fp8_cost.BASES: [state]}
    record = graph.call_function(functional, (torch.ops.ipex.fp8_record.default,), dict(fields))
    fp8_cost._drop_records(graph, {state})
    assert record.kwargs == fields


def test_it_can_be_switched_off(op_by_op):
    assert decisions("-fp8 cost") == []


def test_one_small_layer_beside_a_large_one_is_left(op_by_op, monkeypatch):
    """The first layer's GEMMs are given the cost of large ones."""
    real = fp8_cost.estimate

    def estimate(layer):
        is_first = real(layer) and layer.gemms[0][0].meta["val"].shape[1] == 48
        return fp8_cost.Cost(2e-3, 4e-3) if is_first else real(layer)

    monkeypatch.setattr(fp8_cost, "estimate", estimate)
    ((kind, reason),) = decisions()
    assert kind == "missed"
    assert reason.startswith("M, N, K of 24, 16, 48: quantization takes longer than FP8 saves")
    model = prepare_fp8(mlp(torch.bfloat16))
    train(model, torch.compile(model, backend="ipex"), torch.randn(24, 32, dtype=torch.bfloat16))
    forward = model[0].fp8_scaling.forward_state
    assert (forward[-1] > 0).tolist() == [True, True, False, False, False, False]
