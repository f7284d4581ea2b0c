"""Steps of DTensors take their last plan again: what is here of them is looked at."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from ipex_inductor.optim import (
    FusedStep,
    Lamb,
    attach_master_weights,
    fuse_step,
    norms,
    plan_replay,
    state_fingerprint,
)
from support.optim.optimizer_variants import copies

pytestmark = [
    pytest.mark.usefixtures("way"),
    pytest.mark.host("a mesh of the CPU; tests/gpu/test_fused_fsdp.py has those of GPUs"),
]

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # a few roundings a step, of numbers of about 1
SHAPES = [(8, 8), (3, 5), (7,), (1, 0), (2, 3, 4, 5)]
KINDS = {
    "AdamW": lambda params: AdamW(params, 0.01),
    "SGD": lambda params: SGD(params, 0.1, momentum=0.9),
    "Lamb": lambda params: Lamb(params, 0.01),
}


def cut(tensor, replicated=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    return distribute_tensor(tensor, mesh, [Replicate() if replicated else Shard(0)])


def draw(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        q.grad = torch.randn(q.shape)
        p.grad = cut(q.grad.clone())


def twins(kind="AdamW"):
    """DTensors, and plain tensors beside them, after two steps."""
    torch.manual_seed(0)
    theirs = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    ours = [nn.Parameter(cut(p.detach().clone())) for p in copies(theirs)]
    optimizer, reference = KINDS[kind](ours), KINDS[kind](theirs)
    assert fuse_step(optimizer) is None
    for _ in range(2):
        step(ours, optimizer, theirs, reference)
    return ours, optimizer, theirs, reference


def step(ours, optimizer, theirs, reference):
    draw(ours, theirs)
    optimizer.step()
    reference.step()


def agree(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.to_local(), q, **CLOSE)


def nobody_plans(monkeypatch):
    monkeypatch.setattr(plan_replay, "plan", None)


@pytest.mark.parametrize("made", ["kept", "anew"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
def test_the_last_plan_is_taken_for_other_gradients(kind, made, monkeypatch, alone):
    ours, optimizer, theirs, reference = twins(kind)
    nobody_plans(monkeypatch)
    for _ in range(3):
        held = [p.grad for p in ours]  # so that new ones lie elsewhere
        if made == "anew":
            draw(ours, theirs)
        else:
            for p, q in zip(ours, theirs, strict=True):
                q.grad.copy_(torch.randn(q.shape))
                p.grad.to_local().copy_(q.grad)
        del held
        optimizer.step()
        reference.step()
    agree(ours, theirs)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.sampled
def test_versions_of_what_is_here_are_counted(planned, monkeypatch, alone):
    ours, optimizer, *_ = twins()
    written = [t._local_tensor for t in (ours[0], optimizer.state[ours[0]]["exp_avg"])]
    before = [t._version for t in written]
    if planned:
        vars(optimizer).pop(plan_replay.KNOWN)
    else:
        nobody_plans(monkeypatch)
    optimizer.step()
    assert [t._version for t in written] == [n + 1 for n in before]


def test_gradients_are_zeroed(monkeypatch, alone):
    ours, optimizer, theirs, reference = twins("SGD")
    fused = FusedStep(optimizer, zero_grad=True)
    for number in range(3):
        draw(ours, theirs)
        if number == 2:
            nobody_plans(monkeypatch)
        parts = [p.grad._local_tensor for p in ours]
        before = [t._version for t in parts]
        fused()
        reference.step()
        assert not any(t.any() for t in parts)
        zeroed = zip(parts, before, strict=True)
        assert all(t._version > n for t, n in zeroed if t.numel())
    agree(ours, theirs)


def state_elsewhere(params, optimizer):
    own = optimizer.state[params[1]]
    own["exp_avg_sq"] = own["exp_avg_sq"].clone()


def loaded(params, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def moved(params, optimizer):
    part = getattr(params[0], "_local_tensor", params[0])
    part.data = part.data.clone()


def turned(params, optimizer):
    part = getattr(optimizer.state[params[0]]["exp_avg"], "_local_tensor", None)
    (optimizer.state[params[0]]["exp_avg"] if part is None else part).t_()


def flagged(params, optimizer):
    optimizer.param_groups[0]["maximize"] = True


def without_one(params, optimizer):
    optimizer.param_groups[0]["params"].pop(1)


@pytest.mark.parametrize("change", [state_elsewhere, loaded, moved, turned, flagged, without_one])
@pytest.mark.sampled
def test_what_makes_another_plan_is_seen(change, alone):
    ours, optimizer, theirs, reference = four = twins()
    for params, each in (ours, optimizer), (theirs, reference):
        change(params, each)
    draw(ours, theirs)
    assert plan_replay.look_and_compare(optimizer, {})[1] is None
    for _ in range(2):
        step(*four)
    agree(ours, theirs)


def negated(grad):
    made = cut(grad)
    made._local_tensor = torch._neg_view(made._local_tensor)
    return made


GRADIENTS = {
    "absent": lambda grad: None,
    "cut otherwise": lambda grad: cut(grad, replicated=True),
    "not cut": lambda grad: grad,
    "turned": lambda grad: cut(grad.t().contiguous()).t(),
    "negated": negated,
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.sampled
def test_gradients_that_make_another_plan_are_seen(name, alone):
    ours, optimizer, *_ = twins()
    ours[0].grad = GRADIENTS[name](torch.randn(8, 8))
    assert plan_replay.look_and_compare(optimizer, {})[1] is None


def test_master_weights_that_fully_shard_has_cut_are_looked_at(monkeypatch, alone):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def trained(steps):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        optimizer = AdamW(model.parameters(), 0.01)
        attach_master_weights(model, optimizer, model.parameters(), torch.bfloat16, split=True)
        if steps == "fused":
            assert fuse_step(optimizer) is None
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        for number in range(4):
            if steps == "fused" and number == 2:
                nobody_plans(monkeypatch)
            model(torch.ones(4, 8).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    ours, theirs = trained("fused"), trained("by torch")
    for name, value in ours.items():
        torch.testing.assert_close(value.full_tensor(), theirs[name].full_tensor(), **CLOSE)


def test_of_plain_tensors_nobody_asks_how_they_are_cut(monkeypatch, alone):
    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = SGD(params, 0.1)
    assert fuse_step(optimizer) is None
    monkeypatch.setattr(state_fingerprint, "_local_parts", None)
    for param in params:
        param.grad = torch.ones(4)
    for _ in range(3):
        optimizer.step()


def test_kernels_take_no_norm_of_parts(monkeypatch, alone):
    """They would read as many elements as there are in all processes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import DTensor

    monkeypatch.setattr(norms, "has_kernels", lambda device: True)
    monkeypatch.setattr(norms, "Reading", lambda grads, device: device)
    spec = cut(torch.zeros(8))._spec
    with FakeTensorMode(allow_non_fake_inputs=True):
        here = torch.zeros(8, device="cuda")
        assert norms._make_reading([here]) == here.device
        assert norms._make_reading([here, DTensor(here, spec, requires_grad=False)]) is None
