"""Checkpoints: fp32 in and out, for every submodule, and as strict as torch is."""

import copy
import io
import struct

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ipex_inductor.optim import attach_master_weights, cast_for_inference
from ipex_inductor.optim.bf16_split import halves, join, split
from support.optim.optimizer_variants import (
    LOW,
    ONE_EACH,
    VARIANTS,
    Net,
    assert_same,
    autocast,
    pair,
    same_gradients,
    train,
)

parametrize_low = pytest.mark.parametrize("held", LOW.values(), ids=list(LOW))
SPLIT, MASTER, HALF = LOW.values()


def saved(value, weights_only=True):
    """Through a file, as checkpoints go."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


LAYOUTS = {
    "plain": lambda: torch.randn(3, 5),
    "transposed": lambda: torch.randn(3, 5).t(),
    "channels-last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "0-d": lambda: torch.tensor(-0.3),
    "empty": lambda: torch.empty(0, 3),
    "sliced": lambda: torch.randn(6, 8)[::2, 1:7:3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_are_the_bits(layout):
    full = LAYOUTS[layout]()
    upper, lower = split(full)
    assert (upper.dtype, lower.dtype) == (torch.bfloat16, torch.int16)
    truncated = torch.bitwise_and(full.view(torch.int32), -(2**16)).view(torch.float32)
    assert torch.equal(upper.float(), truncated)
    assert torch.equal(join(upper, lower), full)
    if full.is_contiguous(memory_format=torch.channels_last) and full.dim() == 4:
        assert upper.stride() == lower.stride() == full.stride()


def test_every_kind_of_float_survives():
    """Bits, so that zeros keep their signs and NaNs their payloads."""
    words = [0, 1, 2**31, 2**31 + 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF]
    words += [0x3F808000, 0x3F807FFF, 0x00008000, 0x7F7FFFFF, 0x12345678]
    full = torch.frombuffer(bytearray(struct.pack(f"<{len(words)}I", *words)), dtype=torch.float32)
    again = join(*split(full)).view(torch.int32)
    assert torch.equal(again, full.view(torch.int32))
    lower, upper = halves(full)
    assert [
        u << 16 | low & 0xFFFF for u, low in zip(upper.tolist(), lower.tolist(), strict=True)
    ] == (full.view(torch.int32).tolist())


def test_a_split_weight_takes_four_bytes():
    model, optimizer = nn.Linear(64, 64), None
    optimizer = SGD(model.parameters(), 0.1)
    attach_master_weights(model, optimizer, model.parameters(), torch.bfloat16, split=True)
    held = [v for w in vars(model)["_ipex_weights"].values() for v in vars(w).values()]
    held = {t.untyped_storage().nbytes() for t in held if isinstance(t, torch.Tensor)}
    assert held == {64 * 64 * 2, 64 * 2}  # upper and lower halves are equally large
    assert {p.untyped_storage().nbytes() for p in model.parameters()} == held


@parametrize_low
def test_the_parameter_stays_the_same_object(held):
    model = Net()
    before = list(model.parameters())
    optimizer = SGD(model.parameters(), 0.1)
    attach_master_weights(model, optimizer, model.cast(), held[0], split=held[1])
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert model.up.weight is model.down.weight
    assert {p.dtype for p in model.cast()} == {held[0]}
    assert model.norm.weight.dtype == torch.float32


@parametrize_low
def test_submodules_show_fp32_too(held):
    model, _, twin, _ = four = pair(VARIANTS["sgd"], held)
    train(*four)
    for name, module in twin.named_modules():
        shown = model.get_submodule(name).state_dict()
        assert list(shown) == list(module.state_dict())
        for key, value in module.state_dict().items():
            assert torch.equal(shown[key], value)
            assert shown[key].dtype == torch.float32
            assert not shown[key].requires_grad


@parametrize_low
def test_tied_parameters_are_one_tensor_in_a_state_dict(held):
    model, _, twin, _ = pair(VARIANTS["sgd"], held)
    for shown in (twin.state_dict(), model.state_dict(), model.state_dict(prefix="a.")):
        up, down = (v for k, v in shown.items() if k.endswith(("up.weight", "down.weight")))
        assert up.data_ptr() == down.data_ptr()
    first, second = model.state_dict(), model.state_dict()
    assert first["up.weight"].data_ptr() != second["up.weight"].data_ptr()


@parametrize_low
def test_a_destination_used_twice_is_up_to_date(held):
    model, _, twin, _ = four = pair(VARIANTS["sgd"], held)
    destination = model.state_dict()
    train(*four)
    model.state_dict(destination=destination)
    assert all(torch.equal(destination[name], value) for name, value in twin.state_dict().items())
    plain = {}
    model.state_dict(destination=plain)
    assert all(torch.equal(plain[name], value) for name, value in twin.state_dict().items())


@parametrize_low
def test_a_state_dict_is_a_copy(held):
    model, *_ = four = pair(VARIANTS["sgd"], held)
    before = model.state_dict()
    kept = copy.deepcopy(before)
    train(*four)
    before.pop("norm.weight"), before.pop("norm.bias")  # torch's own alias the model
    assert all(torch.equal(value, kept[name]) for name, value in before.items())


def test_keep_vars():
    model, *_ = pair(VARIANTS["sgd"], SPLIT)
    assert all(value.requires_grad for value in model.state_dict(keep_vars=True).values())


@parametrize_low
@pytest.mark.parametrize("way", ["from plain", "to plain"])
@pytest.mark.parametrize("variant", ONE_EACH)
def test_checkpoints_interchange_with_plain_training(variant, way, held):
    model, optimizer, twin, reference = four = pair(VARIANTS[variant], held)
    train(*four)
    fresh, new_optimizer, plain, new_reference = pair(VARIANTS[variant], held)
    source = (twin, reference) if way == "from plain" else (model, optimizer)
    for net, of in ((fresh, new_optimizer), (plain, new_reference)):
        weights, state = saved((source[0].state_dict(), source[1].state_dict()))
        assert net.load_state_dict(weights) == ([], [])
        of.load_state_dict(state)
    goes_on = (fresh, new_optimizer, plain, new_reference)
    assert_same(*goes_on)
    train(*goes_on)
    assert_same(*goes_on)


BROKEN = {
    "missing": lambda d: {k: v for k, v in d.items() if k != "up.weight"},
    "unexpected": lambda d: d | {"up.gain": torch.ones(1)},
    "shape": lambda d: d | {"up.weight": torch.ones(5, 6), "gain": torch.ones(2)},
    "no tensor": lambda d: d | {"conv.weight": [1.0]},
}


@parametrize_low
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("fault", BROKEN)
def test_what_does_not_fit_is_said_as_torch_says_it(fault, strict, held):
    model, _, twin, _ = pair(VARIANTS["sgd"], held)
    broken = BROKEN[fault]({k: v + 1 for k, v in twin.state_dict().items()})
    said = []
    for net in (model, twin):
        try:
            said.append(net.load_state_dict(broken, strict=strict))
        except RuntimeError as error:
            said.append(str(error))
    assert said[0] == said[1]
    shown = model.state_dict()
    assert all(torch.equal(shown[k], v) for k, v in twin.state_dict().items())  # the rest is loaded


@parametrize_low
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loading_never_aliases_the_callers_tensors(dtype, held):
    model, optimizer, twin, reference = four = pair(VARIANTS["sgd momentum"], held)
    train(*four)
    weights = {name: value.to(dtype, copy=True) for name, value in twin.state_dict().items()}
    state = copy.deepcopy(reference.state_dict())
    for of, net in ((optimizer, model), (reference, twin)):
        net.load_state_dict(weights)
        of.load_state_dict(copy.deepcopy(state) if of is reference else state)
    kept = copy.deepcopy((weights, state))
    train(*four)
    assert_same(*four)
    for name, value in kept[0].items():
        assert torch.equal(weights[name], value)
    cast = {0, 3, 4, 5}  # torch itself aliases the state of parameters it does not cast
    for key in cast & state["state"].keys():
        for name, value in kept[1]["state"][key].items():
            assert torch.equal(state["state"][key][name], value)


@parametrize_low
def test_a_submodule_loads_by_itself(held):
    model, _, twin, _ = pair(VARIANTS["sgd"], held)
    weights = {name: torch.randn_like(value) for name, value in twin.up.state_dict().items()}
    for net in (model, twin):
        net.up.load_state_dict(weights)
    assert torch.equal(model.state_dict()["down.weight"], twin.down.weight)
    assert torch.equal(model.state_dict()["up.bias"], twin.up.bias)


def test_a_scalar_loads_from_one_element():
    model, *_ = pair(VARIANTS["sgd"], SPLIT)
    model.load_state_dict({"gain": torch.tensor([0.1])}, strict=False)
    assert torch.equal(model.state_dict()["gain"], torch.tensor(0.1))


@parametrize_low
def test_assign_makes_the_callers_tensor_the_parameter(held):
    model, *_ = pair(VARIANTS["sgd"], held)
    given = torch.randn(4, 3, 3, 3)
    model.load_state_dict({"conv.weight": given}, strict=False, assign=True)
    assert model.conv.weight.dtype == torch.float32
    assert model.state_dict()["conv.weight"].data_ptr() == given.data_ptr()
    assert model.state_dict()["up.weight"].dtype == torch.float32


@parametrize_low
def test_loading_by_swapped_tensors(held):
    model, _, twin, _ = four = pair(VARIANTS["sgd momentum"], held)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for net in (model, twin):
            net.load_state_dict({k: v + 1 for k, v in twin.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    twin.load_state_dict(model.state_dict())
    train(*four)
    assert_same(*four)


@parametrize_low
def test_hooks_of_the_optimizers_loading_still_run(held):
    _, optimizer, _, reference = four = pair(VARIANTS["sgd momentum"], held)
    train(*four)

    def double(_, state_dict):
        state = copy.deepcopy(state_dict["state"])
        for own in state.values():
            own["momentum_buffer"] *= 2
        return state_dict | {"state": state}

    seen = []

    def look(of):
        buffers = [own["momentum_buffer"] for own in of.state.values()]
        seen.append({buffer.dtype for buffer in buffers})

    for of in (optimizer, reference):
        of.register_load_state_dict_pre_hook(double)
        of.register_load_state_dict_post_hook(look)
        of.load_state_dict(reference.state_dict())
    assert seen == [{torch.float32}] * 2
    assert_same(*four)


def test_a_state_dict_of_other_groups_is_refused_as_torch_refuses_it():
    _, optimizer, _, reference = four = pair(VARIANTS["sgd momentum"], SPLIT)
    train(*four)
    broken = reference.state_dict()
    broken["param_groups"] = broken["param_groups"][:1]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(broken)
    assert_same(*four)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 0


def one_memo(both):
    memo = {}
    return tuple(copy.deepcopy(one, memo) for one in both)


COPIES = {
    "deepcopy": copy.deepcopy,
    "one memo": one_memo,
    "pickle": lambda both: saved(both, weights_only=False),
}


@parametrize_low
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("variant", ["adam amsgrad", "lars momentum"])
def test_copies_train_on(variant, way, held):
    model, optimizer, twin, reference = four = pair(VARIANTS[variant], held)
    train(*four)
    copied, its_optimizer = COPIES[way]((model, optimizer))
    before = model.state_dict()
    train(copied, its_optimizer, twin, reference)
    assert vars(its_optimizer).get("fused") == vars(optimizer).get("fused")
    assert_same(copied, its_optimizer, twin, reference)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name


@parametrize_low
def test_a_model_copied_alone_keeps_its_masters(held):
    model, _, twin, _ = four = pair(VARIANTS["sgd"], held)
    train(*four)
    copied = copy.deepcopy(model)
    shown = copied.state_dict()
    assert all(torch.equal(shown[name], value) for name, value in twin.state_dict().items())
    stranger = SGD(copied.parameters(), 0.1)
    with pytest.raises(TypeError, match="with its model"):
        stranger.step()
    layer = copy.deepcopy(model.up)
    assert torch.equal(layer.state_dict()["weight"], twin.up.weight)


@parametrize_low
def test_attached_twice(held):
    model, optimizer, *_ = four = pair(VARIANTS["adam"], held)
    train(*four)
    tables = [vars(m).get("_ipex_weights") for m in model.modules()]
    step = optimizer.step
    attach_master_weights(model, optimizer, model.cast(), held[0], split=held[1])
    assert optimizer.step == step
    assert [vars(m).get("_ipex_weights") for m in model.modules()] == tables
    assert all(len(m._state_dict_hooks) <= 1 for m in model.modules())
    train(*four)
    assert_same(*four)


@pytest.mark.parametrize("second", [SPLIT, MASTER, HALF], ids=list(LOW))
@parametrize_low
def test_attached_again_otherwise(held, second):
    model, optimizer, *_ = four = pair(VARIANTS["adam"], held)
    train(*four)
    attach_master_weights(model, optimizer, model.cast(), second[0], split=second[1])
    assert {p.dtype for p in model.cast()} == {second[0]}
    assert_same(*four)
    train(*four)
    assert_same(*four)


@pytest.mark.parametrize("held", [MASTER, HALF], ids=["bf16 master", "fp16 master"])
def test_what_the_user_writes_into_a_parameter_is_trained_on(held):
    """Weight clipping, say: through `.data` no version is counted, and the master was not asked."""
    model, _, twin, _ = four = pair(VARIANTS["sgd momentum"], held)
    train(*four)
    for net in (model, twin):
        net.up.weight.data.clamp_(-0.125, 0.125)  # both exact in 16 bits
    model.up.weight.data[0, 0] = float("nan")
    twin.up.weight.data[0, 0] = float("nan")
    clamped = twin.up.weight.abs() == 0.125
    shown = model.state_dict()["up.weight"]
    assert torch.equal(shown[clamped], twin.up.weight[clamped])
    assert torch.equal(shown[~clamped].nan_to_num(), twin.up.weight[~clamped].nan_to_num())
    train(*four)
    assert torch.equal(model.state_dict()["up.weight"].isnan(), twin.up.weight.isnan())


def test_what_the_user_writes_into_a_split_parameter_is_off_by_less_than_a_step_of_bf16():
    model, *_ = pair(VARIANTS["sgd"], SPLIT)
    with torch.no_grad():
        model.up.weight.fill_(1.0)
    shown = model.state_dict()["up.weight"]
    assert (shown >= 1).all()
    assert (shown < 1 + 2**-7).all()  # bf16 has 7 bits after the point


@parametrize_low
def test_a_model_cast_by_the_user_is_ordinary_again(held):
    model, optimizer, twin, _ = pair(VARIANTS["sgd"], held)
    model.float()
    assert model.state_dict()["up.weight"].data_ptr() == model.up.weight.data_ptr()
    torch.testing.assert_close(model.up.weight, twin.up.weight, rtol=2**-7, atol=0)  # bf16
    before = model.up.weight.detach().clone()
    for of in (optimizer, SGD(model.parameters(), 0.1)):
        model.up.weight.grad = torch.ones_like(model.up.weight)
        of.step()
    torch.testing.assert_close(model.up.weight.detach(), before - 0.2, rtol=0, atol=1e-6)


def test_gradients_from_before_are_cast():
    model = nn.Linear(4, 4)
    model(torch.randn(2, 4)).sum().backward()
    kept = model.weight.grad.clone()
    optimizer = SGD(model.parameters(), 0.1)
    attach_master_weights(model, optimizer, model.parameters(), torch.bfloat16, split=True)
    assert torch.equal(model.weight.grad, kept.bfloat16())
    with autocast(torch.bfloat16):
        model(torch.randn(2, 4)).sum().backward()
    assert not torch.equal(model.weight.grad, kept.bfloat16())


@pytest.mark.parametrize("public", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inference_keeps_the_public_dtype(dtype, public):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(public).eval()
    before = copy.deepcopy(model.state_dict())
    first = cast_for_inference(model, model[0].parameters(), dtype)
    assert set(first.values()) == ({public} if public != dtype else set())
    assert not cast_for_inference(model, model[0].parameters(), dtype)
    shown = model.state_dict()
    assert {value.dtype for value in shown.values()} == {public}
    assert torch.equal(shown["0.weight"], before["0.weight"].to(dtype).to(public))
    weights = {name: torch.randn_like(value) for name, value in before.items()}
    model.load_state_dict(weights)
    assert torch.equal(model[0].weight, weights["0.weight"].to(dtype))
    assert copy.deepcopy(model)[0].state_dict()["weight"].dtype == public


def test_cast_twice_state_dicts_show_the_first():
    model = nn.Linear(4, 4)
    for dtype in (torch.bfloat16, torch.float16):
        cast_for_inference(model, model.parameters(), dtype)
    assert model.weight.dtype == torch.float16
    assert model.state_dict()["weight"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_the_user_casts_afterwards_is_shown(dtype):
    model = nn.Linear(4, 4)
    cast_for_inference(model, model.parameters(), torch.bfloat16)
    model.to(dtype)
    assert model.state_dict()["weight"].dtype == dtype
    assert torch.equal(model.state_dict()["weight"], model.weight)


def test_masters_stay_when_a_trained_model_goes_into_inference():
    model, _, twin, _ = four = pair(VARIANTS["sgd"], SPLIT)
    train(*four)
    assert not cast_for_inference(model, model.cast(), torch.bfloat16)
    shown = model.state_dict()
    assert all(torch.equal(shown[name], value) for name, value in twin.state_dict().items())


def test_the_same_gradients_reach_both():
    """The helper itself: a bf16 draw is the same number in fp32."""
    model, _, twin, _ = pair(VARIANTS["sgd"], SPLIT)
    same_gradients(model, twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad.float(), q.grad)


@parametrize_low
def test_averages_of_an_fp32_twin_are_those_of_fp32_training(held):
    """As the docstring of the package says; averages of the parameters lose what is small."""
    model, _, twin, _ = four = pair(VARIANTS["sgd"], held)
    shown = copy.deepcopy(twin)
    ours, theirs = (
        AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.99)) for m in (shown, twin)
    )
    for _ in range(5):
        train(*four, steps=1)
        shown.load_state_dict(model.state_dict())
        ours.update_parameters(shown)
        theirs.update_parameters(twin)
    averages = theirs.state_dict()
    assert all(torch.equal(value, averages[name]) for name, value in ours.state_dict().items())


@parametrize_low
def test_loading_the_parameters_themselves_changes_nothing(held):
    """They are low precision: what they cannot hold must not be taken for zero."""
    model, *_ = pair(VARIANTS["sgd"], held)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(dict(model.named_parameters()), strict=False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(copies, strict=False)
    for name, value in model.state_dict().items():
        assert name not in copies or torch.equal(value, copies[name].to(value.dtype))
