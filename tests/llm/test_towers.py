"""Encoders beside a decoder run compiled, and give the tokens of the model."""

import copy

import pytest
import torch

import ipex_inductor
from ipex_inductor.llm import optimize, towers
from support.llm_families import FAMILIES, prompt

NEW = {"max_new_tokens": 6, "min_new_tokens": 6}
NAMES = {
    "t5": "encoder",
    "whisper": "model.encoder",
    "llava": "model.vision_tower",
    "git": "git.image_encoder",
    "mllama": "model.vision_model",
}


def cases(names):
    return [pytest.param(n, marks=[] if n == "t5" else [pytest.mark.slow]) for n in names]


def inputs_of(name):
    make = FAMILIES[name].inputs
    return make() if make else {"input_ids": prompt(1, 20)}


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("name", cases(NAMES))
def test_encoders_run_compiled(name):
    model = FAMILIES[name].build()
    optimized = optimize(model)
    assert f"encoders run compiled: {NAMES[name]}" in str(ipex_inductor.report(optimized).events)
    tower = optimized.get_submodule(NAMES[name]).forward
    assert not tower.steps.has_whole
    words = inputs_of(name)
    assert torch.equal(optimized.generate(**words, **NEW), model.generate(**words, **NEW))
    assert tower.steps.has_whole


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "llava"])
def test_kernels_of_the_backend_give_the_same_tokens(name):
    model = FAMILIES[name].build()
    words = inputs_of(name)
    expected = model.generate(**words, **NEW)
    assert torch.equal(optimize(model).generate(**words, **NEW), expected)


def test_models_of_text_have_none():
    assert not list(towers.find_towers(FAMILIES["llama"].build()))


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_copies_have_encoders_of_their_own():
    optimized = optimize(FAMILIES["t5"].build())
    again = copy.deepcopy(optimized)
    assert again.encoder.forward.module is again.encoder
    assert torch.equal(*(m.generate(prompt(1, 9), **NEW) for m in (optimized, again)))
    assert optimize(again, inplace=True).encoder.forward.own is None
    towers.release_towers(again)
    assert "forward" not in vars(again.encoder)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_training_runs_the_encoders_own_code():
    optimized = optimize(FAMILIES["t5"].build())
    optimized.train()
    optimized(input_ids=prompt(1, 9), labels=prompt(1, 4)).loss.backward()
    assert not optimized.encoder.forward.steps.has_whole
