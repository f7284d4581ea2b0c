"""Prepared models under `torch.compile(backend="ipex", fullgraph=True)`: equal to eager mode."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.fp8 import DelayedScaling, Format, fp8_autocast, prepare_fp8

RECIPE = DelayedScaling(amax_history_len=4)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def pair():
    model = prepare_fp8(mlp())
    return model, copy.deepcopy(model)


def run(call, x, recipe=RECIPE, **settings):
    with fp8_autocast(enabled=True, fp8_recipe=recipe, **settings):
        return call(x)


def train(model, call, x):
    y = call(x)
    y.square().sum().backward()
    return y


def assert_same(model, twin):
    """Bit for bit: the operators are the same, and the rest of the graph rounds nothing."""
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    for (name, p), q in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(p, q), name


def inputs():
    return [torch.randn(4, 8) * factor for factor in (1, 100, 3)]


def test_training_equals_eager_mode_in_one_graph():
    model, twin = pair()
    compiled = torch.compile(twin, backend="ipex", fullgraph=True)
    for x in inputs():
        want = train(model, lambda v: run(model, v), x)
        got = train(twin, lambda v: run(compiled, v), x)
        assert torch.equal(got, want)
        assert_same(model, twin)


def test_a_block_may_be_inside_of_what_is_compiled():
    model, twin = pair()
    compiled = torch.compile(lambda v: run(twin, v), backend="ipex", fullgraph=True)
    for x in inputs():
        want = train(model, lambda v: run(model, v), x)
        assert torch.equal(train(twin, compiled, x), want)
        assert_same(model, twin)


@pytest.mark.sampled("False-False", "True-True")
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("calibrating", [False, True])
def test_inference_equals_eager_mode(enabled, calibrating):
    model, twin = pair()
    settings = {"enabled": enabled, "calibrating": calibrating, "fp8_recipe": RECIPE}
    compiled = torch.compile(twin.eval(), backend="ipex", fullgraph=True)
    for x in inputs():
        with torch.no_grad():
            with fp8_autocast(**settings):
                want, got = model(x), compiled(x)
            # In fp32, GEMMs of other kernels add in another order.
            torch.testing.assert_close(
                got, want, rtol=1e-6 * (not enabled), atol=1e-5 * (not enabled)
            )
    for p, q in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6 * calibrating, atol=0)


def test_weights_that_change_are_quantized_again():
    model, twin = pair()
    compiled = torch.compile(twin, backend="ipex", fullgraph=True)
    x = inputs()[0]
    with torch.no_grad():
        for factor in (1, -2, 5):
            for m in (model, twin):
                m[0].weight.mul_(factor)
            assert torch.equal(run(compiled, x), run(model, x))
            for m in (model, twin):
                run(m, x, calibrating=True)
            assert torch.equal(run(compiled, x), run(model, x))


def test_new_passes_and_recipes_of_equal_fields_compile_nothing():
    model = prepare_fp8(mlp())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    run(model, inputs()[0])  # sets the length of histories, which compiled code depends on
    for x in inputs() * 2:
        train(model, lambda v: run(compiled, v, DelayedScaling(amax_history_len=4)), x)
    assert counter.frame_count == 1
    compiled(inputs()[0])
    assert counter.frame_count == 2  # outside of a block
    run(compiled, inputs()[0], DelayedScaling(fp8_format=Format.E4M3, amax_history_len=4))
    assert counter.frame_count == 3


@pytest.mark.parametrize("dynamic", [True, None])
def test_sizes_of_batches_may_change(dynamic):
    model, twin = pair()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for size in (2, 5, 3, 7):
        x = torch.randn(size, 8)
        want = train(model, lambda v: run(model, v), x)
        assert torch.equal(train(twin, lambda v: run(compiled, v), x), want)
    assert_same(model, twin)


def test_two_passes_before_their_backwards():
    model, twin = pair()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    batches = inputs()
    for call in (model, compiled):
        outputs = [run(call, x) for x in batches]
        for y in outputs:
            y.square().sum().backward()
    assert_same(model, twin)


def test_states_are_written_in_place():
    """No kernel copies a state: its histories are longer than all else here."""
    model = prepare_fp8(mlp())
    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    _, codes = run_and_get_code(lambda: train(model, lambda v: run(compiled, v), inputs()[0]))
    text = "".join(codes)
    assert text.count("torch.ops.ipex.fp8_record.default(primals") == 2
    assert text.count("torch.ops.ipex.fp8_record_gradients.default(") == 2
    assert "empty_strided_cpu((1027" not in text


def test_a_part_alone_is_refused_where_the_block_is_compiled():
    """Without fullgraph Dynamo leaves the function to eager mode, which counts it."""
    model = prepare_fp8(mlp())
    function, x = lambda v: run(model[0], v), inputs()[0]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"raise QuantizationError\("):
        torch.compile(function, backend="eager", fullgraph=True)(x)
    torch.compiler.reset()
    torch.compile(function, backend="eager")(x)
    assert model[0].fp8_scaling.forward_state[-1, 0] == x.abs().max()


def test_a_part_alone_counts_where_the_block_is_not_compiled():
    model, twin = pair()
    compiled = torch.compile(twin[0], backend="aot_eager", fullgraph=True)
    for x in inputs():
        assert torch.equal(run(compiled, x), run(model[0], x))
    for p, q in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(p, q)


def test_torch_autocast_inside_of_the_graph():
    model, twin = pair()

    def step(call, x):
        with torch.autocast("cpu", torch.bfloat16):
            return run(call, x)

    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for x in inputs():
        want = train(model, lambda v: step(model, v), x)
        assert torch.equal(train(twin, lambda v: step(compiled, v), x), want)
        assert want.dtype is torch.bfloat16
    assert_same(model, twin)


def test_compiled_autograd_is_refused():
    model = prepare_fp8(nn.Sequential(nn.Linear(4, 4)))
    with fp8_autocast(enabled=True):
        y = model(torch.ones(2, 4))
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(QuantizationError, match="compiled_autograd = False"),
    ):
        y.sum().backward()


def test_scales_of_a_compiled_block_in_inference_mode_can_be_trained():
    model = prepare_fp8(nn.Sequential(nn.Linear(4, 4)))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def calibrate(x):
        with fp8_autocast(calibrating=True):
            return model(x)

    with torch.inference_mode():
        calibrate(torch.ones(2, 4))
    with fp8_autocast(enabled=True):
        y = model(torch.ones(2, 4))
    y.sum().backward()
    assert not model[0].fp8_scaling.scales.is_inference()
