"""A captured model with observers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ipex_inductor.quantization.scheme import SchemeMapping, TensorScale


def prepare_graph(
    model: nn.Module,
    mapping: SchemeMapping,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    bn_folding: bool = True,
) -> "PreparedModel":
    """Return a captured copy of `model` that shares its parameters and has observers.

    Args:
        model: the model; it is not changed.
        mapping: which layer gets which scheme.
        args: example inputs, of which every size may differ later.
        kwargs: example keyword arguments.
        bn_folding: fold batch norms into the layers before them.
    """
    raise NotImplementedError


class PreparedModel(torch.fx.GraphModule):
    """A captured model with observers at each tensor that will be quantized."""

    observers: dict[str, Any]
    layers: list[Any]

    def scales(self) -> dict[str, TensorScale]:
        """Return scale and zero point of each quantized tensor by its name."""
        raise NotImplementedError

    def set_scales(self, scales: Mapping[str, TensorScale]) -> None:
        """Use these scales in place of what the observers saw."""
        raise NotImplementedError
