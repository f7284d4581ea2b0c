"""Lowering of GEMMs on quantized weights on NVIDIA GPUs to a Triton template; candidates."""

import functools
import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.calls import Call, always
from ipex_inductor.lowerings.common.conv_templates import ints
from ipex_inductor.lowerings.common.registering import expand, register_by_name
from ipex_inductor.lowerings.common.templated import (
    align_to_vector,
    calls,
    dense,
    facts,
    node,
    template,
)
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.spaces import DEFAULT_WEIGHT_ONLY, DEQUANTIZED
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.quant import weight_only_rows
from ipex_inductor.ops.quant.weight_only import NIBBLES
from ipex_inductor.templates.triton import weight_only
from ipex_inductor.templates.triton.weight_only import Decoding, Tile

aten, ipex = torch.ops.aten, torch.ops.ipex
FACTORS = ipex.weight_only_factors.default
STEPPED = "int8"  # compute dtype in which activations are quantized
WORD = 4  # bytes of two activations
OLDEST, OLDEST_FP8 = 80, 89  # the first architectures with bf16, and with conversions of FP8
# Activations of a graph that are laid out for several GEMMs, by their nodes.
_laid_out: WeakKeyDictionary[Any, dict[torch.fx.Node, Any]] = WeakKeyDictionary()


def _grid(rows: Any, columns: Any, meta: Any) -> tuple[Any, ...]:
    return meta["BLOCKS_M"] * meta["BLOCKS_N"], meta["PARTS"], 1


def _lower(call: Arguments) -> Any:
    """Return the GEMM; parts of K are summed by what reads it."""
    rows, terms = ints(call.x.get_size())
    columns = ints(call.weight.get_size())[0]
    nibbles = call.weight_dtype in NIBBLES
    multiprocessors, _ = facts(selector_hook.arch_of(call.x.get_device()))
    tile = (
        Tile(*call.tile)
        if call.tile
        else weight_only.choose_tile(
            *(rows, columns, terms, call.group_size, multiprocessors, nibbles),
            call.x_scales is not None,
        )
    )
    dtype, scale_dtype = (
        str(dtype).removeprefix("torch.") for dtype in (call.x.get_dtype(), call.scale_dtype)
    )
    stepped = call.x_scales is not None
    decoding = Decoding(call.weight_dtype, dtype, scale_dtype, call.zeroed, stepped)
    constants = weight_only.constants(rows, columns, terms, call.group_size, decoding, tile)
    is_split = nibbles and not constants["PAIRS"]
    x = _even_columns_first(call.x) if is_split else _align_words(dense(call.x))
    sums = node(
        template(decoding.name, weight_only.source(decoding), _grid),
        [x, *(dense(t) for t in (call.weight, call.factors, call.x_scales) if t is not None)],
        ir.FixedLayout(x.get_device(), torch.float32, [constants["PARTS"] * rows, columns]),
        tile.num_warps,
        tile.num_stages,
        **constants,
    )
    if constants["PARTS"] == 1:
        return sums
    parts = lowerings[aten.view.default](sums, [constants["PARTS"], rows, columns])
    each = [lowerings[aten.select.int](parts, 0, i) for i in range(constants["PARTS"])]
    return functools.reduce(lowerings[aten.add.Tensor], each)


def _lower_factors(call: Arguments) -> Any:
    """Lower as torch's ops: only where the weight preprocessing does not compute it ahead."""
    return expand(FACTORS, lambda given: weight_only_rows.lay_out_factors(**vars(given)))


def _align_words(x: Any) -> Any:
    """Return a matrix that begins at a whole word, copied if necessary."""
    begins_anywhere = x.get_name() in V.graph.unaligned_buffers
    return ir.ExternKernel.copy_input(x) if begins_anywhere else align_to_vector(x, WORD)


def _even_columns_first(x: Any) -> Any:
    """Return a matrix with its even columns in front of all odd ones, made once in a graph."""
    argument: Any = V.graph.current_node.args[0]
    made = _laid_out.setdefault(V.graph, {})
    if argument not in made:
        rows, terms = ints(x.get_size())
        pairs = lowerings[aten.view.default](x, [rows, terms // 2, 2])
        halves = lowerings[aten.permute](pairs, [0, 2, 1])
        split = ir.ExternKernel.require_contiguous(ir.ExternKernel.copy_input(halves))
        made[argument] = lowerings[aten.view.default](split, [rows, terms])
    return dense(made[argument])


def why_not(device: torch.device, values: Mapping[str, Any]) -> str | None:
    """Return why no kernel of a GPU computes a linear layer on a quantized weight, or None.

    Args:
        device: device of the layer.
        values: arguments of `ipex::weight_only_linear`, tensors as fake values.
    """
    x = values["x"]
    if device.type != "cuda" or torch.version.hip:
        kind = "ROCm" if torch.version.hip else device.type
        return _name_cost(f"no kernel on quantized weights for {kind}")
    level = selector_hook.arch_of(device).split(":")[0].removeprefix("sm_")
    oldest = OLDEST_FP8 if values["weight_dtype"] == "fp8" else OLDEST
    if not level.isdigit() or int(level) < oldest:
        return _name_cost(f"the kernel is for sm_{oldest} and later")
    if not all(isinstance(size, int) for size in x.shape):
        return _name_cost("its number of rows varies")
    elements = math.prod(x.shape) * values["weight"].shape[0]
    reason = _why_not(values["compute"], elements, x.shape[-1], values)
    return reason and _name_cost(reason)


def _name_cost(reason: str) -> str:
    return f"{reason}: each call dequantizes the weight"


def _why_not(compute: Any, elements: int, terms: int, values: Mapping[str, Any]) -> str | None:
    if compute not in (*weight_only.DTYPES, STEPPED):
        return f'the kernel computes in bfloat16, float16 or int8, not in "{compute}"'
    if not elements:
        return "a size is zero"
    if values["weight_dtype"] in NIBBLES and terms % 2:
        return "K is odd"
    return weight_only.why_not_groups(terms, values["group_size"], compute == STEPPED)


def _why_not_tile(tile: Tile, problem: Problem) -> str | None:
    operands = operands_by_name(problem)
    if not problem.arch.startswith("sm_"):
        return f"our templates are not for {problem.arch}"
    if problem.symbols:
        return "its sizes vary"
    sizes = ints(operands["x"].shape)
    values: Any = problem.constants
    elements = min(math.prod(ints(operand.shape)) for operand in operands.values())
    if reason := _why_not(values["compute"], elements, sizes[-1], values):
        return reason
    _, shared_memory = facts(problem.arch)
    if tile.shared(values["weight_dtype"] in NIBBLES) > shared_memory:
        return "it exceeds the shared memory"
    group_size, stepped = values["group_size"], values["compute"] == STEPPED
    fits = weight_only.fits(tile, math.prod(sizes[:-1]), sizes[-1], group_size, stepped)
    return None if fits else "the tile does not fit"


def _compute(tile: Tile, *args: Any) -> Tensor:
    return weight_only_rows.compute([*astuple(tile)], *args)


def _version() -> str:
    """Return the texts of which a change makes records old."""
    return "".join(
        weight_only.source(Decoding(name, "bfloat16", "float16", zeroed))
        for name in weight_only.FORMATS
        for zeroed in (False, True)
        if not zeroed or name in weight_only.ZEROED
    )


# The first is used without a record.
CALLS = (
    Call(DEFAULT_WEIGHT_ONLY, weight_only_rows.compute_by_size, always),
    Call(DEQUANTIZED, weight_only_rows.dequantize, always),
    *calls(weight_only.NAME, _version(), weight_only.TILES, _compute, _why_not_tile),
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_by_name(ipex.weight_only_rows.default, _lower)
    register_by_name(FACTORS, _lower_factors)
