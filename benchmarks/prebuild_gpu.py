"""Models compiled on a machine without a GPU, and their first call where one is.

    python benchmarks/prebuild_gpu.py build [--arch sm_90:NVIDIA-H200] [--models NAME ...]
    python benchmarks/prebuild_gpu.py use [--models NAME ...] [--contestants NAME ...] [--json FILE]

`build` writes build/prebuild_gpu.ipexbundle, and beside it what it was built by; both are carried
to the GPU, with the very sources they were built from. `use` starts a process for each model and
contestant, each with empty caches: prebuilt (backend `ipex` with the bundle), same (`ipex` without
it, made to choose what a builder chooses, to compare bits with), ipex (cold, as users run it),
inductor (its default). It prints the seconds of the first call after imports and after the model is
on the GPU, what was compiled, launched and timed in it, and how far results are from eager's. With
--describe ARCH, where there is no GPU, `use` looks the bundle up and runs nothing.

In bf16; convolutions channels-last; no gradients.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

BUNDLE = Path(__file__).parents[1] / "build" / "prebuild_gpu.ipexbundle"
PACKAGES = ("torch", "triton", "torchvision", "transformers")
MODELS = {  # batch, tokens
    "resnet50-b1": (1, 0),
    "resnet50-b128": (128, 0),
    "bert-1x384": (1, 384),
    "gpt2-1x384": (1, 384),
}
CONTESTANTS = ("prebuilt", "same", "ipex", "inductor")
USUAL = ("prebuilt", "same", "inductor")
LARGEST = 50 << 20  # bytes, so that it can be carried
# Of bf16 results of some tens of layers, of which each rounds to 3 digits.
ERROR = 0.02


def model_of(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A model on the CPU with its inputs, the same in every process."""
    import torch

    torch.manual_seed(0)
    batch, tokens = MODELS[name]
    if name.startswith("resnet50"):
        import torchvision

        layout: dict[str, Any] = {"memory_format": torch.channels_last}
        model = torchvision.models.resnet50(weights=None).eval().to(torch.bfloat16).to(**layout)
        return model, (torch.randn(batch, 3, 224, 224, dtype=torch.bfloat16).to(**layout),)
    import transformers

    kinds = {"bert": ("BertConfig", "BertModel"), "gpt2": ("GPT2Config", "GPT2LMHeadModel")}
    of_config, of_model = kinds[name.partition("-")[0]]
    config = getattr(transformers, of_config)(use_cache=False)
    model = getattr(transformers, of_model)(config).eval().to(torch.bfloat16)
    return model, (torch.randint(0, config.vocab_size, (batch, tokens)),)


def built_by() -> dict[str, str]:
    """What must be the same on both machines."""
    from ipex_inductor.aot_cache.digest import source_digest

    found = {name: version(name) for name in PACKAGES}
    return found | {"ipex_inductor": source_digest()[:16]}


def build(arch: str, names: list[str]) -> None:
    """Compile all models for `arch` into the bundle."""
    from ipex_inductor.prebuild import graphs
    from ipex_inductor.target import described

    target, done = described(arch), []
    for name in names:
        model, inputs = model_of(name)
        done.append(graphs.prebuild(model, inputs, target))
        made, held = done[-1].made, sum(len(e.blob) for e in done[-1].entries.values())
        print(
            f"{name}: graphs {done[-1].graphs}, kernels {len(made.kernels)} "
            f"({len(made.untimed)} untimed), {held / 2**20:.1f} MiB, {done[-1].seconds:.1f} s",
            *done[-1].missing,
        )
    BUNDLE.parent.mkdir(exist_ok=True)
    BUNDLE.unlink(missing_ok=True)
    graphs.pack(done, BUNDLE)
    BUNDLE.with_suffix(".json").write_text(json.dumps(built_by(), indent=2))
    size = BUNDLE.stat().st_size
    print(f"{BUNDLE}: {size / 2**20:.1f} MiB")
    if size > LARGEST or any(each.missing for each in done):
        raise SystemExit(f"more than {LARGEST >> 20} MiB, or something is missing")


def count(counts: Counter[str]) -> None:
    """Have what must not happen counted: Triton's compiler, processes, kernels timed."""
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


def choose_as_a_builder() -> None:
    """Of several configurations the first, and none for the registers that it takes."""
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def first(self: Any, *_: Any, **__: Any) -> None:
        self.launchers = self.launchers[:1]

    kind: Any = CachingAutotuner
    kind.autotune_to_one_config = first
    kind._dynamic_scale_rblock = lambda self: None
    pad_mm._should_pad = lambda *_, **__: False


def child(name: str, contestant: str, describe: str, results: Path) -> dict[str, Any]:
    """One process: what it counted, how long it took, how far it is from eager."""
    began = time.perf_counter()
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx
    import triton  # noqa: F401  what the first call would import
    from torch._dynamo.utils import counters

    import ipex_inductor
    from ipex_inductor import backend, decisions

    counts: Counter[str] = Counter()
    count(counts)
    model, inputs = model_of(name)
    imported = time.perf_counter()
    if contestant == "prebuilt":
        ipex_inductor.use_bundle(BUNDLE, allow_unsigned=True)
    opened = time.perf_counter()
    if describe:
        return looked_up(model, inputs, describe, counts)
    if contestant == "same":
        choose_as_a_builder()
    model, inputs = model.cuda(), tuple(value.cuda() for value in inputs)
    torch.cuda.synchronize()
    placed = time.perf_counter()
    compiler: Any = "inductor" if contestant == "inductor" else backend.compile_graph
    compiled = torch.compile(model, backend=compiler)
    with torch.no_grad():
        out = first_of(compiled(*inputs))
        torch.cuda.synchronize()
        done = time.perf_counter()
        told, found = Counter(counts), dict(counters["inductor"])
        first_of(compiled(*inputs))
        torch.cuda.synchronize()
        again = time.perf_counter()
        eager = first_of(model(*inputs))
    error = (out.float() - eager.float()).norm() / eager.float().norm()
    torch.save(out.cpu(), results / f"{name}-{contestant}")
    cache = [str(e) for r in decisions.reports() for e in r.events if e.kind == "cache"]
    return {
        "imports_s": imported - began,
        "bundle_s": opened - imported,
        "to_gpu_s": placed - opened,
        "first_s": done - placed,
        "second_s": again - done,
        "error": error.item(),
        "sha256": hashlib.sha256(out.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16],
        "counts": dict(told),
        "later": dict(counts - told),
        "inductor": {n: v for n, v in found.items() if "cache" in n or "triton_bundler" in n},
        "aot": dict(counters["aot_autograd"]),
        "cache": cache,
        "gpu": torch.cuda.get_device_name(),
    }


def looked_up(model: Any, inputs: Any, arch: str, counts: Counter[str]) -> dict[str, Any]:
    """What would be found on `arch`, of which nothing runs here."""
    from ipex_inductor.prebuild import graphs
    from ipex_inductor.target import described

    done = graphs.prebuild(model, inputs, described(arch))
    cache = [str(event) for event in done.events if event.kind == "cache"]
    return {"counts": dict(counts), "cache": cache, "kernels": len(done.made.kernels)}


def first_of(value: Any) -> Any:
    """The first tensor of a result."""
    import torch

    return value if isinstance(value, torch.Tensor) else value[0]


def started(name: str, contestant: str, describe: str, results: Path) -> dict[str, Any]:
    """A row: a process of its own with empty folders."""
    dropped = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "IPEX_AOT_BUNDLES")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    with tempfile.TemporaryDirectory() as folder:
        env["IPEX_HOME"] = f"{folder}/home"
        if contestant == "inductor":
            env["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        command = [sys.executable, __file__, "child", name, contestant, describe, str(results)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    if done.returncode:
        return {"model": name, "contestant": contestant, "failed": done.stderr[-2000:]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"model": name, "contestant": contestant, **row}


def compare_bits(rows: list[dict[str, Any]], results: Path) -> None:
    """Into the row of each prebuilt result: whether it is `same`'s, and how far it is if not."""
    import torch

    for row in rows:
        ours, cold = (results / f"{row['model']}-{who}" for who in ("prebuilt", "same"))
        if row["contestant"] == "prebuilt" and ours.exists() and cold.exists():
            a, b = torch.load(ours), torch.load(cold)
            row["bits"] = torch.equal(a, b)
            row["largest_difference"] = (a.float() - b.float()).abs().max().item()


def show(rows: list[dict[str, Any]]) -> bool:
    """The table; whether all that was prebuilt compiled, launched and timed nothing."""
    good = True
    for row in rows:
        who = f"{row['model']:14} {row['contestant']:9}"
        if "failed" in row:
            print(f"{who} FAILED\n{row['failed']}")
            good = False
            continue
        counts = row["counts"]
        told = ", ".join(f"{name} {counts.get(name, 0)}" for name in COUNTED)
        more = ", ".join(f"{n} {v}" for n, v in counts.items() if n not in COUNTED)
        wrong = row.get("error", 0) > ERROR
        speed = f"{row['first_s']:6.2f} s" if "first_s" in row and not wrong else "      - "
        error = f"; error {row['error']:.1e}{' WRONG' if wrong else ''}" if "error" in row else ""
        bits = f"; bits {'equal' if row['bits'] else 'DIFFER'}" if "bits" in row else ""
        print(f"{who} {speed}  {told}{f' ({more})' * bool(more)}{error}{bits}", flush=True)
        if "first_s" in row:
            rest = ("imports_s", "bundle_s", "to_gpu_s", "second_s")
            print(" " * 26 + ", ".join(f"{name} {row[name]:.2f}" for name in rest))
        for line in row["cache"]:
            print(" " * 26 + line)
        if row["contestant"] == "prebuilt":
            good &= not wrong and not any(counts.get(name) for name in COUNTED)
    return good


COUNTED = ("triton.compile", "g++", "benchmark")


def main() -> None:
    """See the top of the file."""
    if sys.argv[1:2] == ["child"]:
        name, contestant, describe, results = sys.argv[2:]
        print(json.dumps(child(name, contestant, describe, Path(results))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("half", choices=("build", "use"))
    parser.add_argument("--arch", default="sm_90:NVIDIA-H200")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=[*USUAL])
    parser.add_argument("--describe", default="", metavar="ARCH")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.half == "build":
        build(asked.arch, asked.models)
        return
    here, there = built_by(), json.loads(BUNDLE.with_suffix(".json").read_text())
    for name in here:
        if here[name] != there[name]:
            print(f"{name}: {here[name]} here, {there[name]} where it was built")
    contestants = ["prebuilt"] if asked.describe else asked.contestants
    command = " ".join(["python", "benchmarks/prebuild_gpu.py", *sys.argv[1:]])
    known = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "command": command}
    known |= {"here": here, "there": there}
    good = True
    for name in asked.models:  # each is kept at once: time may be short
        with tempfile.TemporaryDirectory() as results:
            rows = [started(name, each, asked.describe, Path(results)) for each in contestants]
            compare_bits(rows, Path(results))
        good &= show(rows)
        if asked.json:
            with open(asked.json, "a") as file:
                file.writelines(json.dumps({**known, **row}) + "\n" for row in rows)
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
