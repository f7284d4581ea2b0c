"""What surrounds a step and is folded into it: clipping, zeroing, unscaling."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim import FusedStep, attach_master_weights, fuse_step
from support.optim.optimizer_variants import (
    LOW,
    ONE_EACH,
    VARIANTS,
    copies,
    in_groups,
    left,
    single,
)

# One product rounds where torch has two, and the formulas round in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
each_optimizer = pytest.mark.parametrize("variant", ONE_EACH)


def twins(make, **options):
    """Parameters and their step, fused and torch's; one more that no kernel takes."""
    odd = torch.randn(6, 6)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((3,), (5, 7), (0,))]
    theirs = copies(ours)
    for params in (ours, theirs):
        params.append(nn.Parameter(odd.clone()[::2, ::2]))
    optimizer, reference = make(in_groups(ours)), single(make)(in_groups(theirs))
    return ours, FusedStep(optimizer, **options), theirs, reference


def draw(ours, theirs, scale=1.0):
    for p, q in zip(ours, theirs, strict=True):
        drawn = (scale * torch.randn(p.shape)).to(p.dtype)
        p.grad, q.grad = drawn.clone(), drawn.clone()


def assert_alike(ours, theirs, optimizer, reference):
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **CLOSE)
    mine, its = optimizer.state_dict(), reference.state_dict()
    torch.testing.assert_close(mine["state"], its["state"], **CLOSE, check_device=False)


@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e3])
@each_optimizer
@pytest.mark.sampled
def test_as_the_separate_operations(variant, clip_norm, zero_grad):
    ours, step, theirs, reference = twins(
        VARIANTS[variant], clip_norm=clip_norm, zero_grad=zero_grad
    )
    assert step.grad_norm is None
    for number in range(4):
        draw(ours, theirs)
        if number == 2:
            ours[0].grad = theirs[0].grad = None
        before = [p.grad if p.grad is None else p.grad.clone() for p in ours]
        step()
        if clip_norm:
            norm = nn.utils.clip_grad_norm_(theirs, clip_norm)
            torch.testing.assert_close(step.grad_norm, norm, rtol=1e-6, atol=0)
        reference.step()
        for p, grad in zip(ours, before, strict=True):
            assert (p.grad is None) == (grad is None)
            if grad is not None:
                assert torch.equal(p.grad, torch.zeros_like(grad) if zero_grad else grad)
    assert_alike(ours, theirs, step.optimizer, reference)
    assert left(step.optimizer) == {"a parameter with gaps in its memory"}


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@each_optimizer
def test_to_the_bit_where_products_are_exact(variant, dtype):
    """A scale that is a power of two, and a norm that nothing is clipped by: as if nothing was."""
    ours = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((3,), (5, 7), (0,))]
    theirs = copies(ours)
    optimizer, reference = (VARIANTS[variant](in_groups(params)) for params in (ours, theirs))
    step = FusedStep(optimizer, clip_norm=1e6, zero_grad=True)
    assert fuse_step(reference) is None
    for _ in range(4):
        draw(ours, theirs)
        for p in ours:
            p.grad.mul_(1024.0)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
        step()
        reference.step()
        assert not any(p.grad.any() for p in ours)
    # Of Lars' sums of two products g++ may join either with its sum: four steps of an ulp.
    may_join = variant.startswith("lars") and ours[0].device.type == "cpu"
    ulps = {"rtol": 4 * torch.finfo(torch.float32).eps * may_join, "atol": 0}
    torch.testing.assert_close(ours, theirs, **ulps)
    states = (each.state_dict()["state"] for each in (optimizer, reference))
    torch.testing.assert_close(*states, **ulps)


@pytest.mark.parametrize("size", [1.0, 1e-7])
def test_a_clipped_gradient_is_torchs(size):
    """SGD of rate 1 from 0 shows what was taken: a norm is added up in another order, 2 ulp."""
    p = nn.Parameter(torch.zeros(1000))
    step = FusedStep(SGD([p], 1.0), clip_norm=10 * size)
    p.grad = torch.randn(1000) * size
    step()
    nn.utils.clip_grad_norm_(p, 10 * size)
    torch.testing.assert_close(-p.detach(), p.grad, rtol=2**-22, atol=0)


@each_optimizer
def test_the_norm_of_a_step_that_is_left_out(variant):
    """Of the gradients there were, whoever finds that it is left out."""
    params = [nn.Parameter(torch.zeros(3))]
    step = FusedStep(VARIANTS[variant](params), clip_norm=1.0)
    for found in (0.0, 1.0):
        params[0].grad = torch.tensor([3.0, 4.0, float("inf") if found else 0.0])
        step.optimizer.grad_scale, step.optimizer.found_inf = torch.tensor(1.0), torch.tensor(found)
        step()
        assert float(step.grad_norm) == (float("inf") if found else 5.0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_are_clipped_as_torch_does(bad):
    ours, step, theirs, reference = twins(VARIANTS["sgd momentum"], clip_norm=1.0)
    draw(ours, theirs)
    ours[1].grad[0, 0] = theirs[1].grad[0, 0] = bad
    step()
    nn.utils.clip_grad_norm_(theirs, 1.0)
    reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **CLOSE, equal_nan=True)


@pytest.mark.sampled
@pytest.mark.parametrize("held", LOW.values(), ids=list(LOW))
def test_low_precision(held):
    """Gradients are scaled in their own dtype, as torch would: an ulp of it, times the rate."""
    model = nn.Linear(16, 16)
    twin = copy.deepcopy(model)
    optimizer, reference = (AdamW(m.parameters(), 1e-2) for m in (model, twin))
    attach_master_weights(model, optimizer, model.parameters(), held[0], split=held[1])
    step = FusedStep(optimizer, clip_norm=0.1, zero_grad=True)
    for _ in range(4):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape).to(held[0]).to(p.grad_dtype)
            q.grad = p.grad.to(torch.float32, copy=True)
        step()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        reference.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=0, atol=4 * 2**-8 * 1e-2)


def test_norms_beyond_fp16():
    """Scaled gradients come near its largest number, their norm goes beyond."""
    p = nn.Parameter(torch.zeros(64, dtype=torch.float16))
    step = FusedStep(SGD([p], 1.0), clip_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    scaler.scale((p.float() * 1.5).sum()).backward()
    scaler.step(step.optimizer)
    torch.testing.assert_close(step.grad_norm.float(), torch.tensor(12.0))
    torch.testing.assert_close(p.float(), torch.full((64,), -0.125), rtol=2**-10, atol=0)


@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("unscaled", [False, True], ids=["", "unscale_"])
@each_optimizer
def test_grad_scaler(variant, unscaled, clip):
    """Steps with infinities are skipped and not counted; others are those without a scale."""
    ours, step, theirs, reference = twins(VARIANTS[variant], clip_norm=clip, zero_grad=True)
    optimizer = step.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scale = scaler.scale(torch.ones(()))
    for number in range(5):
        draw(ours, theirs)
        for p in ours:
            p.grad *= scale
        if number == 2:
            ours[1].grad[2, 3] = float("inf")
        before = [p.detach().clone() for p in ours]
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in ours)
        if number == 2:
            assert all(torch.equal(p, q) for p, q in zip(ours, before, strict=True))
        else:
            if clip:
                norm = nn.utils.clip_grad_norm_(theirs, clip)
                torch.testing.assert_close(step.grad_norm, norm, rtol=1e-6, atol=0)
            reference.step()
        scaler.update()
        assert scaler.get_scale() == (2.0**10 if number < 2 else 2.0**9)
        scale = scaler.get_scale()
    assert_alike(ours, theirs, optimizer, reference)


def test_copies_have_norms_of_their_own():
    p = nn.Parameter(torch.ones(4))
    step = FusedStep(Adam([p]), clip_norm=1.0)
    again = copy.deepcopy(step)
    again.optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
    again()
    assert again.grad_norm == 2
    assert step.grad_norm is None
    assert torch.equal(p, torch.ones(4))


def test_closures():
    p = nn.Parameter(torch.ones(4))
    step = FusedStep(SGD([p], 0.1), zero_grad=True)

    def closure():
        loss = p.sum()
        loss.backward()
        return loss

    assert [step(closure).item() for _ in range(2)] == pytest.approx([4.0, 3.6])
    assert torch.equal(p.grad, torch.zeros(4))


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_a_norm_to_clip_to_is_positive(norm):
    optimizer = SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(ArgumentError, match="a positive norm"):
        FusedStep(optimizer, clip_norm=norm)
    assert "step" not in vars(optimizer)


def test_what_cannot_be_fused_is_refused():
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ArgumentError, match="no fused step for RMSprop"):
        FusedStep(RMSprop(params))
    elsewhere = SGD([nn.Parameter(torch.ones(2, device="meta"))])
    with pytest.raises(ArgumentError, match="no kernel for meta"):
        FusedStep(elsewhere)
    assert not {"step", "fused", "_original_step"} & {*vars(elsewhere)}
    optimizer = SGD(params)
    optimizer.step = functools.partial(optimizer.step)
    with pytest.raises(ArgumentError, match="a step of its own"):
        FusedStep(optimizer)
    assert fuse_step(SGD(params)) is None


def test_a_shared_gradient_is_not_zero_before_all_have_taken_it():
    ours = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    for p in ours:
        p.grad = torch.ones(4) if p is ours[0] else ours[0].grad
    FusedStep(SGD(ours, 1.0), zero_grad=True)()
    assert all(torch.equal(p, torch.full((4,), -1.0)) for p in ours)
    assert torch.equal(ours[0].grad, torch.zeros(4))


def test_sparse_gradients_are_clipped_as_torch_does():
    """Which has a norm of them since 2.15; before, it raises, and so do we, and nothing changes."""
    ours = [nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    theirs = copy.deepcopy(ours)
    for p, twin in zip(ours, theirs, strict=True):
        p.grad = torch.randn(4, 3) * 5
        twin.grad = p.grad.clone()
    for each in (ours, theirs):
        each[1].grad = each[1].grad.to_sparse()
    before = [(p.detach().clone(), p.grad.clone()) for p in ours]
    step = FusedStep(SGD(ours, 1.0), clip_norm=1.0, zero_grad=True)
    try:
        nn.utils.clip_grad_norm_(theirs, 1.0)
    except (NotImplementedError, RuntimeError) as error:
        with pytest.raises(type(error)):
            step()
        for p, (value, grad) in zip(ours, before, strict=True):
            assert torch.equal(p, value)
            assert torch.equal(p.grad.to_dense(), grad.to_dense())
        return
    SGD(theirs, 1.0).step()
    step()
    for p, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, twin)


@pytest.mark.parametrize("shared", ["whole, one is torch's", "in part"])
def test_gradients_in_one_memory_are_not_zero_too_soon(shared):
    memory = torch.ones(6)
    if shared == "in part":
        a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        a.grad, b.grad = memory[:4], memory[2:]
    else:
        a, b = nn.Parameter(torch.ones(2, 4)[:, ::2]), nn.Parameter(torch.ones(2, 2))
        a.grad = b.grad = torch.ones(2, 2)
    optimizer = SGD([b, a], 0.1)
    FusedStep(optimizer, zero_grad=True)()
    for p in (a, b):
        torch.testing.assert_close(p.detach(), torch.full_like(p, 0.9))
        assert not p.grad.any()


def test_fp64_is_clipped_in_fp64():
    ours, theirs = (nn.Parameter(torch.linspace(-3, 3, 50).double()) for _ in range(2))
    optimizer, reference = SGD([ours], lr=1.0), SGD([theirs], lr=1.0)
    step = FusedStep(optimizer, clip_norm=0.3)
    for p in (ours, theirs):
        p.grad = torch.linspace(1, 2, 50).double()
    step()
    nn.utils.clip_grad_norm_([theirs], 0.3)
    reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)  # some roundings of fp64
