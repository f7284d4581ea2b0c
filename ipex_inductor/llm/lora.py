"""Products with low-rank adapters (LoRA), each token by its own, written into a tensor.

Names that begin with `bgmv` take an adapter for each token, `sgmv` one for each text.
"""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.errors import ArgumentError


def bgmv_shrink(
    input: Tensor, lora_weights: Tensor, output: Tensor, token_lora_mapping: Tensor, scaling: float
) -> Tensor:
    """Write scaling * A x into the first columns of `output`, by the A of each token's adapter.

    Args:
        input: [tokens, width].
        lora_weights: [adapters, rank, width] or [adapters, 1, rank, width].
        output: [tokens, at least rank].
        token_lora_mapping: [tokens], index of the adapter; rows of tokens with -1 stay.
        scaling: factor of the products.

    Raises:
        ArgumentError: for shapes that do not go together, or an adapter that does not exist.
    """
    return _write(input, lora_weights, output, token_lora_mapping, scaling=scaling)


def bgmv_expand(
    input: Tensor,
    lora_weights: Tensor,
    output: Tensor,
    token_lora_mapping: Tensor,
    add_inputs: bool = True,
) -> Tensor:
    """Add B x to the first columns of `output`, by the B of each token's adapter.

    Args:
        input: [tokens, rank].
        lora_weights: [adapters, width, rank] or [adapters, 1, width, rank].
        output: [tokens, at least width].
        token_lora_mapping: [tokens], index of the adapter; rows of tokens with -1 stay.
        add_inputs: False replaces what `output` holds.

    Raises:
        ArgumentError: for shapes that do not go together, or an adapter that does not exist.
    """
    return _write(input, lora_weights, output, token_lora_mapping, add=add_inputs)


def bgmv_expand_slice(
    input: Tensor,
    lora_weights: Tensor,
    output: Tensor,
    token_lora_mapping: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> Tensor:
    """Add B x to `slice_size` columns of `output` from `slice_offset` on.

    Args:
        input: [tokens, rank].
        lora_weights: [adapters, slice_size, rank] or [adapters, 1, slice_size, rank].
        output: [tokens, at least slice_offset + slice_size].
        token_lora_mapping: [tokens], index of the adapter; rows of tokens with -1 stay.
        slice_offset: first column.
        slice_size: number of columns.
        add_inputs: False replaces what `output` holds.

    Raises:
        ArgumentError: for shapes that do not go together, or an adapter that does not exist.
    """
    if lora_weights.shape[-2] != slice_size:
        came = f"lora_weights {list(lora_weights.shape)}"
        raise ArgumentError(f"lora_weights of {slice_size} rows", came, "Check slice_size.")
    columns = output[:, slice_offset : slice_offset + slice_size]
    _write(input, lora_weights, columns, token_lora_mapping, add=add_inputs)
    return output


def _write(
    x: Tensor,
    weights: Tensor,
    output: Tensor,
    adapters: Tensor,
    scaling: float = 1.0,
    add: bool = False,
) -> Tensor:
    """Write the product of each token with the matrix of its adapter, computed in fp32.

    Args:
        x: [tokens, K].
        weights: [adapters, N, K] or [adapters, 1, N, K].
        output: [tokens, at least N].
        adapters: [tokens], -1 for none.
        scaling: factor.
        add: add to what `output` holds.
    """
    weights = weights.squeeze(1) if weights.dim() == 4 else weights
    _check(x, weights, output, adapters)
    part = output[:, : weights.shape[1]]
    values = scaling * _multiply(x.float(), weights.float(), adapters)
    values = values + part if add else values
    part.copy_(torch.where(adapters[:, None] < 0, part, values.to(part.dtype)))
    return output


def _multiply(x: Tensor, weights: Tensor, adapters: Tensor) -> Tensor:
    """Return each token's product: its matrix gathered for few tokens, else adapter by adapter."""
    if len(x) <= len(weights):
        return (weights[adapters.clamp(min=0)] @ x.unsqueeze(-1)).squeeze(-1)
    products = x @ weights[0].t()
    for index, weight in enumerate(weights[1:], 1):
        products = torch.where(adapters[:, None] == index, x @ weight.t(), products)
    return products


def _check(x: Tensor, weights: Tensor, output: Tensor, adapters: Tensor) -> None:
    tokens, columns = x.shape
    fits = output.shape[0] == tokens == len(adapters) and output.shape[1] >= weights.shape[1]
    if weights.shape[2] != columns or not fits:
        came = (
            f"input {list(x.shape)}, weights {list(weights.shape)}, output {list(output.shape)},"
            f" {len(adapters)} indices of adapters"
        )
        expected = "[tokens, K], [adapters, N, K], [tokens, N or more] and [tokens]"
        raise ArgumentError(expected, came, "Check the shapes.")
    if torch.compiler.is_compiling() or not tokens:
        return
    last = int(adapters.max())
    if last >= len(weights):
        advice = "Pass -1 for tokens without an adapter."
        raise ArgumentError(f"adapters below {len(weights)}", f"adapter {last}", advice)


SHARED = "output_tensor b_seq_start_loc seq_len_tensor lora_indices_tensor batches max_seq_length"


def _of_texts(product: Callable[..., Tensor], weights: str, rest: str) -> Callable[..., Tensor]:
    """Return `product`, which takes an adapter for each token, as one with an adapter a text.

    Args:
        product: one of the functions above.
        weights: name of the argument of weights.
        rest: names of further arguments of `product`.
    """
    names = ("inputs", weights, *SHARED.split(), *rest.split())
    kind = Parameter.POSITIONAL_OR_KEYWORD
    defaults = {"add_inputs": False}
    signature = Signature(
        [Parameter(n, kind, default=defaults.get(n, Parameter.empty)) for n in names]
    )

    def multiply(*args: Any, **words: Any) -> Tensor:
        call = signature.bind(*args, **words)
        call.apply_defaults()
        given = call.arguments
        lengths = given["seq_len_tensor"].long()
        adapters = given["lora_indices_tensor"].long().repeat_interleave(lengths)
        further = {name: given[name] for name in rest.split()}
        return product(given["inputs"], given[weights], given["output_tensor"], adapters, **further)

    vars(multiply)["__signature__"] = signature
    multiply.__doc__ = (
        f"Call `{product.__name__}` with the adapter of each text.\n\n"
        "Texts follow one another, `seq_len_tensor` tokens each. `b_seq_start_loc`, `batches` and\n"
        "`max_seq_length` are accepted: they follow from it."
    )
    return multiply


sgmv_shrink = _of_texts(bgmv_shrink, "lora_a_weights", "scaling")
sgmv_expand = _of_texts(bgmv_expand, "lora_b_weights", "add_inputs")
sgmv_expand_slice = _of_texts(
    bgmv_expand_slice, "lora_b_weights", "slice_offset slice_size add_inputs"
)
