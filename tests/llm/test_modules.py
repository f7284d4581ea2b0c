"""`ipex.llm.modules`, `functional` and `generation`: values by their formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.errors import ArgumentError
from ipex_inductor.llm import functional, generation, modules

pytestmark = pytest.mark.unit


@pytest.fixture
def x():
    return torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 8).double()


def sigmoid(x):
    return 1 / (1 + (-x).exp())


FORMULAS = {
    "LinearSilu": lambda h: h * sigmoid(h),
    "LinearRelu": lambda h: h.clamp(min=0),
    "LinearGelu": lambda h: h * (1 + torch.erf(h / math.sqrt(2))) / 2,
    "LinearNewGelu": lambda h: (
        h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
    ),
    "LinearSiluMul": lambda h, y: h * sigmoid(h) * y,
    "LinearMul": lambda h, y: h * y,
    "LinearAdd": lambda h, y: h + y,
    "LinearAddAdd": lambda h, y, z: h + y + z,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_linear_layers(name, x, linear):
    formula = FORMULAS[name]
    others = [x + 1, x * 2][: formula.__code__.co_argcount - 1]
    h = x @ linear.weight.T + linear.bias
    torch.testing.assert_close(getattr(modules, name)(linear)(x, *others), formula(h, *others))


def test_a_gate_of_two_linear_layers(x, linear):
    up = nn.Linear(8, 8).double()
    gate = x @ linear.weight.T + linear.bias
    expected = gate * sigmoid(gate) * up(x)
    torch.testing.assert_close(modules.Linear2SiluMul(linear, up)(x), expected)


def test_norms(x):
    x, weight, bias = x.float(), torch.rand(8), torch.rand(8)
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(functional.rms_norm(x, weight, 1e-5), rms)
    torch.testing.assert_close(modules.RMSNorm(8, 1e-5, weight)(x), rms)
    torch.testing.assert_close(modules.RMSNorm.apply_function(x, weight, 1e-5), rms)
    assert modules.RMSNorm(8).weight.tolist() == [1] * 8
    low = functional.rms_norm(x.bfloat16(), weight, 1e-5)
    assert low.dtype is torch.bfloat16
    centered = x - x.mean(-1, keepdim=True)
    norm = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(functional.fast_layer_norm(x, (8,), weight, bias, 1e-5), norm)
    torch.testing.assert_close(modules.FastLayerNorm((8,), 1e-5, weight, bias)(x), norm)
    own = modules.FastLayerNorm.apply_function(x, (8,), weight, bias, 1e-5)
    torch.testing.assert_close(own, norm)


@pytest.mark.parametrize("add_back", [False, True])
def test_norms_of_sums(x, add_back):
    x, weight, bias = x.float(), torch.rand(8), torch.rand(8)
    for name in ("add_rms_norm", "add_layer_norm"):
        residual = torch.rand(3, 5, 8)
        before, total = residual.clone(), residual + x
        result = getattr(functional, name)(residual, x, weight, bias, 1e-5, add_back)
        alone = getattr(functional, name)(None, total, weight, bias, 1e-5, add_back)
        torch.testing.assert_close(result, alone)
        torch.testing.assert_close(residual, total if add_back else before)
    expected = functional.rms_norm(total, weight, 1e-5) + bias
    torch.testing.assert_close(functional.add_rms_norm(None, total, weight, bias, 1e-5), expected)


def test_products_of_activations(x):
    out = torch.empty_like(x)
    assert functional.silu_mul(x, x + 1, out) is out
    torch.testing.assert_close(out, x * sigmoid(x) * (x + 1))
    torch.testing.assert_close(functional.gelu_mul(x, x + 1), FORMULAS["LinearGelu"](x) * (x + 1))
    tanh = FORMULAS["LinearNewGelu"](x) * (x + 1)
    torch.testing.assert_close(functional.gelu_mul(x, x + 1, approximate="tanh"), tanh)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("per_pair", [False, True])
def test_rotary_embedding(half, per_pair):
    """A pair (a, b) turns by its angle: a complex product."""
    angles = torch.rand(7, 3)
    tables = angles if per_pair else angles.repeat(1, 2) if half else angles.repeat_interleave(2, 1)
    query, key, positions = (
        torch.rand(2, 4, 3, 8),
        torch.rand(2, 4, 1, 8),
        torch.tensor([3, 0, 6, 2]),
    )
    expected = []
    for states in (query, key):
        head = states[..., :6]
        pair = head.unflatten(-1, (2, 3)).mT if half else head.unflatten(-1, (3, 2))
        turned = torch.view_as_complex(pair.contiguous()) * torch.polar(
            torch.ones(4, 3), angles[positions]
        ).unsqueeze(1)
        parts = torch.view_as_real(turned)
        parts = parts.mT.flatten(-2) if half else parts.flatten(-2)
        expected.append(torch.cat((parts, states[..., 6:]), -1))
    result = functional.rotary_embedding(query, key, tables.sin(), tables.cos(), 6, half, positions)
    assert result[0] is query
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def attend(q, k, v, **words):
    """Attend over several texts, given as lists of [tokens, heads, width]."""
    ends = [torch.tensor([0, *(len(t) for t in texts)]).cumsum(0) for texts in (q, k)]
    out = torch.empty(sum(map(len, q)), *q[0].shape[1:])
    arguments = {"alibi_slopes": None, "is_causal": False, "pdropout": 0.0, **words}
    slopes, causal = arguments.pop("alibi_slopes"), arguments.pop("is_causal")
    dropout = arguments.pop("pdropout")
    cats = map(torch.cat, (q, k, v))
    result = functional.varlen_attention(
        *cats, out, *ends, slopes, 9, 9, dropout, 0.5, False, causal, **arguments
    )
    assert result is out
    return out.split([len(t) for t in q])


class TestVarlenAttention:
    @pytest.fixture
    def texts(self):
        torch.manual_seed(0)
        q = [torch.randn(n, 4, 8) for n in (3, 5)]
        k, v = ([torch.randn(n, 2, 8) for n in (3, 7)] for _ in range(2))
        return q, k, v

    @pytest.mark.parametrize("causal", [False, True])
    def test_each_text_alone(self, texts, causal):
        for ours, q, k, v in zip(attend(*texts, is_causal=causal), *texts, strict=True):
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
            mask = mask.tril(k.shape[1] - q.shape[1]) if causal else mask
            expected = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=0.5, enable_gqa=True
            )
            torch.testing.assert_close(ours, expected.transpose(0, 1))

    def test_queries_that_see_no_key_get_zeros(self):
        """The last query and the last key are aligned, so the first two of five see none."""
        q, (k, v) = torch.randn(5, 4, 8), torch.randn(2, 3, 2, 8)
        (ours,) = attend([q], [k], [v], is_causal=True)
        assert torch.equal(ours[:2], torch.zeros(2, 4, 8))
        (seen,) = attend([q[2:]], [k], [v], is_causal=True)
        torch.testing.assert_close(ours[2:], seen)

    def test_alibi_windows_and_caps(self, texts):
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
        q, k, v = ([texts[0][0]], [texts[1][0]], [texts[2][0]])
        (ours,) = attend(q, k, v, alibi_slopes=slopes, window_size_left=1, softcap=2.0)
        scores = torch.einsum("qhd,khd->hqk", q[0], k[0].repeat_interleave(2, 1)) * 0.5
        scores = 2 * torch.tanh(scores / 2)
        distance = torch.arange(3)[None] - torch.arange(3)[:, None]
        scores = scores - slopes[:, None, None] * distance.abs()
        weights = scores.masked_fill(distance < -1, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v[0].repeat_interleave(2, 1))
        torch.testing.assert_close(ours, expected)

    def test_dropout_raises(self, texts):
        with pytest.raises(ArgumentError, match=r"pdropout=0[.]1"):
            attend(*texts, pdropout=0.1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf_greedy_search", {"do_sample": False, "num_beams": 1}),
        ("hf_sample", {"do_sample": True, "num_beams": 1}),
        ("hf_beam_search", {"do_sample": False, "num_beams": 4}),
        ("hf_beam_sample", {"do_sample": True, "num_beams": 4}),
    ],
)
def test_search_loops_call_generate(name, words):
    class Model:
        def generate(self, tokens, **given):
            return tokens, given

    setattr(Model, name, getattr(generation, name))
    tokens = torch.ones(1, 2)
    assert getattr(Model(), name)(tokens, top_k=3) == (tokens, {**words, "top_k": 3})
