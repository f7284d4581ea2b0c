"""The most likely tokens, chosen by the compiled step: which, and when."""

import pytest
import torch

from ipex_inductor.llm import decoding, greedy, optimize
from support.llm_families import FAMILIES, left_padded, prompt

NEW = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def llama():
    return FAMILIES["llama"].build()


@pytest.fixture
def chosen(monkeypatch):
    """Let a CPU choose in its steps; the loop's own choices, as a list that grows."""
    own, choose = [], decoding.Text._choose

    def record(self, logits):
        own.append(1)
        return choose(self, logits)

    monkeypatch.setattr(greedy, "DEVICES", {"cpu"})
    monkeypatch.setattr(decoding.Text, "_choose", record)
    return own


@pytest.mark.parametrize("words", [1, 2, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_torchs_choice(words, dtype):
    """In bf16 many words are equal: the first one is chosen."""
    logits = torch.randn(9, words, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1] = 0
    logits[2] = -torch.inf
    logits[3, words // 2] = torch.inf
    logits[4, words // 2 :] = torch.nan
    logits[5, -1] = 9
    result = greedy.choose_words(logits)
    assert result.dtype is torch.int64
    assert torch.equal(result, logits.float().argmax(-1))


@pytest.mark.slow
@torch.no_grad()
def test_it_is_torchs_choice_compiled():
    logits = torch.randn(3, 2500).bfloat16()
    logits[1] = 0
    logits[2, 1300:] = torch.nan
    run = torch.compile(greedy.choose_words, backend="ipex", options={"strict": True})
    assert torch.equal(run(logits), logits.float().argmax(-1))


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    "ends", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "ends"]
)
def test_steps_choose_the_tokens_of_transformers(llama, chosen, ends):
    ends = {"eos_token_id": list(range(2, llama.config.vocab_size, 4)) if ends else None}
    arguments = {**left_padded(3, 9), **NEW, **ends}
    assert torch.equal(optimize(llama).generate(**arguments), llama.generate(**arguments))
    assert len(chosen) == 1  # behind the prompt


@pytest.mark.usefixtures("traced_only")
@pytest.mark.slow
@pytest.mark.parametrize("why_not", ["a sample", "a processor", "a hook", "no step"])
def test_otherwise_the_loop_chooses(llama, chosen, why_not, monkeypatch):
    model = optimize(llama)
    if why_not == "a hook":
        model.register_forward_hook(lambda *_: None)
    if why_not == "no step":  # as where a model has too many graphs
        monkeypatch.setattr(type(model.forward.steps), "call", lambda *_: None)
    more = {"a sample": {"do_sample": True}, "a processor": {"repetition_penalty": 1.5}}
    results = []
    for each in (llama, model):
        torch.manual_seed(0)
        results.append(each.generate(prompt(1, 9), **NEW, **more.get(why_not, {})))
    assert torch.equal(*results)
    assert len(chosen) == NEW["max_new_tokens"]


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_a_call_of_the_model_behind_it_has_logits(llama, chosen):
    model = optimize(llama)
    model.generate(prompt(1, 9), **NEW)
    cache = model.generate(prompt(1, 9), **NEW, return_dict_in_generate=True).past_key_values
    output = model(input_ids=torch.tensor([[5]]), past_key_values=cache)
    assert output.logits.shape == (1, 1, llama.config.vocab_size)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only", "chosen")
def test_a_call_of_the_model_between_two_tokens_has_logits(llama):
    """A criterion that asks the model about another text, as a judge would."""
    model, shapes = optimize(llama), []
    cache = model.generate(prompt(1, 9), **NEW, return_dict_in_generate=True).past_key_values

    def ask(input_ids, scores, **words):
        if len(shapes) < 3:
            output = model(input_ids=torch.tensor([[5]]), past_key_values=cache)
            shapes.append(tuple(output.logits.shape))
        return torch.zeros(1, dtype=torch.bool)

    model.generate(prompt(1, 7), **NEW, stopping_criteria=[ask])
    assert shapes == [(1, 1, llama.config.vocab_size)] * 3


@pytest.mark.usefixtures("traced_only")
@pytest.mark.slow
def test_hooks_of_all_modules_receive_outputs(llama, chosen):
    model, seen = optimize(llama), []

    def record(module, args, output):
        if module is model:
            seen.append(output.logits.shape[-1])

    handle = torch.nn.modules.module.register_module_forward_hook(record)
    try:
        model.generate(prompt(1, 9), **NEW)
    finally:
        handle.remove()
    assert set(seen) == {llama.config.vocab_size}
    assert len(chosen) == NEW["max_new_tokens"]
