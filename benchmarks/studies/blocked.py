"""Compare 1x1 convolutions and linear layers on a CPU: blocked kernels and libraries.

    python -m benchmarks blocked [--threads N] [--wall] [--others] [--json FILE] [--only WORDS]

Each on packed weights, with bias and a ReLU; convolutions to more channels also with an addend.
Peers: oneDNN; with `--others`, for linear layers, MKL in fp32 (a second call for the ReLU) and
Inductor's C++ template (fused ReLU). fp16, for which most CPUs have no instructions, is compared
with fp32 on upcast weights and with torch. Minima of interleaved rounds, in microseconds a call:
processor time, so that other load matters less, or wall time with `--wall`. Errors are relative to
fp64.
"""

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.output_code import CompiledFxGraph

from ipex_inductor.ops.gemm.blocked import COLUMNS
from ipex_inductor.passes.weights import blocked as choice
from ipex_inductor.target.device import current
from ipex_inductor.templates.cpu import blocked

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu_kernels import append_row, least_times, make_parser

ROUNDS = 25
mkldnn, mkl = torch.ops.mkldnn, torch.ops.mkl
TEMPLATE = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}

# Rows of one image or text, depth, columns: ResNet-50's, BERT-base's, GPT-2's.
IMAGES = ((3136, 64, 256), (3136, 256, 64), (784, 128, 512), (784, 512, 128))
IMAGES += ((196, 256, 1024), (196, 1024, 256), (49, 512, 2048), (49, 2048, 512))
LAYERS = ((128, 768, 768), (128, 768, 3072), (128, 3072, 768))
NARROW = ((16, 16, 16), (128, 16, 256), (1024, 32, 64), (1024, 64, 256), (8192, 64, 64))
# Of recommenders, graph networks and policies: few terms, few columns.
SMALL = ((64, 14, 128), (64, 64, 1), (384, 64, 10), (1536, 16, 1), (64, 64, 64), (64, 128, 128))
SMALL += ((384, 32, 64), (384, 64, 64), (16, 128, 512), (96, 128, 512))
FEW = tuple((rows, 768, 3072) for rows in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64))
DECODE = ((1, 768, 2304), (1, 768, 3072), (1, 3072, 768), (1, 768, 50257))


def cases() -> Iterator[tuple[torch.dtype, bool, tuple[int, int, int]]]:
    """Yield dtype, whether it is a convolution, and sizes."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for rows, depth, columns in IMAGES:
            for batch in (1, 4, 16):
                yield dtype, True, (rows * batch, depth, columns)
        for rows, depth, columns in LAYERS:
            for batch in (1, 2, 4, 8, 16, 64):
                yield dtype, False, (rows * batch, depth, columns)
        for sizes in (*NARROW, *SMALL, *DECODE, *(FEW if dtype == torch.float16 else ())):
            yield dtype, False, sizes


def compile_template(weight: Tensor, bias: Tensor, x: Tensor) -> Callable[[], Tensor]:
    """Compile a frozen layer with a ReLU by Inductor's C++ template, without Dynamo."""
    layer = nn.Linear(*weight.shape[::-1]).to(weight.dtype).eval()
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)

    def graphs() -> dict[int, CompiledFxGraph]:
        return {id(g): g for g in gc.get_objects() if type(g) is CompiledFxGraph}

    torch.compiler.reset()
    before = graphs()
    with config.patch(TEMPLATE):  # read before the backend is
        torch.compile(lambda x: torch.relu(layer(x)), dynamic=False)(x)
    (made,) = (g for number, g in graphs().items() if number not in before)
    if "extern_kernels." in made.source_code:
        raise RuntimeError("Inductor's C++ template is not what it took")
    code = made.current_callable
    return lambda: code([x])[0]


def calls(
    dtype: torch.dtype, image: bool, sizes: tuple[int, int, int], others: bool
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
    if dtype == torch.float16:
        inputs = [t.float() for t in (x, torch.ops.ipex.blocks(weight.float(), panel), *rest)]
        last = torch.empty(rows, columns)
        wide = functools.partial(blocked.call, *inputs, *words, out=last)
        yield "wide", wide, truth, lambda: last
        if not added:
            plain = functools.partial(torch.nn.functional.linear, x, weight, bias)
            yield "torch", lambda: plain().relu_(), truth, lambda: plain().relu_()
        return
    if not image:
        packed = mkldnn._reorder_linear_weight(weight, rows)
        plain = functools.partial(mkldnn._linear_pointwise, x, packed, bias, "relu", [], "")
        yield "onednn", plain, truth, plain
        if others and dtype == torch.float32:
            theirs = mkl._mkl_reorder_linear_weight(weight, rows)
            product = functools.partial(mkl._mkl_linear, x, theirs, weight, bias, rows)
            yield "mkl", lambda: product().relu_(), truth, lambda: product().relu_()
        if others:
            code = compile_template(weight, bias, x)
            yield "template", code, truth, code
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
    parser = make_parser(__doc__)
    parser.add_argument("--wall", action="store_true", help="by the clock: nobody else works here")
    parser.add_argument("--others", action="store_true", help="MKL's and Inductor's, of layers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for dtype, image, sizes in cases():
        row = {"dtype": str(dtype), "image": image, "rows, depth, columns": sizes}
        if options.only not in str(row):
            continue
        made = list(calls(dtype, image, sizes, options.others))
        by_name = {name: call for name, call, _, _ in made}
        best = least_times(by_name, made[0][0], ROUNDS, options.wall)
        for name, _, truth, result in made:
            row[f"{name}, us"] = round(best[name], 1)
            row[f"{name}, error"] = float((result().double() - truth).norm() / truth.norm())
        usual = "wide" if dtype == torch.float16 else "onednn"
        row["speedup"] = round(best[usual] / best["blocked"], 3)
        append_row(row, options)


if __name__ == "__main__":
    main()
