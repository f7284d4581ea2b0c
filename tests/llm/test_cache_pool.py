"""Static caches of a pool: lengths in buckets, leases, resets, and few compilations."""

import threading

import pytest
import torch
from torch._dynamo.utils import counters

from ipex_inductor.llm import buckets, optimize
from ipex_inductor.llm.cache_pool import KEPT, MOST_IDLE, CachePool
from ipex_inductor.llm.generating import walk_values
from support.llm_families import FAMILIES, left_padded, prompt

NEW = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}


@pytest.fixture
def pair():
    model = FAMILIES["llama"].build()
    return model, optimize(model)


def test_lengths_are_rounded_up():
    assert [buckets.round_ceiling(n) for n in (1, 256, 257, 1024, 1025)] == [
        *(256, 256, 512),
        *(1024, 2048),
    ]
    assert [buckets.round_chunk(n) for n in (1, 2, 16, 17, 256)] == [1, 16, 16, 32, 256]
    assert buckets.split_into_chunks(600) == [(0, 256), (256, 256), (512, 88)]


def test_a_padded_prompt_fits_its_cache():
    for length in range(1, 2200):
        first, rest = buckets.split_into_chunks(length)[-1]
        assert first + buckets.round_chunk(rest) <= buckets.round_ceiling(length + 1)


class Cache:
    def __init__(self):
        self.resets = 0

    def reset(self):
        self.resets += 1


class TestPool:
    def test_a_cache_returns_and_is_reset(self):
        pool = CachePool()
        with pool.lease_scope() as leases:
            first = leases.take("shape", Cache)
        with pool.lease_scope() as leases:
            assert leases.take("shape", Cache) is first
            assert leases.take("other", Cache) is not first
        assert first.resets == 1
        assert pool.made == 2

    def test_nested_calls_share_none(self):
        pool = CachePool()
        with pool.lease_scope() as outer:
            first = outer.take("shape", Cache)
            with pool.lease_scope() as inner:
                assert inner.take("shape", Cache) is not first
            assert pool.current is outer
        assert pool.current is None

    def test_errors_end_leases(self):
        pool = CachePool()

        def fail(leases):
            leases.take("shape", Cache)
            raise ValueError("text")

        with pytest.raises(ValueError, match="text"), pool.lease_scope() as leases:
            fail(leases)
        with pool.lease_scope() as leases:
            assert leases.take("shape", Cache).resets == 1

    def test_what_the_caller_keeps_does_not_return(self):
        pool = CachePool()
        with pool.lease_scope() as leases:
            kept = leases.take("shape", Cache)
            leases.keep_out(kept)
        with pool.lease_scope() as leases:
            assert leases.take("shape", Cache) is not kept

    def test_caches_are_found_in_all_of_a_result(self):
        """Whisper's result holds one result for each segment."""
        kept = Cache()
        result = {"segments": [[{"result": {"past_key_values": kept}}]], "sequences": None}
        assert any(value is kept for value in walk_values(result))

    def test_few_idle_caches_are_kept(self):
        pool = CachePool()
        with pool.lease_scope() as leases:
            for _ in range(KEPT + 2):
                leases.take("shape", Cache)
        with pool.lease_scope() as leases:
            assert sum(leases.take("shape", Cache).resets for _ in range(KEPT + 2)) == KEPT
        pool.clear()
        with pool.lease_scope() as leases:
            assert leases.take("shape", Cache).resets == 0

    def test_caches_of_many_shapes_are_released_oldest_first(self):
        pool = CachePool()
        for shape in range(20):
            with pool.lease_scope() as leases:
                leases.take(shape, Cache)
        with pool.lease_scope() as leases:
            resets = [leases.take(shape, Cache).resets for shape in range(20)]
        assert resets == [0] * (20 - MOST_IDLE) + [1] * MOST_IDLE


LENGTHS = (*range(1, 20), 31, 32, 33, 64, 65, 100, 128, 129, 200, 252, 256, 257, 300)
SOME_LENGTHS = (1, 2, 3, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 129, 256, 257, 300)  # and borders


@pytest.mark.usefixtures("traced_only")
class TestGeneration:
    @pytest.mark.parametrize(
        "lengths",
        [SOME_LENGTHS, pytest.param(LENGTHS, marks=pytest.mark.slow)],
        ids=["some", "all"],
    )
    def test_prompts_of_any_length_compile_few_graphs(self, pair, lengths):
        """A token, five lengths of chunks and prompts of one token, for each of two ceilings."""
        model, optimized = pair
        counters.clear()
        for length in lengths:
            tokens = prompt(1, length)
            assert torch.equal(optimized.generate(tokens, **NEW), model.generate(tokens, **NEW))
        assert counters["stats"]["unique_graphs"] <= 11
        assert not counters["graph_break"]
        assert len(optimized.forward.steps) == counters["stats"]["unique_graphs"]

    def test_memory_is_used_again_and_holds_nothing_old(self, pair):
        model, optimized = pair
        for seed in range(4):
            tokens = prompt(1, 20, seed)
            assert torch.equal(optimized.generate(tokens, **NEW), model.generate(tokens, **NEW))
        assert optimized.forward.pool.made == 1

    def test_what_an_earlier_call_left_has_no_effect(self, pair):
        """Infinite values of a long text are gone when a short one follows."""
        model, optimized = pair
        optimized.generate(prompt(1, 40), **NEW)
        ((_, idle),) = optimized.forward.pool._idle
        for layer in idle.layers:
            layer.keys.fill_(torch.inf)
            layer.values.fill_(torch.nan)
        tokens = prompt(1, 5)
        assert torch.equal(optimized.generate(tokens, **NEW), model.generate(tokens, **NEW))

    def test_left_padding(self, pair):
        model, optimized = pair
        batch = left_padded(3, 20)
        assert torch.equal(optimized.generate(**batch, **NEW), model.generate(**batch, **NEW))
        alone = batch["input_ids"][:1, 3:]
        together = optimized.generate(**batch, **NEW)[:1, 3:]
        assert torch.equal(optimized.generate(alone, **NEW), together)

    def test_threads_share_no_cache(self, pair):
        model, optimized = pair
        prompts = [prompt(1, 20, seed) for seed in range(6)]
        expected = [model.generate(tokens, **NEW) for tokens in prompts]
        results = {}

        def generate(number):
            for index in range(number, 6, 2):
                results[index] = optimized.generate(prompts[index], **NEW)

        threads = [threading.Thread(target=generate, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [torch.equal(results[n], expected[n]) for n in range(6)] == [True] * 6

    def test_a_call_inside_of_a_call(self, pair):
        model, optimized = pair
        inner, outer = prompt(1, 20, 1), prompt(1, 20)
        inside = []

        def process(tokens, scores):
            if not inside:
                inside.append(optimized.generate(inner, **NEW))
            return scores

        result = optimized.generate(outer, logits_processor=[process], **NEW)
        assert torch.equal(result, model.generate(outer, **NEW))
        assert torch.equal(inside[0], model.generate(inner, **NEW))

    def test_the_models_own_ceiling_is_kept(self, pair):
        _, optimized = pair
        optimized.generation_config.max_cache_len = 600
        optimized.generate(prompt(1, 20), **NEW)
        assert {shape[1] for shape, _ in optimized.forward.pool._idle} == {1024}

    def test_conversations_continue_in_a_returned_cache(self, pair):
        model, optimized = pair
        tokens = prompt(1, 20)
        words = {**NEW, "return_dict_in_generate": True}
        first, truth = optimized.generate(tokens, **words), model.generate(tokens, **words)
        longer = torch.cat([first.sequences, prompt(1, 6, seed=2)], 1)
        ours = optimized.generate(longer, past_key_values=first.past_key_values, **NEW)
        theirs = model.generate(longer, past_key_values=truth.past_key_values, **NEW)
        assert torch.equal(ours, theirs)

    @pytest.mark.sampled("new tokens")
    @pytest.mark.parametrize("more", [20, 300], ids=["new tokens", "a long prompt"])
    def test_a_returned_cache_grows_with_its_conversation(self, pair, more):
        """The first call allocates 256 keys; the second one needs more."""
        model, optimized = pair
        words = {**NEW, "return_dict_in_generate": True}
        tokens = prompt(1, 232)
        first, truth = optimized.generate(tokens, **words), model.generate(tokens, **words)
        longer = torch.cat([first.sequences, prompt(1, more, seed=2)], 1)
        ours = optimized.generate(longer, past_key_values=first.past_key_values, **words)
        theirs = model.generate(longer, past_key_values=truth.past_key_values, **NEW)
        assert torch.equal(ours.sequences, theirs)
        assert ours.past_key_values.ceiling == buckets.round_ceiling(longer.shape[1] + 5)

    def test_a_returned_cache_grows_in_a_loop_of_the_caller(self, pair):
        model, optimized = pair
        words = {**NEW, "return_dict_in_generate": True}
        results = []
        for each in (model, optimized):
            result = each.generate(prompt(1, 250), **words)
            token, cache, logits = result.sequences[:, -1:], result.past_key_values, []
            with torch.no_grad():
                for _ in range(5):
                    logits.append(each(token, past_key_values=cache).logits)
                    token = logits[-1].argmax(-1)
            results.append(torch.cat(logits, 1))
        torch.testing.assert_close(*results)  # fp32: sums over keys in another order


class TestReorder:
    """Beams: texts are exchanged in place, and the prompt that they share is not copied."""

    @pytest.fixture
    def cache(self):
        from ipex_inductor.llm.caches import LayerLayout, PooledCache

        config = FAMILIES["llama"].build().config
        cache = PooledCache(config, 16, beams=2)
        layout = LayerLayout(2, 4, 4, torch.float32, torch.float32, torch.device("cpu"))
        cache.allocate(4, (layout, layout))
        for layer in cache.layers:
            layer.keys.copy_(torch.arange(4.0)[:, None, None, None])
            layer.trim(6)
        cache.prompt_length = 3
        return cache

    def rows(self, cache):
        return cache.layers[1].keys[:, 0, :, 0].T.tolist()

    def test_within_texts(self, cache):
        address = cache.layers[1].keys.data_ptr()
        cache.reorder_cache(torch.tensor([1, 1, 2, 2]))
        assert self.rows(cache) == [[0, 1, 2, 3]] * 3 + [[1, 1, 2, 2]] * 3 + [[0, 1, 2, 3]] * 10
        assert cache.layers[1].keys.data_ptr() == address

    def test_across_texts_the_prompt_goes_along(self, cache):
        cache.reorder_cache(torch.tensor([2, 1, 0, 3]))
        assert self.rows(cache) == [[2, 1, 0, 3]] * 6 + [[0, 1, 2, 3]] * 10
        cache.reorder_cache(torch.tensor([1, 0, 3, 2]))  # beams of one text, whose prompts differ
        assert self.rows(cache) == [[1, 2, 3, 0]] * 6 + [[0, 1, 2, 3]] * 10

    def test_in_order_nothing_is_written(self, cache):
        version = cache.layers[1].keys._version
        cache.reorder_cache(torch.arange(4))
        assert cache.layers[1].keys._version == version
