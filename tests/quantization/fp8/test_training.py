"""Scales, histories and gradients over 100 steps, equal to a reference that is written out."""

import copy
import math
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipex_inductor.ops.quant import fp8_states
from ipex_inductor.quantization.fp8 import DelayedScaling, Format, fp8_autocast, prepare_fp8
from support.fp8_reference import Reference

FORMATS = {
    Format.HYBRID: (torch.float8_e4m3fn, torch.float8_e5m2),
    Format.E4M3: (torch.float8_e4m3fn, torch.float8_e4m3fn),
    Format.E5M2: (torch.float8_e5m2, torch.float8_e5m2),
}


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def reference_of(model, recipe):
    forward, gradient = FORMATS[recipe.fp8_format]
    return Reference(
        model,
        forward=forward,
        gradient=gradient,
        length=recipe.amax_history_len,
        margin=recipe.margin,
        interval=recipe.interval,
        algorithm=recipe.amax_compute_algo,
    )


def batches(steps=100):
    """Inputs of changing size with zeros, overflow, infinity and NaN among them."""
    generator = torch.Generator().manual_seed(1)
    for number in range(steps):
        x = torch.randn(3 + number % 5, 8, generator=generator) * 2.0 ** (number % 7)
        if number == 20:
            x = torch.zeros_like(x)
        if number == 30:
            x = x * 1e4  # the scale of earlier passes lets most elements saturate
        if number == 40:
            x[0, 0] = math.nan
        if number == 60:
            x[1, 1] = math.inf
        yield x


def assert_states_equal(model, reference):
    """Bit for bit: no tolerance, as both compute the same operations in fp32."""
    for got, want in zip(states_of(model), reference.states(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def states_of(model):
    state = model[0].fp8_scaling
    return state.forward_state, state.gradient_state


RECIPES = [
    DelayedScaling(amax_history_len=8),
    DelayedScaling(amax_history_len=5, amax_compute_algo="most_recent", margin=1),
    DelayedScaling(amax_history_len=8, interval=3, fp8_format=Format.E4M3),
    DelayedScaling(amax_history_len=1, fp8_format=Format.E5M2, margin=-1),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
def test_a_hundred_steps_are_those_of_the_reference(recipe):
    model = prepare_fp8(mlp())
    twin = copy.deepcopy(model)  # trained by the reference
    reference = reference_of(twin, recipe)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-4) for m in (model, twin)]
    for number, x in enumerate(batches()):
        with fp8_autocast(enabled=True, fp8_recipe=recipe):
            y = model(x)
        (y.square().sum() / 2).backward()
        want = reference.step(x)
        assert torch.equal(y.nan_to_num(), want.nan_to_num())
        assert_states_equal(model, reference)
        if number % 3 == 0:
            continue  # gradients accumulate
        for optimizer, m in zip(optimizers, (model, twin), strict=True):
            finite = all(p.grad.isfinite().all() for p in m.parameters())
            if finite:  # else the step is skipped, as a gradient scaler does
                optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)


def test_passes_of_one_block_count_as_one():
    recipe = DelayedScaling(amax_history_len=4)
    model = prepare_fp8(mlp())
    with fp8_autocast(enabled=True, fp8_recipe=recipe):
        for factor in (1, 4, 2):
            model(torch.full((2, 8), float(factor)))
    forward, _ = states_of(model)
    assert forward[3:, 0].tolist() == [0, 0, 0, 4]
    assert forward[0, 0] == 448 / 4


def test_each_backward_updates_once():
    """Two passes before their backwards, as pipelines have: the second uses the newer scale."""
    model = prepare_fp8(mlp())
    recipe = DelayedScaling(amax_history_len=4)
    outputs = []
    for _ in range(2):
        with fp8_autocast(enabled=True, fp8_recipe=recipe):
            outputs.append(model(torch.ones(2, 8)))
    outputs[0].backward(torch.full((2, 4), 8.0))
    assert states_of(model)[1][:, 1].tolist()[3:] == [0, 0, 0, 8]
    outputs[1].backward(torch.full((2, 4), 2.0))
    assert states_of(model)[1][:, 1].tolist()[3:] == [0, 0, 8, 2]
    assert states_of(model)[1][0, 1] == 57344 / 8


def test_a_layer_that_is_called_twice_records_the_larger():
    model = prepare_fp8(nn.Sequential(nn.Linear(4, 4)))
    with fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(amax_history_len=2)):
        y = model(torch.full((1, 4), 3.0)).sum() * 5 + model(torch.ones(1, 4)).sum()
    y.backward()
    forward, gradient = states_of(model)
    assert (forward[4, 0], gradient[4, 0]) == (3, 5)


@pytest.mark.parametrize("format", list(Format))
def test_gradients_have_the_dtype_of_the_format(format):
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.ipex.fp8_gemm.default:
                seen.append((args[0].dtype, args[1].dtype))
            return func(*args, **(kwargs or {}))

    model = prepare_fp8(nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    with Watch():
        with fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(fp8_format=format)):
            y = model(x)
        y.sum().backward()
    forward, gradient = FORMATS[format]
    assert seen == [(forward, forward), (gradient, forward), (gradient, forward)]


def test_training_of_a_checkpointed_model_is_that_of_the_model():
    recipe = DelayedScaling(amax_history_len=8)
    model = prepare_fp8(mlp())
    twin = copy.deepcopy(model)
    for x in batches(12):
        with fp8_autocast(enabled=True, fp8_recipe=recipe):
            y, z = model(x), checkpoint(twin, x, use_reentrant=False)
        for output in (y, z):
            output.square().sum().backward()
        assert torch.equal(y, z)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        for got, want in zip(states_of(twin), states_of(model), strict=True):
            assert torch.equal(got, want)


def test_a_small_classifier_learns_as_in_fp32():
    """300 steps on separable data: both reach the same accuracy, so FP8 trains."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=generator)
    labels = (x[:, :4].sum(1) > x[:, 4:].sum(1)).long()
    losses = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = prepare_fp8(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(300):
            with fp8_autocast(enabled=enabled):
                y = model(x)
            loss = nn.functional.cross_entropy(y, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] < 0.05
    # Three bits of mantissa round each operand by up to 1/16, so losses agree in size alone.
    assert abs(losses[0] - losses[1]) < 0.02


class Wait(torch.autograd.Function):
    """The identity, whose backwards of two threads wait for each other."""

    barrier = threading.Barrier(2)

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Wait.barrier.wait(60)
        return gradient


def test_each_of_concurrent_backwards_updates_once(monkeypatch):
    model = prepare_fp8(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]))
    updates = []
    monkeypatch.setattr(model[0].fp8_scaling, "update_gradients", lambda *_: updates.append(1))

    def forward():
        x = torch.ones(2, 4)
        for layer in model:
            x = Wait.apply(layer(x))
        return x.sum()

    with fp8_autocast(enabled=True):
        outputs = [forward(), forward()]
    threads = [threading.Thread(target=output.backward) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(updates) == 2


def test_no_backward_is_remembered():
    model = prepare_fp8(mlp())
    number = model[0].fp8_scaling.number
    with fp8_autocast(enabled=True):
        model(torch.ones(2, 8)).sum().backward()
    assert number not in [entry[0] for entry in fp8_states._backwards]
