"""Batch norm folded into the product beside it: where it is proven right, and nowhere else."""

import copy
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.func import functional_call
from torch.fx import map_arg

from ipex_inductor.passes.layout import folding
from ipex_inductor.passes.weights import weight_snapshot
from ipex_inductor.reporting import decisions
from support import rewritten
from support.folded import measure_fold
from support.helpers import has_kernels

CONVOLUTIONS = ["conv1d", "conv2d", "conv3d"]
TRANSPOSED = ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]
AFTER = [*CONVOLUTIONS, *TRANSPOSED, "linear"]  # products that a norm after them folds into
BEFORE = [*CONVOLUTIONS, "linear"]  # products that a norm before them folds into

IDS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def dims(kind):
    return 1 if kind == "linear" else int(kind[-2])


def product(kind, ins=8, outs=16, bias=True, **window):
    """A layer of that kind; a window of 3 unless another is given."""
    if kind == "linear":
        return nn.Linear(ins, outs, bias)
    name = f"{'ConvTranspose' if 'transpose' in kind else 'Conv'}{dims(kind)}d"
    return getattr(nn, name)(ins, outs, window.pop("kernel", 3), bias=bias, **window)


def batch_norm(channels, rank=1, affine=True):
    """In eval; statistics and gains far from 0 and 1, so that a wrong fold shows."""
    norm = getattr(nn, f"BatchNorm{rank}d")(channels, affine=affine)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.1, 3)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm.eval()


def example(kind, batch=3, channels=8):
    return torch.randn(batch, channels, *[] if kind == "linear" else [7] * dims(kind))


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="ipex", options={"strict": True}, **kwargs)


def folds():
    """How often each fold fired; activations and addends may fuse as well."""
    return {name: n for name, n in counters["ipex"].items() if name in folding.NAMES}


def events(kind):
    return [(e.subject, e.reason) for r in decisions.reports() for e in r.events if e.kind == kind]


def judge(got, eager, truth, factor=2):
    """As near the truth as eager, but for one rounding more; same dtype, shape and strides.

    The truth is eager's float64; the fold rounds each folded weight once, which eager does not.
    """
    assert (got.dtype, got.shape) == (eager.dtype, eager.shape)
    if not got.numel():
        return
    for size, ours, theirs in zip(got.shape, got.stride(), eager.stride(), strict=True):
        assert size == 1 or ours == theirs, (got.stride(), eager.stride())
    ours, theirs = ((y.double() - truth).square().mean().sqrt() for y in (got, eager))
    rounding = truth.square().mean().sqrt() * max(torch.finfo(got.dtype).eps, 1e-12)
    assert ours <= factor * theirs + rounding, (ours, theirs, rounding)


@torch.no_grad()
def check(model, *xs, factor=2, **kwargs):
    """Compile `model` in the dtype of `xs` and judge what it returns; the code it became."""
    twin = copy.deepcopy(model).double()
    model = model.to(xs[0].dtype)
    want, truth = model(*xs), twin(*(x.double() for x in xs))
    got, code = run_and_get_code(compiled(model, **kwargs), *xs)
    if isinstance(got, torch.Tensor):
        got, want, truth = [got], [want], [truth]
    for triple in zip(got, want, truth, strict=True):
        judge(*triple, factor)
    return "".join(code)


class Each(nn.Module):
    """Each of `models` on its input, or on the only one: one compilation for many cases."""

    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *xs):
        xs = xs if len(xs) > 1 else xs * len(self.models)
        return [model(x) for model, x in zip(self.models, xs, strict=True)]


WINDOWS = {
    "conv": [
        {},
        {"kernel": 1},
        {"groups": 4},
        {"groups": 8},
        {"dilation": 2},
        {"stride": 2},
        {"padding": 1},
        {"groups": 2, "stride": 2, "dilation": 2, "padding": 2},
    ],
    "conv_transpose": [
        {},
        {"kernel": 1},
        {"groups": 4},
        {"groups": 8},
        {"dilation": 2},
        {"padding": 1},
        {"groups": 2, "stride": 2, "padding": 1, "output_padding": 1},
    ],
    "linear": [{}],
}


def forms(kind, run):
    """Windows, bias and affine: every combination, or each window and each pair of the others.

    Sizes that vary, which cost much and concern no window: each pair alone.
    """
    windows = WINDOWS[kind.rstrip("123d")]
    if run == "fp64":
        return itertools.product(windows, (True, False), (True, False))
    pairs = itertools.cycle(itertools.product((True, False), (True, False)))
    chosen = [(window, *next(pairs)) for window in [*windows, {}, {}, {}]]
    return chosen[::3] if run == "fp32 dynamic" and len(windows) > 1 else chosen


# The algebra in all its forms where rounding cannot hide it; then each way to be less exact.
RUNS = {
    "fp64": (torch.float64, False),
    "fp32": (torch.float32, False),
    "fp32 dynamic": (torch.float32, True),
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
}


IN_CODE = {("conv2d", run) for run in ("fp32", "fp32 dynamic", "bf16")}
IN_CODE |= {("linear", run) for run in RUNS if run != "fp64"} | {("conv_transpose2d", "fp32")}
# The algebra of every kind, then each way to be less exact: of the kinds in code, and of sizes that
# vary also a transposed one. Others differ by their dimensions, which fp64 has tried.
QUICK = IN_CODE | {("conv_transpose2d", "fp32 dynamic")}
QUICK |= {(kind, "fp64") for kind in AFTER if "3d" not in kind}


def runs(kinds, names=RUNS):
    """All pairs, those that are not quick marked so."""
    every = itertools.product(kinds, names)
    return [pytest.param(*p, marks=[pytest.mark.slow] * (p not in QUICK)) for p in every]


@pytest.fixture
def to_code(kind, run, request):
    """Whether Inductor makes code of the graph, or it runs as it stands.

    The algebra is in the graph; how code rounds it and treats sizes that vary is seen on two kinds,
    and once on a transposed one.
    """
    whole = (kind, run) in IN_CODE
    if not whole:
        request.getfixturevalue("op_by_op")
    return whole


@pytest.mark.sampled(
    "conv1d-fp64",
    "conv_transpose1d-fp64",
    "conv2d-fp32",
    "linear-bf16",
    "conv_transpose2d-fp32 dynamic",
)
@pytest.mark.parametrize(("kind", "run"), runs(AFTER))
def test_a_norm_after_every_product_folds(kind, run, to_code):
    dtype, dynamic = RUNS[run]
    model = Each(
        nn.Sequential(product(kind, bias=bias, **window), batch_norm(16, dims(kind), affine))
        for window, bias, affine in forms(kind, run)
    )
    code = check(model, example(kind).to(dtype), dynamic=dynamic)
    assert counters["ipex"] == {f"{kind}+batch_norm": len(model.models)}
    assert bool(code) == to_code
    assert "sqrt" not in code, "a batch norm is left in the graph"


@pytest.mark.parametrize(("kind", "run"), runs(BEFORE, ["fp64", "fp32", "fp32 dynamic"]))
@pytest.mark.sampled
def test_a_norm_before_a_product_folds(kind, run, to_code):
    dtype, dynamic = RUNS[run]
    model = Each(
        nn.Sequential(batch_norm(8, dims(kind), affine), product(kind, bias=bias, **window))
        for window, bias, affine in forms(kind, run)
        if "padding" not in window
    )
    code = check(model, example(kind).to(dtype), dynamic=dynamic)
    assert counters["ipex"] == {f"batch_norm+{kind}": len(model.models)}
    assert bool(code) == to_code
    assert "sqrt" not in code, "a batch norm is left in the graph"


@pytest.fixture
def folded(monkeypatch):
    """The `_Folding` of each graph, after it."""
    found = []
    make = folding._Folding.__init__
    monkeypatch.setattr(
        folding._Folding, "__init__", lambda self, *args: found.append(self) or make(self, *args)
    )
    return found


@torch.no_grad()
def test_what_is_remembered_of_one_fold_is_right_for_the_next(op_by_op, monkeypatch):
    wrong, views = [], []
    fold = folding.fold_batch_norms

    def spy(graph, *rest):
        fold(graph, *rest)
        for node in graph.nodes:
            if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor):
                continue
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with V.fake_mode:
                want = node.target(*args, **kwargs)
            if facts(node.meta["val"]) != facts(want):
                wrong.append(node.format_node())
            if node.target.is_view:
                views.append(node)
                if memory(node.meta["val"]) != memory(args[0]):
                    wrong.append(node.format_node())

    def facts(value):
        return value.dtype, value.device, value.shape, value.stride()

    def memory(value):
        return value.untyped_storage()._cdata

    monkeypatch.setattr(folding, "fold_batch_norms", spy)
    layers = [
        product(kind, 8, 8, bias, groups=groups)
        for kind in ("conv2d", "conv_transpose2d")
        for bias in (True, False)
        for groups in (1, 2)
        for _ in range(2)
    ]
    affine = itertools.cycle((True, True, False))
    blocks = [p for layer in layers for p in (layer, batch_norm(8, 2, next(affine)))]
    tail = [nn.Flatten(1), nn.Linear(8 * 49, 8), batch_norm(8), nn.Linear(8, 8), batch_norm(8)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(7), *tail)
    check(model, torch.randn(2, 8, 40, 40))
    assert sum(folds().values()) == len(layers) + 2
    assert views
    assert not wrong


@torch.no_grad()
def test_a_layer_met_again_costs_no_fake_value(op_by_op, folded):
    def model(count):
        layers = [(product("conv2d", 8, 8, padding=1), batch_norm(8, 2)) for _ in range(count)]
        return nn.Sequential(*itertools.chain.from_iterable(layers))

    for count in (1, 6):
        check(model(count), example("conv2d"))
    first, many = (len(f.fakes) for f in folded)
    assert first == many > 0


# Of three dimensions are the same lines.
@pytest.mark.parametrize(
    ("kind", "in_code"),
    [
        ("conv2d", False),
        ("conv_transpose2d", False),
        pytest.param("conv2d", True, marks=pytest.mark.slow),
        pytest.param("conv_transpose2d", True, marks=pytest.mark.slow),
        pytest.param("conv3d", True, marks=pytest.mark.slow),
        pytest.param("conv_transpose3d", True, marks=pytest.mark.slow),
    ],
)
def test_layouts_stay(kind, in_code, request):
    """Channels-last in the input, in the weight, or in both, also where it is ambiguous."""
    if not in_code:
        request.getfixturevalue("op_by_op")
    rank, pairs = dims(kind), []
    last = torch.channels_last if rank == 2 else torch.channels_last_3d
    for window in ({}, {"groups": 8}, {"kernel": 1}):
        pairs += [
            (product(kind, **window), batch_norm(16, rank)),
            (product(kind, **window).to(memory_format=last), batch_norm(16, rank)),
        ]
    pairs += [(batch_norm(8, rank), copy.deepcopy(p)) for p, _ in pairs if kind in BEFORE]
    model = Each(nn.Sequential(*pair) for pair in pairs)
    for x in (example(kind), example(kind).to(memory_format=last)):
        torch.compiler.reset()
        counters.clear()
        check(model, x)
        assert sum(counters["ipex"].values()) == len(pairs)


# --- reshapes between: `width` channels of a linear layer against a norm of `features`


class Between(nn.Module):
    """first, then the reshaping, then second."""

    def __init__(self, first, reshape, second):
        super().__init__()
        self.first, self.reshape, self.second = first, reshape, second

    def forward(self, x):
        return self.second(self.reshape(self.first(x)))


def same(y):
    return y


RESHAPED = {
    "3-D input, flattened": ((2, 3, 8), nn.Linear(8, 16), lambda y: y.flatten(0, 1), (16, 1)),
    "rows to images": ((5, 8), nn.Linear(8, 48), lambda y: y.view(-1, 12, 2, 2), (12, 2)),
    "rows to one pixel": ((5, 8), nn.Linear(8, 12), lambda y: y[:, :, None], (12, 1)),
    "convolution, flattened": ((5, 8, 3), nn.Conv1d(8, 16, 3), lambda y: y.flatten(1), (16, 1)),
    "one feature of 3-D": ((5, 1, 8), nn.Linear(8, 16), same, (1, 1)),
    "one feature of 4-D": ((5, 1, 3, 8), nn.Linear(8, 16), same, (1, 2)),
    "one feature, no bias": ((5, 1, 3, 8), nn.Linear(8, 16, bias=False), same, (1, 2)),
    "one feature of 5-D": ((5, 1, 3, 2, 8), nn.Linear(8, 16), same, (1, 3)),
    "one output": ((5, 8), nn.Linear(8, 1), same, (1, 1)),
    "one output, no bias": ((5, 8), nn.Linear(8, 1, bias=False), same, (1, 1)),
    "a batch of one": ((1, 32), nn.Linear(32, 48), same, (48, 1)),
}


@pytest.mark.parametrize("name", RESHAPED)
def test_folds_through_reshapes(op_by_op, name):
    check_reshaped(name, torch.float64)


@pytest.mark.sampled("rows to images-bf16")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=IDS.get)
@pytest.mark.parametrize("name", RESHAPED)
def test_folds_through_reshapes_in_code(name, dtype):
    check_reshaped(name, dtype)


def check_reshaped(name, dtype):
    """Check that a batch norm folds through a reshape into the product before it."""
    shape, first, reshape, norm = RESHAPED[name]
    check(Between(copy.deepcopy(first), reshape, batch_norm(*norm)), torch.randn(shape).to(dtype))
    kind = "linear" if isinstance(first, nn.Linear) else "conv1d"
    assert counters["ipex"] == {f"{kind}+batch_norm": 1}


RESHAPED_AFTER = {
    "images to rows": ((5, 8, 2, 3), (8, 2), lambda y: y.flatten(1), nn.Linear(48, 4)),
    "one pixel to rows": ((5, 8, 1, 1), (8, 2), lambda y: y.flatten(1), nn.Linear(8, 4)),
    "one feature": ((5, 1, 3, 8), (1, 2), same, nn.Linear(8, 4)),
    "one feature, no bias": ((5, 1, 8), (1, 1), same, nn.Linear(8, 4, bias=False)),
    "one feature, more channels": (
        (5, 1, 8, 6),
        (1, 2),
        lambda y: y.squeeze(1),
        nn.Conv1d(8, 4, 3),
    ),
    "rows to one pixel": ((5, 8), (8, 1), lambda y: y[:, :, None], nn.Conv1d(8, 4, 1)),
}


@pytest.mark.parametrize("name", RESHAPED_AFTER)
def test_folds_forward_through_reshapes(op_by_op, name):
    shape, norm, reshape, second = RESHAPED_AFTER[name]
    check(Between(batch_norm(*norm), reshape, second), torch.randn(shape))
    kind = "linear" if isinstance(second, nn.Linear) else "conv1d"
    assert counters["ipex"] == {f"batch_norm+{kind}": 1}


class Matrix(nn.Module):
    """x @ W: the weight is not permuted."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))

    def forward(self, x):
        return x @ self.weight


def test_a_matrix_is_a_linear_layer(op_by_op):
    model = nn.Sequential(Matrix(8, 16), batch_norm(16), nn.ReLU(), batch_norm(16), Matrix(16, 4))
    check(model, torch.randn(5, 8))
    assert counters["ipex"]["linear+batch_norm"] == counters["ipex"]["batch_norm+linear"] == 1


# --- left alone, for a reason that the report gives


class Call(nn.Module):
    """`fn(x, *modules)` as a module, so that all are found and copied."""

    def __init__(self, fn, *modules):
        super().__init__()
        self.fn, self.own = fn, nn.ModuleList(modules)

    def forward(self, x):
        return self.fn(x, *self.own)


def normalise(y, norm, **changed):
    own = {"mean": norm.running_mean, "var": norm.running_var, "training": False} | changed
    return F.batch_norm(y, own["mean"], own["var"], norm.weight, norm.bias, own["training"])


def op(y, norm):
    """The op itself, with its saved statistics; `F.batch_norm` spares it an empty batch."""
    own = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return torch.ops.aten._native_batch_norm_legit_no_training(y, *own, 0.1, 1e-5)


def with_itself(y, f):
    """f(y) and y: a second user."""
    return f(y) + y.mean()


def beside(y):
    """The rows of y as its channels: a transpose between."""
    return torch.cat([y] * 6)[:16].transpose(0, 1)


ALONE = "no convolution or linear layer is beside it"

# Of x, the product and the norm; what the reason says. It names the product unless that is ALONE.
NOT_AFTER = {
    "relu between": (lambda x, p, n: n(F.relu(p(x))), ALONE),
    "a factor between": (lambda x, p, n: n(p(x) * 2), ALONE),
    "a cast between": (lambda x, p, n: n(p(x).double().to(x.dtype)), ALONE),
    "a transpose between": (lambda x, p, n: n(beside(p(x))).contiguous(), ALONE),
    "a second user": (lambda x, p, n: with_itself(p(x), n), "has 2 users"),
    "a second user of a view": (
        lambda x, p, n: with_itself(p(x)[None], lambda y: n(y.squeeze(0))),
        "has 2 users",
    ),
    "statistics of the input": (
        lambda x, p, n: normalise(p(x), n, mean=n.running_mean + x.mean()),
        "not a parameter or buffer",
    ),
    "a weight of the input": (
        lambda x, p, n: n(functional_call(p, {"weight": p.weight * x.mean()}, x)),
        "not a parameter or buffer",
    ),
    "statistics of the batch": (
        lambda x, p, n: normalise(p(x), n, mean=None, var=None, training=True),
        "training mode",
    ),
    "an empty batch": (lambda x, p, n: op(p(x[:0]), n)[0], "a size is zero"),
    "saved statistics": (
        lambda x, p, n: (lambda y, mean, invstd: y + mean.sum() + invstd.sum())(*op(p(x), n)),
        "saved statistics",
    ),
}
UNNAMED = (ALONE, "training mode")


def in_turn(cases, kinds):
    """Each case of a linear layer and of one dimension of the others, and slowly of all kinds."""
    few = [(name, (*kinds[n % 3 : -1 : 3], "linear")) for n, name in enumerate(cases)]
    every = [pytest.param(name, kinds, marks=pytest.mark.slow, id=f"{name}-all") for name in cases]
    return [*(pytest.param(*case, id=case[0]) for case in few), *every]


@pytest.mark.parametrize(("name", "kinds"), in_turn(NOT_AFTER, AFTER))
@pytest.mark.sampled
def test_not_folded_into_the_product_before(op_by_op, name, kinds):
    fn, reason = NOT_AFTER[name]
    model = Each(Call(fn, product(kind), batch_norm(16, dims(kind))) for kind in kinds)
    check(model, *map(example, kinds))
    assert not folds()
    found = [(subject, why) for subject, why in events("missed") if "batch_norm" in subject]
    names = [f"{kind}+batch_norm" if reason not in UNNAMED else "batch_norm" for kind in kinds]
    assert sorted(subject for subject, _ in found) == sorted(names)
    assert all(reason in why for _, why in found), found


NOT_BEFORE = {
    "relu between": (lambda x, p, n: p(F.relu(n(x))), ALONE),
    "a factor between": (lambda x, p, n: p(n(x) * 2), ALONE),
    "a cast between": (lambda x, p, n: p(n(x).double().to(x.dtype)), ALONE),
    "a second user": (lambda x, p, n: with_itself(n(x), p), "has 2 users"),
    "two products": (lambda x, p, n: (lambda y: p(y) * p(y).exp())(n(x)), "has 2 users"),
    "statistics of the input": (
        lambda x, p, n: p(normalise(x, n, mean=n.running_mean + x.mean())),
        "not a parameter or buffer",
    ),
    "a weight of the input": (
        lambda x, p, n: functional_call(p, {"weight": p.weight * x.mean()}, n(x)),
        "not a parameter or buffer",
    ),
    "statistics of the batch": (
        lambda x, p, n: p(normalise(x, n, mean=None, var=None, training=True)),
        "training mode",
    ),
    "an empty batch": (lambda x, p, n: p(op(x[:0], n)[0]), "a size is zero"),
    "a layout of its own": (
        lambda x, p, n: p(n(x[:1].expand(3, *x.shape[1:]))),
        "it changes the layout",
    ),
}


@pytest.mark.parametrize(("name", "kinds"), in_turn(NOT_BEFORE, BEFORE))
def test_not_folded_into_the_product_after(op_by_op, name, kinds):
    fn, reason = NOT_BEFORE[name]
    model = Each(Call(fn, product(kind), batch_norm(8, dims(kind))) for kind in kinds)
    check(model, *map(example, kinds))
    assert not folds()
    found = [(subject, why) for subject, why in events("missed") if "batch_norm" in subject]
    names = [f"batch_norm+{kind}" if reason not in UNNAMED else "batch_norm" for kind in kinds]
    assert sorted(subject for subject, _ in found) == sorted(names)
    assert all(reason in why for _, why in found), found


BORDERS = {
    "zeros": ({"padding": 1}, "pads with zeros"),
    "same": ({"padding": "same"}, "pads with zeros"),
    "same of an even kernel": ({"padding": "same", "kernel": 2}, ALONE),
    "reflected": ({"padding": 1, "padding_mode": "reflect"}, ALONE),
}


@pytest.mark.parametrize("name", BORDERS)
def test_a_padded_convolution_takes_in_no_norm_before_it(op_by_op, name):
    window, reason = BORDERS[name]
    check(nn.Sequential(batch_norm(8, 2), product("conv2d", **window)), example("conv2d"))
    assert not folds()
    ((_, why),) = events("missed")
    assert reason in why


@pytest.mark.parametrize("kind", TRANSPOSED)
def test_a_transposed_convolution_takes_in_no_norm_before_it(op_by_op, kind):
    check(nn.Sequential(batch_norm(8, dims(kind)), product(kind)), example(kind))
    assert not folds()
    ((subject, why),) = events("missed")
    assert subject == f"batch_norm+{kind}"
    assert "transposed" in why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=IDS.get)
def test_low_precision_takes_the_mean_off_before_the_product(op_by_op, dtype):
    """A mean of 100 deviations: the product of x itself would round away what eager keeps."""
    norm = batch_norm(8)
    norm.running_mean.fill_(100)
    model = nn.Sequential(norm, nn.Linear(8, 16))
    check(model, (torch.randn(64, 8) + 100).to(dtype))
    assert not folds()
    assert any("would cost digits" in why for _, why in events("missed"))


def test_a_mean_far_from_zero_is_right_in_fp32():
    norm = batch_norm(8)
    norm.running_mean.fill_(100)
    model = nn.Sequential(norm, nn.Linear(8, 16))
    # Eager rounds `x * scale`, the fold `w * scale` and the bias: some 2 ** -24 * 100 a term each.
    check(model, torch.randn(64, 8) + 100, factor=4)
    assert counters["ipex"] == {"batch_norm+linear": 1}


def test_channels_that_a_view_cuts_unevenly(op_by_op):
    """The rows are the same, but a third of 96 numbers is no whole number of 16 channels."""
    view = Between(nn.Conv1d(8, 16, 2), lambda y: y.view(-1, 3, 32), batch_norm(3))
    check(view, example("conv1d"))
    assert not folds()
    assert any("does not hold the channels" in why for _, why in events("missed"))


def test_an_addend_that_is_no_bias(op_by_op):
    rows, one = nn.Parameter(torch.randn(5, 16)), nn.Parameter(torch.randn(1))

    class Added(nn.Module):
        def __init__(self, addend):
            super().__init__()
            self.addend, self.linear = addend, Matrix(8, 16)
            self.norm = batch_norm(16)

        def forward(self, x):
            return self.norm(torch.addmm(self.addend, x, self.linear.weight))

    check(Each([Added(rows), Added(one)]), torch.randn(5, 8))
    assert not folds()
    assert [why for _, why in events("missed")] == [
        "what the product adds is no bias of 16 elements"
    ] * 2


def test_scaled_products_are_left_alone(op_by_op):
    model = Call(
        lambda x, m, n: n(torch.addmm(n.bias, x, m.weight, beta=2, alpha=3)),
        Matrix(8, 16),
        batch_norm(16),
    )
    check(model, torch.randn(5, 8))
    assert not folds()


def test_training_is_left_alone(op_by_op):
    model = nn.Sequential(product("conv2d"), batch_norm(16, 2))
    x = example("conv2d")
    torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-4, atol=1e-4)
    assert not folds()
    assert any("training graph" in why for _, why in events("missed"))


@pytest.mark.parametrize("name", sorted(folding.NAMES))
@pytest.mark.sampled
def test_each_fold_can_be_switched_off(op_by_op, name):
    before = name.startswith("batch_norm+")
    kind = name.removeprefix("batch_norm+").removesuffix("+batch_norm")
    norm = batch_norm(8 if before else 16, dims(kind))
    model = nn.Sequential(*((norm, product(kind)) if before else (product(kind), norm)))
    x = example(kind)
    for rules, count in ((f"-{name}", 0), ("-*", 0), ("", 1)):
        torch.compiler.reset()
        with torch.no_grad():
            got = torch.compile(model, backend="ipex", options={"rules": rules})(x)
            torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
        assert counters["ipex"][name] == count


# --- with what else happens to a graph


@torch.no_grad()
@pytest.mark.parametrize("kind", [pytest.param("conv2d", marks=pytest.mark.slow), "linear"])
def test_autocast_folds_and_fuses(kind):
    model = nn.Sequential(product(kind), batch_norm(16, dims(kind)), nn.ReLU()).eval()
    x = example(kind)

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    got, want = compiled(fn)(x), fn(x)
    judge(got, want, model.double()(x.double()))
    assert folds() == {f"{kind}+batch_norm": 1}
    fused = has_kernels(torch.bfloat16)
    assert sum(counters["ipex"].values()) == 1 + fused, "the relu is fused as well"


@torch.no_grad()
def test_autocast_casts_between_a_norm_and_what_follows(op_by_op):
    model, x = nn.Sequential(batch_norm(8), nn.Linear(8, 16)), example("linear")

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    judge(compiled(fn)(x), fn(x), copy.deepcopy(model).double()(x.double()))
    assert not folds()
    assert any(ALONE in why for _, why in events("missed"))


def test_the_report_names_the_line(op_by_op):
    check(Mine(), example("conv2d"))
    (fired,) = [e for r in decisions.reports() for e in r.events if e.kind == "fired"]
    assert fired.subject == "conv2d+batch_norm"
    assert __file__ in fired.where


# --- more than one norm or product


def test_between_two_products_the_first_takes_the_norm(op_by_op):
    model = nn.Sequential(product("conv2d"), batch_norm(16, 2), product("conv2d", 16, 4))
    check(model, example("conv2d"))
    assert counters["ipex"] == {"conv2d+batch_norm": 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=IDS.get)
def test_norms_in_a_row_and_on_both_sides(op_by_op, dtype):
    linear = [batch_norm(8), batch_norm(8), nn.Linear(8, 16), batch_norm(16), batch_norm(16)]
    check(nn.Sequential(*linear), torch.randn(5, 8, dtype=dtype))
    assert counters["ipex"] == {"linear+batch_norm": 2, "batch_norm+linear": 2}


@torch.no_grad()
def test_two_folds_round_once(op_by_op):
    """A product with the identity shows the weight; shifts of zero keep it free of sums."""
    first, second = batch_norm(8, affine=False), batch_norm(16, affine=False)
    for norm in (first, second):
        norm.running_mean.zero_()
    linear = nn.Linear(8, 16, bias=False)
    got = compiled(nn.Sequential(first, linear, second))(torch.eye(8))
    a, b = (torch.rsqrt(n.running_var.double() + n.eps) for n in (first, second))
    assert torch.equal(got, (linear.weight.double() * a * b[:, None]).float().t())


def test_statistics_computed_after_the_product():
    """They are weights too, but stand behind the product in the graph."""
    fn = lambda x, p, n: normalise(p(x), n, mean=n.running_mean * 2, var=n.running_var * 3)  # noqa: E731
    check(Call(fn, product("conv2d"), batch_norm(16, 2)), example("conv2d"))
    assert counters["ipex"] == {"conv2d+batch_norm": 1}


# --- what IPEX's module folding got wrong (reference: its conv_bn_folding and linear_bn_folding)


class Twice(nn.Module):
    """One product under two norms: each call is a node of its own, with weights of its own."""

    def __init__(self, kind):
        super().__init__()
        self.product = product(kind)
        self.a, self.b = batch_norm(16, dims(kind)), batch_norm(16, dims(kind))

    def forward(self, x):
        return self.a(self.product(x)) * self.b(self.product(x)) + self.product(x)


@pytest.mark.parametrize("kind", AFTER)
def test_trap_a_shared_product_is_folded_into_each_call_by_itself(op_by_op, kind):
    check(Twice(kind), example(kind))
    assert folds() == {f"{kind}+batch_norm": 2}


@pytest.mark.parametrize("shape", [(5, 16, 8), (5, 16, 3, 8), (5, 16, 2, 3, 8), (1, 16, 8)])
def test_trap_features_that_equal_the_channels_by_accident(op_by_op, shape):
    """A linear layer acts on the last dimension, batch norm on dimension 1."""
    model = nn.Sequential(nn.Linear(8, 16), batch_norm(16, max(1, len(shape) - 2)))
    check(model, torch.randn(shape))
    assert not folds()
    ((subject, why),) = events("missed")
    assert subject == "linear+batch_norm"
    assert "does not hold the channels" in why


@pytest.mark.parametrize("shape", [(5, 8, 8), (5, 8, 3, 8), (5, 8, 2, 3, 8)])
def test_trap_the_same_before_a_linear_layer(op_by_op, shape):
    check(nn.Sequential(batch_norm(8, max(1, len(shape) - 2)), nn.Linear(8, 4)), torch.randn(shape))
    assert not folds()
    ((_, why),) = events("missed")
    assert "does not hold the channels" in why


class Mine(nn.Module):
    """A class with a method of its own."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = product("conv2d"), batch_norm(16, 2)

    def forward(self, x):
        return self.norm(self.conv(x))

    def generate(self):
        return "generated"


@torch.no_grad()
def test_trap_class_methods_hooks_and_state_are_untouched():
    model, x, calls = Mine().eval(), example("conv2d"), []
    model.register_forward_hook(lambda *_: calls.append("model"))
    state = copy.deepcopy(model.state_dict())
    fn = compiled(model)
    torch.testing.assert_close(fn(x), model(x), rtol=1e-4, atol=1e-4)
    assert counters["ipex"] == {"conv2d+batch_norm": 1}
    assert calls == ["model", "model"]
    assert isinstance(model, Mine)
    assert type(model.norm) is nn.BatchNorm2d
    assert fn.generate() == model.generate() == "generated"
    now = model.state_dict()
    assert list(now) == list(state)
    assert all(torch.equal(now[key], value) for key, value in state.items())


@torch.no_grad()
def test_a_hook_between_that_changes_the_result_is_seen(op_by_op):
    model, x = Mine().eval(), example("conv2d")
    model.conv.register_forward_hook(lambda _module, _args, y: y.abs())
    torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-4, atol=1e-4)
    assert not folds()


# --- weights change


def pairs(kind):
    yield kind, nn.Sequential(product(kind), batch_norm(16, dims(kind)))
    if kind in BEFORE:
        yield kind, nn.Sequential(batch_norm(8, dims(kind)), product(kind))


@pytest.mark.sampled("conv1d")
@torch.no_grad()
@pytest.mark.parametrize("kind", AFTER)
def test_folded_weights_follow_every_change(kind, monkeypatch):
    monkeypatch.setattr(weight_snapshot, "UNPAID", 100)  # or weights are left plain
    for _, model in pairs(kind):
        x, fn = example(kind), compiled(model)
        other = {k: v + 1 if v.is_floating_point() else v for k, v in model.state_dict().items()}
        norm = next(m for m in model if hasattr(m, "running_mean"))
        layer = next(m for m in model if m is not norm)
        changes = [
            lambda layer=layer: layer.weight.mul_(2),
            lambda layer=layer: layer.bias.add_(1),
            lambda norm=norm: norm.running_mean.add_(1),
            lambda norm=norm: norm.running_var.mul_(3),
            lambda norm=norm: norm.weight.neg_(),
            lambda norm=norm: norm.bias.sub_(1),
            lambda model=model, other=other: model.load_state_dict(other),
        ]
        for change in changes:
            before = fn(x).clone()
            change()
            assert not torch.allclose(model(x), before), "the change changes nothing"
            torch.testing.assert_close(fn(x), model(x), rtol=1e-4, atol=1e-4)
    assert sum(counters["ipex"].values()) == 1 + (kind in BEFORE)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["conv_transpose2d", "linear"])
def test_without_the_prologue_the_fold_stays_in_the_graph(op_by_op, kind):
    for _, model in pairs(kind):
        x, options = example(kind), {"strict": True, "weight_prologue": False}
        got = torch.compile(model, backend="ipex", options=options)(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    assert sum(counters["ipex"].values()) == 1 + (kind in BEFORE)


# --- programs nobody thought of


def program(seed):
    """A random stack of layers on images, then on rows, with norms at random places."""
    rng, layers, width = random.Random(seed), [], 8

    def sometimes_norm(rank):
        if rng.random() < 0.6:
            layers.append(batch_norm(width, rank, rng.random() < 0.7))
        if rng.random() < 0.3:
            layers.append(nn.ReLU())

    for _ in range(3):
        sometimes_norm(2)
        wider = rng.choice([8, 16, 24])
        window = {
            "kernel": rng.choice([1, 3]),
            "groups": rng.choice([1, 2, 8]),
            "padding": rng.choice([0, 0, 1]),
            "bias": rng.random() < 0.5,
        }
        layers.append(product(rng.choice(["conv2d", "conv_transpose2d"]), width, wider, **window))
        width = wider
        sometimes_norm(2)
    layers += [nn.AdaptiveAvgPool2d(rng.choice([1, 2])), nn.Flatten()]
    width *= layers[-2].output_size ** 2
    for _ in range(2):
        sometimes_norm(1)
        layers.append(nn.Linear(width, 8, rng.random() < 0.5))
        width = 8
        sometimes_norm(1)
    return nn.Sequential(*layers).eval()


@torch.no_grad()
def test_random_programs_in_float64(op_by_op):
    """Where the folds are right, float64 differs by its rounding alone: relative 1e-10."""
    fired = set()
    for seed in range(6):
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(seed)
        model, x = program(seed).double(), torch.randn(2, 8, 9, 9, dtype=torch.float64)
        got, want = compiled(model)(x), model(x)
        assert (got - want).abs().max() <= 1e-10 * want.abs().max(), seed
        norms = sum(isinstance(m, nn.BatchNorm2d | nn.BatchNorm1d) for m in model)
        misses = {why for _, why in events("missed")}
        assert sum(counters["ipex"].values()) == norms or misses, seed
        fired |= set(counters["ipex"])
    assert len(fired) >= 4, fired


def fold_traced(fn, *inputs, balances=True):
    """Return the graph of a function behind the pass, all inputs but the last being weights."""
    gm, mode = rewritten.trace(fn, *inputs)
    *weights, _ = gm.graph.find_nodes(op="placeholder")
    with V.set_fake_mode(mode), torch.no_grad():
        folding.fold_batch_norms(gm.graph, weights, (), decisions.GraphReport(), balances)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return gm


@pytest.mark.parametrize(
    ("kind", "dtype", "groups", "balances"),
    [
        ("conv2d", torch.bfloat16, 1, True),
        ("conv2d", torch.float16, 4, True),
        ("conv_transpose2d", torch.bfloat16, 1, True),
        ("conv_transpose2d", torch.bfloat16, 4, False),  # a slice has channels of all groups
        ("conv2d", torch.float32, 1, False),
    ],
)
def test_errors_of_folded_weights_are_balanced(monkeypatch, kind, dtype, groups, balances):
    layer, norm = product(kind, 32, 32, groups=groups, bias=False).to(dtype), batch_norm(32, 2)
    statistics = [x.to(dtype) for x in (norm.weight, norm.bias)]
    statistics += [norm.running_mean.to(dtype), norm.running_var.to(dtype)]
    x = torch.randn(3, 32, 7, 7).relu().to(dtype)
    inputs = [layer.weight.detach(), *(s.detach() for s in statistics), x]

    def normed(weight, gamma, beta, mean, variance, x):
        y = getattr(F, kind)(x, weight, groups=groups)
        return F.batch_norm(y, mean, variance, gamma, beta, False, 0.0, 1e-5)

    op, count = torch.ops.ipex.round_balanced.default, rewritten.count
    assert count(fold_traced(normed, *inputs), op) == 0  # on a CPU it takes too long
    monkeypatch.setattr(folding, "_balances_on", lambda device: True)
    assert count(fold_traced(normed, *inputs, balances=False), op) == 0
    gm = fold_traced(normed, *inputs)
    assert count(gm, op) == balances
    with torch.no_grad():
        exact = normed(*(v.double() for v in inputs))
        error = (gm(*inputs).double() - exact).norm() / exact.norm()
    assert error < 4 * torch.finfo(dtype).eps  # weights, bias and result are rounded once each


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_balanced_weights_are_nearer(op_by_op, monkeypatch, dtype):
    """Errors that add up are most of a channel's error; a third is what other rounding leaves."""
    nearest = measure_fold(dtype, "cpu")
    monkeypatch.setattr(folding, "_balances_on", lambda device: True)
    assert measure_fold(dtype, "cpu") < nearest / 3
