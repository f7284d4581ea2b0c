"""The model of the container: `make` is what `ipex-inductor prebuild model:make` compiles."""

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """A small image classifier."""

    def __init__(self) -> None:
        """Make the layers with random weights."""
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of 10 classes."""
        features = torch.relu(self.norm(self.conv(images)))
        return self.head(nn.functional.adaptive_avg_pool2d(features, 4).flatten(1))


def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model in eval mode and example inputs; their shapes are compiled."""
    torch.manual_seed(0)
    return Classifier().eval(), (torch.randn(8, 3, 32, 32),)
