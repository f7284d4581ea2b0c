"""The loop of `generate`: tokens, streams and random numbers as by transformers."""

import copy
import logging

import pytest
import torch

from ipex_inductor.llm import caches, decoding, optimize, steps
from support.llm_families import FAMILIES, left_padded, prompt

pytestmark = pytest.mark.usefixtures("traced_only")

NEW = {"max_new_tokens": 40, "pad_token_id": 0}


class Recorder:
    """A streamer that records what it receives."""

    def __init__(self):
        self.received = []

    def put(self, value):
        self.received.append(value.tolist())

    def end(self):
        self.received.append("end")


@pytest.fixture(scope="module")
def llama():
    return FAMILIES["llama"].build()


@pytest.fixture
def loops(monkeypatch):
    """The loops that ran, as the reasons why transformers decoded instead."""
    reasons = []
    call = decoding.Decoding.__call__

    def record(self, *args, **kwargs):
        result = call(self, *args, **kwargs)
        reasons.append(self.reason)
        return result

    monkeypatch.setattr(decoding.Decoding, "__call__", record)
    return reasons


@pytest.fixture
def late(monkeypatch):
    """Let the host read ends late, as on a GPU."""

    class Event:
        def __init__(self, device):
            pass

        def record(self):
            pass

        def synchronize(self):
            pass

    monkeypatch.setattr(decoding.Text, "lag", decoding.LAG)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(decoding, "_copy_to_host", torch.clone)


def frequent_ends(model):
    """Return words that end a text so often that texts of one batch end at several steps."""
    return list(range(2, model.config.vocab_size, 4))


def generate_seeded(model, **kwargs):
    """Return the result, and a number drawn behind it."""
    torch.manual_seed(3)
    return model.generate(**kwargs), torch.rand(1)


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 5.0, "top_k": 50},
    "nucleus": {"do_sample": True, "temperature": 5.0, "top_p": 0.9, "repetition_penalty": 1.2},
    "several": {"do_sample": True, "temperature": 5.0, "num_return_sequences": 2},
    "processors": {"min_new_tokens": 12, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]]},
}


@pytest.mark.sampled("full-greedy", "ends-sampling", "full-processors")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ends", [False, True], ids=["full", "ends"])
def test_tokens_and_random_numbers_are_those_of_transformers(llama, loops, mode, ends):
    words = {"eos_token_id": frequent_ends(llama) if ends else None}
    arguments = {**left_padded(3, 9), **NEW, **MODES[mode], **words}
    expected, drawn = generate_seeded(llama, **arguments)
    result, drawn_here = generate_seeded(optimize(llama), **arguments)
    assert torch.equal(result, expected)
    assert torch.equal(drawn_here, drawn)
    assert loops == [""]


@pytest.mark.sampled("True")
@pytest.mark.parametrize("streams", [False, True])
def test_steps_behind_the_end_are_dropped(llama, loops, late, streams):
    arguments = {**left_padded(3, 9), **NEW, "eos_token_id": frequent_ends(llama)}
    arguments |= {"do_sample": True, "temperature": 5.0}
    recorders = [Recorder(), Recorder()]
    if streams:
        arguments |= {name: arguments[name][:1] for name in ("input_ids", "attention_mask")}
    results = [
        generate_seeded(model, **arguments, **({"streamer": recorder} if streams else {}))[0]
        for model, recorder in zip((llama, optimize(llama)), recorders, strict=True)
    ]
    assert torch.equal(*results)
    assert results[0].shape[1] < arguments["input_ids"].shape[1] + NEW["max_new_tokens"]
    assert recorders[0].received == recorders[1].received
    assert loops == [""]


def test_a_streamer_receives_each_token_and_the_end(llama, loops):
    recorders = [Recorder(), Recorder()]
    for model, recorder in zip((llama, optimize(llama)), recorders, strict=True):
        model.generate(prompt(1, 9), **NEW, streamer=recorder)
    assert recorders[0].received == recorders[1].received
    assert len(recorders[1].received) == NEW["max_new_tokens"] + 2
    assert loops == [""]


OTHER = {
    "beams": {"num_beams": 2},
    "lookup": {"prompt_lookup_num_tokens": 2},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "config": {"generation_config": "beams"},
}


@pytest.mark.parametrize("case", OTHER)
def test_other_loops_are_those_of_transformers_and_the_log_says_why(llama, loops, caplog, case):
    caplog.set_level(logging.INFO, "IPEX")
    arguments = dict(OTHER[case])
    if case == "config":
        arguments["generation_config"] = copy.deepcopy(llama.generation_config)
        arguments["generation_config"].num_beams = 2
    results = [
        model.generate(prompt(1, 9), **NEW, **arguments) for model in (llama, optimize(llama))
    ]
    if case == "scores":
        assert loops == ["results of each step are asked for"]
        results = [result.sequences for result in results]
    else:
        assert loops == []
    assert torch.equal(*results)
    assert "decodes by transformers" in caplog.text


def test_an_error_in_a_step_ends_the_lease(llama):
    class Failing:
        def put(self, value):
            raise RuntimeError("the listener is gone")

    model = optimize(llama)
    with pytest.raises(RuntimeError, match="listener"):
        model.generate(prompt(1, 9), **NEW, streamer=Failing())
    expected = llama.generate(prompt(1, 9), **NEW)
    assert torch.equal(model.generate(prompt(1, 9), **NEW), expected)


def test_numbers_drawn_by_others_stay_drawn():
    class Generator:
        offset = 0

        def get_offset(self):
            return self.offset

        def set_offset(self, offset):
            self.offset = offset

    draws = decoding.Draws(torch.device("cpu"))
    draws._generator = generator = Generator()
    for length in (5, 6, 7):
        generator.offset += 4
        draws.record(length)
    generator.offset += 4
    draws.rewind(5)
    assert generator.offset == 16
    generator.offset = 12
    draws.rewind(5)
    assert generator.offset == 4


def count_guarded(monkeypatch):
    """Return a list that grows with each call of a step by its guards."""
    calls, run = [], steps.Steps._run

    def record(self, *args):
        calls.append(args)
        return run(self, *args)

    monkeypatch.setattr(steps.Steps, "_run", record)
    return calls


def test_guards_are_checked_once_a_call_of_generate(llama, monkeypatch):
    model = optimize(llama)
    model.generate(prompt(1, 9), **NEW)
    calls = count_guarded(monkeypatch)
    expected = llama.generate(prompt(1, 9, seed=1), **NEW)
    assert torch.equal(model.generate(prompt(1, 9, seed=1), **NEW), expected)
    assert len(calls) == 2  # the prompt, and the first step


@pytest.mark.sampled("a weight", "a dtype")
@pytest.mark.parametrize("change", ["a weight", "an activation", "a dtype"])
def test_a_change_between_two_calls_is_seen(llama, change):
    plain, model = copy.deepcopy(llama), optimize(llama)
    model.generate(prompt(1, 9), **NEW)
    for each in (plain, model):
        mlp = each.model.layers[1].mlp
        if change == "a weight":
            mlp.down_proj.weight = torch.nn.Parameter(-2 * mlp.down_proj.weight.detach())
        elif change == "an activation":
            mlp.act_fn = torch.nn.ReLU()
        else:
            each.double()
    expected = plain.generate(prompt(1, 9), **NEW)
    assert not torch.equal(expected, llama.generate(prompt(1, 9), **NEW)) or change == "a dtype"
    assert torch.equal(model.generate(prompt(1, 9), **NEW), expected)


def test_a_hook_of_the_model_is_called_at_each_step(llama):
    model, calls = optimize(llama), []
    model.register_forward_hook(lambda *_: calls.append(1))
    model.generate(prompt(1, 9), **NEW)
    assert len(calls) == NEW["max_new_tokens"]


def test_a_step_reads_no_length_on_the_host(llama, monkeypatch):
    """Or each step would wait for a GPU."""
    model = optimize(llama)
    model.generate(prompt(1, 9), **NEW)
    lengths = []
    count = caches.PooledCache.count_tokens
    monkeypatch.setattr(
        caches.PooledCache, "count_tokens", lambda self: lengths.append(1) or count(self)
    )
    model.generate(prompt(1, 9), **NEW)
    assert len(lengths) == 1  # for the prompt


class Counter(Recorder):
    """A streamer of the user."""


OWN = {
    "nothing": {},
    "an end": {"eos_token_id": 7},
    "a processor": {"repetition_penalty": 1.2},
    "a streamer": {"streamer": Counter()},
    "a criterion": {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids)).bool()]},
    "a function": {"prefix_allowed_tokens_fn": lambda text, ids: list(range(20))},
    "a hook": {},
}
ALONE = ("nothing", "an end", "a processor")


QUICK = ("nothing", "a streamer")


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in OWN]
)
def test_weights_are_trusted_only_where_no_code_of_the_user_runs(llama, monkeypatch, case):
    """Their contents are not compared in later steps of a call: in the first one they are."""
    trusted, run = [], steps.assume_untouched
    monkeypatch.setattr(steps, "assume_untouched", lambda on: trusted.append(on) or run(on))
    model = optimize(llama)
    if case == "a hook":
        model.register_forward_pre_hook(lambda *_: None)
    for _ in range(2):
        trusted.clear()
        model.generate(prompt(1, 9), **NEW, **OWN[case])
        assert {*trusted} == {case in ALONE}
