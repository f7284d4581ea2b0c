"""Who puts other values in the place of a parameter with a master weight hears of it."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, Adafactor

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim import attach_master_weights, cast_for_inference
from support.optim.optimizer_variants import LOW, VARIANTS, device, pair

parametrize_low = pytest.mark.parametrize("held", LOW.values(), ids=list(LOW))


def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device().type, (1,))


def fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh())


def in_parallel(model):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(model, mesh(), {"0": ColwiseParallel()})


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


def step(model, optimizer, held):
    backward(model, held)
    optimizer.step()


STEPPED_BY = ("its optimizer", "a new optimizer", "a new optimizer of a copy")


@parametrize_low
@pytest.mark.parametrize("by", STEPPED_BY)
@pytest.mark.parametrize("wrap", [fsdp1, in_parallel, parametrizations.weight_norm])
@pytest.mark.sampled
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
    with pytest.raises(ArgumentError, match=r"Linear whose 'weight' .* fully_shard"):
        optimizer.step()
    SGD([nn.Parameter(torch.ones(1))]).step()  # is none of theirs


@parametrize_low
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.sampled
def test_a_new_optimizer_of_shards_must_be_told(known, held, alone):
    """torch would have it made after fully_shard; the one there was goes on."""
    model, optimizer = trained(held)
    fsdp2(model)
    if known:
        optimizer.zero_grad()
    new = SGD(model.parameters(), 0.1)
    backward(model, held)
    with pytest.raises(ArgumentError, match="keep the one that came back"):
        new.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attach_master_weights(model, new, model.parameters(), held[0], split=held[1])
    new.step()
    for name, param in model.named_parameters():
        wanted = before[name] - 0.1 * param.grad.float()
        torch.testing.assert_close(model.state_dict()[name].full_tensor(), wanted.full_tensor())


def test_shards_are_not_attached_anew(alone):
    """To hold them otherwise would take a cast, and FSDP knows their dtype."""
    model, optimizer = trained(LOW["bf16 split"])
    fsdp2(model)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="not sharded yet, or are held as Master"):
            attach_master_weights(model, optimizer, model.parameters(), torch.bfloat16, split=False)
    plain = fsdp2(nn.Linear(8, 8))
    with pytest.raises(ArgumentError, match="then call fully_shard"):
        attach_master_weights(
            plain, SGD(plain.parameters()), plain.parameters(), torch.bfloat16, split=True
        )


@parametrize_low
def test_a_copy_is_sharded_by_itself(held, alone):
    model, optimizer = trained(held)
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    fsdp2(copied)
    shown = model.state_dict()
    for each, steps in ((copied, its_optimizer), (model, optimizer)):
        torch.manual_seed(0)
        backward(each, held)
        steps.step()
    for name, value in model.state_dict().items():
        assert not torch.equal(value, shown[name])
        assert torch.equal(value, copied.state_dict()[name].full_tensor())


def test_what_cannot_be_cut_alike_is_refused(alone):
    """Adafactor keeps rows and columns."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = Adafactor(model.parameters())
    attach_master_weights(model, optimizer, model.parameters(), torch.bfloat16, split=False)
    backward(model, LOW["bf16 master"])
    optimizer.step()
    fsdp2(model)
    backward(model, LOW["bf16 master"])
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"shape \(8, 1\).* before the first step"):
            optimizer.step()


@parametrize_low
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.sampled
def test_tied_modules_that_are_sharded_apart_are_refused(both, held, alone):
    """They would be tied no longer, and the optimizer would step one."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    optimizer = SGD(model.parameters(), 0.1)
    attach_master_weights(model, optimizer, model.parameters(), held[0], split=held[1])
    fsdp2(model[0])
    if both:
        fsdp2(model)
    # torch 2.13 says so itself if both are sharded.
    said = r"Linear whose 'weight' .* tied modules|shared/tied parameters"
    with pytest.raises((ArgumentError, ValueError), match=said):
        step(model, optimizer, held)


@parametrize_low
def test_whole_tensors_are_not_loaded_into_shards(held, alone):
    """torch says so, and nothing was stored."""
    model, _ = trained(held)
    ones = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    before = model.state_dict()
    fsdp2(model)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        model.load_state_dict(ones)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), before[name])


def test_inference_models_show_what_they_had(alone):
    """Shards of what was cast for inference alone."""
    model = nn.Sequential(nn.Linear(8, 8))
    cast_for_inference(model, model.parameters(), torch.bfloat16)
    before = model.state_dict()
    fsdp2(model)
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value.full_tensor(), before[name])


REPLICAS = """
import os, sys, torch, torch.distributed as dist
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
dist.barrier()  # who leaves first takes the other's connections along
os._exit(0)  # torch aborts where a thread of gloo's frees its work in an interpreter that ends
"""


# Split is the harder of both: half of each value is not in the parameter that is broadcast.
@pytest.mark.parametrize("how", ["split", pytest.param("master", marks=pytest.mark.slow)])
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
        with pytest.raises(ArgumentError, match=r"Linear whose 'weight' .* fully_shard"):
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
