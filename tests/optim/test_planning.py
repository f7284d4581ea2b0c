"""The kernels that a step will need, told before there are gradients or a GPU."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from ipex_inductor.aot_cache import kernels as cached
from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim import FusedStep, Lamb, Lars, attach_master_weights
from ipex_inductor.optim.launching import launch_groups_cpu, launch_groups_cuda
from ipex_inductor.optim.planning import list_kernels, plan
from ipex_inductor.optim.weights import TABLE
from ipex_inductor.prebuild import described
from ipex_inductor.prebuild.steps import load_step
from ipex_inductor.target.device import find_target as target

pytestmark = pytest.mark.host("a GPU that is described, where none may be")

CASES = [
    (AdamW, {}),
    (AdamW, {"amsgrad": True, "maximize": True}),
    (Adam, {"weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (SGD, {"lr": 0.1}),
    (Adagrad, {}),
    (Lamb, {}),
    (Lars, {"lr": 0.1}),
]
FORMS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "masters": (torch.float32, {"split": False}),
    "split": (torch.float32, {"split": True}),
}


def optimizer_of(kind, settings, dtype, held, clip=None):
    model = nn.Linear(8, 4).to(dtype)
    made = FusedStep(kind(model.parameters(), **settings), clip_norm=clip).optimizer
    if held is not None:
        attach_master_weights(model, made, model.parameters(), torch.bfloat16, **held)
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_they_are_those_of_the_plan(kind, settings, form, monkeypatch):
    monkeypatch.setattr(launch_groups_cpu, "library", lambda kernel: None)  # none is run
    optimizer = optimizer_of(kind, settings, *FORMS[form])
    weights = vars(optimizer)[TABLE]
    assert bool(weights) == (FORMS[form][1] is not None)
    told = list_kernels(optimizer, weights, True, False)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param)
    made = plan(optimizer, weights, scaled=True)
    assert made.left == {}
    assert set(told) == {kernel for _, kernel in made.batches}


@pytest.mark.parametrize(
    ("kind", "settings", "clip", "scaler", "names"),
    [
        (AdamW, {}, None, False, {"step"}),
        (AdamW, {"capturable": True}, None, False, {"step", "scalars"}),
        (AdamW, {}, 1.0, False, {"step", "scalars", "parts"}),
        (AdamW, {}, 1.0, True, {"step", "parts"}),
        (SGD, {"lr": 0.1}, None, True, {"step", "scalars", "parts"}),
        (Lamb, {}, None, False, {"step"}),
        (Lamb, {"capturable": True}, None, True, {"step", "scalars", "parts"}),
        (Lars, {"lr": 0.1}, 1.0, False, {"step", "scalars", "parts"}),
    ],
)
def test_what_a_described_gpu_would_load(kind, settings, clip, scaler, names, monkeypatch):
    asked = []

    def loaded(source, name, device, *_):
        asked.append((name, str(device)))

    monkeypatch.setattr(launch_groups_cuda, "load_triton_kernel", loaded)
    monkeypatch.setattr("ipex_inductor.optim.norms.load_triton_kernel", loaded)
    optimizer = optimizer_of(kind, settings, torch.float32, None, clip)
    with described.device(target("h200")), cached.record_keys() as ours:
        load_step(optimizer, torch.device("cuda", 0), scaler)
    assert {name for name, _ in asked} == names
    assert {device for _, device in asked} == {"cuda:0"}
    assert [key.kind for key in ours] == ["cpp"]  # what looks at tensors


@pytest.mark.parametrize(
    ("kind", "settings", "clip", "scaler", "tabled"),
    [
        (AdamW, {}, None, False, {False}),
        (AdamW, {}, 1.0, False, {True}),
        (AdamW, {}, None, True, {False}),
        (AdamW, {}, 1.0, True, {False}),
        (AdamW, {"capturable": True}, 1.0, True, {True}),
        (AdamW, {"lr": torch.tensor(0.1)}, None, True, {False, True}),
        (SGD, {"lr": 0.1, "momentum": 0.9}, None, False, {False}),
        (SGD, {"lr": 0.1, "momentum": 0.9}, 1.0, False, {True}),
        (SGD, {"lr": 0.1, "momentum": 0.9}, None, True, {True}),
    ],
)
def test_who_makes_scalars(kind, settings, clip, scaler, tabled, monkeypatch):
    optimizer = optimizer_of(kind, settings, *FORMS["fp32"], clip)
    assert steps_loaded(optimizer, scaler, monkeypatch) == tabled


def test_who_makes_them_of_several_groups(monkeypatch):
    """Which may have one kernel."""
    groups = [{"params": [nn.Parameter(torch.ones(3))], "capturable": on} for on in (True, False)]
    for each in (groups, groups[::-1]):
        optimizer = FusedStep(AdamW(each)).optimizer
        assert steps_loaded(optimizer, False, monkeypatch) == {False, True}


def steps_loaded(optimizer, scaler, monkeypatch):
    """Whether steps that a described GPU would load are of a table."""
    asked = set()
    monkeypatch.setattr(
        launch_groups_cuda,
        "load_triton_kernel",
        lambda source, name, device, problem, *_: asked.add((name, problem["tabled"])),
    )
    monkeypatch.setattr("ipex_inductor.optim.norms.load_triton_kernel", lambda *_: None)
    launch_groups_cuda._kernel_of.cache_clear()  # of a driver that is none
    with described.device(target("h200")):
        load_step(optimizer, torch.device("cuda", 0), scaler=scaler)
    return {tabled for name, tabled in asked if name == "step"}


def test_what_has_no_fused_step_is_told():
    optimizer = torch.optim.RMSprop(nn.Linear(2, 2).parameters())
    with pytest.raises(ArgumentError, match="an optimizer with a fused step there"):
        load_step(optimizer, torch.device("cuda", 0))
