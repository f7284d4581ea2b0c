"""Optimizer steps by kernels on a GPU: torch's values, few launches, in graphs too."""

import copy
import fcntl
import gc
import itertools
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from ipex_inductor.optim import FusedStep, Lamb, Lars, attach_master_weights, fuse_step
from ipex_inductor.optim.weights import TABLE
from support.optim import optimizer_variants
from support.optim.gpu_step_inputs import (
    CAPTURED,
    MADE,
    TOLERANCE,
    TURN,
    close,
    doubles,
    draw,
    tensors,
    wide_grads,
)
from support.optim.step_checks import check_fp32

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("name", "counted"),
    [*((n, "host") for n in MADE), *((n, "fused") for n in MADE if "lars" not in n)],
)
def test_values_are_torchs(name, dtype, counted, launches):
    mine = tensors(dtype)
    exact = doubles(mine)
    ours = MADE[name](mine, fused=True) if counted == "fused" else MADE[name](mine)
    theirs = MADE[name](exact, foreach=False)
    assert fuse_step(ours) is None
    for number in range(6):
        draw(mine, seed=number)
        wide_grads(mine, exact)
        versions = [p._version for p in mine]
        launches.clear()
        ours.step()
        theirs.step()
        assert all(p._version > v for p, v in zip(mine, versions, strict=True))
        # The tensors of each dtype, flags and alignment: (), (0,) and the rest are aligned alike.
        scalars = counted == "fused" and "sgd" not in name
        assert len(launches) == 1 + scalars, number
    close(mine, exact)
    for a, b in zip(mine, exact, strict=True):
        kept, wanted = ours.state[a], theirs.state[b]
        assert kept.keys() == wanted.keys() or "sgd" in name
        for key, value in kept.items():
            if key == "step":
                assert value.is_cuda == (counted == "fused")
            if value is not None:
                close([value.cuda()], [wanted[key].cuda()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [n for n in MADE if n not in ("adagrad decay", "lamb")])
def test_low_precision_is_torchs_fused_or_better(name, dtype):
    """One step from the same values: a rounding of the exact result.

    The first steps of Adagrad and Lamb are signs of what decay brings near 0: left out.
    """
    mine = tensors(dtype)
    exact = doubles(mine)
    ours, theirs = MADE[name](mine), MADE[name](exact, foreach=False)
    fuse_step(ours)
    draw(mine, seed=3)
    wide_grads(mine, exact)
    ours.step()
    theirs.step()
    close(mine, exact)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", ["sgd momentum", "adagrad", "adamw"])
def test_master_weights(name, split, launches):
    """bf16 parameters that train as fp32 ones do, to the rounding of fp32."""
    model = nn.ParameterList(tensors(torch.float32))
    exact = doubles(model)
    ours, theirs = MADE[name](model.parameters()), MADE[name](exact, foreach=False)
    fuse_step(ours)
    attach_master_weights(model, ours, list(model), torch.bfloat16, split=split)
    for number in range(5):
        for p, e in zip(model, exact, strict=True):
            p.grad = torch.randn_like(p, dtype=torch.float32).to(p.dtype)
            e.grad = p.grad.double()
        launches.clear()
        ours.step()
        theirs.step()
        assert len(launches) == 1, number
    full = [vars(ours)[TABLE][p].full() for p in model]
    close(full, exact)


def test_several_groups_missing_gradients_and_views():
    base = torch.randn(1000, device="cuda")
    mine = [nn.Parameter(base[1:300]), nn.Parameter(base[304:700]), nn.Parameter(base[703:704])]
    mine += tensors(torch.bfloat16, [(5, 7), (33,)])
    exact = doubles(mine)

    def groups(params):
        return [
            {"params": params[:2], "weight_decay": 0.1},
            {"params": params[2:4], "lr": 0.5},
            {"params": params[4:], "amsgrad": True},
        ]

    ours, theirs = AdamW(groups(mine), lr=0.01), AdamW(groups(exact), lr=0.01, foreach=False)
    fuse_step(ours)
    before = base[[0, 300, 303, 700, 702, 704]].clone()
    for number in range(3):
        draw(mine, seed=number)
        mine[number].grad = None
        wide_grads(mine, exact)
        if number == 2:
            for params, optimizer in ((mine, ours), (exact, theirs)):
                optimizer.state[params[0]]["step"].fill_(11)
                optimizer.param_groups[1]["lr"] = 0.25
        ours.step()
        theirs.step()
    # bf16 is rounded at each of three steps.
    for a, b in zip(mine, exact, strict=True):
        tolerance = 3 * TOLERANCE[a.dtype]
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    assert torch.equal(before, base[[0, 300, 303, 700, 702, 704]])


# What may happen between two steps of many; gradients stay where they are.
BETWEEN = {
    20: lambda each, params: each.param_groups[0].update(lr=0.02),
    40: lambda each, params: [p.grad.mul_(-1) for p in params],
    45: lambda each, params: setattr(params[1], "grad", params[1].grad.clone()),
    60: lambda each, params: [own["step"].add_(3) for own in each.state.values() if "step" in own],
    70: lambda each, params: each.load_state_dict(copy.deepcopy(each.state_dict())),
    80: lambda each, params: setattr(params[2], "grad", None),
    90: lambda each, params: each.param_groups[0].update(weight_decay=0.3),
}


@pytest.mark.parametrize("name", ["sgd momentum", "adagrad", "adam", "adamw", "lamb", "lars"])
def test_many_steps_at_once_are_torchs(name, launches):
    """One call of C++ launches, with numbers that are known ahead, as long as nothing changed."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    ours, theirs = MADE[name](mine), MADE[name](exact, foreach=False)
    assert fuse_step(ours) is None
    draw(mine, seed=0)
    wide_grads(mine, exact)
    at_once = 0
    for number in range(100):
        if change := BETWEEN.get(number):
            change(ours, mine)
            change(theirs, exact)
        if number % 30 == 29:  # on a stream of its own
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.synchronize()
                ours.step()
            torch.cuda.synchronize()
        else:
            launches.clear()
            ours.step()
            at_once += launches == [TURN]
        theirs.step()
    assert at_once > 60
    tolerance = 100 * TOLERANCE[torch.float32]  # a hundred steps
    for a, b in zip(mine, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_graph_steps_at_each_replay(name):
    mine = tensors(torch.float32)
    exact = doubles(mine)
    rate = torch.tensor(0.01, device="cuda")
    ours, theirs = CAPTURED[name](mine, rate, capturable=True), CAPTURED[name](exact, 0.01)
    fuse_step(ours)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(2):
            draw(mine, seed=number)
            wide_grads(mine, exact)
            ours.step()
            theirs.step()
    torch.cuda.current_stream().wait_stream(side)
    draw(mine, seed=5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    held = [p.grad for p in mine]
    for number in range(3):
        draw(mine, seed=10 + number)
        wide_grads(mine, exact)
        for p, grad in zip(mine, held, strict=True):
            p.grad = grad.copy_(p.grad)
        if number == 1:
            rate.fill_(0.05)
            theirs.param_groups[0]["lr"] = float(rate)
        graph.replay()
        theirs.step()
        if number == 1:  # a step outside changes nothing that a replay reads
            moved = copy.deepcopy([p.grad for p in mine])
            for p, e, grad in zip(mine, exact, moved, strict=True):
                p.grad, e.grad = grad, grad.double()
            ours.step()
            theirs.step()
    close(mine, exact)
    assert {int(s.get("step", 6)) for s in ours.state.values()} == {6}


def test_a_graph_of_steps_that_the_host_counts_is_refused():
    params = tensors(torch.float32, [(5,)])
    ours = AdamW(params)
    fuse_step(ours)
    draw(params, seed=0)
    ours.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(graph):
        ours.step()
    torch.cuda.synchronize()


def test_another_stream():
    mine = tensors(torch.float32, [(1 << 20,)])
    exact = doubles(mine)
    ours, theirs = SGD(mine, 0.1, 0.9), SGD(exact, 0.1, 0.9, foreach=False)
    fuse_step(ours)
    for number in range(4):
        draw(mine, seed=number)
        wide_grads(mine, exact)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            ours.step()
            torch.cuda.synchronize()
        theirs.step()
    close(mine, exact)


def test_a_host_far_ahead_overwrites_no_table():
    """Gradients move each time; their addresses wait in pinned memory while the GPU sleeps."""
    mine = tensors(torch.float32)
    ours = SGD(mine, 1.0)
    fuse_step(ours)
    for p in mine:
        p.grad = torch.zeros_like(p)
    ours.step()
    wanted = [p.detach().clone() for p in mine]
    held = [[torch.full_like(p, 2.0**number) for p in mine] for number in range(12)]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles, some 100 ms
    for grads in held:
        for p, grad in zip(mine, grads, strict=True):
            p.grad = grad
        ours.step()
    for p, w in zip(mine, wanted, strict=True):
        # Powers of 2 up to 2048, taken from numbers of about 1: roundings of 2^11 in fp32.
        torch.testing.assert_close(p, w - 4095.0, rtol=0, atol=12 * 2**-13)


# What is crossed with who counts, and with a rate that lies on the GPU; all else on the CPU too.
ADAM = {"amsgrad": (False, True), "capturable": (False, True)}
ADAM |= {"weight_decay": (0.0, 0.1), "maximize": (False, True)}
FLAGS = {
    SGD: {"momentum": (0.0, 0.9), "weight_decay": (0.0, 0.1), "maximize": (False, True)},
    Adagrad: {"lr_decay": (0.0, 0.1), "weight_decay": (0.0, 0.1), "maximize": (False, True)},
    Lars: {"momentum": (0.0, 0.9), "weight_decay": (0.0, 0.1)},
    Lamb: {"capturable": (False, True), "weight_decay": (0.0, 0.1)},
    Adam: ADAM,
    AdamW: ADAM,
}
CROSSED = [
    (kind, dict(zip(flags, values, strict=True)))
    for kind, flags in FLAGS.items()
    for values in itertools.product(*flags.values())
]


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize(
    ("kind", "flags"), [pytest.param(k, f, id=f"{k.__name__} {f}") for k, f in CROSSED]
)
def test_flags_crossed_with_who_counts(kind, flags, there):
    """50 steps, as near to fp64 as torch's own."""
    with torch.device("cuda"):
        rate = torch.tensor(0.03) if there else 0.03
        check_fp32(partial(kind, lr=rate, **flags), optimizer_variants.tensors())


@pytest.fixture
def memory(tmp_path_factory):
    """The GPU's, for one test at a time of all that run beside each other."""
    common = tmp_path_factory.getbasetemp().parent
    with (common / "memory.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["sgd momentum", "adam", "adamw", "lamb", "lars"])
def test_tensors_beyond_32_bits(name, clip):
    """Nothing but its end is other than 0, so what comes of it is what comes of the end alone."""

    def stepped(size):
        p = nn.Parameter(torch.zeros(size, dtype=torch.bfloat16, device="cuda"))
        p.grad = torch.zeros_like(p)
        p.data[-9:] = p.grad[-9:] = 1.0
        optimizer = MADE[name]([p])
        if name == "lars":  # a thousandth of the weight's norm moves nothing in bf16
            optimizer.param_groups[0]["lr"] = 100.0
        assert fuse_step(optimizer) is None
        step = FusedStep(optimizer, clip_norm=clip) if clip else optimizer.step
        for _ in range(2):
            step()
        return p

    whole, end = stepped((1 << 31) + 7), stepped(9)  # elements: 4 GiB of bf16
    assert torch.equal(whole[-9:], end)
    assert not end.eq(1.0).any()
    assert not whole[:-9].any()


AGAIN = """
import sys
if sys.argv[1:]:
    sys.modules["triton"] = None  # importing it fails
import torch
from torch.optim import AdamW
from ipex_inductor.optim import fuse_step
p = torch.nn.Parameter(torch.ones(100, device="cuda"))
optimizer = AdamW([p], lr=0.1)
fuse_step(optimizer)
p.grad = torch.ones_like(p)
optimizer.step()
assert abs(float(p[7]) - 0.899) < 1e-5, p[7]
"""


def test_a_second_process_needs_no_triton(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    for without in ((), ("without",)):
        subprocess.check_call([sys.executable, "-c", AGAIN, *without])


def test_what_has_no_kernel_is_torchs(caplog):
    mine = [nn.Parameter(torch.randn(50, device="cuda", dtype=torch.complex64))]
    theirs = copy.deepcopy(mine)
    ours, reference = SGD(mine, 0.1), SGD(theirs, 0.1)
    caplog.set_level("INFO", "ipex_inductor")
    assert fuse_step(ours) is None
    mine[0].grad = theirs[0].grad = torch.ones_like(mine[0])
    ours.step()
    reference.step()
    assert torch.equal(mine[0], theirs[0])
    assert "complex64" in caplog.text
