"""Reductions of wide rows that read each row once, in kernels that Inductor generates for a GPU.

Inductor holds a row of up to 1,024 elements in registers. It reads a wider one once for the
statistics of a layer norm or softmax, and again for the result.
"""

import sympy  # type: ignore[import-untyped]
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from ipex_inductor.target.device import nvidia

NAME = "row-reductions"
INDUCTORS = 1024  # the widest row that Inductor holds in registers
# By architecture, the widest row that was measured to be faster in registers.
WIDEST = {"sm_90": 8192}


def is_wide(features: SIMDKernelFeatures) -> bool:
    """Return whether a kernel reduces rows that Inductor reads twice and registers can hold.

    Args:
        features: features of the kernel's loops.
    """
    gpu = nvidia(V.graph.get_current_device_or_throw())
    limit = WIDEST.get(gpu.arch, 0) if gpu is not None else 0
    width = features.reduction_numel
    if not isinstance(width, sympy.Integer) or not INDUCTORS < width <= limit:
        return False
    return bool(features.get_reduction_hint() == ReductionHint.INNER)
