"""Templates of 8-bit integers rendered alone: compiled for any GPU, and run on random integers.

Run as a program by Triton's interpreter: `TRITON_INTERPRET=1 python int8_rendered.py CASES`.
"""

import json
import sys
from pathlib import Path

from support.rendered_templates import binary, source

# Results have one rounding of a sum of at most 2^24, and one of a multiplication and an addition.
CLOSE = 3e-7
PROGRAMS = 3  # of persistent kernels, so that each has several blocks


def render(case):
    """Return the text of a case's kernel, its constants, its tile and its grid.

    Args:
        case: `template`, `x` [B, C, H, W] (H and W are 1 of a GEMM), `out` (O), `window`, `stride`,
            `padding`, `dilation`, the fields of `tile`, and `other` with an addend.
    """
    from ipex_inductor.templates.triton import int8_boxes, int8_conv, int8_gemm, int8_streamed

    batch, *image = case["x"]
    geometry = tuple(case[name] for name in ("window", "stride", "padding", "dilation"))
    programs = case.get("programs", PROGRAMS)
    if case["template"] == "gemm":
        tile = int8_gemm.Tile(*case["tile"])
        constants = int8_gemm.constants(batch, case["out"], image[0], tile, programs)
        blocks = min(programs, constants["BLOCKS_M"] * constants["BLOCKS_N"])
        text, columns = int8_gemm.SOURCE, constants["COLUMNS"]
    elif case["template"] == "streamed":
        tile = int8_streamed.Tile(*case["tile"])
        constants = int8_streamed.constants(batch, case["out"], image[0], tile, programs)
        blocks, text, columns = constants["PROGRAMS"], int8_streamed.SOURCE, constants["COLUMNS"]
    elif case["template"] == "boxes":
        tile = int8_boxes.Tile(*case["tile"])
        constants = int8_boxes.constants(batch, image, case["out"], *geometry, tile, programs)
        blocks, text, columns = constants["PROGRAMS"], int8_boxes.SOURCE, constants["OUT_C"]
    else:
        tile = int8_conv.Tile(*case["tile"])
        constants = int8_conv.constants(batch, image, case["out"], *geometry, tile)
        blocks = -(-constants["PIXELS"] // tile.BLOCK_M) * constants["BLOCKS_N"]
        text, columns = int8_conv.SOURCE, constants["OUT_C"]
    constants = {**constants, "ADDED": "other" in case}
    return source(text, constants, columns, epilogue=False), constants, tile, (blocks,)


def compile_case(case, gpu):
    """Return what Triton makes of a case for a GPU that is not here."""
    text, _, tile, _ = render(case)
    pointers = {"X": "*i8", "W": "*i8", "FACTORS": "*fp32"}
    pointers |= {"ADDEND": "*i8", "SCALE": "*fp32"} if "other" in case else {}
    return binary(text, pointers | {"BIAS": "*fp32", "OTHER": "*fp32", "OUT": "*fp32"}, tile, gpu)


def error(case, device="cpu"):
    """Return the largest error of a case, in parts of the largest exact value."""
    import torch
    import torch.nn.functional as F

    from ipex_inductor.ops.conv.geometry import rows_of
    from ipex_inductor.ops.quant.int8_borders import edges_of
    from ipex_inductor.ops.quant.int8_operands import int8_factors
    from ipex_inductor.templates.build.gpu import _module

    torch.manual_seed(0)
    geometry = tuple(case[name] for name in ("window", "stride", "padding", "dilation"))
    window, stride, padding, dilation = geometry
    x = torch.randint(-128, 128, case["x"], dtype=torch.int8)
    weight = torch.randint(-128, 128, (case["out"], case["x"][1], *window), dtype=torch.int8)
    scale, own, zero = torch.rand(()) + 0.5, torch.rand(case["out"]) + 0.5, torch.tensor(-100)
    bias = torch.randn(case["out"]) * 1000
    padded = F.pad(x.double() - zero, [padding[1]] * 2 + [padding[0]] * 2)
    sums = F.conv2d(padded, weight.double(), None, stride, 0, dilation)
    exact = sums * (scale * own).double().view(-1, 1, 1) + bias.double().view(-1, 1, 1)
    edges = [] if case["template"] in ("gemm", "streamed") else [*edges_of(x.shape[2:], *geometry)]
    # On a CPU this op is for kernels that read unsigned integers: 128 is of the zero point there.
    factors = int8_factors(scale, zero, weight, own, None, bias, 128, 1, edges)
    totals = weight.flatten(1).sum(1, dtype=torch.int64) * (scale * own).double()
    factors[1] += (totals * 128).float()
    rows = weight.permute(0, 2, 3, 1).flatten().contiguous().to(device)
    wanted, added = rows_of(exact), []
    if "other" in case:
        other, other_scale = torch.randint(-128, 128, wanted.shape, dtype=torch.int8), 5000.0
        wanted = wanted + other.double() * other_scale
        added = [other.to(device), torch.tensor([other_scale], device=device)]
    out = torch.full(wanted.shape, float("nan"), device=device)
    text, constants, tile, blocks = render(case)
    options = {}
    if device != "cpu":
        import triton

        options = {"num_warps": tile.num_warps, "num_stages": constants.get("STAGES", 2)}
        triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    image = x.to(device).to(memory_format=torch.channels_last)
    kernel = _module(text)["kernel"]
    kernel[blocks](image, rows, factors.to(device), *added, out, out, out, **options)
    # Offsets may be larger than results: each has a rounding of its own.
    largest = max(float(wanted.abs().max()), float(factors[1:].abs().max()))
    return float((out.cpu().double() - wanted).abs().max()) / largest


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text()):
        print(each["template"], error(each), flush=True)
