"""`llm.modules.MambaMixer`: values by plain loops over tokens."""

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor.errors import ArgumentError
from ipex_inductor.llm.modules import MambaMixer

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def convolve(sequence, weight, bias):
    """Return the result at each token of [channels, tokens], summed tap by tap."""
    taps = weight.shape[1]
    padded = F.pad(sequence, (taps - 1, 0))
    columns = [(padded[:, i : i + taps] * weight).sum(1) + bias for i in range(sequence.shape[1])]
    return torch.stack(columns, -1)


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_a_convolution_over_all_tokens(activation):
    x, weight, bias = torch.randn(2, 3, 7), torch.randn(3, 4), torch.randn(3)
    expected = torch.stack([convolve(each, weight, bias) for each in x])
    expected = expected if activation is None else F.silu(expected)
    out, final = MambaMixer.causal_conv1d_fn(x, weight, bias, activation=activation)
    torch.testing.assert_close(out, expected)
    assert final is None


def test_a_convolution_in_two_parts():
    x, weight, bias = torch.randn(2, 3, 7), torch.randn(3, 4), torch.randn(3)
    whole, _ = MambaMixer.causal_conv1d_fn(x, weight, bias)
    first, state = MambaMixer.causal_conv1d_fn(x[..., :2], weight, bias, return_final_states=True)
    assert torch.equal(state, F.pad(x[..., :2], (1, 0)))
    buffer = torch.empty(2, 3, 3)
    rest, final = MambaMixer.causal_conv1d_fn(x[..., 2:], weight, bias, state, True, buffer)
    torch.testing.assert_close(torch.cat((first, rest), -1), whole)
    assert final is buffer
    assert torch.equal(buffer, x[..., 4:])


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("length", [3, 5])
@pytest.mark.parametrize("step", [1, 2, 7])
def test_a_convolution_token_by_token(ring, length, step):
    """A state at the end, or a ring, longer than the taps or as long; more tokens than it too."""
    x, weight, bias = torch.randn(2, 3, 14), torch.randn(3, 4), torch.randn(3)
    whole, _ = MambaMixer.causal_conv1d_fn(x, weight, bias, activation="silu")
    state, parts = torch.zeros(2, 3, length), []
    for first in range(0, 14, step):
        tokens = x[..., first] if step == 1 else x[..., first : first + step]
        lengths = torch.full((2,), first, dtype=torch.int32) if ring else None
        part = MambaMixer.causal_conv1d_update(tokens, state, weight, bias, "silu", lengths)
        parts.append(part.view(2, 3, -1))
    torch.testing.assert_close(torch.cat(parts, -1), whole)
    last = [13 - (13 - place) % length for place in range(length)]
    order = last if ring else range(14 - length, 14)
    assert torch.equal(state, x[..., list(order)])


def scan(u, delta, A, B, C, D):
    """Return outputs and the last state of one text, [width, tokens], token by token in fp64."""
    state, outputs = torch.zeros(A.shape, dtype=torch.float64), []
    for token in range(u.shape[1]):
        step = delta[:, token, None].double()
        decay = torch.exp(step * A.double())
        state = decay * state + step * B(token).double() * u[:, token, None].double()
        outputs.append((state * C(token).double()).sum(1) + D.double() * u[:, token].double())
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("form", ["constant", "tokens", "groups"])
def test_a_scan(form):
    u, z, raw = (torch.randn(2, 6, 5) for _ in range(3))
    A, D, bias = -torch.rand(6, 4), torch.randn(6), torch.randn(6)
    shapes = {"constant": (6, 4), "tokens": (2, 4, 5), "groups": (2, 3, 4, 5)}
    B, C = (torch.randn(shapes[form]) for _ in range(2))
    y, state = MambaMixer.selective_scan_fn(u, raw, A, B, C, D, z, bias, True, True)
    alone = MambaMixer.selective_scan_fn(u, raw, A, B, C, D, z, bias, True)
    assert torch.equal(alone, y)

    def of_token(matrix, text):
        if form == "constant":
            return lambda token: matrix
        if form == "tokens":
            return lambda token: matrix[text, :, token]
        return lambda token: matrix[text, :, :, token].repeat_interleave(2, 0)

    for text in range(2):
        delta = F.softplus(raw[text] + bias[:, None])
        expected, last = scan(u[text], delta, A, of_token(B, text), of_token(C, text), D)
        expected = expected * F.silu(z[text].double())
        torch.testing.assert_close(y[text].double(), expected, rtol=1e-5, atol=1e-5)  # fp32 sums
        torch.testing.assert_close(state[text].double(), last, rtol=1e-5, atol=1e-5)


def test_a_state_is_updated_as_the_scan_does():
    u, delta, z = (torch.randn(2, 6, 5) for _ in range(3))
    A, D, bias = -torch.rand(6, 4), torch.randn(6), torch.randn(6)
    B, C = (torch.randn(2, 4, 5) for _ in range(2))
    expected, last = MambaMixer.selective_scan_fn(u, delta, A, B, C, D, z, bias, True, True)
    state = torch.zeros(2, 6, 4)
    for token in range(5):
        tensors = (each[..., token] for each in (u, delta))
        matrices = (each[..., token] for each in (B, C))
        out = MambaMixer.selective_state_update(
            state, *tensors, A, *matrices, D, z[..., token], bias, True
        )
        torch.testing.assert_close(out, expected[..., token])
    torch.testing.assert_close(state, last)


def test_a_state_of_heads():
    """Heads of a group share B and C; each head is a state of its own."""
    state, x, dt = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3), torch.rand(2, 4, 3)
    A, B, C = -torch.rand(4, 3, 5), torch.randn(2, 2, 5), torch.randn(2, 2, 5)
    expected_state = state.clone()
    parts = [
        MambaMixer.selective_state_update(
            expected_state[:, h], x[:, h], dt[:, h], A[h], B[:, h // 2], C[:, h // 2]
        )
        for h in range(4)
    ]
    out = MambaMixer.selective_state_update(state, x, dt, A, B, C)
    torch.testing.assert_close(out, torch.stack(parts, 1))
    torch.testing.assert_close(state, expected_state)


def test_low_precision_keeps_its_dtype_and_computes_in_fp32():
    x, dt = torch.randn(2, 6), torch.rand(2, 6)
    A, B, C = -torch.rand(6, 4), torch.randn(2, 4), torch.randn(2, 4)
    state = torch.zeros(2, 6, 4)
    low = MambaMixer.selective_state_update(state, x.bfloat16(), dt, A, B, C)
    assert low.dtype is torch.bfloat16
    exact = MambaMixer.selective_state_update(
        torch.zeros(2, 6, 4), x.bfloat16().float(), dt, A, B, C
    )
    assert torch.equal(low, exact.bfloat16())


def test_they_compile():
    x, weight = torch.randn(2, 3, 5), torch.randn(3, 4)
    compiled = torch.compile(MambaMixer.causal_conv1d_fn, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, weight)[0], MambaMixer.causal_conv1d_fn(x, weight)[0])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x, w: MambaMixer.causal_conv1d_fn(x, w, activation="relu"), "'relu'"),
        (lambda x, w: MambaMixer.causal_conv1d_fn(x, w.t()), r"weight of shape \[3, 3\]"),
        (lambda x, w: MambaMixer.causal_conv1d_update(x, x[..., :2], w), "at least 3 tokens"),
        (lambda x, w: MambaMixer.causal_conv1d_fn(x, w, initial_states=x), "initial_states"),
        (lambda x, w: MambaMixer.selective_scan_fn(x, x[:1], w, w, w), "delta of shape"),
        (lambda x, w: MambaMixer.selective_scan_fn(x, x, w.t(), w, w), "A of shape"),
        (lambda x, w: MambaMixer.selective_state_update(x, x[..., 0], x, w, w, w), "state of"),
    ],
)
def test_wrong_arguments_raise(call, error):
    with pytest.raises(ArgumentError, match=error):
        call(torch.randn(2, 3, 7), torch.randn(3, 4))
