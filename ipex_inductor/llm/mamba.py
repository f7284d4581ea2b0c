"""Convolutions and state spaces of Mamba and Jamba, with the arguments of mamba-ssm."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.errors import ArgumentError

ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor | None]:
    """Convolve each channel over the tokens before it, and activate.

    Args:
        x: [batch, channels, tokens].
        weight: [channels, taps]; the last tap is the token's own.
        bias: [channels] or None.
        initial_states: [batch, channels, taps - 1], the tokens before the first; zeros if None.
        return_final_states: return the tokens that a next call begins with.
        final_states_out: receives them.
        activation: "silu" or "swish", None for none.

    Returns:
        The result, shaped as `x`, and [batch, channels, taps - 1] or None.

    Raises:
        ArgumentError: for another activation, or shapes that do not go together.
    """
    _check_convolution(x, weight, activation)
    past = weight.shape[1] - 1
    if initial_states is None:
        joined = F.pad(x, (past, 0))
    else:
        _check_shape("initial_states", initial_states, (*x.shape[:2], past))
        joined = torch.cat((initial_states.to(x.dtype), x), -1)
    out = _convolve(joined, weight, bias, activation)
    if not return_final_states:
        return out, None
    final = joined[..., joined.shape[-1] - past :]
    return out, final.clone() if final_states_out is None else final_states_out.copy_(final)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """Convolve new tokens behind those of `conv_state`, and write them into it.

    Args:
        x: [batch, channels] or [batch, channels, tokens].
        conv_state: [batch, channels, length], at least taps - 1 long.
        weight: [channels, taps].
        bias: [channels] or None.
        activation: "silu" or "swish", None for none.
        cache_seqlens: [batch], tokens so far: `conv_state` is then a ring, and the next token is
            written at this number modulo its length. None: the last tokens are at its end.

    Returns:
        The result, shaped as `x`.

    Raises:
        ArgumentError: for another activation, or shapes that do not go together.
    """
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    _check_convolution(tokens, weight, activation)
    past, length = weight.shape[1] - 1, conv_state.shape[-1]
    if length < past:
        came = f"conv_state of {length} tokens"
        raise ArgumentError(f"at least {past} tokens", came, "Keep a longer conv_state.")
    _check_shape("conv_state", conv_state, (*tokens.shape[:2], length))
    if cache_seqlens is None:
        joined = torch.cat((conv_state.to(x.dtype), tokens), -1)
        conv_state.copy_(joined[..., joined.shape[-1] - length :])
        joined = joined[..., length - past :]
    else:
        joined = _write_ring(conv_state, tokens, past, cache_seqlens.long())
    out = _convolve(joined, weight, bias, activation)
    return out.squeeze(-1) if x.dim() == 2 else out


def _write_ring(state: Tensor, tokens: Tensor, past: int, lengths: Tensor) -> Tensor:
    """Write `tokens` into a ring, and return them behind the `past` tokens before them."""
    count, ring = tokens.shape[-1], state.shape[-1]
    steps = torch.arange(-past, count, device=state.device)
    places = ((lengths[:, None] + steps) % ring)[:, None].expand(-1, state.shape[1], -1)
    before = state.gather(2, places[..., :past]).to(tokens.dtype)
    newest = min(count, ring)
    values = tokens[..., count - newest :].to(state.dtype)
    state.scatter_(2, places[..., past + count - newest :], values)
    return torch.cat((before, tokens), -1)


def _convolve(
    joined: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    kernel = weight.to(joined.dtype).unsqueeze(1)
    shift = None if bias is None else bias.to(joined.dtype)
    out = F.conv1d(joined, kernel, shift, groups=weight.shape[0])
    return out if activation is None else F.silu(out)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """Advance the state of a state space by one token, in place, and return its output.

    `state` becomes exp(dt A) state + dt B x, and the result is C state + D x, times silu(z).

    Args:
        state: [batch, width, states] or [batch, heads, width, states].
        x: [batch, width] or [batch, heads, width].
        dt: as `x`.
        A: [width, states] or [heads, width, states].
        B: [batch, states] or [batch, groups, states]; the heads of a group share it.
        C: as `B`.
        D: [width] or [heads, width], None for no term of x.
        z: as `x`, None for no gate.
        dt_bias: [width] or [heads, width], None for zeros.
        dt_softplus: replace dt by softplus(dt).

    Returns:
        The output, shaped and typed as `x`.

    Raises:
        ArgumentError: for shapes that do not go together.
    """
    _check_shape("state", state, (*x.shape, A.shape[-1]))
    _check_shape("dt", dt, tuple(x.shape))
    step = _step_size(dt, dt_bias, dt_softplus).unsqueeze(-1)
    into, out_of = (_per_head(each, x).float().unsqueeze(-2) for each in (B, C))
    new = torch.exp(step * A.float()) * state.float() + step * into * x.float().unsqueeze(-1)
    state.copy_(new)
    return _finish((new * out_of).sum(-1), x, D, z)


def _per_head(matrix: Tensor, x: Tensor) -> Tensor:
    """Return a matrix of groups, [batch, groups, states], repeated for each head of `x`."""
    if x.dim() == 2:
        return matrix
    return matrix.repeat_interleave(x.shape[1] // matrix.shape[1], 1)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Run a state space over all tokens: y = C h + D u, with h = exp(delta A) h + delta B u.

    Args:
        u: [batch, width, tokens].
        delta: as `u`.
        A: [width, states].
        B: [width, states], the same for all tokens, [batch, states, tokens], or
            [batch, groups, states, tokens].
        C: as `B`.
        D: [width], None for no term of u.
        z: as `u`: the result is multiplied by silu(z). None for no gate.
        delta_bias: [width], None for zeros.
        delta_softplus: replace delta by softplus(delta).
        return_last_state: return the state behind the last token too.

    Returns:
        y, shaped and typed as `u`, or the tuple (y, last state [batch, width, states]).

    Raises:
        ArgumentError: for shapes that do not go together.
    """
    _check_shape("delta", delta, tuple(u.shape))
    _check_shape("A", A, (u.shape[1], A.shape[-1]))
    bias = None if delta_bias is None else delta_bias.unsqueeze(-1)
    step = _step_size(delta, bias, delta_softplus)
    into, out_of = (_per_token(name, each, u) for name, each in (("B", B), ("C", C)))
    decay = torch.exp(step.unsqueeze(-1) * A.float()[:, None])
    drive = (step * u.float()).unsqueeze(-1) * into
    state = torch.zeros_like(drive[:, :, 0])
    outputs = []
    for token in range(u.shape[-1]):
        state = decay[:, :, token] * state + drive[:, :, token]
        outputs.append((state * out_of[:, :, token]).sum(-1))
    skip = None if D is None else D.unsqueeze(-1)
    out = _finish(torch.stack(outputs, -1), u, skip, z)
    return (out, state) if return_last_state else out


def _per_token(name: str, matrix: Tensor, u: Tensor) -> Tensor:
    """Return a matrix of any form as [batch or 1, width, tokens, states], in fp32."""
    if matrix.dim() == 2:
        _check_shape(name, matrix, (u.shape[1], matrix.shape[1]))
        return matrix.float()[None, :, None].expand(-1, -1, u.shape[2], -1)
    grouped = matrix.unsqueeze(1) if matrix.dim() == 3 else matrix
    _check_shape(name, grouped, (u.shape[0], *grouped.shape[1:3], u.shape[2]))
    return grouped.float().repeat_interleave(u.shape[1] // grouped.shape[1], 1).transpose(2, 3)


def _step_size(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    step = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(step) if softplus else step


def _finish(out: Tensor, x: Tensor, skip: Tensor | None, z: Tensor | None) -> Tensor:
    """Return out + skip * x, times silu(z), in the dtype of `x`."""
    if skip is not None:
        out = out + skip.float() * x.float()
    return (out if z is None else out * F.silu(z.float())).to(x.dtype)


def _check_convolution(x: Tensor, weight: Tensor, activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"an activation of {ACTIVATIONS}", repr(activation), "Pass one.")
    _check_shape("weight", weight, (x.shape[1], weight.shape[-1]))


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        came = f"{list(tensor.shape)}"
        raise ArgumentError(f"{name} of shape {list(shape)}", came, "Check the other arguments.")
