"""Rules that are no epilogue: gated linears, pad, attention, linears on one input, what is left."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor.passes.attention import attention
from ipex_inductor.reporting import decisions
from support.helpers import has_kernels

# Another order of summation, results near 1; in low precision also what eager rounds between.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}

DYNAMIC = {False: "static", True: "dynamic"}

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
    return [e for r in decisions.reports() for e in r.events if e.subject == name]


HOW = ("name", "dtype", "dynamic")


def in_turns(names):
    """Each name in each dtype. Sizes that vary take five times as long: one dtype each, in turn."""
    turns = set(zip(names, itertools.cycle(TOLERANCE), strict=False))

    def marks(name, dtype, dynamic):
        return [pytest.mark.slow] if dynamic and (name, dtype) not in turns else []

    return [
        pytest.param(*how, marks=marks(*how), id=f"{how[0]}-{how[1]}-{DYNAMIC[how[2]]}")
        for how in itertools.product(names, TOLERANCE, DYNAMIC)
    ]


# What fires, or is left to Inductor, in every dtype

FIRE = {
    "silu(linear)*linear": (lambda x: F.silu(ONE(x)) * TWO(x), ROWS),
    "gelu(linear)*linear": (lambda x: TWO(x) * F.gelu(ONE(x)), ROWS[0]),
    "gelu_tanh(linear)*linear": (lambda x: F.gelu(ONE(x), approximate="tanh") * TWO(x), ROWS),
    "linear|linear": (lambda x: torch.cat([ONE(x), TWO(x)], -1), ROWS),
    "pad+conv": (lambda x: CONV(F.pad(x, (2, 2, 1, 1))), IMAGE),
    "pad+conv of rows": (lambda x: CONV(F.pad(x, (2, 2))), IMAGE),
    "pad+conv of a line": (lambda x: LINE(F.pad(x, (2, 2))), IMAGE[:, :, 0]),
    "pad+conv of groups": (
        lambda x: F.conv2d(F.pad(x, (1, 1)), CONV.weight[:, :2], groups=2, dilation=2, stride=2),
        IMAGE,
    ),
}


@torch._dynamo.config.patch(error_on_recompile=True)
def test_pad_keeps_the_batch_dynamic(op_by_op):
    fn = torch.compile(lambda x: CONV(F.pad(x, (1, 1))), backend="ipex", dynamic=True)
    with torch.no_grad():
        for batch in (2, 3):
            assert len(fn(torch.randn(batch, 4, 5, 5))) == batch
    assert counters["ipex"] == {"pad+conv": 1}


LEFT = {
    "add+layer_norm": (lambda x: NORM(x + x.sin()), ROWS),
    "embedding+layer_norm": (lambda t: NORM(TABLE(t)), torch.arange(6).view(2, 3)),
    "add+rms_norm": (lambda x: root_mean_square(x + x.sin()), ROWS),
    "div+add+softmax": (lambda s: F.softmax(s / 8 + s[:, :1, :1], -1), IMAGE),
    "view+transpose+contiguous+view": (
        lambda x: x.view(-1, 2, 2, 5, 5).transpose(1, 2).contiguous().view(-1, 4, 5, 5),
        IMAGE,
    ),
    "bmm+gelu": (lambda x: F.gelu(torch.baddbmm(x[:, :1], x, x)), IMAGE[0]),
}


def root_mean_square(x):
    wide = x.to(torch.float32)
    return NORM.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.fixture
def dtype(request):
    """Each dtype, and the modules in it."""
    modules = (ONE, TWO, CONV, LINE, NORM, TABLE)
    for module in modules:
        module.to(request.param)
    yield request.param
    for module in modules:
        module.float()


def given(x, dtype):
    return x.to(dtype) if x.is_floating_point() else x


@pytest.mark.parametrize(HOW, in_turns(FIRE), indirect=["dtype"])
@pytest.mark.sampled
def test_rules_fire(op_by_op, name, dtype, dynamic):
    fn, x = FIRE[name]
    rule = name.split(" of ")[0]
    fired = found(fn, given(x, dtype), dynamic=dynamic)
    if rule == "linear|linear" and dynamic:
        assert [e.reason for e in events(rule)] == ["the number of rows is not known"]
    elif rule == "pad+conv" or has_kernels(dtype):
        assert fired == {rule: 1}


@pytest.mark.parametrize(HOW, in_turns(LEFT), indirect=["dtype"])
@pytest.mark.sampled
def test_what_is_left_is_said(op_by_op, name, dtype, dynamic):
    fn, x = LEFT[name]
    assert found(fn, given(x, dtype), dynamic=dynamic) == {}
    left = [e for r in decisions.reports() for e in r.events if e.kind == "left"]
    assert [e.subject for e in left] == [name]
    assert "left_to_inductor" in left[0].reason


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


@pytest.mark.parametrize(HOW, in_turns(PROBABILITIES))
@pytest.mark.sampled
def test_attention_by_hand(op_by_op, name, dtype, dynamic):
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
}


@pytest.mark.sampled("contiguous-static", "flipped-dynamic")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_of_any_layout(name, dynamic):
    found(
        lambda q, k, v: F.softmax(product(q, k) / 2 + BIAS, -1) @ v, *LAYOUTS[name], dynamic=dynamic
    )
    assert counters["ipex"] == {attention.NAME: 1}


def test_two_fills_that_leave_every_row_a_score(op_by_op):
    """With -inf: of two that do not, torch's kernel makes zeros, and eager NaN."""
    assert found(without(0, 0), *QKV) == {attention.NAME: 1}


def test_attention_of_nothing(op_by_op):
    """Fused or not: torch 2.11 has a kernel for no batch, 2.13 has none."""
    found(lambda q, k, v: F.softmax(product(q, k), -1) @ v, QUERY[:0], KEY[:0], VALUE[:0])


def test_a_view_of_the_result(op_by_op):
    """torch's kernel has its result in another order of strides."""

    def attend(q, k, v):
        return (F.softmax(product(q, k), -1) @ v).view(2, 15, 8).cos()

    assert found(attend, QUERY, KEY, VALUE) == {attention.NAME: 1}


def test_layers_share_the_sum_of_their_masks(op_by_op, monkeypatch):
    traced, inline = [], attention.inline
    monkeypatch.setattr(attention, "inline", lambda *args: traced.append(args) or inline(*args))

    def attend(q, k, v):
        for _ in range(2):
            q = F.softmax(product(q, k) + BIAS + MASK, -1) @ v
        return q

    assert found(attend, QUERY, KEY, VALUE) == {attention.NAME: 2}
    assert len(traced) == 3  # two layers, one sum


MASKS = {
    "added in 16 bits": (lambda s: F.softmax(s + BIAS.to(s), -1, dtype=torch.float32), None),
    "viewed behind": (
        lambda s: F.softmax((s + BIAS.to(s)).float().view(6, 5, 5).view(2, 3, 5, 5), -1),
        None,
    ),
    "added in fp32": (
        lambda s: F.softmax(s.float() + BIAS, -1),
        "the mask is in torch.float32, and kernels read it in torch.bfloat16",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_in_the_dtype_of_the_query(name, monkeypatch):
    """Kernels of GPUs refuse another when they run, which the trial on fakes does not show."""
    scores, reason = MASKS[name]
    given = []
    attend = attention._attend
    monkeypatch.setattr(attention, "on_cpu", lambda node: False)  # there is no GPU here
    monkeypatch.setattr(
        attention, "_attend", lambda *args, **kw: given.append(args[3]) or attend(*args, **kw)
    )
    inputs = [x.bfloat16() for x in (QUERY, KEY, VALUE)]
    found(lambda q, k, v: scores(product(q, k)).to(q.dtype) @ v, *inputs)
    (event,) = (e for r in decisions.reports() for e in r.events if e.subject == attention.NAME)
    assert (event.kind, event.reason) == (("missed", reason) if reason else ("fired", ""))
    assert {mask.dtype for mask in given} == ({torch.bfloat16} if not reason else set())


FEW = [(torch.bfloat16, 1024, True), (torch.bfloat16, 1025, False), (torch.float16, 5, False)]
FEW += [(torch.float32, 500, True), (torch.float32, 600, False)]


ONCE = [(torch.bfloat16, 1024, True), (torch.float32, 600, False)]  # of sizes that vary


@pytest.mark.parametrize(
    ("dtype", "tokens", "left", "dynamic"),
    [
        pytest.param(
            *case, dynamic, marks=[pytest.mark.slow] if dynamic and case not in ONCE else []
        )
        for case in FEW
        for dynamic in DYNAMIC
    ],
)
def test_few_scores_are_left_where_that_is_faster(
    op_by_op, monkeypatch, dtype, tokens, left, dynamic
):
    monkeypatch.setattr(attention, "architecture", lambda: "x86-64:avx512_bf16")
    q, k, v = torch.randn(3, 1, 6, tokens, 8).to(dtype)
    with torch.no_grad():
        compiled(lambda q, k, v: F.softmax(product(q, k) / 2, -1) @ v, dynamic=dynamic)(q, k, v)
    assert [e.kind for e in events(attention.NAME)] == ["left" if left else "fired"]


# Near-misses

QKV = (QUERY, KEY, VALUE)
HALF = tuple(x.half() for x in QKV)
GIVEN, WIDE = torch.randn(16, 8), torch.randn(2, 10, 4, 4)
FIXED = nn.Parameter(torch.randn(6, 16), requires_grad=False)
BIASED = nn.Linear(8, 16)
DOUBLE = [nn.Linear(8, 16, bias=False).double() for _ in range(2)]
DOUBLE_CONV = nn.Conv2d(4, 6, 3).double()


def between(fn):
    """Attention with `fn` between the two products."""
    return lambda q, k, v: fn(product(q, k)) @ v


def filled(value, drop=lambda: ~KEEP):
    return between(lambda s: F.softmax(s.masked_fill(drop(), value), -1))


def without(*parities):
    """Scores of -inf in the even columns (0), in the odd ones (1), in all of them."""

    def fill(s):
        for parity in parities:
            s = s.masked_fill(torch.arange(5) % 2 == parity, -torch.inf)
        return F.softmax(s, -1)

    return between(fill)


def twice(fn, make):
    """`fn` of what `make` gives, which is used once more."""
    return lambda *args: (lambda y: fn(y, *args) + y.mean())(make(*args))


def each(one, other=None):
    """Two products of one input, side by side."""
    return lambda x: torch.cat([one(x), (other or one)(x)], -1)


# Of each rule: what only looks like its pattern, with the reason that is given; None where it is
# not even looked at.
MISSES = {
    attention.NAME: {
        "probabilities are returned": (
            twice(lambda p, q, k, v: p @ v, lambda q, k, v: F.softmax(product(q, k), -1)),
            QKV,
            "the probabilities have 2 users",
        ),
        "scores are returned": (
            twice(lambda s, q, k, v: F.softmax(s / 2, -1) @ v, lambda q, k, v: product(q, k)),
            QKV,
            "the scores have 2 users",
        ),
        "filled with -inf": (filled(-torch.inf), QKV, "a row may be masked whole"),
        "a row of -inf": (filled(-torch.inf, causal), QKV, "a row is masked whole"),
        "rows of -inf by two fills": (
            without(0, 1),
            QKV,
            "a row is masked whole",
        ),
        "filled with -10000": (filled(-1e4), QKV, "would not stay uniform"),
        "filled with -100 in fp16": (filled(-100), HALF, "would not stay uniform"),
        "filled with a tensor": (
            between(lambda s: F.softmax(torch.where(KEEP, s, MASK), -1)),
            QKV,
            "masked scores become no constant",
        ),
        "filled, then rounded": (
            between(lambda s: F.softmax(torch.where(causal(), s.float(), -3e38).half(), -1)),
            HALF,
            "masked scores are rounded",
        ),
        "filled in fp16, then masked": (
            between(lambda s: F.softmax(torch.where(KEEP, s, lowest(s)) + MASK.half(), -1)),
            HALF,
            "in float16, a mask is added",
        ),
        "masked, then scaled": (
            between(lambda s: F.softmax((s + MASK) / 2, -1)),
            QKV,
            "scaled after they are masked",
        ),
        "a computed scale": (
            between(lambda s: F.softmax(s * MASK.sum(), -1)),
            QKV,
            "the scale is not a number",
        ),
        "a number added": (between(lambda s: F.softmax(s + 1, -1)), QKV, "a number is added"),
        "a scaled mask": (
            between(lambda s: F.softmax(torch.add(s, MASK, alpha=2), -1)),
            QKV,
            "what is added is scaled",
        ),
        "capped": (between(lambda s: F.softmax(s.tanh() * 9, -1)), QKV, "aten.tanh.default is no"),
        "fp64": (
            between(lambda s: F.softmax(s, -1)),
            tuple(x.double() for x in QKV),
            "no fused attention in torch.float64",
        ),
        "without heads": (
            between(lambda s: F.softmax(s, -1)),
            tuple(x[0] for x in QKV),
            "are not [batch, heads, tokens, width]",
        ),
        "broadcast to the mask": (
            between(lambda s: F.softmax(s + MASK, -1)),
            tuple(x[:1] for x in QKV),
            "the scores are broadcast",
        ),
        "a narrower value": (
            between(lambda s: F.softmax(s, -1)),
            (QUERY, KEY, VALUE[..., :4]),
            "no fused kernel",
        ),
        "keys across": (
            lambda q, k, v: F.softmax(q @ k, -1) @ v,
            (QUERY, torch.randn(2, 3, 8, 5), VALUE),
            "no fused kernel",
        ),
        "another dimension": (between(lambda s: F.softmax(s, -2)), QKV, None),
        "dropout": (between(lambda s: F.dropout(F.softmax(s, -1), 1.0)), QKV, None),
        "scaled probabilities": (between(lambda s: F.softmax(s, -1) * 2), QKV, None),
    },
    "silu(linear)*linear": {
        "two inputs": (lambda x: F.silu(ONE(x)) * TWO(x.sin()), (ROWS,), None),
        "the gate is used twice": (
            twice(lambda y, x: y * TWO(x), lambda x: F.silu(ONE(x))),
            (ROWS,),
            None,
        ),
        "the other is used twice": (twice(lambda y, x: F.silu(ONE(x)) * y, TWO), (ROWS,), None),
        "a given weight": (
            lambda x, w: F.silu(F.linear(x, w)) * TWO(x),
            (ROWS, GIVEN),
            "gate is not a parameter or buffer",
        ),
        "the other weight given": (
            lambda x, w: F.silu(ONE(x)) * F.linear(x, w),
            (ROWS, GIVEN),
            "weight is not a parameter or buffer",
        ),
        "fp64": (
            lambda x: F.silu(DOUBLE[0](x)) * DOUBLE[1](x),
            (ROWS.double(),),
            "torch.float64",
        ),
        "cast between": (lambda x: F.silu(ONE(x).double()) * TWO(x), (ROWS,), None),
        "view between": (lambda x: F.silu(ONE(x)).mT * TWO(x).mT, (ROWS,), None),
        "added": (lambda x: F.silu(ONE(x)) + TWO(x), (ROWS,), None),
        "a column": (lambda x: F.silu(ONE(x)) * TWO(x)[..., :1], (ROWS,), None),
        "dropout": (lambda x: F.dropout(F.silu(ONE(x)), 1.0) * TWO(x), (ROWS,), None),
        "no rows": (lambda x: F.silu(ONE(x)) * TWO(x), (ROWS[:0],), ""),
    },
    "pad+conv": {
        "uneven": (lambda x: CONV(F.pad(x, (2, 1, 1, 1))), (IMAGE,), "not the same on both sides"),
        "cropping": (lambda x: CONV(F.pad(x, (-1, -1))), (IMAGE,), "the padding crops"),
        "channels": (
            lambda x: CONV(F.pad(x[:, :2], (0, 0, 0, 0, 1, 1))),
            (IMAGE,),
            "batch or channels are padded",
        ),
        "not zero": (lambda x: CONV(F.pad(x, (1, 1), value=1.0)), (IMAGE,), None),
        "reflected": (lambda x: CONV(F.pad(x, (1, 1, 1, 1), mode="reflect")), (IMAGE,), None),
        "used twice": (twice(lambda y, x: CONV(y), lambda x: F.pad(x, (1, 1))), (IMAGE,), None),
        "cast between": (lambda x: DOUBLE_CONV(F.pad(x, (1, 1)).double()), (IMAGE,), None),
        "view between": (lambda x: CONV(F.pad(x, (1, 1)).mT), (IMAGE,), None),
        "op between": (lambda x: CONV(F.pad(x, (1, 1)).cos()), (IMAGE,), None),
        "transposed": (
            lambda x: F.conv_transpose2d(F.pad(x, (1, 1)), CONV.weight.mT[:4]),
            (IMAGE,),
            None,
        ),
    },
    "linear|linear": {
        "many rows": (each(ONE, TWO), (ROWS.repeat(9, 1, 1),), "several calls are as fast"),
        "fp64": (each(*DOUBLE), (ROWS.double(),), "torch.float64"),
        "no rows": (each(ONE, TWO), (ROWS[:0],), ""),
        "a matrix added": (
            each(lambda x: torch.addmm(FIXED, x, ONE.weight.T)),
            (ROWS.view(6, 8),),
            "an addend is no bias",
        ),
        "two inputs": (lambda x: torch.cat([ONE(x), TWO(x.sin())]), (ROWS,), None),
        "a given weight": (lambda x, w: torch.cat([ONE(x), F.linear(x, w)]), (ROWS, GIVEN), None),
        "a bias and none": (each(ONE, BIASED), (ROWS,), None),
        "computed weights": (each(lambda x: F.linear(x, ONE.weight * 2), TWO), (ROWS,), None),
        "scaled": (
            each(lambda x: torch.addmm(BIASED.bias, x, ONE.weight.T, alpha=2), BIASED),
            (ROWS.view(6, 8),),
            None,
        ),
        "two views": (lambda x: ONE(x).view(6, 16) + TWO(x.mT.reshape(6, 8)), (ROWS,), None),
    },
    "add+layer_norm": {
        "used twice": (twice(lambda y, x: NORM(y), lambda x: x + x.sin()), (ROWS,), None),
        "subtracted": (lambda x: NORM(x - x.sin()), (ROWS,), None),
        "scaled": (lambda x: NORM(torch.add(x, x.sin(), alpha=2)), (ROWS,), None),
        "a number": (lambda x: NORM(x + 1), (ROWS,), "y is no tensor"),
        "view between": (lambda x: NORM((x + x.sin()).view(6, 8)), (ROWS,), None),
        "cast between": (lambda x: NORM((x.double() + 1 / x).float()), (ROWS,), None),
    },
    "div+add+softmax": {
        "another dimension": (lambda s: F.softmax(s / 8 + s[:, :1], 1), (IMAGE,), None),
        "added first": (lambda s: F.softmax((s + s[:, :1]) / 8, -1), (IMAGE,), None),
        "used twice": (
            twice(lambda y, s: F.softmax(y + s, -1), lambda s: s / 8),
            (IMAGE,),
            None,
        ),
        "subtracted": (lambda s: F.softmax(s / 8 - s[:, :1], -1), (IMAGE,), None),
    },
    "embedding+layer_norm": {
        "a padding index": (
            lambda t: NORM(F.embedding(t, TABLE.weight, padding_idx=1)),
            (torch.arange(6).view(2, 3),),
            None,
        ),
        "used twice": (
            twice(lambda y, t: NORM(y), TABLE),
            (torch.arange(6).view(2, 3),),
            None,
        ),
    },
    "view+transpose+contiguous+view": {
        "not copied": (lambda x: x.view(2, 2, 2, 5, 5).transpose(1, 2) + 1, (IMAGE,), None),
        "copied before": (
            lambda x: x.mT.contiguous().view(2, 2, 2, 5, 5).transpose(1, 2).cos(),
            (IMAGE,),
            None,
        ),
    },
    "bmm+gelu": {
        "scaled": (lambda x: F.gelu(torch.baddbmm(x, x, x, alpha=2)), (IMAGE[0],), None),
        "used twice": (
            twice(lambda y, x: F.gelu(y), lambda x: torch.baddbmm(x, x, x)),
            (IMAGE[0],),
            None,
        ),
    },
}
CASES = [(rule, case) for rule, cases in MISSES.items() for case in cases]


@pytest.mark.parametrize(("rule", "case"), CASES)
@pytest.mark.sampled
def test_near_miss_is_left_alone(op_by_op, rule, case):
    fn, args, reason = MISSES[rule][case]
    found(fn, *args)
    assert rule not in counters["ipex"]
    said = [(e.kind, e.reason) for e in events(rule)]
    if reason is None:
        assert not said
    else:
        assert said
        assert all(kind == "missed" and reason in text for kind, text in said)


TRAINED = {
    attention.NAME: (between(lambda s: F.softmax(s / 2 + MASK, -1)), QKV),
    "silu(linear)*linear": (lambda x: F.silu(ONE(x)) * TWO(x), (ROWS,)),
    "pad+conv": (lambda x: CONV(F.pad(x, (1, 1))), (IMAGE,)),
    "linear|linear": (each(ONE, TWO), (ROWS,)),
}


@pytest.mark.parametrize("rule", TRAINED)
def test_training_is_left_alone(op_by_op, rule):
    fn, args = TRAINED[rule]
    gradients = []
    for run in (fn, compiled(fn)):
        given = [x.clone().requires_grad_() for x in args]
        run(*given).square().sum().backward()
        gradients.append([x.grad for x in given])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)
    assert not counters["ipex"]
