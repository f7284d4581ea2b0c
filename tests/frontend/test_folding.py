"""Module-level folding: right numbers, or a reason; the user's class, methods and hooks stay."""

import copy
import functools
import itertools
import logging
import re

import pytest
import torch
from torch import nn

import ipex_inductor
from ipex_inductor.errors import ArgumentError
from ipex_inductor.frontend import folding
from support.helpers import pickled

N, C = 3, 6


def norm(kind, channels, **options):
    """A batch norm whose statistics and weights are far from 0 and 1."""
    made = kind(channels, **options)
    made.running_mean.uniform_(-2, 2)
    made.running_var.uniform_(0.25, 4)
    if made.weight is not None:
        nn.init.uniform_(made.weight, 0.5, 2)
        nn.init.uniform_(made.bias, -1, 1)
    return made


class Pair(nn.Module):
    """`layer`, then `norm`, with a method and a buffer of its own."""

    def __init__(self, layer, norm):
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, x):
        return self.norm(self.layer(x))

    def classify(self, x):
        return self(x).flatten(1).argmax(1)


def norms(model):
    return [m for m in model.modules() if type(m) in folding.NORMS]


def reasons(model):
    events = ipex_inductor.report(model).events
    return [e.reason for e in events if e.kind == "missed" and "bn_folding" in e.subject]


def check(model, x, folded=True, sample_input=None, **knobs):
    """Optimize `model`; the result folds all or nothing and is as near float64 as the model."""
    model = model.eval()
    before = copy.deepcopy(model)
    optimized = ipex_inductor.optimize(model, sample_input=sample_input, **knobs)
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double())
        # Two roundings of folded weights and sums of up to 100 float32 terms around 10.
        torch.testing.assert_close(optimized(x).double(), truth, rtol=1e-4, atol=1e-4)
    assert (len(norms(optimized)) == 0) == folded, ipex_inductor.report(optimized)
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    return optimized


CONVOLUTIONS = [
    (getattr(nn, f"{kind}{d}d"), getattr(nn, f"BatchNorm{d}d"), (N, 4, *(9, 8, 7)[:d]))
    for kind, d in itertools.product(["Conv", "ConvTranspose"], [1, 2, 3])
]


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"groups": 2}, {"stride": 2}], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize(
    ("layer", "bn", "shape"), CONVOLUTIONS, ids=lambda v: str(v).split(".")[-1]
)
def test_convolution_and_batch_norm(layer, bn, shape, affine, options):
    model = Pair(layer(4, C, 3, padding=1, **options), norm(bn, C, affine=affine))
    check(model, torch.randn(shape), sample_input=torch.randn(shape))


def test_neighbours_in_2d_and_3d_need_no_sample():
    for d in (2, 3):
        layer, bn, shape = CONVOLUTIONS[d - 1]
        check(nn.Sequential(layer(4, C, 3), norm(bn, C)), torch.randn(shape))


def test_an_unbatched_convolution_in_1d_is_normalised_along_another_dimension():
    model = nn.Sequential(nn.Conv1d(4, C, 3), norm(nn.BatchNorm1d, C))
    x = torch.randn(4, C + 2)  # the result is [C, C]: BatchNorm1d takes it for C rows
    assert "without a sample_input" in reasons(check(model, x, folded=False))[0]
    assert "another dimension" in reasons(check(model, x, folded=False, sample_input=x))[0]


def test_linear_and_batch_norm():
    x = torch.randn(N, 5)
    for bias, affine in itertools.product([True, False], repeat=2):
        model = Pair(nn.Linear(5, C, bias=bias), norm(nn.BatchNorm1d, C, affine=affine))
        optimized = check(model, x, sample_input=x)
        assert optimized.layer.bias.shape == (C,)


@pytest.mark.parametrize(
    ("bn", "shape"),
    [
        (nn.BatchNorm1d, (N, C, 5)),
        (nn.BatchNorm2d, (N, C, 4, 5)),
        (nn.BatchNorm3d, (N, C, 2, 4, 5)),
    ],
    ids=["1d", "2d", "3d"],
)
def test_linear_acts_on_the_last_dimension_and_batch_norm_on_the_second(bn, shape):
    model = nn.Sequential(nn.Linear(5, C), norm(bn, C))  # num_features == out_features by accident
    x = torch.randn(shape)
    check(model, x, folded=False)
    assert "another dimension" in reasons(check(model, x, folded=False, sample_input=x))[0]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("bn", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_one_feature_is_the_same_for_all_dimensions(bn, bias):
    x = torch.randn(N, 1, *(4, 2)[: int(bn.__name__[-2]) - 1], 5)
    optimized = check(nn.Sequential(nn.Linear(5, C, bias=bias), norm(bn, 1)), x)
    assert optimized[0].bias.shape == (C,)


def test_each_layer_has_its_knob():
    x = torch.randn(N, 5)
    linear = Pair(nn.Linear(5, C), norm(nn.BatchNorm1d, C))
    check(linear, x, folded=False, sample_input=x, linear_bn_folding=False)
    check(linear, x, folded=True, sample_input=x, conv_bn_folding=False)
    check(linear, x, folded=True, sample_input=x, level="O0", linear_bn_folding=True)
    image = torch.randn(N, 4, 8, 8)
    conv = nn.Sequential(nn.Conv2d(4, C, 3), norm(nn.BatchNorm2d, C))
    check(conv, image, folded=False, conv_bn_folding=False)
    check(conv, image, folded=False, level="O0", linear_bn_folding=True)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.first, self.second = norm(nn.BatchNorm2d, 4), norm(nn.BatchNorm2d, 4)

    def forward(self, x):
        return self.second(self.conv(self.first(self.conv(x))))


class NormTwice(Twice):
    def __init__(self):
        super().__init__()
        self.other = nn.Conv2d(4, 4, 3, padding=1)
        del self.second

    def forward(self, x):
        return self.first(self.other(self.first(self.conv(x))))


class Read(Pair):
    def forward(self, x):
        y = self.layer(x)
        return self.norm(y), y


class Stored(Pair):
    def forward(self, x):
        self.seen = self.layer(x)
        return self.norm(self.seen)


class Written(Pair):
    def forward(self, x):
        return self.norm(self.layer(x).mul_(2))


class Handled(Pair):
    def forward(self, x):
        return self.norm(self.layer(x)) + self.layer.weight.sum()


class Peeked(Pair):
    def forward(self, x):
        return self.norm(self.layer(x)) + self.norm.running_var.mean()


class Borrowed(Pair):
    def forward(self, x):
        mean, var = self.norm.running_mean, self.norm.running_var
        return self.norm(self.layer(x)) + nn.functional.batch_norm(x, mean, var)[..., 1:-1, 1:-1]


class WrittenBehind(Pair):
    def forward(self, x):
        y = self.layer(x)
        y.data.relu_()
        return self.norm(y)


class HandledBehind(Pair):
    def forward(self, x):
        return self.norm(self.layer(x)) + self.layer.weight.data.sum()


class Branch(Pair):
    def forward(self, x, raw=None):
        y = self.layer(x)
        return self.norm(y) if raw is None else y


class Tied(Pair):
    def __init__(self, layer, bn):
        super().__init__(layer, bn)
        self.other = copy.deepcopy(layer)
        self.other.weight = layer.weight

    def forward(self, x):
        return self.norm(self.layer(x)) + self.other(x)


def own(kind):
    return kind(nn.Conv2d(4, 4, 3), norm(nn.BatchNorm2d, 4))


TRAPS = {
    "a convolution called twice": (Twice, ["called 2 times"] * 2),
    "a batch norm called twice": (NormTwice, ["called 2 times"]),
    "the convolution's result is returned": (lambda: own(Read), ["other users"]),
    "the convolution's result is stored": (lambda: own(Stored), ["other users"]),
    "the convolution's result is changed": (lambda: own(Written), ["other users|right before it"]),
    "the convolution's weight is used": (lambda: own(Handled), ["outside of it"]),
    "its result is changed behind autograd": (lambda: own(WrittenBehind), ["other users"]),
    "its weight is used behind autograd": (lambda: own(HandledBehind), ["outside of it"]),
    "a buffer of the batch norm is used": (lambda: own(Peeked), ["outside of it"]),
    "the batch norm's statistics are used": (lambda: own(Borrowed), ["outside of it"]),
    "the convolution's weight is tied": (lambda: own(Tied), ["outside of it"]),
}


@pytest.mark.parametrize("sampled", [True, False], ids=["sample", "no sample"])
@pytest.mark.parametrize("trap", TRAPS)
def test_what_must_not_fold(trap, sampled):
    make, expected = TRAPS[trap]
    x = torch.randn(2, 4, 8, 8)
    model = make().eval()
    optimized = ipex_inductor.optimize(model, sample_input=x if sampled else None)
    assert len(norms(optimized)) == len(norms(model))
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x))  # the same ops; layouts differ
    assert len(reasons(optimized)) == len(expected)
    expected = expected if sampled else ["give a sample_input"] * len(expected)
    assert all(map(re.search, expected, reasons(optimized)))


# Forwards that take another way than a symbolic trace of them, and read what would be folded away.


class NoneRequired(Pair):
    def forward(self, x, mask=None):
        y = self.layer(x)
        return self.norm(y) + y if mask is None else self.norm(y)


class Typed(Pair):
    def forward(self, x):
        if isinstance(x, torch.Tensor):
            y = self.layer(x)
            return self.norm(y) + y
        return self.norm(self.layer(x["image"]))


class Keywords(Pair):
    def forward(self, x, **options):
        y = self.layer(x)
        return self.norm(y) if "raw" in options else self.norm(y) + y


class Graded(Pair):
    def forward(self, x):
        y = self.layer(x)
        return self.norm(y) if torch.is_grad_enabled() else self.norm(y) + y


class Toggled(Pair):
    raw = False

    def forward(self, x):
        y = self.layer(x)
        return self.norm(y) + y if self.raw else self.norm(y)


class Public(Pair):
    def features(self, x):
        return self.layer(x)

    def forward(self, x):
        return self.norm(self.features(x))


class MySequential(nn.Sequential):
    def forward(self, x):
        y = self[0](x)
        return self[1](y) + y


@pytest.mark.parametrize(
    "kind", [Pair, NoneRequired, Typed, Keywords, Graded, Toggled, Public, MySequential]
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["root", "inside"])
def test_the_code_of_users_needs_a_sample(kind, wrapped):
    model = nn.Sequential(nn.ReLU(), own(kind)) if wrapped else own(kind)
    optimized = check(model, torch.randn(2, 4, 8, 8), folded=False)
    assert "give a sample_input" in reasons(optimized)[0]
    if kind is Public:
        x = torch.randn(2, 4, 8, 8)
        pairs = [(m[1] if wrapped else m) for m in (model, optimized)]
        torch.testing.assert_close(pairs[1].features(x), pairs[0].features(x))


def test_neighbours_are_called_once():
    """Without a sample: in nested sequentials, but not if they are anywhere else as well."""
    x = torch.randn(2, 4, 16, 16)
    pair = own(nn.Sequential)
    check(nn.Sequential(nn.ReLU(), nn.Sequential(pair[0]), pair, nn.ReLU()), x, folded=False)
    check(nn.Sequential(pair, pair), x, folded=False)
    check(nn.Sequential(pair, own(Pair).layer, nn.Sequential(own(nn.Sequential))[0][:1]), x)
    inside = own(Pair)
    inside.layer = pair[0]
    check(nn.Sequential(pair, inside), x, folded=False)


def test_optional_arguments_are_what_the_sample_says():
    x = torch.randn(2, 4, 8, 8)
    check(own(Branch), x, folded=True, sample_input=x)
    sample = {"x": x, "raw": True}
    optimized = ipex_inductor.optimize(own(Branch).eval(), sample_input=sample)
    assert norms(optimized)


def test_control_flow_needs_a_sample():
    class Loop(Pair):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    class Sized(Pair):
        def forward(self, x):
            return super().forward(x if x.shape[0] > 1 else -x)

    x = torch.randn(2, 4, 8, 8)
    assert "did not run" in reasons(check(own(Loop), x, folded=False, sample_input=x))[0]
    check(own(Sized), x, folded=True, sample_input=x)


def test_a_sample_that_does_not_fit_is_said_and_neighbours_fold_without(caplog):
    with caplog.at_level(logging.WARNING, "IPEX"):
        model = own(nn.Sequential)
        check(model, torch.randn(2, 4, 8, 8), folded=True, sample_input=torch.randn(2, 5))
    (message,) = caplog.messages
    assert message.startswith("[NotSupported]sample_input: forward did not run on the")


def test_looking_leaves_nothing_in_the_model():
    model = own(Stored).eval()
    ipex_inductor.optimize(model, sample_input=torch.randn(2, 4, 8, 8), inplace=True)
    ipex_inductor.optimize(model, inplace=True)
    assert not hasattr(model, "seen")


def test_looking_leaves_nothing_behind():
    grids = []

    @functools.lru_cache
    def grid(size):
        grids.append(torch.ones(size))
        return grids[-1]

    class Positions(Pair):
        def forward(self, x):
            y = self.norm(self.layer(x.mul_(1)))
            return y + grid(y.shape[-1]) + torch.rand(1)

    x = torch.randn(2, 4, 8, 8)
    sample, model = x.clone(), own(Positions).eval()
    states = torch.get_rng_state()
    optimized = ipex_inductor.optimize(model, sample_input=sample)
    assert not norms(optimized)
    assert torch.equal(torch.get_rng_state(), states)
    assert sample._version == 0
    assert type(optimized(x)) is type(grids[0]) is torch.Tensor
    assert len(grids) == 1


HELD = {
    "list": lambda layer, bn: [layer, bn],
    "nested": lambda layer, bn: {"stages": [("first", {bn})]},
    "parameters": lambda layer, bn: (layer.weight,),
    "statistics": lambda layer, bn: [bn.running_var],
    "method": lambda layer, bn: bn.forward,
}


@pytest.mark.parametrize("sampled", [True, False], ids=["sample", "no sample"])
@pytest.mark.parametrize("held", HELD)
def test_what_attributes_hold_beside_the_submodules_stays(held, sampled):
    model = own(nn.Sequential)
    model.held = HELD[held](*model)
    x = torch.randn(2, 4, 8, 8)
    optimized = check(model, x, folded=False, sample_input=x if sampled else None)
    assert "attribute" in reasons(optimized)[0] or "another module" in reasons(optimized)[0]


def test_a_buffer_of_two_modules_stays():
    model = nn.Sequential(*own(nn.Sequential), nn.ReLU())
    model[2].register_buffer("mean", model[1].running_mean)
    check(model, torch.randn(2, 4, 8, 8), folded=False)


def test_layers_called_through_a_list():
    class Listed(Pair):
        def __init__(self, layer, bn):
            super().__init__(layer, bn)
            self.layers = [self.layer, self.norm]

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    x = torch.randn(2, 4, 8, 8)
    check(own(Listed), x, folded=False, sample_input=x)


def test_a_layer_of_a_sequential_that_is_read_alone():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(4, 4, 3), norm(nn.BatchNorm2d, 4))

        def forward(self, x):
            seen = []
            for layer in self.features:
                x = layer(x)
                seen.append(x)
            return torch.cat(seen)

    check(Reader(), torch.randn(2, 4, 8, 8), folded=False)


@pytest.mark.parametrize("where", ["0", "1"])
def test_hooks_between_stay_and_see_what_they_saw(where):
    seen = []
    model = own(nn.Sequential).eval()
    hook = lambda module, args, y: seen.append(y)  # noqa: E731
    model.get_submodule(where).register_forward_hook(hook)
    x = torch.randn(2, 4, 8, 8)
    optimized = check(model, x, folded=False)
    assert "hook" in reasons(optimized)[0]
    check(model, x, folded=False, sample_input=x)
    seen.clear()
    optimized(x)
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
@pytest.mark.parametrize("where", ["layer", "norm"])
def test_with_a_sample_hooks_on_containers_between_count(where, kind):
    model = Pair(nn.Sequential(nn.Conv2d(4, 4, 3)), nn.Sequential(norm(nn.BatchNorm2d, 4)))
    x = torch.randn(2, 4, 8, 8)
    check(model, x, folded=True, sample_input=x)
    getattr(getattr(model, where), f"register_{kind}")(lambda *_: None)
    check(model, x, folded=False, sample_input=x)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_without_a_sample_hooks_on_containers_count(kind):
    for inner in (True, False):
        model = nn.Sequential(nn.ReLU(), own(nn.Sequential))
        register = getattr(model[1] if inner else model, f"register_{kind}")
        register(lambda *_: None)
        check(model, torch.randn(2, 4, 8, 8), folded=False)


def test_class_methods_and_hooks_stay():
    model = nn.Sequential(own(Pair), nn.ReLU()).eval()
    seen = []
    model.register_forward_hook(lambda *_: seen.append("model"))
    model[0].register_forward_pre_hook(lambda *_: seen.append("pair"))
    x = torch.randn(2, 4, 8, 8)
    optimized = ipex_inductor.optimize(model, sample_input=x)
    assert not norms(optimized)
    assert type(optimized) is nn.Sequential
    assert isinstance(optimized[0], Pair)
    assert not seen
    optimized(x)
    assert seen == ["pair", "model"]
    assert optimized[0].classify(x).shape == (2,)


def test_batch_norms_in_training_stay():
    model = own(nn.Sequential).eval()
    model[1].train()
    optimized = ipex_inductor.optimize(model)
    assert "statistics of the batch" in reasons(optimized)[0]
    untracked = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)
    ).eval()
    assert norms(ipex_inductor.optimize(untracked))


def test_as_exact_as_the_graph_pass(op_by_op):
    model = own(Pair).eval()
    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        folded = ipex_inductor.optimize(model, sample_input=x)(x)
        graph = torch.compile(model, backend="ipex")(x)
    # The same weights to the bit; the kernels sum 36 terms in another order.
    torch.testing.assert_close(folded, graph, rtol=1e-5, atol=1e-5)


def test_weights_are_rounded_once():
    model = own(Pair).eval()
    twin = copy.deepcopy(model).double()
    scale = torch.rsqrt(twin.norm.running_var + twin.norm.eps) * twin.norm.weight
    weight = twin.layer.weight * scale.view(-1, 1, 1, 1)
    bias = (twin.layer.bias - twin.norm.running_mean) * scale + twin.norm.bias
    layer = ipex_inductor.optimize(model, sample_input=torch.randn(2, 4, 8, 8)).layer
    assert torch.equal(layer.weight, weight.float())
    # The order of the float64 sum may decide a rounding.
    torch.testing.assert_close(layer.bias, bias.float(), rtol=2**-23, atol=0)


def test_models_that_were_cast_before():
    for dtype in (torch.bfloat16, torch.float16):
        model = own(nn.Sequential).eval().to(dtype)
        optimized = ipex_inductor.optimize(model)
        assert not norms(optimized)
        assert optimized[0].weight.dtype == dtype


class Reads(nn.Module):
    """Its result depends on more than which module takes what: `how` reads it."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.norm.running_mean += 5

    def forward(self, x):
        return self.how(self, x)


READS = {
    "numbers": (
        lambda m, x: m.norm(y := m.conv(x)) * y.tolist()[0][0][0][0],
        "gives another result",
    ),
    "an attribute": (
        lambda m, x: m.norm(m.conv(x.to(m.norm.weight.dtype))),
        "does not run on the sample_input: AttributeError",
    ),
}


@pytest.mark.parametrize("case", READS)
def test_what_no_flow_shows_is_seen_by_running_the_folded_model(case, caplog):
    how, reason = READS[case]
    x = torch.randn(2, 3, 4, 4)
    with caplog.at_level(logging.WARNING, "IPEX"):
        optimized = check(Reads(how), x, folded=False, sample_input=x)
    assert [reason in message for message in caplog.messages] == [True]
    assert any(reason in given for given in reasons(optimized))


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_with_the_folded_norm_changes_nothing(strict):
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.ReLU()).eval()
    optimized = pickled(ipex_inductor.optimize(ipex_inductor.optimize(model)))
    before = copy.deepcopy(optimized.state_dict())
    with pytest.raises(ArgumentError, match=r"batch norm '0.1', which was folded.* Load it into"):
        optimized.load_state_dict(model.state_dict(), strict=strict)
    torch.testing.assert_close(optimized.state_dict(), before, rtol=0, atol=0)
    optimized.load_state_dict(before, strict=strict)
