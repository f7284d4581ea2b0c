"""MiniLM with its real weights judges sentences alike in int8."""

from functools import cache

import pytest
import torch

from ipex_inductor.quantization import default_dynamic_qconfig, default_static_qconfig
from support.accuracy.comparison import last_int8_calls, quantize, scores
from support.int8_models import signal_to_noise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SCHEMES = {"static": default_static_qconfig, "dynamic": default_dynamic_qconfig}
OUTLIERS = "one scale for outliers of layer norms and GELU costs more; the aim is not met yet"


@pytest.fixture(scope="module")
def result_of(minilm):
    @cache
    def measure(kind):
        return minilm.compare(quantize(minilm.model, SCHEMES[kind], minilm.calibration))

    return measure


@pytest.mark.parametrize("kind", SCHEMES)
def test_the_default_recipe_keeps_the_accuracy(result_of, kind):
    result = result_of(kind)
    assert result.samples > 8000
    assert result.exact > 74
    assert result.drop <= 0.2
    assert result.agreement >= 96


@pytest.mark.parametrize(
    "kind", [pytest.param("static", marks=pytest.mark.xfail(reason=OUTLIERS)), "dynamic"]
)
def test_the_default_recipe_keeps_the_answers(result_of, kind):
    assert result_of(kind).agreement >= 98


def test_the_compiled_graph_answers_as_the_graph(minilm):
    some = minilm.batches[:4]
    quantized = quantize(minilm.model, SCHEMES["static"], minilm.calibration)
    compiled = torch.compile(quantized, backend="ipex")
    reference, other = scores(quantized, some), scores(compiled, some)
    layers = [layer.name for layer in quantized.layer_decisions if layer.quantized]
    assert last_int8_calls() == sum("pooler" not in name for name in layers)  # it is not used
    agreement = (other.argmax(1) == reference.argmax(1)).double().mean()
    assert agreement >= 0.98  # single steps apart in each layer, which add up over the layers
    assert signal_to_noise(reference, other) > 20
