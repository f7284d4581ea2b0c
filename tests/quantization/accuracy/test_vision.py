"""EfficientNet-Lite0 with its real weights answers alike in int8, on all test images."""

import pytest
import torch

from ipex_inductor.quantization import default_static_qconfig
from support.accuracy.comparison import last_int8_calls, quantize, scores
from support.int8_models import signal_to_noise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def quantized(lite0):
    return quantize(lite0.model, default_static_qconfig, lite0.calibration)


def test_the_default_recipe_keeps_the_answers(lite0, quantized):
    result = lite0.compare(quantized)
    assert result.samples == 10_000
    assert result.exact > 84.5
    assert result.drop <= 0.3
    assert result.agreement >= 96


def test_the_compiled_graph_answers_as_the_graph(lite0, quantized):
    some = lite0.batches[:4]
    compiled = torch.compile(quantized, backend="ipex")
    reference, other = scores(quantized, some), scores(compiled, some)
    assert last_int8_calls() == sum(layer.quantized for layer in quantized.layer_decisions)
    agreement = (other.argmax(1) == reference.argmax(1)).double().mean()
    assert agreement >= 0.98  # single steps apart in each layer, which add up over the layers
    assert signal_to_noise(reference, other) > 20


def test_dead_and_constant_channels_have_finite_results(lite0, quantized):
    """Channels that batch norms switch off have weights of zero, or nearly."""
    weights = [value for value in lite0.model.state_dict().values() if value.dim() == 4]
    largest = [weight.abs().flatten(1).amax(1) for weight in weights]
    assert any(bool((channels == 0).any()) for channels in largest)
    assert any(bool((channels > 0).logical_and(channels < 1e-6).any()) for channels in largest)
    assert all(scale.scale > 0 for scale in quantized.tensor_scales().values())
    black = torch.full_like(lite0.batches[0][0][:2], -127 / 128)
    assert quantized(black).isfinite().all()


def test_images_of_one_color_calibrate_without_nan(lite0):
    black = torch.full_like(lite0.batches[0][0][:2], -127 / 128)
    zeros = torch.zeros_like(black)
    for image in (black, zeros):
        quantized = quantize(lite0.model, default_static_qconfig, [(image,)])
        assert all(scale.scale > 0 for scale in quantized.tensor_scales().values())
        assert quantized(image).isfinite().all()
