"""Batch norms in inference folded into the layer before them, module by module.

The layer gets new weights and the batch norm's place an `nn.Identity`; the model keeps its class,
methods and hooks. The formula is that of `passes/layout/folding.py`, which does the same in graphs
and takes what is left here:

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
from ipex_inductor.frontend.flow import Flow, hooked
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
    """Whether there is anything to look at."""
    asked = not knobs.on.isdisjoint(KNOBS.values())
    return asked and any(type(module) in NORMS for module in model.modules())


def is_watched(module: nn.Module) -> bool:
    """Whether folding needs to know how `module` is called."""
    return type(module) in NORMS or type(module) in KNOBS


def fold_batch_norms(model: nn.Module, flow: Flow, knobs: Knobs, notes: Notes) -> None:
    """Fold every batch norm for which `flow` proves it right; say why for the others."""
    shared, held = _shared(model), weights_of(model)
    modules = dict(model.named_modules())
    for name, norm in modules.items():
        if type(norm) not in NORMS:
            continue
        maker, reason = _maker(flow, name)
        product = modules.get(maker) if maker else None
        knob = KNOBS.get(type(product), "conv_bn_folding")
        if knob not in knobs:
            continue
        where = f"{maker} + {name}" if product is not None else name
        if reason is None:
            reason = _unfit(product, norm, shared, held) or _misaligned(product, norm, flow, maker)
        if reason is not None:
            notes.missed(knob, f"{reason}; {GRAPH}", where)
            continue
        _fold(product, norm, held)
        put(model, norm, nn.Identity().eval())
        notes.done(knob, where=where)
        hooks = model._load_state_dict_pre_hooks.values()
        if not any(getattr(hook, "hook", None) is _refuse_unfolded for hook in hooks):
            model.register_load_state_dict_pre_hook(_refuse_unfolded)  # type: ignore[no-untyped-call]


def put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Have `new` wherever in `model` `old` is."""
    for parent in model.modules():
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def _refuse_unfolded(model: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    """Before anything is loaded: with `strict=False` nobody would miss the batch norms."""
    for name, module in model.named_modules():
        own = f"{prefix}{name}."
        if type(module) is nn.Identity and any(key.startswith(own) for key in state_dict):
            raise ArgumentError(
                "a state dict of the model as it is",
                f"one with the batch norm {name!r}, which was folded",
                "Load it into the model first, then call optimize.",
            )


def _maker(flow: Flow, name: str) -> tuple[str, str | None]:
    """The module whose result the batch norm `name` alone takes; or why there is none."""
    call = flow.call(name)
    if isinstance(call, str):
        return "", call
    maker = flow.makers.get(call.x, "")
    if not maker:
        return "", "no convolution or linear layer is right before it"
    made = flow.call(maker)
    if isinstance(made, str):
        return maker, made
    if flow.users[call.x] != {name}:
        return maker, f"the result of {maker} has other users"
    used = sorted({maker, name} & flow.handled)
    return maker, f"parameters of {used[0]} are used outside of it" if used else None


def _unfit(product: Any, norm: Any, shared: set[int], held: Held) -> str | None:
    """What in the modules themselves forbids to fold."""
    if type(product) not in KNOBS:
        return f"a {type(product).__name__} is before it"
    if norm.training or norm.running_var is None:
        return "it normalises by the statistics of the batch"
    if hooked(product) or hooked(norm):
        return "a hook sees what is between"
    own = [*product.parameters(), *norm.parameters(), norm.running_mean, norm.running_var]
    if any(id(t) in shared for t in own):
        return "another module has one of the parameters or buffers"
    if not shared.isdisjoint(map(id, (product, norm))):
        return "an attribute that is no submodule has one of the two"
    if not all(t.is_floating_point() for t in own):
        return "weights are no floating point numbers"
    if product.weight in held and product.bias is None:
        return "weights in low precision have no room for a bias"
    return None


def _misaligned(product: Any, norm: Any, flow: Flow, maker: str) -> str | None:
    """A reason unless the channels of `norm`, along dimension 1, are those of the product.

    A Linear's lie along the last dimension, an unbatched 1-D convolution's along the first.
    """
    if norm.num_features == 1:
        return None
    (call,) = flow.calls[maker]
    if call.shape is None and isinstance(norm, nn.BatchNorm1d):
        return "the number of dimensions is not known without a sample_input"
    fits = not isinstance(product, nn.Linear)
    if isinstance(norm, nn.BatchNorm1d):
        assert call.shape is not None
        fits = (len(call.shape) == 2) != fits
    return None if fits else "it normalises another dimension than that of the channels"


@torch.no_grad()
def _fold(product: Any, norm: Any, held: Held) -> None:
    """Give `product` the weights of both: computed in float64, rounded once."""
    weight, bias = product.weight, product.bias
    width = product.out_features if isinstance(product, nn.Linear) else product.out_channels
    scale, shift = (v.repeat_interleave(width // norm.num_features) for v in _affine(norm))
    exact = _double(weight, held) * _along(product, scale)
    product.weight = _rounded(exact, weight, held)
    if bias is not None:
        shift = _double(bias, held) * scale + shift
    product.bias = _rounded(shift, weight if bias is None else bias, held)


def _affine(norm: Any) -> tuple[Tensor, Tensor]:
    """Scale and shift of each channel in float64."""
    scale = torch.rsqrt(_double(norm.running_var) + norm.eps)
    if norm.weight is not None:
        scale = scale * _double(norm.weight)
    shift = -(_double(norm.running_mean) * scale)
    return scale, shift if norm.bias is None else shift + _double(norm.bias)


def _along(product: Any, scale: Tensor) -> Tensor:
    """`scale`, a number for each output channel, as a factor of the weight."""
    rows, columns, *window = product.weight.shape
    ones = [1] * len(window)
    if type(product) not in TRANSPOSED:
        return scale.view(rows, 1, *ones)
    table = scale.view(product.groups, 1, columns)  # rows are inputs, columns outputs of a group
    table = table.repeat_interleave(rows // product.groups, 1)
    return table.reshape(rows, columns, *ones)


def _double(value: Tensor, held: Held | None = None) -> Tensor:
    full = held[value].full() if held and value in held else value  # type: ignore[index]
    return full.detach().to("cpu", torch.float64)  # not every GPU has float64


def _rounded(exact: Tensor, like: nn.Parameter, held: Held) -> nn.Parameter:
    """`exact` as a parameter with the dtype, the device and, in one shape, the layout of `like`."""
    if like in held and like.shape == exact.shape:
        held[like].store(exact.to(like.device, torch.float32))
        return like
    same = like.shape == exact.shape
    value = torch.empty_like(like) if same else like.new_empty(exact.shape)
    return nn.Parameter(value.copy_(exact), requires_grad=like.requires_grad)


def _shared(model: nn.Module) -> set[int]:
    """The ids of tensors that several modules have, and of all that attributes hold otherwise."""
    modules = list(model.modules())
    own = (chain(m.parameters(recurse=False), m.buffers(recurse=False)) for m in modules)
    counts = Counter(map(id, chain.from_iterable(own)))
    held = {id(v): v for m in modules for k, v in vars(m).items() if k not in REGISTRIES}
    todo = list(held.values())
    while todo:
        value = todo.pop()
        inner = _inside(value)
        new = {id(v): v for v in inner if id(v) not in held}
        held |= new
        todo += new.values()
    return held.keys() | {key for key, count in counts.items() if count > 1}


def _inside(value: Any) -> Iterable[Any]:
    """What a container holds, or a bound method is bound to."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    return [value.__self__] if isinstance(value, MethodType) else []
