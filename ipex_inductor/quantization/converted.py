"""The converted model: a graph of quantize and dequantize nodes."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Interpreter

from ipex_inductor.quantization.fp8_graph import check_weights
from ipex_inductor.quantization.graphs.model_graph import ModelGraph, copy_graph, share_state
from ipex_inductor.quantization.prepared import PreparedModel
from ipex_inductor.quantization.recipe import LayerDecision
from ipex_inductor.quantization.reference_graph import ReferenceGraph
from ipex_inductor.quantization.scheme import TensorScale


def convert_prepared(prepared: PreparedModel) -> "QuantizedModel":
    """Return the quantized form of a calibrated model; both share the model's parameters.

    Raises:
        QuantizationError: if a tensor was never observed, or a weight cannot be rounded to FP8.
    """
    scales = prepared.tensor_scales()
    check_weights(prepared, prepared._ipex_plan.weights)
    graph, nodes = copy_graph(prepared._ipex_plan.order[0].graph)
    holder = nn.Module()
    share_state(prepared, holder)
    ReferenceGraph(graph, nodes, holder).build(prepared._ipex_plan, scales, prepared._ipex_means())
    return QuantizedModel(holder, graph, prepared.layer_decisions, scales)


class QuantizedModel(ModelGraph):
    """A captured model with quantize and dequantize nodes.

    It runs in floating point on quantized values; backend "ipex" compiles it to int8 kernels.
    """

    _ipex_kept = (
        "layer_decisions",
        "_ipex_tensor_scales",
        "_ipex_example_inputs",
        "_ipex_autocast_dtype",
        "_ipex_recipe",
    )
    # `save` traces with these inputs.
    _ipex_example_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    _ipex_autocast_dtype: torch.dtype | None = None  # `save` traces under it
    _ipex_recipe: Any = None  # how it was quantized, for files

    def __init__(
        self,
        root: nn.Module,
        graph: Graph,
        layers: list[LayerDecision],
        scales: Mapping[str, TensorScale],
    ) -> None:
        super().__init__(root, graph)
        self.layer_decisions = list(layers)
        self._ipex_tensor_scales = dict(scales)

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run by plain operators of torch; `torch.jit.trace` calls this in place of `forward`.

        Its files can so be loaded where the operators of quantization are not registered. No code
        is generated, so that two traces are equal.
        """
        from ipex_inductor.quantization import saving

        bound = inspect.signature(self.forward).bind(*args, **kwargs)
        graph = saving.with_plain_operators(self, self.graph).graph
        return Interpreter(self, graph=graph).run(*bound.arguments.values())

    def tensor_scales(self) -> dict[str, TensorScale]:
        """Return scale and zero point of each quantized tensor by its name."""
        return dict(self._ipex_tensor_scales)

    def save(self, path: str | Path) -> None:
        """Write a file that `torch.jit.load` reads, with any torch, in C++ too."""
        from ipex_inductor.quantization import saving

        saving.save_script(self, path)
