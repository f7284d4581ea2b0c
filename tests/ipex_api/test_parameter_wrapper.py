"""What old programs ask of IPEX's parameter wrappers, beside what `optimize` does."""

import pytest
import torch
from torch import nn

import ipex_inductor
from ipex_inductor.ipex_api.parameter_wrapper import (
    IPEX_FUSED_OPTIMIZER_LIST,
    IPEX_WEIGHT_CONVERT_MODULE_CPU,
    IPEX_WEIGHT_CONVERT_MODULE_XPU,
    ParameterWrapper,
    can_cast_training,
    get_shared_parameter_status,
)
from ipex_inductor.optim import Lamb, Lars

BF16 = torch.bfloat16


class Model(nn.Module):
    """A linear, a norm, a linear tied to the embedding, and a list of parameters."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.head.weight = self.embedding.weight
        self.middle, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.scales = nn.ParameterList([torch.ones(4)])

    def forward(self, x):
        return self.head(self.norm(self.middle(self.embedding(x)))) * self.scales[0].sum()


def wrappers(model):
    found = {}
    get_shared_parameter_status(model, found)
    return {name: found[param] for name, param in model.named_parameters()}


@pytest.mark.parametrize("phase", ["training", "inference"])
def test_what_can_be_cast_is_what_optimize_casts(phase):
    model = Model().train(phase == "training")
    castable = {
        name: wrapper.can_cast_training(BF16)
        if phase == "training"
        else wrapper.can_cast_inference(BF16)
        for name, wrapper in wrappers(model).items()
    }
    if phase == "training":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _ = ipex_inductor.optimize(model, dtype=BF16, optimizer=optimizer)
    else:
        model = ipex_inductor.optimize(model, dtype=BF16)
    cast = {name: param.dtype == BF16 for name, param in model.named_parameters()}
    assert cast == castable
    assert castable["middle.weight"]
    assert not castable["norm.weight"]


def chained():
    """Two layers share a weight, the second its bias with a norm: none of it is cast."""
    first, second, norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
    second.weight, norm.bias = first.weight, second.bias
    return nn.Sequential(first, second, norm, nn.Linear(4, 4))


def half_double():
    layer = nn.Linear(3, 3)
    layer.bias = nn.Parameter(layer.bias.double())
    return nn.Sequential(layer, nn.Linear(3, 3))


CASES = {
    "layers": lambda: nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 3, 1), nn.LSTM(3, 3)),
    "bags": lambda: nn.Sequential(nn.EmbeddingBag(5, 3), nn.Embedding(5, 3)),
    "chained": chained,
    "half double": half_double,
    "computed weight": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3))),
    "low before": lambda: nn.Sequential(nn.Linear(3, 3)).bfloat16(),
    "subclass": lambda: nn.Sequential(type("Own", (nn.Linear,), {})(3, 3)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("before", [None, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("phase", ["training", "inference"])
@pytest.mark.parametrize("case", CASES)
def test_the_answers_are_those_of_optimize(case, phase, dtype, before):
    model = CASES[case]().train(phase == "training")

    def cast(dtype):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if model.training else None
        ipex_inductor.optimize(model, dtype, optimizer, inplace=True)

    if before is not None:
        cast(before)
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    answers = {
        name: getattr(wrapper, f"can_cast_{phase}")(dtype)
        for name, wrapper in wrappers(model).items()
    }
    cast(dtype)
    for name, param in model.named_parameters():
        if dtypes[name] != dtype:
            assert (param.dtype == dtype) == answers[name], name


def test_no_answer_for_other_dtypes_but_no():
    for wrapper in wrappers(Model()).values():
        assert not wrapper.can_cast_inference(torch.float32)


def test_owners_and_dtypes_before():
    found = wrappers(Model())
    tied = found["embedding.weight"]
    assert tied.num_modules == 2
    assert tied.modules_cls == {nn.Embedding, nn.Linear}
    assert found["head.bias"].modules_cls == {nn.Embedding, nn.Linear}
    assert found["scales.0"].modules_cls == {Model}
    assert (tied.original_dtype, tied.casted_dtype, tied.split) == (None, None, None)
    assert (tied.master_parameter, tied.parameter_trail) == (None, None)


@pytest.mark.parametrize("split", [True, False])
def test_what_training_keeps_beside_a_parameter(split):
    model = Model().train()
    exact = model.middle.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = ipex_inductor.optimize(
        model, dtype=BF16, optimizer=optimizer, split_master_weight_for_bf16=split
    )
    wrapper = wrappers(model)["middle.weight"]
    assert wrapper.parameter is model.middle.weight
    facts = (wrapper.original_dtype, wrapper.casted_dtype, wrapper.split)
    assert facts == (torch.float32, BF16, split)
    assert wrapper.can_cast_training(BF16)
    assert wrapper.can_cast_training(torch.float16)  # `optimize` casts once more when asked
    if split:
        assert wrapper.master_parameter is None
        bits = [part.view(torch.int16).to(torch.int32) for part in halves_of(wrapper)]
        assert torch.equal(((bits[0] << 16) | (bits[1] & 0xFFFF)).view(torch.float32), exact)
    else:
        assert wrapper.parameter_trail is None
        assert torch.equal(wrapper.master_parameter, exact)


def halves_of(wrapper):
    assert wrapper.parameter_trail.dtype == BF16
    return wrapper.parameter.detach(), wrapper.parameter_trail


def test_inference_shows_the_dtype_it_had():
    model = ipex_inductor.optimize(Model().eval(), dtype=BF16)
    wrapper = wrappers(model)["middle.weight"]
    facts = (wrapper.original_dtype, wrapper.casted_dtype, wrapper.split)
    assert facts == (torch.float32, BF16, None)


def test_a_double_cannot_be_cast():
    wrapper = wrappers(Model().double())["middle.weight"]
    assert not can_cast_training(wrapper, BF16)
    assert not can_cast_training(ParameterWrapper(), BF16)


def test_the_lists_are_of_classes():
    for inference in (True, False):
        for dtype in (BF16, torch.float16):
            on_cpu = IPEX_WEIGHT_CONVERT_MODULE_CPU(inference, dtype)
            on_gpu = IPEX_WEIGHT_CONVERT_MODULE_XPU(inference, dtype)
            assert {nn.Linear, nn.Conv2d} <= {*on_cpu} & {*on_gpu}
            assert all(issubclass(kind, nn.Module) for kind in (*on_cpu, *on_gpu))
    assert {torch.optim.SGD, torch.optim.AdamW, Lamb, Lars} <= {*IPEX_FUSED_OPTIMIZER_LIST}
