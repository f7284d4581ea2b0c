"""Compare three linear layers on one input: three oneDNN calls, and one joined call.

    python -m benchmarks shared_input

Packed weights of 768 to 768, as in BERT-base's attention; the joined call copies each share. Minima
of interleaved rounds, in microseconds. `FEW` in `passes/fusion/shared_input.py` rests on them.
"""

import time

import torch

WIDTH, ROUNDS = 768, 60
mkldnn = torch.ops.mkldnn


def main() -> None:
    """Print one line for each dtype and number of rows."""
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(WIDTH, WIDTH, dtype=dtype) for _ in range(3)]
        for rows in (1, 4, 16, 32, 128):
            x = torch.randn(rows, WIDTH, dtype=dtype)
            parts = [mkldnn._reorder_linear_weight(w, rows) for w in weights]
            joint = mkldnn._reorder_linear_weight(torch.cat(weights), rows)
            three, one = least_times(x, parts, joint)
            print(f"{dtype} {rows:4} rows: {three:7.1f} {one:7.1f}  {one / three:.2f}")


def least_times(x: torch.Tensor, parts: list[torch.Tensor], joint: torch.Tensor) -> list[float]:
    """Return microseconds of three calls, and of one."""

    def call(weight: torch.Tensor) -> torch.Tensor:
        return mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    runs = [
        lambda: [call(w) for w in parts],
        lambda: [share.contiguous() for share in call(joint).split(WIDTH, -1)],
    ]
    best = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - start)
    return [seconds * 1e6 for seconds in best]


if __name__ == "__main__":
    main()
