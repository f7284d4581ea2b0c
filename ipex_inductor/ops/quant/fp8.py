"""FP8 arithmetic: quantize with a given scale or one of each row, and multiply. All is pure."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.errors import DeviceError, QuantizationError
from ipex_inductor.ops.common.defining import op
from ipex_inductor.target.device import nvidia

UNIT = 16  # torch._scaled_mm takes multiples of it as K and N
ALIGNMENT = 16  # bytes at multiples of which cuBLASLt reads a scale
DEVICES = ("cpu", "cuda")
CAPABILITY = (8, 9)  # the first of NVIDIA's with FP8 tensor cores


def largest_finite(dtype: torch.dtype) -> float:
    """Return the largest finite number of an FP8 dtype: 448 or 57344."""
    return float(torch.finfo(dtype).max)


def compute_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude as one element in fp32; NaN if there is one, 0 if empty."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    return compute_amax_of_rows(x)


def compute_amax_of_rows(x: Tensor) -> Tensor:
    """Return `compute_amax` of a tensor that is not empty.

    Inductor computes the maxima of rows in the kernel that writes them.
    """
    rows = x.detach().abs()
    return (rows.amax(-1) if x.dim() else rows).amax().float()


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the first result of `fp8_quantize`."""
    largest = largest_finite(dtype)
    scaled = x.float() * scale
    return scaled.clamp(-largest, largest).to(dtype).contiguous()


@op("fp8_quantize")
def fp8_quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `x * scale` in FP8, rounded to even and saturated, and the largest magnitude of x.

    Args:
        x: floating point of any shape.
        scale: one element in fp32.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        The values, contiguous, and one element in fp32 from the same read of x. NaN stays NaN.
    """
    return quantize(x, scale, dtype), compute_amax(x)


@fp8_quantize.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    return values, torch.empty((), dtype=torch.float32, device=x.device)


@op("fp8_quantize_transposed")
def fp8_quantize_transposed(
    x: Tensor, scale: Tensor, dtype: torch.dtype, gradient: Tensor
) -> Tensor:
    """Return the transpose of `fp8_quantize(x)`, row by row in memory.

    The GEMM of a gradient reads a weight so. It is quantized once more, as keeping the values of
    the forward would take memory.

    Args:
        x: [N, K] in floating point.
        scale: one element in fp32.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        gradient: any tensor that the backward computes. It is not read. Without it a compiled
            forward would compute and keep the values.

    Returns:
        [K, N] in FP8, contiguous.
    """
    return quantize(x, scale, dtype).view(torch.uint8).t().contiguous().view(dtype)


@fp8_quantize_transposed.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, gradient: Tensor) -> Tensor:
    return torch.empty(x.shape[1], x.shape[0], dtype=dtype, device=x.device)


@op("fp8_gemm")
def fp8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """Return `a @ b.T` of FP8 values, scaled back, accumulated in fp32 and rounded once.

    Args:
        a: [M, K] in FP8.
        b: [N, K] in FP8.
        a_scale_inv: one element, the reciprocal of the scale of a.
        b_scale_inv: one element, the reciprocal of the scale of b.
        bias: [N], or None. It is rounded to `dtype` first.
        dtype: of the result.
        fast_accumulation: lets NVIDIA's tensor cores keep fewer bits of partial sums.
    """
    if a.device.type == "cuda":
        return _multiply_on_cuda(
            a, b, (a_scale_inv, b_scale_inv), bias, dtype, fast_accumulation=fast_accumulation
        )
    if a.device.type not in DEVICES:
        raise DeviceError(
            "FP8 GEMMs on a CPU or a CUDA device", str(a.device), "Move the model to one of these."
        )
    with torch.autocast(a.device.type, enabled=False):  # it would multiply in bf16
        result = (a.float() @ b.float().t()) * (a_scale_inv * b_scale_inv)
    if bias is not None:
        result = result + bias.to(dtype).float()
    return result.to(dtype)


@fp8_gemm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def _multiply_on_cuda(
    a: Tensor,
    b: Tensor,
    scales_inv: tuple[Tensor, Tensor],
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    fast_accumulation: bool,
) -> Tensor:
    """Return `fp8_gemm` by torch._scaled_mm, or raise if the device has no such GEMM."""
    if reason := why_not_multiplied(a.dtype, b.dtype):
        raise QuantizationError(*reason)
    capability = torch.cuda.get_device_capability(a.device)
    if capability < CAPABILITY:
        raise DeviceError(
            "compute capability 8.9 or later, which has FP8 tensor cores",
            ".".join(map(str, capability)),
            "Leave fp8_autocast disabled on this GPU.",
        )
    if 0 in (*a.shape, b.shape[0]):
        empty = a.new_zeros(a.shape[0], b.shape[0], dtype=dtype)
        return empty if bias is None else empty + bias.to(dtype)
    scales = [s if s.data_ptr() % ALIGNMENT == 0 else s.clone() for s in scales_inv]
    return _multiply_by_library(a, b, scales, bias, dtype, fast_accumulation)


def why_not_multiplied(a: torch.dtype, b: torch.dtype) -> tuple[str, str, str] | None:
    """Return why tensor cores multiply no operands of two FP8 dtypes; None if they do.

    Returns:
        What was expected, what came, and what to do.
    """
    if a == b == torch.float8_e5m2:
        expected = "at most one operand of a GEMM in E5M2 on CUDA devices"
        return expected, "two", "Use Format.HYBRID or Format.E4M3."
    return None


def why_no_tensor_cores(arch: str) -> str | None:
    """Return why NVIDIA GPUs of an architecture multiply no FP8 values; None if they do."""
    level = arch.split(":")[0].removeprefix("sm_").rstrip("a")
    oldest = "".join(map(str, CAPABILITY))
    if level.isdigit() and int(level) >= int(oldest):
        return None
    return f"FP8 GEMMs are for sm_{oldest} and later, not {arch}"


def why_not_lowered(a: Tensor, b: Tensor, *scales_inv: Tensor) -> str | None:
    """Return why compiled code calls `fp8_gemm` and not torch._scaled_mm; None if it need not.

    Args:
        a: [M, K], of which sizes may vary.
        b: [N, K].
        scales_inv: of a and b, with the offsets that they have in the graph.
    """
    target = nvidia(a.device)
    if target is None:
        return "GEMMs of FP8 values on CPUs are computed in fp32"
    if reason := why_no_tensor_cores(target.arch):
        return reason
    if words := why_not_multiplied(a.dtype, b.dtype):
        return "; ".join(words)
    if any(isinstance(size, int) and size == 0 for size in (*a.shape, *b.shape)):
        return "it is empty"
    sizes = a.shape[1], b.shape[0]
    if not all(isinstance(size, int) and size % UNIT == 0 for size in sizes):
        return f"K and N that are no multiples of {UNIT} are padded at run time"
    if any(s.storage_offset() * s.element_size() % ALIGNMENT for s in scales_inv):
        return f"scales that lie at no multiple of {ALIGNMENT} bytes are copied at run time"
    return None


def _multiply_by_library(
    a: Tensor,
    b: Tensor,
    scales_inv: list[Tensor],
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """Return `fp8_gemm` by torch._scaled_mm: K and N are padded with zeros to multiples of 16."""
    outs = b.shape[0]
    fused = bias is not None and dtype != torch.float32  # what the library adds
    result: Tensor = torch._scaled_mm(
        _pad(a, rows=False),
        _pad(b, rows=True).t(),
        scales_inv[0],
        scales_inv[1],
        bias=F.pad(bias.to(dtype), (0, -outs % UNIT)) if fused and bias is not None else None,
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )
    result = result[:, :outs]
    if bias is not None and not fused:
        result = result + bias.to(dtype)
    return result.contiguous()


def _pad(x: Tensor, *, rows: bool) -> Tensor:
    """Return a matrix row by row in memory, padded to multiples of 16 columns (and rows)."""
    below, right = (-x.shape[0] % UNIT if rows else 0), -x.shape[1] % UNIT
    if not (below or right):
        return x.contiguous()
    padded: Tensor = F.pad(x.contiguous().view(torch.uint8), (0, right, 0, below))
    return padded.view(x.dtype)


@op("fp8_quantize_rows")
def fp8_quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in E4M3, each row scaled by its largest magnitude, and the reciprocals of scales.

    Args:
        x: [..., K] in floating point: activations, or a weight with its output channels as rows.

    Returns:
        [..., K] in FP8, contiguous, and [..., 1] in fp32. A row of zeros has scale 1. A row with an
            infinite element or NaN becomes NaN.
    """
    exact = x.float()
    amax = exact.abs().amax(-1, keepdim=True) if x.shape[-1] else exact.new_zeros(*x.shape[:-1], 1)
    smallest = largest_finite(torch.float8_e4m3fn) * torch.finfo(torch.float32).tiny
    scale = torch.full_like(amax, largest_finite(torch.float8_e4m3fn)) / amax.clamp_min(smallest)
    scale = torch.where(amax > 0, scale, 1.0)
    return quantize(exact, scale, torch.float8_e4m3fn), scale.reciprocal()


@fp8_quantize_rows.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return values, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)


@op("fp8_gemm_rows")
def fp8_gemm_rows(
    a: Tensor,
    b: Tensor,
    a_scales_inv: Tensor,
    b_scales_inv: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return `a @ b.T` of FP8 values with a scale for each row, as `fp8_gemm` does.

    Args:
        a: [M, K] in E4M3.
        b: [N, K] in E4M3.
        a_scales_inv: [M, 1] in fp32.
        b_scales_inv: [N, 1] in fp32.
        bias: [N], or None.
        dtype: of the result.
    """
    one = a_scales_inv.new_ones(())
    result: Tensor = fp8_gemm(a, b, one, one, None, torch.float32, False)
    result = result * (a_scales_inv * b_scales_inv.t())
    if bias is not None:
        result = result + bias.to(dtype).float()
    return result.to(dtype)


@fp8_gemm_rows.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_scales_inv: Tensor,
    b_scales_inv: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)
