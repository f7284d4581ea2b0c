"""Measure the first output of a model that was packaged on a machine without a GPU.

    python -m benchmarks package_gpu build [--arch sm_90:NVIDIA-H200]
    python -m benchmarks package_gpu use [--rounds N] [--json FILE]

ResNet-50 with one image in bf16, channels-last. `build` writes build/package_gpu.ipexbundle, which
is copied to the machine with the GPU. `use` starts processes with empty caches; the clock starts
after `import torch` and CUDA's initialization, with weights and input on the GPU. Each output is
checked against eager. `torch.compile` with backend `ipex` and with Inductor stand beside it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

BUNDLE = Path(__file__).parents[2] / "build" / "package_gpu.ipexbundle"
CONTESTANTS = ("package", "ipex", "inductor")
# Of bf16 results of some fifty layers, of which each rounds to 3 digits.
ERROR = 0.02


def model_of() -> tuple[nn.Module, Tensor]:
    """Return the model and its input on the CPU, equal in every process."""
    torch.manual_seed(0)
    last: dict[str, Any] = {"memory_format": torch.channels_last}
    model = torchvision.models.resnet50(weights=None).eval().to(torch.bfloat16).to(**last)
    return model, torch.randn(1, 3, 224, 224, dtype=torch.bfloat16).to(**last)


def build(arch: str) -> None:
    """Build the bundle."""
    import ipex_inductor
    from ipex_inductor.target.device import find_target

    model, x = model_of()
    BUNDLE.parent.mkdir(exist_ok=True)
    BUNDLE.unlink(missing_ok=True)
    began = time.perf_counter()
    done = ipex_inductor.package(model, (x,), BUNDLE, targets=[find_target(arch)])
    size = BUNDLE.stat().st_size / 2**20
    print(f"{BUNDLE}: {size:.1f} MiB, {time.perf_counter() - began:.1f} s; {done.report.summary()}")


@torch.no_grad()
def measure_first_output(contestant: str) -> dict[str, Any]:
    """Measure one process: its first output, its time and its error relative to eager."""
    model, x = model_of()
    model, x = model.cuda(), x.cuda()
    torch.cuda.synchronize()
    began = time.perf_counter()
    if contestant == "package":
        import ipex_inductor

        run: Any = ipex_inductor.load(BUNDLE, weights=model.state_dict(), allow_unsigned=True)
    else:
        run = torch.compile(model, backend=contestant)
    loaded = time.perf_counter()
    out = run(x)
    torch.cuda.synchronize()
    first = time.perf_counter()
    heavy = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
    run(x)
    torch.cuda.synchronize()
    second = time.perf_counter()
    eager = model(x)
    return {
        "load_s": loaded - began,
        "first_s": first - began,
        "second_s": second - first,
        "imported": heavy,
        "error": float((out.float() - eager.float()).norm() / eager.float().norm()),
        "gpu": torch.cuda.get_device_name(),
    }


def run_process(contestant: str) -> dict[str, Any]:
    """Run a process of its own with empty folders."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "IPEX_HOME": f"{folder}/home"}
        env["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        command = [sys.executable, __file__, "child", contestant]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def use(rounds: int, file: Path | None) -> bool:
    """Print and append a row each; return whether all are right and the package is light."""
    good = True
    for contestant in CONTESTANTS:
        rows = [run_process(contestant) for _ in range(rounds if contestant == "package" else 1)]
        for row in rows:
            wrong = "failed" in row or row["error"] > ERROR
            good &= not wrong and not (contestant == "package" and row["imported"])
        print(contestant, *(json.dumps(row) for row in rows), sep="\n  ", flush=True)
        firsts = [row["first_s"] for row in rows if "first_s" in row]
        if firsts:
            print(f"{contestant}: {min(firsts):.2f} s, median {statistics.median(firsts):.2f} s")
        if file:
            about = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "torch": torch.__version__}
            about["command"] = " ".join(
                ["python", "-m", "benchmarks", "package_gpu", *sys.argv[1:]]
            )
            with file.open("a") as out:
                for row in rows:
                    out.write(json.dumps({**about, "contestant": contestant, **row}) + "\n")
    return good


def main() -> None:
    """See the top of the file."""
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(measure_first_output(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("half", choices=("build", "use"))
    parser.add_argument("--arch", default="sm_90:NVIDIA-H200")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.half == "build":
        build(asked.arch)
    else:
        raise SystemExit(not use(asked.rounds, asked.json))


if __name__ == "__main__":
    main()
