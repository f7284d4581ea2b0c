"""The models of `benchmarks/zoo.py`: there are enough, they run, and what ours computes is right.

All of them op by op behind all of our passes, a few as Inductor's code; with the benchmark's own
judge, which allows what eager is off by.
"""

import argparse
import copy
import itertools
import sys
from pathlib import Path

import pytest
import torch

from support.helpers import has_kernels

pytest.importorskip("transformers", reason="many of the models are its own")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from zoo import Case, Variant, chosen, computed, one_step
from zoo_models import FAMILIES, MODELS
from zoo_models.verdict import Verdict

# Of each family what is traced in a second or two.
QUICK = {"convnext", "vit", "albert", "conv_tasnet", "lstm", "dlrm", "deepfm", "vae", "realnvp"}
QUICK |= {"gat", "graphsage", "dqn", "sac"}
IN_CODE = ("ncf", "gcn", "ppo")  # seconds to compile


def test_there_are_forty_models_of_seven_families():
    assert len(MODELS) == sum(map(len, FAMILIES.values())) >= 40
    assert len(FAMILIES) == 7
    assert min(map(len, FAMILIES.values())) >= 5


def test_by_turns_each_family_has_all_variants():
    """And each model one of inference and one of training, unless more are asked for."""
    usual = dict.fromkeys(("dtype", "train", "inference", "static", "dynamic", "all"), False)
    usual |= {"models": MODELS, "shard": (0, 1)}
    for family, models in FAMILIES.items():
        rows = chosen(argparse.Namespace(**usual, family=[family]))
        assert [name for name, _ in rows].count(next(iter(models))) == 2
        assert len({variant for _, variant in rows}) == 8
        every = chosen(argparse.Namespace(**usual | {"all": True}, family=[family]))
        assert len(every) == len({*every}) == 8 * len(models)


def check(name, variant):
    """It is right, and nothing of it fell back."""
    case = Case.of(MODELS[name], variant, "cpu")
    eager = copy.deepcopy(case.model)
    want = computed(eager, eager, case.inputs)
    assert all(torch.isfinite(x).all() for group in want.values() for x in group)
    model = copy.deepcopy(case.model)
    run = torch.compile(model, backend="ipex", options={"strict": True})
    one_step(run, model, case.marked())
    model.load_state_dict(case.model.state_dict())
    found = computed(run, model, case.inputs)
    verdict = Verdict.of(found, want, case.exact(), variant.dtype)
    assert not verdict.wrong


def variants(training):
    """The models, each in one dtype and kind of batch."""
    turns = itertools.cycle(itertools.product((False, True), ("fp32", "bf16")))
    return [
        pytest.param(
            name,
            Variant(training, dtype, dynamic),
            marks=[] if name in QUICK and not training else pytest.mark.slow,
            id=f"{name}-{dtype}-{'dynamic' if dynamic else 'static'}",
        )
        for name, (dynamic, dtype) in zip(MODELS, turns, strict=False)
    ]


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(("name", "variant"), variants(training=False))
def test_inference_op_by_op(name, variant):
    if variant.dtype == "bf16" and not has_kernels(torch.bfloat16):
        pytest.skip("no products in bf16 here")
    check(name, variant)


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(("name", "variant"), variants(training=True))
def test_training_op_by_op(name, variant):
    check(name, variant)


@pytest.mark.parametrize("name", IN_CODE)
def test_inference_in_generated_code(name):
    check(name, Variant(False, "fp32", True))


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_CODE)
def test_training_in_generated_code(name):
    check(name, Variant(True, "fp32", True))
