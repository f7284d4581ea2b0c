"""Batch-norm folding for inference, module by module, into the layer before each batch norm.

The layer gets new weights and the batch norm's place an `nn.Identity`; the model keeps its class,
methods and hooks. The formula is that of `passes/layout/folding.py`, which does it in graphs and
folds what remains here:

    layer(x, w, b) * scale + shift == layer(x, w * scale, b * scale + shift)

with `scale = gamma / sqrt(var + eps)` and `shift = beta - mean * scale`.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.errors import ArgumentError
from ipex_inductor.frontend.flow import Flow, has_hooks
from ipex_inductor.frontend.knobs import Knobs
from ipex_inductor.frontend.notes import Notes
from ipex_inductor.optim.weights import Weight, weights_of

Held = dict[nn.Parameter, Weight]

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KNOBS = {
    **dict.fromkeys((*CONVOLUTIONS, *TRANSPOSED), "conv_bn_folding"),
    nn.Linear: "linear_bn_folding",
}
REGISTRIES = ("_modules", "_parameters", "_buffers")
GRAPH = "backend ipex still folds it where its graph proves it right"


def is_wanted(model: nn.Module, knobs: Knobs) -> bool:
    """Return whether a folding knob is on and the model has a batch norm."""
    enabled = not knobs.on.isdisjoint(KNOBS.values())
    return enabled and any(type(module) in NORMS for module in model.modules())


def is_watched(module: nn.Module) -> bool:
    """Return whether folding needs to know how `module` is called."""
    return type(module) in NORMS or type(module) in KNOBS


def fold_batch_norms(model: nn.Module, flow: Flow, knobs: Knobs, notes: Notes) -> None:
    """Fold every batch norm that `flow` proves foldable; note the reason for all others."""
    shared, held = _find_shared(model), weights_of(model)
    modules = dict(model.named_modules())
    for name, norm in modules.items():
        if type(norm) not in NORMS:
            continue
        maker, reason = _maker(flow, name)
        layer = modules.get(maker) if maker else None
        knob = KNOBS.get(type(layer), "conv_bn_folding")
        if knob not in knobs:
            continue
        where = f"{maker} + {name}" if layer is not None else name
        if reason is None:
            reason = _find_obstacle(layer, norm, shared, held) or _find_misalignment(
                layer, norm, flow, maker
            )
        if reason is not None:
            notes.record_rejected(knob, f"{reason}; {GRAPH}", where)
            continue
        _fold(layer, norm, held)
        replace_module(model, norm, nn.Identity().eval())
        notes.record_applied(knob, where=where)
        hooks = model._load_state_dict_pre_hooks.values()
        if not any(getattr(hook, "hook", None) is _refuse_unfolded for hook in hooks):
            model.register_load_state_dict_pre_hook(_refuse_unfolded)  # type: ignore[no-untyped-call]


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace `old` by `new` at each of its places in `model`."""
    for parent in model.modules():
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def _refuse_unfolded(model: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    """Raise `ArgumentError` for a state dict with folded batch norms, before anything is loaded.

    With `strict=False` their entries would be ignored silently.
    """
    for name, module in model.named_modules():
        module_prefix = f"{prefix}{name}."
        if type(module) is nn.Identity and any(key.startswith(module_prefix) for key in state_dict):
            raise ArgumentError(
                "a state dict of the model as it is",
                f"one with the batch norm {name!r}, which was folded",
                "Load it into the model first, then call optimize.",
            )


def _maker(flow: Flow, name: str) -> tuple[str, str | None]:
    """Return the name of the layer before the batch norm `name`, and why it is not usable.

    The reason is None if only the batch norm takes the layer's result; the name is "" if unknown.
    """
    call = flow.call(name)
    if isinstance(call, str):
        return "", call
    maker = flow.makers.get(call.x, "")
    if not maker:
        return "", "no convolution or linear layer is right before it"
    maker_call = flow.call(maker)
    if isinstance(maker_call, str):
        return maker, maker_call
    if flow.users[call.x] != {name}:
        return maker, f"the result of {maker} has other users"
    used = sorted({maker, name} & flow.handled)
    return maker, f"parameters of {used[0]} are used outside of it" if used else None


def _find_obstacle(layer: Any, norm: Any, shared: set[int], held: Held) -> str | None:
    """Return what in the modules themselves forbids to fold, None for nothing."""
    if type(layer) not in KNOBS:
        return f"a {type(layer).__name__} is before it"
    if norm.training or norm.running_var is None:
        return "it normalises by the statistics of the batch"
    if has_hooks(layer) or has_hooks(norm):
        return "a hook sees what is between"
    tensors = [*layer.parameters(), *norm.parameters(), norm.running_mean, norm.running_var]
    if any(id(t) in shared for t in tensors):
        return "another module has one of the parameters or buffers"
    if not shared.isdisjoint(map(id, (layer, norm))):
        return "an attribute that is no submodule has one of the two"
    if not all(t.is_floating_point() for t in tensors):
        return "weights are no floating point numbers"
    if layer.weight in held and layer.bias is None:
        return "weights in low precision have no room for a bias"
    return None


def _find_misalignment(layer: Any, norm: Any, flow: Flow, maker: str) -> str | None:
    """Return why the channels of `norm` are not the layer's, None if they are.

    Batch norms normalize dimension 1. A Linear's channels lie along the last dimension, an
    unbatched 1-D convolution's along the first.
    """
    if norm.num_features == 1:
        return None
    (call,) = flow.calls[maker]
    if call.shape is None and isinstance(norm, nn.BatchNorm1d):
        return "the number of dimensions is not known without a sample_input"
    fits = not isinstance(layer, nn.Linear)
    if isinstance(norm, nn.BatchNorm1d):
        assert call.shape is not None
        fits = (len(call.shape) == 2) != fits
    return None if fits else "it normalises another dimension than that of the channels"


@torch.no_grad()
def _fold(layer: Any, norm: Any, held: Held) -> None:
    """Give `layer` the weights of both modules: computed in float64, rounded once."""
    weight, bias = layer.weight, layer.bias
    width = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    scale, shift = (v.repeat_interleave(width // norm.num_features) for v in _affine(norm))
    exact = _double(weight, held) * _along(layer, scale)
    layer.weight = _round_like(exact, weight, held)
    if bias is not None:
        shift = _double(bias, held) * scale + shift
    layer.bias = _round_like(shift, weight if bias is None else bias, held)


def _affine(norm: Any) -> tuple[Tensor, Tensor]:
    """Return scale and shift of each channel in float64."""
    scale = torch.rsqrt(_double(norm.running_var) + norm.eps)
    if norm.weight is not None:
        scale = scale * _double(norm.weight)
    shift = -(_double(norm.running_mean) * scale)
    return scale, shift if norm.bias is None else shift + _double(norm.bias)


def _along(layer: Any, scale: Tensor) -> Tensor:
    """Return `scale`, one element per output channel, as a factor of the weight."""
    rows, columns, *window = layer.weight.shape
    ones = [1] * len(window)
    if type(layer) not in TRANSPOSED:
        return scale.view(rows, 1, *ones)
    table = scale.view(layer.groups, 1, columns)  # rows are inputs, columns outputs of a group
    table = table.repeat_interleave(rows // layer.groups, 1)
    return table.reshape(rows, columns, *ones)


def _double(value: Tensor, held: Held | None = None) -> Tensor:
    full = held[value].full() if held and value in held else value  # type: ignore[index]
    return full.detach().to("cpu", torch.float64)  # not every GPU has float64


def _round_like(exact: Tensor, like: nn.Parameter, held: Held) -> nn.Parameter:
    """Return `exact` as a parameter of the dtype and device of `like`, rounded.

    It has the layout of `like` if their shapes agree.
    """
    if like in held and like.shape == exact.shape:
        held[like].store(exact.to(like.device, torch.float32))
        return like
    same = like.shape == exact.shape
    value = torch.empty_like(like) if same else like.new_empty(exact.shape)
    return nn.Parameter(value.copy_(exact), requires_grad=like.requires_grad)


def _find_shared(model: nn.Module) -> set[int]:
    """Return the ids of tensors that several modules have, and of all other attribute values."""
    modules = list(model.modules())
    direct_tensors = (chain(m.parameters(recurse=False), m.buffers(recurse=False)) for m in modules)
    counts = Counter(map(id, chain.from_iterable(direct_tensors)))
    held = {id(v): v for m in modules for k, v in vars(m).items() if k not in REGISTRIES}
    pending = list(held.values())
    while pending:
        value = pending.pop()
        inner = _inside(value)
        new = {id(v): v for v in inner if id(v) not in held}
        held |= new
        pending += new.values()
    return held.keys() | {key for key, count in counts.items() if count > 1}


def _inside(value: Any) -> Iterable[Any]:
    """Return the items of a container, or the object that a bound method is bound to."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    return [value.__self__] if isinstance(value, MethodType) else []
