"""Products with low-rank adapters: values token by token."""

import pytest
import torch

from ipex_inductor.errors import ArgumentError
from ipex_inductor.llm import functional

pytestmark = pytest.mark.unit

ADAPTERS = torch.tensor([2, -1, 0, 2, 1])


@pytest.fixture(params=[False, True], ids=["3d", "4d"])
def weights(request):
    """Three adapters of [4, 6], also with the dimension of one that engines have."""
    torch.manual_seed(0)
    made = torch.randn(3, 4, 6)
    return made.unsqueeze(1) if request.param else made


def products(x, weights, adapters):
    """Return weight @ row for each token, zeros without an adapter."""
    matrices = weights.view(3, 4, 6)
    pairs = zip(adapters, x, strict=True)
    return torch.stack([torch.zeros(4) if a < 0 else matrices[a] @ row for a, row in pairs])


@pytest.mark.parametrize("tokens", [2, 5], ids=["gathered", "adapter by adapter"])
def test_an_adapter_for_each_token(weights, tokens):
    x, adapters = torch.randn(tokens, 6), ADAPTERS[:tokens]
    has_one = adapters[:, None] >= 0
    expected = products(x, weights, adapters)
    before = torch.randn(tokens, 9)
    for call, rest, result in (
        (functional.bgmv_shrink, (0.5,), 0.5 * expected),
        (functional.bgmv_expand, (False,), expected),
        (functional.bgmv_expand, (True,), expected + before[:, :4]),
    ):
        out = before.clone()
        assert call(x, weights, out, adapters, *rest) is out
        torch.testing.assert_close(out[:, :4], torch.where(has_one, result, before[:, :4]))
        assert torch.equal(out[:, 4:], before[:, 4:])


@pytest.mark.parametrize("add", [False, True])
def test_a_slice_of_columns(weights, add):
    x, before = torch.randn(5, 6), torch.randn(5, 9)
    out = before.clone()
    functional.bgmv_expand_slice(x, weights, out, ADAPTERS, 3, 4, add)
    expected = before.clone()
    functional.bgmv_expand(x, weights, expected[:, 3:], ADAPTERS, add)
    assert torch.equal(out, expected)


def test_an_adapter_for_each_text(weights):
    x, lengths, adapters = torch.randn(6, 6), torch.tensor([1, 3, 2]), torch.tensor([1, -1, 2])
    tokens = torch.tensor([1, -1, -1, -1, 2, 2])
    texts = (torch.tensor([0, 1, 4]), lengths, adapters, 3, 3)
    for name, rest in (
        ("shrink", (0.5,)),
        ("expand", (True,)),
        ("expand_slice", (3, 4, True)),
    ):
        ours, theirs = torch.ones(6, 9), torch.ones(6, 9)
        getattr(functional, f"sgmv_{name}")(x, weights, ours, *texts, *rest)
        getattr(functional, f"bgmv_{name}")(x, weights, theirs, tokens, *rest)
        assert torch.equal(ours, theirs)


def test_names_of_arguments(weights):
    x, out = torch.randn(2, 6), torch.zeros(2, 4)
    words = {"b_seq_start_loc": None, "seq_len_tensor": torch.tensor([2]), "batches": 1}
    functional.sgmv_expand(
        inputs=x,
        lora_b_weights=weights,
        output_tensor=out,
        lora_indices_tensor=torch.tensor([0]),
        max_seq_length=2,
        **words,
    )
    torch.testing.assert_close(out, products(x, weights, [0, 0]))
    with pytest.raises(TypeError, match="scaling"):
        functional.sgmv_shrink(x, weights, out, None, torch.tensor([2]), torch.tensor([0]), 1, 2)


def test_low_precision_is_summed_in_fp32():
    x, weights = torch.randn(5, 64).bfloat16(), torch.randn(3, 4, 64).bfloat16()
    out = torch.zeros(5, 4)
    functional.bgmv_shrink(x, weights, out, ADAPTERS, 1.0)
    torch.testing.assert_close(out[0], (weights[2].double() @ x[0].double()).float())


def test_wrong_arguments_raise(weights):
    x, out = torch.randn(5, 6), torch.zeros(5, 4)
    with pytest.raises(ArgumentError, match="adapter 3"):
        functional.bgmv_expand(x, weights, out, ADAPTERS + 1)
    with pytest.raises(ArgumentError, match="4 indices"):
        functional.bgmv_expand(x, weights, out, ADAPTERS[:4])
    with pytest.raises(ArgumentError, match=r"output \[5, 3\]"):
        functional.bgmv_shrink(x, weights, out[:, :3], ADAPTERS, 1.0)
    with pytest.raises(ArgumentError, match="of 3 rows"):
        functional.bgmv_expand_slice(x, weights, out, ADAPTERS, 0, 3)
