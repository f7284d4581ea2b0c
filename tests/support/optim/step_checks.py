"""Fused steps against torch's own and against fp64, however their kernels are made."""

import torch
from torch import nn

from ipex_inductor.optim import attach_master_weights, fuse_step
from support.optim.optimizer_variants import copies, in_groups, left, single, tensors


def check_fp32(make, ours, steps=50):
    """Parameters and state after those steps, against torch in fp32 and fp64."""
    theirs, exact = copies(ours), copies(ours, torch.float64)
    optimizer = make(in_groups(ours))
    references = [single(make)(in_groups(params)) for params in (theirs, exact)]
    assert fuse_step(optimizer) is None
    check((optimizer, *references), (ours, theirs, exact), torch.float32, steps, lambda: ours)


def check(optimizers, params, dtype, steps, shown):
    """All take the same steps; what `shown` gives and the state are as near to fp64 as torch's.

    That is, but for 2 ulp of the largest operand.
    """
    largest = [0.0] * len(params[0])
    for number in range(steps):
        for index, trio in enumerate(zip(*params, strict=True)):
            drawn = torch.randn(trio[0].shape).to(dtype)
            for p in trio:
                p.grad = drawn.to(p.grad_dtype)
            if index == number % 7 + 2:  # some have none
                trio[0].grad = trio[1].grad = trio[2].grad = None
            largest[index] = max(largest[index], *map(greatest, (drawn, trio[2])))
        assert not left(optimizers[0])
        for each in optimizers:
            each.step()
        for index, p in enumerate(params[2]):
            values = [v for name, v in optimizers[2].state[p].items() if name != "step"]
            largest[index] = max(largest[index], 0, *map(greatest, values))
    for index, (*trio, value) in enumerate(zip(*params, shown(), strict=True)):
        states = [of.state[p] for of, p in zip(optimizers, trio, strict=True)]
        assert states[0].keys() == states[1].keys()
        trios = [(value, *trio[1:]), *(tuple(s[name] for s in states) for name in states[0])]
        for one, other, exact in trios:
            error, allowed = (greatest(x.double() - exact) for x in (one, other))
            assert error <= allowed + 2 * torch.finfo(torch.float32).eps * largest[index]


def greatest(x):
    return x.detach().abs().max().item() if x.numel() else 0.0


def check_kept(held, make):
    """What `state_dict` shows, and the state, are as good as fp32 training's."""
    model = nn.ParameterList(tensors())
    ours = list(model)
    theirs, exact = copies(ours), copies(ours, torch.float64)
    optimizer = make(in_groups(ours))
    references = [single(make)(in_groups(params)) for params in (theirs, exact)]
    attach_master_weights(model, optimizer, ours, held[0], split=held[1])
    assert fuse_step(optimizer) is None
    shown = model.state_dict
    check(
        (optimizer, *references), (ours, theirs, exact), held[0], 50, lambda: list(shown().values())
    )
    for p, full in zip(ours, shown().values(), strict=True):
        assert p.dtype == held[0]
        if held[1]:  # cut off
            assert ((full - p.float()).abs() <= 2**-7 * full.abs()).all()
        else:
            assert torch.equal(p, full.to(p.dtype))


def check_alone(dtype, make):
    """Each step rounds to storage once: half an ulp, against fp64 from the same values.

    Further, fp32 rounds in between, and Lamb's second pass reads moments that the first rounded.
    """
    ours = tensors(dtype)
    exact = copies(ours, torch.float64)
    optimizer, reference = make(in_groups(ours)), single(make)(in_groups(exact))
    fuse_step(optimizer)
    info = torch.finfo(dtype)
    for _ in range(20):
        before = copies(ours, torch.float64)
        for p, q in zip(ours, exact, strict=True):
            q.data.copy_(p)
            reference.state[q].update({k: v.double() for k, v in optimizer.state[p].items()})
            # not near 0, or fp16 has no bits left for squares
            p.grad = ((torch.rand(p.shape) + 0.5) * torch.randn(p.shape).sign()).to(dtype)
            q.grad = p.grad.double()
        assert not left(optimizer)
        optimizer.step()
        reference.step()
        for p, q, start in zip(ours, exact, before, strict=True):
            states = optimizer.state[p], reference.state[q]
            assert {v.dtype for k, v in states[0].items() if k != "step"} <= {dtype}
            pairs = [(p, q), *((states[0][name], states[1][name]) for name in states[0])]
            for one, other in pairs:
                half = info.eps / 2 * other.abs() + info.smallest_normal * info.eps
                between = 2**-22 * 1.5 + info.eps * (p.double() - start).abs()
                assert ((one.double() - other).abs() <= half + between).all()


def check_fp64(make):
    """Parameters after ten steps of fp64."""
    ours = tensors(torch.float64)
    theirs = copies(ours)
    optimizer, reference = make(in_groups(ours)), single(make)(in_groups(theirs))
    fuse_step(optimizer)
    for _ in range(10):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        assert not left(optimizer)
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)  # ten steps' roundings
