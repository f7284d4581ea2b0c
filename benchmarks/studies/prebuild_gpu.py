"""Measure the first call of models whose kernels were compiled without a GPU.

    python -m benchmarks prebuild_gpu build [--arch sm_90:NVIDIA-H200] [--cases NAME ...]
    python -m benchmarks prebuild_gpu use [--cases NAME ...] [--contestants NAME ...] [--json FILE]
        [--together] [--seconds N]

`build` writes build/prebuild_gpu.ipexbundle and a file that describes the build; both are copied to
the machine with the GPU, with identical sources. `use` starts a process for each case and
contestant, each with empty caches: prebuilt (`ipex` with the bundle), same (`ipex` without it,
restricted to the builder's choices, to compare bits), ipex (cold, as users run it), inductor
(default mode), and eager on request (the initialization of CUDA's libraries). It prints the seconds
of the first call after imports with the model on the GPU, what was compiled, launched and timed in
it, and the error relative to eager. Each row is printed and written as it comes: prebuilt rows
first, the cheapest case first. No row begins after --seconds. With --together a contestant has one
process for all cases, so that the first case bears most imports and initialization. With --describe
ARCH, where there is no GPU, `use` looks up the bundle and runs nothing.

In bf16; convolutions are channels-last. `-train` is a forward and backward; `adamw` a first
`FusedStep` of AdamW with clipping on GPT-2's parameters in fp32, without Inductor.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))


BUNDLE = Path(__file__).parents[2] / "build" / "prebuild_gpu.ipexbundle"
PACKAGES = ("torch", "triton", "torchvision", "transformers")


class Case(NamedTuple):
    """A model and its inputs."""

    model: str
    batch: int = 1
    tokens: int = 0
    trains: bool = False


CASES = {
    "adamw": Case("gpt2"),
    "resnet50-b1": Case("resnet50"),
    "bert-1x384": Case("bert", tokens=384),
    "gpt2-1x384": Case("gpt2", tokens=384),
    "gpt2-1x384-train": Case("gpt2", tokens=384, trains=True),
    "resnet50-b128": Case("resnet50", 128),
    "resnet50-b32-train": Case("resnet50", 32, trains=True),
}
STEP = "adamw"
CONTESTANTS = ("prebuilt", "same", "ipex", "inductor", "eager")
USUAL = ("prebuilt", "same", "inductor")
LARGEST = 50 << 20  # bytes, so that it can be carried
# Of bf16 results of some tens of layers, of which each rounds to 3 digits. Gradients pass all of
# them twice, and normalised ones as small differences. A step in fp32 is three roundings or so of
# an update, which itself is a thousandth of the parameter.
ERROR, GRADIENT_ERROR, STEP_ERROR = 0.02, 0.2, 1e-6
ROW = "ROW "  # of a child's output
LONGEST = 400  # seconds of a process
FIRST = 1000  # elements of each gradient that are compared


def case_of(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a model on the CPU, its inputs, equal in every process, and its loss."""
    import torch

    torch.manual_seed(0)
    case, layout = CASES[name], {"memory_format": torch.channels_last}
    if case.model == "resnet50":
        import torchvision

        from common.damped_resnet import damp_residual_branches

        model: Any = torchvision.models.resnet50(weights=None)
        model = damp_residual_branches(model) if case.trains else model
        model = model.to(torch.bfloat16).to(**layout)
        images = torch.randn(case.batch, 3, 224, 224, dtype=torch.bfloat16).to(**layout)
        labels = torch.randint(0, 1000, (case.batch,))
        return (loss_of(model), (images, labels)) if case.trains else (model.eval(), (images,))
    import transformers

    kinds = {"bert": ("BertConfig", "BertModel"), "gpt2": ("GPT2Config", "GPT2LMHeadModel")}
    of_config, of_model = kinds[case.model]
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # eager draws others
    config = getattr(transformers, of_config)(use_cache=False, **dropout if case.trains else {})
    model = getattr(transformers, of_model)(config)
    if name == STEP:
        return model, ()
    words = torch.randint(0, config.vocab_size, (case.batch, case.tokens))
    model = model.to(torch.bfloat16)
    # Labels of their own: one tensor given twice is one input of the graph.
    return (loss_of(model), (words, words.clone())) if case.trains else (model.eval(), (words,))


def loss_of(model: Any) -> Any:
    """Return the model with its loss, which a training step compiles."""
    import torch

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any, target: Any) -> Any:
            found = getattr(out := self.model(x), "logits", out)
            return torch.nn.functional.cross_entropy(found.flatten(0, -2), target.flatten())

    return Loss().train()


def adamw_of(model: Any) -> Any:
    """Return the optimizer of case `adamw`."""
    import torch

    from ipex_inductor.optim import FusedStep

    return FusedStep(torch.optim.AdamW(model.parameters(), lr=1e-3), clip_norm=1.0)


def build_facts() -> dict[str, str]:
    """Return versions and sources that must be equal on both machines."""
    from ipex_inductor.aot_cache.digest import source_digest

    found = {name: version(name) for name in PACKAGES}
    return found | {"ipex_inductor": source_digest()[:16]}


def compile_case(name: str, target: Any) -> Any:
    """Return what is compiled of a case."""
    from ipex_inductor.prebuild import graphs

    model, inputs = case_of(name)
    if name == STEP:
        return graphs.prebuild_step(adamw_of(model).optimizer, target)
    return graphs.prebuild(model, inputs, target, training=CASES[name].trains)


def build(arch: str, names: list[str]) -> None:
    """Compile all cases for `arch` into the bundle."""
    from ipex_inductor.prebuild import graphs
    from ipex_inductor.target.device import find_target

    target, done = find_target(arch), []
    for name in names:
        each = compile_case(name, target)
        done.append(each)
        held = sum(len(entry.blob) for entry in (each.entries | each.own).values())
        print(
            f"{name}: graphs {each.graphs}, kernels {len(each.made.kernels)} "
            f"({len(each.made.untimed)} untimed), own {len(each.own)}, "
            f"{held / 2**20:.1f} MiB, {each.seconds:.1f} s",
            *each.missing,
            flush=True,
        )
    BUNDLE.parent.mkdir(exist_ok=True)
    BUNDLE.unlink(missing_ok=True)
    graphs.pack(done, BUNDLE)
    BUNDLE.with_suffix(".json").write_text(json.dumps(build_facts(), indent=2))
    size = BUNDLE.stat().st_size
    print(f"{BUNDLE}: {size / 2**20:.1f} MiB")
    if size > LARGEST or any(each.missing for each in done):
        raise SystemExit(f"more than {LARGEST >> 20} MiB, or something is missing")


def count_forbidden(counts: Counter[str]) -> None:
    """Count what must not happen: Triton's compiler, processes, timed kernels."""
    import triton
    from torch._inductor.runtime import benchmarking
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def compiled(**about: Any) -> None:
        counts["triton.compile" if not about["cache_hit"] else "triton's cache"] += 1

    def started(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            name = Path(str(arguments[0])).name
            counts["g++" if "++" in name or name in ("cc", "gcc") else f"process {name}"] += 1

    def counted(owner: Any, name: str) -> None:
        usual = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts["benchmark"] += 1
            return usual(*args, **kwargs)

        setattr(owner, name, call)

    triton.knobs.compilation.listener = compiled
    sys.addaudithook(started)
    counted(CachingAutotuner, "bench")
    for kind in {type(benchmarking.benchmarker), *type(benchmarking.benchmarker).__mro__[:-1]}:
        for name in ("benchmark", "benchmark_gpu", "benchmark_cpu"):
            if name in vars(kind):
                counted(kind, name)


def choose_like_builder() -> None:
    """Restrict selection as a builder does: the first configuration, whatever its registers."""
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def first(self: Any, *_: Any, **__: Any) -> None:
        self.launchers = self.launchers[:1]

    kind: Any = CachingAutotuner
    kind.autotune_to_one_config = first
    kind._dynamic_scale_rblock = lambda self: None
    pad_mm._should_pad = lambda *_, **__: False


def child(names: list[str], contestant: str, describe: str, results: Path) -> None:
    """One process: of each case what it counted, how long it took, how far it is from eager."""
    began = time.perf_counter()
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx
    import transformers  # noqa: F401
    import triton  # noqa: F401  what the first call would import

    import ipex_inductor
    from ipex_inductor import optim  # noqa: F401

    counts: Counter[str] = Counter()
    count_forbidden(counts)
    imported = time.perf_counter()
    if contestant == "prebuilt":
        ipex_inductor.use_bundle(BUNDLE, allow_unsigned=True)
    opened = time.perf_counter()
    if contestant == "same" and not describe:
        choose_like_builder()
    times = {"imports_s": imported - began, "bundle_s": opened - imported}
    for name in names:
        counts.clear()
        torch.compiler.reset()
        if describe:
            row = look_up_bundle(name, describe, counts)
        else:
            row = (
                stepped(name, counts)
                if name == STEP
                else run_model(name, contestant, counts, results)
            )
            row["gpu"] = torch.cuda.get_device_name()
        told = {"model": name, "contestant": contestant, **times, **row}
        print(ROW + json.dumps(told), flush=True)


def run_model(name: str, contestant: str, counts: Counter[str], results: Path) -> dict[str, Any]:
    """Time the first and second call of a model, and return a row."""
    import torch
    from torch._dynamo.utils import counters

    from ipex_inductor import backend
    from ipex_inductor.reporting import decisions

    decisions.clear()
    counters.clear()
    began = time.perf_counter()
    model, inputs = case_of(name)
    model, inputs = model.cuda(), tuple(value.cuda() for value in inputs)
    torch.cuda.synchronize()
    placed = time.perf_counter()
    compiler: Any = "inductor" if contestant == "inductor" else backend.compile_graph
    compiled = model if contestant == "eager" else torch.compile(model, backend=compiler)
    trains = CASES[name].trains

    def results_of(call: Any) -> list[Any]:
        model.zero_grad()
        with torch.set_grad_enabled(trains):
            out = first_tensor(call(*inputs))
            if trains:
                out.backward()
        torch.cuda.synchronize()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    got = results_of(compiled)
    done = time.perf_counter()
    told, found, aot = Counter(counts), dict(counters["inductor"]), dict(counters["aot_autograd"])
    results_of(compiled)
    again = time.perf_counter()
    digests = [digest_bits(each) for each in got]
    torch.save(
        [each.flatten()[: None if n == 0 else FIRST].cpu() for n, each in enumerate(got)],
        results / f"{name}-{contestant}",
    )
    wanted = results_of(model)
    compared = [*zip(got, wanted, strict=True)][1 if trains else 0 :]
    distance, size = (
        sum(each.float().square().sum().item() for each in side) ** 0.5
        for side in ([a.float() - b.float() for a, b in compared], [b for _, b in compared])
    )
    return {
        "to_gpu_s": placed - began,
        "first_s": done - placed,
        "second_s": again - done,
        "error": distance / size,
        "allowed": GRADIENT_ERROR if trains else ERROR,
        "digests": digests,
        "counts": dict(told),
        "later": dict(counts - told),
        "inductor": {n: v for n, v in found.items() if "cache" in n or "triton_bundler" in n},
        "aot": aot,
        "cache": [str(e) for r in decisions.reports() for e in r.events if e.kind == "cache"],
    }


def stepped(name: str, counts: Counter[str]) -> dict[str, Any]:
    """The first step of an optimizer, and the second."""
    import torch

    began = time.perf_counter()
    model, _ = case_of(name)
    model = model.cuda()
    twin = [p.detach().clone().requires_grad_() for p in model.parameters()]
    for param, other in zip(model.parameters(), twin, strict=True):
        param.grad = torch.randn_like(param)
        other.grad = param.grad.clone()
    step = adamw_of(model)
    torch.cuda.synchronize()
    placed = time.perf_counter()
    step()
    torch.cuda.synchronize()
    done, told = time.perf_counter(), Counter(counts)
    step()
    torch.cuda.synchronize()
    again = time.perf_counter()
    usual = torch.optim.AdamW(twin, lr=1e-3, foreach=True)
    for _ in range(2):
        norm = torch.nn.utils.get_total_norm([p.grad for p in twin])
        torch.nn.utils.clip_grads_with_norm_(twin, 1.0, norm)
        usual.step()
        for param, other in zip(model.parameters(), twin, strict=True):
            other.grad = param.grad.clone()  # it is not clipped
    pairs = [*zip(model.parameters(), twin, strict=True)]
    error = max((a - b).abs().max().item() for a, b in pairs)
    digests = [digest_bits(a) for a, _ in pairs]
    return {
        "to_gpu_s": placed - began,
        "first_s": done - placed,
        "second_s": again - done,
        "error": error,
        "allowed": STEP_ERROR,
        "digests": digests,
        "counts": dict(told),
        "later": dict(counts - told),
        "cache": [],
    }


def digest_bits(tensor: Any) -> str:
    """Return a digest of the tensor's bits."""
    import torch

    held = tensor.detach().flatten().contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.sha256(held.tobytes()).hexdigest()[:16]


def look_up_bundle(name: str, arch: str, counts: Counter[str]) -> dict[str, Any]:
    """Return what the bundle has for `arch`, without running."""
    from ipex_inductor.target.device import find_target

    done = compile_case(name, find_target(arch))
    cache = [str(event) for event in done.events if event.kind == "cache"]
    return {"counts": dict(counts), "cache": cache, "kernels": len(done.made.kernels)}


def first_tensor(value: Any) -> Any:
    """Return the first tensor of a result."""
    import torch

    return value if isinstance(value, torch.Tensor) else value[0]


def started(
    names: list[str], contestant: str, describe: str, results: Path
) -> Iterator[dict[str, Any]]:
    """A row for each case as it comes, of a process of its own with empty folders."""
    dropped = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "IPEX_AOT_BUNDLES")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    # As an installed package has its bytecode: the first process writes it.
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{results}/bytecode"}
    left = [*names]
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/errors", "w+") as errors:
        env["IPEX_HOME"] = f"{folder}/home"
        if contestant == "inductor":
            env["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        command = [sys.executable, __file__, "child", ",".join(names), contestant, describe]
        with subprocess.Popen(
            [*command, str(results)], env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            killer = threading.Timer(LONGEST, process.kill)
            killer.start()
            for line in process.stdout:
                if line.startswith(ROW):  # else a library's own words
                    row: dict[str, Any] = json.loads(line.removeprefix(ROW))
                    left.remove(row["model"])
                    yield row
            killer.cancel()
        errors.seek(0)
        failed = errors.read()[-2000:]
    for name in left:
        yield {"model": name, "contestant": contestant, "failed": failed}


def compare_bits(row: dict[str, Any], others: list[dict[str, Any]], results: Path) -> None:
    """Into `row`: whether a prebuilt result is `same`'s, and how far it is if not."""
    import torch

    pair = {each.get("contestant"): each for each in (*others, row) if "digests" in each}
    if not {"prebuilt", "same"} <= pair.keys() or row not in (pair["prebuilt"], pair["same"]):
        return
    ours, cold = pair["prebuilt"]["digests"], pair["same"]["digests"]
    row["bits"] = [sum(a == b for a, b in zip(ours, cold, strict=True)), len(ours)]
    files = [results / f"{row['model']}-{who}" for who in ("prebuilt", "same")]
    if all(file.exists() for file in files):
        a, b = map(torch.load, files)
        far = (x.float() - y.float() for x, y in zip(a, b, strict=True))
        row["largest_difference"] = max(each.abs().max().item() for each in far)


def print_row(row: dict[str, Any]) -> bool:
    """Print a row; return whether the prebuilt run compiled and timed nothing and is right."""
    who = f"{row['model']:18} {row['contestant']:9}"
    if "failed" in row:
        print(f"{who} FAILED\n{row['failed']}", flush=True)
        return False
    counts = row["counts"]
    told = ", ".join(f"{name} {counts.get(name, 0)}" for name in COUNTED)
    more = ", ".join(f"{n} {v}" for n, v in counts.items() if n not in COUNTED)
    wrong = row.get("error", 0) > row.get("allowed", 0)
    speed = f"{row['first_s']:6.2f} s" if "first_s" in row and not wrong else "      - "
    error = f"; error {row['error']:.1e}{' WRONG' if wrong else ''}" if "error" in row else ""
    bits = "; bits equal in {} of {} results".format(*row["bits"]) if "bits" in row else ""
    print(f"{who} {speed}  {told}{f' ({more})' * bool(more)}{error}{bits}")
    rest = ("imports_s", "bundle_s", "to_gpu_s", "second_s")
    print(" " * 30 + ", ".join(f"{name} {row[name]:.2f}" for name in rest if name in row))
    for line in row["cache"]:
        print(" " * 30 + line)
    sys.stdout.flush()
    # Compile workers count for themselves, but then it was no hit.
    found = all(line.startswith("cache: hit") for line in row["cache"])
    compiled = any(counts.get(name) for name in COUNTED) or not found
    return not wrong and not (row["contestant"] == "prebuilt" and compiled)


COUNTED = ("triton.compile", "g++", "benchmark")


def main() -> None:
    """See the top of the file."""
    if sys.argv[1:2] == ["child"]:
        names, contestant, describe, results = sys.argv[2:]
        child(names.split(","), contestant, describe, Path(results))
        return
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("half", choices=("build", "use"))
    parser.add_argument("--arch", default="sm_90:NVIDIA-H200")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=[*USUAL])
    parser.add_argument("--describe", default="", metavar="ARCH")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.half == "build":
        build(asked.arch, asked.cases)
        return
    here, there = build_facts(), json.loads(BUNDLE.with_suffix(".json").read_text())
    for name in here:
        if here[name] != there[name]:
            print(f"{name}: {here[name]} here, {there[name]} where it was built")
    contestants = ["prebuilt"] if asked.describe else asked.contestants
    command = " ".join(["python", "-m", "benchmarks", "prebuild_gpu", *sys.argv[1:]])
    known = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "command": command}
    known |= {"here": here, "there": there}
    groups = [asked.cases] if asked.together else [[name] for name in asked.cases]
    good, rows = True, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as results:
        for names, contestant in ((names, who) for who in contestants for names in groups):
            names = [n for n in names if n != STEP or contestant != "inductor"]
            if time.monotonic() - began > asked.seconds:
                print(f"left out, for want of time: {contestant} of {', '.join(names)}")
                good = False
                continue
            for row in started(names, contestant, asked.describe, Path(results)) if names else ():
                compare_bits(row, [r for r in rows if r["model"] == row["model"]], Path(results))
                good &= print_row(row)
                rows.append(row)
                if asked.json:  # each is kept at once: time may be short
                    with open(asked.json, "a") as file:
                        file.write(json.dumps({**known, **row}) + "\n")
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
