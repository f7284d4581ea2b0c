"""Beams that exchange rows of a table: results as eager, no copied keys, and other attention."""

import pytest
import torch

from ipex_inductor.llm import beam_table, caches, optimize
from ipex_inductor.llm.beam_table import BeamTable
from ipex_inductor.ops.attention.decode_attention import gather_rows
from support.llm_families import FAMILIES, left_padded, prompt

pytestmark = pytest.mark.usefixtures("traced_only")
NEW = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}


@pytest.fixture
def llama():
    return FAMILIES["llama"].build()


@pytest.fixture
def copies(monkeypatch):
    """Return a list with an entry for each layer whose keys are copied for a reordering."""
    calls, copy_rows = [], caches.PooledLayer.copy_rows

    def count(layer, *args):
        calls.append(args)
        return copy_rows(layer, *args)

    monkeypatch.setattr(caches.PooledLayer, "copy_rows", count)
    return calls


def test_rows_are_exchanged_and_forgotten():
    states = torch.randn(4, 2, 6, 3)
    expected = states.clone()
    table = BeamTable(4, 6, torch.device("cpu"))
    for texts, last in (([1, 1, 2, 0], 3), ([3, 0, 0, 2], 5)):
        table.exchange(torch.tensor(texts), 0, last)
        expected[:, :, :last] = expected[texts][:, :, :last]
        assert torch.equal(gather_rows(states, table.rows), expected)
    table.forget(2)
    expected[:, :, 2:] = states[:, :, 2:]
    assert torch.equal(gather_rows(states, table.rows), expected)
    table.share(2, 6)
    assert table.rows[:, 2:].tolist() == [[0] * 4, [0] * 4, [2] * 4, [2] * 4]


@pytest.mark.sampled("{'num_beams': 3, 'num_return_sequences': 2}")
@pytest.mark.parametrize(
    "words", [{"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 2}], ids=str
)
def test_beams_give_the_models_texts_and_copy_no_keys(llama, copies, words):
    optimized = optimize(llama)
    for inputs in ({"input_ids": prompt(1, 20)}, left_padded(3, 12)):
        theirs = llama.generate(**inputs, **NEW, **words)
        assert torch.equal(optimized.generate(**inputs, **NEW, **words), theirs)
    assert not copies
    assert len(optimized.forward.steps) == 4  # a prompt and a token of each batch
    tokens = prompt(4, 20)  # a batch without beams takes the cache of four beams
    assert torch.equal(optimized.generate(tokens, **NEW), llama.generate(tokens, **NEW))


def test_a_cache_that_the_caller_keeps_has_each_beams_keys(llama):
    optimized, tokens = optimize(llama), prompt(1, 20)
    words = {"num_beams": 4, "return_dict_in_generate": True, **NEW}
    ours, theirs = optimized.generate(tokens, **words), llama.generate(tokens, **words)
    assert torch.equal(ours.sequences, theirs.sequences)
    cache, truth = ours.past_key_values, theirs.past_key_values
    assert cache.table is None
    for layer, true_layer in zip(cache.layers, truth.layers, strict=True):
        length = true_layer.keys.shape[2]
        torch.testing.assert_close(layer.keys[:, :, :length], true_layer.keys)


def test_other_attention_copies_keys(copies):
    """Its keys would be gathered whole at each token."""
    model = FAMILIES["llama"].build()
    model.set_attn_implementation("eager")
    optimized, tokens = optimize(model), prompt(1, 20)
    assert torch.equal(
        optimized.generate(tokens, num_beams=4, **NEW), model.generate(tokens, num_beams=4, **NEW)
    )
    assert copies


def test_a_table_is_for_beams_that_our_attention_reads(llama, monkeypatch):
    cache = caches.new_cache(llama.config, 256, 4, None)
    assert not beam_table.is_useful(llama.config, cache)  # it is not allocated
    layout = caches.LayerLayout(2, 16, 16, torch.float32, torch.float32, torch.device("cpu"))
    cache.allocate(4, (layout,) * len(cache.layers))
    monkeypatch.setattr(beam_table, "architecture", lambda: "x86-64:avx2")
    assert beam_table.is_useful(llama.config, cache)
    monkeypatch.setattr(beam_table, "architecture", lambda: "x86-64")
    assert not beam_table.is_useful(llama.config, cache)
