"""Which parameters are cast for inference, what state dicts show, and calls without autocast."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence

import ipex_inductor
from ipex_inductor.frontend import casting
from support.helpers import pickled

LOW = [torch.bfloat16, torch.float16]
# One rounding of inputs, weights and results, each 2**-8 of it at most, over a few layers.
TOLERANCE = {"rtol": 0.05, "atol": 0.05}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, words):
        x = self.norm(self.embed(words) * self.scale)
        x = self.conv(x.unsqueeze(1)).mean(1) @ x.transpose(1, 2) @ x  # fp32 meets fp32
        x, _ = self.lstm(x)
        return self.head(x)


WORDS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_listed_modules_are_cast(dtype):
    model = ipex_inductor.optimize(Net().eval(), dtype=dtype)
    cast = {name for name, p in model.named_parameters() if p.dtype == dtype}
    expected = {"embed.weight", "conv.weight", "conv.bias", "head.weight", "head.bias"}
    if dtype == torch.bfloat16:
        expected |= {f"lstm.{name}" for name, _ in nn.LSTM(8, 8).named_parameters()}
    assert cast == expected


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_right_with_autocast_and_without(dtype):
    model = Net().eval()
    optimized = ipex_inductor.optimize(model, dtype=dtype)
    with torch.no_grad():
        expected = model(WORDS)
        plain = optimized(WORDS)
        with torch.autocast("cpu", dtype):
            autocast = optimized(WORDS)
    assert plain.dtype == torch.float32
    torch.testing.assert_close(plain, expected, **TOLERANCE)
    torch.testing.assert_close(autocast.float(), expected, **TOLERANCE)


def test_low_precision_is_used_under_autocast():
    model = ipex_inductor.optimize(nn.Sequential(nn.Linear(4, 4)).eval(), dtype=torch.bfloat16)
    x = torch.randn(2, 4)
    assert model(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16


def test_state_dicts_show_the_dtype_that_was():
    model = Net().eval()
    optimized = ipex_inductor.optimize(model, dtype=torch.bfloat16)
    shown = optimized.state_dict()
    assert {v.dtype for v in shown.values()} == {torch.float32}
    assert {v.dtype for v in optimized.lstm.state_dict().values()} == {torch.float32}
    rounded = {k: v.bfloat16().float() for k, v in model.state_dict().items()}
    assert torch.equal(shown["head.weight"], rounded["head.weight"])
    other = Net().eval()
    optimized.load_state_dict(other.state_dict())
    expected = other.state_dict()["head.weight"].bfloat16()
    assert torch.equal(optimized.head.weight, expected)
    assert optimized.head.weight.dtype == torch.bfloat16


def test_twice_or_in_two_dtypes():
    model = Net().eval()
    once = ipex_inductor.optimize(model, dtype=torch.bfloat16)
    twice = ipex_inductor.optimize(once, dtype=torch.bfloat16)
    assert torch.equal(once(WORDS), twice(WORDS))
    assert len(twice.head._forward_pre_hooks) == 1
    other = ipex_inductor.optimize(once, dtype=torch.float16)
    assert other.head.weight.dtype == torch.float16
    assert other(WORDS).dtype == other.state_dict()["head.weight"].dtype == torch.float32


@pytest.mark.parametrize("later", [*LOW, torch.float64, torch.float32], ids=str)
def test_a_model_that_is_moved_to_a_dtype_afterwards(later):
    model = Net().eval()
    optimized = ipex_inductor.optimize(model, dtype=torch.bfloat16).to(later)
    with torch.no_grad():
        y = optimized(WORDS)
        expected = model(WORDS).to(later)
    assert y.dtype == later
    torch.testing.assert_close(y, expected, **TOLERANCE)
    assert "_ipex" not in str(optimized.state_dict().keys())
    back = copy.deepcopy(optimized).float()
    assert back(WORDS).dtype == torch.float32


def test_tied_weights_stay_tied_and_are_cast_with_all_that_own_them():
    class Head(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

    class Tied(nn.Module):
        def __init__(self, custom):
            super().__init__()
            self.embed, self.free = nn.Embedding(7, 4), nn.Linear(4, 4)
            self.linear = nn.Linear(4, 7)
            self.linear.weight = self.embed.weight
            self.bias = Head(self.linear.bias) if custom else nn.Identity()

    model = ipex_inductor.optimize(Tied(custom=False).eval(), dtype=torch.bfloat16)
    assert model.linear.weight is model.embed.weight
    assert model.linear.weight.dtype == model.linear.bias.dtype == torch.bfloat16
    model = ipex_inductor.optimize(Tied(custom=True).eval(), dtype=torch.bfloat16)
    assert model.linear.weight is model.embed.weight
    # The head may not be cast, so its bias, so the linear layer, so the embedding may not.
    assert {model.embed.weight.dtype, model.linear.bias.dtype} == {torch.float32}
    assert model.free.weight.dtype == torch.bfloat16


def test_subclasses_and_lists_of_custom_modules_are_not_cast():
    class Mine(nn.Linear):
        pass

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.list = nn.ParameterList([nn.Parameter(torch.ones(2))])
            self.mine = Mine(2, 2)

    model = ipex_inductor.optimize(Holder().eval(), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


RECOMPUTED = {
    "spectral_norm": nn.utils.spectral_norm,
    "weight_norm": nn.utils.weight_norm,
    "pruning": lambda module: prune.l1_unstructured(module, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", RECOMPUTED)
def test_weights_that_hooks_compute_stay(kind):
    model = nn.Sequential(RECOMPUTED[kind](nn.Linear(8, 8)), nn.Linear(8, 8)).eval()
    x = torch.randn(2, 8)
    with torch.no_grad():
        expected = model(x)
        model[0].weight = model[0].weight.detach()  # what has a history cannot be copied
        optimized = ipex_inductor.optimize(model, dtype=torch.bfloat16)
        torch.testing.assert_close(optimized(x), expected, **TOLERANCE)
    assert {p.dtype for p in optimized[0].parameters()} == {torch.float32}
    assert optimized[1].weight.dtype == torch.bfloat16
    events = ipex_inductor.report(optimized).events
    assert [e.where for e in events if e.subject == "dtype" and e.kind == "missed"] == ["0"]


def test_nothing_to_cast_is_said(caplog):
    model = nn.Sequential(nn.LayerNorm(4)).eval()
    with caplog.at_level(logging.WARNING, "IPEX"):
        optimized = ipex_inductor.optimize(model, dtype=torch.bfloat16)
    assert caplog.messages == [
        "[NotSupported]dtype: no parameter of it may be held in torch.bfloat16"
    ]
    assert "dtype" in ipex_inductor.report(optimized).count("missed")


def test_hooks_from_before_see_the_dtype_of_the_model():
    seen = []
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + torch.ones(4),))
    model[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model[0].register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    optimized = ipex_inductor.optimize(model, dtype=torch.bfloat16)
    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), **TOLERANCE)
    assert seen == [torch.float32] * 4


class Tied(nn.Module):
    """Reads the weight of a module beside it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)

    def forward(self, words):
        return F.linear(self.embed(words), self.embed.weight)


def test_a_weight_read_outside_of_its_module_wants_autocast_and_the_error_says_so():
    words = torch.arange(5)
    model = ipex_inductor.optimize(Tied().eval(), dtype=torch.bfloat16)
    for one in (model, copy.deepcopy(model), pickled(model)):
        with torch.autocast("cpu", torch.bfloat16):
            assert one(words).isfinite().all()
        with pytest.raises(RuntimeError, match="dtype") as raised:
            one(words)
        (note,) = raised.value.__notes__
        assert "this Tied in torch.bfloat16" in note
        assert "torch.autocast" in note
    with pytest.raises(IndexError) as raised:
        model(words + 5)
    assert not hasattr(raised.value, "__notes__")


def test_float32_widens_nothing_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, "IPEX"):
        optimized = ipex_inductor.optimize(nn.Linear(4, 4).bfloat16().eval(), dtype=torch.float32)
    assert caplog.messages == [
        "[NotSupported]dtype: torch.float32 widens nothing, and parameters are torch.bfloat16"
    ]
    assert optimized.weight.dtype == torch.bfloat16


def test_merged_bags_keep_their_dtype_and_it_is_said():
    bag = ipex_inductor.nn.modules.MergedEmbeddingBag.from_embeddingbag_list(
        [nn.EmbeddingBag(5, 4, mode="sum")]
    )
    optimized = ipex_inductor.optimize(nn.ModuleList([bag, nn.Linear(4, 4)]).eval(), torch.bfloat16)
    reasons = [e.reason for e in ipex_inductor.report(optimized).events if e.where == "0"]
    assert reasons == ["tables of merged bags keep the dtype of their EmbeddingSpec"]
    assert optimized[0].weights[0].dtype == torch.float32


def test_float64_is_left_alone_with_the_known_message(caplog):
    model = nn.Sequential(nn.Linear(3, 3), nn.Conv2d(1, 1, 1)).double().eval()
    with caplog.at_level(logging.WARNING, "IPEX"):
        optimized = ipex_inductor.optimize(model, dtype=torch.bfloat16)
    assert [f"{r.levelname}:{r.name}:{r.message}" for r in caplog.records] == [
        "WARNING:IPEX:[NotSupported]Can't convert model's parameters dtype from torch.float64 to "
        "torch.bfloat16"
    ]
    assert optimized[0].weight.dtype == torch.float64


def test_packed_sequences_pass():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x):
            return self.lstm(x)

    packed = pack_padded_sequence(torch.randn(2, 5, 4), [5, 3], batch_first=True)
    model = Recurrent().eval()
    optimized = ipex_inductor.optimize(model, dtype=torch.bfloat16)
    with torch.no_grad():
        out, _ = optimized(packed)
        expected, _ = model(packed)
    assert out.data.dtype == torch.float32
    torch.testing.assert_close(out.data, expected.data, **TOLERANCE)


def test_a_transformer_layer_whose_fast_path_reads_weights():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    optimized = ipex_inductor.optimize(model, dtype=torch.bfloat16)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), **TOLERANCE)


def test_gradients_in_eval_mode():
    model = ipex_inductor.optimize(Net().eval(), dtype=torch.bfloat16)
    model(WORDS).sum().backward()
    assert model.head.weight.grad.dtype == torch.bfloat16
    assert model.scale.grad.abs().sum() > 0


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_trace_and_freeze(autocast):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 5)
    ).eval()
    x = torch.randn(2, 3, 8, 8)
    optimized = ipex_inductor.optimize(model, dtype=torch.bfloat16, sample_input=x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, autocast, cache_enabled=False):
        traced = torch.jit.freeze(torch.jit.trace(optimized, x, check_trace=False))
        expected = optimized(x)
        torch.testing.assert_close(traced(x).float(), expected.float(), **TOLERANCE)
    assert ipex_inductor.optimize(traced) is traced


def test_copies_and_pickles():
    model = ipex_inductor.optimize(Net().eval(), dtype=torch.bfloat16)
    expected = model(WORDS)
    for copied in (copy.deepcopy(model), pickled(model)):
        assert torch.equal(copied(WORDS), expected)
        assert copied.state_dict()["head.weight"].dtype == torch.float32
        assert str(ipex_inductor.report(copied)) == str(ipex_inductor.report(model))


def test_the_lists():
    lists = casting.CASTS["training"]
    assert lists["cpu bfloat16"] - lists["cpu float16"] == {"LSTM"}
    assert "EmbeddingBag" not in casting.CASTS["inference"]["cpu bfloat16"]
    assert {"EmbeddingBag", "LSTM"} < casting.CASTS["inference"]["gpu"]
    assert {"ConvTranspose1d", "Conv1d"} < casting.CASTS["training"]["gpu"]
