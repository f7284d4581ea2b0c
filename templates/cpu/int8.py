"""Kernels on 8-bit integers for CPUs: `int8.cpp`, and how Inductor's code calls it."""

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import ops
from ipex_inductor.ops.quant.int8_operands import is_depthwise
from ipex_inductor.reporting.decisions import warn_once
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu import cpu_library
from ipex_inductor.templates.cpu.kernel_library import (
    KernelLibrary,
    Settings,
    list_instructions,
)

assert ops  # which registers ipex::int8_conv

_ipex = torch.ops.ipex
# The ops that the kernels compute.
KERNELS = frozenset(
    op.default
    for op in (
        _ipex.int8_bmm,
        _ipex.int8_conv,
        _ipex.int8_embedding_bag,
        _ipex.int8_linear,
        _ipex.int8_max_pool,
    )
)
# By their numbers in int8.cpp.
NUMBERS = {torch.uint8: 1, torch.int8: 2, torch.float32: 3, torch.bfloat16: 4}
BINARY = ("none", "add", "mul", "sub")
UNARY = (
    *("none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "abs", "elu", "exp"),
    *("hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "sqrt", "square"),
)
FACTORS_WITH_ZEROS = 3  # lines
SCALARS = 2  # of a unary, at most
DIMS = 3  # spatial dimensions; smaller ones have leading ones of size 1
AVX512_VNNI, AVX_VNNI = 1, 2
# Text of the kernels in order, and what ends the instructions that `int8.cpp` begins to use.
FILES = ("int8.cpp", "int8_embedding.cpp")
END = "#if INT8_VNNI\n#pragma GCC pop_options\n#endif\n"
# Types of the arguments by which generated C++ calls the kernels, and of results other than void.
TAKES = {
    "int8_convolve": f"(const int64_t*, const float*, {'const void*, ' * 6}void*)",
    "int8_embedding_bag": f"(const int64_t*, {'const void*, ' * 5}void*)",
    "int8_max_pool": "(const int64_t*, int32_t, const void*, void*)",
    "int8_multiply": f"(const int64_t*, float, {'const void*, ' * 3}void*)",
}
RESULTS = {"int8_embedding_bag": "int64_t"}
OUT_OF_RANGE = (
    "embedding_bag: an index is no row of the table, or the offsets do not begin at 0 and rise"
)


def _variants() -> list[Settings]:
    """Return the settings of the present architecture, before them those of this CPU alone."""
    settings = _settings()
    if architecture() == "x86-64:avx2" and "avx_vnni" in list_instructions():
        return [settings | {"INT8_VNNI": AVX_VNNI}, settings]
    return [settings]


def _settings() -> Settings:
    """Return the instructions that every target CPU of the present architecture has.

    AVX-512 without VNNI and AVX2 multiply in 16 bits.
    """
    arch = architecture()
    vnni = AVX512_VNNI if arch in cpu_library.PAIRED else 0
    return {"INT8_VNNI": vnni, "INT8_AMX": int(arch == "x86-64:amx")}


def source(settings: Settings | None = None) -> str:
    """Return the C++ of the library; for the target CPU if no settings are given."""
    return cpu_library.source(parts=("vectors.cpp",), more=definitions(settings))


def definitions(settings: Settings | None = None) -> str:
    """Return the C++ of the kernels, which follows `vectors.cpp`."""
    chosen = _settings() if settings is None else settings
    defined = "".join(f"#define {name} {value}\n" for name, value in chosen.items())
    texts = (Path(__file__).with_name(name).read_text() for name in FILES)
    return "".join([defined, *texts, END])


def declarations(inside: bool) -> str:
    """Return the kernels' declarations in C++, which follow those of `cpu_library`.

    `inside`: for code that contains their definitions; else they declare functions of `library`.
    """
    types = [(name, RESULTS.get(name, "void"), takes) for name, takes in TAKES.items()]
    if inside:
        return "".join(f'extern "C" {result} {name}{takes};\n' for name, result, takes in types)
    return "".join(
        f'static IpexFunction<{result}{takes}> {name}{{"{__name__}", "{name}"}};\n'
        for name, result, takes in types
    )


LIBRARY = KernelLibrary("int8", source, _variants)
library, why_not, begin = LIBRARY.library, LIBRARY.why_not, LIBRARY.begin
why_not_in_cpp, ship_library, address = LIBRARY.why_not_in_cpp, LIBRARY.ship, LIBRARY.address

_POINTER = ctypes.c_void_p
SIGNATURES: dict[str, list[Any]] = {
    "int8_convolve": [_POINTER] * 9,
    "int8_embedding_bag": [_POINTER] * 7,
    "int8_max_pool": [_POINTER, ctypes.c_int32, _POINTER, _POINTER],
    "int8_multiply": [_POINTER, ctypes.c_float, *[_POINTER] * 4],
}


@functools.cache
def _kernel(name: str) -> Any:
    kernel = library()[name]
    kernel.restype = ctypes.c_int64 if name in RESULTS else None
    kernel.argtypes = SIGNATURES[name]
    return kernel


def conv_numbers(
    x: Sequence[Any],
    out: Sequence[Any],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> list[Any]:
    """Return the numbers of `Geometry` of the C++.

    Args:
        x: shape of the activation [B, C, *size].
        out: shape of the result [B, O, *size'].
        window: size of the kernel.
        stride: of each dimension.
        padding: of each dimension; or of each dimension's begin, then of each one's end, which the
            result's shape tells.
        dilation: of each dimension.
        groups: number of groups.
    """
    rows = [_wide(x[2:], 1), _wide(out[2:], 1), _wide(window, 1)]
    rows += [_wide(stride, 1), _wide(padding[: len(window)], 0), _wide(dilation, 1)]
    size, *rest = rows
    return [*x[:2], *size, out[1], *(n for row in rest for n in row), groups]


def _wide(values: Sequence[Any], filler: int) -> list[Any]:
    return [*[filler] * (DIMS - len(values)), *values]


def linear_numbers(rows: Any, depth: Any, columns: Any) -> list[Any]:
    """Return the numbers of `Geometry` of a matrix product."""
    return conv_numbers((rows, depth), (rows, columns), (), (), (), (), 1)


def call(
    x: Tensor, weight: Tensor, factors: Tensor, scales: Tensor, *rest: Any, out: Tensor
) -> None:
    """Write `ipex::int8_conv` or `ipex::int8_linear` to `out`; called by Inductor's code.

    Args:
        x: the activation, channels-last without gaps.
        weight: the arranged weight.
        factors: [2, O]; [3, O] with scales of rows.
        scales: [7].
        rest: the addend and the scales of rows, if any; whether there is each of them; the window,
            or nothing for a linear layer: its size, stride, padding, dilation and groups; binary
            and unary by their numbers, and scalars.
        out: the result, channels-last without gaps, as is the addend.
    """
    *others, added, by_row, window, binary, unary, scalars = rest
    other = others[0] if added else None
    row_scales = others[-1] if by_row else None
    if why_not() is not None:  # the graph was cached where there was one
        _say_once()
        words = BINARY[binary], UNARY[unary], list(scalars), out.dtype
        operands = (x, weight, factors, scales, other)
        out.copy_(
            torch.ops.ipex.int8_conv(*operands, *map(_as_list, window), *words)
            if window
            else torch.ops.ipex.int8_linear(*operands, row_scales, *words)
        )
        return
    sizes = _numbers(x.shape, out.shape, window)
    ends = (
        *(NUMBERS[x.dtype], 0 if other is None else NUMBERS[other.dtype], NUMBERS[out.dtype]),
        *(binary, unary, _is_depthwise(x.shape, window), _has_zero_points(factors, by_row)),
    )
    floats = (ctypes.c_float * SCALARS)(*scalars)
    tensors = (x, weight, factors, scales, other, row_scales, out)
    pointers = (None if t is None else t.data_ptr() for t in tensors)
    _kernel("int8_convolve")(_flat([*sizes, *ends]), floats, *pointers)


def multiply(a: Tensor, b: Tensor, scales: Tensor, factor: float, *, out: Tensor) -> None:
    """Write `ipex::int8_bmm` to `out`; called by Inductor's code.

    Args:
        a: [B, M, K], without gaps.
        b: [B, K, N], without gaps.
        scales: [8].
        factor: multiplies the result.
        out: [B, M, N], without gaps.
    """
    if why_not() is not None:
        _say_once()
        out.copy_(torch.ops.ipex.int8_bmm(a, b, scales, factor, out.dtype))
        return
    numbers = [*a.shape, b.shape[2], *(NUMBERS[t.dtype] for t in (a, b, out))]
    pointers = (t.data_ptr() for t in (a, b, scales, out))
    _kernel("int8_multiply")(_flat(numbers), factor, *pointers)


def sum_bags(table: Tensor, scales: Tensor, indices: Tensor, *rest: Any, out: Tensor) -> None:
    """Write `ipex::int8_embedding_bag` to `out`; called by Inductor's code.

    Args:
        table: [rows, columns], as are all tensors without gaps.
        scales: [rows].
        indices: [count].
        rest: the offsets, and weights of samples if there are any; whether there are; the words of
            the op.
        out: [bags, columns].

    Raises:
        IndexError: if an index is none of the table, or offsets do not begin at 0 and rise.
    """
    offsets, *others, weighted, mode, includes_last, padding = rest
    words = [mode, includes_last, padding]
    weights = others[0] if weighted else None
    if why_not() is not None:
        _say_once()
        operands = (table, scales, indices, offsets, weights)
        out.copy_(torch.ops.ipex.int8_embedding_bag(*operands, words, out.dtype))
        return
    numbers = [*bag_sizes(table.shape, indices.shape, out.shape), *words]
    numbers += [indices.element_size(), NUMBERS[out.dtype]]
    tensors = (table, scales, indices, offsets, weights, out)
    pointers = (None if t is None else t.data_ptr() for t in tensors)
    if _kernel("int8_embedding_bag")(_flat(numbers), *pointers):
        raise IndexError(OUT_OF_RANGE)


def bag_sizes(table: Sequence[Any], indices: Sequence[Any], out: Sequence[Any]) -> list[Any]:
    """Return bags, indices, rows and columns by the shapes of tensors."""
    return [out[0], indices[0], *table]


def _say_once() -> None:
    warn_once(f"a compiled graph runs slowly, without int8 kernels: {why_not()}")


def _flat(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def pool(x: Tensor, *rest: Any, out: Tensor) -> None:
    """Write `ipex::int8_max_pool` to `out`; called by Inductor's code.

    Args:
        x: the activation [B, C, H, W], channels-last without gaps.
        rest: size of the window, stride, padding, dilation, ceil mode.
        out: the result, channels-last without gaps.
    """
    window, stride, padding, dilation, ceil_mode = rest
    if why_not() is not None:
        _say_once()
        lists = map(list, (window, stride, padding, dilation))
        out.copy_(torch.ops.ipex.int8_max_pool(x, *lists, ceil_mode))
        return
    numbers = conv_numbers(x.shape, out.shape, window, stride, padding, dilation, 1)
    _kernel("int8_max_pool")(_flat(numbers), x.dtype == torch.int8, x.data_ptr(), out.data_ptr())


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _numbers(x: Sequence[int], out: Sequence[int], window: Sequence[Any]) -> list[int]:
    if window:
        return conv_numbers(x, out, *window)
    return linear_numbers(math.prod(x[:-1]), x[-1], out[-1])


def _has_zero_points(factors: Tensor, by_row: bool) -> bool:
    """Return whether factors have a third line of zero points, which is one of biases by row."""
    return len(factors) == FACTORS_WITH_ZEROS and not by_row


def _is_depthwise(x: Sequence[int], window: Sequence[Any]) -> bool:
    return bool(window) and is_depthwise((0, x[1] // window[-1]), window[-1])
