"""Measure the read bandwidth of a GPU's L2 cache.

    python -m benchmarks l2_bandwidth [--json FILE]

All multiprocessors read the same bytes again and again. Prints TB/s, the best of some block sizes
and numbers of programs, by pointers and by TMA (as our GEMMs read): buffers that fit into the
cache, and one that does not.
"""

import argparse
import json
import time
from itertools import product
from pathlib import Path
from statistics import median

import torch
import triton
import triton.language as tl

from ipex_inductor.target import device as target

BUFFERS = (8, 16, 24, 32, 1024)  # MB
READ = 4 << 30  # bytes in all, of each launch
COLUMNS = 64  # of bf16, a line of the copy engine's


@triton.jit
def read_by_pointers(x, out, rows, turns, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Read blocks of rows by pointers, around the buffer from the program's own offset."""
    program = tl.program_id(0)
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    place = tl.arange(0, BLOCK)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    blocks = rows // BLOCK
    for turn in range(turns):
        block = (program + turn * tl.num_programs(0)) % blocks
        sums += tl.load(x + block.to(tl.int64) * BLOCK * WIDTH + place).to(tl.float32)
    tl.store(out + program, tl.sum(sums))


@triton.jit
def read_by_descriptor(x, out, rows, turns, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Read blocks of rows by TMA descriptors."""
    program = tl.program_id(0)
    whole = tl.make_tensor_descriptor(x, [rows, WIDTH], [WIDTH, 1], [BLOCK, WIDTH])
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    blocks = rows // BLOCK
    for turn in tl.range(turns, num_stages=4):
        block = (program + turn * tl.num_programs(0)) % blocks
        sums += whole.load([block * BLOCK, 0]).to(tl.float32)
    tl.store(out + program, tl.sum(sums))


def measure_bandwidth(kernel, megabytes: int, block: int, each: int) -> float:
    """Return TB/s, the median of seven launches with `each` programs a multiprocessor."""
    rows = (megabytes << 20) // (2 * COLUMNS) // block * block
    x = torch.randn(rows, COLUMNS, device="cuda").bfloat16()
    programs = each * torch.cuda.get_device_properties(0).multi_processor_count
    turns = READ // (2 * COLUMNS * block * programs)
    out = torch.empty(programs, device="cuda")
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernel[(programs,)](x, out, rows, turns, BLOCK=block, WIDTH=COLUMNS, num_warps=4)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * COLUMNS * block * programs * turns / (1e-3 * median(times[2:])) / 1e12


def main(file: Path | None) -> None:
    """Print, and keep."""
    triton.set_allocator(lambda size, *_: torch.empty(size, device="cuda", dtype=torch.int8))
    device = str(target.current("cuda"))
    print(f"{device}, torch {torch.__version__}; TB/s, best of blocks of rows x programs")
    for kernel, megabytes in product((read_by_pointers, read_by_descriptor), BUFFERS):
        name = kernel.fn.__name__
        found = {
            (block, each): measure_bandwidth(kernel, megabytes, block, each)
            for block, each in product((32, 64, 128), (1, 2, 4, 8))
            if block * each <= 512  # what shared memory holds of four stages
        }
        block, each = max(found, key=lambda key: found[key])
        best = found[block, each]
        print(f"{name:14} {megabytes:5} MB  {best:6.2f}  ({block} rows, {each} a multiprocessor)")
        if file:
            row = {
                "date": time.strftime("%Y-%m-%d"),
                "device": device,
                "torch": torch.__version__,
                "triton": triton.__version__,
                "command": "python -m benchmarks l2_bandwidth",
                "kernel": name,
                "MB": megabytes,
                "TB/s": best,
                "rows of a block": block,
                "programs a multiprocessor": each,
            }
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    main(parser.parse_args().json)
