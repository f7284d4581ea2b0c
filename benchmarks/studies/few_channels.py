"""Compare cuDNN convolutions of few channels: unpadded, padded to four, to eight.

    python -m benchmarks few_channels [--batch N] [--json FILE]

Convolutions in bf16, channels-last, without bias. cuDNN runs on the given channels and on
zero-padded ones; the activation is padded within the timed call (a copy) or before it, the weight
always before. Beside them stands the choice of backend `ipex`. Each is checked against float64;
medians of replays of a captured graph, in microseconds of the device.
"""

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench_cudagraph

LAST = torch.channels_last
# Channels, pixels, results, window, stride: stems of nets, and of nets for other than colours.
CASES = (
    (3, 224, 64, 7, 2),
    (3, 224, 32, 3, 2),
    (3, 224, 128, 4, 4),
    (3, 224, 768, 16, 16),
    (1, 224, 64, 7, 2),
    (1, 224, 64, 3, 1),
    (2, 224, 64, 3, 1),
    (5, 112, 64, 3, 1),
    (6, 112, 64, 3, 1),
    (12, 112, 64, 3, 1),
)
TOLERANCE = 2e-2  # of the largest number: bf16's rounding, and that of a few hundred terms


def pad_channels(x: Tensor, channels: int) -> Tensor:
    """Pad with zeros up to so many channels."""
    return F.pad(x, (0, 0, 0, 0, 0, channels - x.shape[1])).contiguous(memory_format=LAST)


def variants(x: Tensor, weight: Tensor, window: dict[str, int]) -> dict[str, Callable[[], Tensor]]:
    """Return convolutions of equal results, by name."""

    def conv(x: Tensor) -> Tensor:
        return F.conv2d(x, weight, **window)

    compiled = torch.compile(conv, backend="ipex", options={"strict": True})
    found: dict[str, Callable[[], Tensor]] = {"as it is": lambda: conv(x)}
    for channels in (4, 8, 16):
        if x.shape[1] < channels <= max(8, 2 * x.shape[1]):
            wide, ready = pad_channels(weight, channels), pad_channels(x, channels)

            def copying(channels: int = channels, wide: Tensor = wide) -> Tensor:
                return F.conv2d(pad_channels(x, channels), wide, **window)

            def there(ready: Tensor = ready, wide: Tensor = wide) -> Tensor:
                return F.conv2d(ready, wide, **window)

            found |= {f"filled to {channels}": copying, f"{channels} there": there}
    return found | {"ours": lambda: compiled(x)}


@torch.no_grad()
def main() -> None:
    """One row a case; raises if any way is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    about = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "command": f"python -m benchmarks few_channels --batch {options.batch}",
    }
    for channels, pixels, results, size, stride in CASES:
        torch._dynamo.reset()
        x = torch.randn(options.batch, channels, pixels, pixels, device="cuda")
        weight = torch.randn(results, channels, size, size, device="cuda") / (channels**0.5 * size)
        x, weight = (t.bfloat16().to(memory_format=LAST) for t in (x, weight))
        window = {"stride": stride, "padding": 0 if stride == size else size // 2}
        exact = F.conv2d(x[:2].double(), weight.double(), **window)
        row: dict[str, float] = {}
        for name, run in variants(x, weight, window).items():
            error = (run()[:2] - exact).abs().max() / exact.abs().max()
            if not error <= TOLERANCE:
                raise ValueError(f"{name} of {channels} channels is wrong by {error:.3g}")
            row[name] = round(1e3 * do_bench_cudagraph(run, return_mode="median"), 2)
        case = f"{results}<-{channels}@{pixels} {size}x{size}/{stride}"
        print(json.dumps({"case": case, "us": row}), flush=True)
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps(about | {"case": case, "us": row}) + "\n")


if __name__ == "__main__":
    main()
