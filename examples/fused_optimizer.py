"""Train in float16 with `FusedStep` and `GradScaler`: unscaling, clipping and AdamW in one pass.

    python examples/fused_optimizer.py [--quick]

The same training is done with torch's own optimizer, clipping and scaler. Prints both losses, the
largest difference of the weights, and the time of a step.
"""

import argparse
import copy
import time

import torch
from torch import Tensor, nn

from ipex_inductor.optim import FusedStep, GradScaler


def train(model: nn.Module, fused: bool, x: Tensor, y: Tensor, steps: int) -> tuple[float, float]:
    """Train the model in place; return the last loss and the milliseconds of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler: torch.amp.GradScaler
    if fused:
        step = FusedStep(
            optimizer, clip_norm=1.0
        )  # optimizer.step() clips and is fused from now on
        scaler = GradScaler("cpu", init_scale=1024.0)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seconds = 0.0
    for number in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        start = time.perf_counter()
        if not fused:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if number:  # the first step compiles the kernel
            seconds += time.perf_counter() - start
    norm = step.grad_norm if fused else norm
    print(f"{'fused' if fused else 'torch'}: loss {loss.item():.4f}, gradient norm {norm:.4f}")
    return loss.item(), 1000 * seconds / (steps - 1)


def main() -> None:
    """Train two equal models, one by each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="thin layers and few steps")
    width, steps = (32, 6) if parser.parse_args().quick else (1024, 30)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))
    fused = copy.deepcopy(plain)
    x, y = torch.randn(64, 64), torch.arange(64) % 10
    _, before = train(plain, False, x, y, steps)
    _, after = train(fused, True, x, y, steps)
    pairs = zip(plain.parameters(), fused.parameters(), strict=True)
    error = max((a - b).abs().max().item() for a, b in pairs)
    print(f"largest difference of the weights: {error:.1e}")
    print(f"step: torch {before:.3f} ms, fused {after:.3f} ms")


if __name__ == "__main__":
    main()
