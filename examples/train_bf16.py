"""Train a convolutional network in bfloat16 with `ipex.optimize`, on synthetic images.

    python examples/train_bf16.py [--quick]

`optimize` keeps weights in bfloat16, with the bits that are missing beside them, and fuses the
step of the optimizer: state dicts stay float32. Prints the loss, which falls, and what was changed.
"""

import argparse

import torch
from torch import nn

import ipex_inductor as ipex


def make_model(width: int) -> nn.Module:
    """Return a small image classifier for 10 classes."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * width, 10),
    )


def main() -> None:
    """Train for a few steps and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few channels and few steps")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    model = make_model(8 if quick else 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = ipex.optimize(model.train(), optimizer=optimizer, dtype=torch.bfloat16)
    print("weights:", model[0].weight.dtype, "- state dict:", model.state_dict()["0.weight"].dtype)
    print(ipex.report(model))

    step_model = torch.compile(model, backend="ipex")
    images, labels = torch.randn(32, 3, 16, 16), torch.arange(32) % 10
    losses = []
    for step in range(12 if quick else 60):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(step_model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 4 == 0:
            print(f"step {step:2}: loss {losses[-1]:.3f}")
    print(f"loss fell from {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
