"""Blocks of `fp8_autocast`: nested, left by exceptions, calibrating, without gradients."""

import copy
import threading

import pytest
import torch
from torch import nn

from ipex_inductor.errors import ArgumentError, DeviceError, QuantizationError
from ipex_inductor.quantization.fp8 import DelayedScaling, Format, fp8_autocast, prepare_fp8

SHORT = DelayedScaling(amax_history_len=4)


@pytest.fixture
def model():
    return prepare_fp8(nn.Linear(8, 8))


X = torch.linspace(-3, 2, 32).view(4, 8)


def is_fp8(model, x=X):
    """Return whether a call computes in FP8: its result differs from that in fp32."""
    return not torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))


def history(model):
    return model.fp8_scaling.forward_state[3:, 0].tolist()


def test_only_enabled_blocks_change_results(model):
    assert not is_fp8(model)
    with fp8_autocast():
        assert not is_fp8(model)
    with fp8_autocast(enabled=True):
        assert is_fp8(model)
    assert not is_fp8(model)


def test_blocks_nest_and_restore(model):
    with fp8_autocast(enabled=True):
        with fp8_autocast(enabled=False):
            assert not is_fp8(model)
            with fp8_autocast(enabled=True):
                assert is_fp8(model)
            assert not is_fp8(model)
        assert is_fp8(model)
    assert not is_fp8(model)


def test_inner_blocks_update_nothing(model):
    with fp8_autocast(enabled=True, fp8_recipe=SHORT):
        with fp8_autocast(enabled=True):
            model(X)
        assert history(model)[:2] == [3, 0]
        model(2 * X)
    assert history(model) == [0, 0, 0, 6]


def test_the_recipe_of_an_inner_block_holds_where_the_outer_one_is_disabled(model):
    with fp8_autocast(enabled=False):
        with fp8_autocast(enabled=True, fp8_recipe=SHORT):
            model(X)
        with pytest.raises(QuantizationError, match="one recipe"):
            fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(margin=1)).__enter__()
    assert history(model) == [0, 0, 0, 3]


def test_an_inner_block_with_another_recipe_is_refused(model):
    other = DelayedScaling(fp8_format=Format.E4M3)
    with fp8_autocast(enabled=True):
        with (
            pytest.raises(QuantizationError, match="Omit fp8_recipe"),
            fp8_autocast(True, False, other),
        ):
            pass
        assert is_fp8(model)
    assert not is_fp8(model)


def test_exceptions_restore_and_update_nothing(model):
    def fail(x):
        raise ZeroDivisionError

    model.register_forward_hook(lambda module, inputs, output: fail(output))
    with pytest.raises(ZeroDivisionError), fp8_autocast(enabled=True, fp8_recipe=SHORT):
        model(X)
    model._forward_hooks.clear()
    assert not is_fp8(model)
    assert len(history(model)) == 1024
    assert history(model)[0] == 3
    with fp8_autocast(enabled=True, fp8_recipe=SHORT):
        model(X / 3)
    assert history(model) == [0, 0, 0, 3]  # what the failed pass recorded counts in the next


def test_blocks_without_gradients_record_nothing(model):
    before = copy.deepcopy(model.state_dict())
    for context in (torch.no_grad, torch.inference_mode):
        with context(), fp8_autocast(enabled=True):
            assert is_fp8(model)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_parts_without_gradients_count_in_a_block_with_gradients(model):
    with fp8_autocast(enabled=True, fp8_recipe=SHORT), torch.no_grad():
        model(X)
    assert history(model) == [0, 0, 0, 3]


@pytest.mark.parametrize("enabled", [False, True])
def test_calibration_needs_no_gradients(model, enabled):
    with torch.no_grad(), fp8_autocast(enabled=enabled, calibrating=True, fp8_recipe=SHORT):
        assert is_fp8(model) == enabled
    state = model.fp8_scaling.forward_state
    largest = torch.stack([torch.tensor(3.0), model.weight.abs().max()])
    assert torch.equal(state[0, :2], torch.tensor([448.0]) / largest)
    assert history(model) == [0, 0, 0, 3]


def test_a_calibrated_model_is_closer_to_fp32():
    """Without scales, elements below 2^-9 become zero; with them the error is that of rounding."""
    model, x = prepare_fp8(nn.Linear(64, 64)), torch.randn(16, 64) * 1e-3
    want, errors = model(x), []
    for _ in range(2):
        with torch.no_grad(), fp8_autocast(enabled=True):
            errors.append((model(x) - want).norm() / want.norm())
        with torch.no_grad(), fp8_autocast(calibrating=True):
            model(x)
    assert errors[1] < errors[0] / 4


def test_passes_of_other_models_do_not_count(model):
    other = prepare_fp8(nn.Linear(8, 8))
    with fp8_autocast(enabled=True, fp8_recipe=SHORT):
        model(X)
    assert other.fp8_scaling.forward_state.abs().sum() == 6  # two rows of ones


def test_it_decorates_functions(model):
    run = fp8_autocast(enabled=True)(is_fp8)
    assert run(model)
    assert not is_fp8(model)


def test_blocks_are_those_of_their_thread(model):
    seen = []
    with fp8_autocast(enabled=True):
        thread = threading.Thread(target=lambda: seen.append(is_fp8(model)))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_autocast_sets_the_dtype_of_results(model, dtype):
    with torch.autocast("cpu", dtype), fp8_autocast(enabled=True):
        y = model(X)
    assert y.dtype is dtype
    y.sum().backward()
    assert model.weight.grad.dtype is torch.float32


def test_results_and_gradients_have_the_dtype_of_the_model():
    model, x = prepare_fp8(nn.Linear(8, 4).bfloat16()), X.bfloat16().requires_grad_()
    with fp8_autocast(enabled=True):
        y = model(x)
    y.sum().backward()
    dtypes = {t.dtype for t in (y, x.grad, model.weight.grad, model.bias.grad)}
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 3, 8), (2, 0, 8)])
def test_inputs_of_any_shape(model, shape):
    x = torch.ones(shape, requires_grad=True)
    with fp8_autocast(enabled=True):
        y = model(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 8)
    assert x.grad.shape == x.shape


def test_second_derivatives_are_refused(model):
    x = X.clone().requires_grad_()
    with fp8_autocast(enabled=True):
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_wrong_arguments_are_refused():
    with pytest.raises(ArgumentError, match="DelayedScaling"):
        fp8_autocast(fp8_recipe="delayed")
    with pytest.raises(ArgumentError, match="ProcessGroup"):
        fp8_autocast(fp8_group="world")
    with pytest.raises(DeviceError, match="xpu"):
        fp8_autocast(device="xpu")
    fp8_autocast(device=torch.device("cpu"))
    fp8_autocast(device="cuda:0")


def test_threads_share_a_block(model):
    block, entered, left = fp8_autocast(enabled=True), threading.Event(), threading.Event()
    results = []

    def run_around():
        with fp8_autocast(enabled=True), torch.no_grad():
            with block:
                entered.set()
                left.wait(60)
            results.append(is_fp8(model))

    thread = threading.Thread(target=run_around)
    thread.start()
    entered.wait(60)
    with block:
        left.set()
        thread.join()
    assert results == [True]
    assert not is_fp8(model)
