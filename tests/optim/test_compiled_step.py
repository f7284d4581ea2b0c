"""`torch.compile(optimizer.step, backend="ipex")` of optimizers that nobody fused."""

import time
from functools import partial

import pytest
import torch
from optimizers import SHAPES, VARIANTS, copies, in_groups, single, tensors
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Adamax, NAdam, RMSprop

from ipex_inductor import decisions
from ipex_inductor.lowerings import step as launching
from ipex_inductor.passes.step import NAME, program_of
from ipex_inductor.passes.terms import UnreadError

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler record function")

TORCHS = {n: make for n, make in VARIANTS.items() if make.func in (SGD, Adagrad, Adam, AdamW)}
# A fused step of torch's is a call that Dynamo leaves alone.
GRAPHS = {n: make for n, make in TORCHS.items() if not make.keywords.get("fused")}
FOREACH = {
    f"{n} as foreach": partial(make.func, **make.keywords | {"foreach": True})
    for n, make in GRAPHS.items()
    if not make.keywords.get("foreach") and not isinstance(make.keywords.get("lr"), torch.Tensor)
}
CASES = GRAPHS | FOREACH
CAPTURED = {
    "adam": partial(Adam, lr=torch.tensor(1e-2), foreach=True, capturable=True),
    "adamw single": partial(AdamW, lr=torch.tensor(1e-2), foreach=False, capturable=True),
}


@pytest.fixture
def launches(monkeypatch):
    """How many kernels were called."""
    calls = []
    known = launching._Kernel.__call__

    def call(kernel, *args):
        calls.append(kernel)
        return known(kernel, *args)

    monkeypatch.setattr(launching._Kernel, "__call__", call)
    return calls


def fired():
    return [e.reason for r in decisions.reports() for e in r.events if e.kind == "fired"]


def missed():
    return [e.reason for r in decisions.reports() for e in r.events if e.kind == "missed"]


def compiled(optimizer, **options):
    return torch.compile(optimizer.step, backend="ipex", options={"strict": True} | options)


def draw(*lists, without=()):
    """The same gradients for all lists, as each holds them."""
    for index, params in enumerate(zip(*lists, strict=True)):
        drawn = torch.randn(params[0].shape)
        for p in params:
            p.grad = None if index in without else drawn.to(params[0].dtype).to(p.dtype)


def greatest(x):
    return x.detach().abs().max().item() if x.numel() else 0.0


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_as_near_to_fp64_as_eager_steps(make, launches):
    """But for 2 ulp of the largest operand, as for fused steps; the rate changes on the way."""
    ours = tensors()
    theirs, exact = copies(ours), copies(ours, torch.float64)
    optimizer = make(in_groups(ours))
    references = [single(make)(in_groups(params)) for params in (theirs, exact)]
    step = compiled(optimizer)
    largest = [0.0] * len(ours)
    for number in range(8):
        draw(ours, theirs, exact, without=(3,))
        for index, (p, q) in enumerate(zip(ours, exact, strict=True)):
            drawn = [] if p.grad is None else [p.grad]
            largest[index] = max([largest[index], *map(greatest, (q, *drawn))])
        step()
        for reference in references:
            reference.step()
        if number > 4:
            slower(optimizer, *references)
        for index, q in enumerate(exact):
            largest[index] = max([largest[index], *map(greatest, state(references[1], q).values())])
    assert fired() and not missed() and launches
    for index, trio in enumerate(zip(ours, theirs, exact, strict=True)):
        states = [state(of, p) for of, p in zip((optimizer, *references), trio, strict=True)]
        assert states[0].keys() == states[1].keys()
        for mine, own, true in (trio, *(tuple(s[k] for s in states) for k in states[0])):
            assert mine.dtype == own.dtype and mine.stride() == own.stride()
            error, allowed = (greatest(x.double() - true) for x in (mine, own))
            assert error <= allowed + 2 * torch.finfo(torch.float32).eps * largest[index]


def state(optimizer, param):
    """What it keeps of `param`."""
    return {k: v for k, v in optimizer.state[param].items() if isinstance(v, torch.Tensor)}


def slower(*optimizers):
    """Half the rate."""
    for group in (g for each in optimizers for g in each.param_groups):
        group["lr"] = group["lr"] * 0.5
