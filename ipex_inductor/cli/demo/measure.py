"""Child process of `ipex-inductor demo`: one job in as JSON, steps and one result out.

    python -m ipex_inductor.cli.demo.measure '<JSON of demo_models.Job>'

It writes JSON lines to stdout: {"step": ...} while it runs, and finally {"result": ...} or, for a
user's error, {"error": [expected, came, todo]}. All other output goes to stderr.
"""

import contextlib
import copy
import importlib
import json
import math
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ipex_inductor import __version__, compat
from ipex_inductor.cli.demo.models import DTYPES, Contestant, Job, load
from ipex_inductor.errors import IpexError, OptionError
from ipex_inductor.reporting import decisions

Call = Callable[[], Any]
Say = Callable[[str], None]

CALLS = 4  # timed calls in a turn
WARM_UP = 2  # calls after the first; CUDA graphs record in the second and replay from the third


def use_folder(folder: Path, backend: str = "") -> None:
    """Send every on-disk compile cache, Inductor's, Triton's and ours, to `folder`.

    For backend `ipex` torch's variables are unset, or it would leave those caches to torch,
    unverified.
    """
    os.environ["IPEX_HOME"] = str(folder / "ipex")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    if backend == "ipex":
        del os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]


class Tiny(torch.nn.Module):
    """Model with one layer of each kind, so that compiling it loads what any model loads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
        )
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a softmax over eight channels."""
        return {"scores": self.head(self.conv(image).mean((2, 3))).softmax(-1)}


def start(job: Job) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, float]]:
    """Return the model, its inputs, and the seconds that a process spends once for any backend."""
    use_folder(job.scratch)
    started = time.perf_counter()
    for module in ("torch._dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(module)
    imported = time.perf_counter()
    device = job.device or default_device()
    model, inputs = load(job.model, job.dtype, job.batch, device)
    loaded = time.perf_counter()
    start_compiler(getattr(torch, DTYPES[job.dtype]), device)
    once = {"import_s": imported - started, "start_s": time.perf_counter() - loaded}
    return model, inputs, once


def start_compiler(dtype: torch.dtype, device: str) -> None:
    """Load Inductor's lazy tables, probe the C++ compiler, precompile its header.

    Otherwise all this would be charged to the first contestant. The model is compiled twice, with
    the graph cache off and on: a hit skips what a miss loads, and vice versa.
    """
    tiny = Tiny().eval().to(device, dtype)
    for cached in (False, True):
        with torch.no_grad(), _inductor_config(fx_graph_cache=cached):
            torch.compile(tiny)(torch.ones(1, 3, 16, 16, dtype=dtype, device=device))
        torch.compiler.reset()


def first_call(
    contestant: Contestant, model: torch.nn.Module, inputs: tuple[Any, ...], folder: Path
) -> tuple[Call, torch.Tensor, dict[str, Any]]:
    """Wrap and call a model once; return the callable, its output, and seconds and cache hits.

    Args:
        contestant: the contestant to wrap the model for.
        model: the model.
        inputs: the model's positional arguments.
        folder: the parent of the contestant's cache folder.
    """
    use_folder(folder / contestant.name, contestant.backend or "")
    before = _counters()
    started = time.perf_counter()
    # Freezing is decided by Dynamo from the global config, so options= would come too late.
    with _inductor_config(freezing=contestant.freezing):
        run = _compile_model(contestant, model)
        output = _first_tensor(run(*inputs)).clone()
        synchronize(output.device)
    seconds = time.perf_counter() - started
    after = _counters()
    new = {key: count - before.get(key, 0) for key, count in after.items()}
    facts = {
        "seconds": seconds,
        "fx_hits": new.get(("inductor", "fxgraph_cache_hit"), 0),
        "aot_hits": new.get(("aot_autograd", "autograd_cache_hit"), 0),
        "rules": {name: n for (kind, name), n in new.items() if kind == "ipex" and n},
        "fallbacks": _fallbacks() if contestant.backend == "ipex" else [],
    }
    return lambda: run(*inputs), output, facts


def relative_rmse(output: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the distance of `output` from the fp64 `truth`, relative to its norm.

    Infinite if the shapes differ.
    """
    if output.shape != truth.shape:
        return math.inf
    distance = (output.to(truth) - truth).norm() / truth.norm().clamp_min(1e-300)
    return float(distance)


def error_limit(eager: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest error that passes, by the rule of `torch._dynamo.utils.same`.

    RMSE(contestant, fp64) <= m * RMSE(eager, fp64) + tol / 10, with m = 3 and tol = 1e-2 for 16-bit
    floats, m = 2 (3 below 1000 elements) and tol = 1e-4 for fp32; here relative to fp64.
    """
    sixteen_bit = eager.element_size() == 2
    multiplier = 3 if sixteen_bit or eager.numel() < 1000 else 2
    return multiplier * relative_rmse(eager, truth) + (1e-3 if sixteen_bit else 1e-5)


def time_rounds(calls: Mapping[str, Call], seconds: float, device: torch.device) -> dict[str, Any]:
    """Return the milliseconds of each call, timed in round-robin turns for at least `seconds`.

    All contestants meet equal disturbances. The first call of a turn is not counted: it finds the
    other contestants' weights in the processor's caches, and its own in memory.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, end, rounds = list(calls), time.perf_counter() + seconds, 0
    while rounds < 2 or time.perf_counter() < end:
        for name in order:
            calls[name]()
            synchronize(device)
            samples[name] += [_milliseconds(calls[name], device) for _ in range(CALLS)]
        order.reverse()
        rounds += 1
    return {
        name: {"median_ms": statistics.median(ms), "min_ms": min(ms), "calls": len(ms)}
        for name, ms in samples.items()
    }


def synchronize(device: torch.device) -> None:
    """Wait for the device; a no-op on the CPU."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def cold(job: Job, say: Say) -> dict[str, Any]:
    """Time the first call of one contestant with empty caches."""
    model, inputs, once = start(job)
    (contestant,) = job.contestants
    with torch.no_grad(), _failure() as failed:
        _, _, facts = first_call(contestant, model, inputs, job.folder)
        return {**once, **facts}
    return {**once, "failed": failed[0]}


def measure(job: Job, say: Say) -> dict[str, Any]:
    """Measure warm first calls, check them against fp64, then time the contestants that passed."""
    say("load")
    model, inputs, once = start(job)
    device = torch.device(job.device or default_device())
    facts: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    outputs: dict[str, list[torch.Tensor]] = {}
    for contestant in job.contestants:
        name = contestant.name
        say(f"warm {contestant.title}")
        with torch.no_grad(), _failure() as failed:
            # Each contestant has its own weights, as when alone: shared ones could be cache hits.
            calls[name], output, facts[name] = first_call(
                contestant, copy.deepcopy(model), inputs, job.folder
            )
            later = [_first_tensor(calls[name]()).clone() for _ in range(WARM_UP)]
            outputs[name] = [output, *later]
        if failed:
            facts[name] = {"failed": failed[0]}
    say("check")
    with torch.no_grad():
        checks = {}
        if "eager" in outputs:
            checks = check(outputs, _first_tensor(fp64_output(model, inputs)))
        say("timing")
        passed = {name: calls[name] for name in checks if checks[name]["correct"]}
        with _other_load() as load_of_others:
            times = time_rounds(passed, job.seconds, device) if passed else {}
    rows = {n: {**f, **checks.get(n, {}), **times.get(n, {})} for n, f in facts.items()}
    return {
        **once,
        "machine": machine(device.type),
        "inputs": _shapes(inputs),
        "rows": rows,
        "other_load": load_of_others[0],
    }


def check(
    outputs: Mapping[str, list[torch.Tensor]], truth: torch.Tensor
) -> dict[str, dict[str, Any]]:
    """Return error and verdict of each contestant: the worst of its first and later calls."""
    eager = outputs["eager"][0]
    limit = error_limit(eager, truth)
    verdicts = {}
    for name, tensors in outputs.items():
        error = max((relative_rmse(tensor, truth) for tensor in tensors), key=_nan_last)
        correct = error <= limit and all(tensor.dtype == eager.dtype for tensor in tensors)
        verdicts[name] = {
            "correct": correct,
            "error": error if math.isfinite(error) else None,
            "limit": limit if math.isfinite(limit) else None,
        }
    return verdicts


def default_device() -> str:
    """Return "cuda" where torch has a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def machine(device: str) -> dict[str, Any]:
    """Return the facts about the machine that comparisons of the figures need."""
    chip = _cpu_name() if device == "cpu" else getattr(torch, device).get_device_name()
    return {
        "torch": compat.VERSION,
        "ipex_inductor": __version__,
        "device": device,
        "chip": chip,
        "threads": torch.get_num_threads(),
    }


def _compile_model(contestant: Contestant, model: torch.nn.Module) -> Callable[..., Any]:
    if contestant.backend is None:
        return model
    compiled: Callable[..., Any] = torch.compile(
        model, backend=contestant.backend, mode=contestant.mode
    )
    return compiled


def _inductor_config(**values: Any) -> contextlib.AbstractContextManager[Any]:
    config: Any = importlib.import_module("torch._inductor.config")
    context: contextlib.AbstractContextManager[Any] = config.patch(**values)
    return context


def _counters() -> dict[tuple[str, str], int]:
    utils: Any = importlib.import_module("torch._dynamo.utils")
    return {(kind, name): n for kind, group in utils.counters.items() for name, n in group.items()}


def _fallbacks() -> list[str]:
    events = (event for graph in decisions.reports() for event in graph.events)
    return [f"{e.subject}: {e.reason}" for e in events if e.kind == "fallback"]


@contextlib.contextmanager
def _failure() -> Iterator[list[str]]:
    """Collect a short reason of a raised exception; its traceback goes to the log."""
    reasons: list[str] = []
    try:
        yield reasons
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        reasons.append(f"{type(error).__name__}: {text}"[:200])


def _first_tensor(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    parts = output.values() if isinstance(output, Mapping) else output
    if isinstance(parts, str) or not hasattr(parts, "__iter__"):
        actual = type(output).__name__
        raise OptionError("a model that returns tensors", actual, "Wrap it so that it does.")
    return _first_tensor(next(iter(parts)))


def fp64_output(model: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Return the model's output in fp64, for its (already rounded) weights and inputs."""

    def widen(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        device = "cpu" if value.device.type == "xpu" else value.device  # most have no fp64
        return value.to(device, torch.float64 if value.is_floating_point() else value.dtype)

    wide = tree_map(widen, inputs)
    device = next(leaf.device for leaf in tree_leaves(wide) if isinstance(leaf, torch.Tensor))
    return copy.deepcopy(model).to(device, torch.float64)(*wide)


def _milliseconds(call: Call, device: torch.device) -> float:
    started = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - started) * 1e3


@contextlib.contextmanager
def _other_load() -> Iterator[list[float | None]]:
    """Collect the share of the processors that other processes used; None where unknown."""
    shares: list[float | None] = []
    before, own_seconds, started = _busy_seconds(), time.process_time(), time.perf_counter()
    yield shares
    after, wall = _busy_seconds(), time.perf_counter() - started
    if before is None or after is None:
        shares.append(None)
    else:
        other_seconds = after - before - (time.process_time() - own_seconds)
        shares.append(max(0.0, other_seconds / wall / (os.cpu_count() or 1)))


def _busy_seconds() -> float | None:
    """Return the seconds that the processors have spent on all processes since boot (Linux)."""
    try:
        with open("/proc/stat") as stat:
            user, nice, system, _idle, _iowait, *rest = map(int, stat.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _nan_last(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _shapes(inputs: tuple[Any, ...]) -> list[str]:
    return ["x".join(map(str, i.shape)) for i in inputs if isinstance(i, torch.Tensor)]


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Run the job given as the only argument."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def write(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")

    job = Job.from_json(sys.argv[1])
    try:
        task = {"cold": cold, "measure": measure}[job.task]
        write(result=task(job, lambda step: write(step=step)))
    except IpexError as error:
        write(error=[error.expected, error.came, error.todo])


if __name__ == "__main__":
    main()
