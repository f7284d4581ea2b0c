"""ResNet-50 on the CPU, two processes: the second compiles nothing and is soon there."""

import json
import os
import subprocess
import sys

import pytest

RUN = """
import json, sys, time
began = time.perf_counter()
import torch
imported = time.perf_counter()
launched = []
sys.addaudithook(
    lambda event, args: launched.append([str(a) for a in args[1]])
    if event == "subprocess.Popen" else None
)
from torch import nn

class Block(nn.Module):
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
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        return (self.bn3(self.conv3(y)) + self.down(x)).relu()

class ResNet50(nn.Module):
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
        return self.head(self.blocks(self.pool(self.bn(self.conv(x)).relu())).mean((2, 3)))

torch.manual_seed(0)
model, x = ResNet50().eval(), torch.randn(1, 3, 224, 224)
fn = torch.compile(model, backend="ipex", options={"strict": True})
with torch.no_grad():
    y = fn(x)
    first = time.perf_counter()
    torch.testing.assert_close(y, model(x), rtol=1e-3, atol=1e-4)
from torch._dynamo.utils import counters
from ipex_inductor import decisions
print(json.dumps({
    "import_s": imported - began,
    "first_output_s": first - imported,
    "cpu_s": time.process_time(),
    "aot": [counters["aot_autograd"]["autograd_cache_" + k] for k in ("hit", "miss")],
    "fx": [counters["inductor"]["fxgraph_cache_" + k] for k in ("hit", "miss")],
    "launched": launched,
    "cache": [e.subject for r in decisions.reports() for e in r.events if e.kind == "cache"],
}))
"""


def run(folder, **env):
    caches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    inherited = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env={**inherited, **caches, "IPEX_HOME": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def builds(done):
    """What was launched, but for asking a compiler for its version."""
    return [c for c in done["launched"] if c[-1] not in ("--version", "-v")]


@pytest.mark.slow
def test_the_second_process_of_resnet_50_compiles_nothing(tmp_path):
    cold = run(tmp_path)
    assert (cold["cache"], cold["aot"], cold["fx"]) == (["miss"], [0, 1], [0, 1])
    assert len(builds(cold)) > 2
    warm = [run(tmp_path) for _ in range(3)]
    for done in warm:
        # The entry of AOT autograd holds the graph too, so that Inductor's cache is not asked.
        assert (done["cache"], done["aot"], done["fx"]) == (["hit"], [1, 0], [0, 0])
        assert builds(done) == []
    inductors = run(tmp_path, TORCHINDUCTOR_AUTOGRAD_CACHE="0")
    best = min(warm, key=lambda done: done["first_output_s"])
    figures = {k: round(best[k], 2) for k in ("first_output_s", "import_s", "cpu_s")}
    print(f"first output: {cold['first_output_s']:.1f} s cold, best warm {figures}")
    # The aim is 4 s on two cores with nothing else to do; a test cannot ask for them.
    assert best["first_output_s"] <= 12
    # Inductor's own cache hits as well, where AOT autograd's is off.
    assert (inductors["cache"], inductors["fx"], builds(inductors)) == (["hit"], [1, 0], [])
