"""TorchScript files of quantized models, for any torch and for C++."""

import inspect
import os
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ipex_inductor import compat
from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant import fp8_steps
from ipex_inductor.quantization.converted import QuantizedModel
from ipex_inductor.quantization.graphs.model_graph import ModelGraph, copy_graph, share_state
from ipex_inductor.quantization.rounding import dequantize_plainly, quantize_plainly

aten, ipex = torch.ops.aten, torch.ops.ipex
_plain_models: WeakKeyDictionary[nn.Module, tuple[str, ModelGraph]] = WeakKeyDictionary()


def save_script(quantized: QuantizedModel, path: str | os.PathLike[str]) -> None:
    """Write a file that `torch.jit.load` reads, with any torch, in C++ too.

    It is traced with the inputs that the model was prepared or converted with, and under the
    autocast of that time. It holds the floating-point weights and plain operators of torch.

    Raises:
        QuantizationError: if the inputs are unknown.
    """
    if quantized._ipex_example_inputs is None:
        raise QuantizationError(
            "a quantized model whose example inputs are known",
            "one without",
            "Trace it with inputs of yours: `torch.jit.trace(model, inputs).save(path)`.",
        )
    args, kwargs = quantized._ipex_example_inputs
    dtype = quantized._ipex_autocast_dtype
    autocast = torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)
    with torch.no_grad(), autocast, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        options: dict[str, Any] = {"check_trace": False, "strict": False}
        if kwargs:
            named = inspect.signature(quantized.forward).bind(*args, **kwargs).arguments
            options["example_kwarg_inputs"] = dict(named)
        jit: Any = torch.jit
        jit.trace(quantized, None if kwargs else args, **options).save(str(path))


def with_plain_operators(quantized: nn.Module, graph: torch.fx.Graph) -> ModelGraph:
    """Return a model whose quantize and dequantize nodes are plain operators of torch.

    It computes bit for bit the same, and shares parameters and buffers with `quantized`. A second
    call returns the same object, as `torch.jit.trace` compares the lines of code of two runs.
    """
    code, plain = _plain_models.get(quantized, ("", None))
    if plain is None or code != str(graph):
        plain = _replace_operators(quantized, graph)
        _plain_models[quantized] = str(graph), plain
    share_state(quantized, plain)
    return plain


def _replace_operators(quantized: nn.Module, graph: torch.fx.Graph) -> ModelGraph:
    result, _ = copy_graph(graph)
    functions = _plain_operators()
    for node in result.nodes:
        if node.op == "call_function" and node.target in functions:
            node.target = functions[node.target]
    holder = nn.Module()
    share_state(quantized, holder)
    return ModelGraph(holder, result)


def _plain_operators() -> dict[Any, Any]:
    """Return a function for each operator that a trace must not hold, or would hold with sizes."""
    ops = compat.quantized_ops()
    return {
        aten.sym_size.int: Tensor.size,
        aten.view.default: Tensor.view,
        aten.reshape.default: Tensor.reshape,
        aten.expand.default: Tensor.expand,
        ipex.fp8_quantize_tensor.default: fp8_steps.quantize_tensor,
        ipex.fp8_quantize_channels.default: fp8_steps.quantize_channels,
        ipex.fp8_dequantize.default: fp8_steps.dequantize,
        ops.quantize_per_tensor.tensor: quantize_plainly,
        ops.dequantize_per_tensor.tensor: dequantize_tensor,
        ops.quantize_per_channel.default: quantize_channels,
        ops.dequantize_per_channel.default: dequantize_channels,
    }


def dequantize_tensor(
    quantized: Tensor, scale: Tensor, zero_point: Tensor, *_: Any, **options: Any
) -> Tensor:
    """Return what `dequantize_per_tensor` returns."""
    result = dequantize_plainly(quantized, scale, zero_point)
    return result.to(options["out_dtype"]) if options.get("out_dtype") else result


def quantize_channels(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, *bounds: Any
) -> Tensor:
    """Return what `quantize_per_channel` returns.

    Args:
        x: a weight.
        scales: a step for each channel.
        zero_points: the quantized value of zero of each channel.
        axis: the dimension of channels.
        bounds: the smallest and the largest quantized value, and their type.
    """
    shape = _along(x, axis)
    return quantize_plainly(x, scales.view(shape), zero_points.view(shape), *bounds)


def dequantize_channels(
    quantized: Tensor, scales: Tensor, zero_points: Tensor, axis: int, *_: Any, **options: Any
) -> Tensor:
    """Return what `dequantize_per_channel` returns.

    Args:
        quantized: a quantized weight.
        scales: a step for each channel.
        zero_points: the quantized value of zero of each channel.
        axis: the dimension of channels.
        options: `out_dtype`, if it is not float32.
    """
    shape = _along(quantized, axis)
    return dequantize_tensor(quantized, scales.view(shape), zero_points.view(shape), **options)


def _along(x: Tensor, axis: int) -> list[int]:
    """Return the shape that broadcasts one element for each channel."""
    return [-1 if size == axis else 1 for size in range(x.dim())]
