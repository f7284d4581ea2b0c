"""Compare our Triton kernels compiled by the Tritons of several torch versions.

    python -m benchmarks other_tritons build FOLDER --triton PATH ...
    python -m benchmarks other_tritons use FOLDER [--rounds N] [--json FILE]

The shipped table was measured with one torch, and each torch compiles our templates by its own
Triton. Each kernel that the table selects is rendered alone (without Inductor), with a bias, an
addend and a relu unless it is a residual convolution, a skinny GEMM or a gradient. It is compiled
for that GPU by each Triton (each installed into a folder), and run: on memory full of NaN, against
torch in fp32, and in turns with the others, in a CUDA graph of ten calls on the same operands.
`build` needs no GPU, `use` needs none of these Tritons. A row for each problem and Triton: error
and tolerance as shares of the largest value, whether the bits equal those of the first Triton,
registers and spills of a thread (4 bytes each), and the median of some rounds.
"""

import argparse
import ctypes
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # templates rendered alone
from ipex_inductor.autotune import select
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.pool import pool
from ipex_inductor.autotune.record import Choice, Operand, Problem, decode_problem
from ipex_inductor.lowerings.conv.conv_many import shared_by_boxes
from ipex_inductor.target import device as target
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.triton import (
    conv_depthwise,
    conv_fprop,
    conv_grouped,
    conv_small_channel,
    conv_small_channel_weight,
    conv_strips,
    conv_tma,
    persistent,
    skinny,
    weight_stationary,
)
from ipex_inductor.templates.triton import residual as shortcuts
from support.rendered_templates import READY, shortcut, source

TABLE = "sm_90:NVIDIA-H200"
COMPILE = Path(__file__).parents[1] / "common" / "other_tritons_compile.py"
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "i8"}
TILES = {
    "stem": conv_small_channel,
    "depthwise": conv_depthwise,
    "strips": conv_strips,
    "fprop": conv_fprop,
    "boxes": conv_tma,
    "grouped": conv_grouped,
    "stem_weight": conv_small_channel_weight,
    "streamed": weight_stationary,
    "persistent": persistent,
}
ROUNDED = 2.0**-8  # of a result in bf16: a unit in its last place, of which rounding is half
ADDED = 1e-4  # of sums in fp32, whose order differs
CALLS = 10  # in a graph


@dataclass
class Made:
    """A kernel with what it runs on; the operands without values where there is no GPU."""

    text: str
    operands: dict[str, torch.Tensor]  # `OUT` or `y` is written
    grid: tuple[int, ...]
    warps: int
    stages: int
    wanted: Any  # () -> exact result, and what `found` makes of the operands
    found: Any
    allowed: float
    function: str = "kernel"
    constants: Any = ()

    @property
    def signature(self) -> dict[str, str]:
        """As Triton takes it."""
        pointers = {name: f"*{SHORT[t.dtype]}" for name, t in self.operands.items()}
        return pointers | dict.fromkeys(dict(self.constants), "constexpr")


def template_winners() -> list[tuple[Problem, Choice]]:
    """Return problems of the shipped table that a template of ours won."""
    chosen = []
    for key, measured in pool(Records(select.SHIPPED)).items():
        problem, best = decode_problem(key), measured.best()
        if best is None or problem.arch != TABLE or not best.choice.name.startswith("ipex."):
            continue
        kind = best.choice.name.rsplit(".", 1)[1]
        pooled = problem.op == "ipex.conv_pool.default"  # apart, it is a stem's
        if (not pooled and kind in (*TILES, "few_rows")) or kind.startswith("shortcut"):
            chosen.append((problem, best.choice))
        else:
            print(f"left out, as nothing here makes its operands: {kind} of {problem.op}")
    return sorted(chosen, key=lambda each: (each[1].name, str(each[0])))


def random_tensor(operand: Operand, device: str) -> torch.Tensor:
    """Return a random tensor of that layout."""
    dtype = getattr(torch, operand.dtype)
    made = torch.empty_strided(operand.shape, operand.stride, dtype=dtype, device=device)
    return made if device == "meta" else made.normal_()


def render_kernel(problem: Problem, choice: Choice, device: str) -> Made:
    """Return the kernel of that choice on operands of that device."""
    kind = choice.name.rsplit(".", 1)[1]
    values = choice.parameters
    operands = [random_tensor(operand, device) for operand in problem.operands]
    if kind == "few_rows":
        return skinny_case(operands, values)
    if kind.startswith("shortcut"):
        return ending(operands, problem.constants["stride"], kind.split("_")[1], values)
    tile_of = TILES[kind].Tile
    tile = tile_of(*(values[f.name] for f in fields(tile_of)))
    if kind == "stem_weight":
        return gradient_case(operands, problem.constants, tile, values)
    return window_case(kind, operands[:2], problem.constants, tile)


def resident_programs(kind: str, tile: Any, terms: int) -> int:
    """Return the number of programs that run at once, if the template takes it."""
    known = target.find_target(TABLE)
    if kind == "streamed":
        each = tile.fitting(known.shared_memory, terms, 2, True)
    elif kind == "persistent":
        each = known.shared_memory // tile.shared(2)
    else:
        each = known.shared_memory // shared_by_boxes(tile, (terms,), torch.bfloat16)
    return known.multiprocessors * max(1, each)


def window_case(kind: str, operands: list[torch.Tensor], given: Any, tile: Any) -> Made:
    """Return the case of a convolution, or of a linear layer as a 1x1 convolution."""
    x, weight = operands
    if weight.dim() == 2:
        x = x.reshape(-1, x.shape[-1])[:, :, None, None]
        weight = weight[:, :, None, None]
    if "groups" not in given:
        given = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    around = {name: list(given[name]) for name in ("stride", "padding", "dilation")}
    case = {"tile": [*vars(tile).values()], "groups": given["groups"], "last": True}
    case["template"] = kind
    if kind in ("streamed", "persistent", "boxes"):
        case["programs"] = resident_programs(kind, tile, weight.shape[1])
    text, constants, factor, grid = READY[kind](x, weight, case, **around)

    def exact() -> torch.Tensor:
        sums = torch.conv2d(
            x.float(), weight.float(), bias.float(), **around, groups=given["groups"]
        )
        rows = sums.permute(0, 2, 3, 1).reshape(out.shape)
        return torch.relu(rows + other.float())

    rows = torch.conv2d(
        x.to("meta"), weight.to("meta"), None, **around, groups=given["groups"]
    ).numel()
    bias, other, out = behind(x, rows // len(weight), len(weight))
    names = {"X": x, "W": factor, "BIAS": bias, "OTHER": other, "OUT": out}
    rendered = source(text, {**constants, "ALLOW_TF32": False}, len(weight))
    stages = getattr(tile, "num_stages", 2)
    return Made(rendered, names, grid, tile.num_warps, stages, exact, lambda: out, ROUNDED)


def behind(x: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """A bias, an addend and the result."""
    sizes = (columns,), (rows, columns)
    bias, other = (torch.empty(size, dtype=x.dtype, device=x.device) for size in sizes)
    if x.device.type != "meta":
        bias.normal_()
        other.normal_()
    return bias, other, torch.empty_like(other)


def ending(
    operands: list[torch.Tensor], stride: tuple[int, ...], kind: str, values: dict[str, Any]
) -> Made:
    """Two products that are added, at the end of a block."""
    x, weight, bias, beside, projection = operands
    tile_of = (conv_tma if kind == "boxes" else weight_stationary).Tile
    tile = tile_of(*(values[f.name] for f in fields(tile_of)))
    case = {"kind": kind, "tile": [*vars(tile).values()], "stride": list(stride)}
    known = target.find_target(TABLE)
    terms = x.shape[1], beside.shape[1]
    if kind == "boxes":
        fits = known.shared_memory // shared_by_boxes(tile, terms, torch.bfloat16)
    else:
        taken = shortcuts.shared(tile, *terms, 2)
        fits = min(tile.programs, known.shared_memory // taken)
    case["programs"] = known.multiprocessors * max(1, fits)
    text, constants, grid = shortcut(x, beside, len(weight), case)
    _, other, out = behind(x, x.numel() // x.shape[1], len(weight))

    def exact() -> torch.Tensor:
        first = torch.conv2d(x.float(), weight.float(), bias.float())
        second = torch.conv2d(beside.float(), projection.float(), None, list(stride))
        return (first + second).permute(0, 2, 3, 1).reshape(out.shape)

    factors = {"X": x, "W": weight.flatten(1), "S": beside, "P": projection.flatten(1)}
    names = {**factors, "BIAS": bias, "OTHER": other, "OUT": out}
    given = {**constants, "ALLOW_TF32": False}
    rendered = source(
        text, given, len(weight), epilogue=False
    )  # of which the template has its bias
    stages = tile.num_stages
    return Made(rendered, names, grid, tile.num_warps, stages, exact, lambda: out, ROUNDED)


def gradient_case(
    operands: list[torch.Tensor], given: Any, tile: Any, values: dict[str, Any]
) -> Made:
    """Return the case of a small-channel convolution's weight gradient, in parts."""
    from ipex_inductor.ops.conv.conv_weight import ALONE
    from ipex_inductor.ops.conv.small_channel import from_matrix, runs

    grad, x, weight = operands
    around = {name: list(given[name]) for name in ("stride", "padding")}
    pixels = grad.numel() // grad.shape[1]
    known = target.find_target(TABLE)
    steps = ceil(pixels / tile.BLOCK_M / (known.multiprocessors * values["programs"]))
    case = {"last": True, "weight": [*weight.shape], "tile": [*vars(tile).values()]}
    case["steps"] = steps
    text, constants, _, grid = READY["stem_weight"](x, grad, case, **around, dilation=None)
    size = constants["PROGRAMS"], len(weight), constants["TERMS"]
    out = torch.empty(size, device=x.device)

    def exact() -> torch.Tensor:
        window = (*around.values(), [1, 1], False, [0, 0], 1)
        backward = torch.ops.aten.convolution_backward
        result: torch.Tensor = backward(
            grad.float(), x.float(), weight.float(), None, *window, ALONE
        )[1]
        return result

    def found() -> torch.Tensor:
        taken = runs(x.shape[1:], weight.shape[2:], *around.values(), True)
        return from_matrix(out.sum(0).t(), taken, weight.shape[1], weight.shape[2:], True)

    rendered = source(text, {**constants, "ALLOW_TF32": False}, constants["TERMS"], epilogue=False)
    names = {"GRAD": grad, "X": x, "BIAS": grad, "OTHER": grad, "OUT": out}
    return Made(rendered, names, grid, tile.num_warps, tile.num_stages, exact, found, ADDED)


def skinny_case(operands: list[torch.Tensor], values: dict[str, Any]) -> Made:
    """Return the case of a skinny GEMM."""
    x, weight = operands[0].reshape(-1, operands[0].shape[-1]), operands[1]
    (rows, size), columns = x.shape, len(weight)
    tile = skinny.Tile(**values)
    constants = tile.parameters(rows, size, 2)
    parts = ceil(size / constants["TERMS"])
    made = 1 if tile.joined else parts
    out = torch.empty(made, rows, columns, device=x.device)
    constants |= {"M": rows, "N": columns, "K": size, "weight_stride": weight.stride(0)}
    constants |= {"x_stride": x.stride(0), "x_step": x.stride(1)}
    names = {"x": x, "weight": weight, "y": out}
    if tile.joined:
        room = tile.workspace(rows, columns)
        names["work"] = torch.zeros(room, dtype=torch.uint8, device=x.device)
    return Made(
        skinny.source(rows == 1, tile),
        names,
        (tile.blocks(columns), tile.parts if tile.joined else parts),
        tile.warps,
        tile.stages,
        lambda: x.float() @ weight.float().t(),
        lambda: out.sum(0),
        ADDED,
        "product",
        constants,
    )


def describe_kernel(kernel: Made) -> str:
    """Return a kernel's line for the compiling program."""
    about = {"text": kernel.text, "function": kernel.function, "arch": 90}
    about |= {"signature": kernel.signature, "constants": dict(kernel.constants)}
    return json.dumps(about | {"warps": kernel.warps, "stages": kernel.stages})


def build(folder: Path, tritons: list[Path]) -> None:
    """Compile every kernel by every Triton."""
    lines = [describe_kernel(render_kernel(*each, "meta")) for each in template_winners()]

    def compiled(path: Path) -> str:
        place = folder / path.name
        place.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(COMPILE), str(place)]
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "PYTHONPATH": str(path), "TRITON_CACHE_DIR": cache}
            asked = {"env": env, "input": "\n".join(lines), "text": True}
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, **asked)
        (place / "kernels.jsonl").write_text(done.stdout)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        wrong = [row for row in rows if "wrong" in row]
        return f"{rows[0]['triton']}: {len(rows)} kernels, {len(wrong)} not compiled {wrong[:3]}"

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for said in threads.map(compiled, tritons):
            print(said, flush=True)


class Loaded:
    """A cubin, launched by the driver."""

    def __init__(self, cubin: bytes, about: dict[str, Any], kernel: Made) -> None:
        from triton.runtime import driver

        utils = driver.active.utils
        device = torch.cuda.current_device()
        taken = utils.load_binary(about["name"], cubin, about["shared"], device)
        self._module, function, self.registers, self.spills, _ = taken
        self._function = ctypes.c_void_p(function)
        self._grid = (*kernel.grid, 1, 1)[:3]
        self._about = about
        room = about["scratch"] * self._grid[0] * self._grid[1]
        self._scratch = torch.empty(max(room, 1), dtype=torch.uint8, device="cuda")
        pointers = [t.data_ptr() for t in kernel.operands.values()]
        more = about["parameters"] - len(pointers)
        given = [*pointers, *[self._scratch.data_ptr() if room else 0, 0][:more]]
        self._values = [ctypes.c_uint64(each) for each in given]
        self._pointers = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, self._values))

    def __call__(self) -> None:
        """On the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        block, shared = 32 * self._about["warps"], self._about["shared"]
        size = (*self._grid, block, 1, 1, shared)
        cuda._call("cuLaunchKernel", self._function, *size, stream, self._pointers, None)


def capture_calls(kernel: Loaded) -> torch.cuda.CUDAGraph:
    """Capture several calls in a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            kernel()
    return graph


def time_in_turns(graphs: list[torch.cuda.CUDAGraph], rounds: int) -> list[float]:
    """Return the medians of a call, in turns, in microseconds."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, taken in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1000 / CALLS)
    return [statistics.median(each[1:]) for each in times]


def raced(
    problem: Problem, choice: Choice, codes: dict[str, tuple[bytes, Any]], rounds: int
) -> list[dict[str, Any]]:
    """A row for each Triton."""
    kernel = render_kernel(problem, choice, "cuda")
    digest = hashlib.sha256(describe_kernel(kernel).encode()).hexdigest()
    wanted = kernel.wanted()
    rows, graphs, first = [], [], None
    for triton, (cubin, about) in codes.items():
        row: dict[str, Any] = {"triton": triton}
        rows.append(row)
        if about["of"] != digest:
            sys.exit(f"{choice.name} was built of another text: build again")
        if "wrong" in about:
            row["wrong"] = about["wrong"]
            continue
        out = kernel.operands.get("OUT", kernel.operands.get("y"))
        assert out is not None
        out.fill_(float("nan"))
        call = Loaded(cubin, about, kernel)
        call()
        torch.cuda.synchronize()
        result = kernel.found().clone()
        first = result if first is None else first
        row["error"] = float((result.float() - wanted).abs().max() / wanted.abs().max())
        row |= {"allowed": kernel.allowed, "bits of the first": torch.equal(result, first)}
        row |= {"registers": call.registers, "spills": call.spills, "shared": about["shared"]}
        if not row["error"] <= kernel.allowed:
            row["wrong"] = "its values"
        graphs.append((row, call, capture_calls(call)))  # which reads memory of the call
    for (row, *_), taken in zip(
        graphs, time_in_turns([g for *_, g in graphs], rounds), strict=True
    ):
        row |= {"median, us": round(taken, 2), "rounds": rounds}
    return rows


def use(folder: Path, rounds: int, file: Path | None) -> None:
    """Values and speed of what `build` made, on this GPU."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    places = [p for p in folder.iterdir() if (p / "kernels.jsonl").exists()]
    known = [[*map(json.loads, (p / "kernels.jsonl").read_text().splitlines())] for p in places]
    pairs = zip(places, known, strict=True)
    tritons = sorted(pairs, key=lambda each: [*map(int, each[1][0]["triton"].split("."))])
    about = {"date": time.strftime("%Y-%m-%d"), "device": str(target.current(torch.device("cuda")))}
    about |= {
        "torch": torch.__version__,
        "command": "python -m benchmarks other_tritons use FOLDER",
    }
    found = []
    for number, (problem, choice) in enumerate(template_winners()):
        codes = {}
        for place, rows in tritons:
            row, cubin = rows[number], place / f"{number}.cubin"
            codes[row["triton"]] = (cubin.read_bytes() if cubin.exists() else b"", row)
        shapes = ", ".join("x".join(map(str, o.shape)) for o in problem.operands)
        what = {"kernel": number, "op": problem.op, "operands": shapes, "choice": choice.name}
        for row in raced(problem, choice, codes, rounds):
            found.append({**what, **dict(choice.parameters), **row})
            print(json.dumps(found[-1]), flush=True)
        torch.cuda.empty_cache()
    if file:
        with file.open("a") as out:
            out.writelines(json.dumps({**about, **row}) + "\n" for row in found)
    summarize(found)


def summarize(found: list[dict[str, Any]]) -> None:
    """Return counts, errors and relative speed by Triton and template."""
    first = {}
    for row in found:
        if "median, us" in row and "wrong" not in row:
            first.setdefault(row["kernel"], row["median, us"])
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found:
        groups.setdefault((row["triton"], row["choice"]), []).append(row)
    for (triton, choice), rows in sorted(groups.items()):
        wrong = sum("wrong" in row for row in rows)
        ran = [row for row in rows if "median, us" in row and "wrong" not in row]
        ratios = [row["median, us"] / first[row["kernel"]] for row in ran]
        mean = statistics.geometric_mean(ratios) if ratios else float("nan")
        line = f"{triton:7} {choice:30} {len(rows):3} kernels, {wrong} wrong"
        print(f"{line}, time {mean:.3f} (at most {max(ratios, default=0):.3f}) of the first's")


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("build", "use"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--triton", type=Path, nargs="+", default=[], help="folders to build by")
    parser.add_argument("--rounds", type=int, default=8, help="two at least; the first is left out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.what == "build":
        build(options.folder, options.triton)
    else:
        use(options.folder, options.rounds, options.json)


if __name__ == "__main__":
    main()
