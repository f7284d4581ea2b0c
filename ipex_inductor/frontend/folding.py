"""Batch norms in inference folded into the layer before them, module by module.

The layer gets new weights and the batch norm's place an `nn.Identity`; the model keeps its class,
methods and hooks. The formula is that of `passes/folding.py`, which does the same in graphs and
takes what is left here:

    layer(x, w, b) * scale + shift == layer(x, w * scale, b * scale + shift)

with `scale = gamma / sqrt(var + eps)` and `shift = beta - mean * scale`.
"""

from collections import Counter

import torch
from torch import Tensor, nn

from ipex_inductor.frontend.flow import Flow
from ipex_inductor.frontend.knobs import Knobs
from ipex_inductor.frontend.notes import Notes

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KNOBS = {
    **dict.fromkeys((*CONVOLUTIONS, *TRANSPOSED), "conv_bn_folding"),
    nn.Linear: "linear_bn_folding",
}
GRAPH = "backend ipex still folds it where its graph proves it right"


def is_wanted(model: nn.Module, knobs: Knobs) -> bool:
    """Whether there is anything to look at."""
    return not knobs.on.isdisjoint(KNOBS.values()) and any(
        type(m) in NORMS for m in model.modules()
    )


def is_watched(module: nn.Module) -> bool:
    """Whether folding needs to know how `module` is called."""
    return type(module) in NORMS or type(module) in KNOBS


def fold_batch_norms(model: nn.Module, flow: Flow, knobs: Knobs, notes: Notes) -> None:
    """Fold every batch norm for which `flow` proves it right; say why for the others."""
    shared = _shared_parameters(model)
    modules = dict(model.named_modules())
    for name, norm in modules.items():
        if type(norm) not in NORMS:
            continue
        maker, reason = _maker(flow, name)
        product = modules.get(maker)
        knob = KNOBS.get(type(product), "conv_bn_folding")
        if knob not in knobs:
            continue
        where = f"{maker} + {name}" if product is not None else name
        if reason is None:
            assert product is not None
            reason = _unfit(product, norm, shared) or _misaligned(product, norm, flow.calls[maker])
        if reason is not None:
            notes.missed(knob, f"{reason}; {GRAPH}", where)
            continue
        _fold(product, norm)
        put(model, norm, nn.Identity().eval())
        notes.done(knob, where=where)


def put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Have `new` wherever in `model` `old` is."""
    for parent in model.modules():
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def hooked(module: nn.Module) -> bool:
    """Whether somebody sees or changes what goes into `module` or out of it."""
    own = vars(module)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in own or any(own.get(name) for name in hooks)


def _maker(flow: Flow, name: str) -> tuple[str, str | None]:
    """The module whose result the batch norm `name`, and nobody else, takes; or why there is none."""
    call = flow.call(name)
    if isinstance(call, str):
        return "", call
    maker = flow.makers.get(call.x, "")
    made = flow.call(maker)
    if not maker:
        return "", "no convolution or linear layer is right before it"
    if isinstance(made, str):
        return maker, made
    if flow.users[call.x] != {name}:
        return maker, f"the result of {maker} has other users"
    used = sorted({maker, name} & flow.handled)
    return maker, f"parameters of {used[0]} are used outside of it" if used else None


def _unfit(product: nn.Module, norm: nn.Module, shared: set[int]) -> str | None:
    """What in the modules themselves forbids to fold."""
    if type(product) not in KNOBS:
        return f"a {type(product).__name__} is before it"
    if norm.training or not norm.track_running_stats or norm.running_var is None:
        return "it normalises by the statistics of the batch"
    if hooked(product) or hooked(norm):
        return "a hook sees what is between"
    own = [*product.parameters(), *norm.parameters()]
    if any(id(p) in shared for p in own):
        return "another module has one of the parameters"
    if not all(t.is_floating_point() for t in (*own, norm.running_mean, norm.running_var)):  # type: ignore[union-attr]
        return "weights are no floating point numbers"
    return None


def _misaligned(product: nn.Module, norm: nn.Module, calls: list) -> str | None:
    """A reason unless the channels of `norm`, along dimension 1, are those of the product.

    A Linear's lie along the last dimension, and so do those of an unbatched convolution in 1-D.
    """
    if norm.num_features == 1:
        return None
    shape = calls[0].shape
    channels_last = isinstance(product, nn.Linear)
    if shape is None and isinstance(norm, nn.BatchNorm1d):
        return "the number of dimensions is not known without a sample_input"
    dims = len(shape) if shape else 0
    if channels_last and (dims != 2 or not isinstance(norm, nn.BatchNorm1d)):
        return "it normalises another dimension than the last"
    if isinstance(product, (nn.Conv1d, nn.ConvTranspose1d)) and dims == 2:
        return "it normalises another dimension than the first"
    return None


@torch.no_grad()
def _fold(product: nn.Module, norm: nn.Module) -> None:
    """Give `product` the weights of both: computed in float64, rounded once."""
    weight, bias = product.weight, product.bias
    width = getattr(product, "out_channels", None) or product.out_features
    scale, shift = (v.repeat_interleave(width // norm.num_features) for v in _affine(norm))
    exact_weight = _double(weight) * _along(product, scale)
    exact_bias = shift if bias is None else _double(bias) * scale + shift
    product.weight = _rounded(exact_weight, weight)
    product.bias = _rounded(exact_bias, weight if bias is None else bias)


def _affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Scale and shift of each channel in float64."""
    scale = torch.rsqrt(_double(norm.running_var) + norm.eps)
    if norm.weight is not None:
        scale = scale * _double(norm.weight)
    shift = -(_double(norm.running_mean) * scale)
    return scale, shift if norm.bias is None else shift + _double(norm.bias)


def _along(product: nn.Module, scale: Tensor) -> Tensor:
    """`scale`, a number for each output channel, as a factor of the weight."""
    window = [1] * (product.weight.dim() - 2)
    if type(product) not in TRANSPOSED:
        return scale.view(-1, 1, *window)
    rows, columns = product.weight.shape[:2]  # inputs, and outputs of one of the groups
    table = scale.view(product.groups, 1, columns).expand(-1, rows // product.groups, -1)
    return table.reshape(rows, columns, *window)


def _double(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float64)  # not every GPU has float64


def _rounded(exact: Tensor, like: nn.Parameter) -> nn.Parameter:
    """`exact` as a parameter with dtype, device and, of equal shapes, the layout of `like`."""
    value = torch.empty_like(like) if like.shape == exact.shape else like.new_empty(exact.shape)
    return nn.Parameter(value.copy_(exact), requires_grad=like.requires_grad)


def _shared_parameters(model: nn.Module) -> set[int]:
    counts = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    return {key for key, count in counts.items() if count > 1}
