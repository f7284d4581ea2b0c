"""ResNet-18, defined here, so that torchvision is not needed."""

import itertools

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions with batch norms, and the way around them."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(entering, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.down = nn.Sequential()
        if entering != width:
            down = nn.Conv2d(entering, width, 1, stride, bias=False)
            self.down = nn.Sequential(down, nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, entering, H, W) to (N, width, H / stride, W / stride)."""
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.down(x)).relu()


class ResNet18(nn.Module):
    """The network of He et al. (2015), table 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        pairs = itertools.pairwise(widths)
        blocks = [Block(before, width, 1 + (before != width)) for before, width in pairs]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, 224, 224) images to (N, 1000) logits."""
        y: torch.Tensor = self.blocks(self.pool(self.bn(self.conv(x)).relu()))
        result: torch.Tensor = self.head(y.mean((2, 3)))
        return result
