"""The op of linear layers on quantized weights: reference, kernel, errors, compiled calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import ipex_inductor
from ipex_inductor.errors import ArgumentError, IpexError, QuantizationError
from ipex_inductor.lowerings.quant import weight_only as lowering
from ipex_inductor.ops.quant.weight_only import (
    Scheme,
    compute_reference,
    dequantize_weight,
    quantize_activations,
)
from ipex_inductor.templates.cpu import weight_only
from support.weight_only_ops import (
    BF16,
    F16,
    F32,
    SCHEMES,
    SUMS,
    Operands,
    assert_right,
    compute_values,
    make_operands,
)

WHY_NOT = weight_only.why_not()
needs_kernel = pytest.mark.skipif(WHY_NOT is not None, reason=f"{WHY_NOT}")


class Layer(nn.Module):
    """A layer on a quantized weight, with pointwise ops around it."""

    def __init__(self, operands: Operands) -> None:
        super().__init__()
        for name in ("weight", "scales", "zeros", "order", "bias"):
            self.register_buffer(name, getattr(operands, name))
        self.scheme = operands.scheme

    def forward(self, x: Tensor) -> Tensor:
        tensors = self.weight, self.scales, self.zeros, self.order, self.bias
        return torch.ops.ipex.weight_only_linear(x * 2, *tensors, *self.scheme).relu()


def by_kernel(layer: Layer, x: Tensor) -> Tensor:
    """Return the layer's result with the kernel called from Python."""
    tensors = layer.weight, layer.scales, layer.zeros, layer.order, layer.bias
    return weight_only.compute(x * 2, *tensors, *layer.scheme).relu()


@pytest.mark.parametrize(("name", "compute"), SCHEMES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_reference_is_right(name: str, compute: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for depth, group in ((130, 64), (64, 1000), (7, 3)):
        words = {"dtype": dtype, "zeros": True, "order": True, "bias": True}
        o = make_operands(5, depth, 9, Scheme(name, group, compute), **words)
        tensors = o.x, o.weight, o.scales, o.zeros, o.order, o.bias
        assert_right(compute_reference(*tensors, o.scheme).contiguous(), o)


@pytest.mark.parametrize(("name", "compute"), SCHEMES)
def test_an_eager_call_with_gaps_and_dimensions(name: str, compute: str) -> None:
    torch.manual_seed(0)
    weight_only.register()
    o = make_operands(12, 130, 9, Scheme(name, 64, compute), zeros=True)
    expected = o.by_op()
    assert_right(expected, o)
    plain = o.x
    o.x = plain.t().contiguous().t()
    assert torch.equal(o.by_op(), expected)
    o.x = torch.cat([plain, plain], 1)[:, :130].view(3, 4, 130)
    out = o.by_op()
    assert out.shape == (3, 4, 9)
    assert torch.equal(out.view(12, 9), expected)
    o.x = plain[0]
    assert o.by_op().shape == (9,)
    o.x = plain[:0]
    assert o.by_op().shape == (0, 9)


@needs_kernel
def test_eager_calls_run_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_only.register()
    calls: list[Any] = []
    run = weight_only.run
    monkeypatch.setattr(weight_only, "run", lambda *a: (calls.append(a), run(*a))[1])
    o = make_operands(2, 64, 8, Scheme("int4", 32, "int8"))
    assert_right(o.by_op(), o)
    assert len(calls) == 1


def test_without_a_library_torch_computes_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_only, "why_not", lambda: "no compiler of this test")
    o = make_operands(2, 64, 8, Scheme("nf4", 32, "float32"))
    with caplog.at_level("WARNING", logger="ipex_inductor"):
        assert_right(weight_only.compute(*o.arguments), o)
    assert "no compiler of this test" in caplog.text
    out = torch.empty(2, 8)
    weight_only.call(o.x, o.weight, o.scales, False, False, False, *o.scheme, out=out)
    assert_right(out, o)


def test_activations_are_rounded_by_groups() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5, 0.0, 0.0, 8.0, float("inf"), 1.0]])
    steps, scale = quantize_activations(x, 3)
    assert steps.tolist() == [[64.0, -127.0, 32.0, 0.0, 0.0, 127.0, 0.0, 0.0]]
    assert scale[0, :2].tolist() == pytest.approx([2 / 127, 8 / 127])
    assert scale[0, 2].isnan()


def use_scheme(o: Operands, *words: Any) -> None:
    o.scheme = Scheme(*words)


CHANGES: list[tuple[str, type[IpexError], Callable[[Operands], Any]]] = [
    ("x in", ArgumentError, lambda o: setattr(o, "x", o.x.double())),
    ("weight of", ArgumentError, lambda o: setattr(o, "weight", o.weight.to(torch.int8))),
    ("weight of", QuantizationError, lambda o: setattr(o, "weight", o.weight[:, :-1])),
    ("scales of", QuantizationError, lambda o: setattr(o, "scales", o.scales[:, :1])),
    ("zeros", ArgumentError, lambda o: setattr(o, "zeros", o.zeros.to(torch.int8))),
    ("order", ArgumentError, lambda o: setattr(o, "order", o.order.long())),
    ("order of", QuantizationError, lambda o: setattr(o, "order", o.order[1:])),
    ("bias of", QuantizationError, lambda o: setattr(o, "bias", o.bias[1:])),
    ("group", QuantizationError, lambda o: use_scheme(o, "int4", 0, "int8")),
    ("weight dtype", QuantizationError, lambda o: use_scheme(o, "int3", 8, "int8")),
    ("compute", QuantizationError, lambda o: use_scheme(o, "int4", 32, "int4")),
    ("int8 or int4", QuantizationError, lambda o: use_scheme(o, "nf4", 32, "int8")),
    (
        "zero points",
        QuantizationError,
        lambda o: setattr(o, "scheme", Scheme("nf4", 32, "float32")),
    ),
]


@pytest.mark.parametrize(
    ("text", "error", "change"), CHANGES, ids=lambda v: getattr(v, "__name__", v)
)
def test_wrong_arguments_are_refused(
    text: str, error: type[IpexError], change: Callable[[Operands], Any]
) -> None:
    o = make_operands(2, 64, 8, Scheme("int4", 32, "int8"), zeros=True, order=True, bias=True)
    change(o)
    with pytest.raises(error, match=text):
        o.by_op()


def test_a_backward_reaches_activations_alone() -> None:
    o = make_operands(2, 64, 8, Scheme("int4", 32, "float32"), order=True)
    o.x.requires_grad_()
    o.by_op().sum().backward()
    weight = torch.empty(8, 64)
    plain = dequantize_weight(o.weight, o.scales, o.zeros, Scheme("int4", 32, "float32"), 64)
    weight[:, o.order.long()] = plain
    assert o.x.grad is not None
    expected = weight.sum(0).expand_as(o.x.grad)
    torch.testing.assert_close(o.x.grad, expected, rtol=1e-5, atol=1e-5)  # sums of 8 in fp32


def test_a_backward_through_rounded_activations_is_refused() -> None:
    o = make_operands(2, 64, 8, Scheme("int4", 32, "int8"))
    o.x.requires_grad_()
    with pytest.raises(QuantizationError, match="no_grad"):
        o.by_op().sum().backward()


@pytest.mark.parametrize(("name", "compute"), SCHEMES)
def test_the_fake_is_the_result_s(name: str, compute: str) -> None:
    o = make_operands(6, 64, 8, Scheme(name, 32, compute), dtype=BF16, zeros=True)
    torch.library.opcheck(
        torch.ops.ipex.weight_only_linear.default, o.arguments, test_utils="test_faketensor"
    )


@pytest.mark.sampled("True")
@needs_kernel
@pytest.mark.parametrize("in_cpp", [True, False])
def test_a_compiled_call_with_any_number_of_rows(in_cpp: bool) -> None:
    """The generated code calls the kernel, and serves other numbers of rows."""
    torch.manual_seed(0)
    words = {"dtype": BF16, "zeros": True, "order": True, "bias": True}
    layers = [
        Layer(make_operands(2, 96, 64, Scheme("int4", 32, "int8"), **words)),
        Layer(make_operands(2, 64, 40, Scheme("fp8", 64, "bfloat16"), dtype=BF16)),
    ]
    model = nn.Sequential(*layers)
    options = {} if in_cpp else {"cpp_wrapper": False}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="ipex", dynamic=True, options=options or None)
    with torch.no_grad():
        x = torch.randn(3, 96).to(BF16)
        _, code = run_and_get_code(compiled, x)
        text = "\n".join(code)
        assert text.count("/* ipex_weight_only_linear */") == 2 * in_cpp or not in_cpp
        assert "weight_only_linear" in text
        with torch.compiler.set_stance("fail_on_recompile"):
            for rows in (3, 2, 5, 17, 64):
                x = torch.randn(rows, 96).to(BF16)
                expected = by_kernel(layers[1], by_kernel(layers[0], x))
                # The same kernel on the same numbers.
                assert torch.equal(compiled(x), expected)
        x = torch.randn(96, 9).to(BF16).t()
        assert torch.equal(compiled(x), by_kernel(layers[1], by_kernel(layers[0], x)))


@needs_kernel
def test_the_report_names_the_kernel() -> None:
    layer = Layer(make_operands(2, 64, 8, Scheme("int4", 32, "int8")))
    torch._dynamo.reset()
    with torch.no_grad():
        explanation = ipex_inductor.explain(layer.eval(), torch.randn(2, 64))
    assert "weight-only linear, int4 in int8" in str(explanation)


@pytest.mark.sampled("int8-float32", "int4-int8", "nf4-bfloat16", "fp8-float16")
@pytest.mark.parametrize(("name", "compute"), SCHEMES)
def test_devices_without_a_kernel_dequantize(
    name: str, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowering of other devices, on the CPU: the graph is right and calls no kernel."""
    monkeypatch.setattr(lowering, "why_not", lambda *_, **__: "no kernel of this test")
    words = {"zeros": True, "order": True, "bias": True}
    o = make_operands(3, 130, 9, Scheme(name, 64, compute), **words)
    layer = Layer(o)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="ipex", fullgraph=True)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        out, code = run_and_get_code(compiled, o.x)
    assert not any("weight_only_linear(" in text for text in code)
    o.x = o.x * 2
    # Inductor may leave out a cast to the compute dtype and back: of x and of the weight.
    roundings = {"bfloat16": 2 * 2**-8, "float16": 2 * 2**-11}.get(compute, 0.0)
    value, bound = compute_values(o)[-1]
    assert ((out.double() - value.relu()).abs() <= bound * (1 + roundings / SUMS)).all()
