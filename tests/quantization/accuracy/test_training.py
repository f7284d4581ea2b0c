"""Training with quantization: a network trained here recovers what coarse weights cost."""

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor.quantization import Scheme, prepare_qat
from support.accuracy.comparison import compare, quantize, scores
from support.int8_models import ResNet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SAMPLES, BATCH = 20_000, 100
COARSE = Scheme(observer="min_max", per_channel=False)  # costs accuracy, so there is some to regain


def as_inputs(images):
    return ((images[:, None].float() - 127) / 128).expand(-1, 3, -1, -1)


def train(model, images, labels, epochs, rate):
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=epochs * (len(images) // BATCH)
    )
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(as_inputs(images[rows])), labels[rows]).backward()
            optimizer.step()
            schedule.step()


@pytest.fixture(scope="module")
def trained(fashion):
    torch.manual_seed(0)
    images, labels, *_ = fashion
    model = ResNet()
    train(model, images[:SAMPLES], labels[:SAMPLES], 3, 4e-3)
    return model.eval()


def test_training_in_int8_regains_accuracy(trained, fashion):
    images, labels, test_images, test_labels = fashion
    tested = [(as_inputs(part),) for part in test_images.split(BATCH)]
    calibration = [(as_inputs(part),) for part in images[:200].split(BATCH)]
    exact = scores(trained, tested)
    quantized = quantize(trained, COARSE, calibration)
    before = compare(exact, scores(quantized, tested), test_labels)
    train(prepare_qat(quantized), images[:SAMPLES], labels[:SAMPLES], 1, 4e-4)
    after = compare(exact, scores(quantized, tested), test_labels)
    assert before.exact > 85
    assert after.quantized > before.quantized
    assert after.drop <= 0.3
