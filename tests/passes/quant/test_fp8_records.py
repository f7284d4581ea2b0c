"""Ops on FP8 states once a graph: equal to eager mode bit for bit, and fewer calls of the host."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ipex_inductor import explain
from ipex_inductor.ops.quant import fp8_states
from ipex_inductor.passes.quant import fp8_sharing
from ipex_inductor.quantization.fp8 import DelayedScaling, fp8_autocast, prepare_fp8

RECIPE = DelayedScaling(amax_history_len=4)
SHARED = fp8_sharing.NAME
PER_STEP = {"fp8_record": 1, "fp8_read_scales": 1, "fp8_record_gradients": 1, "fp8_update": 2}


class Attention(nn.Module):
    """Three layers on one input, in a view each, and one on another. Nothing is rounded between."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = x * 2
        return self.out(torch.maximum(self.query(x), self.key(x)) + self.value(x))


class Twice(nn.Module):
    """A layer that reads what another one reads, and a second tensor, which is larger."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.first.weight.mul_(16)

    def forward(self, x):
        x = x * 2
        return self.second(self.first(x)) + self.second(x)


def pair(model):
    model = prepare_fp8(model)
    return model, copy.deepcopy(model)


def train(model, call, x):
    with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        y = call(x)
    y.square().sum().backward()
    return y


def assert_equal_to_eager_mode(model, twin, compiled):
    for factor in (1, 100, 3):
        x = torch.randn(2, 3, 8) * factor
        want = train(model, model, x)
        assert torch.equal(train(twin, compiled, x), want)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            if p.dim() == 1:  # the gradient of a bias is a sum, of another order in a kernel
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(p.grad, q.grad), name
        for (name, p), q in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(p, q), name


def calls_of(function):
    """Names of calls of ops on states."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        function()
    counts = Counter(event.name.removeprefix("ipex::") for event in trace.events())
    return {name: counts[name] for name in PER_STEP}


@pytest.mark.sampled("3")
@pytest.mark.parametrize("layers", [1, 3])
def test_a_step_calls_each_op_once_whatever_the_number_of_layers(layers):
    model = prepare_fp8(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))))
    compiled = torch.compile(model, backend="ipex", fullgraph=True)
    x = torch.randn(4, 8)
    for _ in range(2):  # the first one sets the length of histories
        train(model, compiled, x)
    assert calls_of(lambda: train(model, compiled, x)) == PER_STEP
    assert calls_of(lambda: train(model, model, x)) == {
        **PER_STEP,
        **dict.fromkeys(("fp8_record", "fp8_read_scales", "fp8_record_gradients"), layers),
    }


def saved_bytes(model, call):
    """Bytes of FP8 tensors that wait for the backward."""
    kept = {}

    def pack(t):
        if t.dtype is torch.float8_e4m3fn:
            kept[t.data_ptr()] = t.numel()
        return t

    x = torch.randn(2, 3, 8)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        fp8_autocast(enabled=True, fp8_recipe=RECIPE),
    ):
        call(x)
    return sum(kept.values())


def test_layers_that_share_an_input_share_one_copy_of_it():
    """Results are those of eager mode, and the backward waits for one copy."""
    model, twin = pair(Attention())
    compiled = torch.compile(twin, backend="ipex", fullgraph=True)
    assert_equal_to_eager_mode(model, twin, compiled)
    assert saved_bytes(model, model) == 4 * 48
    assert saved_bytes(twin, compiled) == 2 * 48


@pytest.mark.parametrize("make", [Attention, Twice])
def test_decisions_are_explained(op_by_op, make):
    model = prepare_fp8(make())
    with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        explanation = explain(model, torch.randn(2, 3, 8))
    rows = [row for graph in explanation.graphs for row in graph.rows if row.subject == SHARED]
    found = {(row.kind, row.count, row.reason) for row in rows}
    if make is Attention:
        assert found == {("fired", 2, "")}
    else:  # the weight of the layer that is called twice
        assert found == {("fired", 1, ""), ("missed", 1, fp8_sharing.OTHERS)}


def test_scales_differ_where_a_layer_reads_another_tensor_too():
    model, twin = pair(Twice())
    assert_equal_to_eager_mode(model, twin, torch.compile(twin, backend="ipex", fullgraph=True))


def test_a_layer_that_is_called_twice_is_recorded_by_two_ops():
    """One op records no column twice."""
    model, twin = pair(nn.Sequential(*[nn.Linear(8, 8)] * 3))
    compiled = torch.compile(twin, backend="ipex", fullgraph=True)
    assert_equal_to_eager_mode(model, twin, compiled)
    calls = calls_of(lambda: train(twin, compiled, torch.randn(2, 3, 8)))
    assert calls["fp8_record"] == calls["fp8_record_gradients"] == 3
    assert calls["fp8_read_scales"] == 1


@pytest.mark.parametrize(
    ("columns", "blocks"),
    [
        ((4,), (1, 1, 1)),
        ((2, 3, 4), (1, 3, 3)),
        ((0, 1, 3, 4, 6, 7), (3, 2, 3)),
        ((1, 4), (2, 1, 3)),
        ((0, 1, 3, 4, 7, 8), None),
        ((3, 2), None),
        ((0, 1, 3), None),
    ],
)
def test_columns_that_repeat_are_one_view(columns, blocks):
    assert fp8_states.find_blocks(columns) == blocks
    state = torch.rand(7, 9)
    want = state.clone()
    maxima = [torch.rand(()) * 2 for _ in columns]
    for amax, column in zip(maxima, columns, strict=True):
        want[fp8_states.HISTORY, column] = max(want[fp8_states.HISTORY, column], amax)
    fp8_states.fp8_record(state, maxima, list(columns), -2)
    fp8_states.take_recorded()
    assert torch.equal(state, want)
    scales = fp8_states.fp8_read_scales(state, list(columns))
    assert torch.equal(scales, state[:2, list(columns)].unsqueeze(-1).expand(2, len(columns), 4))
    assert scales.is_contiguous()
