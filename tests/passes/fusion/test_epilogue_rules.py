"""The rules fire exactly where they should, and the result is right.

One compiled function holds every epilogue behind one producer: all rules of a family in one graph.
Most of these graphs run op by op behind our passes, oneDNN's calls included; `slow` and a sample
generate Inductor's code too.
"""

import itertools
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.passes.fusion.epilogue import ACTIVATIONS
from ipex_inductor.passes.joint import RULE_NAMES
from ipex_inductor.reporting import decisions
from support.helpers import has_kernels

# Another order of summation, and eager rounds after each step of a spelling by hand: four ulp of
# the largest value; fp32 allows for exp, whose error grows with its argument, and fp16 for a cube:
# which has three times the error of what eager rounded, with a square's rounding and its own.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 5 * 2**-11}
FP64 = 1e-14

PRODUCERS = {
    "linear 2d": ("linear", lambda: nn.Linear(8, 16), (4, 8)),
    "linear 3d": ("linear", lambda: nn.Linear(8, 16), (2, 3, 8)),
    "linear no bias": ("linear", lambda: nn.Linear(8, 16, bias=False), (2, 3, 2, 8)),
    "conv1d": ("conv", lambda: nn.Conv1d(4, 6, 3, stride=2), (2, 4, 9)),
    "conv2d": ("conv", lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 5, 5)),
    "conv2d no bias": ("conv", lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), (2, 4, 5, 5)),
    "conv3d": ("conv", lambda: nn.Conv3d(4, 6, 2, dilation=2), (2, 4, 4, 3, 5)),
    "conv_transpose2d": (
        "conv_transpose",
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2),
        (2, 4, 3, 3),
    ),
    "conv_transpose3d": ("conv_transpose", lambda: nn.ConvTranspose3d(4, 6, 2), (2, 4, 3, 2, 3)),
}


def _relu_in_place(y, other):
    return F.relu_(y.add_(other))


# Name of the rule, what follows the product, which of the module's weights make sense for it.
EPILOGUES = [
    ("add", lambda y, other: y + other, "plain"),
    ("add", lambda y, other: other + y, "plain"),
    ("add+relu", lambda y, other: F.relu(y + other), "plain"),
    ("add+relu", lambda y, other: F.relu(other + y), "plain"),
    ("add+relu", _relu_in_place, "plain"),
    ("sub", lambda y, other: y - other, "plain"),
    ("mul", lambda y, other: y * other, "plain"),
    ("mul", lambda y, other: other * y, "plain"),
    ("sigmoid*mul", lambda y, other: torch.sigmoid(y) * y, "plain"),
    ("hardtanh", lambda y, other: F.relu6(y), "plain"),
    ("pow", lambda y, other: y**3, "positive"),
]
WEIGHTS = {"log": "positive", "sqrt": "positive", "pow": "positive", "round": "exact"}
for activation in ACTIVATIONS:
    fn = activation.fn or UNARY[activation.unary].fn

    def _follow(y, other, fn=fn, scalars=activation.free):
        return fn(y, *scalars)

    EPILOGUES.append((activation.name, _follow, WEIGHTS.get(activation.name, "plain")))


class Family(nn.Module):
    """Every epilogue, or those given, behind one producer; `between` stands between the two."""

    def __init__(self, make, between=lambda y: y, epilogues=EPILOGUES):
        super().__init__()
        self.epilogues = epilogues
        self.plain = make()
        self.positive = make()  # where the product must be positive
        self.exact = make()  # where it must be exact: rounding is not continuous
        self.between = between
        with torch.no_grad():
            for p in self.positive.parameters():
                p.abs_()
            for p in self.exact.parameters():
                p.copy_(torch.randint(-8, 8, p.shape) / 4)

    def product(self, x, kind):
        x = {"plain": lambda: x, "positive": x.abs, "exact": x.sign}[kind]()
        return self.between(self.apply_to(getattr(self, kind), x))

    def apply_to(self, module, x):
        return module(x)

    def forward(self, x, other):
        return [fn(self.product(x, kind), other) for _, fn, kind in self.epilogues]


def close(got, want, dtype):
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    scale = want.abs().max().clamp(min=1).item() if want.numel() else 1
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE.get(dtype, FP64) * scale)


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="ipex", options={"strict": True}, **kwargs)


def check(fn, *args, **kwargs):
    with torch.no_grad():
        got = compiled(fn, **kwargs)(*args)
        want = fn(*args)
    close(got, want, want.dtype)


def check_family(model, x, **kwargs):
    model = model.eval()
    with torch.no_grad():
        other = torch.randn_like(model.product(x, "plain"))
        got = compiled(model, **kwargs)(x, other)
        want = model(x, other)
    for number, (ours, eager) in enumerate(zip(got, want, strict=True)):
        try:
            close(ours, eager, x.dtype)
        except AssertionError as error:
            name = model.epilogues[number % len(model.epilogues)][0]
            raise AssertionError(f"{name}: {error}") from error


def misses():
    return [e for r in decisions.reports() for e in r.events if e.kind == "missed"]


# The producers in turn, so that each family is there in every dtype.
TURNS = set(zip(PRODUCERS, itertools.cycle(TOLERANCE), strict=False))
TURNS |= {("conv_transpose2d", torch.float32)}
TURNS -= {("conv1d", torch.float32)}  # of sizes that vary it is below
# In few digits every other epilogue, of one dtype the others than of the other.
PART = {torch.float32: EPILOGUES, torch.bfloat16: EPILOGUES[::2], torch.float16: EPILOGUES[1::2]}
ALL = list(itertools.product(PRODUCERS, TOLERANCE))
# Sizes that vary take four times as long, and no rule asks for both them and the dtype: a producer
# of each family in a dtype of its own, with a third of the epilogues each.
VARYING = zip(("conv1d", "linear 3d", "conv_transpose3d"), TOLERANCE, strict=True)
VARYING = [
    *(
        pytest.param(*p, EPILOGUES[n::3], id=f"{p[0]}-{p[1]}-a third")
        for n, p in enumerate(VARYING)
    ),
    *(pytest.param(*p, EPILOGUES, marks=pytest.mark.slow, id=f"{p[0]}-{p[1]}") for p in ALL),
]


@pytest.mark.parametrize(
    ("name", "dtype", "epilogues"),
    [
        *(pytest.param(*p, PART[p[1]], id=f"{p[0]}-{p[1]}") for p in ALL if p in TURNS),
        *(
            pytest.param(*p, EPILOGUES, marks=pytest.mark.slow, id=f"{p[0]}-{p[1]}-all")
            for p in ALL
        ),
    ],
)
def test_every_rule_fires(op_by_op, name, dtype, epilogues):
    fires(name, dtype, False, epilogues)


@pytest.mark.parametrize(("name", "dtype", "epilogues"), VARYING)
def test_every_rule_fires_whatever_the_sizes(op_by_op, name, dtype, epilogues):
    fires(name, dtype, True, epilogues)


# Sizes that vary are slow here too: test_backend.py and test_conv.py have code for them.
SAMPLE = {("linear 3d", torch.bfloat16): 0, ("conv2d", torch.float32): 2}
# Half a minute where g++ has to compile it all: quickly a fourth of the epilogues each, of which
# ops of ours compute all but what is above them.
IN_CODE = [
    *(pytest.param(*p, False, EPILOGUES[n::4], id=f"{p[0]}-{p[1]}") for p, n in SAMPLE.items()),
    *(
        pytest.param(*p, False, EPILOGUES, marks=pytest.mark.slow, id=f"{p[0]}-{p[1]}-all")
        for p in ALL
    ),
]
IN_CODE += [
    pytest.param("linear 3d", torch.bfloat16, True, EPILOGUES, marks=pytest.mark.slow, id="dynamic")
]


@pytest.mark.parametrize(("name", "dtype", "dynamic", "epilogues"), IN_CODE)
def test_every_rule_fires_in_generated_code(name, dtype, dynamic, epilogues):
    fires(name, dtype, dynamic, epilogues)


def fires(name, dtype, dynamic=False, epilogues=EPILOGUES):
    family, make, shape = PRODUCERS[name]
    model = Family(make, epilogues=epilogues).to(dtype)
    check_family(model, torch.randn(shape, dtype=dtype), dynamic=dynamic)
    expected = Counter(f"{family}+{rule}" for rule, _, _ in epilogues)
    fired = Counter(counters["ipex"])
    if dynamic:  # Dynamo makes math.pi an input then (not in 2.11), and an input is no constant
        fired.pop(by_hand := f"{family}+gelu_tanh_by_hand", None)
        expected.pop(by_hand, None)
    assert fired == (expected if has_kernels(dtype) else {})


def test_every_rule_of_the_families_is_in_the_table():
    tested = {f"{family}+{rule}" for family, _, _ in PRODUCERS.values() for rule, _, _ in EPILOGUES}
    families = ("linear+", "conv+", "conv_transpose+")
    assert {n for n in RULE_NAMES if n.startswith(families) and "norm" not in n} == tested


class SecondUser(Family):
    def forward(self, x, other):
        products = [self.product(x, kind) for _, _, kind in self.epilogues]
        sums = [y.sum(-1) for y in products]
        follow = zip(self.epilogues, products, strict=True)
        return [*(fn(y, other) for (_, fn, _), y in follow), *sums]


class GivenWeight(Family):
    """The weight is computed from the input."""

    def apply_to(self, module, x):
        weight = module.weight * (1 + 0 * x.sum())
        return torch.func.functional_call(module, {"weight": weight}, x)


NEAR_MISSES = {
    "second user": SecondUser,
    "weight not constant": GivenWeight,
    "another op between": partial(Family, between=lambda y: y.neg().neg()),
    "cast between": partial(Family, between=lambda y: y.double()),
    "turned copy between": partial(Family, between=lambda y: y.transpose(0, 1).contiguous()),
    "fp64": lambda make, **given: Family(make, **given).double(),
    "zero size": Family,
    "training": Family,
}
# Under training a rule of `passes/training/training.py` may fire, where the backward reads the
# result.
READS_RESULT = {f"linear+{name}" for name in ("add", "sub", "mul", "relu", "sigmoid", "tanh")}


# Linear layers and convolutions by every near-miss, with half of the epilogues each, as those share
# the guards of a family; transposed convolutions share them with the others, and are seen in three.
HALVES = {
    ("linear 2d", "linear no bias"): (EPILOGUES[::2], NEAR_MISSES),
    ("conv2d", "conv1d"): (EPILOGUES[1::2], NEAR_MISSES),
    ("conv_transpose2d",): (EPILOGUES[::2], ("second user", "another op between", "fp64")),
}
MISSED = [
    pytest.param(name, miss, half, id=f"{name}-{miss}-half")
    for names, (half, misses) in HALVES.items()
    for name, miss in zip(itertools.cycle(names), misses, strict=False)
]
MISSED += [
    pytest.param(name, miss, EPILOGUES, marks=pytest.mark.slow, id=f"{name}-{miss}")
    for name, miss in itertools.product(itertools.chain(*HALVES), NEAR_MISSES)
]


@pytest.mark.parametrize(("name", "miss", "epilogues"), MISSED)
@pytest.mark.sampled
def test_every_rule_leaves_near_misses_alone(op_by_op, name, miss, epilogues):
    _, make, shape = PRODUCERS[name]
    model = NEAR_MISSES[miss](make, epilogues=epilogues)
    x = torch.randn(shape, dtype=model.plain.weight.dtype)
    if miss == "training":
        check_training(model, x)
    else:
        check_family(model, x[:0] if miss == "zero size" else x)
    fired = set(counters["ipex"]) - {"linear|linear"}  # the products do share their input
    trained = miss == "training" and name.startswith("linear")
    known = {f"linear+{rule}" for rule, _, _ in epilogues}
    assert fired == (READS_RESULT & known if trained else set())


def check_training(model, x):
    """Values and gradients, as one loss: each result weighs the same."""
    other = torch.randn_like(model.product(x, "plain"))
    grads = []
    for run in (model, compiled(model)):
        loss = sum(r.nan_to_num().clamp(-9, 9).mean() for r in run(x, other))
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)  # sums of 40 results


W = nn.Parameter(torch.randn(32, 16), requires_grad=False)
B = nn.Parameter(torch.randn(32), requires_grad=False)
X = torch.randn(4, 16)


class OneLinear(nn.Module):
    """`fn` of an input, a weight and a bias that are parameters."""

    def __init__(self, fn, dtype=torch.float32):
        super().__init__()
        self.fn, self.w, self.b = fn, nn.Parameter(W.to(dtype)), nn.Parameter(B.to(dtype))

    def forward(self, x):
        return self.fn(x, self.w, self.b)


LINEAR_NEAR_MISSES = {
    "a scaled product": lambda x, w, b: F.gelu(torch.addmm(b, x, w.t(), alpha=0.5)),
    "a scaled bias": lambda x, w, b: F.gelu(torch.addmm(b, x, w.t(), beta=0.5)),
    "reshaped between": lambda x, w, b: F.gelu(F.linear(x, w, b).view(2, 64)),
    "a number added": lambda x, w, b: F.gelu(torch.addmm(b[1], x, w.t())),
    "a matrix added, not a bias": lambda x, w, b: F.gelu(torch.addmm(x @ w.t(), x, w.t())),
    "a row added": lambda x, w, b: F.linear(x, w) + x.mean() * b,
    "a column added": lambda x, w, b: F.linear(x, w, b) + x[:, :1],
    "a scaled addend": lambda x, w, b: torch.add(F.linear(x, w, b), F.linear(x, w), alpha=2),
    "subtracted the other way": lambda x, w, b: x @ x.t() @ x.new_ones(4, 32) - F.linear(x, w, b),
    "bounds the wrong way round": lambda x, w, b: F.linear(x, w, b).clamp(0.5, 0.25),
    "selu is an elu of three parameters": lambda x, w, b: F.selu(F.linear(x, w, b)),
}


@pytest.mark.parametrize("name", LINEAR_NEAR_MISSES)
def test_near_miss_is_left_alone(op_by_op, name):
    check(OneLinear(LINEAR_NEAR_MISSES[name]), X)
    assert not counters["ipex"]


def test_a_weight_the_other_way_round():
    """`x @ w` with w [K, N], as GPT-2 writes its layers."""
    check(OneLinear(lambda x, w, b: F.gelu(torch.addmm(b[:16], x @ w.t(), w))), X)
    assert counters["ipex"] == {"linear+gelu": 1}


def test_strided_input_still_fires():
    check(OneLinear(lambda x, w, b: F.gelu(F.linear(x, w, b))), torch.randn(16, 4).t())
    assert counters["ipex"]["linear+gelu"] == 1


def test_a_miss_has_a_reason_and_a_line(op_by_op):
    check(OneLinear(lambda x, w, b: F.gelu(F.linear(x, w, b)), torch.float64), X.double())
    (event,) = misses()
    assert event.subject == "linear+gelu"
    assert "float64" in event.reason
    assert "test_epilogue_rules.py" in event.where


def test_a_given_weight_is_named_in_the_reason(op_by_op):
    check(lambda x, w: F.gelu(F.linear(x, w)), X, torch.randn(32, 16))
    assert [e.reason for e in misses()] == ["weight is not a parameter or buffer"]
    assert not counters["ipex"]


def test_dropout_in_eval_does_not_hide_a_rule(op_by_op):
    layer, drop = nn.Linear(16, 16), nn.Dropout(0.5).eval()
    check(lambda x: drop(layer(x)) + x, X)
    assert counters["ipex"] == {"linear+add": 1}


@pytest.mark.parametrize("rules", ["-linear+gelu", "-*", " -linear+gelu , -linear+gelu_tanh"])
def test_a_rule_can_be_switched_off(op_by_op, rules):
    model = OneLinear(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    fn = torch.compile(model, backend="ipex", options={"rules": rules})
    with torch.no_grad():
        torch.testing.assert_close(fn(X), model(X))
    assert not counters["ipex"]


BIASES = {
    "every other": torch.randn(64)[::2],
    "a column": torch.randn(32, 3)[:, 1],
    "expanded": torch.randn(1).expand(32),
}


@pytest.mark.sampled("a column")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "every other")) for n in BIASES]
)
def test_a_strided_bias(name):
    """oneDNN ignores the strides of a bias: the values were wrong by whole units."""
    bias = BIASES[name]
    check(lambda x, bias: F.relu(F.linear(x, W, bias)), X, bias)
    check(lambda x, bias: F.linear(x, W, bias), X, bias)


@torch.no_grad()
def test_a_bias_of_one_element_is_no_bias():
    bias = nn.Parameter(torch.randn(1))
    check(lambda x: F.relu(F.linear(x, W, bias)), X)


def test_without_joint_passes_nothing_is_kept_whole():
    linear = nn.Linear(16, 32)
    fn = torch.compile(
        lambda x: F.gelu(linear(x)),
        backend="ipex",
        options={"use_joint_graph_passes": False, "strict": True},
    )
    with torch.no_grad():
        torch.testing.assert_close(fn(X), F.gelu(linear(X)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("users", [1, 2])
def test_a_sum_that_only_a_norm_reads_is_left_to_its_kernel(op_by_op, users, dtype):
    linear, norm = nn.Linear(16, 16).to(dtype), nn.LayerNorm(16).to(dtype)

    def fn(x):
        y = linear(x) + x
        return norm(y) if users == 1 else norm(y) * y.mean()

    check(fn, torch.randn(2, 3, 16, dtype=dtype))
    if not has_kernels(dtype):
        assert not counters["ipex"]
        return
    assert counters["ipex"] == ({} if users == 1 else {"linear+add": 1})
    left = {e.subject for r in decisions.reports() for e in r.events if e.kind == "left"}
    assert ("linear+add+layer_norm" in left) == (users == 1)
