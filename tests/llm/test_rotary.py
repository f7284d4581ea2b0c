"""`llm.modules.RotaryEmbedding` and `VarlenAttention`: by the code of transformers' models."""

import pytest
import torch

from ipex_inductor.errors import ArgumentError
from ipex_inductor.llm import functional
from ipex_inductor.llm.modules import RotaryEmbedding, VarlenAttention

pytestmark = pytest.mark.unit

POSITIONS = torch.tensor([[3, 4, 5], [0, 1, 2]])


@pytest.fixture
def heads():
    torch.manual_seed(0)
    return torch.randn(2, 3, 8, 16)  # four heads of the query, two of key and of value


def rotate_as_llama(x, positions, **words):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, **words)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)
    return apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)[0].transpose(1, 2)


def rotate_as_gptj(x, positions, width):
    from transformers.models.gptj.modeling_gptj import (
        apply_rotary_pos_emb,
        create_sinusoidal_positions,
    )

    sin, cos = create_sinusoidal_positions(64, width)[positions].chunk(2, -1)
    turned = apply_rotary_pos_emb(x[..., :width], sin, cos)
    return torch.cat((turned, x[..., width:]), -1)


def test_halves_are_llamas(heads):
    rotary = RotaryEmbedding(64, 16)
    before = heads.clone()
    ours = rotary(heads, POSITIONS, 8, 16, 8, 16)
    assert torch.equal(heads, before)
    torch.testing.assert_close(ours, rotate_as_llama(heads, POSITIONS))
    flat = rotary(heads.flatten(2), POSITIONS, 8, 16, 8, 16, seq_len=3)
    assert torch.equal(flat, ours)


def test_neighbours_are_gptjs(heads):
    ours = RotaryEmbedding(64, 8, backbone="GPTJForCausalLM")(heads, POSITIONS, 8, 16, 1, 8)
    torch.testing.assert_close(ours, rotate_as_gptj(heads, POSITIONS, 8))


def test_one_position_is_that_of_the_first_token(heads):
    rotary = RotaryEmbedding(64, 16)
    first = rotary(heads, torch.tensor([3]), 8, 16, 8, 16)
    assert torch.equal(first, rotary(heads, torch.tensor([3, 4, 5]), 8, 16, 8, 16))


def test_query_key_and_value_in_one_tensor(heads):
    rotary = RotaryEmbedding(64, 16)
    query, key, value = rotary(heads.flatten(2), POSITIONS, 4, 16, 8, 16, num_concats=3)
    turned = rotary(heads, POSITIONS, 8, 16, 8, 16)
    assert torch.equal(torch.cat((query, key), 2), turned[:, :, :6])
    assert torch.equal(value, heads[:, :, 6:])


@pytest.mark.parametrize(
    "extra",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda extra: extra["rope_type"],
)
def test_scaled_frequencies_are_transformers(heads, extra):
    ours = RotaryEmbedding(64, 16, 500.0, None, extra)(heads, POSITIONS, 8, 16, 8, 16)
    words = {"rope_parameters": {**extra, "rope_theta": 500.0}}
    torch.testing.assert_close(ours, rotate_as_llama(heads, POSITIONS, **words))


def test_the_direct_call_writes_into_both(heads):
    rotary = RotaryEmbedding(64, 16)
    query, key = heads[:, :, :4].clone(), heads[:, :, 4:6].clone()
    result = RotaryEmbedding.apply_function(query, key, rotary.sin, rotary.cos, 16, True, POSITIONS)
    assert result[0] is query
    turned = rotary(heads, POSITIONS, 8, 16, 8, 16)
    assert torch.equal(torch.cat((query, key), 2), turned[:, :, :6])


def test_it_compiles_as_one_graph_and_has_no_state_to_save(heads):
    rotary = RotaryEmbedding(64, 16)
    assert not rotary.state_dict()
    compiled = torch.compile(rotary, backend="eager", fullgraph=True)
    arguments = (heads, POSITIONS, 8, 16, 8, 16)
    torch.testing.assert_close(compiled(*arguments), rotary(*arguments))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: RotaryEmbedding(64, 16)(x, POSITIONS, 8, 16, 4, 16), "offset=4"),
        (lambda x: RotaryEmbedding(64, 16)(x, POSITIONS, 8, 16, 1, 8), "rotary_ndims=8"),
        (lambda x: RotaryEmbedding(64, 16)(x, POSITIONS, 4, 16, 8, 16), "num_concats=None for 8"),
        (lambda x: RotaryEmbedding(64, 16)(x.flatten(2), POSITIONS, 4, 15, 8, 16), "heads of 15"),
        (lambda x: RotaryEmbedding(64, 16, 1.0, "", {"rope_type": "yarn"}), "'yarn'"),
        (lambda x: RotaryEmbedding(64, 16, 1.0, "", {"rope_type": "linear"}), "'factor'"),
    ],
)
def test_wrong_arguments_raise(heads, call, error):
    with pytest.raises(ArgumentError, match=error):
        call(heads)


def test_attention_of_texts_in_one_tensor_is_the_function(heads):
    query, key, value = heads.flatten(0, 1).split((4, 2, 2), 1)
    ends, outs = torch.tensor([0, 2, 6]), [torch.empty(6, 4, 16) for _ in range(3)]
    rest = (ends, ends, None, 4, 4, 0.0, 0.25, False, True, False, None, -1, -1, -1.0)
    calls = (VarlenAttention(), VarlenAttention.apply_function, functional.varlen_attention)
    for call, out in zip(calls, outs, strict=True):
        assert call(query, key, value, out, *rest) is out
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[2])
