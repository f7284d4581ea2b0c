"""What each process of test_fsdp runs: low-precision weights under fully_shard, and fp32 twins."""

import copy
import faulthandler
import gc
import itertools
import os
import sys
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import SGD, AdamW, RMSprop, lr_scheduler

from ipex_inductor.errors import ArgumentError, DeviceError
from ipex_inductor.optim import FusedStep, Lamb, Lars, attach_master_weights, fuse_step
from ipex_inductor.optim.launching import launch_groups_cpu
from ipex_inductor.optim.weights import TABLE
from ipex_inductor.templates.build.cpp import NotBuiltError
from support.case_sampling import covering
from support.optim.optimizer_variants import LOW, ONE_EACH, VARIANTS, left

# Norms over shards add up in another order, and torch's fused Adam rounds the last few elements of
# a tensor otherwise. A few roundings each step, of weights of about 1.
SUMMED = {"rtol": 1e-5, "atol": 1e-7}
REORDERED = {"rtol": 1e-5, "atol": 1e-6}  # so do fused steps, each of them
EXACT = {"rtol": 0, "atol": 0}
FULL = StateDictOptions(full_state_dict=True)
FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Net(nn.Module):
    """Tied weights, a parameter of the root, norms in fp32, sizes that 2 and 3 do not divide."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 11), nn.ReLU(), nn.Linear(11, 5)) for _ in range(2)
        )
        self.norm, self.gate = nn.LayerNorm(5), nn.Linear(5, 1)
        self.shift, self.aside = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x, blocks=2):
        h = self.embed(x) + self.shift
        for block in self.blocks[:blocks]:
            h = block(h) * self.aside
        h = self.norm(h.float()).to(h.dtype)
        return self.head(h * self.gate(h).tanh()).float()


def shard(model, mesh=None, ignored=True, **kwargs):
    """Blocks, norms (FSDP wants one dtype in a group), then the rest but for one parameter."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard([model.norm], mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, ignored_params={model.aside} if ignored else None, **kwargs)


def attached(make, held, seed=0):
    torch.manual_seed(seed)
    model = Net()
    twin = copy.deepcopy(model)
    optimizer, reference = make(model.parameters()), make(twin.parameters())
    low = [p for name, p in model.named_parameters() if not name.startswith("norm")]
    attach_master_weights(model, optimizer, low, held[0], split=held[1])
    return model, optimizer, twin, reference


def sharded(make, held, seed=0, **kwargs):
    both = attached(make, held, seed)
    shard(both[0], **kwargs)
    return both


def backward(model, step=0, blocks=2):
    """Each process has inputs of its own."""
    torch.manual_seed(10 * step + dist.get_rank())
    model(torch.randint(7, (4,)), blocks).square().mean().backward()
    if not isinstance(model.aside, DTensor):
        dist.all_reduce(model.aside.grad)  # FSDP leaves it to others


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hand_over_gradients(model, twin):
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = None if p.grad is None else whole(p.grad).float()


def train(model, optimizer, twin, reference, steps=3):
    for step in range(steps):
        backward(model, step, blocks=1 + step % 2)
        hand_over_gradients(model, twin)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()


def assert_same(model, twin, close=EXACT):
    ours, theirs = model.state_dict(), twin.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert isinstance(ours[name], DTensor) or name == "aside"
        torch.testing.assert_close(whole(ours[name]), value, **close, msg=lambda m, n=name: n + m)


def assert_same_state(optimizer, reference, close=EXACT):
    ours, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for key, own in theirs.items():
        for name, value in own.items():
            torch.testing.assert_close(whole(ours[key][name]), value, **close)


LACKING = {"sgd torch-fused", "adagrad torch-fused"}  # in torch, for DTensors
SHARDED = [name for name in VARIANTS if name not in LACKING]
# One of each kind, and all that torch steps in another way; what a flag changes needs no shards.
FORMS = ("foreach", "torch-fused", "tensor lr")
CHOSEN = [name for name in SHARDED if name in ONE_EACH or name.endswith(FORMS)]


def check_variants(held, names):
    """Optimizers, to the bit where they add nothing up."""
    for name in names:
        close = SUMMED if name.startswith(("lamb", "lars")) or "adam torch" in name else EXACT
        several = name.endswith(("foreach", "torch-fused"))  # which torch wants all sharded
        run = sharded(VARIANTS[name], held, ignored=not several)
        train(*run)
        try:
            assert_same(run[0], run[2], close)
            assert_same_state(run[1], run[3], close)
        except AssertionError as error:
            raise AssertionError(name) from error


def split_trains():
    check_variants(LOW["bf16 split"], CHOSEN[::2])


def masters_train():
    check_variants(LOW["bf16 master"], CHOSEN[1::2])


def others_train():
    """What these two leave."""
    check_variants(LOW["bf16 split"], [name for name in SHARDED if name not in CHOSEN[::2]])
    check_variants(LOW["bf16 master"], [name for name in SHARDED if name not in CHOSEN[1::2]])


def halves_train():
    """fp16 gets fp32 gradients, also where FSDP brings fp16."""
    for name in ONE_EACH[:4]:
        run = sharded(VARIANTS[name], LOW["fp16 master"])
        train(*run)
        assert_same(run[0], run[2])
    backward(run[0])
    assert {p.grad.dtype for p in run[0].parameters()} == {torch.float32}
    run[1].step()


def other_optimizers_train():
    """Whole, all parameters at a time."""
    run = sharded(RMSprop, LOW["bf16 master"])
    train(*run)
    assert_same(run[0], run[2])


def uneven_shards():
    """Some of them empty."""
    for name in ONE_EACH:
        run = sharded(VARIANTS[name], LOW["bf16 split" if "a" in name else "bf16 master"])
        train(*run)
        assert_same(run[0], run[2], SUMMED if name.startswith(("lamb", "lars")) else EXACT)


def on_meshes_of_any_kind():
    """Replicated as well, and cut along other dimensions."""
    size = dist.get_world_size()
    for shape in ((1, size), (size, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        run = sharded(AdamW, LOW["bf16 split"], mesh=mesh)
        train(*run)
        assert_same(run[0], run[2])
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    twin = copy.deepcopy(model)
    optimizer, reference = AdamW(model.parameters()), AdamW(twin.parameters())
    attach_master_weights(model, optimizer, model.parameters(), torch.bfloat16, split=True)
    fully_shard(model, shard_placement_fn=lambda _: Shard(1))
    model(torch.ones(2, 4).bfloat16()).square().sum().backward()
    hand_over_gradients(model, twin)
    optimizer.step()
    reference.step()
    assert_same(model, twin)


HELD = (None, *LOW.values())
# Each way with an optimizer, those that have norms among them; kernels take seconds to compile.
# What is held in fp32 alone clips below.
FUSED = [*zip(LOW.values(), ONE_EACH[-len(LOW) :], strict=True)]


def fused():
    check_fused(FUSED)


def fused_otherwise():
    check_fused([way for way in itertools.product(HELD, ONE_EACH) if way not in FUSED])


def check_fused(ways):
    """Kernels step the local shards, and count versions; norms are those of all."""
    for held, variant in ways:
        model, optimizer, twin, reference = (
            sharded(VARIANTS[variant], held) if held else sharded_in_fp32(VARIANTS[variant])
        )
        assert fuse_step(optimizer) is None
        for step in range(3):
            backward(model, step, blocks=1 + step % 2)
            hand_over_gradients(model, twin)
            optimizer.step()
            assert not left(optimizer), (variant, held)
            reference.step()
            optimizer.zero_grad()
        try:
            assert_same(model, twin, REORDERED)
            assert_same_state(optimizer, reference, REORDERED)
        except AssertionError as error:
            raise AssertionError(variant, held) from error


def sharded_in_fp32(make):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    shard(model)
    return model, make(model.parameters()), twin, make(twin.parameters())


def fused_clip():
    """The norm is that of all processes' shards."""
    for make in (partial(SGD, lr=0.1), partial(Lamb, lr=0.1, weight_decay=0.1)):
        model, _, twin, _ = sharded_in_fp32(make)
        optimizer = make([p for p in model.parameters() if isinstance(p, DTensor)])
        its = [q for name, q in twin.named_parameters() if name != "aside"]
        reference = make(its)
        step = FusedStep(optimizer, clip_norm=0.01, zero_grad=True)
        for number in range(3):
            backward(model, number)
            hand_over_gradients(model, twin)
            assert not left(optimizer)
            with reduced() as seen:
                step()
            assert seen.count(2) == 1, seen  # beside those of tensors' norms
            assert len(seen) <= 2 + (number == 0), seen
            norm = nn.utils.clip_grad_norm_(its, 0.01)
            torch.testing.assert_close(step.grad_norm, norm, **REORDERED)
            reference.step()
            assert not any(p.grad.to_local().any() for p in optimizer.param_groups[0]["params"])
        assert_same(model, twin, REORDERED)


@contextmanager
def reduced():
    """The all-reduces that begin here, by how many numbers they are of."""
    seen, raw = [], dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **k: (seen.append(tensor.numel()), raw(tensor, *a, **k))[1]
    try:
        yield seen
    finally:
        dist.all_reduce = raw


def norms_of_shards():
    """One collective in each step but the first, for parts of every size, none among them."""
    shapes = [(), (1,), (0, 3), (dist.get_world_size() + 1, 3), (64, 300)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for variant, dtype in itertools.product(("lamb decay", "lars momentum"), (32, 64)):
        torch.manual_seed(0)
        dtype = getattr(torch, f"float{dtype}")
        whole_ones = [torch.randn(shape, dtype=dtype) for shape in shapes]
        theirs = [nn.Parameter(t.double().clone()) for t in whole_ones]
        places = [[Replicate() if not t.dim() else Shard(0)] for t in whole_ones]
        cut_ones = zip(whole_ones, places, strict=True)
        ours = [nn.Parameter(distribute_tensor(t, mesh, place)) for t, place in cut_ones]
        optimizer, reference = VARIANTS[variant](ours), VARIANTS[variant](theirs)
        fuse_step(optimizer)
        for number in range(4):
            for p, q, place in zip(ours, theirs, places, strict=True):
                grad = torch.randn(q.shape, dtype=dtype)
                here = number % 3 != 2 or q.dim() != 1  # sometimes one has none, everywhere
                p.grad = distribute_tensor(grad, mesh, place) if here else None
                q.grad = grad.double() if here else None
            with reduced() as seen:
                optimizer.step()
            assert seen == [1] * (number == 0) + [2 * len(shapes)], seen
            reference.step()
            assert not left(optimizer)
        eps = torch.finfo(dtype).eps  # a few roundings a step, of values of about 1
        for p, q in zip(ours, theirs, strict=True):
            close = {"rtol": 16 * eps, "atol": 16 * eps}
            torch.testing.assert_close(p.full_tensor().double(), q.data, **close)
            for name, value in reference.state[q].items():
                mine = whole(optimizer.state[p][name]).double()
                torch.testing.assert_close(mine, value.double(), **close)


def norms_on_meshes():
    """What several processes have counts once: they are to agree to the last bit."""
    size = dist.get_world_size()
    for shape, dims in (((1, size), 1), ((size, 1), 1), ((2, size // 2), 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        placements = [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Replicate())]
        torch.manual_seed(0)
        given = [torch.randn(6, 4) for _ in placements]
        ours = [
            nn.Parameter(distribute_tensor(t, mesh, place))
            for t, place in zip(given, placements, strict=True)
        ]
        theirs = [nn.Parameter(t.double()) for t in given]
        make = partial(Lars, lr=0.1, eeta=1.0, epsilon=2.0)  # in which both norms do not cancel
        optimizer, reference = make(ours), make(theirs)
        fuse_step(optimizer)
        for number in range(3):
            for p, q, place in zip(ours, theirs, placements, strict=True):
                grad = torch.randn(6, 4)
                p.grad, q.grad = distribute_tensor(grad, mesh, place), grad.double()
            with reduced() as seen:
                optimizer.step()
            assert len(seen) == dims * (1 + (number == 0)), seen
            reference.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.full_tensor().double(), q.data, **REORDERED)


def clipped_on_meshes():
    """One collective for each dimension that cuts anything; what several have counts once."""
    size = dist.get_world_size()
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float32]
    for shape, dims in (((1, size), 1), ((size, 1), 1), ((2, size // 2), 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        cuts = [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Replicate()), None]
        torch.manual_seed(0)
        ours, grads = [], []
        for cut, dtype in zip(cuts, kinds, strict=True):
            start, grad = torch.randn(5, 4).to(dtype), torch.randn(5, 4).mul(300).to(dtype)
            p = nn.Parameter(distribute_tensor(start, mesh, cut) if cut else start)
            p.grad = distribute_tensor(grad, mesh, cut) if cut else grad
            ours.append(p)
            grads.append(grad.double())
        step = FusedStep(SGD(ours, lr=0.1), clip_norm=0.5)
        with reduced() as seen:
            step()
        assert seen == [2] * dims, seen
        wanted = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads]))
        # Each tensor's 20 squares are added up in fp32, all else in fp64.
        torch.testing.assert_close(step.grad_norm.double(), wanted, rtol=1e-6, atol=0)
        assert step.grad_norm.dtype is torch.float32
        if dist.get_rank() == 0:
            ours[0].grad = None
        step()
        assert step.grad_norm.isnan(), "one process lacks a gradient"
        clip = FusedStep(SGD(ours[-1:], lr=0.1), clip_norm=0.5)
        with reduced() as seen:
            clip()
        assert not seen
        torch.testing.assert_close(clip.grad_norm.double(), grads[-1].norm(), rtol=1e-6, atol=0)


def norms_that_one_process_cannot_take():
    """All leave them to torch if one has to in its first step; later it has to say so."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    start, grad = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(1, 2, 12).view(4, 3)

    def made():
        p = nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
        q = nn.Parameter(start.clone())
        p.grad, q.grad = distribute_tensor(grad, mesh, [Shard(0)]), grad
        optimizer, reference = Lamb([p], 0.1), Lamb([q], 0.1)
        fuse_step(optimizer)
        return p, optimizer, q, reference

    p, optimizer, q, reference = made()
    lacking = mock.patch.object(
        launch_groups_cpu, "library", side_effect=NotBuiltError("no compiler")
    )
    with lacking if rank == 0 else nullcontext():
        optimizer.step()
    optimizer.step()
    assert left(optimizer) == {"norms of whole tensors, of which other processes hold parts"}
    for _ in range(2):
        reference.step()
    torch.testing.assert_close(p.full_tensor(), q.data, **SUMMED)

    p, optimizer, *_ = made()
    optimizer.step()
    if rank == 0:
        own, before = optimizer.state[p], p.to_local().clone()
        turned = own["exp_avg"].to_local().T.contiguous().T
        own["exp_avg"] = DTensor.from_local(turned, mesh, [Shard(0)])
        with pytest.raises(DeviceError, match="a state 'exp_avg' of another layout"):
            optimizer.step()
        assert torch.equal(p.to_local(), before)


def gradients_that_one_process_lacks():
    """A norm without its part would be wrong: it is none, and nobody waits for ever."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = Lars(params, 1.0)
    fuse_step(optimizer)
    for p in params:
        p.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    if dist.get_rank() == 0:
        params[0].grad = None
    optimizer.step()
    first, second = (p.to_local() for p in params)
    assert first.eq(1).all() if dist.get_rank() == 0 else first.isnan().all()
    assert torch.equal(second, torch.full_like(second, 1 - 1e-3))
    for p in params:
        p.grad = None if dist.get_rank() == 0 else p.grad
    optimizer.step()
    assert second.isnan().all() == (dist.get_rank() != 0)


def distributed_otherwise():
    """A sum that is not added up yet, or parts of gradients, are no gradient of what is here."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole_grad = torch.arange(4.0)
    given = {
        Partial(): whole_grad / 2,
        Replicate(): whole_grad,
        Shard(0): whole_grad.chunk(2)[dist.get_rank()],
    }
    trusted = 1 - 0.1 * 2 / whole_grad.norm() * whole_grad  # of Lars: 2 is the norm of ones
    makes = {partial(SGD, lr=1.0): 1 - whole_grad, partial(Lars, lr=0.1, eeta=1.0): trusted}
    for make, own, other in itertools.product(makes, (Replicate(), Shard(0)), given):
        p = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [own]))
        optimizer = make([p])
        fuse_step(optimizer)
        p.grad = DTensor.from_local(given[other], mesh, [other])
        optimizer.step()
        torch.testing.assert_close(p.full_tensor(), makes[make], **REORDERED)


def parts_of_what_each_had():
    """Nothing is sent: processes that start differently have shards of different models."""
    for held in LOW.values():
        model, _, twin, _ = sharded(AdamW, held, seed=dist.get_rank())
        rank, size = dist.get_rank(), dist.get_world_size()
        for name, value in twin.state_dict().items():
            mine = model.state_dict()[name]
            if name != "aside":
                parts = value.chunk(size)
                mine, value = mine.to_local(), parts[rank] if rank < len(parts) else value[:0]
            assert torch.equal(mine, value), name


def in_any_order():
    """Whatever comes first after fully_shard; whatever FSDP has gathered then."""
    check_orders(ORDERS[at] for at in covering(ORDERS))


def in_every_order():
    """Each with each."""
    check_orders(ORDERS)


def check_orders(orders):
    for first, after in orders:
        run = attached(AdamW, LOW["bf16 split"])
        if after is not None:
            train_whole(*run)
        shard(run[0], **({} if after is None else {"reshard_after_forward": after}))
        if first is not None:
            first(*run)
        train(*run, steps=2)
        assert_same(run[0], run[2])
        assert_same_state(run[1], run[3])


def train_whole(model, optimizer, twin, reference):
    """A step before there are shards, so that there is state to cut."""
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    reference.step()
    optimizer.zero_grad()


def zero_grad_first(model, optimizer, *_):
    optimizer.zero_grad()
    assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())


def zero_grad_between(model, optimizer, *_):
    """What was gathered for backward is put back, and gathered again."""
    loss = model(torch.randint(7, (4,))).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def step_gathered(model, optimizer, twin, reference):
    """The shards are nowhere to be seen."""
    model.set_reshard_after_backward(False)
    backward(model)
    optimizer.step()
    model.set_reshard_after_backward(True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    hand_over_gradients(model, twin)
    reference.step()
    optimizer.zero_grad()


ORDERS = [
    *itertools.product(
        (None, zero_grad_first, zero_grad_between, step_gathered), (None, True, False)
    )
]


def mixed_precision():
    """Gradients come in the parameter's dtype, whatever they were added up in."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for held in (LOW["bf16 split"], LOW["bf16 master"]):
        run = sharded(AdamW, held, mp_policy=policy)
        train(*run)
        assert_same(run[0], run[2])


def clipped_and_scheduled():
    model, optimizer, twin, reference = sharded(VARIANTS["sgd momentum"], LOW["bf16 split"])
    schedules = [lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, reference)]
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        hand_over_gradients(model, twin)
        norm = nn.utils.clip_grad_norm_(
            [p for p in model.parameters() if isinstance(p, DTensor)], 0.01
        )
        theirs = [q for name, q in twin.named_parameters() if name != "aside"]
        wanted = nn.utils.get_total_norm([q.grad for q in theirs])
        torch.testing.assert_close(whole(norm), wanted, rtol=1e-2, atol=0)  # squares in bf16
        hand_over_gradients(model, twin)
        for each in (optimizer, reference, *schedules):
            each.step()
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"] < 0.1
    assert_same(model, twin)


def scaled():
    """A step is left out in all processes if one of them has an infinity."""
    model, optimizer, twin, reference = sharded(AdamW, LOW["fp16 master"], ignored=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step + dist.get_rank())
        loss = model(torch.randint(7, (4,))).square().mean()
        bad = float("inf") if step == 1 and dist.get_rank() == 0 else 1.0
        scaler.scale(loss * bad).backward()
        scaler.unscale_(optimizer)
        hand_over_gradients(model, twin)
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            reference.step()
    assert scaler.get_scale() == 2.0
    assert_same(model, twin)


def state_dicts():
    """fp32 both ways, through torch's functions."""
    for make, held, ignored in (
        (AdamW, LOW["bf16 split"], False),
        (VARIANTS["sgd momentum"], LOW["bf16 master"], True),
    ):
        model, optimizer, twin, reference = run = sharded(make, held, ignored=ignored)
        train(*run)
        shown = model.state_dict()
        before = {name: whole(value).clone() for name, value in shown.items()}
        weights = get_model_state_dict(model, options=FULL)
        moments = get_optimizer_state_dict(model, optimizer, options=FULL)
        for name, value in twin.state_dict().items():
            assert torch.equal(weights[name], value), name
        for name, q in twin.named_parameters():
            for key, value in reference.state[q].items():
                assert torch.equal(moments["state"][name][key], value), (name, key)

        fresh = sharded(make, held, seed=1, ignored=ignored)
        set_optimizer_state_dict(fresh[0], fresh[1], moments, options=FULL)
        given = {} if dist.get_rank() else dict(weights)
        with pytest.raises(ArgumentError, match="broadcast_from_rank0"):
            set_model_state_dict(fresh[0], given, options=FIRST)
        set_model_state_dict(fresh[0], dict(weights), options=FULL)
        assert_same(fresh[0], twin)
        train(fresh[0], fresh[1], twin, reference)
        assert_same(fresh[0], twin)
        assert_same_state(fresh[1], reference)
        for name, value in shown.items():  # copies, that steps leave alone
            assert torch.equal(whole(value), before[name])

        with torch.no_grad():
            model(torch.randint(7, (4,)))  # leaves the root gathered
        model.load_state_dict(fresh[0].state_dict())
        assert_same(model, twin)


def resumed_at_once():
    """Before anything else is done to the shards."""
    model, optimizer, twin, reference = run = sharded(AdamW, LOW["bf16 split"])
    train(*run)
    replicated = {
        name: value.redistribute(placements=[Replicate()]) if name != "aside" else value
        for name, value in model.state_dict().items()
    }
    for held, weights in itertools.product(LOW.values(), (model.state_dict(), replicated)):
        fresh, its_optimizer, *_ = sharded(AdamW, held, seed=1)
        fresh.load_state_dict(weights)
        assert_same(fresh, twin)
        fresh, its_optimizer, *_ = sharded(AdamW, held, seed=1)
        its_optimizer.load_state_dict(optimizer.state_dict())
        assert_same_state(its_optimizer, reference)
    fresh, its_optimizer, *others = sharded(VARIANTS["adagrad start"], LOW["bf16 split"])
    shards = [own["sum"] for own in its_optimizer.state_dict()["state"].values()]
    assert sum(isinstance(shard, DTensor) for shard in shards) == len(shards) - 1
    assert_same_state(its_optimizer, others[1])


def checkpoints(folder):
    """Sharded ones, and with steps that follow."""
    model, optimizer, twin, reference = run = sharded(AdamW, LOW["bf16 split"])
    train(*run)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    fresh = sharded(AdamW, LOW["bf16 master"], seed=1)
    weights, moments = get_state_dict(*fresh[:2])
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(*fresh[:2], model_state_dict=weights, optim_state_dict=moments)
    train(fresh[0], fresh[1], twin, reference)
    assert_same(fresh[0], twin)
    assert_same_state(fresh[1], reference)


def moved():
    """`Module.to` swaps a DTensor for another, and what it carried with it."""
    for held in LOW.values():
        run = sharded(AdamW, held)
        train(*run)
        run[0].to("cpu")
        train(*run)
        assert_same(run[0], run[2])
        with pytest.raises(ArgumentError, match="keep the one that came back"):
            AdamW([p for p in run[0].parameters() if p is not run[0].aside]).step()
        backward(run[0])
        wanted = {torch.float32} if held[0] == torch.float16 else {held[0], torch.float32}
        assert {p.grad.dtype for p in run[0].parameters()} == wanted


def memory():
    """Whole parameters and rests go at the first call of the optimizer."""
    for held in LOW.values():
        model, optimizer, *_ = attached(AdamW, held)
        weights = {w for p, w in vars(optimizer)[TABLE].items() if p is not model.aside}
        wholes = [weakref.ref(p) for p in model.parameters() if p is not model.aside]
        wholes += [weakref.ref(weight.rest) for weight in weights]
        shard(model)
        optimizer.zero_grad()
        gc.collect()
        assert [ref() for ref in wholes] == [None] * len(wholes)
        for weight in weights:
            part = weight.param.to_local()
            assert weight.rest.shape == part.shape
            assert weight.rest.untyped_storage().nbytes() == weight.rest.nbytes


def check_all(rank, size, folder, *names):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    for name in names:
        faulthandler.dump_traceback_later(120, exit=True)  # rather than wait for each other
        check = globals()[name]
        print(name, flush=True)
        check(Path(folder, "saved")) if check is checkpoints else check()
    dist.barrier()  # who leaves first takes the others' connections along
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch 2.11 may abort where threads of a checkpoint end with the process


def main(size, folder, *names):
    """Processes that begin after all imports, which cost seconds, and share nothing."""
    ranks = []
    for rank in range(int(size)):
        ranks.append(os.fork())
        if not ranks[-1]:
            check_all(rank, int(size), folder, *names)
    ended = [os.waitpid(rank, 0)[1] for rank in ranks]
    sys.exit(any(ended))


if __name__ == "__main__":
    main(*sys.argv[1:])
