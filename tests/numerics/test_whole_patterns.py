"""Rules that are no epilogue: gated linears, pad, attention, linears on one input, what is left."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor import report
from ipex_inductor.passes import attention

# Another order of summation, results near 1; in low precision also what eager rounds between.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}

ONE, TWO = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
CONV, LINE = nn.Conv2d(4, 6, 3), nn.Conv1d(4, 6, 3, padding=1)
NORM, TABLE = nn.LayerNorm(8), nn.Embedding(9, 8)
IMAGE, ROWS = torch.randn(2, 4, 5, 5), torch.randn(2, 3, 8)


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="ipex", options={"strict": True}, **kwargs)


def found(fn, *args, **kwargs):
    with torch.no_grad():
        got = compiled(fn, **kwargs)(*args)
        want = fn(*args)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    tolerance = TOLERANCE.get(got.dtype, 1e-14) * max(1, want.abs().max()) if want.numel() else 0
    torch.testing.assert_close(got, want, rtol=0, atol=float(tolerance), equal_nan=True)
    return dict(counters["ipex"])


def events(name):
    return [e for r in report.reports() for e in r.events if e.subject == name]


FIRE = {
    "silu(linear)*linear": (lambda x: F.silu(ONE(x)) * TWO(x), ROWS),
    "gelu(linear)*linear": (lambda x: TWO(x) * F.gelu(ONE(x)), ROWS[0]),
    "gelu_tanh(linear)*linear": (lambda x: F.gelu(ONE(x), approximate="tanh") * TWO(x), ROWS),
    "linear|linear": (lambda x: torch.cat([ONE(x), TWO(x)], -1), ROWS),
}


@pytest.mark.parametrize("name", FIRE)
def test_linear_rules_fire(op_by_op, name):
    assert found(*FIRE[name]) == {name: 1}


PADS = {"all": (2, 2, 1, 1), "last only": (2, 2)}


@pytest.mark.parametrize("name", PADS)
def test_pad_enters_the_window(op_by_op, name):
    assert found(lambda x: CONV(F.pad(x, PADS[name])), IMAGE) == {"pad+conv": 1}


def test_pad_enters_the_window_of_a_line(op_by_op):
    assert found(lambda x: LINE(F.pad(x, (2, 2))), IMAGE[:, :, 0]) == {"pad+conv": 1}


NO_PADS = {
    "uneven": lambda x: CONV(F.pad(x, (2, 1, 1, 1))),
    "cropping": lambda x: CONV(F.pad(x, (-1, -1))),
    "not zero": lambda x: CONV(F.pad(x, (1, 1), value=1.0)),
    "reflected": lambda x: CONV(F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "channels": lambda x: CONV(F.pad(x[:, :2], (0, 0, 0, 0, 1, 1))),
    "second user": lambda x: (lambda y: CONV(y) + y.sum())(F.pad(x, (1, 1)) / 8),
}


@pytest.mark.parametrize("name", NO_PADS)
def test_pad_is_left_where_it_is_no_window(op_by_op, name):
    found(NO_PADS[name], IMAGE)
    assert "pad+conv" not in counters["ipex"]


# Attention


def eighths(*shape):
    """Exact in every dtype."""
    return torch.randint(-8, 8, shape) / 8


QUERY, KEY = (torch.randn(2, 5, 3, 8).transpose(1, 2) for _ in "qk")
VALUE, MASK, BIAS = torch.randn(2, 3, 5, 8), eighths(2, 1, 1, 5), eighths(3, 5, 5)
KEEP = torch.rand(2, 1, 5, 5) < 0.5
KEEP[0, 0, 2] = False  # a row masked whole


def product(q, k):
    return q @ k.transpose(-1, -2)


def lowest(x):
    return torch.finfo(x.dtype).min


def causal():
    return torch.ones(5, 5, dtype=torch.bool).tril()


# The probabilities of (query, key), for which there are a MASK, a BIAS and what to KEEP.
PROBABILITIES = {
    "q/s@k": lambda q, k: F.softmax(product(q / 2.5, k), -1),
    "q*s@k": lambda q, k: F.softmax(product(q * 0.4, k) + MASK.to(q), -1),
    "q@k/s": lambda q, k: F.softmax(MASK.to(q) + product(q, k) / 2.5, -1),
    "q@k*s": lambda q, k: F.softmax(product(q, k) * 0.4 + MASK.to(q), -1),
    "q@k": lambda q, k: F.softmax(product(q, k), 3),
    "in fp32": lambda q, k: F.softmax(product(q, k) * 0.4, -1, dtype=torch.float32).to(q.dtype),
    "masked in fp32": lambda q, k: F.softmax(product(q, k).float() + MASK, -1).type_as(q),
    "a mask in fp32": lambda q, k: F.softmax(product(q, k) + MASK, -1).type_as(q),
    "two masks": lambda q, k: F.softmax(product(q, k) + BIAS.to(q) + MASK.to(q), -1),
    "0-d scale": lambda q, k: F.softmax(product(q, k) / torch.full([], 2.5, dtype=q.dtype), -1),
    "two scales": lambda q, k: F.softmax(product(q / 2, k) / 1.5 / 2 + MASK.to(q), -1),
    "where": lambda q, k: F.softmax(torch.where(KEEP, product(q, k), lowest(q)), -1),
    "masked_fill": lambda q, k: F.softmax(product(q, k).masked_fill(~KEEP, lowest(q)), -1),
    "masked and filled": lambda q, k: F.softmax(
        torch.where(KEEP, product(q, k) * 0.4 + BIAS.to(q), lowest(q)), -1
    ),
    "causal": lambda q, k: F.softmax(product(q, k).masked_fill(~causal(), -torch.inf), -1),
    "windows": lambda q, k: F.softmax(
        ((product(q, k) + BIAS.to(q)).view(1, 2, 3, 5, 5) + MASK.to(q)[None]).view(2, 3, 5, 5), -1
    ),
}


@pytest.fixture
def amx(monkeypatch):
    """As on a CPU on which bf16 is not left to Inductor."""
    monkeypatch.setattr(attention, "architecture", lambda: "x86-64:amx")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", PROBABILITIES)
def test_attention_by_hand(op_by_op, amx, name, dtype, dynamic):
    """As near to the float64 run as eager may be, a row masked whole included."""
    inputs = [x.to(dtype) for x in (QUERY, KEY, VALUE)]

    def attend(q, k, v):
        return PROBABILITIES[name](q, k) @ v

    truth = attend(*(x.double() for x in inputs))
    with torch.no_grad():
        got = compiled(attend, dynamic=dynamic)(*inputs)
    assert got.stride() == attend(*inputs).stride()
    torch.testing.assert_close(got.double(), truth, rtol=0, atol=TOLERANCE[dtype])
    assert counters["ipex"] == {attention.NAME: 1}


LAYOUTS = {
    "contiguous": (VALUE, VALUE.sin(), VALUE.cos()),
    "flipped": (QUERY.flip(2), KEY.flip(0), VALUE.flip(-1)),
    "every other": (*(torch.randn(2, 3, 10, 8)[:, :, ::2] for _ in "qk"), VALUE),
    "keys for all": (QUERY, KEY[:1, :1].expand(2, 3, 5, 8), VALUE),
    "no batch": (QUERY[:0], KEY[:0], VALUE[:0]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_of_any_layout(name):
    found(lambda q, k, v: F.softmax(product(q, k) / 2 + BIAS, -1) @ v, *LAYOUTS[name])
    assert counters["ipex"] == {attention.NAME: 1}


def test_layers_share_the_sum_of_their_masks(op_by_op, monkeypatch):
    traced, inline = [], attention.inline
    monkeypatch.setattr(attention, "inline", lambda *args: traced.append(args) or inline(*args))

    def attend(q, k, v):
        for _ in range(2):
            q = F.softmax(product(q, k) + BIAS + MASK, -1) @ v
        return q

    assert found(attend, QUERY, KEY, VALUE) == {attention.NAME: 2}
    assert len(traced) == 3  # two layers, one sum


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bf16_is_left_where_that_is_faster(op_by_op, monkeypatch, dtype):
    monkeypatch.setattr(attention, "architecture", lambda: attention.SLOW)
    q, k, v = (x.to(dtype) for x in (QUERY, KEY, VALUE))
    with torch.no_grad():
        compiled(lambda q, k, v: F.softmax(product(q, k) / 2, -1) @ v)(q, k, v)
    kind = "left" if dtype == torch.bfloat16 else "fired"
    assert [e.kind for e in events(attention.NAME)] == [kind]


LEFT = {
    "add+layer_norm": (lambda x: NORM(x + x.sin()), ROWS),
    "embedding+layer_norm": (lambda t: NORM(TABLE(t)), torch.arange(6).view(2, 3)),
    "div+add+softmax": (lambda s: F.softmax(s / 8 + s[:, :1, :1], -1), IMAGE),
    "view+transpose+contiguous+view": (
        lambda x: x.view(2, 2, 2, 5, 5).transpose(1, 2).contiguous().view(2, 4, 5, 5),
        IMAGE,
    ),
    "bmm+gelu": (lambda x: F.gelu(torch.baddbmm(x[:, :1], x, x)), IMAGE[0]),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_said(op_by_op, name):
    assert found(*LEFT[name]) == {}
    left = [e for r in report.reports() for e in r.events if e.kind == "left"]
    assert [e.subject for e in left] == [name]
    assert "left_to_inductor" in left[0].reason
