"""Program that compiles ResNet-50 on a CPU and prints times and builds as JSON.

    python benchmarks/common/warm_start_program.py BACKEND [import]

A program with `torch.compile(model, backend="ipex")` and nothing else of ours, as the README's
first example. `import`: it also imports `ipex_inductor` right after torch, as the second example
and programs for IPEX do; that import is then part of the time, and Dynamo's import, which follows,
runs without the garbage collector.

Run by `benchmarks/startup/warm.py` and by `tests/end_to_end/test_warm_start.py`. Times are seconds
from the end of `import torch` to the first output, including the construction of the model. CPU
time is that of the main thread, which spins while it waits for torch's other threads.
"""

# ruff: noqa: E402  the clocks begin before anything else is imported
import sys
import time

before = time.perf_counter()
import torch

began = time.perf_counter(), time.thread_time()
if sys.argv[2:] == ["import"]:
    import ipex_inductor  # noqa: F401

import json
import subprocess

launched: list[list[str]] = []
launch = subprocess.Popen.__init__


def noted(self, args, *others, **named):
    """Every process that is launched; an audit hook would be called 150,000 times meanwhile."""
    launched.append([args] if isinstance(args, str) else [*map(str, args)])
    launch(self, args, *others, **named)


subprocess.Popen.__init__ = noted

from torch import nn


class Block(nn.Module):
    """A bottleneck: three convolutions, each with its batch norm, and the way around them."""

    def __init__(self, entering, width, stride):
        super().__init__()
        leaving = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(entering, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, leaving, 1, bias=False), nn.BatchNorm2d(leaving)
        self.down = nn.Sequential()
        if entering != leaving:
            down = nn.Conv2d(entering, leaving, 1, stride, bias=False)
            self.down = nn.Sequential(down, nn.BatchNorm2d(leaving))

    def forward(self, x):
        """(N, entering, H, W) to (N, leaving, H / stride, W / stride)."""
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        return (self.bn3(self.conv3(y)) + self.down(x)).relu()


class ResNet50(nn.Module):
    """The network of He et al. (2015), table 1, with the stride in the 3x3 convolutions."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks, entering = [], 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(depth):
                blocks.append(Block(entering, width, 1 if number else stride))
                entering = 4 * width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(2048, 1000)

    def forward(self, x):
        """(N, 3, 224, 224) images to (N, 1000) logits."""
        return self.head(self.blocks(self.pool(self.bn(self.conv(x)).relu())).mean((2, 3)))


torch.manual_seed(0)
model, x = ResNet50().eval(), torch.randn(1, 3, 224, 224)
options = {"strict": True} if sys.argv[1] == "ipex" else None
fn = torch.compile(model, backend=sys.argv[1], options=options)
with torch.no_grad():
    y = fn(x)
    wall, cpu = time.perf_counter() - began[0], time.thread_time() - began[1]
    torch.testing.assert_close(y, model(x), rtol=1e-3, atol=1e-4)  # 53 layers, folded in fp64

from torch._dynamo.utils import counters

decisions = sys.modules.get("ipex_inductor.reporting.decisions")
events = [e for r in decisions.reports() for e in r.events] if decisions else []
print(
    json.dumps(
        {
            "wall": wall,
            "cpu": cpu,
            "import torch": began[0] - before,
            "aot": [counters["aot_autograd"]["autograd_cache_" + k] for k in ("hit", "miss")],
            "fx": [counters["inductor"]["fxgraph_cache_" + k] for k in ("hit", "miss")],
            "launched": launched,
            "cache": [e.subject for e in events if e.kind == "cache"],
        }
    )
)
