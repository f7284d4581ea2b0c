"""Optimizer steps by kernels on a GPU: torch's values, few launches, no waiting, in graphs too."""

import copy
import fcntl
import gc
import itertools
import subprocess
import sys
from functools import partial

import optimizers
import pytest
import torch
from step_checks import check_fp32
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from ipex_inductor.optim import (
    FusedStep,
    GradScaler,
    Lamb,
    Lars,
    attach_master_weights,
    fuse_step,
    norms,
)
from ipex_inductor.optim.weights import TABLE
from ipex_inductor.templates import cuda
from ipex_inductor.templates.formulas import FORMULAS
from ipex_inductor.templates.look_cpp import WORD, Reader

pytestmark = pytest.mark.gpu

SHAPES = [(3,), (257, 129), (), (0,), (64, 3, 3, 3), (4099,), (1,)]
MADE = {
    "sgd": lambda p, **o: SGD(p, lr=0.1, **o),
    "sgd momentum": lambda p, **o: SGD(p, 0.1, 0.9, dampening=0.3, weight_decay=0.1, **o),
    "sgd nesterov": lambda p, **o: SGD(p, 0.1, 0.9, nesterov=True, maximize=True, **o),
    "adagrad": lambda p, **o: Adagrad(p, 0.1, lr_decay=0.1, **o),
    "adagrad decay": lambda p, **o: Adagrad(p, 0.1, weight_decay=0.1, **o),
    "adam": lambda p, **o: Adam(p, 0.01, amsgrad=True, weight_decay=0.1, **o),
    "adamw": lambda p, **o: AdamW(p, 0.01, weight_decay=0.1, **o),
}
MADE |= {
    "lamb": lambda p, fused=False, **o: Lamb(p, 0.01, weight_decay=0.1, capturable=fused),
    "lars": lambda p, **o: Lars(p, 0.1, 0.9, weight_decay=0.1, epsilon=1e-3),
    "lars plain": lambda p, **o: Lars([{"params": p, "lars": False}], 0.1, 0.9, epsilon=1e-3),
}
# The arithmetic is fp32 (fp64 for fp64), the values are about 1: some roundings of each dtype.
TOLERANCE = {dtype: 8 * torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32)} | {
    dtype: 4 * torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)
}


TURN = "a launch of C++"


@pytest.fixture
def launches(monkeypatch):
    """The launches of each kernel, in order."""
    made, launch, ask = [], cuda.Kernel.__call__, Reader.again

    def counted(self, *args):
        made.append(self)
        launch(self, *args)

    def again(self, *args):
        told = ask(self, *args)
        if told == []:  # all turns were taken
            made.extend([TURN] * (len(args[-2]) // WORD))
        return told

    monkeypatch.setattr(cuda.Kernel, "__call__", counted)
    monkeypatch.setattr(Reader, "again", again)
    return made


def tensors(dtype, shapes=SHAPES, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    made = [torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes]
    last = torch.channels_last
    return [nn.Parameter(t.to(memory_format=last) if t.dim() == 4 else t) for t in made]


def draw(params, *others, seed):
    """Gradients for `params`, the same ones for all `others`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for number, p in enumerate(params):
        grad = torch.randn(p.shape, device="cuda", generator=generator)
        for each in (params, *others):
            each[number].grad = torch.empty_like(each[number]).copy_(grad.to(p.dtype))


def close(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        tolerance = TOLERANCE[a.dtype]
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)
        assert a.numel() < 2 or a.stride() == b.stride()


def doubles(params):
    return [nn.Parameter(p.detach().double().clone()) for p in params]


def wide_grads(params, wide):
    for p, w in zip(params, wide, strict=True):
        w.grad = None if p.grad is None else p.grad.to(torch.float64, copy=True)


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


@pytest.mark.parametrize("name", ["sgd momentum", "adagrad", "adam", "lamb", "lars"])
def test_the_host_waits_for_nothing(name, launches):
    """Scaler, clipped norm and zeroing, with a step that overflows among them."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    ours, theirs = MADE[name](mine, fused=True), MADE[name](exact, foreach=False)
    step = FusedStep(ours, clip_norm=0.5, zero_grad=True)
    scale = torch.tensor(1024.0, device="cuda")
    found = torch.tensor(0.0, device="cuda")
    for number in range(4):
        overflow = number == 2
        draw(mine, seed=number)
        wide_grads(mine, exact)
        for p in mine:
            p.grad.mul_(1024.0)
        if overflow:
            mine[1].grad[0, 0] = torch.inf
        found.fill_(float(overflow))
        ours.grad_scale, ours.found_inf = scale, found
        torch.cuda.synchronize()
        launches.clear()
        try:
            torch.cuda.set_sync_debug_mode("error" if number else "default")
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # The norm with the scalars, and the step with norms of tensors.
        assert len(launches) == 2 or not number
        assert not any(p.grad.any() for p in mine)
        if not overflow:
            norm = nn.utils.clip_grad_norm_(exact, 0.5)
            torch.testing.assert_close(step.grad_norm.double(), norm, rtol=1e-6, atol=0)
            theirs.step()
    for a, b in zip(mine, exact, strict=True):
        # The norm is fp32's, of 40,000 numbers, and all gradients are multiplied by it.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)
    if name not in ("sgd momentum", "lars"):
        assert {int(s["step"]) for s in ours.state.values()} == {3}


CAPTURED = {
    "adamw": lambda p, rate, **o: AdamW(p, rate, weight_decay=0.1, foreach=False, **o),
    "lamb": lambda p, rate, **o: Lamb(p, rate, weight_decay=0.1, **o),
    "lars": lambda p, rate, **o: Lars(p, rate, 0.9, weight_decay=0.1, epsilon=1e-3),
}


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


@pytest.mark.parametrize("name", CAPTURED)
def test_a_graph_takes_the_norm_that_is_clipped(name, launches):
    """By our reading, with the scalars; twice, with a step outside between the graphs."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    rate = torch.tensor(0.01, device="cuda")
    ours, theirs = CAPTURED[name](mine, rate, capturable=True), CAPTURED[name](exact, 0.01)
    step, seed = FusedStep(ours, clip_norm=0.5), iter(range(100))

    def stepped(run, norm=None):
        held = [p.grad for p in mine]
        draw(mine, seed=next(seed))
        wide_grads(mine, exact)
        for p, grad in zip(mine, held, strict=True):
            p.grad = p.grad if grad is None else grad.copy_(p.grad)
        run()
        wanted = nn.utils.clip_grad_norm_(exact, 0.5)
        theirs.step()
        # Of 40,000 squares in fp32.
        norm = step.grad_norm if norm is None else norm
        torch.testing.assert_close(norm.double(), wanted, rtol=1e-6, atol=0)

    for _ in range(2):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                stepped(step)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        launches.clear()
        with torch.cuda.graph(graph):
            step()
        assert len(launches) == 2
        of_graph = step.grad_norm
        for _ in range(2):
            stepped(graph.replay, of_graph)
    for a, b in zip(mine, exact, strict=True):
        # The norm is fp32's, of 40,000 numbers, and all gradients are multiplied by it.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)


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


@pytest.mark.parametrize("name", ["adamw", "adagrad", "sgd momentum", "lamb", "lars"])
def test_a_clipped_step_that_the_host_counts(name, launches, quiet):
    """One launch takes the norm, and one steps; the host waits for neither, from the first on."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    ours, theirs = MADE[name](mine), MADE[name](exact, foreach=False)
    step = FusedStep(ours, clip_norm=0.5)
    for number in range(9):
        later = number >= 6 and name != "adagrad"  # torch's has states from the beginning
        if later and number == 6:  # what comes later has a count of its own
            mine.append(nn.Parameter(torch.ones(77, device="cuda")))
            exact += doubles(mine[-1:])
            ours.add_param_group({"params": mine[-1:]})
            theirs.add_param_group({"params": exact[-1:]})
        if number == 4:
            ours.load_state_dict(ours.state_dict())
        draw(mine, seed=number)
        wide_grads(mine, exact)
        torch.cuda.synchronize()
        launches.clear()
        quiet(True)
        step()
        quiet(False)
        norm = nn.utils.clip_grad_norm_(exact, 0.5)
        theirs.step()
        torch.testing.assert_close(step.grad_norm.double(), norm, rtol=1e-6, atol=0)
        # Of two counts: the norm, and scalars and a step each.
        apart = later and FORMULAS[type(ours).__name__].counts
        assert len(launches) == (5 if apart else 2), number
    for a, b in zip(mine, exact, strict=True):
        # The norm is fp32's, of 40,000 numbers, and all gradients are multiplied by it.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)
        assert ours.state[a].get("step") == theirs.state[b].get("step")


def test_a_clipped_step_of_what_is_no_whole_number():
    """Nor can a table of the GPU's have it: the host waits."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    ours, theirs = MADE["adamw"](mine), MADE["adamw"](exact, foreach=False)
    step = FusedStep(ours, clip_norm=0.5)
    for number in range(4):
        draw(mine, seed=number)
        wide_grads(mine, exact)
        step()
        nn.utils.clip_grad_norm_(exact, 0.5)
        theirs.step()
        for each in (ours, theirs):
            for state in each.state.values():
                state["step"].fill_(number + 1.5)
    for a, b in zip(mine, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)  # as above


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_rate_of_the_gpus_where_the_host_counts(clip, quiet):
    """It is read there, when the step runs."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    rate = torch.tensor(0.01, device="cuda")
    ours, theirs = AdamW(mine, rate, foreach=False), AdamW(exact, 0.01, foreach=False)
    step = FusedStep(ours, clip_norm=clip)
    for number in range(5):
        draw(mine, seed=number)
        wide_grads(mine, exact)
        rate.fill_(0.01 * (number + 1))
        theirs.param_groups[0]["lr"] = 0.01 * (number + 1)
        torch.cuda.synchronize()
        quiet(number > 0)
        step()
        quiet(False)
        if clip:
            nn.utils.clip_grad_norm_(exact, clip)
        theirs.step()
    for a, b in zip(mine, exact, strict=True):
        # fp32's rates, and its norm, of 40,000 numbers.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)
        assert ours.state[a]["step"] == 5


def test_a_rate_of_the_gpus_in_a_step_that_is_left_out():
    """The host counts, and so reads what GradScaler found."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    rate, scale = torch.tensor(0.01, device="cuda"), torch.tensor(8.0, device="cuda")
    ours, theirs = AdamW(mine, rate, foreach=False), AdamW(exact, 0.01, foreach=False)
    fuse_step(ours)
    for number in range(5):
        draw(mine, seed=number)
        wide_grads(mine, exact)
        for p in mine:
            p.grad.mul_(8.0)
        left_out = number in (0, 3)
        ours.grad_scale, ours.found_inf = scale, torch.tensor(float(left_out), device="cuda")
        ours.step()
        if not left_out:
            theirs.step()
    close(mine, exact)
    assert {float(ours.state[p]["step"]) for p in mine} == {3.0}


def test_a_step_left_out_of_what_was_to_be_capturable():
    """Where steps lie on the host they are counted there, whatever the group says since."""
    params = tensors(torch.float32, [(5,)])
    ours = AdamW(params)
    fuse_step(ours)
    draw(params, seed=0)
    ours.step()
    ours.param_groups[0]["capturable"] = True
    for found, counted in ((1.0, 1), (1.0, 1), (0.0, 2), (1.0, 2)):
        ours.grad_scale = torch.tensor(2.0, device="cuda")
        ours.found_inf = torch.tensor(found, device="cuda")
        ours.step()
        assert ours.state[params[0]]["step"] == counted


def test_a_graph_of_scaled_steps_after_the_first():
    """Which had to wait, as states began; its plan holds."""
    params = tensors(torch.float32)
    exact = doubles(params)
    ours, theirs = AdamW(params, capturable=True), AdamW(exact, foreach=False)
    fuse_step(ours)
    draw(params, seed=0)
    ours.grad_scale = torch.tensor(1.0, device="cuda")
    ours.found_inf = torch.tensor(0.0, device="cuda")
    ours.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    graph.replay()
    wide_grads(params, exact)
    for _ in range(2):
        theirs.step()
    close(params, exact)


@pytest.mark.parametrize("others", ["dtypes", "left to torch", "CPU"])
def test_a_clipped_step_of_several_kinds(others):
    """All are clipped by one norm: of two dtypes, with one that torch steps, with one elsewhere."""
    mine = tensors(torch.float32)
    if others == "dtypes":
        mine += tensors(torch.float64, [(33,)])
    elif others == "left to torch":
        mine += [nn.Parameter(torch.randn(66, device="cuda")[::2])]
    else:
        mine += [nn.Parameter(torch.randn(33))]
    exact = doubles(mine)
    ours, theirs = AdamW(mine, 0.01), AdamW(exact, 0.01, foreach=False)
    step = FusedStep(ours, clip_norm=0.5)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        for p in mine:
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        wide_grads(mine, exact)
        step()
        norm = nn.utils.clip_grad_norm_(exact, 0.5)
        theirs.step()
        torch.testing.assert_close(step.grad_norm.double().to(norm), norm, rtol=1e-6, atol=0)
    for a, b in zip(mine, exact, strict=True):
        # The norm is fp32's, of 40,000 numbers, and all gradients are multiplied by it.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)
        assert ours.state[a]["step"] == 4


# What is crossed with who counts, and with a rate that lies on the GPU; all else on the CPU too.
FLAGS = {
    SGD: {"momentum": (0.0, 0.9), "weight_decay": (0.0, 0.1), "maximize": (False, True)},
    Adagrad: {"lr_decay": (0.0, 0.1), "weight_decay": (0.0, 0.1), "maximize": (False, True)},
    Lars: {"momentum": (0.0, 0.9), "weight_decay": (0.0, 0.1)},
    Lamb: {"capturable": (False, True), "weight_decay": (0.0, 0.1)},
}
for kind in (Adam, AdamW):
    FLAGS[kind] = {"amsgrad": (False, True), **FLAGS[Lamb], "maximize": (False, True)}
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
        check_fp32(partial(kind, lr=rate, **flags), optimizers.tensors())


def test_a_graph_of_clipped_steps_that_the_host_counts_is_refused():
    params = tensors(torch.float32, [(5,)])
    ours = AdamW(params)
    step = FusedStep(ours, clip_norm=1.0)
    for number in range(2):
        draw(params, seed=number)
        step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()
    assert ours.state[params[0]]["step"] == 2


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


def test_norms_of_large_tensors():
    """Of more chunks than a program has elements, added up in the same order each time."""
    made = []
    for _ in range(2):
        mine = tensors(torch.float32, [(5_000_011,), (7,)])
        ours = Lamb(mine, 0.01, weight_decay=0.1)
        fuse_step(ours)
        for number in range(2):
            draw(mine, seed=number)
            ours.step()
        made.append(mine)
    exact = doubles(tensors(torch.float32, [(5_000_011,), (7,)]))
    theirs = Lamb(exact, 0.01, weight_decay=0.1)
    for number in range(2):
        draw(mine, seed=number)
        wide_grads(mine, exact)
        theirs.step()
    close(made[0], exact)
    assert all(map(torch.equal, *made))


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


# The scale, and a norm that is clipped


@pytest.fixture
def quiet():
    """Nobody waits for the GPU in here, once it was left."""

    def silence(on):
        torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield silence
    silence(False)


BAD = {2: float("inf"), 4: float("nan"), 5: -float("inf")}  # at these steps


@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("name", "counted"),
    [
        *((n, "GPU") for n in ("sgd momentum", "adagrad", "adam", "adamw", "lamb", "lars")),
        *((n, "host") for n in ("adagrad", "adamw", "lamb")),
    ],
)
def test_our_scaler_is_torchs(name, counted, dtype, clip, launches, quiet):
    """unscale_, clip_grad_norm_, step, zero_grad and update, one after the other, in fp64.

    Steps that are skipped change nothing, the scale backs off and grows; nobody waits but a host
    that counts.
    """
    mine = tensors(dtype)
    exact = doubles(mine)
    there = counted == "GPU"
    ours, theirs = MADE[name](mine, fused=there), MADE[name](exact, foreach=False)
    step = FusedStep(ours, clip_norm=clip, zero_grad=True)
    options = {"init_scale": 2.0**10, "growth_interval": 2}
    scaler, reference = GradScaler(**options), torch.amp.GradScaler(**options)
    for each in (scaler, reference):
        each.scale(torch.ones((), device="cuda"))
    for number in range(9):
        draw(mine, seed=number)
        for p in mine:
            p.grad.mul_(reference.get_scale())
        if number in BAD:
            mine[1].grad[200, 100] = BAD[number]
        wide_grads(mine, exact)
        before = copy.deepcopy((mine, [dict(ours.state[p]) for p in mine]))
        torch.cuda.synchronize()
        launches.clear()
        quiet(there and number > 1)
        scaler.step(ours)
        scaler.update()
        quiet(False)
        if number > 1:
            # One reading of all gradients, whose last program makes the scalars, norms of
            # tensors, and the step.
            assert len(launches) == (2 if there or number not in BAD else 1), number
        if clip:
            reference.unscale_(theirs)
            norm = nn.utils.clip_grad_norm_(exact, clip)
            if number not in BAD:
                # Of 40,000 squares in fp32.
                torch.testing.assert_close(step.grad_norm.double(), norm, rtol=1e-6, atol=0)
        reference.step(theirs)
        reference.update()
        assert scaler.state_dict() == reference.state_dict()
        assert not any(p.grad.any() for p in mine)
        if number in BAD:
            after = (mine, [dict(ours.state[p]) for p in mine])
            torch.testing.assert_close(after, before, rtol=0, atol=0)
    for a, b in zip(mine, exact, strict=True):
        # All gradients are multiplied by a norm of fp32.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_finite_gradients_are_never_called_infinite(dtype):
    """Though their squares are; the norm is infinite then, as torch's is, but for fp16."""
    large = torch.finfo(dtype).max
    params = tensors(dtype, [(5_000_011,), (7,), (64, 3, 3, 3)])
    optimizer = AdamW(params, fused=True)
    scale = torch.ones((), device="cuda")
    for clip in (None, 1.0):
        for planted, wanted in ((large, 0.0), (-large, 0.0), (torch.inf, 1.0), (torch.nan, 1.0)):
            draw(params, seed=1)
            params[0].grad[-1] = planted
            found = norms.found_inf(optimizer, scale, clip, defer=clip is not None)
            norms.settle(optimizer)
            assert found.item() == wanted
            if dtype is not torch.bfloat16:  # of which torch says nothing
                torch_found = torch.zeros((), device="cuda")
                grads = [p.grad for p in params]
                torch._amp_foreach_non_finite_check_and_unscale_(grads, torch_found, scale)
                assert torch_found == found


def norm_of(optimizer, clip, divisor):
    """By a reading of its own."""
    read = norms.read_of(optimizer, clip, divisor, None)
    assert not read.run()
    return read.clipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norms_are_torchs_and_repeat(dtype):
    """Of many chunks, views that are not aligned, empty ones; the same to the bit each time."""
    params = tensors(dtype, [(5_000_011,), (7,), (0,), (257, 129), (64, 3, 3, 3)])
    optimizer = SGD(params, 0.1)
    draw(params, seed=0)
    params[3].grad = torch.randn(257 * 129 + 1, device="cuda").to(dtype)[1:].view(257, 129)
    scale = torch.tensor(1024.0, device="cuda")
    made = [norm_of(optimizer, 1e-3, scale) for _ in range(3)]
    wanted = nn.utils.get_total_norm([p.grad.double() / 1024 for p in params])
    for norm, factor in made:
        assert torch.equal(norm, made[0].norm)
        # fp32's sums of 16384 squares, in a tree of 2048; then fp64's.
        torch.testing.assert_close(norm.double(), wanted, rtol=1e-6, atol=0)
        torch.testing.assert_close(factor, 1e-3 / (norm.double() + 1e-6), rtol=1e-15, atol=0)
    draw(params, seed=0)  # elsewhere
    params[3].grad = None
    wanted = nn.utils.get_total_norm([p.grad.double() for p in params if p.grad is not None])
    norm, factor = norm_of(optimizer, 1e9, None)
    torch.testing.assert_close(norm.double(), wanted, rtol=1e-6, atol=0)
    assert factor == 1


def test_scaled_master_weights_of_several_dtypes():
    """bf16 beside fp32 gradients: one norm of both."""
    model = nn.ParameterList(tensors(torch.float32))
    exact = doubles(model)
    ours, theirs = AdamW(model.parameters(), 0.01), AdamW(exact, 0.01, foreach=False)
    step = FusedStep(ours, clip_norm=0.5)
    attach_master_weights(model, ours, list(model)[:3], torch.bfloat16, split=True)
    scaler = GradScaler(init_scale=256.0)
    scaler.scale(torch.ones((), device="cuda"))
    for _ in range(3):
        for p, e in zip(model, exact, strict=True):
            p.grad = (256.0 * torch.randn_like(p, dtype=torch.float32)).to(p.dtype)
            e.grad = p.grad.double() / 256.0
        scaler.step(ours)
        scaler.update()
        norm = nn.utils.clip_grad_norm_(exact, 0.5)
        torch.testing.assert_close(step.grad_norm.double(), norm, rtol=1e-6, atol=0)
        theirs.step()
    full = [vars(ours)[TABLE][p].full() if p in vars(ours)[TABLE] else p for p in model]
    for a, b in zip(full, exact, strict=True):
        # bf16 gradients are scaled in bf16: an ulp of it, times three steps of the rate.
        torch.testing.assert_close(a.double(), b, rtol=0, atol=3 * 2**-8 * 0.01)
