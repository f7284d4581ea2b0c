"""Inference of vision models on one GPU, side by side in one run: see gpu_peers.py.

    python benchmarks/vision.py [--batch 1 128] [--models resnet50 timm:convnext_base ...]
        [--peers NAME ...] [--tune SECONDS] [--database FOLDER] [--json FILE] [--csv FILE]

Channels-last, with random weights and batch-norm statistics that were run in; models of torchvision
or, after `timm:`, of timm.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torchvision
from gpu_peers import Case, arguments, known, race
from torch import nn

LAST: dict[str, Any] = {"memory_format": torch.channels_last}
FEW = 4  # images that are computed in fp64
PIXELS = 224


def model_of(name: str) -> nn.Module:
    """In fp32 on the GPU, with statistics of batch norms as its own activations have them."""
    torch.manual_seed(0)
    if name.startswith("timm:"):
        import timm

        found = timm.create_model(name.removeprefix("timm:"), pretrained=False)
    else:
        found = getattr(torchvision.models, name)(weights=None)
    model: nn.Module = found.cuda().to(**LAST)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean of all batches
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(32, 3, PIXELS, PIXELS, device="cuda").to(**LAST))
    return model.eval()


def cases(models: list[str], batches: list[int]) -> Iterator[Case]:
    """Each model at each size."""
    for name in models:
        model = model_of(name)
        for batch in batches:
            x = torch.randn(batch, 3, PIXELS, PIXELS, device="cuda").to(**LAST)
            yield Case(name, model, x, FEW, {})


def main() -> None:
    """See the top of the file."""
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--models", nargs="+", default=["resnet50"])
    options = parser.parse_args()
    about = known("vision.py", "torchvision")
    race(parser, options, cases(options.models, options.batch), about)


if __name__ == "__main__":
    main()
