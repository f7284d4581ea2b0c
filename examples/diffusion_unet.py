"""Denoise with a small U-Net as in diffusers: group norm, SiLU, cross attention, skips.

    python examples/diffusion_unet.py [--quick]

Written in plain torch with random weights. Prints the largest relative difference between eager
and compiled mode after a few denoising steps, the rules that were applied, and times.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ipex_inductor


class Block(nn.Module):
    """Two convolutions behind group norm and SiLU, and attention to the text."""

    def __init__(self, inputs: int, outputs: int, text: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip, self.time = nn.Conv2d(inputs, outputs, 1), nn.Linear(text, outputs)
        self.norm3 = nn.LayerNorm(outputs)
        self.query, self.out = nn.Linear(outputs, outputs), nn.Linear(outputs, outputs)
        self.key_value = nn.Linear(text, 2 * outputs)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """Return what the layers make of `x`."""
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h))) + self.skip(x)
        tokens = h.flatten(2).transpose(1, 2)
        heads = [self.query(self.norm3(tokens)), *self.key_value(text).chunk(2, -1)]
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in heads)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (tokens + self.out(attended)).transpose(1, 2).reshape(h.shape)


class UNet(nn.Module):
    """A level down, a middle, and a level up with a skip connection."""

    def __init__(self, width: int, text: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 1)
        self.down, self.middle = Block(width, width, text), Block(width, 2 * width, text)
        self.up = Block(3 * width, width, text)
        self.time = nn.Sequential(nn.Linear(1, text), nn.SiLU(), nn.Linear(text, text))

    def forward(self, x: Tensor, step: Tensor, text: Tensor) -> Tensor:
        """Return what the layers make of `x`."""
        time = self.time(step)
        skip = self.down(self.enter(x), time, text)
        h = self.middle(F.avg_pool2d(skip, 2), time, text)
        h = torch.cat([F.interpolate(h, scale_factor=2.0), skip], 1)
        return self.leave(self.up(h, time, text))


def denoise(unet: nn.Module, x: Tensor, text: Tensor, steps: int) -> Tensor:
    """Take a part of the predicted noise away in each step."""
    for step in range(steps):
        x = x - unet(x, torch.tensor([[1 - step / steps]]), text) / steps
    return x


def main() -> None:
    """Denoise in eager mode and compiled, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few channels and pixels")
    width, size, steps = (16, 8, 2) if parser.parse_args().quick else (128, 32, 10)
    torch.manual_seed(0)
    unet, x, text = UNet(width, 64).eval(), torch.randn(1, 4, size, size), torch.randn(1, 12, 64)
    compiled = torch.compile(unet, backend="ipex")
    with torch.no_grad():
        compiled(x, torch.ones(1, 1), text)
        results, clock = [], [time.perf_counter()]
        for model in (unet, compiled):
            results.append(denoise(model, x, text, steps))
            clock.append(time.perf_counter())
        error = ((results[1] - results[0]).abs().max() / results[0].abs().max()).item()
        print(f"largest relative difference: {error:.1e}")
        print("rules applied:", ipex_inductor.explain(unet, x, torch.ones(1, 1), text).fired())
    print(f"eager {clock[1] - clock[0]:.2f} s, compiled {clock[2] - clock[1]:.2f} s")


if __name__ == "__main__":
    main()
