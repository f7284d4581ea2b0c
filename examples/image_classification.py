"""Classify images with a ResNet: compare eager mode with `torch.compile(backend="ipex")`.

    python examples/image_classification.py [--quick]

Prints the top-5 classes of both, the largest relative difference, the rules that were applied and
the speed-up. The model is torchvision's ResNet-50 (`pip install torchvision`), or that of
transformers where torchvision is missing (`pip install "ipex-inductor[demo]"`). Weights are random.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import ipex_inductor


def make_model(quick: bool) -> Callable[[Tensor], Tensor]:
    """Return a ResNet in eval mode whose batch norms have statistics of random images."""
    try:
        from torchvision import models

        model: nn.Module = models.resnet18() if quick else models.resnet50()
    except ImportError:
        from transformers import ResNetConfig, ResNetForImageClassification

        depths = [1, 1, 1, 1] if quick else [3, 4, 6, 3]
        sizes = [32, 64, 128, 256] if quick else [256, 512, 1024, 2048]
        config = ResNetConfig(depths=depths, hidden_sizes=sizes, num_labels=1000, return_dict=False)
        model = nn.Sequential(ResNetForImageClassification(config), TakeFirst())
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # keep the statistics of one pass
    with torch.no_grad():
        model.train()(torch.randn(4, 3, 64, 64))
    return model.eval()


class TakeFirst(nn.Module):
    """Return the first element of a tuple."""

    def forward(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """Return the logits."""
        return outputs[0]


def measure_ms(model: Callable[[Tensor], Tensor], images: Tensor, calls: int) -> float:
    """Return the median time of a call in milliseconds."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        model(images)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    """Compile the model, compare its output with eager mode, and time both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model and a small image")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    eager = make_model(quick)
    images = torch.randn(1, 3, 64 if quick else 224, 64 if quick else 224)
    with torch.no_grad():
        compiled = torch.compile(eager, backend="ipex")
        expected, result = eager(images), compiled(images)
        error = ((result - expected).abs().max() / expected.abs().max()).item()
        print("top-5, eager:   ", expected[0].topk(5).indices.tolist())
        print("top-5, compiled:", result[0].topk(5).indices.tolist())
        print(f"largest relative difference: {error:.1e}")
        print("rules applied:", ipex_inductor.explain(eager, images).fired())
        calls = 5 if quick else 30
        before, after = measure_ms(eager, images, calls), measure_ms(compiled, images, calls)
    print(f"eager {before:.1f} ms, compiled {after:.1f} ms: {before / after:.2f} times as fast")


if __name__ == "__main__":
    main()
