"""linear + bias + GELU of few rows: variants of one kernel, each as the whole op, on one GPU.

    python benchmarks/probe_few_rows.py [--shape MxKxN ...] [--compile-only]

Values first, against fp64. Then the device's time a call in a CUDA graph of calls that take turns
with more than 300 MB of weights, medians of interleaved rounds, in microseconds: `alone`, one call
behind the other; `behind`, each after a small kernel of torch's, whose own time is taken off.

A variant: columns, bytes of a step, parts, warps, stages, `s` for swapped; then how parts become a
result (`one` part, the `last` to arrive adds up, `two` kernels); then bytes of each row that are
asked for into the L2 ahead; then programmatic dependent launch: `-` none, `w` waits and lets go
at its end, `b` lets go at its beginning, `l` behind its loop.
"""

import argparse
import concurrent.futures
import itertools
import math
import os
import statistics
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import cuda as gpu

SHAPES = ("16x4096x4096", "1x4096x4096", "1x4096x11008", "32x4096x4096", "16x11008x4096")
COPIED = 4.2e12


@triton.jit
def _ahead(address, size: tl.constexpr):
    """So many bytes from each address on into the L2: changes nothing that can be read."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, tl.full(address.shape, size, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _gelu(sums):
    return 0.5 * sums * (1.0 + tl.erf(sums * 0.7071067811865476))


@triton.jit
def one_row(
    x, weight, bias, y, partial, counter,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TERMS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    SWAPPED: tl.constexpr, HOW: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, THREADS: tl.constexpr,
    BIAS: tl.constexpr, EVICT: tl.constexpr, X: tl.constexpr, TOKEN: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_ = weight + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K
    if AHEAD:
        PIECES: tl.constexpr = THREADS // BLOCK_N
        at = tl.arange(0, PIECES)[None, :] * (AHEAD // PIECES)
        _ahead(weight_.to(tl.int64) + at, AHEAD // PIECES)
    if PDL:
        gpu.gdc_wait()
    if PDL == 2:
        gpu.gdc_launch_dependents()
    if BIAS:
        more = tl.load(bias + tl.minimum(columns, N - 1)).to(tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.range(0, TERMS // BLOCK_K, num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(x + k)
        b = tl.load(weight_ + k[None, :], eviction_policy="evict_first")
        sums += b.to(tl.float32) * a.to(tl.float32)[None, :]
    if PDL == 3:
        gpu.gdc_launch_dependents()
    result = tl.sum(sums, 1)
    inside = columns < N
    if BIAS:
        result += more
    else:
        result += tl.load(bias + columns, mask=inside).to(tl.float32)
    tl.store(y + columns, _gelu(result).to(tl.bfloat16), mask=inside)


@triton.jit
def few_rows(
    x, weight, bias, y, partial, counter,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TERMS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    SWAPPED: tl.constexpr, HOW: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, THREADS: tl.constexpr,
    BIAS: tl.constexpr, EVICT: tl.constexpr, X: tl.constexpr, TOKEN: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_ = weight + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K
    EVEN: tl.constexpr = K % TERMS == 0
    if AHEAD:
        PIECES: tl.constexpr = THREADS // BLOCK_N if THREADS > BLOCK_N else 1
        at = tl.arange(0, PIECES)[None, :] * (AHEAD // PIECES)
        # Of a last part that is shorter, no more than lies in the weight.
        start = tl.minimum(part * TERMS, K - AHEAD // 2)
        _ahead((weight_ + start).to(tl.int64) + at, AHEAD // PIECES)
    if PDL:
        gpu.gdc_wait()
    if PDL == 2:
        gpu.gdc_launch_dependents()
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    there = (rows < M)[:, None]
    x_ = x + rows[:, None] * K
    if BIAS:
        more = tl.load(bias + tl.minimum(columns, N - 1)).to(tl.float32)[None, :]
    if BATCH > 1:
        KB: tl.constexpr = BLOCK_K // BATCH
        each = tl.arange(0, BATCH)[:, None, None] * KB + tl.arange(0, KB)[None, None, :]
        x3 = x + rows[None, :, None] * K + each
        w3 = weight + tl.minimum(columns, N - 1).to(tl.int64)[None, :, None] * K + each
        sums3 = tl.zeros([BATCH, BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, TERMS // BLOCK_K, num_stages=STAGES):
            k = part * TERMS + step * BLOCK_K
            a = tl.load(x3 + k, mask=(rows < M)[None, :, None], other=0)
            b = tl.load(w3 + k, eviction_policy="evict_first" if EVICT else "")
            sums3 = tl.dot(a, tl.permute(b, (0, 2, 1)), sums3)
        result = tl.sum(sums3, 0)
    else:
        sums = tl.zeros([BLOCK_N if SWAPPED else BLOCK_M, BLOCK_M if SWAPPED else BLOCK_N], tl.float32)
        for step in tl.range(0, TERMS // BLOCK_K, num_stages=STAGES):
            k = part * TERMS + step * BLOCK_K + tl.arange(0, BLOCK_K)
            if X:
                a = tl.load(x_ + k[None, :], mask=there, other=0)
            else:  # what x costs: wrong values
                a = tl.full([BLOCK_M, BLOCK_K], 1, tl.bfloat16)
            b = tl.load(weight_ + k[None, :], eviction_policy="evict_first" if EVICT else "")
            if SWAPPED:
                sums = tl.dot(b, tl.trans(a), sums)
            else:
                sums = tl.dot(a, tl.trans(b), sums)
        result = tl.trans(sums) if SWAPPED else sums
    if PDL == 3:
        gpu.gdc_launch_dependents()
    inside = there & (columns < N)[None, :]
    at = rows[:, None] * N + columns[None, :]
    if HOW != 0:
        tl.store(partial + part * M * N + at, result, mask=inside)
    if HOW == 0:
        if BIAS:
            result += more
        else:
            result += tl.load(bias + columns, mask=columns < N).to(tl.float32)[None, :]
        tl.store(y + at, _gelu(result).to(tl.bfloat16), mask=inside)
    if HOW == 1:
        tl.debug_barrier()
        if TOKEN:  # of two: whoever finds it there is the last; it need not be anything before
            flag = counter.to(tl.pointer_type(tl.int64)) + tl.program_id(0)
            mine: tl.constexpr = 0x6A09E667F3BCC908
            last = tl.atomic_xchg(flag, mine, sem="acq_rel", scope="gpu") == mine
        else:
            last = tl.atomic_add(counter + tl.program_id(0), 1, sem="acq_rel", scope="gpu") == PARTS - 1
        if last:
            if TOKEN:
                total = result + tl.load(partial + (1 - part) * M * N + at, mask=inside, cache_modifier=".cg")
                tl.store(counter.to(tl.pointer_type(tl.int64)) + tl.program_id(0), 0)
            else:
                total = tl.load(partial + at, mask=inside, cache_modifier=".cg")
                for other in tl.static_range(1, PARTS):
                    total += tl.load(partial + other * M * N + at, mask=inside, cache_modifier=".cg")
                tl.store(counter + tl.program_id(0), 0)
            if BIAS:
                total += more
            else:
                total += tl.load(bias + columns, mask=columns < N).to(tl.float32)[None, :]
            tl.store(y + at, _gelu(total).to(tl.bfloat16), mask=inside)


@triton.jit
def added_up(
    partial, bias, y, M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < M * N
    if PDL:
        gpu.gdc_wait()
        gpu.gdc_launch_dependents()
    total = tl.load(partial + at, mask=inside)
    for other in tl.static_range(1, PARTS):
        total += tl.load(partial + other * M * N + at, mask=inside)
    total += tl.load(bias + at % N, mask=inside).to(tl.float32)
    tl.store(y + at, _gelu(total).to(tl.bfloat16), mask=inside)


@triton.jit
def read(weight, y, BLOCK: tl.constexpr, TIMES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):
    """Nothing but reading: what no kernel of these launches is below."""
    at = tl.program_id(0).to(tl.int64) * BLOCK * TIMES + tl.arange(0, BLOCK)
    if PDL:
        gpu.gdc_wait()
        gpu.gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TIMES):
        total += tl.load(weight + at + i * BLOCK, eviction_policy="evict_first").to(tl.float32)
    tl.store(y + tl.program_id(0), tl.sum(total).to(tl.bfloat16))


class Variant(NamedTuple):
    columns: int
    step: int
    parts: int
    warps: int
    stages: int
    swapped: bool = False
    how: str = "one"
    ahead: int = 0
    pdl: str = "-"
    bias: bool = False  # loaded first
    evict: bool = False  # the weight leaves the L2 first
    x: bool = True
    token: bool = False
    batch: int = 1

    def __str__(self):
        words = [self.columns, self.step, self.parts, self.warps, self.stages]
        return " ".join(map(str, words)) + (" s" if self.swapped else "") + f" {self.how} {self.pdl}" + " bias" * self.bias + " evict" * self.evict + " NO-X" * (not self.x) + " token" * self.token + f" x{self.batch}" * (self.batch > 1)

    def constants(self, rows, size, columns):
        step = self.step // 2
        terms = -(-size // (self.parts * step)) * step
        return {
            "M": rows, "N": columns, "K": size, "BLOCK_M": 1 if rows == 1 else 16 if rows <= 16 else 32,
            "BLOCK_N": self.columns, "BLOCK_K": step, "TERMS": terms, "PARTS": -(-size // terms),
            "STAGES": self.stages, "SWAPPED": self.swapped, "HOW": ("one", "last", "two").index(self.how),
            "AHEAD": min(self.ahead, 2 * min(terms, size)), "PDL": "-wbl".index(self.pdl), "THREADS": 32 * self.warps,
            "BIAS": self.bias, "EVICT": self.evict, "X": self.x, "TOKEN": self.token, "BATCH": self.batch,
        }  # fmt: skip


V = Variant
ALL = 1 << 20  # of a row: as much as is its own


def variants(rows, size, columns, many):
    """Those that fill the device; `many`: all of them."""
    V = Variant
    if rows == 1:
        found = []
        for tile in ((1, 4096, 1, 4, 1), (2, 4096, 1, 4, 1), (1, 8192, 1, 4, 1), (1, 4096, 1, 2, 1), (2, 2048, 1, 2, 1)):
            found += [V(*tile, bias=b, pdl=p) for b, p in ((False, "-"), (True, "-"), (True, "b"))]
        return found
    found = []
    ones = [(32, 512, 1, 4, 4), (16, 512, 1, 2, 5), (16, 512, 1, 4, 6), (32, 1024, 1, 4, 3), (32, 512, 1, 4, 6), (32, 512, 1, 4, 9), (32, 256, 1, 4, 12), (16, 1024, 1, 4, 4), (16, 1024, 1, 2, 4), (32, 1024, 1, 8, 5)]
    for tile in ones:
        found += [V(*tile), V(*tile, bias=True), V(*tile, bias=True, evict=True), V(*tile, bias=True, pdl="b")]
    for tile in ones[:2]:
        found += [V(*tile, bias=True, x=False)]
    for tile in ((32, 512, 1, 4, 4), (32, 1024, 1, 4, 3), (16, 1024, 1, 4, 4), (16, 1024, 1, 4, 3), (16, 512, 1, 4, 6), (32, 1024, 1, 8, 3)):
        found += [V(*tile, bias=True, batch=4), V(*tile, bias=True, batch=4, pdl="b")]
    split = [(64, 256, 2, 4, 5, True), (64, 256, 2, 4, 5, False), (64, 256, 2, 4, 8, True), (64, 256, 2, 4, 9, False), (64, 512, 2, 4, 4, True), (64, 512, 2, 4, 5, True), (64, 128, 2, 4, 12, True), (64, 128, 2, 4, 16, True)]
    for tile in split:
        found += [V(*tile, how="two"), V(*tile, how="two", pdl="b")]
        found += [V(*tile, how="last", token=True, bias=b, evict=e, pdl=p) for b, e, p in ((False, False, "-"), (True, False, "-"), (True, True, "-"), (True, False, "b"))]
    for tile in split[:2]:
        found += [V(*tile, how="last", token=True, bias=True, x=False), V(*tile, how="last", bias=True), V(*tile, how="two", x=False)]
    for tile in ((128, 128, 4, 4, 8, True), (128, 256, 4, 4, 5, True), (64, 256, 4, 4, 5, True), (128, 256, 4, 8, 5, True)):
        found += [V(*tile, how="last", bias=True), V(*tile, how="last", bias=True, pdl="b")]
    if not many:
        found = [v for v in found if v.x and v.batch == 1]

    def fills(v):
        programs = -(-columns // v.columns) * v.parts
        even = rows == 1 or size % v.constants(rows, size, columns)["TERMS"] == 0
        return even and 0.45 * 132 <= programs and (v.parts == 1 or programs <= 2.1 * 132)

    return [v for v in dict.fromkeys(found) if fills(v)]


class Run:
    """A variant on operands; calls are what is timed."""

    def __init__(self, variant, rows, size, columns):
        self.variant, self.rows = variant, rows
        self.constants = variant.constants(rows, size, columns)
        self.kernel = one_row if rows == 1 else few_rows
        self.grid = (-(-columns // variant.columns), self.constants["PARTS"], 1)
        self.how = {"num_warps": variant.warps, "num_stages": variant.stages, "launch_pdl": variant.pdl != "-"}
        self.block = 512

    def compile(self):
        bf16, fp32, i32 = torch.bfloat16, torch.float32, torch.int32
        self.kernel.warmup(bf16, bf16, bf16, bf16, fp32, i32, **self.constants, **self.how, grid=self.grid)
        if self.variant.how == "two":
            self.second(fp32, bf16, bf16, warm=True)

    def second(self, partial, bias, y, warm=False):
        c = {n: self.constants[n] for n in ("M", "N", "PARTS", "PDL")}
        grid = (-(-c["M"] * c["N"] // self.block), 1, 1)
        how = {"num_warps": 4, "launch_pdl": self.how["launch_pdl"]}
        if warm:
            added_up.warmup(partial, bias, y, **c, BLOCK=self.block, **how, grid=grid)
        else:
            added_up[grid](partial, bias, y, **c, BLOCK=self.block, **how)

    def __call__(self, x, weight, bias, y, partial, counter):
        self.kernel[self.grid](x, weight, bias, y, partial, counter, **self.constants, **self.how)
        if self.variant.how == "two":
            self.second(partial, bias, y)


class Read:
    def __init__(self, pdl, size):
        self.pdl, self.grid, self.how = pdl, (size // (512 * 8),), {"num_warps": 4, "launch_pdl": pdl > 0}

    def compile(self):
        read.warmup(torch.bfloat16, torch.bfloat16, BLOCK=512, TIMES=8, AHEAD=0, PDL=self.pdl, **self.how, grid=self.grid)

    def __call__(self, x, weight, bias, y, partial, counter):
        read[self.grid](weight, y, BLOCK=512, TIMES=8, AHEAD=0, PDL=self.pdl, **self.how)


class Torch:
    def __init__(self, function):
        self.function = function

    def __call__(self, x, weight, bias, y, partial, counter):
        self.function(x, weight, bias)


def captured(run, operands, count, between=None):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(*operands[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            if between is not None:
                between()
            run(*operands[i % len(operands)])
    return graph


def once(graph, count):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def medians(graphs, count, rounds):
    times = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(once(graph, count))
    return {name: statistics.median(t) for name, t in times.items()}


def chain(run, x, weights, bias, partial, counter, graph=True):
    """x through layers that are one another's inputs."""
    ys = [torch.full((x.shape[0], w.shape[0]), float("nan"), device="cuda", dtype=x.dtype) for w in weights]

    def all_of_them():
        given = x
        for w, y in zip(weights, ys):
            run(given, w, bias, y, partial, counter)
            given = y

    if not graph:
        all_of_them()
    else:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made, stream=stream):
            all_of_them()
        for _ in range(5):
            made.replay()
    torch.cuda.synchronize()
    return ys[-1].clone()


def probed(shape, options, begin):
    rows, size, columns = map(int, shape.split("x"))
    many = shape == SHAPES[0]
    runs = {str(v): Run(v, rows, size, columns) for v in variants(rows, size, columns, many)}
    if many:
        runs |= {f"reading only, pdl {p}": Read(p, columns * size) for p in (0, 2)}
    start = time.monotonic()
    failed = {}

    def compiled(name):
        try:
            runs[name].compile()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"

    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        list(pool.map(compiled, runs))
    print(f"\n{shape}: {len(runs)} compiled in {time.monotonic() - start:.1f} s", flush=True)
    runs = {n: r for n, r in runs.items() if n not in failed}
    if options.compile_only:
        print(failed)
        return
    torch.manual_seed(0)
    copies = -(-300_000_000 // (2 * size * columns))
    make = lambda *s: torch.randn(*s, device="cuda", dtype=torch.float32)
    weights = [(make(columns, size) * size**-0.5).bfloat16() for _ in range(copies)]
    x, bias = make(rows, size).bfloat16(), make(columns).bfloat16()
    partial = torch.full((8 * rows * columns,), float("nan"), device="cuda")
    counter = torch.zeros(4096, dtype=torch.int32, device="cuda")
    ys = [torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    operands = [(x, w, bias, y, partial, counter) for w, y in zip(weights, ys)]
    exact = F.gelu(F.linear(x.double(), weights[0].double(), bias.double()))
    eager = (F.gelu(F.linear(x, weights[0], bias)).double() - exact).abs().max().item()
    wrong = dict(failed)
    for name, run in [*runs.items()]:
        if isinstance(run, Read) or not run.variant.x:
            continue
        try:
            for _ in range(3):  # a counter that is not 0 again shows
                partial.fill_(float("nan"))
                ys[0].fill_(float("nan"))
                run(*operands[0])
                off = (ys[0].double() - exact).abs().max().item()
                if not off <= eager * 1.05 + 1e-6:
                    wrong[name] = f"off by {off:.3g}, eager by {eager:.3g}"
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {str(error)[:300]}"
        if counter.any():
            wrong[name] = "counters left"
            counter.zero_()
        if name in wrong:
            del runs[name]
    if size == columns and rows > 1:  # who waits for one another right gives the same bits
        by_tile = {}
        for name, run in [*runs.items()]:
            if isinstance(run, Read) or not run.variant.x:
                continue
            key = run.variant._replace(pdl="-", evict=False, how="one" if run.variant.how == "one" else "parts", token=False)
            if key not in by_tile:
                plain = Run(key._replace(how=run.variant.how, token=run.variant.token), rows, size, columns)
                by_tile[key] = chain(plain, x, weights, bias, partial, counter, graph=False)
            if not torch.equal(chain(run, x, weights, bias, partial, counter), by_tile[key]):
                wrong[name] = "another result in a chain"
                del runs[name]
    for name, why in wrong.items():
        print(f"  WRONG {name}: {why}")
    runs["eager"] = Torch(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    runs["cuBLAS and bias"] = Torch(F.linear)
    runs["cuBLASLt, tanh"] = Torch(lambda x, w, b: torch._addmm_activation(b, x, w.t(), use_gelu=True))
    count = copies * max(1, round(32 / copies))
    graphs = {}
    for name, run in runs.items():
        try:
            graphs[name] = captured(run, operands, count)
        except Exception as error:
            print(f"  NOT CAPTURED {name}: {type(error).__name__}: {str(error)[:300]}")
    alone = medians(graphs, count, options.rounds)
    small = torch.zeros(rows, size, device="cuda", dtype=torch.bfloat16)
    graphs.clear()
    behind = {}
    order = sorted(alone, key=alone.get)
    keep = order if many else [*order[:6], "eager"]
    for name in keep:
        graphs[name] = captured(runs[name], operands, count, lambda: small.add_(1))
    graphs["small"] = captured(lambda *_: None, operands, count, lambda: small.add_(1))
    behind = medians(graphs, count, options.rounds)
    moved = 2 * (rows * size + columns * size + columns + rows * columns)
    least = moved / COPIED * 1e6
    print(f"  floor {least:.2f} us; {copies} weights, {count} calls a graph; the small kernel {behind['small']:.2f}")
    for name in order:
        after = behind[name] - behind["small"] if name in behind else math.nan
        print(f"  {name:<40}{alone[name]:9.2f}{after:9.2f}   of floor {least / alone[name]:.3f}   eager over it {alone['eager'] / alone[name]:.3f} {(behind['eager'] - behind['small']) / after:.3f}")
    print(f"  {time.monotonic() - begin:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", nargs="+", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=150, help="then no further shape")
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    print(torch.__version__, triton.__version__, torch.cuda.get_device_name(), flush=True)
    for shape in options.shape:
        if time.monotonic() - begin > options.seconds:
            print(f"{shape} left out: {options.seconds} s are up")
            continue
        probed(shape, options, begin)


if __name__ == "__main__":
    main()
