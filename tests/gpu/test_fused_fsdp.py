"""Fused steps of what fully_shard made, over NCCL on one GPU and on two: as of whole tensors."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
SIZES = [
    pytest.param(n, marks=pytest.mark.skipif(torch.cuda.device_count() < n, reason=f"needs {n}"))
    for n in (1, 2)
]

COMMON = """
import copy, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from ipex_inductor.optim import FusedStep, Lamb, Lars, fuse_step
from ipex_inductor.optim import plan_replay as again
from ipex_inductor.optim.planning import plan
from ipex_inductor.templates.build import cuda

rank, size = int(sys.argv[1]), int(sys.argv[3])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=size)
launches, launch = [], cuda.Kernel.__call__
cuda.Kernel.__call__ = lambda self, *args: (launches.append(1), launch(self, *args))[1]
mesh = init_device_mesh("cuda", (size,))

def both():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 7)).to(device)
    twin = copy.deepcopy(model).double()
    fully_shard(model, mesh=mesh)
    return model, twin

def backward(model, twin, number):
    x = torch.randn(8, 33, device=device, generator=torch.Generator(device).manual_seed(number))
    for net, each in ((model, x.chunk(size)[rank]), (twin, x.double())):
        net.zero_grad()
        net(each).square().mean().backward()
"""
CLIPPED = """
makes = {
    "counted": lambda params, **o: AdamW(params, 0.01, **(o or {"fused": True})),
    "adamw": lambda params, **o: AdamW(params, 0.01, **o),
    "lamb": lambda params, **o: Lamb(params, 0.01, weight_decay=0.1),
}
for name, make in makes.items():
    model, twin = both()
    step = FusedStep(make(model.parameters()), clip_norm=0.1)
    reference = make(twin.parameters(), foreach=False)
    for number in range(5):
        backward(model, twin, number)
        launches.clear()
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the host does not wait
        step()
        torch.cuda.set_sync_debug_mode("default")
        each = 2 + (name == "lamb")  # scalars, norms of tensors, the step
        assert len(launches) in (each, 2 * each), launches  # for aligned parts, and others
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        torch.testing.assert_close(step.grad_norm.double(), norm, rtol=1e-5, atol=0)
        reference.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        # Gradients are fp32 and summed over two; Adam's first steps are their signs, nearly.
        torch.testing.assert_close(ours.full_tensor().double(), theirs, rtol=1e-4, atol=1e-5)
    assert {float(s["step"]) for s in step.optimizer.state.values()} == {5.0}
dist.destroy_process_group()
"""
# The norms of a shard, one collective, and a step: of parts with and without elements.
NORMS = """
reduced, raw = [], dist.all_reduce
dist.all_reduce = lambda t, *a, **k: (reduced.append(t.numel()), raw(t, *a, **k))[1]
makes = {
    "lamb": lambda params: Lamb(params, 0.01, weight_decay=0.1),
    "lars": lambda params: Lars(params, 0.1, 0.9, weight_decay=0.1, epsilon=1e-3),
    "counted": lambda params: Lamb(params, 0.01, weight_decay=0.1, capturable=True),
}
for name, make in makes.items():
    model, twin = both()
    optimizer, reference = make(model.parameters()), make(twin.parameters())
    assert fuse_step(optimizer) is None
    for number in range(5):
        backward(model, twin, number)
        assert not plan(optimizer, {}).left
        for tensors in (launches, reduced):
            tensors.clear()
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the host does not wait
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        each = 2 + (name == "counted")
        assert len(launches) in (each, 2 * each), launches  # for aligned parts, and others
        assert reduced == [8] * (size > 1), reduced  # two sums of four parameters
        reference.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        # Gradients are fp32 and summed over two; Lamb's first steps are their signs, nearly.
        torch.testing.assert_close(ours.full_tensor().double(), theirs, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""

# A step in a graph, from gradients that stay; steps outside of it, before and between replays. A
# copy, of the same gradients, is stepped without graphs.
GRAPH = """
model, twin = both()
other, _ = both()
rate = torch.tensor(0.01, device=device)
ours, eager = (AdamW(net.parameters(), rate, capturable=True) for net in (model, other))
reference = AdamW(twin.parameters(), lr=0.01, foreach=False)
for optimizer in (ours, eager):
    assert fuse_step(optimizer) is None

def draw(number):
    backward(model, twin, number)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = p.grad.detach().clone()
    return [p.grad.to_local() for p in model.parameters()]

def step(number, run):
    made = draw(number)
    if run == graph.replay:  # which reads those that were there when it was captured
        for there, here in zip(held, made, strict=True):
            there.copy_(here)
    run()
    eager.step()
    reference.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        # One kernel may read vectors where the other does not.
        torch.testing.assert_close(p.to_local(), q.to_local(), rtol=1e-6, atol=1e-7)

graph = torch.cuda.CUDAGraph()
for number in range(2):  # the first begins states, the second plans
    step(number, ours.step)
again.plan = None  # and nobody plans after that
step(2, ours.step)
held = draw(3)
launches.clear()
# Other threads of NCCL's and of autograd's may ask for what a capture must not.
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    ours.step()
assert len(launches) in (2, 4), launches  # as above; a launch for scalars, and the step
for number, run in enumerate((graph.replay, graph.replay, ours.step, graph.replay), 4):
    if number == 5:
        rate.fill_(0.05)
        reference.param_groups[0]["lr"] = 0.05
    step(number, run)
assert {float(state["step"]) for state in ours.state.values()} == {7.0}
for p, exact in zip(model.parameters(), twin.parameters(), strict=True):
    # Gradients are fp32 and summed over two; Adam's first steps are their signs, nearly.
    torch.testing.assert_close(p.full_tensor().double(), exact, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("script", [CLIPPED, NORMS, GRAPH], ids=["clipped", "norms", "graph"])
def test_on_gpus(script, size, tmp_path):
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    command = [sys.executable, "-c", COMMON + script]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), str(size)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "".join(said)[-3000:]
