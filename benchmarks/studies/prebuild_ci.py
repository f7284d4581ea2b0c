"""Measure time and memory of prebuilding every kernel of some models for absent GPUs.

    python -m benchmarks prebuild_ci [--folder FOLDER] [--arch ARCH ...] [--json FILE]

Runs `ipex-inductor prebuild FOLDER --arch ...` with an empty cache root and two cores; the load
average is printed. Exit code 1 if it takes more than 15 minutes or 6 GB, or if a kernel is missing.
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

MODELS = Path(__file__).with_name("prebuild_models")
ARCHS = ("a100-80gb", "h200", "b200")
SECONDS, BYTES = 15 * 60, 6e9
CORES = 2


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=str(MODELS))
    parser.add_argument("--arch", nargs="+", default=[*ARCHS])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    dropped = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    archs = [word for arch in asked.arch for word in ("--arch", arch)]
    command = [sys.executable, "-m", "ipex_inductor", "prebuild", asked.folder, *archs, "--json"]
    with tempfile.TemporaryDirectory() as home:
        before, began = os.getloadavg()[0], time.monotonic()
        done = subprocess.run(command, env=env | {"IPEX_HOME": home}, stdout=subprocess.PIPE)
        seconds = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["targets"] if done.stdout else []
    for row in rows:
        more = "; ".join(row["missing"])
        print(
            f"{row['target']:34} {row['model']:10} {row.get('kernels', 0):4} kernels, "
            f"{row.get('seconds', 0):6.1f} s {more}"
        )
    told = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_bytes": used.ru_maxrss << 10,
        "cores": len(cores),
        "load_before": round(before, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "kernels": sum(row.get("kernels", 0) for row in rows),
    }
    print(", ".join(f"{name} {value}" for name, value in told.items()))
    if asked.json:
        with open(asked.json, "a") as file:
            file.write(json.dumps(told | {"targets": rows}) + "\n")
    good = done.returncode == 0 and seconds <= SECONDS and told["peak_bytes"] <= BYTES
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
