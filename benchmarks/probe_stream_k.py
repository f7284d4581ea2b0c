# ruff: noqa
# mypy: ignore-errors
"""A probe: products whose last wave is not full, the rest of the blocks shared out among programs."""

import argparse, itertools, statistics
import triton, triton.language as tl, torch


@triton.jit
def kernel(
    X,
    W,
    B,
    R,
    Y,
    S,
    F,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FULL: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
):
    given = tl.make_tensor_descriptor(X, [ROWS, TERMS], [TERMS, 1], [BM, BK])
    weights = tl.make_tensor_descriptor(W, [COLUMNS, TERMS], [TERMS, 1], [BN, BK])
    BLOCKS_M: tl.constexpr = (ROWS + BM - 1) // BM
    BLOCKS_N: tl.constexpr = COLUMNS // BN
    pid = tl.program_id(0)
    # the shared ones first, so that nobody waits at the end
    if PARTS > 1:
        REST: tl.constexpr = BLOCKS_M * BLOCKS_N - FULL
        STEPS: tl.constexpr = TERMS // BK // PARTS
        if pid < REST * PARTS:
            part = pid // REST
            block = FULL + pid % REST
            within = block % (GROUP * BLOCKS_N)
            above = block // (GROUP * BLOCKS_N) * GROUP
            high = tl.minimum(BLOCKS_M - above, GROUP)
            top = (above + within % high) * BM
            left = within // high * BN
            acc = tl.zeros([BM, BN], tl.float32)
            for k in tl.range(part * STEPS, part * STEPS + STEPS, num_stages=STAGES):
                acc = tl.dot(given.load([top, k * BK]), weights.load([left, k * BK]).T, acc)
            at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            spot = pid % REST
            if PARTS == 2:
                # whoever is there last adds
                mine = S + (spot * 2 + part) * (BM * BN) + at
                tl.store(mine, acc, cache_modifier=".cg")
                tl.debug_barrier()
                seen = tl.atomic_add(F + spot, 1, sem="acq_rel")
                if seen % 2 == 1:
                    acc += tl.load(S + (spot * 2 + 1 - part) * (BM * BN) + at, cache_modifier=".cg")
                    row = tl.arange(0, BM) + top
                    column = tl.arange(0, BN) + left
                    acc += tl.load(B + column).to(tl.float32)[None, :]
                    place = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
                    mask = (row < ROWS)[:, None]
                    if ADD:
                        acc += tl.load(R + place, mask=mask, other=0.0).to(tl.float32)
                    tl.store(Y + place, tl.maximum(acc, 0.0).to(tl.bfloat16), mask=mask)
    for block in tl.range(pid, FULL, PROGRAMS, flatten=True):
        within = block % (GROUP * BLOCKS_N)
        above = block // (GROUP * BLOCKS_N) * GROUP
        high = tl.minimum(BLOCKS_M - above, GROUP)
        top = (above + within % high) * BM
        left = within // high * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, TERMS, BK, num_stages=STAGES):
            acc = tl.dot(given.load([top, k]), weights.load([left, k]).T, acc)
        row = tl.arange(0, BM) + top
        column = tl.arange(0, BN) + left
        acc += tl.load(B + column).to(tl.float32)[None, :]
        place = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        mask = (row < ROWS)[:, None]
        if ADD:
            acc += tl.load(R + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(Y + place, tl.maximum(acc, 0.0).to(tl.bfloat16), mask=mask)


SHAPES = [  # rows, columns, terms, addend
    (128 * 196, 256, 1024, 0),
    (128 * 49, 512, 2048, 0),
    (64 * 196, 256, 1024, 0),
    (64 * 49, 512, 2048, 0),
    (4096, 768, 3072, 1),
    (4096, 1024, 4096, 1),
    (4096, 3072, 768, 0),
    (2048, 4096, 1024, 0),
    (1536, 1024, 4096, 1),
    (3072, 2048, 2048, 0),
]


def graph_time(run, calls=12, rounds=25):
    run(0)
    run(1)
    run(2)
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(calls):
            run(i)
    t = []
    for _ in range(rounds):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        b.synchronize()
        t.append(a.elapsed_time(b) / calls * 1e3)
    return statistics.median(t)


def main():
    triton.set_allocator(
        lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda")
    )
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for M, N, K, ADD in SHAPES:
        sets = [
            [
                torch.randn(M, K, device="cuda", dtype=torch.bfloat16),
                torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * K**-0.5,
                torch.randn(N, device="cuda", dtype=torch.bfloat16),
                torch.randn(M, N, device="cuda", dtype=torch.bfloat16),
                torch.empty(M, N, device="cuda", dtype=torch.bfloat16),
            ]
            for _ in range(3)
        ]

        def lib(i):
            x, w, b, r, y = sets[i % 3]
            torch._addmm_activation(b, x, w.t()) if not ADD else torch.addmm(r, x, w.t())

        ref = sets[0][0].float() @ sets[0][1].float().t() + sets[0][2].float()
        if ADD:
            ref += sets[0][3].float()
        ref = ref.relu()
        print((M, N, K, ADD), f"cuBLAS (act, or addend alone) {graph_time(lib):.1f}", flush=True)
        for BM, BN, warps, stages, per in [
            (128, 128, 4, 3, 2),
            (128, 256, 8, 3, 1),
            (128, 128, 8, 4, 1),
            (256, 128, 8, 3, 1),
        ]:
            if N % BN:
                continue
            blocks = -(-M // BM) * (N // BN)
            programs = sms * per
            whole = blocks // programs * programs
            rest = blocks - whole
            S = torch.empty(2 * max(rest, 1) * BM * BN, device="cuda")
            F = torch.zeros(max(rest, 1), device="cuda", dtype=torch.int32)
            line = []
            for parts, full, slots in [
                (1, blocks, programs),
                (2, whole, programs),
                (2, max(0, whole - programs), programs),
            ]:
                left = blocks - full
                if parts == 2 and (
                    left == 0
                    or left * 2 > 2 * programs
                    or (K // 64) % 2
                    or left * 2 > programs
                    and full == whole
                ):
                    line.append("-")
                    continue
                if parts == 2 and full != whole:
                    line.append("-")
                    continue

                def run(i):
                    x, w, b, r, y = sets[i % 3]
                    return kernel[(min(slots, max(full, left * parts)),)](
                        x,
                        w,
                        b,
                        r,
                        y,
                        S,
                        F,
                        M,
                        N,
                        K,
                        BM,
                        BN,
                        64,
                        stages,
                        slots,
                        full,
                        parts,
                        8,
                        ADD,
                        num_warps=warps,
                    )

                try:
                    made = run(0)
                    torch.cuda.synchronize()
                    err = (sets[0][4].float() - ref).abs().max().item()
                    t = graph_time(run)
                    line.append(
                        f"{t:.1f} (err {err:.2g}, {made.n_regs} regs {made.n_spills} spills)"
                    )
                except Exception as error:
                    line.append(str(error)[:80])
            print(
                "   ",
                (BM, BN, warps, stages, per),
                blocks,
                "blocks",
                programs,
                "at once; whole, shared:",
                line,
                flush=True,
            )


main()
