"""The rules fire exactly where they should, and the result is right."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor import report
from ipex_inductor.ops.unary import UNARY
from ipex_inductor.passes.rule import ACTIVATIONS

# One rounding of the result and a different order of summation: two ulp of the largest value.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="ipex", options={"strict": True}, **kwargs)


def check(fn, *args, **kwargs):
    with torch.no_grad():
        got = compiled(fn, **kwargs)(*args)
        want = fn(*args)
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    scale = want.abs().max().clamp(min=1).item() if want.numel() else 1
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE.get(want.dtype, 0) * scale)


def expected(dtype):
    """How often a rule fires that needs oneDNN in this dtype: some CPUs have no fp16."""
    return int(dtype != torch.float16 or torch.ops.mkldnn._is_mkldnn_fp16_supported())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("lead", [(5,), (2, 3), (2, 3, 4)], ids=["2d", "3d", "4d"])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_linear_fires(name, lead, dtype, dynamic):
    linear = nn.Linear(16, 32, dtype=dtype)
    x = torch.randn(*lead, 16, dtype=dtype)
    check(lambda x: UNARY[name].fn(linear(x)), x, dynamic=dynamic)
    assert counters["ipex"][f"linear+{name}"] == expected(dtype)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("family", ["linear", "conv2d"])
def test_every_activation_fires(family, name, dtype, bias):
    make = {"linear": nn.Linear(8, 16, bias), "conv2d": nn.Conv2d(8, 16, 3, bias=bias)}
    model = make[family].to(dtype)
    x = torch.randn(*{"linear": (4, 8), "conv2d": (2, 8, 6, 6)}[family], dtype=dtype)
    check(lambda x: UNARY[name].fn(model(x)), x)
    assert counters["ipex"][f"{family}+{name}"] == expected(dtype)


W = torch.randn(32, 16)
B = torch.randn(32)
X = torch.randn(4, 16)

NEAR_MISSES = {
    "second user": (lambda x: (lambda y: F.gelu(y) + y)(F.linear(x, W, B)), X),
    "view between": (lambda x: F.gelu(F.linear(x, W, B).t()), X),
    "cast between": (lambda x: F.gelu(F.linear(x, W, B).double()), X),
    "another op between": (lambda x: F.gelu(F.linear(x, W, B) + 1), X),
    "a scaled product": (lambda x: F.gelu(torch.addmm(B, x, W.t(), alpha=0.5)), X),
    "a scaled bias": (lambda x: F.gelu(torch.addmm(B, x, W.t(), beta=0.5)), X),
    "a weight not transposed": (lambda x: F.gelu(torch.addmm(B, x, W.view(16, 32))), X),
    "reshaped between": (lambda x: F.gelu(F.linear(x, W, B).view(2, 64)), X),
    "a number added": (lambda x: F.gelu(torch.addmm(B[1], x, W.t())), X),
    "fp64": (lambda x: F.gelu(F.linear(x, W.double(), B.double())), X.double()),
    "empty": (lambda x: F.gelu(F.linear(x, W, B)), X[:0]),
    "a matrix added, not a bias": (lambda x: F.gelu(torch.addmm(x.new_ones(4, 32), x, W.t())), X),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_left_alone(name):
    check(*NEAR_MISSES[name])
    assert not counters["ipex"]


def test_strided_input_still_fires():
    check(lambda x: F.gelu(F.linear(x, W, B)), torch.randn(16, 4).t())
    assert counters["ipex"]["linear+gelu"] == 1


def test_a_miss_has_a_reason():
    check(*NEAR_MISSES["fp64"])
    (event,) = [e for r in report.reports() for e in r.events if e.kind == "missed"]
    assert event.subject == "linear+gelu"
    assert "float64" in event.reason
    assert "test_rules.py" in event.where


def test_training_is_left_to_inductor():
    linear = nn.Linear(16, 32)
    x = X.clone().requires_grad_()
    got = compiled(lambda x: F.gelu(linear(x)))(x)
    got.sum().backward()
    grads = [x.grad, linear.weight.grad, linear.bias.grad]
    x.grad = linear.weight.grad = linear.bias.grad = None
    want = F.gelu(linear(x))
    want.sum().backward()
    torch.testing.assert_close(got, want)
    for ours, theirs in zip(grads, (x.grad, linear.weight.grad, linear.bias.grad), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not counters["ipex"]


@pytest.mark.parametrize("rules", ["-linear+gelu", "-*", " -linear+gelu , -linear+gelu_tanh"])
def test_a_rule_can_be_switched_off(rules):
    fn = torch.compile(
        lambda x: F.gelu(F.linear(x, W, B)), backend="ipex", options={"rules": rules}
    )
    with torch.no_grad():
        torch.testing.assert_close(fn(X), F.gelu(F.linear(X, W, B)))
    assert not counters["ipex"]


BIASES = {
    "every other": torch.randn(64)[::2],
    "a column": torch.randn(32, 3)[:, 1],
    "expanded": torch.randn(1).expand(32),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_strided_bias(name):
    """oneDNN ignores the strides of a bias: the values were wrong by whole units."""
    bias, weight = BIASES[name], nn.Parameter(W)
    check(lambda x, bias: F.relu(F.linear(x, weight, bias)), X, bias)
    check(lambda x, bias: F.linear(x, weight, bias), X, bias)


@torch.no_grad()
def test_a_bias_of_one_element_is_no_bias():
    weight, bias = nn.Parameter(W), nn.Parameter(torch.randn(1))
    check(lambda x: F.relu(F.linear(x, weight, bias)), X)


def test_without_joint_passes_nothing_is_kept_whole():
    linear = nn.Linear(16, 32)
    fn = torch.compile(
        lambda x: F.gelu(linear(x)),
        backend="ipex",
        options={"use_joint_graph_passes": False, "strict": True},
    )
    with torch.no_grad():
        torch.testing.assert_close(fn(X), F.gelu(linear(X)))
