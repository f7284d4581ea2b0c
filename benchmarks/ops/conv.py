"""Compare convolutions with epilogues on one GPU: libraries and our templates.

    python -m benchmarks ops conv [--only WORDS ...] [--tiles N] [--budget SECONDS] [--dtype DTYPE]
        [--rounds N] [--json FILE]

Each line of `SHAPES` and `WEIGHTS` is a problem of `autotune run`. Its choices are those of a
graph: torch's convolution with Inductor's epilogue, cuDNN's call with a fused epilogue, cuBLAS for
1x1 kernels, and our templates with each tile. All are checked against float64 with the autotuner's
tolerances; a wrong choice gets no time. Then they run in turns, as a captured graph over inputs
that no cache holds: medians, in microseconds of the device. The floor beside them is the time to
move every operand once (4.27 TB/s) or to do all multiplications (679 TFLOP/s), both measured on an
H200. A choice takes about a second to compile; when the budget is spent, no further shape begins.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from typing import Any

import torch

from ipex_inductor.autotune import measure, timers
from ipex_inductor.autotune.measure import Candidate
from ipex_inductor.autotune.record import Choice, Problem
from ipex_inductor.lowerings.problem import settings, shapes
from ipex_inductor.lowerings.select import library, peaks
from ipex_inductor.lowerings.tune import compiling, tuner
from ipex_inductor.target import device as target

BANDWIDTH, RATE = 4.27e12, 679e12


def conv(
    x: str, weight: str, stride: int = 1, groups: int = 1, add: bool = False, unary: str = "relu"
) -> str:
    """A line of `ipex.conv` with a bias: x BxCxHxW, weight OxCxhxw, padded as nets pad."""
    batch, _, height, width = map(int, x.split("x"))
    out, _, window, _ = map(int, weight.split("x"))
    around = 0 if window == stride else window // 2
    sides = [(size + 2 * around - window) // stride + 1 for size in (height, width)]
    other = f" {batch}x{out}x{sides[0]}x{sides[1]}:L" if add else ""
    given = "" if add else " other=None"
    return (
        f"{x}:L {weight}:L {out}{other}{given} stride={stride},{stride} padding={around},{around} "
        f"dilation=1,1 transposed=False output_padding=0,0 groups={groups} "
        f"binary='{'add' if add else 'none'}' unary='{unary}' scalars=() packed=''"
    )


def weight_grad_line(x: str, weight: str, stride: int) -> str:
    """Return a line of `ipex.conv_weight_grad`: the gradient of the weight [O, C, h, w] alone."""
    batch, _, height, width = map(int, x.split("x"))
    out, _, window, _ = map(int, weight.split("x"))
    around = 0 if window == stride else window // 2
    sides = [(size + 2 * around - window) // stride + 1 for size in (height, width)]
    return (
        f"{batch}x{out}x{sides[0]}x{sides[1]}:L {x}:L {weight}:L stride={stride},{stride} "
        f"padding={around},{around} dilation=1,1 groups=1"
    )


STEMS = {
    "7x7/2 resnet": ("128x3x224x224", "64x3x7x7", 2),
    "3x3/2 efficientnet": ("128x3x224x224", "32x3x3x3", 2),
    "3x3/2 mobilenetv3": ("128x3x224x224", "16x3x3x3", 2),
    "4x4/4 convnext": ("128x3x224x224", "128x3x4x4", 4),
    "16x16/16 vit": ("128x3x224x224", "768x3x16x16", 16),
}


def training_line(line: str) -> str:
    """Return the line without a bias, as before a batch norm in training."""
    operands = line.split()
    return " ".join([*operands[:2], "bias=None", *operands[3:]])


SHAPES = {
    "stem 7x7/2 resnet": conv("128x3x224x224", "64x3x7x7", 2),
    "resnet 256<-64@56 1": conv("128x64x56x56", "256x64x1x1", add=True),
    "stem 3x3/2 efficientnet": conv("64x3x224x224", "32x3x3x3", 2, unary="silu"),
    "stem 3x3/2 mobilenetv3": conv("64x3x224x224", "16x3x3x3", 2, unary="hardswish"),
    "stem 4x4/4 convnext": conv("64x3x224x224", "128x3x4x4", 4, unary="none"),
    "stem 16x16/16 vit": conv("64x3x224x224", "768x3x16x16", 16, unary="none"),
    "depthwise 3x3 mobilenet": conv("64x64x56x56", "64x1x3x3", 1, 64),
    "depthwise 3x3/2 efficientnet": conv("64x96x112x112", "96x1x3x3", 2, 96, unary="silu"),
    "depthwise 5x5 efficientnet": conv("64x240x28x28", "240x1x5x5", 1, 240, unary="silu"),
    "depthwise 5x5 efficientnet late": conv("64x1152x7x7", "1152x1x5x5", 1, 1152, unary="silu"),
    "depthwise 7x7 convnext": conv("64x128x56x56", "128x1x7x7", 1, 128, unary="none"),
    "depthwise 7x7 convnext late": conv("64x512x14x14", "512x1x7x7", 1, 512, unary="none"),
    "resnet 64<-64@56 1": conv("128x64x56x56", "64x64x1x1", add=True),
    "resnet 64<-256@56 1": conv("128x256x56x56", "64x256x1x1", add=True),
    "resnet 128<-256@56 1": conv("128x256x56x56", "128x256x1x1"),
    "resnet 64<-64@56 3": conv("128x64x56x56", "64x64x3x3", add=True),
    "resnet 128<-128@28 3": conv("128x128x28x28", "128x128x3x3", add=True),
    "resnet 512<-128@28 1": conv("128x128x28x28", "512x128x1x1", add=True),
    "resnet 128<-512@28 1": conv("128x512x28x28", "128x512x1x1", add=True),
    "resnet 256<-256@14 3": conv("128x256x14x14", "256x256x3x3", add=True),
    "resnet 1024<-256@14 1": conv("128x256x14x14", "1024x256x1x1", add=True),
    "resnet 256<-1024@14 1": conv("128x1024x14x14", "256x1024x1x1", add=True),
    "resnet 512<-512@7 3": conv("128x512x7x7", "512x512x3x3", add=True),
    "resnet 2048<-512@7 1": conv("128x512x7x7", "2048x512x1x1", add=True),
    "resnet 512<-2048@7 1": conv("128x2048x7x7", "512x2048x1x1", add=True),
}

SHAPES |= {
    f"training {name}": training_line(conv(*stem, unary="none")) for name, stem in STEMS.items()
}
WEIGHTS = {f"weight {name}": weight_grad_line(*stem) for name, stem in STEMS.items()}
# Time by the number of images: what a kernel takes for each, and whatever their number.
for images in (32, 64, 128, 256, 512):
    SHAPES |= {
        f"images {images} {name}": conv(f"{images}x512x28x28", "128x512x1x1", add=add)
        for name, add in (("128<-512@28", True), ("128<-512@28 no addend", False))
    }


def measure_choices(name: str, line: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each choice of the problem."""
    known = str(target.current("cuda")), settings.settings_of("cuda")
    (problem,) = shapes.problems([f"{op_of(name)} {options.dtype} {line}"], *known)
    device = torch.device("cuda")
    trial = tuner._trial(problem, device)
    moved, operations = peaks.work(problem)
    floor = max(moved / BANDWIDTH, operations / RATE) * 1e6
    rows, candidates = [], []
    calls = library.calls(problem)
    templates = [call for call in calls if call.parameters]
    for call in [c for c in calls if not c.parameters] + templates[: options.tiles]:
        row: dict[str, Any] = {"shape": name, "choice": call.name, "floor, us": round(floor, 1)}
        row |= dict(call.parameters)
        rows.append(row)
        begin = time.monotonic()
        found = verified(problem, call.choice, trial, row)
        row["compiled in, s"] = round(time.monotonic() - begin, 2)
        if found is not None:
            candidates.append((row, found))
    buffers = tuner._buffers([trial], device)
    clock = timers.clock_of(device)
    rounds = [(row, clock.prepare(candidate.run, buffers)) for row, candidate in candidates]
    times: list[list[float]] = [[] for _ in rounds]
    for _ in range(options.rounds):
        for kept, (_, round_) in zip(times, rounds, strict=True):
            kept.append(round_())
    for kept, (row, _) in zip(times, rounds, strict=True):
        row["median, us"] = round(statistics.median(kept), 2)
        row["least, us"] = round(min(kept), 2)
    return rows


def op_of(name: str) -> str:
    """Return the op of the line of that name."""
    return "ipex.conv_weight_grad.default" if name in WEIGHTS else "ipex.conv.default"


def verified(
    problem: Problem, choice: Choice, trial: tuner.Trial, row: dict[str, Any]
) -> Candidate | None:
    """The choice compiled, if it is right; or why not, in `row`."""
    try:
        graph = compiling.start_choice(problem, choice, trial.inputs).wait_compiled()
        candidate = Candidate(choice, graph.run, graph.takes())
    except measure.FATAL:
        raise
    except Exception as error:
        row["failed"] = f"it does not compile: {measure.first_line(error)}"
        return None
    row |= candidate.takes
    found = measure.verify_candidate(candidate, trial.judge, trial.inputs)
    if isinstance(found, float):
        row["error"], row["allowed"] = found, trial.judge.tolerance
        return candidate
    row["failed"] = found.reason
    return None


def table(rows: list[dict[str, Any]]) -> None:
    """A line for the floor and each choice of one shape, the fastest marked."""
    times = [row["median, us"] for row in rows if "median, us" in row]
    for row in rows:
        tile = ",".join(str(v) for k, v in row.items() if k.startswith("BLOCK") or k == "num_warps")
        what = f"{row['choice']} {tile}"
        time_ = row.get("median, us")
        mark = "*" if time_ and time_ == min(times) else " "
        said = f"{time_:9.1f}" if time_ else row.get("failed", "")
        takes = f"{row.get('registers', ''):>4} regs" if "registers" in row else ""
        print(
            f"{row['shape']:<24} {row['floor, us']:8.1f} {what:<40} {said}{mark} {takes}",
            flush=True,
        )


def main() -> None:
    """All shapes; ends with 1 if any choice failed or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="shapes whose names have a word")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="cuDNN times its kernels")
    parser.add_argument("--tiles", type=int, default=9, help="of a template, the first so many")
    parser.add_argument("--budget", type=float, default=90, help="seconds")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    os.environ["IPEX_HOME"] = tempfile.mkdtemp()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    begin, right = time.monotonic(), True
    print(f"{'shape':<24} {'floor':>8} {'choice':<40} {'us':>9}")
    for name, line in {**SHAPES, **WEIGHTS}.items():
        if not any(word in name for word in options.only):
            continue
        if time.monotonic() - begin > options.budget:
            print(f"{name:<24} left out: the budget is spent")
            continue
        rows = measure_choices(name, line, options)
        table(rows)
        right &= not any("failed" in row for row in rows)
        if options.json:
            import triton

            known = {"date": datetime.now(UTC).strftime("%Y-%m-%d")}
            known |= {"device": str(target.current("cuda")), "torch": str(torch.__version__)}
            known |= {"triton": triton.__version__, "dtype": options.dtype}
            known |= {
                "command": " ".join(["python", "-m", "benchmarks", "ops", "conv", *sys.argv[1:]])
            }
            with open(options.json, "a") as file:
                file.writelines(json.dumps({**known, **row}) + "\n" for row in rows)
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
