"""Our Triton templates as nodes of Inductor's, behind which it fuses what follows."""

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
from ipex_inductor.ops import epilogue, gelu
from ipex_inductor.target import device as target

Grid = Callable[..., tuple[Any, ...]]


def in_turns(rows: Any, columns: Any, meta: Any) -> tuple[Any, ...]:
    """A grid of programs that go through blocks in turns."""
    return meta["PROGRAMS"], 1, 1


@functools.cache
def template(name: str, source: str, grid: Grid) -> Any:
    """Inductor knows templates by name, one of each in a process."""
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

    return TritonTemplate(name, SymbolicGridFn(grid), source)


def node(
    known: Any,
    inputs: Sequence[Any],
    layout: Any,
    warps: int,
    stages: int,
    written: Any = (),
    workspace: int = 0,
    **constants: Any,
) -> Any:
    """The result of the template on `inputs`, of which `written` are results too.

    `workspace`: bytes that it may write, which nobody sets up.
    """
    caller = known.generate(
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


# Where the result has 16 bits, in which they are the same.
SHORT = {"gelu": gelu.gelu, "gelu_tanh": gelu.gelu_tanh}


def behind(
    sums: Tensor,
    dtype: torch.dtype,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: Sequence[float],
) -> Tensor:
    """The epilogue of sums that are not rounded, in torch's ops; rounded to `dtype` after it."""
    if dtype.itemsize == 2 and sums.dtype == torch.float32 and unary in SHORT:
        made = SHORT[unary](epilogue.apply(sums, other, binary, "none", []))
    else:
        made = epilogue.apply(sums, other, binary, unary, scalars)
    return made.to(dtype)


def behind_rows(
    sums: Tensor,
    x: Tensor,
    other: Tensor | None,
    binary: str,
    unary: str,
    scalars: Sequence[float],
) -> Tensor:
    """`behind` for a linear layer on `x`, each row of which has its sums.

    As a matrix until the end: through a view that splits its rows Inductor fuses nothing into a
    template on a GPU.
    """
    size = *x.shape[:-1], sums.shape[-1]
    rows = None if other is None else other.reshape(sums.shape)
    return behind(sums, x.dtype, rows, binary, unary, scalars).view(size)


def dense(x: Any, last: bool = False) -> Any:
    """`x` in memory, contiguous or channels-last."""
    sizes = x.get_size()
    strides = (
        ir.FlexibleLayout.stride_ordered(sizes, ir.NHWC_STRIDE_ORDER)
        if last
        else ir.FlexibleLayout.contiguous_strides(sizes)
    )
    return ir.ExternKernel.require_exact_strides(ir.ExternKernel.realize_input(x), strides)


def aligned(x: Any, vector: int) -> Any:
    """`x` where a copy engine's vector of so many bytes may begin: a part of a tensor may not."""
    begins = x.get_layout().offset * x.get_dtype().itemsize
    return ir.ExternKernel.copy_input(x) if begins % vector else x


@functools.cache
def facts(arch: str) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory; of an unknown one the least that is alike."""
    try:
        known = target.described(arch)
    except TargetError:
        known = None
    level, maker = arch.split(":")[0], arch[:3]
    starts = (level, maker, "sm_")
    alike = ([t for t in target.table() if t.arch.startswith(start)] for start in starts)
    table = [known] if known else next(filter(None, alike))
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
    """A call for each tile, a dataclass, which all functions take first; `xe`: Intel's GPUs'."""
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
    others: bool,
    xes: bool,
    problem: Problem,
) -> str | None:
    """That tile's reason, which may be that its warps are another maker's: of 16 lanes, or more."""
    here = xes if is_xe(problem.arch) else others
    return why_not(tile, problem) or (None if here else f"the tile is not for {problem.arch}")


def is_xe(arch: str) -> bool:
    """Whether it is one of Intel's GPUs."""
    return arch.startswith("xe:")


# What Intel's Triton multiplies by a matrix engine: on those of 16 columns (PVC, BMG, LNL, PTL).
# Elsewhere our products spill thousands of bytes (`benchmarks/triton_xe.py`).
XE_PRODUCTS = frozenset({"bfloat16", "float16"})
XE_ENGINES = frozenset({"12.60", "20.1", "20.4", "30.0"})


def why_no_product(arch: str, dtype: str) -> str | None:
    """Why no product of ours is for that GPU of Intel's; None where one is, and for others'."""
    if not is_xe(arch):
        return None
    if dtype not in XE_PRODUCTS:
        return f"Triton multiplies {dtype} without the matrix engine"
    return None if arch.split(":")[1] in XE_ENGINES else f"Triton knows no matrix engine of {arch}"
