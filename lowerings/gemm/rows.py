"""Linear layers and 1x1 convolutions as GEMMs on rows, by our Triton templates."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings.common.calls import Call, is_channels_last, why_odd
from ipex_inductor.lowerings.common.conv_templates import (
    NO_TF32,
    ints,
    is_product,
    why_not_ours,
    with_epilogue,
)
from ipex_inductor.lowerings.common.templated import (
    align_to_vector,
    apply_epilogue_to_rows,
    calls,
    dense,
    in_turns,
    node,
    template,
)
from ipex_inductor.lowerings.problem.workload import empty, operands_by_name
from ipex_inductor.ops.conv.conv import ConvArgs
from ipex_inductor.ops.conv.geometry import rows_of
from ipex_inductor.ops.gemm.linear import LinearArgs


def products(
    name: str,
    source: str,
    tiles: Sequence[Any],
    op: Callable[..., Tensor],
    why_not: Callable[[Any, Problem, int], str | None],
) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Return the calls of a GEMM op for linear layers and for 1x1 convolutions.

    Args:
        name: name of the template in records.
        source: source of the template.
        tiles: tiles of the template.
        op: GEMM op.
        why_not: returns why a tile may not compute a problem with M rows, or None.
    """

    def why_not_layer(tile: Any, problem: Problem) -> str | None:
        return why_no_layer(problem) or why_not(tile, problem, rows_of_layer(problem))

    def why_not_pixels(tile: Any, problem: Problem) -> str | None:
        return why_no_pixels(problem) or why_not(tile, problem, rows_of_image(problem))

    return (
        calls(name, source, tiles, partial(_linear, op), why_not_layer),
        calls(name, source, tiles, partial(_conv, op), why_not_pixels),
    )


def lower_gemm(
    name: str, source: str, tile: Any, operands: Sequence[Any], vector: int = 1, **constants: Any
) -> Any:
    """Lower a GEMM to a template.

    Args:
        name: name of the template.
        source: source of the template.
        tile: tile of the template.
        operands: matrix [M, K], transposed weight [N, K], and a bias or None.
        vector: bytes to which the operands are aligned.
        constants: constants of the template.
    """
    tensors = [
        align_to_vector(dense(operand), vector) for operand in operands if operand is not None
    ]
    size = [constants["ROWS"], constants["COLUMNS"]]
    return node(
        template(name, source, in_turns),
        tensors,
        ir.FixedLayout(tensors[0].get_device(), torch.float32, size),
        tile.num_warps,
        tile.num_stages,
        ALLOW_TF32=False,
        **constants,
    )


def sizes(x: Any, weight: Any) -> tuple[int, int, int]:
    """Return M, N and K of a GEMM on Inductor's nodes."""
    (rows, terms), (columns, _) = ints(x.get_size()), ints(weight.get_size())
    return rows, columns, terms


def why_too_small(fewest: Mapping[str, int], rows: int, columns: int, terms: int) -> str | None:
    """Return why a GEMM is smaller than the minimum sizes in `fewest`, or None."""
    sizes_by_name = {"rows": rows, "columns": columns, "terms": terms}
    few = [name for name, least in fewest.items() if sizes_by_name[name] < least]
    return f"it has too few {' and '.join(few)}" if few else None


def _linear(op: Callable[..., Tensor], tile: Any, *args: Any) -> Tensor:
    """Compute a linear layer by `op`; its epilogue uses unrounded sums, rounded once.

    Args:
        op: GEMM op.
        tile: tile of the template.
        args: arguments of `ipex::linear`.
    """
    call = LinearArgs(*args)
    sums = op(call.x.reshape(-1, call.x.shape[-1]), call.weight, call.bias, [*astuple(tile)])
    return apply_epilogue_to_rows(sums, call.x, call.other, *call.epilogue())


def _conv(op: Callable[..., Tensor], tile: Any, *args: Any) -> Tensor:
    """Compute a 1x1 convolution as a GEMM on the rows of channels-last activations.

    All but the GEMM are views.

    Args:
        op: GEMM op.
        tile: tile of the template.
        args: arguments of `ipex::conv`.
    """
    call = ConvArgs(*args)
    sums = op(rows_of(call.x), call.weight.flatten(1), call.bias, [*astuple(tile)])
    return with_epilogue(sums, call.x, call.x.shape[2:], None, call.other, call.epilogue())


def why_no_layer(problem: Problem) -> str | None:
    """Return why a linear layer cannot run as a template's GEMM, or None."""
    operands = operands_by_name(problem)
    if not problem.arch.startswith(("sm_", "gfx")):
        return f"our templates are not for {problem.arch}"
    if (reason := why_odd(problem)) is not None:
        return reason
    if operands["x"].dtype == "float32":
        return NO_TF32
    factors = (empty(operands[name], torch.device("meta")) for name in ("x", "weight"))
    contiguous = all(factor.is_contiguous() for factor in factors)
    return None if contiguous else "its operands are not contiguous"


def why_no_pixels(problem: Problem) -> str | None:
    """Return why a convolution cannot run as a template's GEMM, or None."""
    x = operands_by_name(problem)["x"]
    if (reason := why_not_ours(problem)) is not None:
        return reason
    if x.dtype == "float32":
        return NO_TF32
    if not is_product(problem):
        return "it is no 1x1 convolution with stride 1 and without padding"
    return None if is_channels_last(x) else "its input is not channels-last"


def rows_of_layer(problem: Problem) -> int:
    """Return M of a linear layer."""
    return math.prod(ints(operands_by_name(problem)["x"].shape[:-1]))


def rows_of_image(problem: Problem) -> int:
    """Return M of a 1x1 convolution."""
    batch, _, *image = ints(operands_by_name(problem)["x"].shape)
    return batch * math.prod(image)
