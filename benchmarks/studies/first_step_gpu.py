"""Measure a network's first training step on one GPU with empty caches.

    python -m benchmarks first_step_gpu [--models maxvit unet] [--peers inductor ours] [--json FILE]

Forward and backward of MaxViT-T (torchvision's, 32 images of 224 x 224) and of a diffusion U-Net
with cross-attention to a text, in bf16. Each peer runs in a process of its own with empty caches.
All run at once with equal shares of the cores for compile workers, so that other load hits all of
them. Prints wall seconds and processor seconds of the process and its workers.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.gpu_peers import append_row, describe_run

PEERS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "ours": {"backend": "ipex", "options": {"strict": True}},
}


class Residual(nn.Module):
    """Two convolutions behind group norms; the time is added between them."""

    def __init__(self, inputs: int, outputs: int, embedded: int) -> None:
        super().__init__()
        self.before, self.after = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedded, outputs)
        self.beside = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H, W)."""
        y = self.first(F.silu(self.before(x))) + self.time(F.silu(time))[..., None, None]
        result: Tensor = self.beside(x) + self.second(F.silu(self.after(y)))
        return result


class Attends(nn.Module):
    """A transformer's layer over all places: to themselves, to a text, and a gated pair."""

    def __init__(self, width: int, text: int) -> None:
        super().__init__()
        self.width, self.enter = width, nn.GroupNorm(32, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.queries = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.pairs = nn.ModuleList(nn.Linear(n, 2 * width) for n in (width, text))
        self.leave = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.wide, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def attended(self, x: Tensor, to: Tensor, number: int) -> Tensor:
        """Eight heads."""
        key, value = self.pairs[number](to).chunk(2, -1)
        whole = self.queries[number](x), key, value
        q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in whole)
        y = F.scaled_dot_product_attention(q, k, v)
        result: Tensor = self.leave[number](y.transpose(1, 2).flatten(2))
        return result

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        """(N, width, H, W), as given."""
        x = self.enter(image).flatten(2).mT
        y = self.norms[0](x)
        x = x + self.attended(y, y, 0)
        x = x + self.attended(self.norms[1](x), text, 1)
        value, gate = self.wide(self.norms[2](x)).chunk(2, -1)
        x = x + self.narrow(value * F.gelu(gate))
        return image + x.mT.reshape(image.shape)


class Denoiser(nn.Module):
    """Three levels down and up, attention in each, as in Stable Diffusion 1.5."""

    def __init__(self, widths: tuple[int, ...] = (320, 640, 1280), text: int = 768) -> None:
        super().__init__()
        embedded = 4 * widths[0]
        self.time = nn.Sequential(
            nn.Linear(320, embedded), nn.SiLU(), nn.Linear(embedded, embedded)
        )
        self.enter = nn.Conv2d(4, widths[0], 3, padding=1)
        pairs = [*zip((widths[0], *widths), widths, strict=False)]
        self.down = nn.ModuleList(Residual(*pair, embedded) for pair in pairs)
        self.halved = nn.ModuleList(nn.Conv2d(n, n, 3, 2, 1) for n in widths)
        self.middle = Residual(widths[-1], widths[-1], embedded)
        back = [*reversed(widths)]
        self.doubled = nn.ModuleList(nn.Conv2d(n, n, 3, padding=1) for n in (back[0], *back[:-1]))
        above = zip((back[0], *back[:-1]), back, strict=True)
        self.up = nn.ModuleList(Residual(i + o, o, embedded) for i, o in above)
        self.attends = nn.ModuleList(Attends(n, text) for n in (*widths, *back))
        self.leave = nn.Sequential(
            nn.GroupNorm(32, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 4, 3, padding=1)
        )

    def forward(self, x: Tensor, embedded: Tensor, text: Tensor) -> Tensor:
        """(N, 4, H, W), of multiples of 8, to the noise in it."""
        time, x, kept, levels = self.time(embedded), self.enter(x), [], len(self.down)
        for block, attends, halved in zip(self.down, self.attends, self.halved, strict=False):
            x = attends(block(x, time), text)
            kept.append(x)
            x = halved(x)
        x = self.middle(x, time)
        for level, (doubled, block) in enumerate(zip(self.doubled, self.up, strict=True)):
            x = doubled(F.interpolate(x, scale_factor=2.0))
            x = block(torch.cat([x, kept.pop()], 1), time)
            x = self.attends[levels + level](x, text)
        result: Tensor = self.leave(x)
        return result


def make_case(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the net and its inputs in bf16."""
    torch.manual_seed(0)
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    if name == "unet":
        shapes = (4, 4, 64, 64), (4, 320), (4, 77, 768)
        return Denoiser().to(**half), tuple(torch.randn(*shape, **half) for shape in shapes)
    from torchvision.models import maxvit_t

    return maxvit_t(weights=None).to(**half), (torch.randn(32, 3, 224, 224, **half),)


def first_step(name: str, peer: str) -> dict[str, float]:
    """Measure the first step in this process."""
    net, inputs = make_case(name)
    run = torch.compile(net, **PEERS[peer])
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = run(*inputs)
    torch.cuda.synchronize()
    forward = time.perf_counter() - begin
    result.float().square().mean().backward()
    torch.cuda.synchronize()
    both = time.perf_counter() - begin
    own = resource.getrusage(resource.RUSAGE_SELF)
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    if not all(bool(g.isfinite().all()) for g in gradients) or not gradients:
        raise SystemExit(f"{peer} gives {name} no gradients")
    return {
        "forward, s": round(forward, 1),
        "step, s": round(both, 1),
        "processor, s": round(own.ru_utime + own.ru_stime, 1),
    }


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--models", nargs="+", default=("maxvit", "unet"), choices=("maxvit", "unet")
    )
    parser.add_argument("--peers", nargs="+", default=[*PEERS], choices=PEERS)
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    parser.add_argument("--here", action="store_true", help="in this process: one model, one peer")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(first_step(options.models[0], options.peers[0])))
        return
    about = describe_run("torchvision")
    each = [(model, peer) for model in options.models for peer in options.peers]
    workers = str(max(1, (os.cpu_count() or 1) // len(each)))
    begun = []
    for model, peer in each:
        empty = {"IPEX_HOME": tempfile.mkdtemp(), "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp()}
        env = os.environ | empty | {"TORCHINDUCTOR_COMPILE_THREADS": workers}
        env["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
        command = [sys.executable, __file__, "--here", "--models", model, "--peers", peer]
        begun.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    for (model, peer), process in zip(each, begun, strict=True):
        lines = process.communicate()[0].splitlines()
        found = json.loads(lines[-1]) if not process.returncode and lines else {"failed": True}
        append_row(options, about, {"model": model, "peer": peer, "at once": len(each), **found})
    sys.exit(max(process.returncode for process in begun))


if __name__ == "__main__":
    main()
