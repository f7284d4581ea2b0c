"""`WeightOnlyLinear`: a linear layer on a quantized weight."""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant.weight_only import weight_only_linear
from ipex_inductor.quantization.weight_only.qconfig import QConfigWoq
from ipex_inductor.quantization.weight_only.rounding import round_to_nearest
from ipex_inductor.quantization.weight_only.storage import QuantizedWeight, dequantize
from ipex_inductor.quantization.weight_only.words import read_awq, read_gptq
from ipex_inductor.runtime.huge_pages import copy_to_huge_pages
from ipex_inductor.templates.cpu import weight_only as kernels

kernels.register()  # so that eager calls on CPUs run the kernel too


class QuantMethod(IntEnum):
    """Layouts of `WeightOnlyLinear.from_weight`."""

    GPTQ_GEMM = 0
    AWQ_GEMM = 1


class QuantDtype(IntEnum):
    """Types of `WeightOnlyLinear.from_weight`."""

    INT4 = 0


class WeightOnlyLinear(nn.Module):
    """A linear layer on a quantized weight, which computes `x @ W.T + bias`.

    Its buffers are the tensors of `QuantizedWeight`. `to` moves all of them and casts the bias
    alone. Gradients flow to x, not to the weight. `weight` is None: no floating point weight is
    kept, see `dequantize`.

    Args:
        quantized: the weight.
        bias: [N], or None.
        compute: type of the GEMM: "float32", "bfloat16", "float16", "int8", or "" for that of the
            activations.
    """

    weight = None
    quantized_weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    bias: Tensor | None

    def __init__(
        self, quantized: QuantizedWeight, bias: Tensor | None = None, compute: str = ""
    ) -> None:
        super().__init__()
        quantized.check()
        self.in_features, self.out_features = quantized.in_features, quantized.weight.shape[0]
        self.weight_dtype, self.group_size = quantized.weight_dtype, quantized.group_size
        self.compute = compute
        self.register_buffer("quantized_weight", quantized.weight)
        self.register_buffer("scales", quantized.scales)
        self.register_buffer("zeros", quantized.zeros)
        self.register_buffer("order", quantized.order)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def from_linear(cls, linear: nn.Module, qconfig: QConfigWoq) -> "WeightOnlyLinear":
        """Return the layer of a linear layer, its weight rounded to nearest.

        Args:
            linear: an `nn.Linear`, or a `Conv1D` of transformers. It is not changed.
            qconfig: settings.
        """
        weight = read_weight(linear)
        size, symmetric = qconfig.group_size, qconfig.is_symmetric
        quantized = round_to_nearest(weight, qconfig.storage, size, symmetric)
        bias: Any = linear.bias
        layer = cls(quantized, None if bias is None else bias.detach().clone(), qconfig.compute)
        return layer.move_to_huge_pages().train(linear.training)

    @classmethod
    def from_weight(
        cls,
        qweight: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        in_features: int,
        out_features: int,
        qconfig: QConfigWoq | None = None,
        bias: Tensor | None = None,
        group_size: int = -1,
        g_idx: Tensor | None = None,
        quant_method: QuantMethod = QuantMethod.GPTQ_GEMM,
        dtype: QuantDtype = QuantDtype.INT4,
    ) -> "WeightOnlyLinear":
        """Return the layer of packed tensors, with the arguments of IPEX.

        Args:
            qweight: int32 [K / 8, N] of GPTQ, or [K, N / 8] of AWQ.
            scales: [G, N].
            zero_points: int32 [G, N / 8], those of GPTQ one less than meant; None for symmetric
                weights.
            in_features: K.
            out_features: N.
            qconfig: settings, of which `lowp_mode` counts.
            bias: [N], or None.
            group_size: columns of a group; -1 is the whole row.
            g_idx: [K], the group of each column (GPTQ with act-order), or None.
            quant_method: layout of the tensors.
            dtype: INT4.

        Raises:
            QuantizationError: if tensors do not go together.
        """
        bits = _BITS[QuantDtype(dtype)]
        if QuantMethod(quant_method) is QuantMethod.AWQ_GEMM:
            quantized = read_awq(qweight, scales, zero_points, bits, group_size)
        else:
            tensors = (qweight, scales, zero_points, g_idx)
            quantized = read_gptq(*tensors, bits=bits, group_size=group_size, offset=1)
        sizes = (quantized.in_features, quantized.weight.shape[0])
        if sizes != (in_features, out_features):
            raise QuantizationError(
                f"a weight of {in_features} inputs and {out_features} outputs",
                f"one of {sizes[0]} and {sizes[1]} in {QuantMethod(quant_method).name}'s layout",
                "Check quant_method and the sizes.",
            )
        layer = cls(quantized, bias, "" if qconfig is None else qconfig.compute)
        return layer.move_to_huge_pages()

    @property
    def quantized(self) -> QuantizedWeight:
        """Return the tensors of the weight."""
        return QuantizedWeight(
            self.quantized_weight,
            self.scales,
            self.zeros,
            self.order,
            self.weight_dtype,
            self.group_size,
            self.in_features,
        )

    def dequantize(self) -> Tensor:
        """Return the weight in fp32, [N, K]."""
        return dequantize(self.quantized)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output [..., N] of activations [..., K], in their dtype."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        compute = self.compute or str(input.dtype).removeprefix("torch.")
        result: Tensor = weight_only_linear(
            input,
            self.quantized_weight,
            self.scales,
            self.zeros,
            self.order,
            self.bias,
            self.weight_dtype,
            self.group_size,
            compute,
        )
        return result

    def extra_repr(self) -> str:
        """Return sizes and settings."""
        settings = {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": self.bias is not None,
            "weight_dtype": self.weight_dtype,
            "group_size": self.group_size,
            "symmetric": self.zeros is None,
            "act_order": self.order is not None,
            "compute": self.compute or "as activations",
        }
        return ", ".join(f"{name}={value}" for name, value in settings.items())

    def get_extra_state(self) -> Tensor:
        """Return type and group size as the bytes of a text: files of tensors can hold them."""
        return torch.tensor(list(self._format().encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Check that a state is of this type and group size; shapes alone would not tell.

        Raises:
            QuantizationError: if it is not.
        """
        text = bytes(state.tolist()).decode(errors="replace")
        if text != self._format():
            raise QuantizationError(
                f"the state of a layer {self._format()}",
                f"one of a layer {text}",
                "Quantize the model with the settings with which it was saved.",
            )

    def _format(self) -> str:
        return f"{self.weight_dtype}:{self.group_size}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WeightOnlyLinear":
        """Move the weight's tensors as integers, so that casts of floating point pass them by."""
        device = self.quantized_weight.device
        dtypes = {name: buffer.dtype for name, buffer in self._quantized_buffers()}
        for name, buffer in self._quantized_buffers():
            self._buffers[name] = buffer.view(_INTEGERS[buffer.element_size()])
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for name, buffer in self._quantized_buffers():
                self._buffers[name] = buffer.view(dtypes[name])
        return self if self.quantized_weight.device == device else self.move_to_huge_pages()

    def move_to_huge_pages(self) -> "WeightOnlyLinear":
        """Copy a large weight of a CPU to memory that is read faster; return the layer.

        Layers that share the weight must be made afterwards.
        """
        self.quantized_weight = copy_to_huge_pages(self.quantized_weight)
        return self

    def _quantized_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers beside the bias that are not None."""
        return [(n, b) for n, b in self._buffers.items() if b is not None and n != "bias"]


_BITS = {QuantDtype.INT4: 4}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def read_weight(linear: nn.Module) -> Tensor:
    """Return the weight [N, K] of an `nn.Linear` or a `Conv1D` of transformers."""
    weight: Any = linear.weight
    detached: Tensor = weight.detach()
    return detached.t() if is_conv1d(linear) else detached


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is a `Conv1D` of transformers, a linear layer on weights [K, N]."""
    kinds = type(module).__mro__
    return any(k.__name__ == "Conv1D" and k.__module__.startswith("transformers.") for k in kinds)
