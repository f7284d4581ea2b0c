"""Every SYCL kernel for an architecture: compiled ahead of time, and held against limits."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ipex_inductor.templates.optimizer.formulas import FORMULAS
from ipex_inductor.templates.optimizer.step import StepKernel
from ipex_inductor.templates.sycl import grouped, norm, product, step
from ipex_inductor.templates.sycl.product import Epilogue
from ipex_inductor.templates.sycl.source import Source
from ipex_inductor.templates.sycl.tiles import Tile, tiles

FLOATS = ("bf16", "fp16", "fp32")
EPILOGUE = Epilogue("add", "gelu")  # the one that takes most registers
GATED = Epilogue("none", "silu", True)
STEPS = {  # the dtypes of a parameter, the rest of it, its gradient and its states
    "fp32": ("float32", "", "float32", "float32"),
    "split": ("bfloat16", "int16", "bfloat16", "float32"),
}


@dataclass(frozen=True)
class Listed:
    """A kernel source; `engine`: it is required to use the matrix engine."""

    name: str
    source: Source
    engine: bool = False


def list_kernels(arch: str) -> Iterator[Listed]:
    """Yield the GEMM kernels of every tile, the other templates, and every optimizer step."""
    for dtype in (*FLOATS, "int8"):
        for tile in tiles(arch, dtype):
            yield from _products(arch, dtype, tile)
    for dtype in FLOATS:
        yield Listed(f"grouped {dtype}", grouped.source(arch, dtype, EPILOGUE))
        for name, centred in (("layer_norm", True), ("rms_norm", False)):
            yield Listed(f"{name} {dtype}", norm.source(arch, dtype, centred))
    for formula, (form, dtypes) in itertools.product(FORMULAS, STEPS.items()):
        yield Listed(f"{formula} {form}", step.step_source(_step(formula, *dtypes), counting=False))


def _products(arch: str, dtype: str, tile: Tile) -> Iterator[Listed]:
    out_dtype = "bf16" if dtype == "int8" else dtype
    blocks = f"{dtype} {tile.MT}x{tile.NT} of {tile.TM}x{tile.TN}"
    for gather, name in (("rows", "linear"), ("window", "conv")):
        source = product.source(tile, arch, gather, dtype, out_dtype, EPILOGUE)
        yield Listed(f"{name} {blocks}", source, tile.matrix)
    if dtype != "int8" and tile.pairs:
        source = product.source(tile, arch, "rows", dtype, out_dtype, GATED)
        yield Listed(f"gated {blocks}", source, tile.matrix)


def _step(formula: str, param: str, rest: str, grad: str, state: str) -> StepKernel:
    """Return the step kernel of a formula with every flag on."""
    rule = FORMULAS[formula]
    states = (state,) * len(rule.state(frozenset(rule.flags)))
    counted = "float32" if rule.counts else ""
    return StepKernel(formula, tuple(sorted(rule.flags)), param, rest, grad, states, counted, True)
