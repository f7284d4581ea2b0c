"""Steps on low-precision weights are torch's fp32 steps, to the bit, in every variant."""

import copy
import os
import subprocess
import sys
import warnings
from types import MethodType

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim import (
    FUSED_OPTIMIZERS,
    SPLIT_OPTIMIZERS,
    Lamb,
    attach_master_weights,
    fuse_step,
    stand_ins,
)
from support.optim.optimizer_variants import (
    LOW,
    ONE_EACH,
    VARIANTS,
    Net,
    assert_same,
    device,
    groups,
    pair,
    same_gradients,
    train,
)

SPLIT = LOW["bf16 split"]
parametrize_low = pytest.mark.parametrize("held", LOW.values(), ids=list(LOW))


@parametrize_low
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_the_fp32_step(variant, held):
    if variant == "adagrad torch-fused" and device().type != "cpu":
        pytest.skip("torch's fused Adagrad is for CPUs")
    four = pair(VARIANTS[variant], held)
    train(*four)
    assert_same(*four)


@pytest.mark.parametrize("variant", ONE_EACH)
def test_chunks_change_nothing(variant, monkeypatch):
    monkeypatch.setattr(stand_ins, "CHUNK", 26)  # the convolution is larger, the linear is not
    calls = []
    raw = type(VARIANTS[variant]([nn.Parameter(torch.ones(1))])).step.__wrapped__
    four = pair(VARIANTS[variant], SPLIT)
    plain = type(four[1]).step
    monkeypatch.setattr(plain, "__wrapped__", lambda *a: calls.append(1) or raw(*a))
    same_gradients(four[0], four[2])
    four[1].step()
    four[3].step()
    assert len(calls) == 1 + 3  # once without elements
    train(*four)
    assert_same(*four)


def test_no_more_than_a_chunk_is_fp32_at_a_time(monkeypatch):
    """Beyond that, the saving of split weights would be gone at the peak of every step."""
    monkeypatch.setattr(stand_ins, "CHUNK", 100)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    attach_master_weights(model, optimizer, model.parameters(), torch.bfloat16, split=True)
    seen, raw = [], SGD.step.__wrapped__

    def spy(optimizer, *args):
        seen.append([p for g in optimizer.param_groups for p in g["params"]])
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in seen[-1])
        seen[-1] = sum(p.numel() for p in seen[-1])
        return raw(optimizer, *args)

    monkeypatch.setattr(SGD.step, "__wrapped__", spy)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert seen == [0] + [64] * 6  # once without elements


@parametrize_low
def test_state_is_fp32(held):
    model, optimizer, *_ = four = pair(VARIANTS["adam amsgrad"], held)
    weight = model.up.weight
    address, version = weight.data_ptr(), weight._version
    train(*four)
    assert weight.data_ptr() == address  # captured graphs read there
    assert weight._version > version  # what is derived from weights asks for it
    state = optimizer.state[model.up.weight]
    assert model.up.weight.dtype == held[0]
    assert {value.dtype for value in state.values()} == {torch.float32}


@parametrize_low
@pytest.mark.parametrize("make", [SGD, Adagrad])
def test_sparse_gradients(make, held):
    table, twin = nn.Embedding(10, 4, sparse=True), nn.Embedding(10, 4, sparse=True)
    twin.load_state_dict(table.state_dict())
    optimizer, reference = make(table.parameters(), 0.1), make(twin.parameters(), 0.1)
    attach_master_weights(table, optimizer, table.parameters(), held[0], split=held[1])
    index = torch.tensor([1, 7, 1])
    for _ in range(3):
        grad = torch.sparse_coo_tensor(index[None], torch.randn(3, 4).to(held[0]), (10, 4))
        table.weight.grad, twin.weight.grad = grad.to(table.weight.grad_dtype), grad.float()
        optimizer.step()
        reference.step()
    assert torch.equal(table.state_dict()["weight"], twin.weight)


@pytest.mark.parametrize("make", [Adam, Lamb])
def test_an_error_in_a_step_leaves_model_and_optimizer_as_they_were(make):
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = make(table.parameters())
    attach_master_weights(table, optimizer, table.parameters(), torch.bfloat16, split=True)
    before = table.state_dict()["weight"]
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [table.weight]
    assert set(optimizer.state) <= {table.weight}
    assert torch.equal(table.state_dict()["weight"], before)


def refused_rate(optimizer, params):
    optimizer.param_groups[1].update(lr=torch.tensor(0.1), foreach=True, capturable=False)


def refused_gradient(optimizer, params):
    params[-1].grad = torch.sparse_coo_tensor([[0]], torch.ones(1), (8,)).to(params[-1].dtype)


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("stepped", [0, 2], ids=["first", "third"])
@pytest.mark.parametrize("wrong", [refused_rate, refused_gradient])
def test_what_is_refused_in_a_later_chunk_leaves_all_as_it_was(wrong, stepped, monkeypatch):
    """torch refuses it when it comes to it, and by then the chunks before are written."""
    monkeypatch.setattr(stand_ins, "CHUNK", 8)
    model = nn.ParameterList([torch.randn(8) for _ in range(4)])
    optimizer = Adam([{"params": [*model][:3]}, {"params": [*model][3:]}], lr=0.1)
    attach_master_weights(model, optimizer, list(model), torch.bfloat16, split=True)
    for _ in range(stepped):
        for p in model:
            p.grad = torch.randn_like(p)
        optimizer.step()
    for p in model:
        p.grad = torch.randn_like(p)
    wrong(optimizer, [*model])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    with pytest.raises((RuntimeError, ValueError)):
        optimizer.step()
    after = model.state_dict(), optimizer.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert {*optimizer.state} <= {*model}


def test_memory_that_is_short_for_the_largest_chunk_leaves_all_as_it_was(monkeypatch):
    """Later chunks need no more than the first, whose memory is free again."""
    monkeypatch.setattr(stand_ins, "CHUNK", 8)
    model = nn.ParameterList([torch.randn(size) for size in (8, 8, 64, 8)])
    optimizer = Adam(model.parameters(), lr=0.1)
    attach_master_weights(model, optimizer, list(model), torch.bfloat16, split=True)
    raw = Adam.step.__wrapped__

    def short(of):
        if sum(p.numel() for group in of.param_groups for p in group["params"]) > 32:
            raise MemoryError
        raw(of)

    for p in model:
        p.grad = torch.randn_like(p)
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(Adam.step, "__wrapped__", short)
    with pytest.raises(MemoryError):
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not optimizer.state


SHORT = """
import copy, resource, torch
from torch import nn
from ipex_inductor.optim import attach_master_weights, stand_ins

torch.set_num_threads(1)
model = nn.ParameterList([torch.ones(stand_ins.CHUNK) for _ in range(8)])
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
attach_master_weights(model, optimizer, list(model), torch.bfloat16, split=True)
for p in model:
    p.grad = torch.ones_like(p)
before = copy.deepcopy(model.state_dict())
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
one = 4 * stand_ins.CHUNK  # bytes that a tensor has of the states, which stay
states = 8 * 2 * one
resource.setrlimit(resource.RLIMIT_AS, (used + states - one, resource.RLIM_INFINITY))
try:
    optimizer.step()
except RuntimeError as error:
    assert "memory" in str(error), error
else:
    raise AssertionError("there was memory enough")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
assert not optimizer.state
optimizer.step()
for value in model.state_dict().values():
    torch.testing.assert_close(value, torch.full_like(value, 0.9))
"""


@pytest.mark.slow  # 10 s; quickly no system says so: above
def test_memory_that_is_short_for_the_states_leaves_all_as_it_was():
    """A first step makes them; those of all chunks are had before the first is written."""
    if device().type != "cpu":
        pytest.skip("the memory of a process is limited, not a GPU's")
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is the system's again
    done = subprocess.run([sys.executable, "-c", SHORT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@parametrize_low
@pytest.mark.parametrize("before", [True, False], ids=["scheduler first", "scheduler last"])
def test_schedulers(held, before):
    """Schedulers wrap `step` and warn if it was wrapped after them, or was not called."""
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    optimizer, reference = (SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))

    def scheduler(of):
        return lr_scheduler.OneCycleLR(of, 0.5, total_steps=20)  # moves the momentum as well

    ours = scheduler(optimizer) if before else None
    attach_master_weights(model, optimizer, model.cast(), held[0], split=held[1])
    ours, theirs = ours or scheduler(optimizer), scheduler(reference)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            same_gradients(model, twin)
            optimizer.step()
            reference.step()
            ours.step()
            theirs.step()
    assert_same(model, optimizer, twin, reference)


def test_step_hooks_run_once_a_step(monkeypatch):
    monkeypatch.setattr(stand_ins, "CHUNK", 1)
    model, optimizer, *_ = four = pair(VARIANTS["sgd momentum"], SPLIT)
    seen = []

    def post(of, args, kwargs):
        assert of.param_groups[1]["params"][0] is model.gain
        seen.append("post")

    optimizer.register_step_pre_hook(lambda of, args, kwargs: seen.append("pre"))
    optimizer.register_step_post_hook(post)
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("global"))
    same_gradients(*four[::2])
    optimizer.step()
    handle.remove()
    assert seen == ["pre", "post", "global"]


@parametrize_low
def test_closures(held):
    model, optimizer, twin, reference = four = pair(VARIANTS["adam"], held)
    seen = []

    def closure():
        assert torch.is_grad_enabled()
        seen.append(model.up.weight.dtype)
        same_gradients(model, twin)
        return torch.tensor(3.0)

    for _ in range(3):
        assert optimizer.step(closure) == 3
        reference.step()
    assert seen == [held[0]] * 3
    assert_same(*four)


def takes_more(make):
    """Whether torch's own optimizer steps a parameter that was added to it."""
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = make([first])
    optimizer.add_param_group({"params": second})
    second.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


@parametrize_low
@pytest.mark.parametrize("make", [VARIANTS[name] for name in ONE_EACH], ids=ONE_EACH)
def test_parameters_added_later(make, held):
    """One that was cast with the model, and one that nobody cast."""
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    optimizer, reference = make(model.up.parameters()), make(twin.up.parameters())
    if not takes_more(make):
        pytest.skip("this torch's Adagrad makes no state for parameters added later (2.11)")
    attach_master_weights(model, optimizer, model.cast(), held[0], split=held[1])
    for step_of, net in ((optimizer, model), (reference, twin)):
        step_of.add_param_group({"params": [net.conv.weight, net.norm.weight], "lr": 0.02})
    train(model, optimizer, twin, reference)
    assert_same(model, optimizer, twin, reference)


@parametrize_low
def test_other_optimizers_train_with_whole_masters(held):
    """All of torch's that evaluate their closure once; none is known to take chunks."""
    dtype = held[0]
    for make in (
        *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam),
        *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
    ):
        model, twin = Net(), Net()
        twin.load_state_dict(model.state_dict())
        optimizer, reference = make(model.parameters()), make(twin.parameters())
        attach_master_weights(model, optimizer, model.cast(), dtype, split=False)
        train(model, optimizer, twin, reference)
        assert_same(model, optimizer, twin, reference)


class Sharp(torch.optim.RMSprop):
    """Evaluates the loss twice, the second time aside of the weights; takes a scale."""

    def step(self, closure, scale=1.0):
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            closure()
        aside = [scale * p.grad.detach() for p in params]
        with torch.no_grad():
            torch._foreach_add_(params, aside)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            torch._foreach_sub_(params, aside)
        super().step()
        return loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_who_evaluates_the_loss_as_often_as_he_likes(dtype):
    """As in sharpness-aware minimisation: the model has to see the weights moved aside."""
    model, twin = (nn.Linear(4, 4, bias=False) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimizer, reference = Sharp(model.parameters(), 0.1), Sharp(twin.parameters(), 0.1)
    attach_master_weights(model, optimizer, model.parameters(), dtype, split=False)
    seen = []

    def ours():
        optimizer.zero_grad()
        assert model.weight.grad is None
        loss = model.weight.float().square().sum()
        loss.backward()
        seen.append(model.weight.detach().clone())
        return loss

    def theirs():  # the same gradients: of the rounded weight, rounded
        rounded = twin.weight.detach().to(dtype)
        twin.weight.grad = (2 * rounded).to(model.weight.grad_dtype).float()
        assert torch.equal(seen[len(calls)], rounded)
        calls.append(1)
        return rounded.float().square().sum()

    calls = []
    for _ in range(3):
        losses = optimizer.step(ours, scale=0.5), reference.step(theirs, scale=0.5)
        assert torch.equal(*losses)
    assert len(calls) == len(seen) == 6
    assert torch.equal(model.state_dict()["weight"], twin.weight)


@parametrize_low
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_the_user_put_there_is_called(held, scheduled):
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    optimizer, reference = Adam(model.parameters()), Adam(twin.parameters())
    calls, hooks, plain = [], [], optimizer.step
    optimizer.step = MethodType(lambda _, *args: (calls.append(1), plain(*args))[1], optimizer)
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))
    scheduler = lr_scheduler.ConstantLR(optimizer, 1.0) if scheduled else None
    attach_master_weights(model, optimizer, model.cast(), held[0], split=held[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, twin, reference)
        if scheduler:
            scheduler.step()
    assert len(calls) == len(hooks) == 5
    ours, theirs = model.state_dict(), twin.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_zero_grad_and_clipping_see_the_parameters():
    model, optimizer, *_ = four = pair(VARIANTS["sgd"], SPLIT)
    same_gradients(*four[::2])
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1
    before = model.state_dict()["up.weight"]
    optimizer.step()
    moved = (model.state_dict()["up.weight"] - before).norm()
    assert 0 < moved <= 0.1 * 1e-3 * 1.01  # clipping rounds to bf16
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


class Clip(SGD):
    """Does something to parameters without a gradient, too, and counts them."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            self.seen = len(group["params"])
            for p in group["params"]:
                p.data.clamp_(-0.0625, 0.0625)
        return loss


@parametrize_low
def test_a_step_of_ones_own_sees_every_parameter(held):
    model = nn.Linear(8, 4)
    optimizer = Clip(model.parameters(), 0.1)
    attach_master_weights(model, optimizer, model.parameters(), held[0], split=False)
    model.bias.grad = torch.zeros_like(model.bias, dtype=model.bias.grad_dtype)
    optimizer.step()
    assert optimizer.seen == 2
    assert model.state_dict()["weight"].abs().max() == 0.0625


class Mine(SGD):
    """A subclass, which may step as it likes."""


@pytest.mark.host("it says what each device has")
def test_the_fused_types_are_exact():
    params = [nn.Parameter(torch.ones(2))]
    assert fuse_step(Mine(params)) == (
        "no fused step for Mine, only for Adagrad, Adam, AdamW, Lamb, Lars, SGD"
    )
    for kind in FUSED_OPTIMIZERS:
        optimizer = kind(params)
        step = optimizer.step
        for _ in range(2):
            if device().type == "cpu":
                assert fuse_step(optimizer) is None
            else:
                assert "no kernel for" in fuse_step(optimizer)
        assert optimizer._original_step == step
        assert optimizer.fused


class Around(torch.optim.Optimizer):
    """Wraps another optimizer, and is one in name alone."""

    def __init__(self, params):
        self.inner = SGD(params)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


REFUSED = {
    "wrapper": (Around, torch.bfloat16, False, "pass that one"),
    "differentiable": (
        lambda p: SGD(p, differentiable=True),
        *(torch.bfloat16, True, "differentiable=False"),
    ),
    "fp16 halves": (lambda p: SGD(p), torch.float16, True, "halves of fp32"),
    "fp64": (lambda p: SGD(p), torch.float64, False, "bfloat16 or torch.float16"),
    "subclass": (lambda p: Mine(p), torch.bfloat16, True, "a Mine"),
    "unknown": (lambda p: torch.optim.RMSprop(p), torch.bfloat16, True, "a RMSprop"),
    "LBFGS": (lambda p: torch.optim.LBFGS(p), torch.bfloat16, False, "LBFGS"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_cast_nothing(case):
    make, dtype, split, words = REFUSED[case]
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    with pytest.raises(ArgumentError, match=words):
        attach_master_weights(model, optimizer, model.parameters(), dtype, split=split)
    assert model.weight.dtype == torch.float32
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("second", ["cast already", "not the model's"])
def test_parameters_are_checked_before_the_first_is_cast(second):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    optimizer = SGD(model.parameters())
    other = model[1].weight if second == "cast already" else nn.Parameter(torch.ones(2))
    with pytest.raises(ArgumentError, match="ordinary fp32 parameters"):
        attach_master_weights(
            model, optimizer, [model[0].weight, other], torch.bfloat16, split=True
        )
    assert model[0].weight.dtype == torch.float32


def test_differentiable_steps_are_refused():
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters())
    attach_master_weights(model, optimizer, model.parameters(), torch.bfloat16, split=True)
    optimizer.param_groups[0]["differentiable"] = True
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(ArgumentError, match="differentiable"):
        optimizer.step()


def test_an_optimizer_that_knows_nothing_of_the_masters_is_refused():
    """It would change the upper halves alone, and nobody would notice."""
    model, optimizer, twin, reference = pair(VARIANTS["sgd"], SPLIT)
    stranger = SGD(groups(model), 0.1)
    same_gradients(model, twin)
    with pytest.raises(ArgumentError, match="with its model"):
        stranger.step()
    attach_master_weights(model, stranger, model.cast(), torch.bfloat16, split=True)
    train(model, stranger, twin, reference, steps=2)
    train(model, optimizer, twin, reference, steps=2)
    assert_same(model, optimizer, twin, reference)


def test_split_tables():
    assert SPLIT_OPTIMIZERS == FUSED_OPTIMIZERS
    assert {kind.__name__ for kind in SPLIT_OPTIMIZERS} == {
        *("SGD", "Adagrad", "Adam", "AdamW", "Lamb", "Lars")
    }
