"""Measure how a GEMM's time varies between processes on a GPU, by buffer placement.

    python -m benchmarks process_spread

A line for each process: the share of the free memory over which blocks move (`clocks.JUNK`), then
for each GEMM the median of eight blocks in microseconds, and the spread of the blocks in percent.
"""

import json
import statistics
import subprocess
import sys

PRODUCTS = {"512x4096x4096": (512, 4096, 4096), "100352x256x64": (100352, 256, 64)}
SHARES, PROCESSES, BLOCKS, ROUNDS = (0.0018, 0.125), 6, 8, 8


def measure(share: float) -> dict[str, tuple[float, float]]:
    """Measure in this process."""
    import torch

    from ipex_inductor.autotune import timers

    timers.JUNK = share
    device = torch.device("cuda")
    clock, found = timers.clock_of(device), {}
    for name, (m, k, n) in PRODUCTS.items():
        count = timers.buffers_against_caches(device, 2 * (m * k + k * n))
        buffers = [
            [torch.randn(size, device=device).bfloat16() for size in ((m, k), (n, k))]
            for _ in range(count)
        ]
        blocks = []
        for seed in range(BLOCKS):
            here = timers.relocate_buffers(buffers, seed)
            timed = clock.prepare(lambda pair: torch.mm(pair[0], pair[1].t()), here)
            blocks.append(statistics.median(timed() for _ in range(ROUNDS)))
            del timed, here
        middle = statistics.median(blocks)
        found[name] = round(middle, 3), round(100 * statistics.stdev(blocks) / middle, 2)
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(sys.argv[1], json.dumps(measure(float(sys.argv[1]))))
    else:
        for share in SHARES * PROCESSES:
            subprocess.run([sys.executable, __file__, str(share)], check=True)
