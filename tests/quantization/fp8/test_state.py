"""The scaling state of a model: saved, loaded, moved, copied, and read from checkpoints of IPEX."""

import copy
import io

import pytest
import torch
from torch import nn

from ipex_inductor.errors import SummaryFileError
from ipex_inductor.quantization.fp8 import DelayedScaling, fp8_autocast, prepare_fp8

SHORT = DelayedScaling(amax_history_len=4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(self.first(x).relu())


def trained(steps=3, recipe=SHORT):
    model = prepare_fp8(Net())
    for number in range(steps):
        step(model, number + 1, recipe)
    return model


def step(model, factor=1, recipe=SHORT):
    x = torch.linspace(-1, 1, 12).view(3, 4) * factor
    with fp8_autocast(enabled=True, fp8_recipe=recipe):
        y = model(x)
    y.square().sum().backward()
    return y


def state_of(model):
    return model.first.fp8_scaling


def assert_equal(model, other):
    a, b = model.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert torch.equal(state_of(model).scales, state_of(other).scales)


def test_a_model_has_one_tensor_a_direction_in_its_state_dict():
    model = trained()
    names = model.state_dict().keys() - Net().state_dict().keys()
    assert names == {f"first.fp8_scaling.{n}_state" for n in ("forward", "gradient")}
    assert state_of(model).forward_state.shape == (3 + 4, 2 * 3)
    assert state_of(model).gradient_state.shape == (3 + 4, 2)


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_model_goes_on_as_the_saved_one(assign, tmp_path):
    model = trained()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = prepare_fp8(Net())
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), assign=assign)
    assert_equal(model, other)
    for factor in (5, 2):
        assert torch.equal(step(model, factor), step(other, factor))
    assert_equal(model, other)


def test_a_state_dict_without_scales_is_incomplete():
    with pytest.raises(RuntimeError, match="fp8_scaling"):
        prepare_fp8(Net()).load_state_dict(Net().state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_model_keeps_scales_in_fp32(dtype):
    model = trained()
    before = state_of(model).forward_state.clone()
    model.to(dtype)
    assert model.first.weight.dtype is dtype
    assert state_of(model).forward_state.dtype is torch.float32
    assert torch.equal(state_of(model).forward_state, before)


def test_the_state_moves_with_the_model():
    model = trained().to("meta")
    assert {b.device.type for b in model.buffers()} == {"meta"}
    model.to_empty(device="cpu")
    state_of(model).reset_parameters()
    assert_equal_states = torch.equal(state_of(model).scales[..., 0], torch.ones(2, 6))
    assert assert_equal_states
    assert state_of(model).forward_state[2:].count_nonzero() == 0


def reloaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, reloaded],
    ids=["deepcopy", "saved"],
)
def test_a_copy_has_a_state_of_its_own(duplicate):
    model = trained()
    other = duplicate(model)
    assert_equal(model, other)
    step(other, 9)
    assert state_of(model).forward_state[6, 0] == 3
    assert state_of(other).forward_state[6, 0] == 9
    assert other.second._fp8[0] is state_of(other)


@pytest.mark.parametrize(
    ("length", "want"),
    [(1, [0]), (2, [0, 7]), (3, [0, 3, 7]), (6, [0, 0, 1, 2, 3, 7])],
)
def test_another_length_of_histories_keeps_the_newest_passes(length, want):
    model = trained()
    assert state_of(model).forward_state[3:, 0].tolist() == [0, 1, 2, 3]
    step(model, 7, DelayedScaling(amax_history_len=length))
    history = state_of(model).forward_state[3:, 0].tolist()
    assert history == want
    assert len(state_of(model).gradient_state) == 3 + length
    assert state_of(model).forward_state[0, 0] == 448 / 7


def test_a_backward_writes_to_a_history_that_grew_meanwhile():
    model = prepare_fp8(nn.Linear(4, 4))
    outputs = []
    for length in (4, 2000):  # prepared models start at 1024
        with fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(amax_history_len=length)):
            outputs.append(model(torch.ones(2, 4)))
    for factor, output in enumerate(outputs, 5):
        (output.sum() * factor).backward()
    assert model.fp8_scaling.gradient_state[0, 0] == 57344 / 6
    assert model.fp8_scaling.gradient_state[-1, 0] == 6


def old_entry(seed, length=6, **changes):
    """Return the state that IPEX saves for one layer: three columns forward, two backward."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for suffix, tensors in (("fwd", 3), ("bwd", 2)):
        scale = torch.rand(tensors, generator=generator) + 1
        state[f"scale_{suffix}"], state[f"scale_inv_{suffix}"] = scale, 1 / scale
        state[f"amax_history_{suffix}"] = torch.rand(length, tensors, generator=generator)
    state["extra_fp8_variables"] = {"num_gemms": 1, "fp8_max_fwd": 448}
    return {**state, **changes}


def saved(entry):
    file = io.BytesIO()
    torch.save(entry, file)
    return file


def test_checkpoints_of_ipex_are_read():
    entries = {"first": old_entry(0), "second": old_entry(1)}
    old = Net().state_dict() | {f"{n}._extra_state": saved(e) for n, e in entries.items()}
    model = prepare_fp8(Net())
    model.load_state_dict(old)
    state = state_of(model)
    for number, entry in enumerate(entries.values()):
        forward = state.forward_state[:, 3 * number : 3 * number + 3]
        assert torch.equal(forward[0], entry["scale_fwd"])
        assert torch.equal(forward[1], entry["scale_inv_fwd"])
        assert torch.equal(forward[3:], entry["amax_history_fwd"])
        gradient = state.gradient_state[:, number]
        assert gradient[0] == entry["scale_bwd"][0]
        assert torch.equal(gradient[3:], entry["amax_history_bwd"][:, 0])
    assert torch.equal(state.scales[..., 0], state.forward_state[:2])


def test_checkpoints_of_ipex_are_read_below_other_modules():
    model = nn.ModuleDict({"net": prepare_fp8(Net())})
    old = {f"net.{n}": v for n, v in Net().state_dict().items()}
    old["net.first._extra_state"] = saved(old_entry(0))
    old["net.second._extra_state"] = saved(None)  # it never ran in FP8
    model.load_state_dict(old)
    assert torch.equal(state_of(model["net"]).scales[0, :3, 0], old_entry(0)["scale_fwd"])
    assert torch.equal(state_of(model["net"]).scales[:, 3:, 0], torch.ones(2, 3))


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    "entry", [saved({"scale_fwd": torch.ones(3)}), saved(Evil()), io.BytesIO(b"torn"), 5]
)
def test_other_entries_are_refused_and_not_executed(entry, capsys):
    old = Net().state_dict() | {"first._extra_state": entry}
    with pytest.raises(SummaryFileError, match=r"first\._extra_state"):
        prepare_fp8(Net()).load_state_dict(old)
    assert "executed" not in capsys.readouterr().out


def loaded(model):
    model.load_state_dict(model.state_dict())
    return model


def assigned(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    model.load_state_dict({**state, **parameters}, assign=True)
    return model


def calibrated(model):
    with fp8_autocast(calibrating=True, fp8_recipe=SHORT):
        model(torch.ones(3, 4))
    return model


@pytest.mark.parametrize("change", [loaded, assigned, calibrated, prepare_fp8])
def test_state_that_inference_mode_makes_can_be_trained(change):
    model = Net()
    if change is not prepare_fp8:
        model = prepare_fp8(model)
    with torch.inference_mode():
        model = change(model, inplace=True) if change is prepare_fp8 else change(model)
    step(model)
    assert not any(buffer.is_inference() for buffer in state_of(model).buffers())
    assert state_of(model).gradient_state[0].ne(1).any()
