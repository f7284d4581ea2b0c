"""Lowering of FP8 ops: quantization to Inductor's loops, GEMMs to torch._scaled_mm.

Inductor fuses a quantization, and the maxima of rows of magnitudes, with the kernel that writes its
argument. `torch._scaled_mm` calls cuBLASLt, or a Triton template where Inductor measures.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._inductor import ir
from torch._inductor.ir import ExternKernel
from torch._inductor.lowering import fallback_handler, lowerings, to_dtype
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.common.templated import node, template
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.quant import fp8
from ipex_inductor.templates.triton import transpose

aten, ipex = torch.ops.aten, torch.ops.ipex
fall_back: Any = fallback_handler
# Transposed copies of operands that several GEMMs of a graph read.
_copies: WeakKeyDictionary[Any, dict[torch.fx.Node, Any]] = WeakKeyDictionary()
GEMM, QUANTIZE = ipex.fp8_gemm.default, ipex.fp8_quantize.default


def _lower_quantize(call: Arguments) -> Any:
    """Return the values, which are in memory once for all their readers, and the maximum."""
    if not call.x.get_size() or 0 in call.x.get_size():
        return fall_back(QUANTIZE, add_to_fallback_set=False)(**vars(call))
    values = ExternKernel.require_contiguous(_quantize(call))
    magnitudes = lowerings[aten.abs.default](call.x)
    rows = lowerings[aten.amax.default](magnitudes, [-1])
    return values, to_dtype(lowerings[aten.amax.default](rows, []), torch.float32)


def _lower_transposed(call: Arguments) -> Any:
    """Return the transposed values, read and written in tiles."""
    turned = lowerings[aten.permute](_quantize(call), [1, 0])
    return ExternKernel.require_contiguous(turned)


def _quantize(call: Arguments) -> Any:
    """Return `fp8.quantize`, not in memory."""
    largest = fp8.largest_finite(call.dtype)
    scaled = lowerings[aten.mul.Tensor](to_dtype(call.x, torch.float32), call.scale)
    limited = lowerings[aten.clamp_min.default](scaled, -largest)
    return to_dtype(lowerings[aten.clamp_max.default](limited, largest), call.dtype)


def _lower_gemm(call: Arguments) -> Any:
    """Return the product; both operands lie with K innermost, as FP8 tensor cores read them."""
    arguments: Any = V.graph.current_node.args[:4]
    values = [argument.meta["val"] for argument in arguments]
    if fp8.why_not_lowered(*values):
        return fall_back(GEMM, add_to_fallback_set=False)(**vars(call))
    fused = call.bias is not None and call.dtype != torch.float32  # what the library adds
    bias = None if call.bias is None else to_dtype(call.bias, call.dtype)
    result = lowerings[aten._scaled_mm.default](
        _lay_in_rows(call.a, arguments[0]),
        lowerings[aten.permute](_lay_in_rows(call.b, arguments[1]), [1, 0]),
        # Templates take no scale without dimensions.
        lowerings[aten.view](call.a_scale_inv, [1, 1]),
        lowerings[aten.view](call.b_scale_inv, [1, 1]),
        bias if fused else None,
        None,
        call.dtype,
        call.fast_accumulation,
    )
    return result if fused or bias is None else lowerings[aten.add](result, bias)


def _lay_in_rows(x: Any, argument: torch.fx.Node) -> Any:
    """Return a matrix row by row in memory; a transposed one is copied by a template, once.

    Args:
        x: the matrix.
        argument: its node, whose value has the strides of eager mode.
    """
    value = argument.meta["val"]
    rows, columns = value.shape
    sizes = isinstance(rows, int) and isinstance(columns, int)
    if not sizes or 1 in value.shape or value.stride() != (1, rows):
        return ExternKernel.require_contiguous(x)
    copies = _copies.setdefault(V.graph, {})
    if argument not in copies:
        copies[argument] = _transpose(x, value)
    return copies[argument]


def _transpose(x: Any, value: torch.Tensor) -> Any:
    """Return a copy, row by row in memory, of a matrix that lies column by column."""
    rows, columns = value.shape
    tile = transpose.TILE
    return node(
        template("ipex_transpose", transpose.SOURCE, _grid),
        [ExternKernel.require_contiguous(lowerings[aten.permute](x, [1, 0]))],
        ir.FixedLayout(x.get_device(), value.dtype, [rows, columns]),
        tile.num_warps,
        tile.num_stages,
        **transpose.constants(columns, rows, tile),
    )


def _grid(rows: Any, columns: Any, meta: Any) -> tuple[Any, ...]:
    return meta["BLOCKS_M"] * meta["BLOCKS_C"], 1, 1


def register() -> None:
    """Add the lowerings to Inductor's registry."""
    register_by_name(GEMM, _lower_gemm)
    register_by_name(QUANTIZE, _lower_quantize)
    register_by_name(ipex.fp8_quantize_transposed.default, _lower_transposed)
