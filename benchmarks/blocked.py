"""Products of convolutions of one pixel and linear layers on a CPU: in blocks, and oneDNN's.

    python benchmarks/blocked.py [--threads N] [--wall] [--json FILE] [--only WORDS]

Each on packed weights, with bias and a ReLU or, of convolutions to more channels, an addend and a
ReLU. Minima of interleaved rounds, in microseconds a call: of the process's processor time, so that
others who work on the machine matter less, or by the clock. Errors are relative to fp64.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from cpu_kernels import arguments, keep, least
from torch import Tensor

from ipex_inductor.ops.blocked import COLUMNS
from ipex_inductor.passes import blocked as choice
from ipex_inductor.target import current
from ipex_inductor.templates import blocked

ROUNDS = 25
mkldnn = torch.ops.mkldnn

# Rows of one image or text, depth, columns: ResNet-50's, BERT-base's, GPT-2's.
IMAGES = ((3136, 64, 256), (3136, 256, 64), (784, 128, 512), (784, 512, 128))
IMAGES += ((196, 256, 1024), (196, 1024, 256), (49, 512, 2048), (49, 2048, 512))
LAYERS = ((128, 768, 768), (128, 768, 3072), (128, 3072, 768))
NARROW = ((16, 16, 16), (128, 16, 256), (1024, 32, 64), (1024, 64, 256), (8192, 64, 64))
DECODE = ((1, 768, 2304), (1, 768, 3072), (1, 3072, 768), (1, 768, 50257))


def cases() -> Iterator[tuple[torch.dtype, bool, tuple[int, int, int]]]:
    """Dtype, whether it is a convolution's, sizes."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows, depth, columns in IMAGES:
            for batch in (1, 4, 16):
                yield dtype, True, (rows * batch, depth, columns)
        for rows, depth, columns in LAYERS:
            for batch in (1, 2, 4, 8, 16, 64):
                yield dtype, False, (rows * batch, depth, columns)
        for sizes in (*NARROW, *DECODE):
            yield dtype, False, sizes


def calls(
    dtype: torch.dtype, image: bool, sizes: tuple[int, int, int]
) -> Iterator[tuple[str, Callable[[], object], Tensor, Callable[[], Tensor]]]:
    """Name, the call, the exact result, and the computed one."""
    rows, depth, columns = sizes
    added = image and depth < columns
    shapes = (rows, depth), (columns, depth), (columns,), (rows, columns)
    x, weight, bias, other = (torch.randn(s).to(dtype) for s in shapes)
    weight /= depth**0.5
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    truth = torch.relu(exact + other.double() if added else exact)
    panel = choice.PANEL.get(current().arch, COLUMNS)
    out, arranged = torch.empty_like(other), torch.ops.ipex.blocks(weight, panel)
    words = columns, True, int(added), blocked.UNARY.index("relu")
    rest = (bias, other) if added else (bias,)
    yield "blocked", lambda: blocked.call(x, arranged, *rest, *words, out=out), truth, lambda: out
    if not image:
        packed = mkldnn._reorder_linear_weight(weight, rows)
        plain = functools.partial(mkldnn._linear_pointwise, x, packed, bias, "relu", [], "")
        yield "onednn", plain, truth, plain
        return
    side = next(n for n in (56, 28, 14, 7) if rows % (n * n) == 0)
    images = [t.view(-1, side, side, t.shape[1]).permute(0, 3, 1, 2) for t in (x, other)]
    window = [0, 0], [1, 1], [1, 1], 1
    packed = mkldnn._reorder_convolution_weight(
        weight[:, :, None, None], *window, list(images[0].shape)
    )
    known = (packed, bias, *window)
    if not added:
        conv = functools.partial(mkldnn._convolution_pointwise, images[0], *known, "relu", [], "")
        yield "onednn", conv, truth, lambda: conv().permute(0, 2, 3, 1).reshape(rows, columns)
        return
    # In place it saves a copy of the addend; that the addend grows changes no speed.
    last = ("add", 1.0, "relu", [], "")
    summed = images[1].clone(memory_format=torch.channels_last)
    conv = functools.partial(
        mkldnn._convolution_pointwise_.binary, summed, images[0], *known, *last
    )
    once = functools.partial(mkldnn._convolution_pointwise.binary, *images, *known, *last)
    yield "onednn", conv, truth, lambda: once().permute(0, 2, 3, 1).reshape(rows, columns)


@torch.no_grad()
def main() -> None:
    """Print a row a case; with --json also append it to FILE."""
    parser = arguments(__doc__)
    parser.add_argument("--wall", action="store_true", help="by the clock: nobody else works here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for dtype, image, sizes in cases():
        row = {"dtype": str(dtype), "image": image, "rows, depth, columns": sizes}
        if options.only not in str(row):
            continue
        made = list(calls(dtype, image, sizes))
        by_name = {name: call for name, call, _, _ in made}
        best = least(by_name, made[0][0], ROUNDS, options.wall)
        for name, _, truth, result in made:
            row[f"{name}, us"] = round(best[name], 1)
            row[f"{name}, error"] = float((result().double() - truth).norm() / truth.norm())
        row["speedup"] = round(best["onednn"] / best["blocked"], 3)
        keep(row, options)


if __name__ == "__main__":
    main()
