"""Capabilities of this build of torch and its libraries, by device."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from ipex_inductor.compat import versions

# Toolkit versions to assume for a target GPU if this build of torch lacks the toolkit.
TOOLKITS = {"cuda": "13.0", "hip": "7.0"}


def why_not_for(kind: str) -> str:
    """Return why graphs compiled here fit no device of `kind`, "" if they do.

    Torch finds graphs by the digest of its own files, so both machines need an identical build.
    """
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip}.get(kind)
    why_not = f"torch {versions.VERSION} is not built for {kind.upper()}"
    return "" if built or kind == "cpu" else why_not


def prefers_cudnn_attention(major: int) -> bool:
    """Return whether scaled_dot_product_attention tries cuDNN first on an NVIDIA GPU.

    Since torch 2.11, with cuDNN from 9.15.1 on, which older builds of torch do not include.

    Args:
        major: the major compute capability of the GPU.
    """
    if torch.version.cuda is None or "TORCH_CUDNN_SDPA_DEPRIORITIZED" in os.environ:
        return False
    cudnn: Any = torch.backends.cudnn
    return major in (9, 10) and (cudnn.version() or 0) > 91500


def adds_to_one_pixel() -> bool:
    """Return whether oneDNN's convolution adds to results of one pixel or one channel.

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
    """Return whether torch computes an fp32 convolution on a CPU itself, without oneDNN.

    The answer depends on the number of threads, too.

    Args:
        sizes: the shape of the activation.
        kernel: the shape of the weight.
        biased: whether the convolution has a bias.
        stride: the stride in each spatial dimension.
        padding: the padding in each spatial dimension.
        dilation: the dilation in each spatial dimension.
        transposed: whether the convolution is transposed.
        output_padding: the output padding in each spatial dimension.
        groups: the number of groups.
    """
    x, weight = (torch.empty(tuple(shape), device="cpu") for shape in (sizes, kernel))
    bias = torch.empty(kernel[0], device="cpu") if biased else None
    window = stride, padding, dilation, transposed, output_padding, groups
    backend: Any = torch._C._select_conv_backend(x, weight, bias, *window, [kernel[0]])
    return bool(backend.name == "Slow2d")
