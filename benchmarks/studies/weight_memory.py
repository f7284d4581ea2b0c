"""Measure memory of a model's weights on a CPU: plain, packed beside plain, packed alone.

    python -m benchmarks weight_memory [--models bert] [--dtype float32] [--json FILE]

Each variant in a process that compiles the model (in the second run from the kernel cache) and
calls it: MiB of plain and of derived weights, resident memory before and after, and its peak.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import ipex_inductor
from ipex_inductor.runtime.huge_pages import trim_heap
from ipex_inductor.templates.tensor_reader import freed

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import cpu_peer
from common.cpu_kernels import append_row

ARMS: dict[str, dict[str, Any]] = {
    "as they are": {"weight_prologue": False},
    "packed too": {},
    "packed alone": {"drop_plain_weights": True},
}
MIB = 1 << 20


def measure_process(name: str, dtype: str, arm: str) -> dict[str, int]:
    """Return MiB of this process."""
    model, inputs = cpu_peer.make_model(name, getattr(torch, dtype), 1)
    gc.collect()
    trim_heap()
    before = _resident()
    fn = torch.compile(model, backend="ipex", options=ARMS[arm])
    with torch.no_grad():
        for _ in range(2):
            fn(*inputs)
    plain = sum(w.nbytes for w in model.parameters() if not freed.is_freed(w))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    after = _resident()
    return {
        "plain": plain // MIB,
        "derived": ipex_inductor.derived_memory() // MIB,
        "before": before,
        "behind": after,
        "most": most,
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // MIB


def main() -> None:
    """Measure each arm in a process, twice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["bert"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", help="file for the lines")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_process(*options.one)))
        return
    options.threads = torch.get_num_threads()
    for model in options.models:
        for arm in [*ARMS, *ARMS]:
            command = [sys.executable, __file__, "--one", model, options.dtype, arm]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            said = json.loads(done.stdout.splitlines()[-1])
            append_row({"model": model, "dtype": options.dtype, "weights": arm, **said}, options)


if __name__ == "__main__":
    main()
