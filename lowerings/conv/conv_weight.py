"""Candidates for `ipex::conv_weight_grad` on a GPU: the library or the small-channel template."""

import math
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch._prims_common import suggest_memory_format

from ipex_inductor import compat
from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.calls import DTYPES, Call, always, is_channels_last
from ipex_inductor.lowerings.common.conv_templates import FEW_CHANNELS, NO_TF32, ints
from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.common.templated import calls, dense, facts, node, template
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.workload import empty, operands_by_name
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.conv.conv_weight import reference
from ipex_inductor.ops.conv.small_channel import Runs, from_matrix, runs
from ipex_inductor.templates.triton import conv_small_channel_weight
from ipex_inductor.templates.triton.conv_small_channel_weight import Tile


def _why_not(tile: Tile, problem: Problem) -> str | None:
    operands, constants = operands_by_name(problem), problem.constants
    grad, x, weight = (operands[name] for name in ("grad", "x", "weight"))
    if not problem.arch.startswith(("sm_", "gfx")):
        return f"our templates are not for {problem.arch}"
    if problem.symbols:
        return "its sizes vary"
    if len(x.shape) != 4 or {
        len(ints(constants[n])) for n in ("stride", "padding", "dilation")
    } != {2}:
        return "it is not over a plane"
    if constants["groups"] != 1 or int(x.shape[1]) > FEW_CHANNELS:
        return "it is grouped or has too many channels for the small-channel template"
    if constants["dilation"] != (1, 1):
        return "its kernel is dilated"
    dtypes = {operand.dtype for operand in operands.values()}
    if len(dtypes) != 1 or not dtypes <= DTYPES:
        return f"no template supports it in {', '.join(sorted(dtypes))}"
    if x.dtype == "float32":
        return NO_TF32
    if any(size == 0 for operand in operands.values() for size in operand.shape):
        return "a size is zero"
    if not is_channels_last(grad):
        return "its gradient is not channels-last"
    last = is_channels_last(x)
    if not last and not empty(x, torch.device("meta")).is_contiguous():
        return "its input is neither channels-last nor contiguous"
    kernel_size, stride, padding = (
        ints(s) for s in (weight.shape[2:], *_stride_and_padding(problem))
    )
    return _why_not_tile(tile, problem, runs(ints(x.shape[1:]), kernel_size, stride, padding, last))


def _stride_and_padding(problem: Problem) -> tuple[Any, Any]:
    return problem.constants["stride"], problem.constants["padding"]


def _why_not_tile(tile: Tile, problem: Problem, patch_runs: Runs) -> str | None:
    grad = operands_by_name(problem)["grad"]
    if not conv_small_channel_weight.fits(tile, int(grad.shape[1]), patch_runs):
        return "the tile does not fit"
    _, shared_memory = facts(problem.arch)
    itemsize = getattr(torch, grad.dtype).itemsize
    if not tile.fitting(shared_memory, conv_small_channel_weight.terms_of(patch_runs), itemsize):
        return "its stages exceed the shared memory"
    return None


def _weight_gradient(
    tile: Tile,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Compute the weight gradient by the template; torch ops sum its parts and round once.

    Args:
        tile: tile of the template.
        grad: gradient of the output, channels-last.
        x: activation, channels-last or contiguous.
        weight: weight [N, C, h, w].
        stride: stride of both spatial dimensions.
        padding: padding of both spatial dimensions.
        dilation: dilation, always (1, 1).
        groups: number of groups, always 1.
    """
    last, kernel_size = compat.is_channels_last(x), [*weight.shape[2:]]
    patch_runs = runs(x.shape[1:], kernel_size, stride, padding, last)
    terms, pixels = conv_small_channel_weight.terms_of(patch_runs), grad.numel() // len(weight)
    multiprocessors, shared_memory = facts(selector_hook.arch_of(x.device))
    fitting = tile.fitting(shared_memory, terms, x.element_size())
    sizes = pixels, len(weight), terms, tile, multiprocessors * max(1, fitting)
    geometry = kernel_size, stride, padding, last
    pixels_per_part = conv_small_channel_weight.division(*sizes) * tile.BLOCK_M
    columns = math.prod(tile.parts(terms)) * tile.BLOCK_K
    sums = torch.ops.ipex.conv_stem_weight(
        grad, x, *geometry, pixels_per_part, columns, [*astuple(tile)]
    )
    matrix = sums.view(-1, len(weight), columns).sum(0).t()
    gradient = from_matrix(matrix, patch_runs, x.shape[1], kernel_size, last).to(grad.dtype)
    return gradient.contiguous(memory_format=_format(x, weight))


def _format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return cuDNN's memory format of the gradient: channels-last if either tensor is."""
    last = torch.channels_last
    formats = {suggest_memory_format(tensor) for tensor in (x, weight)}
    return last if last in formats else torch.contiguous_format


def _grid(rows: Any, columns: Any, meta: Any) -> tuple[Any, ...]:
    return meta["PROGRAMS"], meta["BLOCKS"], 1


def _lower(call: Arguments) -> Any:
    grad, x = dense(call.grad, last=True), dense(call.x, call.last)
    chosen = Tile(*call.tile)
    batch, *image = ints(x.get_size())
    geometry = call.window, call.stride, call.padding, call.last
    channels, steps = ints(grad.get_size())[1], call.pixels // chosen.BLOCK_M
    size = ints(V.graph.current_node.meta["val"].shape)
    return node(
        template("ipex_stem_weight", conv_small_channel_weight.SOURCE, _grid),
        (grad, x),
        ir.FixedLayout(x.get_device(), torch.float32, size),
        chosen.num_warps,
        chosen.num_stages,
        ALLOW_TF32=False,
        **conv_small_channel_weight.constants(batch, image, channels, *geometry, steps, chosen),
    )


# The first is Inductor's default.
CALLS = (
    Call("aten.convolution_backward", reference, always),
    *calls(
        conv_small_channel_weight.NAME,
        conv_small_channel_weight.SOURCE,
        conv_small_channel_weight.TILES,
        _weight_gradient,
        _why_not,
    ),
)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_by_name(torch.ops.ipex.conv_stem_weight.default, _lower)
