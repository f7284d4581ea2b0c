"""Lowering of `ipex::conv_shortcut` (residual conv) to one kernel where that is faster."""

import functools
import math
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir

from ipex_inductor.autotune.record import Operand, Problem
from ipex_inductor.lowerings.common.calls import Call, is_channels_last
from ipex_inductor.lowerings.common.conv_templates import ints, why_not_multiplied, with_epilogue
from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.common.templated import (
    align_to_vector,
    calls,
    dense,
    facts,
    in_turns,
    is_xe,
    node,
    template,
)
from ipex_inductor.lowerings.conv.conv_many import shared_by_boxes, why_not_in_boxes
from ipex_inductor.lowerings.conv.fused import FusedConv, as_conv_problem
from ipex_inductor.lowerings.gemm.weight_stationary import why_not_streams, why_too_few
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.templates.triton import conv_tma, weight_stationary
from ipex_inductor.templates.triton import residual as shortcut

STREAMED, BOXES = "ipex.triton.shortcut_streamed", "ipex.triton.shortcut_boxes"
# Arguments of the `ipex::conv` that adds the projection.
ADDING: dict[str, Any] = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
ADDING |= {"transposed": False, "output_padding": [0, 0], "groups": 1}
ADDING |= {"binary": "add", "unary": "relu", "scalars": [], "packed": ""}


def extract_convolution(problem: Problem) -> Problem:
    """Return the problem of the convolution that adds the projection's result."""
    x, weight, bias, *_ = problem.operands
    batch, _, height, width = ints(x.shape)
    out = int(weight.shape[0])
    size, stride = (batch, out, height, width), (height * width * out, 1, width * out, out)
    operands = x, weight, bias, Operand(size, stride, x.dtype)
    return as_conv_problem(problem, operands, ADDING)


def _why_varied(problem: Problem) -> str | None:
    return "its sizes vary" if problem.symbols else None


def _list_arguments(x: Tensor, weight: Tensor, bias: Tensor, *shortcut: Any) -> tuple[Any, ...]:
    source, projection, stride = shortcut
    return x, weight, bias, torch.conv2d(source, projection, None, stride), *ADDING.values()


FUSED = FusedConv(extract_convolution, _list_arguments, why_odd=_why_varied)


def _is_offered(call: Call) -> bool:
    """Return whether a call is the library's or a GEMM, and adds and clamps itself.

    A call that arranges a weight first is for larger kernels, or slower than these.
    """
    is_adding = call.epilogues is None or ("add", "relu") in call.epilogues
    return call.arrange is None and is_adding and not call.name.startswith("ipex.sycl")


def _why_not(problem: Problem) -> str | None:
    """Return why neither template can compute `problem`, or None."""
    if reason := _why_varied(problem) or why_not_multiplied(extract_convolution(problem)):
        return reason
    operands = operands_by_name(problem)
    source, projection = operands["source"], operands["projection"]
    if {source.dtype, projection.dtype} != {operands["x"].dtype}:
        return "its operands have different dtypes"
    if 0 in (*source.shape, *projection.shape):
        return "a size is zero"
    if not is_channels_last(source):
        return "the shortcut's input is not channels-last"
    return "no template supports it on Intel GPUs" if is_xe(problem.arch) else None


def _sizes(problem: Problem) -> tuple[int, int, tuple[int, int]]:
    """Return M, N, and the K of both sums."""
    operands = operands_by_name(problem)
    batch, terms, *image = ints(operands["x"].shape)
    out, other_terms = int(operands["weight"].shape[0]), int(operands["source"].shape[1])
    return batch * math.prod(image), out, (terms, other_terms)


def _why_not_streamed(tile: weight_stationary.Tile, problem: Problem) -> str | None:
    if reason := _why_not(problem):
        return reason
    rows, columns, terms = _sizes(problem)
    if reason := why_not_streams(tile, rows, columns, terms):
        return reason
    itemsize = getattr(torch, problem.operands[0].dtype).itemsize
    _, shared_memory = facts(problem.arch)
    return why_too_few(
        tile, min(tile.programs, shared_memory // shortcut.shared(tile, *terms, itemsize))
    )


def _why_not_boxes(tile: conv_tma.Tile, problem: Problem) -> str | None:
    if reason := _why_not(problem):
        return reason
    rows, columns, terms = _sizes(problem)
    source = operands_by_name(problem)["source"]
    return why_not_in_boxes(tile, problem, source, terms, columns, rows * columns)


def _run_fused(kind: str, tile: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    bias, source, projection, stride = rest
    matrices = weight.flatten(1), bias, source, projection.flatten(1)
    rows = torch.ops.ipex.shortcut_rows(x, *matrices, stride, kind, [*astuple(tile)])
    return with_epilogue(rows, x, x.shape[2:], None, None, ("none", "relu", []))


def _lower(call: Arguments) -> Any:
    """Lower `ipex::shortcut_rows` to the template of its `kind`, a persistent kernel."""
    x, source = (dense(image, last=True) for image in (call.x, call.source))
    weight, bias, projection = map(dense, (call.weight, call.bias, call.projection))
    batch, *image = ints(x.get_size())
    source_image, columns = ints(source.get_size())[1:], ints(weight.get_size())[0]
    multiprocessors, shared_memory = facts(selector_hook.arch_of(x.get_device()))
    tile: weight_stationary.Tile | conv_tma.Tile
    if call.template == "boxes":
        tile, text = conv_tma.Tile(*call.tile), shortcut.BOXES
        x, weight, source, projection = (
            align_to_vector(tensor, conv_tma.VECTOR) for tensor in (x, weight, source, projection)
        )
        programs_each = shared_memory // shared_by_boxes(
            tile, (image[0], source_image[0]), x.get_dtype()
        )
    else:
        tile, text = weight_stationary.Tile(*call.tile), shortcut.STREAMED
        shared_bytes = shortcut.shared(tile, image[0], source_image[0], x.get_dtype().itemsize)
        programs_each = min(tile.programs, shared_memory // shared_bytes)
    programs = multiprocessors * max(1, programs_each)
    return node(
        template(f"ipex_shortcut_{call.template}", text, in_turns),
        (x, weight, source, projection, bias),
        ir.FixedLayout(x.get_device(), torch.float32, [batch * math.prod(image[1:]), columns]),
        tile.num_warps,
        tile.num_stages,
        ALLOW_TF32=False,
        **shortcut.constants(batch, image, source_image, columns, call.stride, tile, programs),
    )


CALLS = (
    *FUSED.separate_calls(_is_offered),
    *calls(
        STREAMED,
        shortcut.STREAMED,
        shortcut.STREAMED_TILES,
        functools.partial(_run_fused, "streamed"),
        _why_not_streamed,
    ),
    *calls(
        BOXES,
        shortcut.BOXES,
        shortcut.BOXES_TILES,
        functools.partial(_run_fused, "boxes"),
        _why_not_boxes,
    ),
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_by_name(torch.ops.ipex.shortcut_rows.default, _lower)
