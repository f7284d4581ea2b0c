"""Lowering of `ipex::conv_shortcut` (residual conv): both GEMMs in one kernel where that is faster.

"Apart" means that the graph stays as it is: the kernel of each convolution is chosen as for any
other convolution.
"""

import functools
import math
from dataclasses import astuple
from typing import Any

import torch
from msgspec.structs import replace
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
from ipex_inductor.lowerings.conv import conv
from ipex_inductor.lowerings.conv.conv_many import shared_by_boxes, why_not_in_boxes
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
    constants = {k: tuple(v) if isinstance(v, list) else v for k, v in ADDING.items()}
    op = str(torch.ops.ipex.conv.default)
    return replace(problem, op=op, operands=operands, constants=constants, epilogue="")


def _why_varied(problem: Problem) -> str | None:
    return "its sizes vary" if problem.symbols else None


def _why_not_separate(call: Call, problem: Problem) -> str | None:
    return _why_varied(problem) or call.why_not(extract_convolution(problem))


def _run_separately(call: Call, x: Tensor, weight: Tensor, bias: Tensor, *shortcut: Any) -> Tensor:
    source, projection, stride = shortcut
    projected = torch.conv2d(source, projection, None, stride)
    return call.body(x, weight, bias, projected, *ADDING.values())


def _separate_calls() -> tuple[Call, ...]:
    """Return the calls of the adding convolution that keep the ops separate, default first.

    These are the library's calls and GEMMs. A call that arranges a weight first is left out: it is
    for larger kernels, or slower than these.
    """
    return tuple(
        Call(
            call.name,
            functools.partial(_run_separately, call),
            functools.partial(_why_not_separate, call),
            parameters=call.parameters,
            version=call.version,
            apart=True,
        )
        for call in conv.CALLS
        if call.arrange is None
        and not call.name.startswith("ipex.sycl")
        and (call.epilogues is None or ("add", "relu") in call.epilogues)
    )


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
    *_separate_calls(),
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
