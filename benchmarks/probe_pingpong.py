# ruff: noqa: D103, I001
"""A product with bias and GELU in Gluon, two groups of warps in turns: one multiplies, one stores.

    python benchmarks/probe_pingpong.py [--json FILE]

A warp has the copy engine load steps of x and the weight, block after block; two groups of four
warps take blocks in turns, so that one's epilogue lies under the other's products. Beside cuBLAS's
bare product, cuBLASLt's with a tanh GELU, cuBLAS's with a second kernel, and the template
`persistent` rendered alone; bf16, medians of captured graphs over operands in turns, us.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

Q0 = gl.constexpr(0.499991716)
Q1 = gl.constexpr(-0.39861246)
Q2 = gl.constexpr(0.2476803)
Q3 = gl.constexpr(-0.126280549)
Q4 = gl.constexpr(0.0520567193)
Q5 = gl.constexpr(-0.0164943325)
Q6 = gl.constexpr(0.00376363698)
Q7 = gl.constexpr(-0.000571485857)
Q8 = gl.constexpr(5.11044963e-05)
Q9 = gl.constexpr(-2.02256304e-06)
SHAPES = [(4096, 768, 3072), (4096, 1024, 4096), (8192, 4096, 4096), (8192, 4096, 11008)]
SHAPES += [(24576, 768, 3072)]  # BERT-base's at 64 x 384 words
# Rows and columns of a group's block, stages.
TILES = [(128, 128, 4), (128, 128, 3), (64, 256, 4), (64, 256, 3), (64, 128, 6), (128, 64, 6)]


@gluon.jit
def gelu(x, HOW: gl.constexpr):
    if HOW == "erf":
        a = gl.where(x < 0.0, -x, x)
        a = gl.where(a < 4.5, a, 4.5)
        q = a * Q9 + Q8
        q = q * a + Q7
        q = q * a + Q6
        q = q * a + Q5
        q = q * a + Q4
        q = q * a + Q3
        q = q * a + Q2
        q = q * a + Q1
        q = q * a + Q0
        x = gl.where(x > 0.0, x, 0.0) - a * q * gl.exp2(a * a * -0.7213475204444817)
    elif HOW == "tanh":
        u = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
        x = x - x / (gl.exp2(u * 2.885390081777927) + 1.0)
    return x


@gluon.jit
def place(block, BLOCKS_M: gl.constexpr, BLOCKS_N: gl.constexpr, GROUP: gl.constexpr):
    within = block % (GROUP * BLOCKS_N)
    above = block // (GROUP * BLOCKS_N) * GROUP
    high = gl.minimum(BLOCKS_M - above, GROUP)
    return above + within % high, within // high


@gluon.jit
def load(
    given,
    weights,
    xs,
    ws,
    full,
    empty,
    BLOCKS_M: gl.constexpr,
    BLOCKS_N: gl.constexpr,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    step = 0
    for block in range(gl.program_id(0), BLOCKS_M * BLOCKS_N, gl.num_programs(0)):
        row, column = place(block, BLOCKS_M, BLOCKS_N, GROUP)
        for k in range(0, K, BK):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(
                given, [row * BM, k], full.index(stage), xs.index(stage)
            )
            tma.async_copy_global_to_shared(
                weights, [column * BN, k], full.index(stage), ws.index(stage)
            )
            step += 1


@gluon.jit
def multiply(
    FIRST: gl.constexpr,
    out,
    bias,
    xs,
    ws,
    ys,
    full,
    empty,
    turns,
    BLOCKS_M: gl.constexpr,
    BLOCKS_N: gl.constexpr,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    HOW: gl.constexpr,
):
    STEPS: gl.constexpr = K // BK
    held: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    step = FIRST * STEPS
    turn = 1 - FIRST  # the parity to wait for: the first group's first turn is at once
    for block in range(
        gl.program_id(0) + FIRST * gl.num_programs(0), BLOCKS_M * BLOCKS_N, 2 * gl.num_programs(0)
    ):
        row, column = place(block, BLOCKS_M, BLOCKS_N, GROUP)
        acc = gl.zeros([BM, BN], gl.float32, held)
        n = column * BN + gl.arange(0, BN, gl.SliceLayout(0, held))
        b = gl.load(bias + n).to(gl.float32)
        # Barriers tell two phases apart, no more: a group looks at none before it is its turn.
        mbarrier.wait(turns.index(FIRST), turn)
        turn = 1 - turn
        for k in range(STEPS):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            acc = warpgroup_mma(
                xs.index(stage), ws.index(stage).permute((1, 0)), acc, is_async=True, use_acc=k > 0
            )
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        mbarrier.arrive(turns.index(1 - FIRST))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        step += STEPS  # the other group's block
        made = gelu(acc + b[None, :], HOW).to(gl.bfloat16)
        tma.store_wait(0)
        ys.store(made)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [row * BM, column * BN], ys)
    tma.store_wait(0)


@gluon.jit
def linear(
    given,
    weights,
    BIAS,
    out,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    HOW: gl.constexpr,
):
    """gelu(X @ W.T + BIAS): x [M, K], weight [N, K], bias [N], all bf16, of whole blocks."""
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], given.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], weights.layout)
    ys = gl.allocate_shared_memory(gl.bfloat16, [2, BM, BN], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    BLOCKS_M: gl.constexpr = M // BM
    BLOCKS_N: gl.constexpr = N // BN
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    0,
                    out,
                    BIAS,
                    xs,
                    ws,
                    ys.index(0),
                    full,
                    empty,
                    turns,
                    BLOCKS_M,
                    BLOCKS_N,
                    GROUP,
                    K,
                    BM,
                    BN,
                    BK,
                    STAGES,
                    HOW,
                ),
            ),
            (
                multiply,
                (
                    1,
                    out,
                    BIAS,
                    xs,
                    ws,
                    ys.index(1),
                    full,
                    empty,
                    turns,
                    BLOCKS_M,
                    BLOCKS_N,
                    GROUP,
                    K,
                    BM,
                    BN,
                    BK,
                    STAGES,
                    HOW,
                ),
            ),
            (
                load,
                (
                    given,
                    weights,
                    xs,
                    ws,
                    full,
                    empty,
                    BLOCKS_M,
                    BLOCKS_N,
                    GROUP,
                    K,
                    BM,
                    BN,
                    BK,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )


def constants(shape, tile, how):
    rows, terms, columns = shape
    names = ("M", "N", "K", "GROUP", "BM", "BN", "BK", "STAGES", "HOW")
    return dict(zip(names, (rows, columns, terms, 8, *tile[:2], 64, tile[2], how), strict=True))


def described(tensor, block):
    form = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, block, form)


def launched(tile, how, inputs):
    """A call of the kernel for each of the inputs, by their addresses."""
    known = {}
    for x, w, _, y in inputs:
        blocks = [tile[0], 64], [tile[1], 64], [*tile[:2]]
        known[y.data_ptr()] = [described(t, b) for t, b in zip((x, w, y), blocks, strict=True)]

    def call(x, w, b, y):
        given, weights, out = known[y.data_ptr()]
        sizes = constants((len(x), x.shape[1], len(w)), tile, how)
        linear[(132,)](given, weights, b, out, **sizes, num_warps=4)

    return call


def graph(call, inputs):
    call(*inputs[0])
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for each in inputs:
            call(*each)
    return made


def timed(graphs, count, rounds=12):
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, made in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            made.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000 / count)
    return {name: round(statistics.median(each[2:]), 2) for name, each in times.items()}


def persistent(shape, how):
    """The template, rendered alone; of its epilogue the GELU is left out, the bias not."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from rendered import source

    from ipex_inductor.templates.gpu import _module
    from ipex_inductor.templates.persistent import SOURCE, Tile, constants

    for chosen in (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 3)):
        programs = 132 * (1 if chosen.BLOCK_N == 256 else 2)
        known = constants(shape[0], shape[2], shape[1], True, chosen, programs)
        text = source(SOURCE, {**known, "ALLOW_TF32": False}, shape[2], epilogue=False)
        kernel = _module(text)["kernel"]

        def call(x, w, b, y, kernel=kernel, known=known, warps=chosen.num_warps):
            kernel[known["PROGRAMS"],](x, w, b, b, y, num_warps=warps)

        yield f"persistent {chosen.BLOCK_M}x{chosen.BLOCK_N}, bias alone", call


def measured(shape, rows):
    from ipex_inductor.ops import gelu as short

    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device="cuda"))
    m, k, n = shape
    count = max(2, min(8, 4 * 10**8 // (2 * (m * k + n * k + m * n))))
    inputs = [
        tuple(
            torch.randn(size, device="cuda", dtype=torch.bfloat16)
            for size in ((m, k), (n, k), (n,), (m, n))
        )
        for _ in range(count)
    ]
    F = torch.nn.functional
    second = torch.compile(lambda x, w, b: short.gelu(F.linear(x, w, b)))
    calls = {
        "cublas, bare": lambda x, w, b, y: torch.mm(x, w.t(), out=y),
        "cublas, bias": lambda x, w, b, y: torch.addmm(b, x, w.t(), out=y),
        "cublaslt, tanh": lambda x, w, b, y: torch.ops.aten._addmm_activation.out(
            b, x, w.t(), use_gelu=True, out=y
        ),
        "cublas, then erf": lambda x, w, b, y: second(x, w, b),
        **dict(persistent(shape, "none")),
    }
    x, w, b, y = inputs[0]
    exact = x.float() @ w.float().t() + b.float()
    wanted = {"none": exact, "erf": F.gelu(exact), "tanh": F.gelu(exact, approximate="tanh")}
    for tile, how in itertools.product(TILES, ("erf", "tanh", "none")):
        call = launched(tile, how, inputs)
        name = f"gluon {'x'.join(map(str, tile))} {how}"
        y.fill_(float("nan"))
        try:
            call(x, w, b, y)
            torch.cuda.synchronize()
            error = float((y.float() - wanted[how]).abs().max() / wanted[how].abs().max())
        except Exception as failure:
            print(shape, name, type(failure).__name__, str(failure)[:200], flush=True)
            if "CUDA" in str(failure):
                raise
            continue
        if not error < 2**-8:
            print(shape, name, "wrong", error, flush=True)
            continue
        calls[name] = call
    graphs = {name: graph(call, inputs) for name, call in calls.items()}
    for name, taken in timed(graphs, count).items():
        row = {"shape": "x".join(map(str, shape)), "what": name, "median, us": taken}
        rows.append(row)
        print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    rows, about = [], {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    about |= {
        "device": torch.cuda.get_device_name(),
        "command": "python benchmarks/probe_pingpong.py",
    }
    for shape in SHAPES:
        measured(shape, rows)
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text("".join(json.dumps(about | row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
