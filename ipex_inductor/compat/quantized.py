"""Quantization: torch's operators, and capture of a graph by `torch.export`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# The operator that torch takes for `nn.MultiheadAttention` in inference.
NATIVE_ATTENTION: Any = torch._native_multi_head_attention
# A block in which no mode and no subclass sees the functions that are called.
FunctionsUnseen: Any = torch._C.DisableTorchFunction


def quantized_ops() -> Any:
    """Return the namespace of quantize and dequantize operators, which an import registers."""
    import torch.ao.quantization.fx._decomposed as _  # noqa: F401

    return torch.ops.quantized_decomposed


@contextmanager
def one_as_any_size() -> Iterator[None]:
    """Let `torch.export` take a dimension of size 1 for one of any size."""
    from torch.fx.experimental import _config

    with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield
