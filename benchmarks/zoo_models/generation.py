"""Generative models: diffusion, autoencoder, adversarial, autoregressive, flow."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_models.entry import Entry, at_least_single, classes, filled, image, normal, together, total

from support.tiny_models import normalised

LEVELS = 16  # of a pixel that PixelCNN predicts


class TimedBlock(nn.Module):
    """Two convolutions behind group norms, moved by the time's embedding, and a shortcut."""

    def __init__(self, channels: int, out: int, times: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, channels), nn.GroupNorm(8, out)])
        self.convs = nn.ModuleList(
            [nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)]
        )
        self.time, self.shortcut = nn.Linear(times, out), nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x [B, channels, H, W], time [B, times] -> [B, out, H, W]."""
        y = self.convs[0](F.silu(self.norms[0](x))) + self.time(F.silu(time))[..., None, None]
        return self.shortcut(x) + self.convs[1](F.silu(self.norms[1](y)))


class PixelAttention(nn.Module):
    """Attention of every pixel over all pixels."""

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, channels), heads
        self.enter, self.leave = (
            nn.Conv2d(channels, 3 * channels, 1),
            nn.Conv2d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, H, W] and the same back."""
        b, c, h, w = x.shape
        parts = self.enter(self.norm(x)).view(b, 3, self.heads, c // self.heads, h * w)
        query, key, value = parts.transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(query, key, value)
        return x + self.leave(y.transpose(-1, -2).reshape(b, c, h, w))


class Diffusion(nn.Module):
    """U-Net that predicts noise, given the time (arXiv 2006.11239, small)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        times = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.first = TimedBlock(width, width, times)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.second, self.attention = TimedBlock(width, 2 * width, times), PixelAttention(2 * width)
        self.middle = TimedBlock(2 * width, 2 * width, times)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.last = TimedBlock(2 * width, width, times)
        self.leave = nn.Sequential(
            nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x [B, 3, H, W], time [B] -> [B, 3, H, W]."""
        time = at_least_single(time)
        rates = torch.arange(self.width // 2, device=x.device, dtype=time.dtype)
        angles = time[:, None] * torch.exp(rates * (-math.log(1e4) / (self.width // 2)))
        when = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))
        fine = self.first(self.enter(x), when)
        coarse = self.attention(self.second(self.down(fine), when))
        coarse = self.middle(coarse, when)
        raised = self.up(F.interpolate(coarse, scale_factor=2.0, mode="nearest"))
        return self.leave(self.last(torch.cat([raised, fine], 1), when))


class Vae(nn.Module):
    """Convolutional variational autoencoder; its noise is an input."""

    def __init__(self, code: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            normalised(3, 16, 4, stride=2),
            nn.LeakyReLU(0.2),
            normalised(16, 32, 4, stride=2),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.LazyLinear(2 * code),
        )
        self.widen = nn.Linear(code, 32 * 8 * 8)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )
        self.encoder(torch.zeros(2, 3, 32, 32))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, 3, 32, 32], noise [B, code] -> image, mean and log variance."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + noise * torch.exp(0.5 * log_variance)
        return self.decoder(self.widen(code).unflatten(1, (32, 8, 8))), mean, log_variance


class Modulated(nn.Module):
    """A convolution whose weight each image scales, grouped by the batch (arXiv 1912.04958)."""

    def __init__(self, channels: int, out: int, style: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, channels, 3, 3))
        self.scale, self.bias = nn.Linear(style, channels), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """x [B, channels, H, W], style [B, style] -> [B, out, H, W]."""
        b, c, h, w = x.shape
        weight = self.weight * (1 + self.scale(style))[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        y = F.conv2d(x.reshape(1, b * c, h, w), weight.flatten(0, 1), padding=1, groups=b)
        return F.leaky_relu(y.view(b, -1, h, w) + self.bias[:, None, None], 0.2)


class StyleGan(nn.Module):
    """Generator: a mapping network, a learned constant, modulated convolutions, skips to RGB."""

    def __init__(self, style: int = 32, width: int = 32) -> None:
        super().__init__()
        layers = [nn.Linear(style, style), nn.LeakyReLU(0.2), nn.Linear(style, style)]
        self.mapping = nn.Sequential(*layers, nn.LeakyReLU(0.2))
        self.start = nn.Parameter(torch.randn(width, 8, 8))
        self.convs = nn.ModuleList(Modulated(width, width, style) for _ in range(3))
        self.colors = nn.ModuleList(nn.Conv2d(width, 3, 1) for _ in range(3))

    def forward(self, code: Tensor) -> Tensor:
        """code [B, style] -> [B, 3, 32, 32]."""
        style = self.mapping(code * torch.rsqrt(code.square().mean(1, keepdim=True) + 1e-8))
        x = self.start.expand(code.shape[0], -1, -1, -1)
        picture = torch.zeros((), device=code.device, dtype=code.dtype)
        for level, (conv, color) in enumerate(zip(self.convs, self.colors, strict=True)):
            if level:
                x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
                picture = F.interpolate(picture, scale_factor=2.0, mode="nearest")
            x = conv(x, style)
            picture = picture + color(x)
        return picture.tanh()


class Masked(nn.Conv2d):
    """A convolution that sees only the pixels before its own."""

    mask: Tensor

    def __init__(self, channels: int, out: int, kernel: int, itself: bool) -> None:
        super().__init__(channels, out, kernel, padding=kernel // 2)
        seen = torch.zeros(kernel, kernel)
        seen[: kernel // 2] = 1
        seen[kernel // 2, : kernel // 2 + itself] = 1
        self.register_buffer("mask", seen)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, H, W] -> [B, out, H, W]."""
        return self._conv_forward(x, self.weight * self.mask, self.bias)


class PixelCnn(nn.Module):
    """Gated masked convolutions with residuals; logits of each pixel's level."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.enter = Masked(1, width, 7, itself=False)
        self.layers = nn.ModuleList(Masked(width, 2 * width, 3, itself=True) for _ in range(layers))
        self.mixes = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv2d(width, LEVELS, 1))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 1, H, W] -> logits [B, H, W, LEVELS]."""
        x = self.enter(x)
        for layer, mix in zip(self.layers, self.mixes, strict=True):
            value, gate = layer(x).chunk(2, 1)
            x = x + mix(value.tanh() * gate.sigmoid())
        return self.head(x).movedim(1, -1)


class RealNvp(nn.Module):
    """Affine couplings, each on the half that the one before left (arXiv 1605.08803)."""

    def __init__(self, size: int = 32, width: int = 64, couplings: int = 4) -> None:
        super().__init__()
        self.half = size // 2
        self.nets = nn.ModuleList(
            nn.Sequential(
                nn.Linear(self.half, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, 2 * self.half),
            )
            for _ in range(couplings)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, size] -> the code [B, size], and the negative log likelihood [B]."""
        volume = torch.zeros((), device=x.device, dtype=x.dtype)
        for net in self.nets:
            left, right = x[:, : self.half], x[:, self.half :]
            scale, shift = net(left).chunk(2, 1)
            scale = scale.tanh()
            x = torch.cat([right * scale.exp() + shift, left], 1)
            volume = volume + scale.sum(1)
        return x, 0.5 * x.square().sum(1) - volume


def likelihood(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean of the flow's second result."""
    return total(outputs[1])


MODELS = {
    "diffusion": Entry(
        filled(Diffusion),
        lambda batch: (torch.randn(batch, 3, 32, 32), torch.rand(batch) * 1000),
        2,
    ),
    "vae": Entry(filled(Vae), together(normal(3, 32, 32), normal(16)), 8),
    "stylegan": Entry(filled(StyleGan), together(normal(32)), 4),
    "pixelcnn": Entry(filled(PixelCnn), image(1, 28), 4, classes),
    "realnvp": Entry(RealNvp, together(normal(32)), 64, likelihood),
}
