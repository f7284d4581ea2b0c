"""Two processes that see half of each batch have the scales of one that sees all of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ipex_inductor.quantization.fp8 import DelayedScaling, fp8_autocast, prepare_fp8

ROOT = Path(__file__).parents[3]
WAYS = ("world", "group", "ddp", "fsdp", "compiled", "inside", "alone")
RANK = """
import os, runpy, sys, torch, torch.distributed as dist

file, rank, store, out = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
test = runpy.run_path(file)
torch.save({how: test["train"](how, rank) for how in test["WAYS"]}, out)
dist.barrier()  # who leaves first takes the other's connections along
os._exit(0)  # torch aborts where a thread of gloo's frees its work in an interpreter that ends
"""


def build():
    torch.manual_seed(0)
    return prepare_fp8(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))


def batches():
    """Two halves each; the largest value is now in the first, now in the second."""
    generator = torch.Generator().manual_seed(2)
    for number in range(8):
        x = torch.randn(2, 3, 4, generator=generator)
        x[number % 2] *= 4
        if number == 3:
            x[1, 0, 0] = float("nan")  # of one process alone
        yield x


def train(how, rank=None):
    """States after some steps: of a half of each batch, or of both if rank is None."""
    model = build()
    recipe = DelayedScaling(amax_history_len=3, reduce_amax=how != "alone")
    group = None
    if how == "group":
        group = torch.distributed.new_group([0, 1])
    call = model
    if how == "ddp":
        call = nn.parallel.DistributedDataParallel(model)
    if how == "fsdp":
        call = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if how == "compiled":
        call = torch.compile(model, backend="aot_eager", fullgraph=True)

    def run(x):
        with fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group):
            return call(x)

    if how == "inside":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    for x in batches():
        y = run(x.flatten(0, 1) if rank is None else x[rank])
        y.backward(torch.ones_like(y))
        model.zero_grad()
    state = model[0].fp8_scaling
    return state.forward_state, state.gradient_state


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """States of both processes by the way they were trained."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    outs = [folder / f"states.{number}" for number in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, __file__, str(number), str(folder / "store"), str(out)],
            env=environment,
        )
        for number, out in enumerate(outs)
    ]
    assert [process.wait(300) for process in processes] == [0, 0]
    return [torch.load(out) for out in outs]


@pytest.mark.parametrize("how", [way for way in WAYS if way != "alone"])
def test_two_processes_equal_one(how, ranks):
    """Bit for bit: sums of 4 and 8 products of 4 bits each round alike in any order."""
    want = train("one")
    for states in ranks:
        for got, expected in zip(states[how], want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_processes_that_do_not_reduce_have_scales_of_their_own(ranks):
    first, second = (states["alone"][0][3:].nan_to_num() for states in ranks)
    assert not torch.equal(first, second)
