"""Fused steps of what fully_shard made, over NCCL on two GPUs: the same as on one."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANK = """
import copy, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from ipex_inductor.optim import FusedStep
from ipex_inductor.templates import cuda

rank = int(sys.argv[1])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
launches, launch = [], cuda.Kernel.__call__
cuda.Kernel.__call__ = lambda self, *args: (launches.append(1), launch(self, *args))[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 7)).to(device)
twin = copy.deepcopy(model).double()
fully_shard(model, mesh=init_device_mesh("cuda", (2,)))
step = FusedStep(AdamW(model.parameters(), lr=0.01, fused=True), clip_norm=0.1)
reference = AdamW(twin.parameters(), lr=0.01, foreach=False)
for number in range(5):
    x = torch.randn(8, 33, device=device, generator=torch.Generator(device).manual_seed(number))
    for net, each in ((model, x[4 * rank : 4 * rank + 4]), (twin, x.double())):
        net.zero_grad()
        net(each).square().mean().backward()
    launches.clear()
    step()
    assert len(launches) in (2, 4)  # for shards that begin at multiples of 16 bytes, and others
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    torch.testing.assert_close(step.grad_norm.double(), norm, rtol=1e-5, atol=0)
    reference.step()
for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
    # Gradients are fp32 and summed over two; Adam's first steps are their signs, nearly.
    torch.testing.assert_close(ours.full_tensor().double(), theirs, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""


def test_two_gpus(tmp_path):
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(said)[-3000:]
