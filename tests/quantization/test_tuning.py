"""`autotune`: the first recipe that holds the criterion, sensitive layers in floating point."""

import copy

import pytest
import torch
from torch import nn

from ipex_inductor import quantization
from ipex_inductor.errors import QuantizationError


class Fragile(nn.Module):
    """Its second layer amplifies what is lost by rounding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.sturdy, self.fragile, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        y = self.sturdy(x).tanh()
        spread = torch.cat([y[:, :1] * 1000, y[:, 1:]], 1)
        z = self.fragile(spread)
        return self.last((z - spread[:, :1] * self.fragile.weight[:, 0]).tanh())


def loader(count=5, labelled=True):
    torch.manual_seed(1)
    inputs = [torch.randn(8, 16) for _ in range(count)]
    return [(x, torch.zeros(8)) if labelled else x for x in inputs]


def agreement(model):
    exact, inputs = Fragile().eval(), torch.cat([x for x, _ in loader()])
    with torch.no_grad():
        return 1 - ((model(inputs) - exact(inputs)).norm() / exact(inputs).norm()).item()


def test_the_first_recipe_that_is_accurate_is_returned():
    prepared = quantization.autotune(Fragile().eval(), loader(), accuracy_criterion={"relative": 5})
    assert len(prepared.trials) == 1
    assert prepared.trials[0].recipe == "histogram, 100 samples"
    assert quantization.convert(prepared)(loader()[0][0]).shape == (8, 16)


@pytest.mark.parametrize("eval_func", [None, agreement])
def test_the_sensitive_layer_is_left_in_floating_point(eval_func):
    model = Fragile().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tuned = quantization.autotune(
        model,
        loader(),
        eval_func=eval_func,
        sampling_sizes=[16],
        accuracy_criterion={"absolute": 0.05},
    )
    assert tuned.trials[-1].floating == ("fragile:linear:0",)
    assert tuned.trials[-1].is_accurate
    assert len(tuned.trials) == 4
    rows = {layer.name: layer.quantized for layer in tuned.layer_decisions}
    assert rows["sturdy:linear:0"]
    assert not rows["fragile:linear:0"]
    assert agreement(quantization.convert(tuned)) > 0.95
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Sum(nn.Module):
    """A model of two inputs, and an optional one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x, y, mask=None):
        return self.layer(x) + y


@pytest.mark.parametrize("labelled", [True, False])
def test_two_tensors_are_the_inputs_of_a_model_that_needs_two(labelled):
    pairs = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(2)]
    items = [(pair, torch.zeros(8)) for pair in pairs] if labelled else pairs
    tuned = quantization.autotune(Sum().eval(), items, accuracy_criterion={"relative": 5})
    assert quantization.convert(tuned)(*pairs[0]).shape == (8, 16)
    assert copy.deepcopy(tuned).trials == tuned.trials


def test_smoothquant_is_tried_first():
    prepared = quantization.autotune(
        Fragile().eval(),
        loader(labelled=False),
        accuracy_criterion={"relative": 5},
        smoothquant_args={"alpha": "auto", "auto_alpha_args": {"init_alpha": 0.3}},
    )
    assert prepared.trials[0].recipe == "SmoothQuant alpha 0.3, 100 samples"


def test_smoothed_layers_can_be_left_too():
    tuned = quantization.autotune(
        Fragile().eval(),
        loader(),
        accuracy_criterion={"absolute": 0.04},
        smoothquant_args={"alpha": [0.1, 0.9]},
    )
    assert tuned.trials[-1].is_accurate


def test_calib_func_and_op_type_dict_are_used():
    calls = []

    def calibrate(prepared):
        for x, _ in loader():
            calls.append(prepared(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv1d(1, 2, 3), nn.Linear(14, 2)

        def forward(self, x):
            return self.linear(self.conv(x[:, None]))

    tuned = quantization.autotune(
        Net().eval(),
        loader(),
        calib_func=calibrate,
        op_type_dict={"linear": {"activation": {"dtype": ["fp32"]}}},
        accuracy_criterion={"relative": 1},
    )
    assert len(calls) == 5
    assert {d.operator: d.quantized for d in tuned.layer_decisions} == {
        "conv1d": True,
        "linear": False,
    }


def test_what_cannot_be_is_a_typed_error():
    net = Fragile().eval()
    with pytest.raises(QuantizationError, match="no recipe is accurate enough"):
        quantization.autotune(net, loader(), accuracy_criterion={"absolute": 1e-9})
    with pytest.raises(QuantizationError, match="time is over"):
        quantization.autotune(
            net, loader(), accuracy_criterion={"absolute": 1e-9}, tuning_time=1e-6
        )
    with pytest.raises(QuantizationError, match="a calib_dataloader without items"):
        quantization.autotune(net, [])
    with pytest.raises(QuantizationError, match="algorithm of 'linear'"):
        quantization.autotune(
            net, loader(), op_type_dict={"linear": {"weight": {"algorithm": ["kl"]}}}
        )
