"""Compare whole networks on one GPU that are in fp32 or not channels-last.

    python -m benchmarks whole_gpu [--models yolo deeplab wide_resnet50_2] [--peers NAME ...]
        [--seconds S] [--json FILE]

`yolo` (fp16, 16 images of 640 x 640) has convolutions with batch norms and SiLU, concatenations and
upsampling; DeepLabV3 with ResNet-50 (bf16, 4 of 513 x 513) and Wide-ResNet-50-2 (fp32, 64 of 224 x
224) are torchvision's. Milliseconds: of the device, as a replayed CUDA graph with the peers in
turns; of a call that is waited for; of the host until it returns. Errors are relative to the same
weights in fp64 on a few images. In fp32 convolutions use TF32, torch's default, for all peers. A
peer that is farther off than one and a half times Inductor is printed as wrong, without a speed.
"""

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from capture import time_in_turns as clocked
from torch import Tensor, nn

from ipex_inductor.capture.policy import NAME
from ipex_inductor.reporting import decisions

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.gpu_peers import append_row, capture_graph, describe_run, time_in_turns

PEERS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "ours": {"backend": "ipex", "options": {"strict": True}},
}
FEW = 2  # images that are computed in fp64
FARTHER = 1.5  # than Inductor


def conv_layer(inputs: int, outputs: int, window: int = 3, stride: int = 1) -> nn.Module:
    """Return a convolution, its norm and SiLU."""
    conv = nn.Conv2d(inputs, outputs, window, stride, window // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU(inplace=True))


class Block(nn.Module):
    """A half goes through `depth` residual pairs; all that was made is read side by side."""

    def __init__(self, inputs: int, outputs: int, depth: int) -> None:
        super().__init__()
        half = outputs // 2
        self.split = conv_layer(inputs, outputs, 1)
        pairs = (
            nn.Sequential(conv_layer(half, half), conv_layer(half, half)) for _ in range(depth)
        )
        self.pairs = nn.ModuleList(pairs)
        self.join = conv_layer((2 + depth) * half, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H, W)."""
        parts = [*self.split(x).chunk(2, 1)]
        for pair in self.pairs:
            parts.append(parts[-1] + pair(parts[-1]))
        joined: Tensor = self.join(torch.cat(parts, 1))
        return joined


class Yolo(nn.Module):
    """A detector of the form of YOLOv8 (medium): a backbone, a path up, three heads."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        one, two, four, eight, twelve = (width * n for n in (1, 2, 4, 8, 12))
        self.stem = nn.Sequential(
            conv_layer(3, one, 3, 2), conv_layer(one, two, 3, 2), Block(two, two, 2)
        )
        self.down = nn.ModuleList(
            nn.Sequential(conv_layer(i, o, 3, 2), Block(o, o, depth))
            for i, o, depth in ((two, four, 4), (four, eight, 4), (eight, twelve, 2))
        )
        self.up = nn.ModuleList((Block(twelve + eight, eight, 2), Block(eight + four, four, 2)))
        self.heads = nn.ModuleList(
            nn.Sequential(conv_layer(n, n), nn.Conv2d(n, 144, 1)) for n in (four, eight, twelve)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W), of multiples of 32, to (N, 144, places)."""
        fine = self.down[0](self.stem(x))
        middle = self.down[1](fine)
        coarse = self.down[2](middle)
        coarse = coarse + F.max_pool2d(coarse, 5, 1, 2)
        middle = self.up[0](torch.cat([F.interpolate(coarse, scale_factor=2.0), middle], 1))
        fine = self.up[1](torch.cat([F.interpolate(middle, scale_factor=2.0), fine], 1))
        levels = zip(self.heads, (fine, middle, coarse), strict=True)
        return torch.cat([head(level).flatten(2) for head, level in levels], 2)


class Segments(nn.Module):
    """The result of torchvision's DeepLabV3 as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import segmentation

        self.net = segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, 21, H, W)."""
        found: Tensor = self.net(x)["out"]
        return found


def cases(models: list[str]) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield each net in eval mode, with random statistics, and its input."""

    def images(count: int, size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(count, 3, size, size, device="cuda", dtype=dtype)

    def wide() -> nn.Module:
        from torchvision.models import wide_resnet50_2

        found: nn.Module = wide_resnet50_2(weights=None)
        return found

    makers: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, torch.dtype]]] = {
        "yolo": (Yolo, (16, 640, torch.float16)),
        "deeplab": (Segments, (4, 513, torch.bfloat16)),
        "wide_resnet50_2": (wide, (64, 224, torch.float32)),
    }
    for name in models:
        torch.manual_seed(0)
        make, (count, size, dtype) = makers[name]
        net = make().eval().cuda()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
        yield name, net.to(dtype), images(count, size, dtype)


@torch.no_grad()
def measure(
    options: argparse.Namespace, about: dict[str, str], name: str, net: nn.Module, x: Tensor
) -> bool:
    """Print a row for each peer, as the module's docstring describes."""
    exact = copy.deepcopy(net).double()(x[:FEW].double())
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[Tensor], Tensor]] = {}
    torch.compiler.reset()
    for peer in options.peers:
        decisions.clear()
        how = PEERS[peer]
        begin = time.monotonic()
        run = runs[peer] = net if how is None else torch.compile(copy.deepcopy(net), **how)
        result = run(x)[:FEW].double()
        torch.cuda.synchronize()
        row = rows[peer] = {"model": name, "dtype": str(x.dtype)[6:], "peer": peer}
        row["first result, s"] = round(time.monotonic() - begin, 1)
        row["error"] = float((result - exact).norm() / exact.norm())
        for _ in range(6):  # in which it is captured
            run(x)
        events = [event for report in decisions.reports() for event in report.events]
        row["capture"] = [event.reason for event in events if event.subject == NAME]
    allowed = FARTHER * rows.get("inductor", rows[options.peers[0]])["error"]
    right = [peer for peer in runs if rows[peer]["error"] <= allowed]
    graphs = {peer: capture_graph(runs[peer], x).replay for peer in right}
    for peer, found in time_in_turns(graphs, options.seconds).items():
        rows[peer]["device, ms"] = round(statistics.median(found), 4)
    for peer, times in clocked({p: runs[p] for p in right}, x, options.seconds).items():
        for clock, found in times.items():
            rows[peer][f"{clock}, ms"] = round(statistics.median(found), 4)
    for peer, row in rows.items():
        if peer not in right:
            row["failed"] = f"wrong: {allowed:.2g} is allowed"
        append_row(options, about, row)
    return len(right) == len(runs)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ("yolo", "deeplab", "wide_resnet50_2")
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--peers", nargs="+", default=[*PEERS], choices=PEERS)
    parser.add_argument("--seconds", type=float, default=2, help="of timing a case by a clock")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    os.environ["IPEX_HOME"] = tempfile.mkdtemp()  # nobody's records, and an empty kernel cache
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    about = describe_run("torchvision")
    right = [measure(options, about, *case) for case in cases(options.models)]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
