# ruff: noqa
# mypy: ignore-errors
"""A probe: the 7x7 stem of three channels by lines of the result, with a max pool or without.

    python benchmarks/probe_stem_pool.py

Each is held against torch and timed in a graph of such calls, the median in microseconds.
"""

import argparse, statistics, itertools, linecache, sys
import triton, triton.language as tl
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget

N, IH, IW, OC = 128, 224, 224, 64
OH = OW = 112
LINE, IMAGE, WIDTH, SHIFT, LENGTH = 672, 150528, 22, 1, 21


def source(POOL, BM, BK, R, MAXREG, ASM, OPAQUE):
    """POOL 1: three gathers, 2: split and one. SPLIT: 16-bit split of what is stored."""
    steps = 160 // BK
    out = ["import triton, triton.language as tl", "@triton.jit", "def kernel(X, W, B, Y):"]

    def e(s, n=1):
        out.append("    " * n + s)

    side = OH // 2 if POOL else OH
    groups = -(-side // R)
    half = BM // 2
    each = {64: 28, 128: 56}[BM]  # pooled columns of a block
    e(f"group = tl.program_id(0) % {groups}")
    e(f"image = tl.program_id(0) // {groups}")
    e(f"term = tl.arange(0, {BK})")
    e(f"out = tl.arange(0, {OC})")
    for s in range(steps):
        e(f"w_{s} = tl.load(W + (term + {s * BK})[:, None] * {OC} + out[None, :])")
    if POOL:
        e(f"column = tl.arange(0, {BM}) + (tl.program_id(1) * {2 * each} - 1)")
        e(f"good = (column >= 0) & (column < {OW})")
    else:
        e(f"column = tl.arange(0, {BM}) + tl.program_id(1) * {BM}")
        e(f"good = column < {OW}")
    e("left0 = column * 6 - 10")
    e(f"begin = image * {IMAGE} + left0")

    def dot(f, acc, y, n):
        if OPAQUE & 1:
            e(
                f"zero = tl.inline_asm_elementwise('mov.u32 $0, 0;', '=r', [], dtype=tl.int32, is_pure=False, pack=1)",
                n,
            )
            e(f"term = tl.arange(0, {BK}) + tl.multiple_of(zero, 64)", n)
        if OPAQUE & 2:
            e(
                f"nought = tl.inline_asm_elementwise('mov.u32 $0, 0;', '=r', [], dtype=tl.int32, is_pure=False, pack=1)",
                n,
            )
            e(f"left0 = column * 6 - 10 + tl.multiple_of(nought, 64)", n)
            e(f"begin = image * {IMAGE} + left0", n)
        if OPAQUE & 4:
            e(
                f"nought = tl.inline_asm_elementwise('mov.u32 $0, 0;', '=r', [], dtype=tl.int32, is_pure=False, pack=1)",
                n,
            )
            e(f"edge = column * 6 - 10 + tl.multiple_of(nought, 64)", n)
        elif OPAQUE & 8:
            e(
                f"nought = tl.inline_asm_elementwise('mov.u32 $0, 0;', '=r', [], dtype=tl.int32, is_pure=False, pack=1)",
                n,
            )
            e(f"begin = image * {IMAGE} + left0 + tl.multiple_of(nought, 64)", n)
            e("edge = left0", n)
        else:
            e("edge = left0", n)
        e(f"{acc} = tl.zeros([{BM}, {OC}], tl.float32)", n)
        for s in range(steps):
            if OPAQUE & 16:
                e(
                    f"nought = tl.inline_asm_elementwise('mov.u32 $0, 0;', '=r', [], dtype=tl.int32, is_pure=False, pack=1)",
                    n,
                )
                e(f"edge = column * 6 - 10 + tl.multiple_of(nought, 64)", n)
            e(f"run = (term + {s * BK}) // {WIDTH}", n)
            e(f"at = (term + {s * BK}) % {WIDTH}", n)
            e(f"row = ({y}) * 2 - 3 + run", n)
            rows = f"(row.to(tl.uint32) < {IH})" + (
                f" & (run < 7)" if (s + 1) * BK > 7 * WIDTH else ""
            )
            e(
                f"inside = ((edge[:, None] + at[None, :]).to(tl.uint32) < {LINE}) & good[:, None] & ({rows})[None, :]",
                n,
            )
            e(
                f"given = tl.load(X + (begin[:, None] + (row * {LINE} + at)[None, :]), mask=inside, other=0.0)",
                n,
            )
            if ASM:
                e(f"own = tl.where(at >= {SHIFT}, -1, 0).to(tl.int16)[None, :]", n)
                e(
                    "given = tl.inline_asm_elementwise('and.b32 $0, $1, $2;', '=r,r,r', [given, own], dtype=tl.bfloat16, is_pure=True, pack=2)",
                    n,
                )
            else:
                e(f"given = tl.where((at >= {SHIFT})[None, :], given, 0.0)", n)
            e(f"{acc} = tl.dot(given, w_{s}, {acc})", n)

    fin = lambda acc: (
        f"tl.maximum({acc} + tl.load(B + out).to(tl.float32)[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL).to(tl.bfloat16)"
    )
    mx = lambda a, b: f"tl.maximum({a}, {b}, propagate_nan=tl.PropagateNan.ALL).to(tl.bfloat16)"
    if not POOL:
        e(f"for y in tl.range(group * {R}, tl.minimum(group * {R} + {R}, {OH}), num_stages=1):")
        dot(0, "acc", "y", 2)
        e(f"place = ((image * {OH} + y) * {OW} + column) * {OC}", 2)
        e(f"tl.store(Y + place[:, None] + out[None, :], {fin('acc')}, mask=good[:, None])", 2)
    else:
        e(f"first = group * {R}")
        e(f"held = tl.zeros([{BM}, {OC}], tl.bfloat16)")
        e(f"last = tl.minimum(first + {R}, {OH // 2}) * 2")
        e(f"for y in tl.range(tl.maximum(first * 2 - 1, 0), last, num_stages=1):")
        dot(0, "acc", "y", 2)
        e(f"made = tl.where(good[:, None], {fin('acc')}, 0.0)", 2)
        e(f"held = {mx('held', 'made')}", 2)
        e(f"if y % 2 == 1:", 2)
        if POOL == 1:
            e(
                f"spot = tl.broadcast_to(tl.minimum(tl.arange(0, {half}) * 2, {BM - 3})[:, None], [{half}, {OC}])",
                3,
            )
            e(
                f"best = {mx(mx('tl.gather(held, spot, 0)', 'tl.gather(held, spot + 1, 0)'), 'tl.gather(held, spot + 2, 0)')}",
                3,
            )
        else:
            e(
                f"even, odd = tl.split(tl.permute(tl.reshape(held, [{half}, 2, {OC}]), (0, 2, 1)))",
                3,
            )
            e(
                f"spot = tl.broadcast_to(tl.minimum(tl.arange(0, {half}) + 1, {half - 1})[:, None], [{half}, {OC}])",
                3,
            )
            e(f"best = {mx(mx('even', 'odd'), 'tl.gather(even, spot, 0)')}", 3)
        e(f"pooled = tl.arange(0, {half})", 3)
        e(
            f"place = ((image * {OH // 2} + y // 2) * {OW // 2} + pooled + tl.program_id(1) * {each}) * {OC}",
            3,
        )
        e(
            f"tl.store(Y + place[:, None] + out[None, :], best, mask=((pooled < {each}) & (y // 2 >= first))[:, None])",
            3,
        )
        e(f"held = made", 3)
    return "\n".join(out) + "\n"


# (POOL, BM, BK, R, maxnreg, ASM, OPAQUE), warps
VARIANTS = [
    ((p, 64, 32, 14, m, a, o), 4)
    for p in (0, 1, 2)
    for a in (0, 1)
    for m, o in ((0, 0), (128, 0), (0, 1), (0, 2), (0, 17))
]


def kernel(*given):
    text = source(*given)
    file = f"<stem {given}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = {}
    exec(compile(text, file, "exec"), names)
    return names["kernel"]


def compiled(job):
    given, warps = job
    k = kernel(*given)
    sig = dict.fromkeys(("X", "W", "B", "Y"), "*bf16")
    try:
        b = triton.compile(
            ASTSource(k, sig, {}, {(i,): [["tt.divisibility", 16]] for i in range(4)}),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": warps, **({"maxnreg": given[4]} if given[4] else {})},
        )
        return b
    except Exception as x:
        return str(x)[-120:]


def main(N=128, VARIANTS=VARIANTS, base=False):
    print("images", N)
    import torch

    torch.manual_seed(0)
    from concurrent.futures import ThreadPoolExecutor

    x = [
        torch.randn(N, 3, IH, IW, device="cuda", dtype=torch.bfloat16).to(
            memory_format=torch.channels_last
        )
        for _ in range(3)
    ]
    conv = torch.nn.Conv2d(3, OC, 7, 2, 3).cuda().bfloat16().to(memory_format=torch.channels_last)
    w, bias = conv.weight.detach(), conv.bias.detach()
    rows = torch.nn.functional.pad(w.permute(0, 2, 3, 1).reshape(OC, 7, 21), (1, 0)).flatten(1)
    matrix = torch.nn.functional.pad(rows, (0, 192 - 154)).t().contiguous()
    ref = torch.relu(conv(x[0]))
    pooled = torch.nn.functional.max_pool2d(ref, 3, 2, 1)

    def graph_time(run, sets, calls=12, rounds=25):
        for s in sets:
            run(s)
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for i in range(calls):
                run(sets[i % len(sets)])
        t = []
        for _ in range(rounds):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            g.replay()
            b.record()
            b.synchronize()
            t.append(a.elapsed_time(b) / calls * 1e3)
        return statistics.median(t)

    if base:
        for name, f in {
            "stem": lambda m: torch.relu(conv(m)),
            "stem+pool": lambda m: torch.nn.functional.max_pool2d(torch.relu(conv(m)), 3, 2, 1),
        }.items():

            class M(torch.nn.Module):
                def __init__(s):
                    super().__init__()
                    s.c = conv

                def forward(s, m):
                    return f(m)

            with torch.no_grad():
                c = torch.compile(M().eval(), backend="ipex", options={"ipex": True} if 0 else None)
                print(name, "ipex", graph_time(lambda s: c(s), x), flush=True)
    with ThreadPoolExecutor(15) as pool:
        list(pool.map(compiled, VARIANTS))
    for given, warps in VARIANTS:
        POOL, BM, BK, R, *_ = given
        k = kernel(*given)
        side = OH // 2 if POOL else OH
        y = [
            torch.full((N, side, side, OC), float("nan"), device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        ]
        grid = (N * -(-side // R), 128 // BM)
        n = itertools.count()
        run = lambda s: k[grid](
            s,
            matrix,
            bias,
            y[next(n) % 2],
            num_warps=warps,
            **({"maxnreg": given[4]} if given[4] else {}),
        )
        try:
            made = run(x[0])
            torch.cuda.synchronize()
            want = (pooled if POOL else ref).permute(0, 2, 3, 1).float()
            err = (y[0].float() - want).abs().max().item()
            t = graph_time(run, x)
            print(
                given,
                warps,
                f"{t:.1f} us err {err:.3g} regs {made.n_regs} spills {made.n_spills} shared {made.metadata.shared}",
                flush=True,
            )
        except Exception as error:
            print(given, warps, str(error)[:200], flush=True)


if __name__ == "__main__":
    main(base=True)
