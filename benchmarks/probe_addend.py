# ruff: noqa
# mypy: ignore-errors
"""A probe: 1x1 convolutions with bias, addend and relu: who fetches the addend, and how.

    python benchmarks/probe_addend.py [--only WORD] [--compile]

Each is held against fp32 and timed in a graph of such calls over inputs that no cache holds, the
median in microseconds, beside cuDNN's fused call.
"""

import argparse, json, os, statistics, sys
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget

SHAPES = {  # rows, columns, terms, addend
    "1024<-256@14": (128 * 196, 1024, 256),
    "2048<-512@7": (128 * 49, 2048, 512),
    "512<-128@28": (128 * 784, 512, 128),
    "256<-64@56": (128 * 3136, 256, 64),
    "256<-1024@14": (128 * 196, 256, 1024),
    "512<-2048@7": (128 * 49, 512, 2048),
}


@triton.jit
def part(
    x,
    w,
    rd,
    yd,
    B,
    R,
    M,
    m0,
    n0,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HOW: tl.constexpr,
):
    if HOW == 0:
        r = rd.load([m0, n0])
    else:
        m = m0 + tl.arange(0, BM)
        r = tl.zeros([BM, BN], tl.bfloat16)
        if M > 0:  # in a branch no load is staged in shared memory
            r = tl.load(
                R + m[:, None] * N + n0 + tl.arange(0, BN)[None, :],
                mask=(m < M)[:, None],
                other=0.0,
            )
    b = tl.load(B + n0 + tl.arange(0, BN)).to(tl.float32)
    acc = tl.dot(x, w) + b[None, :] + r.to(tl.float32)
    yd.store([m0, n0], tl.maximum(acc, 0.0).to(tl.bfloat16))


@triton.jit
def prefetched(R, M, N: tl.constexpr, m0, n0, BM: tl.constexpr, BN: tl.constexpr):
    LINES: tl.constexpr = BN * 2 // 128
    m = m0 + tl.arange(0, BM)
    at = R + m[:, None] * N + n0 + tl.arange(0, LINES)[None, :] * 64
    at = tl.where((m < M)[:, None], at, R)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def weights(W, n0, K: tl.constexpr, BN: tl.constexpr):
    n = n0 + tl.arange(0, BN)
    k = tl.arange(0, K)
    return tl.load(W + n[None, :] * K + k[:, None])


@triton.jit
def resident(
    X,
    W,
    B,
    R,
    Y,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HOW: tl.constexpr,
):
    P: tl.constexpr = BN // PARTS
    xd = tl.make_tensor_descriptor(X, [M, K], [K, 1], [BM, K])
    rd = tl.make_tensor_descriptor(R, [M, N], [N, 1], [BM, P])
    yd = tl.make_tensor_descriptor(Y, [M, N], [N, 1], [BM, P])
    COLS: tl.constexpr = N // BN
    n0 = tl.program_id(0) % COLS * BN
    w0 = weights(W, n0, K, P)
    if PARTS > 1:
        w1 = weights(W, n0 + P, K, P)
    if PARTS > 2:
        w2 = weights(W, n0 + 2 * P, K, P)
        w3 = weights(W, n0 + 3 * P, K, P)
    for tile in tl.range(
        tl.program_id(0) // COLS, (M + BM - 1) // BM, tl.num_programs(0) // COLS, num_stages=STAGES
    ):
        m0 = tile * BM
        x = xd.load([m0, 0])
        if HOW == 2:
            prefetched(R, M, N, m0 + tl.num_programs(0) // COLS * BM, n0, BM, BN)
        part(x, w0, rd, yd, B, R, M, m0, n0, N, BM, P, HOW)
        if PARTS > 1:
            part(x, w1, rd, yd, B, R, M, m0, n0 + P, N, BM, P, HOW)
        if PARTS > 2:
            part(x, w2, rd, yd, B, R, M, m0, n0 + 2 * P, N, BM, P, HOW)
            part(x, w3, rd, yd, B, R, M, m0, n0 + 3 * P, N, BM, P, HOW)


@triton.jit
def block(
    X,
    W,
    B,
    R,
    Y,
    M,
    xd,
    wd,
    rd,
    yd,
    m0,
    n0,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    ADDEND: tl.constexpr,
    TMA_OUT: tl.constexpr,
):
    m = m0 + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    at = m[:, None] * N + n[None, :]
    there = (m < M)[:, None]
    if ADDEND == 1:
        prefetched(R, M, N, m0, n0, BM, BN)
    if ADDEND == 2:
        r = tl.load(R + at, mask=there, other=0.0)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        acc = tl.dot(xd.load([m0, k]), wd.load([n0, k]).T, acc)
    if ADDEND < 2:
        r = tl.load(R + at, mask=there, other=0.0)
    if ADDEND == 3:
        r = rd.load([m0, n0])
    b = tl.load(B + n).to(tl.float32)
    y = tl.maximum(acc + b[None, :] + r.to(tl.float32), 0.0).to(tl.bfloat16)
    if TMA_OUT:
        yd.store([m0, n0], y)
    else:
        tl.store(Y + at, y, mask=there)


@triton.jit
def stepped(
    X,
    W,
    B,
    R,
    Y,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    ADDEND: tl.constexpr,
    TMA_OUT: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    xd = tl.make_tensor_descriptor(X, [M, K], [K, 1], [BM, BK])
    wd = tl.make_tensor_descriptor(W, [N, K], [K, 1], [BN, BK])
    rd = tl.make_tensor_descriptor(R, [M, N], [N, 1], [BM, BN])
    yd = tl.make_tensor_descriptor(Y, [M, N], [N, 1], [BM, BN])
    COLS: tl.constexpr = N // BN
    if PERSISTENT == 0:
        pid = tl.program_id(0)
        block(
            X,
            W,
            B,
            R,
            Y,
            M,
            xd,
            wd,
            rd,
            yd,
            pid // COLS * BM,
            pid % COLS * BN,
            N,
            K,
            BM,
            BN,
            BK,
            STAGES,
            ADDEND,
            TMA_OUT,
        )
    else:
        for pid in tl.range(
            tl.program_id(0), (M + BM - 1) // BM * COLS, tl.num_programs(0), flatten=PERSISTENT == 2
        ):
            block(
                X,
                W,
                B,
                R,
                Y,
                M,
                xd,
                wd,
                rd,
                yd,
                pid // COLS * BM,
                pid % COLS * BN,
                N,
                K,
                BM,
                BN,
                BK,
                STAGES,
                ADDEND,
                TMA_OUT,
            )


def variants(name):
    M, N, K = SHAPES[name]
    if K <= 256:
        for BM, BN, PARTS, STAGES, warps, per in [
            (64, 256, 1, 2, 8, 1),
            (64, 256, 2, 2, 4, 1),
            (64, 256, 2, 2, 8, 1),
            (64, 256, 4, 2, 4, 1),
            (64, 256, 4, 2, 8, 1),
            (64, 128, 1, 2, 4, 1),
            (64, 128, 1, 3, 4, 1),
            (64, 128, 1, 3, 8, 1),
            (64, 128, 2, 3, 4, 1),
            (64, 128, 2, 2, 4, 2),
            (128, 128, 1, 2, 8, 1),
            (128, 128, 2, 2, 8, 1),
            (128, 128, 1, 3, 8, 1),
            (128, 128, 2, 3, 8, 1),
            (128, 256, 2, 2, 8, 1),
            (128, 256, 4, 2, 8, 1),
            (128, 64, 1, 2, 4, 2),
            (128, 64, 1, 3, 8, 1),
            (64, 128, 1, 2, 4, 2),
            (64, 64, 1, 2, 4, 2),
            (64, 64, 1, 3, 4, 2),
            (64, 128, 2, 2, 4, 3),
            (64, 128, 1, 2, 4, 3),
        ]:
            for HOW in (0, 1, 2):
                if BN <= N and (HOW != 1 or BN == 256):
                    yield (
                        "resident",
                        dict(
                            N=N,
                            K=K,
                            BM=BM,
                            BN=BN,
                            PARTS=PARTS,
                            STAGES=STAGES,
                            PROGRAMS=per,
                            HOW=HOW,
                        ),
                        warps,
                    )
    for BM, BN, STAGES, warps, per in [
        (128, 128, 3, 4, 2),
        (128, 128, 3, 8, 2),
        (128, 256, 3, 8, 1),
        (128, 128, 4, 8, 1),
        (128, 64, 4, 4, 2),
        (64, 128, 4, 4, 2),
        (64, 256, 4, 4, 1),
        (64, 256, 4, 8, 1),
    ]:
        for ADDEND in (0, 1, 2, 3):
            for TMA_OUT in (0, 1):
                for PERSISTENT in (0, 1, 2) if name in ("1024<-256@14", "2048<-512@7") else (0, 2):
                    if ADDEND == 0 and TMA_OUT or ADDEND == 3 and not TMA_OUT:
                        continue
                    yield (
                        "stepped",
                        dict(
                            N=N,
                            K=K,
                            BM=BM,
                            BN=BN,
                            BK=64,
                            STAGES=STAGES,
                            ADDEND=ADDEND,
                            TMA_OUT=TMA_OUT,
                            PERSISTENT=PERSISTENT,
                        ),
                        (warps, per),
                    )


KERNELS = {"resident": resident, "stepped": stepped}


def compiled(job):
    """Registers and shared memory of a variant, or why not."""
    kind, given, warps = job
    kernel = KERNELS[kind]
    many = warps[0] if isinstance(warps, tuple) else warps
    signature = {
        p.name: "i32" if p.name == "M" else "*bf16" for p in kernel.params if p.name not in given
    }
    signature |= {name: "constexpr" for name in given if name in kernel.arg_names}
    consts = {name: value for name, value in given.items() if name in kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(kernel.arg_names)
        if n in signature and signature[n] != "constexpr"
    }
    try:
        binary = triton.compile(
            ASTSource(kernel, signature, consts, attrs),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": many},
        )
        shared = binary.metadata.shared
        return None if shared < 232000 else f"shared {shared}", shared
    except Exception as error:
        return str(error)[:100] or type(error).__name__, 0


def graph_time(run, sets, calls=12, rounds=15):
    for s in sets:
        run(*s)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(*sets[i % len(sets)])
    times = []
    for _ in range(rounds):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / calls * 1e3)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--workers", type=int, default=12)
    options = parser.parse_args()
    names = [n for n in SHAPES if options.only in n]
    jobs = [(name, job) for name in names for job in variants(name)]
    with ProcessPoolExecutor(
        options.workers, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        found = list(pool.map(compiled, [job for _, job in jobs]))
    if options.compile:
        for (name, job), f in zip(jobs, found):
            print(name, job, f)
        return
    alloc = lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda")
    triton.set_allocator(alloc)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    torch.backends.cudnn.benchmark = True
    for name in names:
        M, N, K = SHAPES[name]
        side = {"14": 14, "@7": 7, "28": 28, "56": 56}[name[-2:]]
        sets = []
        for _ in range(3):
            x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
            r = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
            sets.append((x, r, torch.empty_like(r)))
        w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16) / K**0.5
        b = torch.randn(N, device="cuda", dtype=torch.bfloat16)
        image = lambda t: t.view(128, side, side, -1).permute(0, 3, 1, 2)
        w4 = w[:, :, None, None].to(memory_format=torch.channels_last)

        def library(x, r, y):
            return torch.cudnn_convolution_add_relu(
                image(x), w4, image(r), 1.0, b, (1, 1), (0, 0), (1, 1), 1
            )

        want = [(x.float() @ w.float().T + b.float() + r.float()).relu() for x, r, _ in sets[:1]][0]
        floor = (2 * M * N + M * K) * 2 / 4.27e6
        took = graph_time(library, sets)
        print(
            json.dumps(
                {"shape": name, "kind": "cudnn", "us": round(took, 1), "floor": round(floor, 1)}
            ),
            flush=True,
        )
        rows = []
        for (n, (kind, given, warps)), (why, shared) in zip(jobs, found):
            if n != name or why:
                if n == name:
                    rows.append((9e9, kind, given, warps, why))
                continue
            kernel = KERNELS[kind]
            many, per = warps if isinstance(warps, tuple) else (warps, given["PROGRAMS"])
            blocks = -(-M // given["BM"]) * (N // given["BN"])
            if kind == "resident":
                cols = N // given["BN"]
                grid = sms * per // cols * cols
            else:
                grid = blocks if given["PERSISTENT"] == 0 else min(blocks, sms * per)

            def run(x, r, y):
                return kernel[(grid,)](x, w, b, r, y, M, **given, num_warps=many)

            try:
                sets[0][2].fill_(float("nan"))
                made = run(*sets[0])
                torch.cuda.synchronize()
                off = (sets[0][2].float() - want).abs().max().item()
                if not off < 0.05:
                    rows.append((9e9, kind, given, warps, f"off by {off}"))
                    continue
                took = graph_time(run, sets)
                rows.append((took, kind, given, warps, (made.n_regs, made.n_spills, shared)))
            except Exception as error:
                rows.append((9e9, kind, given, warps, str(error)[:80]))
                if "CUDA" in str(error):
                    print(rows[-1])
        rows.sort(key=lambda r: r[0])
        for row in rows[:14] + [r for r in rows[14:] if r[0] > 1e9][:4]:
            print(
                round(row[0], 1),
                row[1],
                {k: v for k, v in row[2].items() if k not in "NK"},
                row[3],
                row[4],
                flush=True,
            )
        best = {}
        for row in rows:
            key = (row[1], row[2].get("ADDEND"), row[2].get("TMA_OUT"), row[2].get("PERSISTENT"))
            best.setdefault(key, round(row[0], 1))
        print(name, "best of each:", best, flush=True)


if __name__ == "__main__":
    main()
