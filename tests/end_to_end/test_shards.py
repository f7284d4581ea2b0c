"""Tensor-parallel and fully sharded models, two processes on the CPU: right, and never stale."""

import json
import os
import socket
import subprocess
import sys

import pytest

RUN = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ipex_inductor
from ipex_inductor.reporting import decisions

kind, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.w = nn.Parameter(torch.randn(16, 16))
    def forward(self, x):
        return self.down(F.relu(self.up(x))) @ (self.w * 2)

class Gathered(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 16))
    def forward(self, x):
        return x @ all_gather_tensor(self.w * 2, 0, mesh)

torch.manual_seed(0)
model = (Gathered() if kind == "gathered" else Model()).eval()
if kind == "parallel":
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
if kind == "sharded":
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
x = torch.randn(4, 16)
fn = torch.compile(model, backend="ipex", options={"strict": True})

def check():
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fn(x), model(x), rtol=1e-4, atol=1e-4)

check()
for number in range(6):
    with torch.no_grad():
        if kind == "sharded":
            model.reshard()
        for p in model.parameters():
            p.mul_(-1.25)
    check()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
model(x).square().mean().backward()
optimizer.step()
check()
if kind == "parallel":
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    check()
ipex_inductor.refresh(model)
check()
if rank == 0:
    events = [[e.kind, e.reason] for r in decisions.reports() for e in r.events]
    print(json.dumps([ipex_inductor.derived_memory(), events]), flush=True)
dist.barrier()  # who leaves first takes the other's connections along
os._exit(0)  # torch aborts where a thread of gloo's frees its work in an interpreter that ends
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(kind):
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, kind, str(rank), port],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    try:
        outputs = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, error) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, error
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.mark.slow
def test_tensor_parallel_weights_are_left_in_the_graph():
    """A write to a DTensor leaves the version of its shard; what is no DTensor is hoisted."""
    held, events = run("parallel")
    assert held == 4 * 16 * 16
    assert ["hoisted", "1 tensors, 0.0 MiB, of 1 weights"] in events


@pytest.mark.slow
def test_fully_sharded_weights_are_left_in_the_graph():
    held, events = run("sharded")
    assert held == 0
    assert ["missed", "FSDP gathers the weights for each call"] in events


@pytest.mark.slow
def test_collectives_are_never_hoisted():
    held, events = run("gathered")
    assert held == 4 * 8 * 16, "the shard's own work"
    assert ["hoisted", "1 tensors, 0.0 MiB, of 1 weights"] in events
