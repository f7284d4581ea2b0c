"""Linear layers on quantized weights for CPUs: `weight_only.cpp`, and how it is called."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.ops.quant import weight_only
from ipex_inductor.ops.quant.weight_only import Scheme
from ipex_inductor.reporting.decisions import warn_once
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu import cpu_library
from ipex_inductor.templates.cpu.kernel_library import (
    KernelLibrary,
    Settings,
    list_instructions,
)

LINEAR = torch.ops.ipex.weight_only_linear.default
# By their numbers in weight_only.cpp.
NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
FORMATS = ("int8", "int4", "nf4", "fp8")
COMPUTES = ("float32", "bfloat16", "float16", "int8")
AVX512_VNNI, AVX_VNNI = 1, 2
# Instructions beyond an architecture's, which a library for this CPU alone may use.
OWN_VNNI = {
    "x86-64:avx2": ("avx_vnni", AVX_VNNI),
    "x86-64:avx512": ("avx512_vnni", AVX512_VNNI),
}
NAME = "weight_only_linear"
TAKES = f"(const int64_t*, {'const void*, ' * 6}void*)"


def _variants() -> list[Settings]:
    """Return the settings of the present architecture, before them those of this CPU alone."""
    arch = architecture()
    common = {"WOQ_VNNI": AVX512_VNNI if arch in cpu_library.PAIRED else 0}
    flag, level = OWN_VNNI.get(arch, ("", 0))
    return [{"WOQ_VNNI": level}, common] if flag in list_instructions() else [common]


def source(settings: Settings | None = None) -> str:
    """Return the C++ of the library; for the target CPU if no settings are given."""
    return cpu_library.source(parts=("vectors.cpp",), more=definitions(settings))


def definitions(settings: Settings | None = None) -> str:
    """Return the C++ of the kernels, which follows `vectors.cpp`."""
    chosen = _variants()[-1] if settings is None else settings
    defined = "".join(f"#define {name} {value}\n" for name, value in chosen.items())
    return defined + Path(__file__).with_name("weight_only.cpp").read_text()


def declarations(inside: bool) -> str:
    """Return the kernel's declaration in C++, which follows those of `cpu_library`.

    `inside`: for code that contains its definition; else it declares a function of `library`.
    """
    if inside:
        return f'extern "C" void {NAME}{TAKES};\n'
    return f'static IpexFunction<void{TAKES}> {NAME}{{"{__name__}", "{NAME}"}};\n'


LIBRARY = KernelLibrary("weight-only", source, _variants)
library, why_not, begin = LIBRARY.library, LIBRARY.why_not, LIBRARY.begin
why_not_in_cpp, ship_library, address = LIBRARY.why_not_in_cpp, LIBRARY.ship, LIBRARY.address


@functools.cache
def _kernel() -> Any:
    kernel = library()[NAME]
    kernel.restype, kernel.argtypes = None, [ctypes.c_void_p] * 8
    return kernel


def list_numbers(
    sizes: Sequence[Any], dtypes: Sequence[torch.dtype | None], scheme: Scheme
) -> list[Any]:
    """Return the numbers of `Call` of the C++.

    Args:
        sizes: M, K and N.
        dtypes: of x, scales and bias.
        scheme: of the weight.
    """
    numbers = [0 if dtype is None else NUMBERS[dtype] for dtype in dtypes]
    words = FORMATS.index(scheme.weight_dtype), COMPUTES.index(scheme.compute)
    return [*sizes, scheme.group_size, *numbers, *words]


def call(x: Tensor, weight: Tensor, scales: Tensor, *rest: Any, out: Tensor) -> None:
    """Write `ipex::weight_only_linear` to `out`; called by Inductor's code.

    Args:
        x: [..., K], without gaps.
        weight: as stored.
        scales: [N, groups].
        rest: those that are given of zeros, order and bias; whether each is; the scheme's values.
        out: [..., N], without gaps.
    """
    *given, has_zeros, has_order, has_bias, weight_dtype, group_size, compute = rest
    tensors = iter(given)
    zeros, order, bias = (
        next(tensors) if has else None for has in (has_zeros, has_order, has_bias)
    )
    scheme = Scheme(weight_dtype, group_size, compute)
    if why_not() is not None:  # the graph was cached where there was one
        warn_once(f"a compiled graph runs slowly, without weight-only kernels: {why_not()}")
        out.copy_(weight_only.compute_reference(x, weight, scales, zeros, order, bias, scheme))
        return
    run(x, weight, scales, zeros, order, bias, scheme, out)


def run(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    scheme: Scheme,
    out: Tensor,
) -> None:
    """Write the kernel's result to `out`.

    Args:
        x: [..., K], as are all tensors without gaps.
        weight: as stored.
        scales: [N, groups].
        zeros: [N, groups], or None.
        order: [K], or None.
        bias: [N], or None.
        scheme: of the weight.
        out: [..., N].
    """
    rows = out.numel() // max(1, weight.shape[0])
    sizes = rows, x.shape[-1], weight.shape[0]
    dtypes = x.dtype, scales.dtype, None if bias is None else bias.dtype
    numbers = list_numbers(sizes, dtypes, scheme)
    tensors = (x, weight, scales, zeros, order, bias, out)
    pointers = (None if t is None else t.data_ptr() for t in tensors)
    _kernel()((ctypes.c_int64 * len(numbers))(*numbers), *pointers)


def compute(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    weight_dtype: str,
    group_size: int,
    compute: str,
) -> Tensor:
    """Return `ipex::weight_only_linear` on CPUs: by the kernel, or by torch's ops without one.

    Args:
        x: [..., K].
        weight: as stored.
        scales: [N, groups].
        zeros: [N, groups], or None.
        order: [K], or None.
        bias: [N], or None.
        weight_dtype: of the scheme.
        group_size: of the scheme.
        compute: of the scheme.
    """
    scheme = Scheme(weight_dtype, group_size, compute)
    weight_only.check(x, weight, scales, zeros, order, bias, scheme)
    if (reason := why_not()) is not None:
        warn_once(f"linear layers on quantized weights run slowly, without a kernel: {reason}")
        return weight_only.compute_reference(
            x, weight, scales, zeros, order, bias, scheme
        ).contiguous()
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    operands = x.contiguous(), weight.contiguous(), scales.contiguous()
    run(*operands, _close_gaps(zeros), _close_gaps(order), _close_gaps(bias), scheme, out)
    return out


def _close_gaps(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@functools.cache
def register() -> None:
    """Register the kernel as the op's implementation on CPUs."""
    weight_only.weight_only_linear.register_kernel("cpu")(compute)
