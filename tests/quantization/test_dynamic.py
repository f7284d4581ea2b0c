"""Dynamic quantization: the caller's model stays, linear layers round row by row."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization import dynamic
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping
from ipex_inductor.reporting import decisions

SCHEME = Scheme(symmetric=True, dynamic=True)
ALL = SchemeMapping(SCHEME)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.table = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        y = self.second(self.first(x).relu())
        if y.sum() > 1e9:  # depends on data: no graph has it
            return y
        return functional.linear(y, self.table)


def rounded_rows(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x * (1.0 / scale)).round().clamp(-128, 127) * scale


def rounded_weight(w):
    scale = w.abs().amax(1, keepdim=True) / 127.5
    return (w * (1.0 / scale)).round().clamp(-128, 127) * scale


def reference(net, x, off=()):
    layers = [("first", net.first), ("second", net.second)]
    for name, layer in layers:
        w = layer.weight if name in off else rounded_weight(layer.weight)
        x = functional.linear(x if name in off else rounded_rows(x), w, layer.bias)
        x = x.relu() if name == "first" else x
    return functional.linear(rounded_rows(x), rounded_weight(net.table))


def quantize(net, mapping=ALL):
    return dynamic.convert_dynamic(dynamic.prepare_dynamic(net, mapping))


@torch.no_grad()
def test_rows_and_weights_are_rounded():
    net, x = Net().eval(), torch.randn(2, 5, 8)
    before = net(x)
    converted = quantize(net)
    torch.testing.assert_close(converted(x), reference(net, x), rtol=1e-4, atol=1e-4)
    assert torch.equal(net(x), before)
    assert type(net) is Net
    assert isinstance(converted, Net)
    assert {*converted.state_dict()} == {*net.state_dict()}
    assert converted.first.weight is net.first.weight
    assert not torch.equal(converted(x), before)


@torch.no_grad()
def test_a_prepared_model_computes_as_before():
    net, x = Net().eval(), torch.randn(2, 8)
    assert torch.equal(dynamic.prepare_dynamic(net, ALL)(x), net(x))


@torch.no_grad()
@pytest.mark.parametrize("default", [SCHEME, None])
def test_settings_by_module_hold(default):
    inner = {None: "first", SCHEME: "second"}[default]
    mapping = SchemeMapping(default, by_module_name=((inner, SCHEME if not default else None),))
    net, x = Net().eval(), torch.randn(2, 8)
    result = quantize(net, mapping)(x)
    if default:
        expected = reference(net, x, off=("second",))
    else:
        y = functional.linear(rounded_rows(x), rounded_weight(net.first.weight), net.first.bias)
        expected = functional.linear(net.second(y.relu()), net.table)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_changed_weight_counts():
    net, x = Net().eval(), torch.randn(2, 8)
    converted = quantize(net)
    net.first.weight.mul_(3)
    torch.testing.assert_close(converted(x), reference(net, x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_compiled_exported_and_traced_it_is_equal():
    net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(3, 8)
    converted = quantize(net)
    expected = converted(x)
    torch.testing.assert_close(torch.compile(converted, fullgraph=True)(x), expected)
    exported = torch.export.export(converted, (x,))
    assert torch.equal(exported.module()(x), expected)
    operators = {str(n.target) for n in exported.graph.nodes}
    assert "quantized_decomposed.quantize_per_token.default" in operators
    traced = torch.jit.trace(converted, x)
    assert torch.equal(traced(x), expected)
    assert "quantized_decomposed" not in str(traced.inlined_graph)


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_rounded(kind):
    net, x = kind(8, 16, batch_first=True).eval(), torch.randn(2, 5, 8)
    before = net(x)[0]
    result = quantize(net)(x)[0]
    assert 0 < (result - before).abs().max() < 0.05


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_rounded(kind):
    net, x = kind(8, 16).eval(), torch.randn(2, 8)
    state = torch.randn(2, 16)
    state = (state, state) if kind is nn.LSTMCell else state
    before, result = net(x, state), quantize(net)(x, state)
    before, result = (v[0] if isinstance(v, tuple) else v for v in (before, result))
    assert 0 < (result - before).abs().max() < 0.05


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_type(dtype):
    net = nn.Linear(8, 4).to(dtype).eval()
    result = quantize(net)(torch.zeros(2, 8, dtype=dtype))
    assert result.dtype == dtype
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("net", [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Sequential(nn.Linear(2, 2))])
def test_a_conversion_of_nothing_is_refused(net):
    with pytest.raises(QuantizationError, match="a layer that dynamic quantization quantizes"):
        dynamic.prepare_dynamic(net, SchemeMapping(SCHEME if len([*net.children()]) < 1 else None))


def test_the_rows_say_what_stays_in_floating_point():
    mapping = SchemeMapping(SCHEME, by_module_name=(("second", None),))
    rows = quantize(Net().eval(), mapping).ipex_layers
    assert [(row["name"], row["quantized"]) for row in rows] == [("first", True), ("second", False)]


class Sequence(nn.Module):
    """An LSTM over a sequence, one of its cells, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.lstm, self.cell = nn.LSTM(8, 8), nn.LSTMCell(8, 8)
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        state, _ = self.cell(self.lstm(x)[0][-1])
        return self.linear(state)


def test_the_rows_say_what_has_no_kernel(caplog):
    rows = quantize(Sequence().eval()).ipex_layers
    reasons = {row["name"]: row["kernel_reason"] for row in rows}
    assert reasons == {"lstm": dynamic.WHOLE_LAYER, "cell": "", "linear": ""}
    assert all(row["quantized"] for row in rows)
    assert dynamic.WHOLE_LAYER in caplog.text


@torch.no_grad()
def test_cells_compile_to_int8():
    """The reason that the rows give for layers: their cells have kernels of integers."""
    net = quantize(nn.LSTMCell(8, 8).eval())
    compiled = torch.compile(net, backend="ipex", options={"strict": True})
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(x)[0], net(x)[0], rtol=1e-5, atol=1e-5)
    reports = decisions.reports()
    fired = [e.subject for r in reports for e in r.events if e.kind == "fired"]
    assert {"int8 linear", "int8 linear+add"} <= {*fired}


def rounded_linear(x, weight, bias=None):
    return torch.ops.aten.linear.default(rounded_rows(x), rounded_weight(weight), bias)


class Attends(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=batch_first)

    def forward(self, x, y, mask=None):
        return self.attention(x, y, y, attn_mask=mask)[0]


NETS = {
    "encoder": (nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1),
    "attention": (Attends(), 2),
    "rows first": (Attends(batch_first=False), 2),
}


@pytest.mark.parametrize("case", NETS)
def test_attention_is_rounded_however_it_runs(case, monkeypatch):
    net, count = NETS[case]
    inputs = [torch.randn(2, 7, 16) for _ in range(count)]
    converted = quantize(net.eval())
    with monkeypatch.context() as patch:  # with gradients torch takes no shorter way
        patch.setattr(functional, "linear", rounded_linear)
        expected = net(*inputs).detach()
    with torch.no_grad():
        torch.testing.assert_close(converted(*inputs), expected, atol=1e-4, rtol=1e-4)
        compiled = torch.compile(converted, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), expected, atol=1e-4, rtol=1e-4)
        traced = torch.jit.trace(converted, tuple(inputs), check_trace=False)
        torch.testing.assert_close(traced(*inputs), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("mask", [torch.ones(7, 7).triu(1).bool(), torch.randn(8, 7, 7)])
def test_attention_masks_are_kept(mask):
    net, inputs = Attends().eval(), [torch.randn(2, 7, 16) for _ in range(2)]
    converted = quantize(net)
    result, exact = converted(*inputs, mask), net(*inputs, mask)
    assert 0 < (result - exact).abs().max() < 0.05
    compiled = torch.compile(converted, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs, mask), result)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Attends, nn.LSTM, nn.LSTMCell])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_switched_off_is_not_rounded_by_what_is_around(kind, compiled):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Attends() if kind is Attends else kind(16, 16)
            self.last = nn.Linear(16, 4)

        def forward(self, x):
            y = self.inner(x, x) if kind is Attends else self.inner(x)
            return y[0] if isinstance(y, tuple) else y

    net = Around().eval()
    x = torch.randn(7, 16) if kind is nn.LSTMCell else torch.randn(2, 7, 16)
    converted = quantize(net, SchemeMapping(SCHEME, by_module_name=(("inner", None),)))
    if compiled:
        if kind is nn.LSTM:
            pytest.skip("Dynamo breaks graphs at LSTM")
        converted = torch.compile(converted, backend="eager")
    torch.testing.assert_close(converted(x), net(x), atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_converted_models_are_pickled():
    import pickle

    net, x = Net().eval(), torch.randn(2, 5, 8)
    converted = quantize(net)
    loaded = pickle.loads(pickle.dumps(converted))  # noqa: S301
    assert isinstance(loaded, Net)
    assert loaded.ipex_layers == converted.ipex_layers
    assert torch.equal(loaded(x), converted(x))
    assert torch.equal(copy.deepcopy(converted)(x), converted(x))


class Reduced(nn.Module):
    """A model that pickles in a way of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def __reduce__(self):
        return Reduced, (), self.__dict__

    def forward(self, x):
        return self.layer(x)


def test_a_pickle_that_would_lose_the_rounding_is_refused():
    import pickle

    with pytest.raises(QuantizationError, match="state_dict"):
        pickle.dumps(quantize(Reduced()))
