"""Convolutions: what follows them fused, batch norm folded, and what must be left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor import report


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="ipex", options={"strict": True}, **kwargs)


def check(fn, *args, atol=2e-5, **kwargs):
    """Same value, dtype, shape and strides as eager (a stride over one element means nothing).

    2e-5: fp32 sums of some 100 terms near 1.
    """
    with torch.no_grad():
        got, want = compiled(fn, **kwargs)(*args), fn(*args)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    strides = [
        (a, b) for n, a, b in zip(got.shape, got.stride(), want.stride(), strict=True) if n != 1
    ]
    assert all(a == b for a, b in strides), (got.stride(), want.stride())
    scale = want.abs().max().clamp(min=1).item() if want.numel() else 1
    torch.testing.assert_close(got, want, rtol=0, atol=atol * scale)


def misses(name):
    return [e.reason for r in report.reports() for e in r.events if e.subject == name]


WINDOWS = {
    "1x1": (nn.Conv2d(8, 16, 1), (2, 8, 6, 6)),
    "3x3 padded": (nn.Conv2d(8, 16, 3, padding=1), (2, 8, 6, 6)),
    "strided": (nn.Conv2d(8, 16, 3, stride=(2, 1)), (2, 8, 9, 7)),
    "dilated": (nn.Conv2d(8, 16, 3, dilation=(1, 2), padding=(1, 2)), (2, 8, 9, 9)),
    "grouped": (nn.Conv2d(8, 16, 3, groups=4), (2, 8, 6, 6)),
    "depthwise": (nn.Conv2d(8, 8, 3, groups=8), (2, 8, 6, 6)),
    "one channel": (nn.Conv2d(1, 4, 3), (2, 1, 6, 6)),
    "one pixel": (nn.Conv2d(8, 4, 1), (2, 8, 1, 1)),
    "one of all": (nn.Conv2d(1, 1, 1), (1, 1, 1, 1)),
    "prime sizes": (nn.Conv2d(7, 13, 5), (3, 7, 11, 5)),
    "same padding": (nn.Conv2d(8, 16, 3, padding="same"), (2, 8, 6, 6)),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_and_layouts(name, layout, dynamic):
    model, shape = WINDOWS[name]
    x = torch.randn(shape).to(memory_format=layout)
    check(lambda x: F.relu(model(x)), x, dynamic=dynamic)
    assert counters["ipex"] == {"conv+relu": 1}


RESIDUALS = {
    "conv first": (lambda y, z: F.relu(y + z), "conv+add+relu"),
    "conv second": (lambda y, z: F.relu(z + y), "conv+add+relu"),
    "in place": (lambda y, z: y.add_(z).relu_(), "conv+add+relu"),
    "without relu": (lambda y, z: y + z, "conv+add"),
    "then gelu": (lambda y, z: F.gelu(y + z), "conv+add"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", RESIDUALS)
def test_residuals(name, dtype):
    fn, rule = RESIDUALS[name]
    conv = nn.Conv2d(8, 16, 3, dtype=dtype)
    x, z = torch.randn(2, 8, 6, 6, dtype=dtype), torch.randn(2, 16, 4, 4, dtype=dtype)
    # bf16: eager rounds after each of three steps, oneDNN once: two ulp of the largest value.
    check(lambda x, z: fn(conv(x), z.clone()), x, z, atol=2e-5 if dtype.itemsize == 4 else 2**-6)
    assert counters["ipex"] == {rule: 1}


CONV = nn.Conv2d(8, 16, 3)
X = torch.randn(2, 8, 6, 6)

NEAR_MISSES = {
    "a broadcast addend": lambda x: CONV(x) + x[0, 0, 0, 0],
    "a number added": lambda x: F.relu(CONV(x) + 1.0),
    "a broadcast row": lambda x: CONV(x) + x[:, :1, :4, :4],
    "a scaled addend": lambda x: torch.add(CONV(x), x[:, :1, :4, :4].expand(2, 16, 4, 4), alpha=2),
    "two users": lambda x: (lambda y: F.relu(y) * y)(CONV(x)),
    "a cast between": lambda x: F.relu(CONV(x).double()).float(),
    "a view between": lambda x: F.relu(CONV(x).view(2, 4, 4, 16)),
    "the weight is an input": lambda x: F.silu(F.conv2d(x, x[:, :, :3, :3] * 2)),
    "fp64": lambda x: F.relu(F.conv2d(x.double(), CONV.weight.double())),
    "empty": lambda x: F.relu(CONV(x[:0])),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_right(name):
    check(NEAR_MISSES[name], X)
    assert not counters["ipex"]


def batch_norm(channels, affine=True, dims=2, dtype=torch.float32):
    """Statistics and gains far from the identity, so that a wrong fold shows."""
    norm = getattr(nn, f"BatchNorm{dims}d")(channels, affine=affine, dtype=dtype)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.1, 3)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm.eval()


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_batch_norm_folds(dims, groups, bias, affine):
    conv = getattr(nn, f"Conv{dims}d")(8, 16, 3, groups=groups, bias=bias, dilation=2)
    x = torch.randn(2, 8, *[7] * dims)
    check(nn.Sequential(conv, batch_norm(16, affine, dims)), x)
    assert counters["ipex"] == {"conv2d+batch_norm": 1}


def test_folding_is_exact_in_float64():
    """The rewrite itself, judged where rounding cannot hide it: relative 1e-10."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3), batch_norm(16), nn.ReLU()).double().eval()
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    check(model, x, atol=1e-10)
    assert counters["ipex"]["conv2d+batch_norm"] == 1


def test_bf16_folds_are_as_near_the_truth_as_eager():
    model = nn.Sequential(nn.Conv2d(8, 16, 3), batch_norm(16), nn.ReLU()).eval()
    x = torch.randn(4, 8, 16, 16)
    low = nn.Sequential(*model).to(torch.bfloat16)
    low_x = x.to(torch.bfloat16)
    with torch.no_grad():
        eager, ours = low(low_x), compiled(low)(low_x)
        truth = low.double()(low_x.double())
    error, limit = ((y.double() - truth).square().mean().sqrt() for y in (ours, eager))
    assert counters["ipex"] == {"conv2d+batch_norm": 1, "conv+relu": 1}
    assert error <= 2 * limit, "the fold rounds the weight once more than eager"


@torch.no_grad()
def test_folded_weights_follow_every_change():
    model = nn.Sequential(nn.Conv2d(8, 16, 3), batch_norm(16), nn.ReLU()).eval()
    fn = compiled(model)
    for change in (
        lambda: model[0].weight.mul_(2),
        lambda: model[0].bias.add_(1),
        lambda: model[1].running_mean.add_(1),
        lambda: model[1].running_var.mul_(3),
        lambda: model[1].weight.neg_(),
        lambda: model[1].bias.sub_(1),
    ):
        fn(X)
        change()
        torch.testing.assert_close(fn(X), model(X), rtol=1e-4, atol=1e-4)


class TwoUsers(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 16, 3), batch_norm(16)

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y.mean()


class Shared(nn.Module):
    """One convolution under two norms: each call is a node of its own, so both may fold."""

    def __init__(self):
        super().__init__()
        self.conv, self.a, self.b = nn.Conv2d(8, 16, 3), batch_norm(16), batch_norm(16)

    def forward(self, x):
        return self.a(self.conv(x)) * self.b(self.conv(x))


NOT_FOLDED = {
    "two users": (TwoUsers(), "2 users"),
    "nothing before": (batch_norm(8), "not the result of a convolution"),
    "relu between": (
        nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), batch_norm(16)),
        "not the result of a convolution",
    ),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(8, 16, 3), batch_norm(16)), "transposed"),
}


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_not_folded_for_a_reason(name):
    model, reason = NOT_FOLDED[name]
    check(model.eval(), X)
    (found,) = misses("conv2d+batch_norm")
    assert reason in found
    assert "conv2d+batch_norm" not in counters["ipex"]


def test_a_shared_convolution_folds_into_each_call():
    check(Shared().eval(), X)
    assert counters["ipex"]["conv2d+batch_norm"] == 2


def test_batch_norm_in_training_mode_is_left_alone():
    model = nn.Sequential(nn.Conv2d(8, 16, 3), batch_norm(16).train())
    check(model, X)
    assert not counters["ipex"]


@pytest.mark.parametrize("rules", ["-conv2d+batch_norm", "-*"])
def test_folding_can_be_switched_off(rules):
    model = nn.Sequential(nn.Conv2d(8, 16, 3), batch_norm(16)).eval()
    with torch.no_grad():
        got = torch.compile(model, backend="ipex", options={"rules": rules})(X)
        torch.testing.assert_close(got, model(X), rtol=1e-4, atol=1e-4)
    assert not counters["ipex"]


@torch.no_grad()
def test_autocast_folds_and_fuses():
    model = nn.Sequential(nn.Conv2d(8, 16, 3), batch_norm(16), nn.ReLU()).eval()

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    got, want, truth = compiled(fn)(X), fn(X), model.double()(X.double())
    assert got.dtype == want.dtype
    errors = [(y.double() - truth).square().mean().sqrt() for y in (got, want)]
    assert counters["ipex"] == {"conv2d+batch_norm": 1, "conv+relu": 1}
    assert errors[0] <= 2 * errors[1], "the fold rounds the weight once more than eager"
