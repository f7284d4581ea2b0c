"""Fused optimizers behave as torch's: state, checkpoints, hooks, and what is left to torch."""

import copy
import logging
import warnings
from types import MethodType

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, lr_scheduler

from ipex_inductor.optim import (
    FusedStep,
    Lamb,
    Lars,
    attach_master_weights,
    fuse_step,
    kernels,
    planning,
)
from support.helpers import pickled
from support.optim.optimizer_variants import (
    LOW,
    ONE_EACH,
    VARIANTS,
    Net,
    copies,
    in_groups,
    left,
    pair,
    train,
)

# Formulas are torch's in another order: a few roundings a step, of numbers of about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
each_optimizer = pytest.mark.parametrize("variant", ONE_EACH)


@pytest.fixture(autouse=True)
def _unsaid():
    kernels._said.clear()


def twins(make, params=None):
    """A fused optimizer and torch's, of parameters with the same values."""
    ours = params or [nn.Parameter(torch.randn(shape)) for shape in ((3,), (5, 7), ())]
    theirs = copies(ours)
    optimizer, reference = make(in_groups(ours)), make(in_groups(theirs))
    assert fuse_step(optimizer) is None
    return ours, optimizer, theirs, reference


def draw(*lists):
    """The same gradients for all."""
    for same in zip(*lists, strict=True):
        drawn = torch.randn(same[0].shape)
        for p in same:
            p.grad = drawn.to(p.dtype).clone()


def step_both(ours, optimizer, theirs, reference, steps=3):
    for _ in range(steps):
        draw(ours, theirs)
        optimizer.step()
        reference.step()


def assert_alike(ours, optimizer, theirs, reference, **close):
    """Values, and the state by name, order, dtype and layout."""
    close = close or CLOSE
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **close)
    mine, its = optimizer.state_dict(), reference.state_dict()
    assert mine["param_groups"] == its["param_groups"]
    assert list(mine["state"]) == list(its["state"])
    for own, other in zip(mine["state"].values(), its["state"].values(), strict=True):
        assert list(own) == list(other)
        for name, value in other.items():
            assert own[name].requires_grad == value.requires_grad
            assert own[name].stride() == value.stride()
            # torch's own steps are on the default device
            torch.testing.assert_close(own[name], value, **close, check_device=False)


def kept(params, optimizer):
    """Everything that a step may write."""
    grads = [None if p.grad is None else p.grad.clone() for p in params]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return [p.detach().clone() for p in params], grads, state


def assert_kept(params, optimizer, before):
    torch.testing.assert_close(kept(params, optimizer), before, rtol=0, atol=0, equal_nan=True)


# State and checkpoints


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_is_torchs(variant):
    old = torch.empty(()).is_cuda and torch.__version__ < (2, 13)
    if old and variant == "adagrad torch-fused":
        pytest.skip("torch 2.11 has no fused Adagrad for GPUs")
    four = twins(VARIANTS[variant])
    step_both(*four)
    assert_alike(*four)
    assert not left(four[1])


@each_optimizer
def test_checkpoints_go_both_ways(variant):
    make = VARIANTS[variant]
    ours, optimizer, theirs, reference = four = twins(make)
    step_both(*four, steps=2)
    for _ in range(2):
        plain, fused = pickled(optimizer.state_dict()), pickled(reference.state_dict())
        optimizer, reference = make(in_groups(ours)), make(in_groups(theirs))
        fuse_step(optimizer)
        reference.load_state_dict(plain)
        optimizer.load_state_dict(fused)
        step_both(ours, optimizer, theirs, reference, steps=2)
        assert_alike(ours, optimizer, theirs, reference)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@each_optimizer
def test_copies_are_fused(variant, copied):
    four = twins(VARIANTS[variant])
    step_both(*four, steps=2)
    ours, optimizer, *others = copied(four)
    assert optimizer.fused
    assert kernels.uses_kernels(optimizer)
    step_both(ours, optimizer, *others)
    assert_alike(ours, optimizer, *others)


def test_fp64_by_default():
    """As torch has it, steps are counted in the default dtype then."""
    torch.set_default_dtype(torch.float64)
    try:
        for variant in ("adam amsgrad", "adagrad", "adam torch-fused", "lamb"):
            four = twins(VARIANTS[variant])
            step_both(*four)
            assert_alike(*four)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_in_one_optimizer(dtype):
    ours = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4).to(dtype))]
    four = twins(VARIANTS["adamw"], ours)
    step_both(*four, steps=1)
    assert_alike(*four, rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)  # an ulp
    assert len(planning.plan(four[1], {}).batches) == 2


def test_groups_of_their_own_flags():
    """Several kernels, each with numbers of its groups."""
    ours = [nn.Parameter(torch.randn(3, 3)) for _ in range(4)]
    theirs = copies(ours)
    made = []
    for params in (ours, theirs):
        groups = [{"params": p} for p in params]
        groups[1] |= {"momentum": 0.9, "nesterov": True}
        groups[2] |= {"momentum": 0.5, "dampening": 0.1, "weight_decay": 0.1, "lr": 0.01}
        groups[3] |= {"maximize": True}
        made.append(SGD(groups, lr=0.1))
    fuse_step(made[0])
    four = ours, made[0], theirs, made[1]
    step_both(*four)
    assert_alike(*four)
    for optimizer in made:
        optimizer.param_groups[0].update(momentum=0.7)  # begins with no buffer
        optimizer.param_groups[1].update(momentum=0.0, lr=0.0)
    step_both(*four)
    assert_alike(*four)


# Around a step


@each_optimizer
def test_schedulers_and_closures(variant):
    """A scheduler wraps `step`, before or after it was fused, and warns if that was not called."""
    ours, optimizer, theirs, reference = four = twins(VARIANTS[variant])
    early = lr_scheduler.StepLR(reference, 1, 0.5)
    late = lr_scheduler.StepLR(optimizer, 1, 0.5)
    fuse_step(reference)
    seen = []

    def closure():
        assert torch.is_grad_enabled()
        seen.append(1)
        draw(ours, theirs)
        return torch.tensor(2.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert optimizer.step(closure) == 2
            reference.step()
            early.step()
            late.step()
    assert len(seen) == 3
    assert_alike(*four, rtol=0, atol=0)
    assert optimizer.param_groups[0]["lr"] < VARIANTS[variant](theirs).defaults["lr"]


def test_step_hooks_run_once():
    ours, optimizer, *_ = twins(VARIANTS["sgd momentum"])
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    draw(ours)
    optimizer.step()
    assert seen == ["pre", "post"]


def test_hooks_are_given_what_torch_gives_them():
    given = {}
    for fused in (False, True):
        params = [nn.Parameter(torch.ones(3))]
        optimizer, seen = SGD(params, 0.1), given.setdefault(fused, [])
        assert not fused or fuse_step(optimizer) is None
        for p in params:
            p.grad = torch.ones_like(p)

        def told(of, args, kwargs, seen=seen):
            seen.append((args[0] is of, *args[1:], kwargs))

        optimizer.register_step_post_hook(told)
        optimizer.step()
        optimizer.step(None)
        optimizer.step(closure=None)
        optimizer.register_step_pre_hook(told)
        optimizer.step()
    assert given[True] == given[False]


def test_a_step_that_somebody_put_there_is_not_fused():
    """It calls the step of the class, of which kernels know nothing; GradScaler unscales for it."""
    p = nn.Parameter(torch.ones(3))
    optimizer = Adam([p])
    plain, calls = optimizer.step, []
    optimizer.step = MethodType(lambda _, *args: (calls.append(1), plain(*args))[1], optimizer)
    assert "a step of its own" in fuse_step(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert calls == [1]
    assert torch.equal(p.grad, torch.ones(3))


@each_optimizer
def test_parameters_added_later(variant):
    if variant == "adagrad":
        pytest.skip("torch's Adagrad may make no state for them (2.11)")
    ours, optimizer, theirs, reference = four = twins(VARIANTS[variant])
    step_both(*four)
    more = [nn.Parameter(torch.randn(4, 2))]
    for each, params in ((optimizer, ours), (reference, theirs)):
        added = copies(more)
        each.add_param_group({"params": added, "lr": 0.05})
        params += added
    step_both(*four)
    assert_alike(*four)
    assert not left(optimizer)


@each_optimizer
def test_nothing_to_do(variant):
    """No gradients at all, or some; those without stay as they are and get no state."""
    ours, optimizer, theirs, reference = four = twins(VARIANTS[variant])
    optimizer.step()
    reference.step()
    draw(ours, theirs)
    ours[1].grad = theirs[1].grad = None
    optimizer.step()
    reference.step()
    assert_alike(*four)


@pytest.mark.parametrize("held", [None, *LOW.values()], ids=["fp32", *LOW])
def test_tied_weights(held):
    """One parameter under two names is stepped once."""
    if held is None:
        model, twin = Net(), Net()
        twin.load_state_dict(model.state_dict())
        optimizer, reference = (VARIANTS["adamw"](m.parameters()) for m in (model, twin))
    else:
        model, optimizer, twin, reference = pair(VARIANTS["adamw"], held)
    assert fuse_step(optimizer) is None
    train(model, optimizer, twin, reference)
    assert not left(optimizer)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, **CLOSE)


# Gradients and memory

GRADIENTS = {
    "transposed": lambda shape: torch.randn(shape[::-1]).t(),
    "expanded": lambda shape: torch.randn(()).expand(shape),
    "strided": lambda shape: torch.randn(shape[0] * 2, shape[1] * 3)[::2, ::3],
    "unaligned": lambda shape: torch.randn(shape[0] * shape[1] + 1)[1:].view(shape),
    "negated": lambda shape: torch._neg_view(torch.randn(shape)),
    "requiring grad": lambda shape: torch.randn(shape).requires_grad_().exp(),
}


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("way", GRADIENTS)
def test_gradients_of_any_layout(way, zeroed):
    """They are read as they are, and changed only where they are to be zero."""
    ours, optimizer, theirs, reference = twins(VARIANTS["sgd nesterov"])
    FusedStep(optimizer, zero_grad=zeroed)
    for _ in range(2):
        draw(ours, theirs)
        grad = GRADIENTS[way]((5, 7))
        ours[1].grad, theirs[1].grad = grad, grad.detach().clone()
        before = grad.detach().clone()
        optimizer.step()
        reference.step()
        assert ours[1].grad is grad
        assert torch.equal(grad, torch.zeros_like(grad) if zeroed else before)
        assert not left(optimizer)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **CLOSE)


def test_gradients_are_not_clobbered():
    """IPEX's Lamb did so."""
    for variant in ONE_EACH:
        ours, optimizer, *_ = twins(VARIANTS[variant])
        draw(ours)
        before = [p.grad.clone() for p in ours]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, before, strict=True))


@pytest.mark.parametrize("held", LOW.values(), ids=list(LOW))
def test_versions_are_counted(held):
    """What is derived from weights asks for them, and captured graphs read at addresses."""
    model, optimizer, *_ = pair(VARIANTS["adamw"], held)
    fuse_step(optimizer)
    before = {p: (p._version, p.data_ptr()) for p in model.parameters()}
    for number, p in enumerate(model.parameters()):
        p.grad = None if number == 1 else torch.zeros_like(p, dtype=p.grad_dtype)
    optimizer.step()
    for number, (p, (version, address)) in enumerate(before.items()):
        assert (p._version > version) == (number != 1)
        assert p.data_ptr() == address


def test_autograd_sees_that_weights_changed():
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p])
    fuse_step(optimizer)
    saved = p.square().sum()
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_in_inference_mode():
    """torch steps there, and so do kernels; state made there is an inference tensor, as torch's."""
    four = twins(VARIANTS["adamw"])
    with torch.inference_mode():
        step_both(*four)
    for p, q in zip(four[0], four[2], strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), **CLOSE)


# What is left to torch


class Mine(torch.Tensor):
    """A subclass, which may mean something else by its memory."""


def sparse(p):
    return torch.sparse_coo_tensor([[0, 2]], torch.randn(2, *p.shape[1:]), p.shape)


def betas():
    return torch.tensor(0.9), torch.tensor(0.99)


LEFT = {  # parameters, optimizer, gradients; the reason
    "gaps": (lambda: torch.randn(6, 8)[::2, 1:7:3], SGD, torch.randn_like, "gaps in its memory"),
    "subclass": (lambda: torch.randn(4).as_subclass(Mine), SGD, torch.randn_like, "a Mine"),
    "complex": (
        lambda: torch.randn(4, dtype=torch.complex64),
        *(Adam, torch.randn_like, "torch.complex64"),
    ),
    "sparse": (lambda: torch.randn(4, 3), SGD, sparse, "sparse gradients"),
    "sparse Adagrad": (lambda: torch.randn(4, 3), Adagrad, sparse, "sparse gradients"),
    "tensor betas": (
        lambda: torch.randn(4),
        lambda params: Adam(params, betas=betas(), foreach=False),
        *(torch.randn_like, "betas that are tensors"),
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_no_kernel_takes_is_torchs(case, caplog):
    """To the bit, the reason is said once, and the other parameters are fused."""
    value, make, gradient, reason = LEFT[case]
    start = value()
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        # A clone would have no gaps: both step the same memory, one after the other.
        given = start.detach().clone()
        odd, plain = nn.Parameter(start), nn.Parameter(torch.ones(3))
        optimizer = make([odd, plain])
        if fused:
            fuse_step(optimizer)
        with caplog.at_level(logging.INFO, "ipex_inductor"):
            for _ in range(3):
                odd.grad, plain.grad = gradient(odd.detach()), torch.randn(3)
                optimizer.step()
        if fused and case != "tensor betas":
            assert planning.plan(optimizer, {}).left.keys() == {odd}
        results.append((odd.detach().clone(), optimizer.state[odd], plain.detach()))
        start.copy_(given)
    torch.testing.assert_close(results[0][:2], results[1][:2], rtol=0, atol=0)
    torch.testing.assert_close(results[0][2], results[1][2], **CLOSE)
    assert not torch.equal(results[0][0], start)
    (line,) = (r.message for r in caplog.records if "torch itself steps" in r.message)
    assert reason in line


def test_parameters_in_one_memory_are_torchs():
    """It steps one after the other; threads would not."""
    results = []
    for fused in (True, False):
        memory = torch.ones(9)
        params = [nn.Parameter(memory[a:b]) for a, b in ((0, 9), (0, 2), (3, 5))]
        apart = nn.Parameter(torch.ones(3))
        optimizer = SGD([*params, apart], 0.1, momentum=0.9)
        if fused:
            fuse_step(optimizer)
        for count in range(3):
            for p in (*params, apart):
                p.grad = torch.full_like(p, count + 1.0)
            optimizer.step()
        if fused:
            assert planning.plan(optimizer, {}).left.keys() == set(params)
        results.append(memory)
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.host("torch's foreach ops refuse it on a GPU")
def test_a_negated_parameter_is_torchs():
    results = []
    for fused in (True, False):
        p = nn.Parameter(torch._neg_view(torch.ones(8)))
        optimizer = SGD([p], 0.1)
        if fused:
            fuse_step(optimizer)
        for _ in range(3):
            p.grad = torch.ones(8)
            optimizer.step()
        results.append(p.detach().clone())
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_one_state_for_two_is_torchs():
    """So do some switch amsgrad on."""
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        p = nn.Parameter(torch.ones(8))
        optimizer = Adam([p], lr=0.1)
        if fused:
            fuse_step(optimizer)
        for count in range(4):
            p.grad = torch.randn(8)
            optimizer.step()
            if not count:
                optimizer.param_groups[0]["amsgrad"] = True
                optimizer.state[p]["max_exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"]
        results.append(p.detach())
    torch.testing.assert_close(*results, **CLOSE)


def test_state_that_is_turned_between_steps_is_seen():
    """Its address, dtype and size are as they were."""
    p, q = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    optimizer, reference = Adam([p], 0.1), Adam([q], 0.1)
    fuse_step(optimizer)
    for _ in range(3):
        step_both([p], optimizer, [q], reference)
        for own in (optimizer.state[p], reference.state[q]):
            own["exp_avg"] = own["exp_avg"].t()
    assert_alike([p], optimizer, [q], reference)


def test_a_gradient_that_shrinks_in_place_is_seen():
    """No kernel reads beyond its end; torch broadcasts it."""
    p, q = (nn.Parameter(torch.ones(4096)) for _ in range(2))
    optimizer, reference = SGD([p], 0.1), SGD([q], 0.1)
    fuse_step(optimizer)
    step_both([p], optimizer, [q], reference)
    for one in (p, q):
        one.grad.data = torch.ones(1)
    optimizer.step()
    reference.step()
    assert_alike([p], optimizer, [q], reference)


def test_the_step_counts_on_the_cpu_whatever_the_default_device():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = Adam([p])
    fuse_step(optimizer)
    with torch.device("meta"):
        optimizer.step()
    assert optimizer.state[p]["step"].device.type == "cpu"


def test_a_first_step_that_failed_was_none():
    p = nn.Parameter(torch.ones(3))
    optimizer = SGD([p], 1.0, momentum=0.9, dampening=0.5)
    fuse_step(optimizer)
    p.grad = torch.ones(3)
    optimizer.param_groups[0]["lr"] = "none"
    with pytest.raises(ValueError, match="float"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert torch.equal(p, torch.zeros(3))  # the gradient whole, not half of it


def test_averages_of_nothing_old():
    """torch's `lerp` keeps a small gradient beside a large average."""
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, reference = (Adam([x], betas=(0.0, 0.9)) for x in (p, q))
    fuse_step(optimizer)
    for value in (1e3, 1e-6, float("inf")):
        for x in (p, q):
            x.grad = torch.full_like(x, value)
        optimizer.step()
        reference.step()
        ours, theirs = optimizer.state[p]["exp_avg"], reference.state[q]["exp_avg"]
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0, equal_nan=True)


def test_no_other_arguments_are_swallowed():
    p = nn.Parameter(torch.ones(3))
    optimizer = SGD([p], 1.0)
    fuse_step(optimizer)
    with pytest.raises(TypeError):
        optimizer.step(None, 1)


@pytest.mark.host("torch's SGD takes foreach for it on a GPU, and raises")
def test_a_differentiable_step_is_torchs():
    grads = []
    for fused in (True, False):
        rate = torch.tensor(0.1, requires_grad=True)
        start = torch.tensor([1.0, 2.0], requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of gradients that are no leaf's
            p = start.clone()
            optimizer = SGD([p], lr=rate, differentiable=True)
            p.grad = torch.tensor([3.0, 4.0])
            if fused:
                fuse_step(optimizer)
            optimizer.step()
        p.sum().backward()
        grads.append((rate.grad, start.grad))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_state_of_another_layout_is_torchs(caplog):
    """torch gives SGD's buffer the layout of the first gradient; it is said, once."""
    results = []
    caplog.set_level(logging.INFO, "ipex_inductor")
    for fused in (True, False):
        p = nn.Parameter(torch.ones(5, 7))
        optimizer = SGD([p], 0.1, momentum=0.9)
        for seed in range(3):
            torch.manual_seed(seed)
            p.grad = torch.randn(7, 5).t()
            optimizer.step()
            if fused and not seed:
                fuse_step(optimizer)
                assert left(optimizer) == {"a state 'momentum_buffer' of another layout"}
        results.append(p.detach())
    assert torch.equal(*results)
    (line,) = (r.message for r in caplog.records if "torch itself steps" in r.message)
    assert line.endswith("1 parameters: a state 'momentum_buffer' of another layout")


@pytest.mark.host("torch's own foreach op writes both at once on a GPU")
def test_a_parameter_that_is_twice_in_a_group():
    """torch warns of it, and steps it twice, one after the other."""
    results = []
    for fused in (True, False):
        p = nn.Parameter(torch.ones(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = Adam([p, p], 0.1)
        if fused:
            fuse_step(optimizer)
        for _ in range(2):
            p.grad = torch.ones(3)
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, **CLOSE)


# Errors change nothing


def lacking(params, optimizer, name):
    del optimizer.state[params[1]][name]


BAD = {
    "sparse": (lambda: VARIANTS["adam amsgrad"], lambda params, _: be_sparse(params), RuntimeError),
    "sparse, decayed": (
        lambda: VARIANTS["sgd nesterov"],
        *(lambda params, _: be_sparse(params), RuntimeError),
    ),
    "sparse, decayed Adagrad": (
        lambda: VARIANTS["adagrad decays"],
        *(lambda params, _: be_sparse(params), RuntimeError),
    ),
    "sparse Lamb": (lambda: Lamb, lambda params, _: be_sparse(params), RuntimeError),
    "sparse Lars": (lambda: Lars, lambda params, _: be_sparse(params), RuntimeError),
    "no moment": (
        lambda: VARIANTS["adamw"],
        *(lambda params, of: lacking(params, of, "exp_avg_sq"), KeyError),
    ),
    "no maximum": (
        lambda: VARIANTS["adam amsgrad"],
        *(lambda params, of: lacking(params, of, "max_exp_avg_sq"), KeyError),
    ),
    "no sum": (
        lambda: VARIANTS["adagrad"],
        *(lambda params, of: lacking(params, of, "sum"), KeyError),
    ),
    "capturable": (
        lambda: VARIANTS["adam"],
        *(lambda _, of: of.param_groups[0].update(capturable=True), AssertionError),
    ),
}


def be_sparse(params):
    params[1].grad = params[1].grad.to_sparse()


@pytest.mark.sampled
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_errors_are_torchs_and_change_nothing(case, scaled):
    make, spoil, kind = BAD[case]
    if torch.empty(()).is_cuda and case == "capturable":
        pytest.skip("as it may be on a GPU")
    ours, optimizer, theirs, reference = twins(make())
    step_both(ours, optimizer, theirs, reference)
    draw(ours, theirs)
    for params, each in ((ours, optimizer), (theirs, reference)):
        spoil(params, each)
    with pytest.raises(kind):
        reference.step()
    if scaled:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    before = kept(ours, optimizer)
    with pytest.raises(kind):
        optimizer.step()
    assert_kept(ours, optimizer, before)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_parameter_of_integers_raises_torchs_error_before_anything_is_stepped(foreach):
    """torch's own step has changed the one before it by then, but for `foreach`."""
    weight, count = nn.Parameter(torch.ones(4)), torch.ones(4, dtype=torch.int64)
    weight.grad, count.grad = torch.ones(4), torch.ones(4, dtype=torch.int64)
    optimizer = AdamW([weight, count], foreach=foreach)
    assert fuse_step(optimizer) is None
    with pytest.raises(RuntimeError, match="can't be cast"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(4))
    assert torch.equal(count, torch.ones(4, dtype=torch.int64))
    assert not optimizer.state[weight]


@pytest.mark.host("its devices are named")
def test_parameters_of_several_devices_are_stepped_where_they_are():
    """As torch does, which itself steps those of a device without kernels."""
    weights = [nn.Parameter(torch.ones(4, device=device)) for device in ("cpu", "meta", "cpu")]
    twins_ = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    for weight in (*weights, *twins_):
        weight.grad = torch.ones_like(weight)
    optimizer, reference = AdamW(weights), AdamW(twins_)
    assert fuse_step(optimizer) is None
    for _ in range(3):
        optimizer.step()
        reference.step()
    for ours, theirs in zip((weights[0], weights[2]), twins_, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    assert optimizer.state[weights[1]]["exp_avg"].device.type == "meta"


@pytest.mark.parametrize("make", [VARIANTS["sgd dampening"], VARIANTS["lars momentum"]])
def test_the_first_step_takes_the_gradient_whole(make):
    """Dampening begins with the second; also after a first that raised, or from a bare state."""
    ours, optimizer, theirs, reference = four = twins(make)
    draw(ours, theirs)
    be_sparse(ours)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert not any(optimizer.state.values())
    step_both(*four, steps=2)
    assert_alike(*four)
    bare = {"state": {}, "param_groups": reference.state_dict()["param_groups"]}
    for loaded in (bare, bare | {"state": {0: {"momentum_buffer": None}}}):
        for each in (optimizer, reference):
            each.load_state_dict(copy.deepcopy(loaded))
        step_both(*four, steps=2)
        assert_alike(*four)


# Bugs of IPEX's fused steps: reference/ipex.md has them by optimizer


@each_optimizer
def test_a_rate_of_0(variant):
    ours, optimizer, _, reference = four = twins(VARIANTS[variant])
    for each in (optimizer, reference):
        for group in each.param_groups:
            group["lr"] = 0.0
    before = [p.detach().clone() for p in ours]
    step_both(*four)
    assert_alike(*four)
    assert all(torch.equal(p, old) for p, old in zip(ours, before, strict=True))


@pytest.mark.parametrize("held", LOW.values(), ids=list(LOW))
def test_the_last_elements_decay_as_the_first(held):
    """Beyond a vector's length, IPEX's Adagrad took the upper half of the weight alone."""
    model = nn.ParameterList([nn.Parameter(torch.full((67,), 1.003))])
    optimizer = Adagrad(model.parameters(), 0.1, weight_decay=0.5)
    attach_master_weights(model, optimizer, model.parameters(), held[0], split=held[1])
    fuse_step(optimizer)
    for _ in range(3):
        model[0].grad = torch.zeros(67, dtype=model[0].grad_dtype)
        optimizer.step()
    shown = model.state_dict()["0"]
    assert torch.equal(shown, shown[:1].expand(67))
    assert shown[0] < 1


@pytest.mark.parametrize("what", ["weights", "gradients", "both"])
@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_norms_of_0(kind, what):
    """The ratio is 1 then, not NaN."""
    results = []
    for fused in (True, False):
        p = nn.Parameter(torch.zeros(5) if what != "gradients" else torch.ones(5))
        optimizer = kind([p], lr=0.1)
        if fused:
            fuse_step(optimizer)
        for _ in range(2):
            p.grad = torch.ones(5) if what == "weights" else torch.zeros(5)
            optimizer.step()
        results.append(p.detach())
    assert results[0].isfinite().all()
    torch.testing.assert_close(*results, **CLOSE)
