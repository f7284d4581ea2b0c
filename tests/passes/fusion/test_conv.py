"""Convolutions: what follows them fused, and what must be left alone."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from support.helpers import has_kernels


def compiled(fn, dynamic=None, **options):
    return torch.compile(fn, backend="ipex", dynamic=dynamic, options={"strict": True, **options})


def check(fn, *args, atol=2e-5):
    with torch.no_grad():
        judge(compiled(fn)(*args), fn(*args), atol)


def judge(got, want, atol=2e-5):
    """Same value, dtype, shape and strides as eager (a stride over one element means nothing).

    2e-5: fp32 sums of some 100 terms near 1.
    """
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    strides = [
        (a, b) for n, a, b in zip(got.shape, got.stride(), want.stride(), strict=True) if n != 1
    ]
    assert all(a == b for a, b in strides), (got.stride(), want.stride())
    scale = want.abs().max().clamp(min=1).item() if want.numel() else 1
    torch.testing.assert_close(got, want, rtol=0, atol=atol * scale)


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
    "valid padding": (nn.Conv2d(8, 16, 3, padding="valid"), (2, 8, 6, 6)),
    "valid padding, dilated": (nn.Conv2d(8, 16, 3, dilation=2, padding="valid"), (2, 8, 6, 6)),
}


# Quickly all in one graph, and of sizes that vary a few.
LAYOUTS = (torch.contiguous_format, torch.channels_last)
HOW = [
    pytest.param([*WINDOWS], LAYOUTS[0], False, id="all-static"),
    pytest.param([*WINDOWS][::9], LAYOUTS[1], True, id="a few-dynamic"),
    *(
        pytest.param([how[0]], *how[1:], marks=pytest.mark.slow, id="-".join(map(str, how)))
        for how in itertools.product(WINDOWS, LAYOUTS, (False, True))
    ),
]


@pytest.mark.parametrize(("names", "layout", "dynamic"), HOW)
def test_windows_and_layouts(names, layout, dynamic):
    models = [WINDOWS[name][0] for name in names]
    xs = [torch.randn(WINDOWS[name][1]).to(memory_format=layout) for name in names]

    def fn(*xs):
        return [F.relu(model(x)) for model, x in zip(models, xs, strict=True)]

    with torch.no_grad():
        for got, want in zip(compiled(fn, dynamic=dynamic)(*xs), fn(*xs), strict=True):
            judge(got, want)
    assert counters["ipex"] == {"conv+relu": len(names)}


RESIDUALS = {
    "conv first": (lambda y, z: F.relu(y + z), "conv+add+relu"),
    "conv second": (lambda y, z: F.relu(z + y), "conv+add+relu"),
    "in place": (lambda y, z: y.add_(z).relu_(), "conv+add+relu"),
    "without relu": (lambda y, z: y + z, "conv+add"),
    "then gelu": (lambda y, z: F.gelu(y + z), "conv+add"),
}


@pytest.mark.sampled("conv second-bf16", "in place-fp32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", RESIDUALS)
def test_residuals(name, dtype):
    fn, rule = RESIDUALS[name]
    conv = nn.Conv2d(8, 16, 3, dtype=dtype)
    x, z = torch.randn(2, 8, 6, 6, dtype=dtype), torch.randn(2, 16, 4, 4, dtype=dtype)
    # bf16: eager rounds after each of three steps, oneDNN once: two ulp of the largest value.
    check(lambda x, z: fn(conv(x), z.clone()), x, z, atol=2e-5 if dtype.itemsize == 4 else 2**-6)
    assert counters["ipex"] == ({rule: 1} if has_kernels(dtype) else {})


A, B, C = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)


def _twice(x):
    y = F.relu(A(x))
    y = F.relu(B(y) + y)
    z = F.relu(C(y))
    return F.relu(B(z) + y)


# Graph, and the sums written over their addend: torch's out-of-place call copies the addend first.
SUMS = {
    "block": (lambda x: F.relu(C(B(y := A(x))) + y), 1),
    "blocks in a row": (lambda x: _twice(F.relu(A(x))), 1),
    "no relu": (lambda x: B(y := A(x)) - B(y) + y, 0),
    "convolved by itself": (lambda x: F.relu(B(y := A(x)) + y), 0),
    "read later": (lambda x: F.relu(C(B(y := A(x))) + y) * y, 0),
    "read later by a convolution": (lambda x: B(F.relu(C(B(y := A(x))) + y)) - A(y), 0),
    "returned": (lambda x: (y := A(x), F.relu(C(B(y)) + y))[1] + y.sum(), 0),
    "seen through a view": (lambda x: F.relu(C(B(y := A(x))) + y) + y[:, :1], 0),
    "an input": (lambda x: F.relu(C(B(x)) + x), 0),
    "subtracted": (lambda x: C(B(y := A(x))) - y, 0),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.sampled
@pytest.mark.usefixtures("in_python")
def test_sums_take_the_place_of_an_addend_that_dies(name):
    fn, sums = SUMS[name]
    x = torch.randn(2, 8, 6, 6)
    kept = x.clone()
    with torch.no_grad():
        plain = compiled(fn, blocked_products=False)  # torch's, whatever else would be faster
        got, (code, *_) = run_and_get_code(plain, x)
        # fp32 sums of some 100 terms near 1, three deep
        torch.testing.assert_close(got, fn(x), rtol=0, atol=1e-4)
    assert code.count("_convolution_pointwise_.binary(") == sums
    assert torch.equal(x, kept)


CONV = nn.Conv2d(8, 16, 3)
X = torch.randn(2, 8, 6, 6)

NEAR_MISSES = {
    "a broadcast addend": lambda x: CONV(x) + x[0, 0, 0, 0],
    "a number added": lambda x: F.relu(CONV(x) + 1.0),
    "a broadcast row": lambda x: CONV(x) + x[:, :1, :4, :4],
    "a scaled addend": lambda x: torch.add(CONV(x), x[:, :1, :4, :4].expand(2, 16, 4, 4), alpha=2),
    "two users": lambda x: (lambda y: F.relu(y) * y)(CONV(x)),
    "a cast between": lambda x: F.relu(CONV(x).double()).float(),
    "a turned copy between": lambda x: F.relu(CONV(x).transpose(1, 2).contiguous()),
    "a part between": lambda x: F.relu(CONV(x)[:, :4]),
    "the weight is an input": lambda x: F.silu(F.conv2d(x, x[:, :, :3, :3] * 2)),
    "fp64": lambda x: F.relu(F.conv2d(x.double(), CONV.weight.double())),
    "empty": lambda x: F.relu(CONV(x[:0])),
}


def test_a_view_between_is_moved_behind_the_activation(op_by_op):
    check(lambda x: F.relu(CONV(x).view(2, 4, 4, 16)), X)
    assert counters["ipex"] == {"conv|view": 1, "conv+relu": 1}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_right(op_by_op, name):
    check(NEAR_MISSES[name], X)
    assert not counters["ipex"]
