"""Dynamic quantization: linear layers round their inputs row by row in each call.

Nothing is captured, so models with control flow that depends on data work. The model's own code
runs under a mode that replaces `torch.nn.functional.linear`, whoever calls it.
"""

import copyreg
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ipex_inductor import compat
from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant.fp8_steps import LIMITS
from ipex_inductor.quantization import attention
from ipex_inductor.quantization.graphs.copying import copy_with
from ipex_inductor.quantization.rounding import (
    multiply_by_fp8_weight,
    multiply_in_fp8,
    round_rows,
    round_weight,
)
from ipex_inductor.quantization.scheme import Layer, Scheme, SchemeMapping
from ipex_inductor.reporting.decisions import warn_once

CELLS = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
SEQUENCES = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
ATTENTION = (functional.multi_head_attention_forward, compat.NATIVE_ATTENTION)
ROUNDED = (*CELLS, *SEQUENCES, *ATTENTION)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# Why `nn.LSTM`, `nn.GRU` and `nn.RNN` have no products of integers. Their cells have.
WHOLE_LAYER = (
    "torch computes the layer whole, in floating point on rounded inputs and weights; its cell, "
    "called step by step, compiles to int8"
)


class RoundingMode(TorchFunctionMode):
    """Rounds what linear and recurrent layers read, or hides them from the modes around it."""

    def __init__(self, scheme: Scheme | None) -> None:
        super().__init__()
        self.scheme = scheme

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, a linear or recurrent layer with rounded arguments.

        Args:
            func: the function that is called.
            types: classes of its arguments.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        kwargs = kwargs or {}
        if func is functional.linear:
            return self.linear(*args, **kwargs)
        if self.scheme is None or self.scheme.dtype is not torch.int8:
            return self._hide(func, args, kwargs)
        if func is functional.multi_head_attention_forward:
            return attention.attend(self.linear, self.scheme, *args, **kwargs)
        if func is compat.NATIVE_ATTENTION:
            return attention.attend_by_batch(self.linear, self.scheme, *args, **kwargs)
        if func in CELLS:
            return func(*_round_cell(args, self.scheme), **kwargs)
        if func in SEQUENCES:
            return func(*_round_sequence(args, self.scheme), **kwargs)
        return func(*args, **kwargs)

    def _hide(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call `func` so that modes around this one do not round what it reads."""
        if func in ROUNDED:
            with compat.FunctionsUnseen():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product by an operator that modes around this one do not replace."""
        if self.scheme is not None and self.scheme.weight_only:
            return multiply_by_fp8_weight(input, weight, bias)
        if self.scheme is not None and self.scheme.is_fp8:
            return multiply_in_fp8(input, weight, bias)
        if self.scheme is not None:
            input, weight = round_rows(input), round_weight(weight, self.scheme.per_channel)
        result: Tensor = torch.ops.aten.linear.default(input, weight, bias)
        return result


def _round_cell(args: tuple[Any, ...], scheme: Scheme) -> tuple[Any, ...]:
    """Return a cell's arguments with its input, state and weights rounded, but not its memory."""
    x, state, *weights = args
    if isinstance(state, (tuple, list)):
        state = (round_rows(state[0]), *state[1:])
    else:
        state = round_rows(state)
    return round_rows(x), state, *(_round_matrix(w, scheme) for w in weights)


def _round_sequence(args: tuple[Any, ...], scheme: Scheme) -> tuple[Any, ...]:
    """Return the arguments of a recurrent layer with its input and its weights rounded."""
    x, *others = args
    rounded = [
        [_round_matrix(w, scheme) for w in each] if _are_weights(each) else each for each in others
    ]
    return round_rows(x), *rounded


def _are_weights(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(
        isinstance(each, nn.Parameter) and each.dim() == 2 for each in value
    )


def _round_matrix(weight: Any, scheme: Scheme) -> Any:
    """Return a weight rounded; biases and projections that are None are returned."""
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
    return round_weight(weight, scheme.per_channel) if is_matrix else weight


def prepare_dynamic(model: nn.Module, mapping: SchemeMapping) -> nn.Module:
    """Return a copy of a model for `convert_dynamic`; it computes what the model computes.

    The copy shares parameters and buffers with the model.

    Raises:
        QuantizationError: if nothing in it would be quantized, or it cannot be copied.
    """
    schemes = dict(_schemes(model, mapping))
    if not any(scheme is not None for scheme in schemes.values()):
        raise QuantizationError(
            "a layer that dynamic quantization quantizes (linear, LSTM, GRU, RNN)",
            f"none in {type(model).__name__}, or all switched off",
            "Quantize it statically, or change the settings.",
        )
    prepared = share_copy(model)
    vars(prepared)["ipex_schemes"] = schemes
    return prepared


def is_prepared(model: nn.Module) -> bool:
    """Return whether a model is one that `prepare_dynamic` returned."""
    return "ipex_schemes" in vars(model)


def convert_dynamic(prepared: nn.Module) -> nn.Module:
    """Return a copy of a prepared model whose linear and recurrent layers round in each call.

    It has the class, methods and state dict of the model, and shares its parameters. It can be
    compiled, exported, traced and pickled. `ipex_layers` are rows of its linear and recurrent
    layers: whether each is quantized or why not, and why its kernel computes in floating point.
    """
    converted = share_copy(prepared)
    for module in converted.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            vars(module)["activation_relu_or_gelu"] = 0  # else one operator hides its layers
    schemes: dict[str, Scheme | None] = vars(converted).pop("ipex_schemes")
    rows = _rows(converted, schemes)
    for name, module in converted.named_modules():
        parent = name.rpartition(".")[0]
        if not name or schemes.get(name) != schemes.get(parent):
            _wrap(module, schemes.get(name))
    converted.ipex_layers = rows  # type: ignore[assignment]
    return converted


def _schemes(model: nn.Module, mapping: SchemeMapping) -> Iterator[tuple[str, Scheme | None]]:
    """Return the scheme of each module that has one, and of those without a linear layer's weight.

    A module without a matrix of its own has the scheme that its functional calls would get.
    """
    has_matrix = any(weight.dim() == 2 for weight in model.parameters())
    for name, module in model.named_modules():
        operator = type(module).__name__.lower() if isinstance(module, RECURRENT) else "linear"
        classes = tuple(f"{c.__module__}.{c.__qualname__}" for c in type(module).__mro__)
        layer = Layer(f"{name}:{operator}:0", operator, name, classes)
        scheme = mapping.scheme_of(layer) if has_matrix else None
        if scheme is not None and scheme.dtype is not torch.int8 and isinstance(module, RECURRENT):
            scheme = None  # FP8 is for linear layers
        yield name, scheme


def _rows(model: nn.Module, schemes: Mapping[str, Scheme | None]) -> list[dict[str, Any]]:
    """Return the decision about each linear and recurrent module."""
    projections = {
        id(part.out_proj)
        for part in model.modules()
        if type(part).forward is nn.MultiheadAttention.forward
    }
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, *RECURRENT)):
            reason = _why_not(module, schemes.get(name), schemes, id(module) in projections)
            operator = "linear" if isinstance(module, nn.Linear) else "recurrent"
            row = {"name": name, "operator": operator, "quantized": not reason, "reason": reason}
            is_whole = not reason and isinstance(module, nn.RNNBase)
            rows.append(row | {"kernel_reason": WHOLE_LAYER if is_whole else ""})
            if is_whole:
                warn_once(f"{type(module).__name__} {name!r}: {WHOLE_LAYER}")
    return rows


def _why_not(
    module: nn.Module,
    scheme: Scheme | None,
    schemes: Mapping[str, Scheme | None],
    is_projection: bool,
) -> str:
    """Return why a linear or recurrent module is not quantized, "" if it is."""
    if scheme is not None:
        hidden = is_projection and scheme.dtype is not torch.int8
        return "FP8 leaves the projections of MultiheadAttention in floating point" * hidden
    in_fp8 = any(scheme and scheme.dtype is not torch.int8 for scheme in schemes.values())
    return LIMITS["recurrent"] if in_fp8 and isinstance(module, RECURRENT) else "switched off"


def _wrap(copied: nn.Module, scheme: Scheme | None) -> None:
    """Give a copied module a class whose forward runs under a mode."""
    copied.__class__ = _rounding_class(type(copied), scheme)


def _rounding_class(kind: type[nn.Module], scheme: Scheme | None) -> type[nn.Module]:
    """Return a class whose forward runs under a mode; pickles name the class it is made from."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with RoundingMode(scheme):
            return kind.forward(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = kind.__reduce_ex__(self, max(int(protocol), 2))
        create, args, *state = reduced
        if create is not copyreg.__newobj__:  # type: ignore[attr-defined]
            raise QuantizationError(
                "modules that pickle as Python's objects do",
                f"{kind.__qualname__}, which has a __reduce__ or __getnewargs_ex__ of its own",
                "Save the state_dict, and quantize the model anew where it is loaded.",
            )
        return _make_rounding, (kind, scheme, *args[1:]), *state

    body = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), body)


def _make_rounding(kind: type[nn.Module], scheme: Scheme | None, *args: Any) -> nn.Module:
    """Return an empty module of a rounding class, for pickles and copies."""
    rounding = _rounding_class(kind, scheme)
    return rounding.__new__(rounding, *args)


def share_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model's modules that shares all parameters and buffers.

    Raises:
        QuantizationError: if an attribute cannot be copied.
    """
    return copy_with(model, {})
