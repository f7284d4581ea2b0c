"""Compare two places for a residual sum before a layer norm: the oneDNN call, the norm.

    python -m benchmarks add_norm

Linear, residual sum and layer norm in inference, on packed weights of 768 to 768, as in BERT-base.
Minima of interleaved rounds, in milliseconds of one thread's processor time, and the mean error
against float64. Rule `linear + add + layer_norm` of `passes/fusion/linear.py` rests on them.
"""

import copy
import time

import torch
from torch import Tensor, nn

from ipex_inductor import compat
from ipex_inductor.passes.fusion import linear

WIDTH, LAYERS, ROUNDS = 768, 6, 40


class PostNorm(nn.Module):
    """LAYERS times `norm(linear(x) + y)`."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y and result [1, rows, WIDTH]."""
        for layer, norm in zip(self.linears, self.norms, strict=True):
            y = norm(layer(x) + y)
        return y


@torch.no_grad()
def main() -> None:
    """Print one line for each dtype and number of rows."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (128, 1024):
            torch.compiler.reset()
            model = PostNorm().to(dtype).eval()
            inputs = [torch.randn(1, rows, WIDTH, dtype=dtype) for _ in range(2)]
            truth = copy.deepcopy(model).double()(*(x.double() for x in inputs))
            runs, errors = [], []
            for off in ("", f"-{linear.NORMED.name}"):
                with compat.graph_caches_off():
                    runs.append(torch.compile(model, backend="ipex", options={"rules": off}))
                    errors.append((runs[-1](*inputs).double() - truth).abs().mean().item())
            best = [float("inf")] * len(runs)
            for _ in range(ROUNDS):
                for i, run in enumerate(runs):
                    start = time.process_time()
                    run(*inputs)
                    best[i] = min(best[i], time.process_time() - start)
            left, fused = (seconds * 1e3 for seconds in best)
            told = f"left {left:.2f} ms, fused {fused:.2f} ms, {fused / left:.3f}"
            print(f"{dtype} {rows:4} rows: {told}; errors {errors[0]:.1e} {errors[1]:.1e}")


if __name__ == "__main__":
    main()
