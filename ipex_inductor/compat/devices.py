"""What this build of torch and its libraries can do on which device."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from ipex_inductor.compat import versions

# What is said of a toolkit that this build of torch lacks, where a GPU is described to it.
TOOLKITS = {"cuda": "13.0", "hip": "7.0"}


def why_not_for(kind: str) -> str:
    """Why graphs compiled here fit no device of that kind, "" if they do.

    Torch finds them by the digest of its own files, so it must be the very build there.
    """
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip}.get(kind)
    why_not = f"torch {versions.VERSION} is not built for {kind.upper()}"
    return "" if built or kind == "cpu" else why_not


def prefers_cudnn_attention(major: int) -> bool:
    """Whether scaled_dot_product_attention asks cuDNN first on a GPU of NVIDIA of that capability.

    Since 2.11, with cuDNN from 9.15.1 on, which older builds of torch do not bring.
    """
    if torch.version.cuda is None or "TORCH_CUDNN_SDPA_DEPRIORITIZED" in os.environ:
        return False
    cudnn: Any = torch.backends.cudnn
    return major in (9, 10) and (cudnn.version() or 0) > 91500


def adds_to_one_pixel() -> bool:
    """Whether oneDNN's convolution with an addend works where the result is one pixel wide.

    In 2.11 it fails with "could not create a memory".
    """
    return versions.torch_minor() > (2, 12)  # 2.12 has not been tried


def convolves_itself(
    sizes: Sequence[int],
    kernel: Sequence[int],
    biased: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Return whether torch computes a convolution in fp32 on a CPU itself, not by oneDNN.

    That depends on the number of threads, too. `sizes` are of the input, `kernel` of the weight.
    """
    x, weight = (torch.empty(tuple(shape), device="cpu") for shape in (sizes, kernel))
    bias = torch.empty(kernel[0], device="cpu") if biased else None
    window = stride, padding, dilation, transposed, output_padding, groups
    backend: Any = torch._C._select_conv_backend(x, weight, bias, *window, [kernel[0]])
    return bool(backend.name == "Slow2d")
