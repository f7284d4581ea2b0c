"""Low-precision parameters: which ones are cast, and how modules that hold them are called.

The lists are those of IPEX: exact types, other modules keep fp32. Its contract is autocast around
the model. Without autocast a cast module takes and gives its former dtype, and computes in its own.
"""

import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_map_only

from ipex_inductor.frontend.notes import Notes
from ipex_inductor.optim import cast_for_inference
from ipex_inductor.optim.weights import weights_of

KNOB = "dtype"
NOTHING = "no parameter of it may be held in {}"
HALF = (torch.bfloat16, torch.float16)
MIXED = (
    "ipex_inductor.optimize keeps norms and other parameters in fp32, and FSDP shards parameters "
    "of one dtype together. Before fully_shard(block), and before that of the model, give what is "
    "low a group of its own: fully_shard([m for m in block.modules() if any(p.dtype == dtype for p "
    "in m.parameters(recurse=False))])."
)

RECOMPUTING = (BasePruningMethod, SpectralNorm, WeightNorm)

# An empty buffer with the dtype that a cast module had; `.to(dtype)` of the module changes it.
PUBLIC = "_ipex_public"

_MOST = frozenset({"Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d", "Linear", "Embedding"})
_TRAINED = _MOST | {"Conv1d", "EmbeddingBag", "ParameterList"}
_TRANSFORMERS = "transformers.models"

# Classes of torch.nn, or full names, by phase, and by device and dtype. IPEX's GPU lists apply to
# every GPU.
CASTS: dict[str, dict[str, frozenset[str]]] = {
    "inference": {
        "cpu bfloat16": _MOST
        | {"LSTM", "ParameterList", f"{_TRANSFORMERS}.albert.modeling_albert.AlbertMLMHead"},
        "cpu float16": _MOST | {"ParameterList"},
        "gpu": _MOST
        | {
            *("EmbeddingBag", "LSTM"),
            f"{_TRANSFORMERS}.bart.modeling_bart.BartLearnedPositionalEmbedding",
        },
    },
    "training": {
        "cpu bfloat16": _TRAINED | {"LSTM"},
        "cpu float16": _TRAINED,
        "gpu": _TRAINED
        | {"ConvTranspose1d", f"{_TRANSFORMERS}.bert.modeling_bert.BertLMPredictionHead"},
    },
}
BAG = "ipex_inductor.nn.merged_embedding_bag."
ORIGINALS = {"inference": (torch.float32, *HALF), "training": (torch.float32,)}


def castable(model: nn.Module, dtype: torch.dtype, phase: str, notes: Notes) -> list[nn.Parameter]:
    """Return the parameters of `model` to hold in `dtype`.

    A module is cast whole or not at all, together with all modules that share a parameter with it.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")
    held = weights_of(model)
    for param in model.parameters():
        if param.is_floating_point() and param not in held and param.dtype not in ORIGINALS[phase]:
            text = f"Can't convert model's parameters dtype from {param.dtype} to {dtype}"
            notes.record_rejected(KNOB, text, text=text)
    for name, module in model.named_modules():
        if _full_name(type(module)).startswith(BAG):
            notes.record_rejected(
                KNOB, "tables of merged bags keep the dtype of their EmbeddingSpec", name
            )
        if _is_recomputed(module):
            notes.record_rejected(KNOB, "a hook computes its weight in every call", name)
    fit = {
        param
        for group in groups_of(model)
        if group.fits(dtype, device, phase, held)
        for param in group.params
    }
    return [param for param in model.parameters() if param in fit]


@dataclass(frozen=True)
class Group:
    """Parameters that are cast together or not at all, and the classes of their modules.

    Modules that share a parameter, directly or through others, are in one group.
    """

    classes: frozenset[type]
    params: frozenset[nn.Parameter]

    def fits(
        self, dtype: torch.dtype, device_type: str, phase: str, held: Container[nn.Parameter] = ()
    ) -> bool:
        """Return whether `optimize` casts them to `dtype`: all classes are listed, all dtypes fit.

        Args:
            dtype: the dtype to cast to.
            device_type: the type of the model's device.
            phase: "inference" or "training".
            held: parameters of the model that are held in low precision already.
        """
        kind = f"cpu {str(dtype).removeprefix('torch.')}" if device_type == "cpu" else "gpu"
        listed: frozenset[str] = CASTS[phase].get(kind, frozenset())
        names = {k.__name__ if _is_torchs(k) else _full_name(k) for k in self.classes}
        right = all(p in held or p.dtype in ORIGINALS[phase] for p in self.params)
        return dtype in HALF and names <= listed and right


def groups_of(model: nn.Module) -> list[Group]:
    """Return the groups that the parameters of `model` fall into."""
    group_of: dict[nn.Parameter, Group] = {}
    for kind, params in _owners(model):
        neighbor_groups = {group_of[param] for param in params if param in group_of}
        classes = frozenset({kind}).union(*(group.classes for group in neighbor_groups))
        joined = Group(
            classes, frozenset(params).union(*(group.params for group in neighbor_groups))
        )
        group_of |= dict.fromkeys(joined.params, joined)
    return list(dict.fromkeys(group_of.values()))


def cast(model: nn.Module, dtype: torch.dtype, notes: Notes) -> None:
    """Hold the castable parameters of `model` in `dtype`; state dicts keep the original dtypes."""
    params = castable(model, dtype, "inference", notes)
    if not params and KNOB not in notes.report.count("missed"):
        notes.record_rejected(KNOB, NOTHING.format(dtype))
    dtypes = cast_for_inference(model, params, dtype)
    announce(model, dtypes)
    for name, module in _iter_owners(model, dtypes):
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN needs the weights contiguous
        notes.record_applied(KNOB, f"to {dtype}", name)


def say_low(model: nn.Module, notes: Notes) -> None:
    """Note that `dtype=torch.float32` widens nothing."""
    low = sorted({str(p.dtype) for p in model.parameters() if p.dtype in HALF})
    if low:
        notes.record_rejected(KNOB, f"torch.float32 widens nothing, and parameters are {low[0]}")


def announce(model: nn.Module, dtypes: Mapping[nn.Parameter, torch.dtype]) -> None:
    """Make the modules of torch.nn that own these parameters keep their dtypes without autocast."""
    if dtypes and _explain not in model._forward_hooks.values():
        model.register_forward_hook(_explain, always_call=True)
    for _, module in _iter_owners(model, dtypes):
        has_hook = any(map(is_own_hook, module._forward_pre_hooks.values()))
        calls = _is_torchs(type(module)) and not isinstance(module, nn.ParameterList)
        if calls and not has_hook:
            owned_params = {
                name: p for name, p in module.named_parameters(recurse=False) if p in dtypes
            }
            name, param = next(iter(owned_params.items()))
            # These hooks run next to the module: the user's hooks see and give unchanged dtypes.
            module.register_forward_pre_hook(partial(_narrow, owned=name), with_kwargs=True)
            public = torch.empty(0, dtype=dtypes[param], device=param.device)
            module.register_buffer(PUBLIC, public, persistent=False)
            module.register_forward_hook(partial(_widen, owned=name), prepend=True)


def is_own_hook(hook: Any) -> bool:
    """Return whether `announce` registered the hook."""
    return getattr(hook, "func", hook) in (_narrow, _widen, _explain)


def _explain(model: nn.Module, *_: Any) -> None:
    """Add an explanation to the error of a `forward` that meets two dtypes without autocast."""
    error = None if torch.compiler.is_compiling() else sys.exc_info()[1]
    held = {p.dtype for p in model.parameters()} & set(HALF)
    if isinstance(error, AssertionError) and "uniform original parameter dtype" in str(error):
        error.add_note(MIXED)
    if isinstance(error, RuntimeError) and "dtype" in str(error) and held:
        error.add_note(
            f"ipex_inductor.optimize holds parameters of this {type(model).__name__} in "
            f"{held.pop()}. What reads one outside of its own module (a tied weight, say) needs "
            "autocast around the call: with torch.autocast(device, dtype=...)."
        )


def _narrow(module: nn.Module, args: Any, kwargs: Any, *, owned: str) -> Any:
    """Cast floating-point inputs to the dtype of the weights, without autocast."""
    weight = getattr(module, owned)
    if torch.is_autocast_enabled(weight.device.type):
        return None
    return _cast_floats(weight.dtype, (args, kwargs))


def _widen(module: nn.Module, args: Any, result: Any, *, owned: str) -> Any:
    """Cast results to the dtype that the module had, or was moved to since, without autocast."""
    if torch.is_autocast_enabled(getattr(module, owned).device.type):
        return None
    return _cast_floats(getattr(module, PUBLIC).dtype, result)


def _cast_floats(dtype: torch.dtype, values: Any) -> Any:
    def convert(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return tree_map_only(torch.Tensor, convert, values)


def _is_torchs(kind: type) -> bool:
    return getattr(nn, kind.__name__, None) is kind


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _owners(model: nn.Module) -> Iterator[tuple[type, list[nn.Parameter]]]:
    """Yield each module's class and own parameters; a ParameterList counts as its parent."""
    held_by = {id(c): type(m) for m in model.modules() for c in m.children()}
    for module in model.modules():
        is_list = isinstance(module, nn.ParameterList)
        kind = held_by.get(id(module), type(module)) if is_list else type(module)
        kind = nn.Module if _is_recomputed(module) else kind  # in no list
        yield kind, list(module.parameters(recurse=False))


def _is_recomputed(module: nn.Module) -> bool:
    """Return whether a hook of `nn.utils` computes the module's weight from parameters."""
    return any(isinstance(hook, RECOMPUTING) for hook in module._forward_pre_hooks.values())


def _iter_owners(
    model: nn.Module, params: Iterable[nn.Parameter]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, with their names, that directly own one of `params`."""
    chosen = set(params)
    for name, module in model.named_modules():
        if not chosen.isdisjoint(module.parameters(recurse=False)):
            yield name, module
