"""Products of few rows by the kernel alone, held against fp64; and problems that have it."""

import itertools
import re
from math import ceil

import torch
import triton

from ipex_inductor.lowerings.problem import shapes
from ipex_inductor.lowerings.select import library
from ipex_inductor.templates.build import gpu
from ipex_inductor.templates.triton import skinny
from ipex_inductor.templates.triton.skinny import source, tiles

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EVERY = [(one_row, tile) for one_row in (True, False) for tile in tiles(one_row)]

# Rows, columns, terms: primes, ones, tails behind tiles and steps, sums that are long, rows of the
# weight that no vector divides.
MORE = [(2, 1), (3, 61), (5, 17), (13, 47), (16, 64), (17, 33), (31, 65), (32, 70)]
SHAPES = [
    *((1, n, k) for n in (1, 2, 3, 5, 7, 16, 17, 37) for k in (1, 8, 127, 1024, 2050)),
    (1, 5, 70001),
    *((m, n, k) for m, n in MORE for k in (1, 8, 96, 131, 1031)),
    (4, 7, 33000),
]


LAYOUTS = ({}, {"left": 3}, {"right": 5}, {"left": 8, "right": 8})


def cases(device, whole=True):
    """Tiles with x and a weight: shapes, the layouts and tiles in turns; then every tile.

    The `whole` of it is every shape in every dtype, else a third of them in one each.
    """
    torch.manual_seed(0)
    turns = {one_row: itertools.cycle(tiles(one_row)) for one_row in (True, False)}
    for at, (rows, columns, size) in enumerate(SHAPES if whole else SHAPES[::3]):
        for dtype in DTYPES if whole else DTYPES[at % 3 : at % 3 + 1]:
            x, weight = (torch.randn(n, size).to(device, dtype) for n in (rows, columns))
            layout = LAYOUTS[at % len(LAYOUTS)]
            x = hidden(x, **layout, turned=at % 5 == 0 and rows > 1)
            yield next(turns[rows == 1]), x, hidden(weight, **layout)
    for one_row, tile in EVERY:
        x, weight = torch.randn(1 if one_row else 5, 1100), torch.randn(19, 1100)
        yield tile, x.to(device, torch.bfloat16), weight.to(device, torch.bfloat16)


def hidden(tensor, *, left=0, right=0, turned=False):
    """The same values in memory where what lies beside them is no number."""
    lines, width = tensor.shape
    if turned:
        return tensor.new_full((width, lines + 1), float("nan")).t()[:lines].copy_(tensor)
    around = tensor.new_full((lines + 2, left + width + right), float("nan"))
    return around[1:-1, left : left + width].copy_(tensor)


def product(tile, x, weight):
    """What the kernel makes of them, on memory that holds no number; added up.

    A tile that is joined works in memory that holds what nobody knows, twice the same.
    """
    (rows, size), columns = x.shape, weight.shape[0]
    constants = tile.parameters(rows, size, x.element_size())
    parts = ceil(size / constants["TERMS"])
    made = 1 if tile.joined else parts
    result = torch.full((made, rows, columns), float("nan"), device=x.device)
    constants |= {"M": rows, "N": columns, "K": size, "weight_stride": weight.stride(0)}
    constants |= {"x_stride": x.stride(0), "x_step": x.stride(1)}
    here = interpretable if triton.knobs.runtime.interpret else source
    kernel = gpu._module(here(rows == 1, tile))["product"]
    grid = tile.blocks(columns), tile.parts if tile.joined else parts
    if not tile.joined:
        kernel[grid](x, weight, result, **constants, **options(tile))
        return result.sum(0)
    work = torch.randint(0, 256, (tile.workspace(rows, columns),), dtype=torch.uint8)
    work = work.to(x.device)
    kernel[grid](x, weight, result, work, **constants, **options(tile))
    first = result.clone()
    kernel[grid](x, weight, result.fill_(float("nan")), work, **constants, **options(tile))
    assert torch.equal(first, result)
    return result.sum(0)


def options(tile):
    """What Triton is told of a tile."""
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def interpretable(one_row, tile):
    """Triton's interpreter takes bf16 for integers in a dot, so there the factors are widened.

    There is no kernel in front.
    """
    text = re.sub(r"(?m)^    tl\.extra\.cuda\..*\n", "", source(one_row, tile))
    for dot in () if one_row else ("tl.dot(a, tl.trans(b)", "tl.dot(b, tl.trans(a)"):
        assert dot in text
        left, right = re.findall(r"\b[ab]\b", dot)
        text = text.replace(dot, f"tl.dot({left}.to(tl.float32), tl.trans({right}).to(tl.float32)")
    return text


def check(tile, x, weight, errors):
    """Against fp64: no farther off than so many times what a sum in fp32 is likely to round."""
    exact = x.double() @ weight.double().t()
    allowed = x.double().abs() @ weight.double().abs().t()
    allowed *= errors * torch.finfo(torch.float32).eps * x.shape[1] ** 0.5
    off = (product(tile, x, weight).double() - exact).abs()
    assert (off <= allowed).all(), (tile, x.shape, weight.shape, x.dtype, x.stride())


def linear(
    dtype, rows, columns, size, unary="gelu", binary="none", bias=True, arch="sm_90:NVIDIA-H200"
):
    """The problem of a linear layer with its epilogue."""
    other = f"{rows}x{columns}" if binary != "none" else "other=None"
    words = f"binary='{binary}' unary='{unary}' scalars=() packed=False"
    given = f"{rows}x{size} {columns}x{size} {columns if bias else 'bias=None'} {other} {words}"
    (problem,) = shapes.problems([f"ipex.linear.default {dtype} {given}"], arch, {})
    return problem


def offered(problem):
    return [call for call in library.calls(problem) if call.name == skinny.NAME]
