"""Cases of `templates/triton/pool.py`, and how far a kernel is off: interpreted, or on a GPU.

`TRITON_INTERPRET=1 python pool_cases.py FIRST LAST` prints a number for each: in how many elements.
"""

import random
import sys

import torch
import torch.nn.functional as F

import ipex_inductor.ops  # noqa: F401  registers them
from ipex_inductor.templates.build.gpu import _module
from ipex_inductor.templates.triton import pool as template
from support.rendered_templates import source

LAST = torch.channels_last


def random_case(seed):
    """A window that fits, on an image of odd sizes."""
    draw = random.Random(seed)
    window = [draw.choice((1, 2, 3, 5)) for _ in range(2)]
    stride = [draw.randint(-(-size // 3), size + 2) for size in window]
    padding = [draw.randint(0, size // 2) for size in window]
    image = [draw.choice((5, 7, 12, 17)) for _ in range(2)]
    given = {"window": window, "stride": stride, "padding": padding}
    tile = draw.choice(template.TILES)
    channels = draw.choice((8, 16, 24, 40))
    return (
        {"x": [draw.randint(1, 3), channels, *image], "ceil": draw.random() < 0.5}
        | given
        | {"tile": [*vars(tile).values()], "dtype": draw.choice(DTYPES)}
    )


DTYPES = ("float32", "bfloat16", "float16")
RESNET = {"x": [2, 64, 32, 32], "window": [3, 3], "stride": [2, 2], "padding": [1, 1]}
CASES = [
    {**RESNET, "ceil": False, "tile": [32, 64, 4], "dtype": "bfloat16"},
    {**RESNET, "ceil": True, "tile": [32, 64, 4], "dtype": "float32"},
    *map(random_case, range(46)),
]


def pooled(case, device="cpu"):
    """An image with equal neighbours, what a pool makes of it, and a gradient of that."""
    torch.manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    x = torch.randint(-2, 3, case["x"]).to(device, dtype).to(memory_format=LAST)
    around = case["window"], case["stride"], case["padding"]
    y, at = F.max_pool2d(x, *around, ceil_mode=case["ceil"], return_indices=True)
    grad = torch.randn_like(y)
    columns = torch.arange(y.shape[3], device=device) * around[1][1] - around[2][1]
    rows = (torch.arange(y.shape[2], device=device) * around[1][0] - around[2][0])[:, None]
    offsets = (at // x.shape[3] - rows) * around[0][1] + at % x.shape[3] - columns
    return x, y, at, grad, offsets.to(torch.int8).to(memory_format=LAST)


def rendered(case, shape, sides, text=template.BACKWARD):
    """Its constants, and the source of the kernel."""
    around = case["window"], case["stride"], case["padding"]
    tile = template.Tile(*case["tile"])
    constants = template.constants(shape[0], shape[1:], sides, *around, tile)
    return constants, source(text, constants, shape[1], epilogue=False)


def launched(constants, text, count, case, device, *operands):
    """Its result's rows, in memory that was full of NaN."""
    tile, channels = template.Tile(*case["tile"]), case["x"][1]
    rows = torch.full([count, channels], torch.nan).to(device, getattr(torch, case["dtype"]))
    blocks = constants["STEPS" if "GRAD" in text else "PIXELS"]
    grid = -(-blocks // tile.BLOCK_M), -(-channels // tile.BLOCK_N)
    warps = {} if device == "cpu" else {"num_warps": tile.num_warps}
    _module(text)["kernel"][grid](*operands, None, rows, **warps)
    return rows


def forward_differs(case, device="cpu"):
    """In how many values and offsets, of numbers with which all arithmetic is exact."""
    if case["ceil"]:  # which is left to Inductor
        return 0
    x, *_ = pooled(case, device)
    around, channels = (case["window"], case["stride"], case["padding"]), x.shape[1]
    rng = random.Random(0)

    def draw(*of):
        return torch.tensor(rng.choices(of, k=channels), device=device)

    each = draw(-0.5, 0.0, 1.5), draw(0.5, 1.0, 2.0), draw(-2.0, 1.0, 3.0), draw(-1.0, 0.0, 4.0)
    if case["x"][0] > 1:
        x[0, :, 2:4, 1] = torch.nan
    wanted, places = torch.ops.ipex.norm_relu_pool(x, *each, *around)
    offsets = torch.full_like(places, 77)
    sides = [-(-(n + 2 * p - w + 1) // s) for n, w, s, p in zip(x.shape[2:], *around, strict=True)]
    constants, text = rendered(case, x.shape, sides, template.FORWARD)
    *three, bias = each
    rows = launched(constants, text, len(wanted), case, device, x, *three, offsets, bias)
    same = (rows == wanted) | (rows.isnan() & wanted.isnan())
    certain = offsets == places
    certain |= wanted.isnan()  # torch takes the last of them on a CPU
    return int((~same).sum() + (~certain).sum())


def differs(case, device="cpu"):
    """In how many elements, by more than one rounding; into memory full of NaN."""
    x, y, at, grad, offsets = pooled(case, device)
    constants, text = rendered(case, x.shape, y.shape[2:])
    count = x.numel() // x.shape[1]
    rows = launched(constants, text, count, case, device, grad, offsets, None)
    around = case["window"], case["stride"], case["padding"]
    same = torch.ops.ipex.max_pool_backward(grad, offsets, [*x.shape[2:]], *around)
    exact = torch.zeros(*x.shape[:2], x[0, 0].numel(), dtype=torch.float64, device=device)
    exact.scatter_add_(2, at.flatten(2), grad.flatten(2).double())
    exact = exact.view(x.shape).permute(0, 2, 3, 1).reshape(rows.shape)
    # Nine numbers of a few units are added in fp32, then rounded once.
    close = 1e-5 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
    bound = close * exact.abs() + 1e-5
    return sum(int(((r.double() - exact).abs() <= bound).logical_not().sum()) for r in (rows, same))


if __name__ == "__main__":
    for each in CASES[slice(*map(int, sys.argv[1:]))]:
        print(differs(each) + forward_differs(each), flush=True)
