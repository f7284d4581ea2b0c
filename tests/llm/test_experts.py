"""`llm.modules.GatedMLPMOE`: values by a loop over tokens, and routes by the models' own code."""

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor.errors import ArgumentError
from ipex_inductor.llm.modules import GatedMLPMOE

pytestmark = pytest.mark.unit

TOKENS, EXPERTS, WIDTH, INNER = 7, 8, 16, 24


@pytest.fixture
def parts():
    torch.manual_seed(0)
    w1, w3 = (torch.randn(EXPERTS, INNER, WIDTH) for _ in range(2))
    w2 = torch.randn(EXPERTS, WIDTH, INNER)
    return torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, EXPERTS), w1, w2, w3


def add_up(x, w1, w2, w3, weights, chosen):
    """Return each token's sum, expert by expert."""

    def run(expert, row):
        return w2[expert] @ (F.silu(w1[expert] @ row) * (w3[expert] @ row))

    pairs = [zip(*pair, strict=True) for pair in zip(weights, chosen, strict=True)]
    return torch.stack(
        [sum(f * run(e, row) for f, e in pair) for row, pair in zip(x, pairs, strict=True)]
    )


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_best_experts(parts, joined, renormalize):
    x, logits, w1, w2, w3 = parts
    weights, chosen = logits.softmax(-1).topk(2)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    experts = GatedMLPMOE(torch.cat((w1, w3), 1), w2) if joined else GatedMLPMOE(w1, w2, w3)
    ours = experts(x, False, 2, logits, renormalize)
    expected = add_up(x, w1, w2, w3, weights, chosen)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)  # fp32, other order of sums
    batched = experts(x[None], False, 2, logits[None], renormalize)
    assert torch.equal(batched[0], ours)


def test_groups_pick_as_deepseek_v2_does(parts):
    """Groups by their best expert: two of four groups, then three experts inside of them."""
    x, logits, w1, w2, w3 = parts
    scores = logits.softmax(-1)
    best = scores.view(TOKENS, 4, 2).amax(-1).topk(2).indices
    seen = torch.zeros(TOKENS, 4).scatter_(1, best, 1).repeat_interleave(2, 1)
    weights, chosen = (scores * seen).topk(3)
    ours = GatedMLPMOE(w1, w2, w3)(x, True, 3, logits, False, topk_group=2, num_expert_group=4)
    expected = add_up(x, w1, w2, w3, weights, chosen)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_corrected_choice_is_deepseek_v3s(parts):
    """Scores of the model of transformers, with its router's bias and groups."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    x, logits, *_ = parts
    config = DeepseekV3Config(
        n_routed_experts=EXPERTS,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        routed_scaling_factor=1.0,
        hidden_size=WIDTH,
        moe_intermediate_size=INNER,
        norm_topk_prob=True,
    )
    theirs = DeepseekV3MoE(config).eval()
    bias = torch.randn(EXPERTS)
    theirs.gate.e_score_correction_bias.copy_(bias)
    for param in theirs.parameters():
        torch.nn.init.normal_(param, std=0.2)
    logits = F.linear(x, theirs.gate.weight)
    own = theirs.experts
    with torch.no_grad():
        expected = theirs(x[None])[0] - theirs.shared_experts(x[None])[0]
        ours = GatedMLPMOE(own.gate_up_proj, own.down_proj)(
            x, True, 3, logits, True, 2, 4, None, "sigmoid", bias
        )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_routing_function_of_the_caller(parts):
    x, logits, w1, w2, w3 = parts
    seen = []

    def route(hidden, scores, top_k, renormalize):
        seen.append((hidden, scores, top_k, renormalize))
        return torch.ones(TOKENS, 1), torch.full((TOKENS, 1), 5)

    ours = GatedMLPMOE(w1, w2, w3)(x, False, 2, logits, True, custom_routing_function=route)
    expected = add_up(x, w1, w2, w3, torch.ones(TOKENS, 1), torch.full((TOKENS, 1), 5))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert seen[0][2:] == (2, True)


def test_bf16_sums_experts_in_fp32(parts):
    x, logits, w1, w2, w3 = (each.bfloat16() for each in parts)
    ours = GatedMLPMOE(w1, w2, w3)(x, False, 2, logits, True)
    assert ours.dtype is torch.bfloat16
    weights, chosen = logits.float().softmax(-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    exact = add_up(*(t.double() for t in (x, w1, w2, w3, weights)), chosen)
    error = (ours.double() - exact).square().mean().sqrt()
    assert error <= 0.02 * exact.square().mean().sqrt()  # three roundings to 2**-9, and sums


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"scoring_func": "relu"}, "scoring_func='relu'"),
        ({"use_grouped_topk": True}, "num_expert_group=None"),
        ({"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 1}, "divides 8"),
    ],
)
def test_routings_that_cannot_be_met_raise(parts, words, error):
    x, logits, w1, w2, w3 = parts
    given = {"use_grouped_topk": False, "top_k": 2, "renormalize": True, **words}
    with pytest.raises(ArgumentError, match=error):
        GatedMLPMOE(w1, w2, w3)(x, router_logits=logits, **given)


def test_weights_that_do_not_go_together_raise(parts):
    _, _, w1, w2, w3 = parts
    with pytest.raises(ArgumentError, match=r"W13 \[8, 24, 16\], W2 \[8, 16, 24\]\."):
        GatedMLPMOE(w1, w2)
    with pytest.raises(ArgumentError, match="W3"):
        GatedMLPMOE(w1, w2, w3[:4])
