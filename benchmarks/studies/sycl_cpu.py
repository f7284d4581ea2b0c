"""Compare SYCL templates on Intel's CPU device with torch; measure compiling and loading.

    python -m benchmarks sycl_cpu [--rounds 20] [--write]

Stand-in figures: the device is a CPU, whose fast path is oneDNN, so they do not predict GPU times.
Both sides are checked against fp64 before a time is printed, and timed in turns. `packed each time`
includes the packing of the weight, which a program does once. The cache is an empty folder.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from ipex_inductor.ops.conv.sycl import Window, pack_kernel, pack_weight
from ipex_inductor.templates.sycl import product
from ipex_inductor.templates.sycl.calls import engines
from ipex_inductor.templates.sycl.device import device_of
from ipex_inductor.templates.sycl.kernel import DTYPES
from ipex_inductor.templates.sycl.product import Epilogue, Kernel, Operands
from ipex_inductor.templates.sycl.tiles import CPU, tiles

RESULTS = Path(__file__).parents[1] / "results" / "sycl_cpu.jsonl"
RELU = Epilogue("none", "relu")
# Rounding of the result and sums in fp32; both are far below what a wrong index does.
CLOSE = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18}


def time_in_turns(rounds, **sides):
    """Return seconds of each: the best and the median of `rounds` interleaved rounds.

    A turn is two calls, of which the second counts: torch's threads wait for some more work before
    they leave the cores to those of SYCL.
    """
    times = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            run()
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: (min(of), median(of)) for name, of in times.items()}


def check_sides(wanted, **sides):
    """Raise if a side is wrong."""
    scale = wanted.abs().max()
    for name, run in sides.items():
        found = run()
        away = (found.double() - wanted).abs().max() / scale
        assert away <= CLOSE[found.dtype], f"{name} is off by {away:.1e}"


def table_row(name, dtype, operations, times):
    """Return a row: speeds at the best time, and ratios to torch's."""
    best = times["torch"][0]
    return {"what": name, "dtype": DTYPES[dtype]} | {
        side: {
            "best_ms": round(of[0] * 1e3, 3),
            "median_ms": round(of[1] * 1e3, 3),
            "gflops": round(operations / of[0] / 1e9, 1),
            "of_torch": round(best / of[0], 2),
        }
        for side, of in times.items()
    }


def linear_case(device, dtype, size, rounds):
    """Return a square linear layer with bias and relu."""
    word = DTYPES[dtype]
    tile = tiles(CPU, word, *engines(device))[0]
    kernel = Kernel(device, product.source(tile, CPU, "rows", word, word, RELU), tile)
    x, weight = torch.randn(size, size).to(dtype), (torch.randn(size, size) / 32).to(dtype)
    bias, ready = torch.randn(size).to(dtype), pack_weight(weight)
    sides = {
        "torch": lambda: F.relu(F.linear(x, weight, bias)),
        "sycl": lambda: product.linear(kernel, x, ready, size, Operands(bias)),
        "sycl, packed each time": lambda: product.linear(
            kernel, x, pack_weight(weight), size, Operands(bias)
        ),
    }
    check_sides(F.relu(F.linear(x.double(), weight.double(), bias.double())), **sides)
    return table_row(
        f"linear {size}^3, bias, relu", dtype, 2 * size**3, time_in_turns(rounds, **sides)
    )


def conv_case(device, dtype, rounds):
    """Return a 3 x 3 convolution over 64 channels with bias and relu, channels-last."""
    word = DTYPES[dtype]
    tile = tiles(CPU, word, *engines(device))[0]
    kernel = Kernel(device, product.source(tile, CPU, "window", word, word, RELU), tile)
    window = Window((3, 3), padding=(1, 1))
    last = {"memory_format": torch.channels_last}
    x, weight = torch.randn(2, 64, 56, 56), torch.randn(64, 64, 3, 3) / 24
    x, weight = x.to(dtype).to(**last), weight.to(dtype).to(**last)
    bias, ready = torch.randn(64).to(dtype), pack_kernel(weight, window)
    sides = {
        "torch": lambda: F.relu(F.conv2d(x, weight, bias, padding=1)),
        "sycl": lambda: product.conv(kernel, x, ready, 64, window, Operands(bias)),
    }
    check_sides(F.relu(F.conv2d(x.double(), weight.double(), bias.double(), padding=1)), **sides)
    name = "conv 2x64x56x56, 64 of 3x3, bias, relu"
    return table_row(name, dtype, 2 * x.numel() * 64 * 9, time_in_turns(rounds, **sides))


START = """
import json, sys, time, torch
from resource import RUSAGE_CHILDREN, getrusage
from ipex_inductor.templates.sycl import binaries, product, worker
from ipex_inductor.templates.sycl.calls import engines
from ipex_inductor.templates.sycl.device import device_of
from ipex_inductor.templates.sycl.tiles import CPU, tiles
device = device_of(torch.device("cpu"))
if sys.argv[1] == "SPIR-V":
    binaries.stored_native = lambda *_: iter(())

def source(arch, matrix):
    tile = tiles(arch, "bf16", matrix, *engines(device)[1:])[0]
    return product.source(tile, arch, sys.argv[2], "bf16", "bf16", product.Epilogue("none", "relu"))

begin = time.perf_counter()
origin = device.load(source(CPU, device.facts["matrix"])).origin
found = {origin: time.perf_counter() - begin}
for name, arch in (("to SPIR-V", CPU), ("to SPIR-V for a matrix engine", "xe:12.60")):
    begin, before = time.perf_counter(), getrusage(RUSAGE_CHILDREN)
    worker.compile_source(source(arch, arch != CPU), device.facts, native=False)
    found[name], after = time.perf_counter() - begin, getrusage(RUSAGE_CHILDREN)
    found[name + ", a core's"] = sum(after[n] - before[n] for n in (0, 1))
print(json.dumps(found))
"""


def starts():
    """Milliseconds to the first kernel of a process: without a cache, then from what that left.

    Of rows and of windows; the least of five. To SPIR-V with the start of the child: as it took,
    and as a core worked for it.
    """
    with tempfile.TemporaryDirectory() as home:
        env = os.environ | {"IPEX_HOME": home}
        said = {}
        wanted = itertools.product(("rows", "window"), ("source", *["native", "SPIR-V"] * 5))
        for gather, origin in wanted:
            command = [sys.executable, "-c", START, origin, gather]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            assert origin in found
            for name, value in found.items():
                name += ", window" * (gather == "window")
                said[name] = min(said.get(name, 1e9), value)
    return {"what": "start"} | {name: round(value * 1e3, 1) for name, value in said.items()}


def main():
    """All of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    device = device_of(torch.device("cpu"))
    rows = [linear_case(device, dtype, 1024, given.rounds) for dtype in CLOSE]
    rows += [conv_case(device, dtype, given.rounds) for dtype in CLOSE]
    rows.append(starts())
    for each in rows:
        print(json.dumps(each), flush=True)
    if given.write:
        command = f"python -m benchmarks sycl_cpu --rounds {given.rounds} --write"
        about = {"date": time.strftime("%Y-%m-%d"), "command": command, "calls of a turn": 2}
        about |= {"device": device.name, "arch": device.arch, "driver": device.driver}
        about |= {"torch": version("torch"), "intel-sycl-rt": version("intel-sycl-rt")}
        about |= {"threads": torch.get_num_threads()}
        about |= {name: device.facts[name] for name in ("matrix", "dots")}
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in (about, *rows))


if __name__ == "__main__":
    main()
