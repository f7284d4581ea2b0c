"""The template of GEMMs on quantized weights rendered alone: compiled for GPUs, or interpreted.

Run as a program by Triton's interpreter:
`TRITON_INTERPRET=1 python weight_only_rendered.py CASES`, which prints a case's error each line.
"""

import json
import sys
from pathlib import Path

from support.rendered_templates import binary, source

NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
STORED = {"int4": "u8", "nf4": "u8", "int8": "i8", "fp8": "fp8e4nv"}


def case_of(
    weight_dtype,
    sizes,
    group,
    tile,
    dtype="bfloat16",
    scales="float16",
    zeroed=False,
    stepped=False,
):
    """A GEMM of `sizes` M, N, K by a tile."""
    given = {"weight_dtype": weight_dtype, "sizes": sizes, "group": group, "tile": tile}
    return {**given, "dtype": dtype, "scales": scales, "zeroed": zeroed, "stepped": stepped}


def render(case, ptx):
    """Return the text of a case's kernel, its constants and its tile."""
    from ipex_inductor.templates.triton import weight_only

    decoding = weight_only.Decoding(
        *(case[name] for name in ("weight_dtype", "dtype", "scales", "zeroed", "stepped"))
    )
    tile = weight_only.Tile(*case["tile"])
    constants = weight_only.constants(*case["sizes"], case["group"], decoding, tile)
    text = weight_only.source(decoding, ptx)
    return source(text, constants, constants["COLUMNS"], epilogue=False), constants, tile


def compile_case(case, gpu):
    """Return what Triton makes of a case for a GPU that is not here."""
    text, _, tile = render(case, True)
    pointers = {"X": f"*{NAMES[case['dtype']]}", "W": f"*{STORED[case['weight_dtype']]}"}
    pointers |= {"FACTORS": "*i32"} | ({"STEPS_OF_X": "*fp32"} if case["stepped"] else {})
    pointers |= {"BIAS": "*fp32", "OTHER": "*fp32", "OUT": "*fp32"}
    return binary(text, pointers, tile, gpu)


def operands(case, device="cpu"):
    """Return x, the stored weight, scales and zero points of a case, and the exact result."""
    import torch

    from ipex_inductor.ops.quant.weight_only import NF4, Scheme, dequantize_weight
    from support.weight_only_ops import make_operands

    torch.manual_seed(0)
    (rows, columns, terms), dtype = case["sizes"], getattr(torch, case["dtype"])
    scheme = Scheme(case["weight_dtype"], case["group"], case["dtype"])
    scale_dtype = getattr(torch, case["scales"])
    words = {"dtype": dtype, "scale_dtype": scale_dtype, "zeros": case["zeroed"]}
    o = make_operands(rows, terms, columns, scheme, **words)
    plain = dequantize_weight(o.weight, o.scales, o.zeros, scheme, terms).double()
    if case["weight_dtype"] == "nf4":  # levels are rounded, not what a scale makes of them
        scales = o.scales.double().repeat_interleave(case["group"], 1)[:, :terms]
        levels = torch.tensor(NF4).to(dtype).double()
        nibbles = torch.stack([o.weight & 15, o.weight >> 4], -1).flatten(1)[:, :terms]
        plain = levels[nibbles.long()] * scales
    x, exact_x, x_scales = o.x, o.x.double(), []
    if case["stepped"]:
        x = torch.randint(-127, 128, (rows, terms)).to(dtype)
        x_scales = [torch.rand(rows, o.scales.shape[1]) + 0.5]
        exact_x = x.double() * x_scales[0].double().repeat_interleave(case["group"], 1)[:, :terms]
    tensors = [t if t is None else t.to(device) for t in (x, o.weight, o.scales, o.zeros)]
    return [*tensors, *(t.to(device) for t in x_scales)], exact_x, plain


def error(case, device="cpu"):
    """Return the largest error of a case, in parts of the sums of magnitudes."""
    import torch

    from ipex_inductor.ops.quant.weight_only_rows import weight_only_factors
    from ipex_inductor.templates.build.gpu import _module

    (x, weight, scales, zeros, *x_scales), exact_x, plain = operands(case, device)
    factors = weight_only_factors(scales, zeros, case["weight_dtype"], x.dtype)
    text, constants, tile = render(case, device != "cpu")
    if constants["NIBBLES"] and not constants["PAIRS"]:
        x = x.unflatten(1, (-1, 2)).mT.flatten(1).contiguous()
    shape = constants["PARTS"] * constants["ROWS"], constants["COLUMNS"]
    out = torch.full(shape, float("nan"), device=device)
    options = {}
    if device != "cpu":
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    grid = constants["BLOCKS_M"] * constants["BLOCKS_N"], constants["PARTS"]
    _module(text)["kernel"][grid](x, weight, factors, *x_scales, out, out, out, **options)
    wanted, sizes = exact_x @ plain.t(), exact_x.abs() @ plain.abs().t()
    sums = out.cpu().double().unflatten(0, (constants["PARTS"], -1)).sum(0)
    return float(((sums - wanted).abs() / sizes).max())


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text()):
        print(each["weight_dtype"], error(each), flush=True)
