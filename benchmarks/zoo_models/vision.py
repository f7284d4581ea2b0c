"""Convolutional networks and transformers over images."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_models.entry import Entry, classes, filled, image, known, normal, of_transformers

from support.tiny_models import LABELS, Tiny, normalised

SIDE = 64
PICTURE = {"pixel_values": normal(3, SIDE, SIDE)}


def activated(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return convolution, batch norm and SiLU."""
    return nn.Sequential(normalised(channels, out, kernel, stride=stride), nn.SiLU())


class DenseLayer(nn.Module):
    """Two convolutions behind their norms; the result is appended to the input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(4 * growth)])
        self.narrow = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.wide = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, H, W] -> [B, channels + growth, H, W]."""
        y = self.narrow(F.relu(self.norms[0](x)))
        return torch.cat([x, self.wide(F.relu(self.norms[1](y)))], 1)


class DenseNet(nn.Module):
    """DenseNet with three blocks of four layers (arXiv 1608.06993, small)."""

    def __init__(self, growth: int = 12) -> None:
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [normalised(3, channels, 7, stride=2), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2, 1))
        for block in range(3):
            for _ in range(4):
                layers.append(DenseLayer(channels, growth))
                channels += growth
            layers += [nn.BatchNorm2d(channels), nn.ReLU()]
            if block < 2:
                layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 3, H, W] -> logits [B, LABELS]."""
        return self.head(self.features(x).mean((2, 3)))


class UNet(nn.Module):
    """Segmentation U-Net of three levels; transposed convolutions restore the skipped sizes."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        inputs = (3, *widths[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(
                normalised(a, b, 3), nn.ReLU(inplace=True), normalised(b, b, 3), nn.ReLU(True)
            )
            for a, b in zip(inputs, widths, strict=True)
        )
        pairs = [*zip(widths[:0:-1], widths[-2::-1], strict=True)]
        self.ups = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.joins = nn.ModuleList(
            nn.Sequential(normalised(2 * b, b, 3), nn.ReLU(inplace=True)) for _, b in pairs
        )
        self.head = nn.Conv2d(widths[0], LABELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 3, H, W] -> logits [B, LABELS, H, W]."""
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for up, join, skip in zip(self.ups, self.joins, skips[-2::-1], strict=True):
            x = join(torch.cat([up(x, output_size=skip.shape[2:]), skip], 1))
        return self.head(x)


class Partial(nn.Module):
    """A cross-stage partial block: one half goes through a residual pair of convolutions."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.enter, self.leave = activated(channels, out, 1), activated(out + out // 2, out, 1)
        self.pair = nn.Sequential(
            activated(out // 2, out // 2, 3), activated(out // 2, out // 2, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, H, W] -> [B, out, H, W]."""
        left, right = self.enter(x).chunk(2, 1)
        return self.leave(torch.cat([left, right, right + self.pair(right)], 1))


class Yolo(nn.Module):
    """A detector: partial blocks, spatial pooling, a path back up, heads at two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(activated(3, 16, 3, 2), activated(16, 32, 3, 2), Partial(32, 32))
        self.middle = nn.Sequential(activated(32, 64, 3, 2), Partial(64, 64))
        self.deep = nn.Sequential(activated(64, 96, 3, 2), Partial(96, 96))
        self.pooled = activated(4 * 96, 96, 1)
        self.up, self.down = Partial(160, 64), activated(64, 64, 3, 2)
        self.out = Partial(160, 96)
        self.heads = nn.ModuleList(nn.Conv2d(c, 5 + LABELS, 1) for c in (64, 96))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 3, H, W] -> boxes [B, places, 5 + LABELS]."""
        middle = self.middle(self.stem(x))
        pools = [self.deep(middle)]
        for _ in range(3):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        deep = self.pooled(torch.cat(pools, 1))
        raised = F.interpolate(deep, scale_factor=2.0, mode="nearest")
        fine = self.up(torch.cat([raised, middle], 1))
        coarse = self.out(torch.cat([self.down(fine), deep], 1))
        maps = [head(y) for head, y in zip(self.heads, (fine, coarse), strict=True)]
        boxes = torch.cat([y.flatten(2).transpose(1, 2) for y in maps], 1)
        return torch.cat([boxes[..., :2].sigmoid(), boxes[..., 2:4].exp(), boxes[..., 4:]], -1)


def pixels(logits: Tensor) -> Tensor:
    """Return the cross entropy of each pixel's logits [B, LABELS, H, W]."""
    return classes(logits.movedim(1, -1))


REGNET = Tiny(
    "RegNetConfig",
    "RegNetForImageClassification",
    dict,
    {
        "embedding_size": 16,
        "hidden_sizes": [32, 64],
        "depths": [1, 2],
        "groups_width": 16,
        "layer_type": "y",
        "num_labels": LABELS,
    },
)
MODELS = {
    "resnet": known(
        "resnet",
        PICTURE,
        4,
        last=True,
        embedding_size=16,
        hidden_sizes=[32, 64, 96],
        depths=[1, 2, 1],
        layer_type="basic",
    ),
    "mobilenet": known("mobilenet_v2", PICTURE, 4, image_size=SIDE, depth_multiplier=0.35),
    "efficientnet": known("efficientnet", PICTURE, 4, last=True, image_size=SIDE),
    "regnet": of_transformers(REGNET, PICTURE, 4),
    "densenet": Entry(filled(DenseNet), image(3, SIDE), 4, classes),
    "convnext": known("convnext", PICTURE, 4, hidden_sizes=[32, 64]),
    "unet": Entry(filled(UNet), image(3, SIDE), 2, pixels),
    "yolo": Entry(filled(Yolo, last=True), image(3, 96, last=True), 2),
    "vit": known("vit", PICTURE, 4, image_size=SIDE, hidden_size=96, intermediate_size=384),
    "swin": known("swin", PICTURE, 2, image_size=SIDE, embed_dim=32),
}
