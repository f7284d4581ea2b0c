"""Compare whole networks on one GPU that nothing in the package was tuned for.

    python -m benchmarks zoo_gpu [--models NAME ...] [--draw SEED --count N]
        [--peers eager inductor max-autotune ours] [--kernels N] [--workers N] [--seconds S]
        [--folder FOLDER] [--json FILE]

Each peer compiles the network in its default mode (`max-autotune`: Inductor's, without CUDA
graphs), calls it, and is held against the same weights in fp64 on a few inputs: a peer whose error
is over 1.5 times the largest of the others gets no speed. Then the peers are replayed in turns as
CUDA graphs: `device` is the median milliseconds of the device, `call` of a call that is waited for.
`first` is the seconds of the first call, with empty caches.

`--kernels N` also lists the N kernels of each peer that take most time, their calls, and as many
choices of kernels by `ours`.
`--workers` compiles all networks beforehand in so many processes, for less time on the machine;
then `first` is left out. `--draw` takes N networks at random from torchvision and timm instead of
the table.
"""

import argparse
import copy
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from zoo_models.large import LARGE, LAST, Large, images, of_timm, of_torchvision

from common.gpu_peers import append_row, capture_graph, describe_run, time_in_turns
from ipex_inductor.capture.policy import NAME as CAPTURE
from ipex_inductor.reporting import decisions

PEERS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
    "ours": {"backend": "ipex", "options": {"strict": True}},
}
FEW = 2  # inputs that are computed in fp64
FARTHER = 1.5  # than the other peers
DRAWN_SIZES = {"torchvision": 64, "timm": 64}  # images of a drawn network
Run = Callable[..., Any]


def draw(seed: int, count: int) -> dict[str, Large]:
    """Return networks drawn from all that torchvision and timm offer for classification.

    Args:
        seed: Of the drawing.
        count: Of networks.
    """
    import timm
    import torchvision

    pool = [("torchvision", n) for n in torchvision.models.list_models(torchvision.models)]
    pool += [("timm", n) for n in timm.list_models()]
    drawn = {}
    for library, name in random.Random(seed).sample(sorted(pool), count):
        size = 224
        if library == "timm":
            size = timm.get_pretrained_cfg(name).input_size[-1]
        make = of_timm(name) if library == "timm" else of_torchvision(name)
        drawn[f"{library}:{name}"] = Large(make, images(size), DRAWN_SIZES[library], last=True)
    return drawn


def prepare(model: Large) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the network on the GPU in eval mode, with drawn statistics, and its inputs."""
    torch.manual_seed(0)
    net = model.make().eval().cuda()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    net = net.to(model.dtype)
    inputs = tuple(
        x.cuda().to(model.dtype) if x.is_floating_point() else x.cuda()
        for x in model.inputs(model.batch)
    )
    if model.last:
        net = net.to(**LAST)
        inputs = tuple(x.to(**LAST) if x.dim() == 4 else x for x in inputs)
    return net, inputs


def compile_peer(peer: str, net: nn.Module) -> Run:
    """Return the peer's form of the network."""
    how = PEERS[peer]
    return net if how is None else torch.compile(copy.deepcopy(net), **how)


def few_results(run: Run, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the first rows of all results in fp64."""
    return [y[:FEW].double() for y in tree_leaves(run(*inputs))]


def relative_error(results: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest relative error of a result, in the Frobenius norm."""
    pairs = zip(results, exact, strict=True)
    errors = [float((y - e).norm() / e.norm()) for y, e in pairs]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def time_calls(
    runs: dict[str, Run], inputs: tuple[Tensor, ...], seconds: float
) -> dict[str, float]:
    """Return the median milliseconds of a call of each peer that is waited for."""

    def clock(run: Callable[[], Any], count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            run()
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3 / count

    calls = {peer: (lambda run=run: run(*inputs)) for peer, run in runs.items()}
    times = time_in_turns(calls, seconds, timed=clock) if calls else {}
    return {peer: statistics.median(each) for peer, each in times.items()}


def list_kernels(run: Run, inputs: tuple[Tensor, ...], count: int) -> list[str]:
    """Return a line for each of the kernels that take most time in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            run(*inputs)
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.device_time
            calls[event.name] += 1
    total = sum(spent.values())
    lines = [f"{total / 3000:8.3f} ms {sum(calls.values()) // 3:4} calls: all kernels"]
    for name, time_us in spent.most_common(count):
        lines.append(f"{time_us / 3000:8.3f} ms {calls[name] / 3:4.0f} calls  {name[:150]}")
    return lines


@torch.no_grad()
def measure(options: argparse.Namespace, about: dict[str, str], name: str, model: Large) -> bool:
    """Print a row for each peer; return whether all are right."""
    net, inputs = prepare(model)
    exact_net = copy.deepcopy(net).double()
    few = (x[:FEW].double() if x.is_floating_point() else x[:FEW] for x in inputs)
    exact = few_results(exact_net, tuple(few))
    del exact_net
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    torch.compiler.reset()
    for peer in options.peers:
        decisions.clear()
        row = rows[peer] = {"model": name, "dtype": str(model.dtype)[6:], "batch": model.batch}
        row["peer"] = peer
        begin = time.monotonic()
        try:
            run = compile_peer(peer, net)
            row["error"] = relative_error(few_results(run, inputs), exact)
            torch.cuda.synchronize()
            if not options.workers:
                row["first, s"] = round(time.monotonic() - begin, 1)
            for _ in range(6):  # in which it is captured
                run(*inputs)
            runs[peer] = run
        except Exception as error:  # one peer's fault is not the others'
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[:500]}"
        if peer == "ours":
            events = [event for report in decisions.reports() for event in report.events]
            row["capture"] = [e.reason for e in events if e.subject == CAPTURE][-1:]
            row["fired"] = dict(Counter(e.subject for e in events if e.kind == "fired"))
            choices = Counter(f"{e.subject}: {e.reason}" for e in events if e.kind == "choice")
            for choice, number in choices.most_common(options.kernels):
                print(f"{number:4} times {choice[:200]}", flush=True)
    others = [rows[peer]["error"] for peer in runs if peer != "ours"]
    allowed = FARTHER * max(others, default=math.inf)
    for peer in [p for p in runs if not rows[p]["error"] <= allowed]:  # NaN is wrong
        rows[peer]["failed"] = f"wrong by {rows[peer]['error']:.2g} where {allowed:.2g} is allowed"
        del runs[peer]
    graphs = {
        p: capture_graph(lambda _, run=run: run(*inputs), inputs[0]).replay
        for p, run in runs.items()
    }
    for peer, times in (time_in_turns(graphs, options.seconds) if graphs else {}).items():
        rows[peer]["device, ms"] = round(statistics.median(times), 4)
    del graphs
    for peer, median in time_calls(runs, inputs, options.seconds / 2).items():
        rows[peer]["call, ms"] = round(median, 4)
    for peer, row in rows.items():
        append_row(options, about, row)
        if options.kernels and peer in runs:
            print(*list_kernels(runs[peer], inputs, options.kernels), sep="\n", flush=True)
    return not any("failed" in row for row in rows.values())


def compile_beforehand(options: argparse.Namespace, models: dict[str, Large]) -> None:
    """Compile each network for each peer in processes of their own, for the caches alone."""

    def compile_one(job: tuple[str, str]) -> None:
        words = [*draw_words(options), "--models", job[0], "--peers", job[1], "--compile-only"]
        command = [sys.executable, __file__, *words]
        try:
            subprocess.run(command, capture_output=True, timeout=options.patience, check=True)
        except subprocess.SubprocessError as error:
            said = (getattr(error, "stderr", b"") or b"").decode()[-300:]
            print(f"{job[0]} for {job[1]} was not compiled beforehand: {error} {said}", flush=True)

    jobs = [(name, peer) for name in models for peer in options.peers if PEERS[peer] is not None]
    with ThreadPoolExecutor(options.workers) as pool:
        for _ in pool.map(compile_one, jobs):
            pass


def draw_words(options: argparse.Namespace) -> list[str]:
    """Return the options that name the same networks."""
    return (
        [] if options.draw is None else ["--draw", str(options.draw), "--count", str(options.count)]
    )


@torch.no_grad()
def compile_only(options: argparse.Namespace, models: dict[str, Large]) -> None:
    """Fill the caches."""
    for model in models.values():
        net, inputs = prepare(model)
        for peer in options.peers:
            compile_peer(peer, net)(*inputs)
            torch.cuda.synchronize()


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", help="of the table or, with --draw, of the drawn")
    parser.add_argument("--draw", type=int, help="seed: networks drawn from torchvision and timm")
    parser.add_argument("--count", type=int, default=10, help="of networks to draw")
    parser.add_argument("--peers", nargs="+", default=["eager", "inductor", "ours"], choices=PEERS)
    parser.add_argument("--kernels", type=int, default=0, help="list so many kernels of a peer")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--patience", type=int, default=400, help="seconds that one may compile")
    parser.add_argument("--seconds", type=float, default=2, help="of timing a network by a clock")
    parser.add_argument("--folder", help="of caches that already hold kernels; empty if not named")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    models = LARGE if options.draw is None else draw(options.draw, options.count)
    if options.models:
        models = {name: models[name] for name in options.models}
    torch._dynamo.config.recompile_limit = 64
    if options.compile_only:
        compile_only(options, models)
        return
    folder = options.folder or tempfile.mkdtemp()
    os.environ["IPEX_HOME"] = os.path.join(folder, "ipex")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
    about = describe_run("torchvision", "timm", "transformers")
    if options.workers:
        compile_beforehand(options, models)
    right = [measure(options, about, name, model) for name, model in models.items()]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
