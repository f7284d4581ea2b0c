"""Dynamic quantization of `nn.MultiheadAttention`, whose linear layers a mode does not see.

torch runs `multi_head_attention_forward` outside of the mode that it hands it to.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ipex_inductor.quantization.rounding import round_rows, round_weight
from ipex_inductor.quantization.scheme import Scheme

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
NAMES = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight"),
    *("in_proj_bias", "bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight"),
    *("out_proj_bias", "training", "key_padding_mask", "need_weights", "attn_mask"),
)


def attend(linear: Linear, scheme: Scheme, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return what `multi_head_attention_forward` returns, with rounded linear layers.

    Args:
        linear: the rounded linear layer.
        scheme: how weights are rounded.
        args: positional arguments of torch's function.
        kwargs: its keyword arguments.
    """
    arguments = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    out_weight, out_bias = (arguments[f"out_proj_{name}"] for name in ("weight", "bias"))
    rounded = _round_inputs(arguments)
    for name in WEIGHTS:
        if rounded.get(name) is not None:
            rounded[name] = round_weight(rounded[name], scheme.per_channel)
    # The last linear layer is left to us: a product with ones on the diagonal changes nothing.
    size = out_weight.shape[1]
    rounded["out_proj_weight"] = torch.eye(size, dtype=out_weight.dtype, device=out_weight.device)
    rounded["out_proj_bias"] = None
    output, weights = functional.multi_head_attention_forward(**rounded)
    return linear(output, out_weight, out_bias), weights


def _round_inputs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with query, key and value rounded; equal ones stay one object."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    rounded_query = round_rows(query)
    rounded_key = rounded_query if key is query else round_rows(key)
    rounded_value = rounded_key if value is key else round_rows(value)
    return {**arguments, "query": rounded_query, "key": rounded_key, "value": rounded_value}


def attend_by_batch(
    linear: Linear,
    scheme: Scheme,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *parameters: Any,
) -> tuple[Any, Any]:
    """Return what `_native_multi_head_attention` returns, with rounded linear layers.

    Args:
        linear: the rounded linear layer.
        scheme: how weights are rounded.
        query: batch first, like `key` and `value`.
        key: see `query`.
        value: see `query`.
        parameters: sizes, weights, biases, a mask, its use, and its type (0 to 2).
    """
    size, heads, in_weight, in_bias, out_weight, out_bias, mask, *options = parameters
    defaults: tuple[Any, ...] = (True, True, None)
    need_weights, average, mask_type = (*options, *defaults[len(options) :])
    first = query.transpose(0, 1)
    second = first if key is query else key.transpose(0, 1)
    third = second if value is key else value.transpose(0, 1)
    output, weights = attend(
        linear,
        scheme,
        *(first, second, third, size, heads, in_weight, in_bias, None, None, False, 0.0),
        *(out_weight, out_bias, False),
        key_padding_mask=mask if mask_type == 1 else None,
        need_weights=need_weights,
        attn_mask=mask.flatten(0, 1) if mask_type == 2 else mask if mask_type == 0 else None,
        average_attn_weights=average,
    )
    return output.transpose(0, 1), weights
