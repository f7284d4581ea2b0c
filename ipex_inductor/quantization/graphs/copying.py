"""Copies of models that share their tensors."""

import copy
from collections.abc import Mapping

from torch import Tensor, nn

from ipex_inductor.errors import QuantizationError


def copy_with(model: nn.Module, tensors: Mapping[int, Tensor]) -> nn.Module:
    """Return a copy of a model's modules with other parameters and buffers, by the ids of its own.

    Parameters and buffers that are not among them are shared.

    Raises:
        QuantizationError: if an attribute cannot be copied.
    """
    shared: list[Tensor] = [*model.parameters(), *model.buffers()]
    try:
        return copy.deepcopy(model, {**{id(tensor): tensor for tensor in shared}, **tensors})
    except Exception as error:
        raise QuantizationError(
            "a model whose modules can be copied",
            f"{type(model).__name__}, which cannot ({error})",
            "Give the attribute a `__deepcopy__`, or remove it first.",
        ) from error
