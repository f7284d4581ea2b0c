"""Our Triton templates as Inductor nodes, into which it fuses the epilogue."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._inductor import ir

from ipex_inductor.aot_cache.digest import digest_fields
from ipex_inductor.autotune.record import Problem
from ipex_inductor.errors import TargetError
from ipex_inductor.lowerings.common.calls import Call
from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.pointwise.gelu import SHORT
from ipex_inductor.target import device as target

Grid = Callable[..., tuple[Any, ...]]


def in_turns(rows: Any, columns: Any, meta: Any) -> tuple[Any, ...]:
    """Return the grid of a persistent kernel: each program loops over blocks."""
    return meta["PROGRAMS"], 1, 1


@functools.cache
def template(name: str, source: str, grid: Grid) -> Any:
    """Return Inductor's template object, one for each name in a process."""
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

    return TritonTemplate(name, SymbolicGridFn(grid), source)


def node(
    kernel_template: Any,
    inputs: Sequence[Any],
    layout: Any,
    warps: int,
    stages: int,
    written: Any = (),
    workspace: int = 0,
    **constants: Any,
) -> Any:
    """Return the result of a template.

    Args:
        kernel_template: Inductor's template object.
        inputs: input nodes.
        layout: layout of the result.
        warps: warps of a program.
        stages: pipeline stages.
        written: inputs that the template writes.
        workspace: bytes of uninitialized memory that it may write.
        constants: constants of the template.
    """
    caller = kernel_template.generate(
        input_nodes=tuple(inputs),
        layout=layout,
        num_stages=stages,
        num_warps=warps,
        mutated_inputs=[*written] or None,
        workspace_arg=_workspace(workspace, layout.device) if workspace else None,
        **constants,
    )
    return caller.output_node()


def _workspace(size: int, device: torch.device) -> Any:
    from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode

    return WorkspaceArg(
        count=sympy.Integer(size),
        zero_mode=WorkspaceZeroMode.UNINITIALIZED,
        device=device,
        outer_name=WorkspaceArg.unique_name(),
    )


def apply_epilogue(
    sums: Tensor,
    dtype: torch.dtype,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: Sequence[float],
) -> Tensor:
    """Apply the epilogue to unrounded sums as torch ops, then round to `dtype`.

    Args:
        sums: result of the GEMM.
        dtype: dtype of the result.
        other: addend, or None.
        binary: binary op of the epilogue.
        unary: unary op of the epilogue.
        scalars: scalars of the unary op.
    """
    if dtype.itemsize == 2 and sums.dtype == torch.float32 and unary in SHORT:
        result = SHORT[unary](epilogue.apply(sums, other, binary, "none", []))
    else:
        result = epilogue.apply(sums, other, binary, unary, scalars)
    return result.to(dtype)


def apply_epilogue_to_rows(
    sums: Tensor,
    x: Tensor,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: Sequence[float],
) -> Tensor:
    """Apply the epilogue of a linear layer on `x` to its sums, then round to the dtype of `x`.

    The ops work on a matrix until the end: on a GPU, Inductor does not fuse ops into a template
    through a view that splits its rows.

    Args:
        sums: result of the GEMM, [M, N].
        x: activation [..., K] of M rows.
        other: addend [..., N], or None.
        binary: binary op of the epilogue.
        unary: unary op of the epilogue.
        scalars: scalars of the unary op.
    """
    size = *x.shape[:-1], sums.shape[-1]
    rows = None if other is None else other.reshape(sums.shape)
    return apply_epilogue(sums, x.dtype, rows, binary, unary, scalars).view(size)


def dense(x: Any, last: bool = False) -> Any:
    """Return `x` in memory, contiguous or channels-last, copied if necessary."""
    sizes = x.get_size()
    strides = (
        ir.FlexibleLayout.stride_ordered(sizes, ir.NHWC_STRIDE_ORDER)
        if last
        else ir.FlexibleLayout.contiguous_strides(sizes)
    )
    return ir.ExternKernel.require_exact_strides(ir.ExternKernel.realize_input(x), strides)


def align_to_vector(x: Any, vector: int) -> Any:
    """Return `x`, copied if its start is not aligned to TMA vectors of `vector` bytes.

    Only a part of a larger tensor may start unaligned.
    """
    begins = x.get_layout().offset * x.get_dtype().itemsize
    return ir.ExternKernel.copy_input(x) if begins % vector else x


@functools.cache
def facts(arch: str) -> tuple[int, int]:
    """Return the number of multiprocessors and the bytes of shared memory of an architecture.

    For an unknown one these are the minimum over the most similar known devices.
    """
    try:
        device = target.find_target(arch)
    except TargetError:
        device = None
    level, maker = arch.split(":")[0], arch[:3]
    starts = (level, maker, "sm_")
    similar = ([t for t in target.table() if t.arch.startswith(start)] for start in starts)
    table = [device] if device else next(filter(None, similar))
    return (
        min(t.multiprocessors for t in table),
        min(t.shared_memory for t in table if t.shared_memory),
    )


def calls(
    name: str,
    source: str,
    tiles: Sequence[Any],
    body: Callable[..., Tensor],
    why_not: Callable[[Any, Problem], str | None],
    arrange: Callable[..., Tensor] | None = None,
    xe: Sequence[Any] = (),
) -> tuple[Call, ...]:
    """Return a call for each tile of a template.

    Args:
        name: name of the template in records.
        source: source of the template.
        tiles: tiles, which are dataclasses; all functions take one as the first argument.
        body: computes the op.
        why_not: returns why a tile may not compute a problem, or None.
        arrange: preprocesses the weight, if given.
        xe: tiles for Intel GPUs.
    """
    return tuple(
        Call(
            name,
            functools.partial(body, tile),
            functools.partial(_why_not, why_not, tile, tile in tiles, tile in xe),
            parameters={f.name: getattr(tile, f.name) for f in fields(tile)},
            version=digest_fields({"source": source})[:12],
            arrange=arrange and functools.partial(arrange, tile),
        )
        for tile in dict.fromkeys([*tiles, *xe])
    )


def _why_not(
    why_not: Callable[[Any, Problem], str | None],
    tile: Any,
    for_others: bool,
    for_xe: bool,
    problem: Problem,
) -> str | None:
    """Return why a tile may not compute `problem`, or None.

    A tile for Intel GPUs has warps of 16 lanes, and serves no other GPUs; nor the other way round.

    Args:
        why_not: reason of the template itself.
        tile: tile to check.
        for_others: whether the tile is for GPUs of other makers.
        for_xe: whether the tile is for Intel GPUs.
        problem: problem to compute.
    """
    matches = for_xe if is_xe(problem.arch) else for_others
    return why_not(tile, problem) or (None if matches else f"the tile is not for {problem.arch}")


def is_xe(arch: str) -> bool:
    """Return whether an architecture is an Intel GPU."""
    return arch.startswith("xe:")


# Dtypes and architectures for which Intel's Triton uses a matrix engine: engines of 16 columns
# (PVC, BMG, LNL, PTL). Elsewhere our GEMMs spill thousands of bytes
# (`benchmarks/studies/triton_xe.py`).
XE_PRODUCTS = frozenset({"bfloat16", "float16"})
XE_ENGINES = frozenset({"12.60", "20.1", "20.4", "30.0"})


def why_no_product(arch: str, dtype: str) -> str | None:
    """Return why an Intel GPU cannot run our GEMMs; None if it can, and for other GPUs."""
    if not is_xe(arch):
        return None
    if dtype not in XE_PRODUCTS:
        return f"Triton multiplies {dtype} without the matrix engine"
    return None if arch.split(":")[1] in XE_ENGINES else f"Triton knows no matrix engine of {arch}"
