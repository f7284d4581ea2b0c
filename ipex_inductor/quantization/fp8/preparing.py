"""`prepare_fp8`: replace the linear layers of a model."""

import copy
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer

from ipex_inductor.errors import ArgumentError, QuantizationError, WrappedModelError
from ipex_inductor.quantization.fp8.autocast import check_device
from ipex_inductor.quantization.fp8.linear import FP8Linear
from ipex_inductor.quantization.fp8.old_state import read_old_state
from ipex_inductor.quantization.fp8.state import NAME, STATES, ScalingState
from ipex_inductor.reporting.decisions import warn_once

# Names of classes: a wrapper's module is imported if a model has it, and slow to import if not.
WRAPPERS = {
    *("DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"),
    "OptimizedModule",
}


def prepare_fp8(
    module: Any,
    optimizer: Any = None,
    device: str | torch.device | None = None,
    *,
    inplace: bool = False,
) -> Any:
    """Return a model whose linear layers compute in FP8 inside of `fp8_autocast`.

    Linear layers are found in the whole module tree. Subclasses count unless they have a `forward`
    of their own. Outside of `fp8_autocast` the model computes what it did. Prepare a model before
    it is wrapped or compiled. `nn.TransformerEncoder` makes no nested tensors of padded batches any
    more: its outputs at padded positions are not zero.

    As in IPEX, model and optimizer are copied and yours are not changed. With `inplace=True` they
    are changed and returned, so that parameters stay yours.

    Args:
        module: the model.
        optimizer: of its parameters; the returned one has those of the returned model.
        device: type of the model's device, as in `fp8_autocast`.
        inplace: change the model, with the same parameters, instead of a copy.

    Returns:
        The model, or the model and its optimizer if one was given.

    Raises:
        ArgumentError: for a model or an optimizer of another type.
        WrappedModelError: for a model that is wrapped or compiled.
        QuantizationError: for a model without linear layers, one that was prepared before, one
            with `LazyLinear`, and one whose linear layers lie on several devices.
        DeviceError: for another device.
    """
    _check_arguments(module, optimizer)
    check_device(device)
    _check_initialized(module)
    layers = find_layers(module)
    devices = {layer.weight.device for layer in layers}
    if len(devices) != 1:
        raise QuantizationError(
            "linear layers on one device" if layers else "a model with linear layers",
            f"devices {', '.join(sorted(map(str, devices)))}" if layers else "none",
            "Prepare the parts of a model by themselves.",
        )
    if not inplace:
        module, optimizer = copy.deepcopy((module, optimizer))
        layers = find_layers(module)
    _attach_state(module, layers, devices.pop())
    _warn_of_others(module)
    return module if optimizer is None else (module, optimizer)


def find_layers(module: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that can compute in FP8, each once, in the order of the tree."""
    linear = (m for m in module.modules() if isinstance(m, nn.Linear))
    return [layer for layer in linear if type(layer).forward is nn.Linear.forward]


def _warn_of_others(module: nn.Module) -> None:
    """Name the linear layers that stay in floating point."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and not isinstance(layer, FP8Linear):
            warn_once(
                f"{name or 'the model'} stays in floating point: {type(layer).__name__} has a"
                " forward of its own"
            )
        if type(layer).forward is nn.MultiheadAttention.forward:
            warn_once(
                f"the projections of {name or 'the model'} stay in floating point:"
                f" {type(layer).__name__} computes them without calling linear layers"
            )


def _check_arguments(module: Any, optimizer: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentError("a torch.nn.Module", repr(module), "Pass a model.")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ArgumentError("a torch.optim.Optimizer", repr(optimizer), "Pass optimizer=None.")
    parameters = {id(parameter) for parameter in module.parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    if groups and not any(id(p) in parameters for group in groups for p in group["params"]):
        raise ArgumentError(
            "an optimizer of parameters of the model",
            f"a {type(optimizer).__name__} that steps none of them",
            "Make it of model.parameters().",
        )
    for part in module.modules():
        names = {kind.__name__ for kind in type(part).__mro__}
        if part._compiled_call_impl is not None:
            names.add("OptimizedModule")
        if wrapped := sorted(names & WRAPPERS):
            raise WrappedModelError(
                "a model that is not wrapped or compiled yet",
                f"a {wrapped[0]}",
                "Call prepare_fp8 on the plain model first.",
            )
    if any(isinstance(part, FP8Linear | ScalingState) for part in module.modules()):
        raise QuantizationError(
            "a model that was not prepared before", "one with FP8Linear", "Use it as it is."
        )


def _check_initialized(module: nn.Module) -> None:
    """Raise `QuantizationError` for a linear layer that becomes another class in its first call."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and isinstance(layer, LazyModuleMixin):
            raise QuantizationError(
                "linear layers that know their sizes",
                f"{name or 'the model'}, a {type(layer).__name__}",
                "Run one batch through the model first.",
            )


def _attach_state(module: nn.Module, layers: list[nn.Linear], device: torch.device) -> None:
    """Turn the linear layers of a model to `FP8Linear`, with one scaling state for all of them.

    The first layer holds it: containers would take a child of their own for a layer.
    """
    state = ScalingState(len(layers), device)
    names = [name for name, part in module.named_modules() if part is layers[0]]
    for number, layer in enumerate(layers):
        kind: Any = type(layer)
        layer.__class__ = _derive(kind)
        assert isinstance(layer, FP8Linear)
        layer._fp8 = state, number
    layers[0].add_module(NAME, state)
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0  # else one operator hides its layers
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # which FP8 does not take
    module.register_forward_pre_hook(state.note_call)
    prepared: Any = module
    prepared.register_load_state_dict_pre_hook(read_old_state)
    # Every process has the same maxima, and a broadcast would count a version of them.
    prepared._ddp_params_and_buffers_to_ignore = [
        *getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
        *(f"{names[0]}.{NAME}.{name}".lstrip(".") for name in (*STATES, "scales")),
    ]


@cache
def _derive(kind: Any) -> Any:
    """Return the class of FP8 layers of a class of linear layers."""
    if kind is nn.Linear:
        return FP8Linear
    namespace = {"__module__": kind.__module__, "__reduce_ex__": _reduce}
    return type(f"FP8{kind.__name__}", (FP8Linear, kind), namespace)


def _reduce(layer: FP8Linear, protocol: Any) -> tuple[Any, ...]:
    """Return how a layer is pickled whose class is in no module."""
    return _restore, (type(layer).__bases__[1],), layer.__dict__


def _restore(kind: Any) -> Any:
    """Return an empty layer of the class that `_derive` makes of another."""
    derived = _derive(kind)
    return derived.__new__(derived)
