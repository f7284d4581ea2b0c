"""Replace the linear layers of a model by layers on quantized weights."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.errors import ArgumentError, QuantizationError
from ipex_inductor.quantization.graphs.copying import copy_with
from ipex_inductor.quantization.weight_only.linear import WeightOnlyLinear, is_conv1d
from ipex_inductor.quantization.weight_only.qconfig import (
    QConfigWoq,
    WoqMapping,
    read_mapping,
)

Step = Callable[[str, int, int], None]

PREPARED = "_ipex_weight_only_mapping"
REPORT = "_ipex_weight_only_report"
SKIPPED = "the list of skipped layers names it"
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
# Attributes of transformers' models: ties that it restores at saving and resizing.
TIES = ("_tied_weights_keys", "all_tied_weights_keys")


@dataclass(frozen=True)
class WeightOnlyDecision:
    """A linear layer, and whether its weight is quantized or why not.

    `float_bytes` are those of its floating point weight, `stored_bytes` those that are kept for it:
    quantized tensors, or the floating point weight. `note` names another owner of the floating
    point weight, which keeps it.
    """

    name: str
    quantized: bool
    kind: str = ""
    reason: str = ""
    float_bytes: int = 0
    stored_bytes: int = 0
    note: str = ""


@dataclass(frozen=True)
class WeightOnlyReport:
    """The decisions about all linear layers of a model, in the order of its modules."""

    layers: tuple[WeightOnlyDecision, ...]

    @property
    def quantized(self) -> tuple[WeightOnlyDecision, ...]:
        """Return the layers whose weights are quantized."""
        return tuple(layer for layer in self.layers if layer.quantized)

    @property
    def skipped(self) -> tuple[WeightOnlyDecision, ...]:
        """Return the layers that stay in floating point."""
        return tuple(layer for layer in self.layers if not layer.quantized)

    def __str__(self) -> str:
        """Return a line for each layer."""
        lines = [
            f"{layer.name or 'the model'}: {layer.kind if layer.quantized else 'float'},"
            f" {layer.float_bytes} -> {layer.stored_bytes} bytes"
            + "".join(f"; {text}" for text in (layer.reason, layer.note) if text)
            for layer in self.layers
        ]
        return "\n".join([f"{len(self.quantized)} of {len(self.layers)} linear layers", *lines])


def quantize_weights(
    model: nn.Module,
    qconfig: Any,
    inplace: bool = False,
    skip: Iterable[str] = (),
    *,
    step: Step | None = None,
) -> nn.Module:
    """Return a model whose linear layers compute on quantized weights, rounded to nearest.

    Layers are replaced one after the other. With `inplace` the floating point weight of each is
    released behind it, so memory never holds more than one layer twice. Without it the returned
    model shares all other parameters with yours, which keeps its weights.

    An embedding that shares its weight with a linear layer keeps it in floating point, since it
    reads rows of it. The report names it. The list of all layers is that of `report_weights`.

    Args:
        model: the model. Linear layers are `nn.Linear` and the `Conv1D` of transformers.
        qconfig: of `get_weight_only_quant_qconfig_mapping`, or a `QConfigWoq`.
        inplace: change the model itself.
        skip: paths of modules that stay in floating point, with all modules in them.
        step: called before each layer: its path, the number of those before it, that of all.

    Raises:
        QuantizationError: if no layer would be quantized, a weight is not finite, or a name in
            `skip` is no module. A model is not changed then.
    """
    mapping = read_mapping(qconfig)
    check_model(model)
    names = check_names(model, skip)
    plan, decisions = plan_layers(model, mapping.choose, names)
    if not plan:
        raise nothing_to_quantize(decisions)
    check_values(plan)
    result = model if inplace else copy_with(model, {})
    round_layer: Any = WeightOnlyLinear.from_linear
    return replace_layers(result, plan, decisions, round_layer, step)


def prepare_weights(model: nn.Module, configure: Any, inplace: bool = False) -> nn.Module:
    """Return a model for `convert_weights`, which computes what the model computes.

    Args:
        model: the model.
        configure: of `get_weight_only_quant_qconfig_mapping`, or a `QConfigWoq`.
        inplace: mark the model itself, not a copy that shares its parameters.

    Raises:
        QuantizationError: if no layer would be quantized.
    """
    mapping = read_mapping(configure)
    check_model(model)
    plan, decisions = plan_layers(model, mapping.choose)
    if not plan:
        raise nothing_to_quantize(decisions)
    prepared = model if inplace else copy_with(model, {})
    vars(prepared)[PREPARED] = mapping
    return prepared


def is_prepared(model: nn.Module) -> bool:
    """Return whether `prepare_weights` returned a model."""
    return isinstance(getattr(model, PREPARED, None), WoqMapping)


def convert_weights(prepared: nn.Module, inplace: bool = False) -> nn.Module:
    """Return a prepared model with quantized weights, as `quantize_weights` does it."""
    mapping = getattr(prepared, PREPARED)
    converted = quantize_weights(prepared, mapping, inplace)
    del vars(converted)[PREPARED]
    return converted


def report_weights(model: nn.Module) -> WeightOnlyReport:
    """Return which weights of a model were quantized, and reasons for the others.

    Raises:
        QuantizationError: for a model that `quantize_weights` or `gptq` did not return.
    """
    report = getattr(model, REPORT, None)
    if not isinstance(report, WeightOnlyReport):
        advice = "Call quantize_weights(model, qconfig) first."
        came = f"a {type(model).__name__} without a report"
        raise QuantizationError("a model with quantized weights", came, advice)
    return report


Plan = dict[str, tuple[Any, QConfigWoq]]
Decisions = dict[str, WeightOnlyDecision]


def plan_layers(
    model: nn.Module,
    choose: Callable[[str, nn.Module], QConfigWoq | None],
    skip: frozenset[str] = frozenset(),
) -> tuple[Plan, Decisions]:
    """Return the layers to quantize with their settings, and decisions about the others.

    Args:
        model: the model.
        choose: returns the setting of a layer by its name, or None.
        skip: paths of modules that stay in floating point.
    """
    plan: Plan = {}
    decisions: Decisions = {}
    hidden = _read_without_calls(model)
    for name, module in model.named_modules():
        if not is_linear(module):
            continue
        qconfig = choose(name, module)
        reason = why_not(module) or hidden.get(name, "")
        if any(name == path or name.startswith(f"{path}.") for path in skip):
            reason = SKIPPED
        elif qconfig is None and not reason:
            reason = "the mapping leaves it in floating point"
        if reason or qconfig is None:
            size = _nbytes(module)
            decisions[name] = WeightOnlyDecision(name, False, "", reason, size, size)
        else:
            plan[name] = module, qconfig
    return plan, decisions


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, with a floating point weight or a lazy one."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def why_not(module: nn.Module) -> str:
    """Return why a linear layer stays in floating point, "" if it can be quantized."""
    weight = getattr(module, "weight", None)
    kind: Any = type(module)
    if isinstance(module, nn.Linear) and kind.forward is not nn.Linear.forward:
        return f"{kind.__name__} has a forward of its own"
    if hasattr(module, "parametrizations"):
        return "its weight is computed by parametrizations"
    if not isinstance(weight, nn.Parameter) or isinstance(weight, nn.UninitializedParameter):
        return "its weight is no parameter"
    if weight.is_meta:
        return "its weight has no storage (device meta)"
    if not weight.is_floating_point() or weight.dim() != 2 or weight.numel() == 0:
        return f"its weight is {list(weight.shape)} in {weight.dtype}"
    return ""


def _read_without_calls(model: nn.Module) -> dict[str, str]:
    """Return linear layers whose weights another module reads without calling them, and why."""
    hidden = {}
    for name, module in model.named_modules():
        if type(module).forward is nn.MultiheadAttention.forward:
            path = f"{name}.out_proj".lstrip(".")
            hidden[path] = f"{type(module).__name__} reads its weight without calling it"
    return hidden


def replace_layers(
    model: nn.Module,
    plan: Plan,
    decisions: Decisions,
    quantize: Callable[[nn.Module, QConfigWoq], WeightOnlyLinear],
    step: Step | None = None,
) -> nn.Module:
    """Replace the layers of a plan, release their weights, and attach the report.

    Args:
        model: the model to change.
        plan: of `plan_layers`, of this model or one with the same modules; emptied on the way.
        decisions: of the layers that stay in floating point.
        quantize: returns the layer that replaces another, by its setting.
        step: called before each layer, see `quantize_weights`.
    """
    count = len(plan)
    owners = _owners_of_weights(model)
    cache: dict[tuple[int, QConfigWoq], WeightOnlyLinear] = {}
    for number, name in enumerate([*plan]):
        if step is not None:
            step(name, number, count)
        qconfig = plan.pop(name)[1]
        linear: Any = model.get_submodule(name)
        tied = [owner for owner in owners[id(linear.weight)] if owner != name]
        size = _nbytes(linear)
        key = id(linear.weight), qconfig
        layer = _share(cache[key], linear) if key in cache else quantize(linear, qconfig)
        if tied:  # else no other layer has this weight, and the id is free for another
            cache[key] = layer
        carry_hooks(linear, layer)
        set_module(model, name, layer)
        decisions[name] = WeightOnlyDecision(
            name,
            True,
            layer.weight_dtype,
            "",
            size,
            layer.quantized.nbytes,
            _describe_ties(model, tied, plan),
        )
        if tied:
            untie(model, name)
        del linear, layer
    _keep_out_of_fast_paths(model)
    order = [name for name, _ in model.named_modules() if name in decisions]
    vars(model)[REPORT] = WeightOnlyReport(tuple(decisions[name] for name in order))
    return model


def _owners_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """Return the paths of modules by the id of their parameter `weight`."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            owners.setdefault(id(weight), []).append(name)
    return owners


def _describe_ties(model: nn.Module, tied: list[str], plan: Plan) -> str:
    """Return which modules keep a floating point weight that was tied, "" if none does."""
    keep = [name for name in tied if name not in plan and not _is_quantized(model, name)]
    return f"{', '.join(keep)} keeps the tied weight in floating point" if keep else ""


def _is_quantized(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), WeightOnlyLinear)


def _share(layer: WeightOnlyLinear, linear: Any) -> WeightOnlyLinear:
    """Return a layer on the quantized tensors of another, with a bias of its own."""
    bias: Tensor | None = linear.bias
    copy_of_bias = None if bias is None else bias.detach().clone()
    return WeightOnlyLinear(layer.quantized, copy_of_bias, layer.compute).train(linear.training)


def carry_hooks(linear: nn.Module, layer: nn.Module) -> None:
    """Register the forward hooks of a layer on the one that replaces it."""
    for name in HOOKS:
        getattr(layer, name).update(getattr(linear, name))


def set_module(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a module in the place of another.

    Raises:
        QuantizationError: for the model itself, which has no parent.
    """
    if not name:
        advice = "Quantize the layer by WeightOnlyLinear.from_linear(layer, qconfig)."
        raise QuantizationError("a model with linear layers in it", "a linear layer", advice)
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent).add_module(child, layer)


def untie(model: nn.Module, name: str) -> None:
    """Take a layer out of the lists by which transformers ties weights when it saves or resizes.

    `config.tie_word_embeddings` stays as it is: some models scale the input of the head by it.
    """
    for path, module in model.named_modules():
        for attribute in TIES:
            keys = getattr(module, attribute, None)
            if not isinstance(keys, (dict, list)):
                continue
            keep = [key for key in keys if f"{path}.{key}".lstrip(".") != f"{name}.weight"]
            if len(keep) < len(keys):
                is_table = isinstance(keys, dict)
                vars(module)[attribute] = {k: keys[k] for k in keep} if is_table else keep


def _keep_out_of_fast_paths(model: nn.Module) -> None:
    """Make encoder layers of torch call their linear layers: one op of torch reads weights."""
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


def check_model(model: Any) -> None:
    """Raise `ArgumentError` unless a model is a module with linear layers below it."""
    if not isinstance(model, nn.Module):
        raise ArgumentError("a torch.nn.Module", repr(model), "Pass a model.")
    if is_linear(model):
        advice = "Use WeightOnlyLinear.from_linear(layer, qconfig)."
        raise ArgumentError("a model with linear layers in it", "a linear layer", advice)


def check_names(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return names of modules as a set.

    Raises:
        QuantizationError: if one is no module of the model.
    """
    listed = frozenset([names] if isinstance(names, str) else names)
    if unknown := sorted(listed - {name for name, _ in model.named_modules()}):
        advice = "Use names of model.named_modules()."
        raise QuantizationError("paths of modules to skip", ", ".join(unknown), advice)
    return listed


def nothing_to_quantize(decisions: Decisions) -> QuantizationError:
    """Return the error for a model of which no layer would be quantized."""
    reasons = {f"{d.name}: {d.reason}" for d in decisions.values()}
    shown = "; ".join(sorted(reasons)[:3])
    return QuantizationError(
        "a model with a linear layer to quantize",
        shown or "none",
        "Check the mapping, or use the model as it is.",
    )


@torch.no_grad()
def check_values(plan: Plan) -> None:
    """Raise `QuantizationError` for weights of a plan with NaN or infinite values."""
    for name, (linear, _) in plan.items():
        low, high = torch.aminmax(linear.weight)
        if not bool(torch.isfinite(low)) or not bool(torch.isfinite(high)):
            advice = f"Repair the weight, or pass skip=[{name!r}]."
            raise QuantizationError(f"finite weights of {name}", "NaN or infinite ones", advice)


def _nbytes(module: Any) -> int:
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or isinstance(weight, nn.UninitializedParameter):
        return 0
    return weight.nbytes
