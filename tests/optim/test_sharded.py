"""Who puts other values in the place of a parameter with a master weight hears of it."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from optimizers import LOW, VARIANTS, device, pair
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim import attach_master_weights

parametrize_low = pytest.mark.parametrize("held", LOW.values(), ids=list(LOW))


def fsdp2(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh(device().type, (1,)))


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process
        return FullyShardedDataParallel(model, device_id=device())


def trained(held):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = SGD(model.parameters(), 0.1)
    attach_master_weights(model, optimizer, model.parameters(), held[0], split=held[1])
    return model, optimizer


def backward(model, held):
    model(torch.randn(4, 8).to(held[0])).float().square().mean().backward()


STEPPED_BY = ("its optimizer", "a new optimizer", "a new optimizer of a copy")


@parametrize_low
@pytest.mark.parametrize("by", STEPPED_BY)
@pytest.mark.parametrize("wrap", [fsdp1, fsdp2, parametrizations.weight_norm])
def test_what_drops_the_masters_is_refused(wrap, by, held, alone):
    """The bits below would be gone: plain low-precision training, and nobody would notice."""
    model, optimizer = trained(held)
    if "copy" in by:
        model = copy.deepcopy(model)
    if wrap is parametrizations.weight_norm:
        wrap(model[0])
    else:
        model = wrap(model)
    if "new" in by:
        optimizer = SGD(model.parameters(), 0.1)
    backward(model, held)
    with pytest.raises(ArgumentError, match=r"Linear whose 'weight' .* FSDP"):
        optimizer.step()
    SGD([nn.Parameter(torch.ones(1))]).step()  # is none of theirs


REPLICAS = """
import sys, torch, torch.distributed as dist
from torch import nn
from ipex_inductor.optim import attach_master_weights

rank, split, store = int(sys.argv[1]), sys.argv[2] == "split", sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(rank)
model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(6, 6))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
attach_master_weights(model, optimizer, model.parameters(), torch.bfloat16, split=split)
started = model.state_dict()
replica = nn.parallel.DistributedDataParallel(model)
for step in range(4):
    for name, value in model.state_dict().items():
        both = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(both, value.contiguous())
        assert torch.equal(*both), (step, name)
        assert rank or step or torch.equal(value, started[name]), "the first process's"
    optimizer.zero_grad()
    replica(torch.randn(2, 3, 8, 8).bfloat16()).float().square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["split", "master"])
def test_replicas_that_start_differently_agree(how, tmp_path):
    """DDP broadcasts parameters, which hold half of the values."""
    command = [sys.executable, "-c", REPLICAS]
    ranks = [
        subprocess.Popen([*command, str(rank), how, str(tmp_path / "store")]) for rank in range(2)
    ]
    assert [process.wait(120) for process in ranks] == [0, 0]


@parametrize_low
def test_a_shard_of_the_same_parameter_is_refused(held):
    """FSDP1 with `use_orig_params=True`: the object stays, its values are cut."""
    model, optimizer = trained(held)
    for stepper in (optimizer, SGD(model.parameters())):
        model[0].weight.data = model[0].weight.data.flatten()[:32]
        with pytest.raises(ArgumentError, match=r"Linear whose 'weight' .* FSDP"):
            stepper.step()


@parametrize_low
def test_what_keeps_the_masters_or_asks_for_ordinary_parameters_is_not(held):
    model, optimizer, *_ = pair(VARIANTS["sgd"], held)
    prune.l1_unstructured(model.up, "weight", 0.5)  # moves the parameter, and computes from it
    model.gain = nn.Parameter(torch.ones((), dtype=held[0]))
    model.load_state_dict({"conv.weight": torch.zeros(4, 3, 3, 3).to(held[0])}, False, assign=True)
    before = model.up.weight_orig.detach().clone()
    model.up.weight_orig.grad = torch.ones(5, 5).to(model.up.weight_orig.grad_dtype)
    optimizer.step()
    SGD([model.gain, model.conv.weight]).step()
    assert not torch.equal(model.up.weight_orig, before)
