"""MiniLM with its real weights judges sentences alike in int8."""

import pytest
import torch

from ipex_inductor.quantization import default_dynamic_qconfig, default_static_qconfig
from support.accuracy.comparison import quantize, scores
from support.int8_models import signal_to_noise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SCHEMES = {"static": default_static_qconfig, "dynamic": default_dynamic_qconfig}


@pytest.mark.parametrize("kind", SCHEMES)
def test_the_default_recipe_keeps_the_answers(minilm, kind):
    result = minilm.compare(quantize(minilm.model, SCHEMES[kind], minilm.calibration))
    assert result.samples > 8000
    assert result.exact > 74
    assert result.drop <= 0.2
    assert result.agreement >= 98


def test_the_compiled_graph_answers_as_the_graph(minilm):
    quantized, some = (
        quantize(minilm.model, SCHEMES["static"], minilm.calibration),
        minilm.batches[:4],
    )
    compiled = torch.compile(quantized, backend="ipex")
    reference, other = scores(quantized, some), scores(compiled, some)
    assert torch.equal(other.argmax(1), reference.argmax(1))
    assert signal_to_noise(reference, other) > 30
