"""Lamb and Lars against their formulas in fp64."""

import pytest
import torch
from torch import nn

from ipex_inductor.optim import Lamb, Lars, create_optimizer_lars
from ipex_inductor.optim.optimizers import _lamb, _lars

# fp32 against fp64: ten steps of a dozen roundings each, relative to weights of about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def lamb(w, grads, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        u = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps) + weight_decay * w
        ratio = w.norm() / u.norm() if w.norm() > 0 and u.norm() > 0 else 1
        w = w - lr * ratio * u
    return w


def lars(w, grads, lr=1e-1, momentum=0.0, eeta=1e-3, weight_decay=0.0, epsilon=0.0):
    buf = torch.zeros_like(w)
    for g in grads:
        both = w.norm() > 0 and g.norm() > 0
        t = eeta * w.norm() / (g.norm() + weight_decay * w.norm() + epsilon) if both else 1
        buf = momentum * buf + g + weight_decay * w
        w = w - lr * t * buf
    return w


CASES = {
    "lamb": (Lamb, lamb, {}),
    "lamb decay": (Lamb, lamb, {"weight_decay": 0.1, "betas": (0.7, 0.9), "eps": 1e-3}),
    "lars": (Lars, lars, {}),
    "lars momentum": (Lars, lars, {"momentum": 0.9, "weight_decay": 0.1, "epsilon": 0.1}),
    "lars eeta 0": (Lars, lars, {"eeta": 0.0}),
}


@pytest.mark.parametrize("start", ["weights", "zero weights", "zero gradients"])
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize("case", CASES)
def test_formula(case, start, tensor_lr):
    make, formula, options = CASES[case]
    w = torch.zeros(5, 3) if start == "zero weights" else torch.randn(5, 3)
    grads = torch.randn(10, 5, 3) * (start != "zero gradients")
    param = nn.Parameter(w.clone())
    rate = 1e-1 if make is Lars else 1e-2
    optimizer = make([param], lr=torch.tensor(rate) if tensor_lr else rate, **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, grad)  # IPEX's fp32 kernel overwrote it
    expected = formula(w.double(), grads.double(), **options)
    torch.testing.assert_close(param.data.double(), expected, **CLOSE)
    assert param.isfinite().all()


def test_a_lars_group_without_lars_is_sgd():
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    optimizer = Lars([{"params": [ours], "lars": False}], 0.1, 0.9, weight_decay=0.01)
    reference = torch.optim.SGD([theirs], 0.1, 0.9, weight_decay=0.01)
    for _ in range(3):
        ours.grad = theirs.grad = torch.randn(7)
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)


def test_create_optimizer_lars_sets_norms_and_biases_apart():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = create_optimizer_lars(model, 0.1, 0.9, 1e-4, True, 1e-6)
    scaled, plain = optimizer.param_groups
    assert [p.dim() for p in scaled["params"]] == [4, 2]
    assert (scaled["lars"], scaled["weight_decay"], scaled["epsilon"]) == (True, 1e-4, 1e-6)
    assert {p.dim() for p in plain["params"]} == {1}
    assert len(plain["params"]) == 6
    assert (plain["lars"], plain["weight_decay"], plain["momentum"]) == (False, 0, 0.9)
    together = create_optimizer_lars(model, 0.1, 0.9, 1e-4, False, 1e-6)
    assert [len(group["params"]) for group in together.param_groups] == [8]


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        *((Lamb, {"lr": -1}), (Lamb, {"betas": (1.0, 0.9)}), (Lamb, {"eps": -1.0})),
        *((Lars, {"lr": -1}), (Lars, {"momentum": -1}), (Lars, {"epsilon": float("nan")})),
    ],
)
def test_wrong_hyperparameters(make, wrong):
    with pytest.raises(ValueError, match=f"Invalid .*{next(iter(wrong.values()))}|beta"):
        make([nn.Parameter(torch.ones(1))], **wrong)


def test_lambs_checkpoints_with_an_int_step_load():
    """IPEX's Lamb counted steps in an int."""
    param = nn.Parameter(torch.ones(2))
    optimizer = Lamb([param])
    param.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = 1
    fresh = Lamb([param])
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.state[param]["step"], torch.tensor(1.0))
    fresh.step()
    assert fresh.state[param]["step"] == 2


def test_lamb_counts_where_a_graph_can():
    """On the parameter's device, as its groups say, also after a checkpoint of one that did not."""
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.1}
    optimizer, reference = Lamb([ours], capturable=True, **options), Lamb([theirs], **options)
    for _ in range(3):
        ours.grad = theirs.grad = torch.randn(7)
        optimizer.step()
        reference.step()
    # Powers of the betas are fp32's there.
    torch.testing.assert_close(ours, theirs, **CLOSE)
    assert optimizer.state[ours]["step"] == 3
    old = reference.state_dict()
    del old["param_groups"][0]["capturable"]
    fresh = Lamb([nn.Parameter(torch.ones(7))], capturable=True)
    fresh.load_state_dict(old)
    assert fresh.param_groups[0]["capturable"] is False
    on_meta = nn.Parameter(torch.ones(2, device="meta"))
    on_meta.grad = torch.ones_like(on_meta)
    for capturable, place in ((True, "meta"), (False, "cpu")):
        optimizer = Lamb([on_meta], capturable=capturable)
        optimizer.step()
        assert optimizer.state[on_meta]["step"].device.type == place


def test_the_paths_users_know():
    assert (_lamb.Lamb, _lars.Lars) == (Lamb, Lars)
    assert _lars.create_optimizer_lars is create_optimizer_lars
    param = [nn.Parameter(torch.ones(1))]
    assert (Lamb(param).fused, Lamb(param, fused=True).fused) == (False, True)
    assert (Lars(param).fused, Lars(param, fused=False).fused) == (True, False)


@pytest.mark.parametrize("kind", [Lamb, Lars], ids=lambda kind: kind.__name__)
def test_pickles_name_the_package_and_older_ones_load(kind):
    import pickle

    optimizer = kind([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    text = pickle.dumps(optimizer, 0)
    name = f"cipex_inductor.optim\n{kind.__name__}\n".encode()
    assert name in text
    older = text.replace(
        name, name.replace(b"optim\n", f"optim._{kind.__name__.lower()}\n".encode())
    )
    with pytest.warns(DeprecationWarning, match="ends with version"):
        assert type(pickle.loads(older)) is kind  # noqa: S301 - written above
