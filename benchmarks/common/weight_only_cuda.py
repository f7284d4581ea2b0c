"""Time linear layers on quantized weights on an NVIDIA GPU; see `studies/weight_only.py`.

Each way is captured in a CUDA graph that reads several copies of the weight, together larger than
caches. A result is compared with fp32 before its time is printed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.lowerings import register
from ipex_inductor.ops.quant.weight_only import INTEGERS, NIBBLES, STORED, Scheme, dequantize_weight
from ipex_inductor.templates.triton.weight_only import TILES, fits

SHAPES = "4096x4096,14336x4096,4096x14336,128256x4096"  # N x K of a Llama of 8e9 parameters
ROWS = "1,16,64,512"
# Weight dtype and group size, 0 for a row; the first is measured in all sizes.
KINDS = (("int4", 128), ("int4", 64), ("int4", 32), ("int8", 0), ("nf4", 64), ("fp8", 0))
QUICK = "14336x4096"  # where the other kinds are measured by `quick`, for one row
BF16 = torch.bfloat16
TOTAL = 100 << 20  # bytes of all copies of a weight, at least
REPLAYS, ROUNDS = 10, 5
ALLOWED = 2.0**-7  # of the result's root mean square: roundings of the weight and the result
OPTIONS = {"strict": True, "capture": False, "weight_prologue": False}


@dataclass
class Layer:
    """A quantized weight [N, K] with its scales, and zero points of int4."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    scheme: Scheme

    @property
    def size(self) -> int:
        """Return the bytes of all tensors."""
        return sum(t.nbytes for t in (self.weight, self.scales, self.zeros) if t is not None)

    def dequantize(self, depth: int) -> Tensor:
        """Return the weight in fp32."""
        return dequantize_weight(self.weight, self.scales, self.zeros, self.scheme, depth)


def make_layer(columns: int, depth: int, kind: tuple[str, int]) -> Layer:
    """Return a random layer; int4 has zero points."""
    name, group = kind[0], kind[1] or depth
    width = depth // 2 if name in NIBBLES else depth
    bits = torch.randint(0, 120, (columns, width), dtype=torch.uint8, device="cuda")
    shape, dtype = (columns, depth // group), torch.float16 if kind[1] else torch.float32
    scales = (torch.rand(shape, device="cuda") + 0.5).div(depth).to(dtype)
    zeros = (
        torch.randint(0, 16, shape, device="cuda").to(INTEGERS[name]) if name == "int4" else None
    )
    return Layer(bits.view(STORED[name]), scales, zeros, Scheme(name, group, "bfloat16"))


def compile_ours(layers: Sequence[Layer], x: Tensor, tile: Sequence[int]) -> Callable[[], Any]:
    """Return a call of all layers by the template; an empty tile is chosen by the sizes."""
    ipex, scheme = torch.ops.ipex, layers[0].scheme
    given = layers[0].scales.dtype, layers[0].zeros is not None, [*tile]
    words = [
        ipex.weight_only_factors(y.scales, y.zeros, scheme.weight_dtype, x.dtype) for y in layers
    ]

    def call(x: Tensor, weights: list[Tensor], words: list[Tensor]) -> list[Tensor]:
        return [
            ipex.weight_only_rows(x, w, f, None, *scheme[:2], *given).to(BF16)
            for w, f in zip(weights, words, strict=True)
        ]

    torch.compiler.reset()  # what another tile compiled counts as a recompilation
    run = torch.compile(call, backend="ipex", options=OPTIONS, dynamic=False)
    weights = [y.weight for y in layers]
    return lambda: run(x, weights, words)


def compile_dequantized(layers: Sequence[Layer], x: Tensor) -> Callable[[], Any]:
    """Return a call of all layers by a library's GEMM on dequantized weights."""

    def call(x: Tensor, tensors: list[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
        # As `ops.quant.weight_only.compute_reference` has it.
        return [
            F.linear(x, dequantize_weight(w, s, z, layers[0].scheme, x.shape[1]).to(BF16))
            for w, s, z in tensors
        ]

    torch.compiler.reset()
    run = torch.compile(call, backend="ipex", options=OPTIONS, dynamic=False)
    tensors = [(y.weight, y.scales, y.zeros) for y in layers]
    return lambda: run(x, tensors)


def pack_for_torch(layer: Layer, depth: int, x: Tensor) -> Callable[[], Tensor]:
    """Return a call of torch's int4 kernel on a layer in groups of 128."""
    columns = len(layer.scales)
    swapped = layer.weight << 4 | layer.weight >> 4  # it has even columns in high nibbles
    packed = torch._convert_weight_to_int4pack(swapped, 8)
    scales = layer.scales.float().t()
    assert layer.zeros is not None
    shift = (8 - layer.zeros.float()).t() * scales
    both = torch.stack([scales, shift], -1).to(BF16).reshape(depth // 128, columns, 2).contiguous()
    return lambda: torch._weight_int4pack_mm(x, packed, 128, both)


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], list[Any]]:
    """Return a call of all calls, one after the other."""
    return lambda: [call() for call in calls]


def capture_seconds(call: Callable[[], Any]) -> float:
    """Return the least seconds of a replay of a call, captured in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / REPLAYS / 1e3)
    return best


def list_ways(
    layers: list[Layer], x: Tensor, all_tiles: bool, dequantizes: bool
) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Yield name, bytes of a weight and call of each way to compute layers of a kind.

    Args:
        layers: of one kind.
        x: [M, K].
        all_tiles: each tile that fits is a way.
        dequantizes: a GEMM on dequantized weights is a way, for more than 64 rows.
    """
    scheme, (rows, depth) = layers[0].scheme, x.shape
    label = f"{scheme.weight_dtype} {'row' if scheme.group_size == depth else scheme.group_size}"
    size = layers[0].size
    yield label, size, compile_ours(layers, x, [])
    for tile in TILES if all_tiles else ():
        if fits(tile, rows, depth, scheme.group_size):
            yield f"{label} {astuple(tile)}", size, compile_ours(layers, x, astuple(tile))
    if scheme[:2] != KINDS[0]:
        return
    if dequantizes and rows > 64:
        yield "dequantized, cuBLAS", size, compile_dequantized(layers, x)
    calls = [pack_for_torch(layer, depth, x) for layer in layers]
    yield "torch int4pack 128", size, in_turn(calls)


def report(label: str, size: int, call: Callable[[], Any], base: float, wanted: Tensor) -> None:
    """Verify and time a call of several layers, and print a row."""
    begin = time.perf_counter()
    first = call()
    copies, result = len(first), first[0].float()
    off = float((result - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    if not off <= ALLOWED:
        print(f"  {label:36} WRONG: off by {off:.2e}", flush=True)
        return
    seconds = capture_seconds(call) / copies
    took = time.perf_counter() - begin
    print(
        f"  {label:36} {seconds * 1e6:9.2f} us {size / seconds / 1e9:7.0f} GB/s"
        f" {base / seconds:5.2f} x  ({took:.1f} s)",
        flush=True,
    )


def time_library(x: Tensor, columns: int) -> float:
    """Return the seconds of the library's GEMM in bf16."""
    count = -(-TOTAL // (2 * columns * x.shape[1]))
    weights = [x.new_empty(columns, x.shape[1]).normal_() for _ in range(count)]
    return capture_seconds(lambda: [F.linear(x, weight) for weight in weights]) / count


def measure(shape: str, rows: int, quick: bool, all_tiles: bool) -> None:
    """Print a table for a shape and a number of rows; see `run`."""
    kinds = KINDS[:1] if quick and (shape, rows) != (QUICK, 1) else KINDS
    columns, depth = map(int, shape.split("x"))
    x = torch.randn(rows, depth, dtype=BF16, device="cuda")
    base = time_library(x, columns)
    size = 2 * columns * depth
    print(f"[{rows}, {depth}] x [{columns}, {depth}]", flush=True)
    print(f"  {'bf16, cuBLAS':36} {base * 1e6:9.2f} us {size / base / 1e9:7.0f} GB/s", flush=True)
    for kind in kinds:
        first = make_layer(columns, depth, kind)
        count = max(1, -(-TOTAL // first.size))
        layers = [first, *(make_layer(columns, depth, kind) for _ in range(count - 1))]
        wanted = x.float() @ first.dequantize(depth).t()
        for label, bytes_read, call in list_ways(layers, x, all_tiles, not quick or shape == QUICK):
            try:
                report(label, bytes_read, call, base, wanted)
            except RuntimeError as error:  # of one way, such as torch's own
                print(f"  {label:36} FAILED: {str(error).splitlines()[0]}", flush=True)


@torch.no_grad()
def run(shapes: str, rows: str, quick: bool, all_tiles: bool) -> None:
    """Print all tables.

    Args:
        shapes: N x K, with commas between.
        rows: numbers of rows, with commas between.
        quick: measure kinds but the first for one row of `QUICK` alone, and dequantize there alone.
        all_tiles: also measure each tile that fits.
    """
    register()
    begin = time.perf_counter()
    for shape in shapes.split(","):
        for count in map(int, rows.split(",")):
            measure(shape, count, quick, all_tiles)
    print(f"{time.perf_counter() - begin:.0f} s in all", flush=True)
