"""`torch.compile(optimizer.step, backend="ipex")` on a GPU: our kernels, torch's values."""

import copy
import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RAdam
from torch.optim.lr_scheduler import ExponentialLR

import ipex_inductor
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.build import cuda

pytestmark = pytest.mark.gpu

SHAPES = [(3,), (257, 129), (), (0,), (64, 3, 3, 3), (4099,), (1,)]
MADE = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adagrad": partial(Adagrad, lr=0.1, lr_decay=0.1),
    "adam": partial(Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
}
FORMS = {"foreach": {"foreach": True}, "single": {"foreach": False}}


@pytest.fixture
def launches(monkeypatch):
    """The launches of each kernel, in order."""
    made, launch = [], cuda.Kernel.__call__

    def counted(self, *args):
        made.append(self)
        launch(self, *args)

    monkeypatch.setattr(cuda.Kernel, "__call__", counted)
    return made


def said(kind):
    return [e.reason for r in decisions.reports() for e in r.events if e.kind == kind]


def compiled(optimizer, **options):
    return torch.compile(optimizer.step, backend="ipex", options={"strict": True} | options)


def tensors(dtype=torch.float32, shapes=SHAPES):
    """Parameters of those shapes, and a view that is not aligned; the first step is of each."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes]
    last = torch.channels_last
    made = [t.to(memory_format=last) if t.dim() == 4 else t for t in made]
    whole = torch.randn(3001, device="cuda", generator=generator).to(dtype)
    return [nn.Parameter(t) for t in (*made, whole[1:])]


def doubles(params):
    return [nn.Parameter(p.detach().double().clone()) for p in params]


def draw(params, *others, seed):
    """The same gradients for all, as each holds them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for number, p in enumerate(params):
        drawn = torch.randn(p.shape, device="cuda", generator=generator).to(p.dtype)
        for each in (params, *others):
            each[number].grad = torch.empty_like(each[number]).copy_(drawn)


def exact_of(make, params):
    """torch's own step of the same in fp64."""
    keywords = {k: v for k, v in make.keywords.items() if k not in ("foreach", "capturable")}
    rate = float(keywords["lr"])
    return make.func(params, **keywords | {"foreach": False, "lr": rate})


def state(optimizer, param):
    kept = optimizer.state.get(param, {})  # which must not begin here
    return {k: v for k, v in kept.items() if isinstance(v, torch.Tensor)}


def close(ours, theirs, mine, exact, scale=8):
    """Values are about 1, the arithmetic is fp32: some roundings in all."""
    tolerance = scale * torch.finfo(torch.float32).eps
    for p, q in zip(mine, exact, strict=True):
        for a, b in ((p, q), *((state(ours, p)[k], v) for k, v in state(theirs, q).items())):
            got, wanted = a.detach().double().to(b.device), b.detach().double()
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
            assert a.dim() < 2 or a.stride() == b.stride()


def cases():
    for name, make in MADE.items():
        for form, keywords in FORMS.items():
            yield f"{name} {form}", partial(make, **keywords)
    for name, form in (("adam", "foreach"), ("adamw", "single")):
        made = partial(MADE[name], **FORMS[form], capturable=True)
        yield f"{name} {form} capturable", made
    rate = {"lr": torch.tensor(0.01)}  # becomes the device's in the test
    yield "adamw rate", partial(MADE["adamw"], **rate, foreach=True, capturable=True)
    yield "sgd rate", partial(MADE["sgd"], **rate, foreach=True)


CASES = dict(cases())


@pytest.mark.parametrize("name", CASES)
def test_values(name, launches):
    """Against torch's own steps in fp64; rates change on the way where they are tensors."""
    make = CASES[name]
    mine = tensors()
    exact = doubles(mine)
    theirs = exact_of(make, exact)
    if "rate" in name:
        make.keywords["lr"] = make.keywords["lr"].cuda()
    ours = make(mine)
    step = compiled(ours)
    for number in range(6):
        draw(mine, exact, seed=number)
        if "rate" in name and number == 3:
            make.keywords["lr"].fill_(0.005)
            theirs.param_groups[0]["lr"] = 0.005
        before = [p._version for p in mine]
        launches.clear()
        step()
        theirs.step()
        # Scalars, then the elements of what is aligned and of what is not.
        assert len(launches) == 3, (number, said("fired"), said("missed"))
        assert all(p._version > was for p, was in zip(mine, before, strict=True))
    assert not said("missed")
    # SGD makes its momentum in a first graph.
    assert len(said("fired")) == (2 if "sgd" in name else 1)
    close(ours, theirs, mine, exact)
    for p in mine:
        assert all(v.is_cuda for v in state(ours, p).values())


@pytest.mark.parametrize("name", ["sgd foreach", "adagrad foreach", "adam foreach", "adamw single"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(name, dtype, launches):
    """From the same values: half an ulp of storage, and what a moment's rounding adds."""
    if dtype is torch.float16 and name != "adamw single":
        pytest.skip("one of them will do")
    make = CASES[name]
    mine = tensors(dtype)
    exact = doubles(mine)
    ours, theirs = make(mine), exact_of(make, exact)
    step, info = compiled(ours), torch.finfo(dtype)
    for number in range(4):
        for p, q in zip(mine, exact, strict=True):
            q.data.copy_(p)
            theirs.state[q].update({k: v.double().clone() for k, v in state(ours, p).items()})
        generator = torch.Generator("cuda").manual_seed(number)
        for p, q in zip(mine, exact, strict=True):
            drawn = torch.rand(p.shape, device="cuda", generator=generator) - 0.5
            p.grad = torch.empty_like(p).copy_(drawn + drawn.sign() * 0.5)  # not near 0
            q.grad = p.grad.double()
        starts = doubles(mine)
        step()
        theirs.step()
        for p, q, start in zip(mine, exact, starts, strict=True):
            between = 2**-21 + 2 * info.eps * (p.double() - start).abs()
            for k, v in (("", q), *state(theirs, q).items()):
                got = state(ours, p)[k] if k else p
                half = info.eps / 2 * v.abs() + info.smallest_normal * info.eps
                off = (got.double().to(v.device) - v).abs()
                allowed = (half + between.to(v.device)) if v.shape == p.shape else half
                assert (off <= allowed).all(), (number, k, float((off - allowed).max()))
    assert not said("missed")
    assert launches


def test_fp64_and_several_dtypes_at_once(launches):
    mine = [*tensors(torch.float64), *tensors(torch.float32), *tensors(torch.bfloat16)]
    exact = doubles(mine)
    ours, theirs = AdamW(mine, foreach=True), AdamW(exact, foreach=False)
    draw(mine, seed=1)
    for p, q in zip(mine, exact, strict=True):
        q.grad = p.grad.double()
    compiled(ours)()
    theirs.step()
    assert len(launches) == 9
    for p, q in zip(mine, exact, strict=True):
        few = 8 * torch.finfo(p.dtype).eps
        torch.testing.assert_close(p.double(), q, rtol=few, atol=few)


@pytest.mark.parametrize("make", [AdamW, partial(SGD, lr=0.1, momentum=0.9)])
def test_torchs_fused_steps_are_left_alone(make, launches):
    """Dynamo does not trace them; `explain` says so."""
    mine = tensors()
    exact = doubles(mine)
    ours, theirs = make(mine, fused=True), make(exact, foreach=False)
    step = compiled(ours)
    for number in range(3):
        draw(mine, exact, seed=number)
        step()
        theirs.step()
    assert not launches
    assert not said("fired")
    for p, q in zip(mine, exact, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-5)
    assert "_fused_" in str(ipex_inductor.explain(ours.step))


def test_steps_counted_on_the_host_go_on(launches):
    """Dynamo moves them to the device."""
    mine = tensors()
    exact = doubles(mine)
    ours, theirs = AdamW(mine, lr=0.01), AdamW(exact, lr=0.01, foreach=False)
    for number in range(2):
        draw(mine, exact, seed=number)
        ours.step()
        theirs.step()
    assert not any(s["step"].is_cuda for s in ours.state.values())
    step = compiled(ours)
    for number in range(3):
        draw(mine, exact, seed=9 + number)
        step()
        theirs.step()
    assert launches
    close(ours, theirs, mine, exact)
    assert {int(s["step"]) for s in ours.state.values()} == {5}


@pytest.mark.parametrize("where", ["number", "host", "device"])
def test_a_schedule(where, launches):
    """A rate that is a number makes one more graph, with the rate as an input; a tensor none."""
    mine = tensors()
    exact = doubles(mine)
    rate = {"number": 0.1, "host": torch.tensor(0.1)}.get(where, torch.tensor(0.1, device="cuda"))
    ours = AdamW(mine, lr=rate, capturable=where != "number")
    theirs = AdamW(exact, lr=0.1, foreach=False)
    schedules = [ExponentialLR(o, 0.7) for o in (ours, theirs)]
    step = compiled(ours)
    for number in range(6):
        draw(mine, exact, seed=number)
        step()
        theirs.step()
        for each in schedules:
            each.step()
    assert len(said("fired")) == (2 if where == "number" else 1)
    assert len(launches) == 18
    # The schedule computes in the rate's dtype, steps of 0.1 are ten times those elsewhere.
    close(ours, theirs, mine, exact, scale=64)


def test_the_host_waits_for_nothing():
    mine = tensors()
    rate = torch.tensor(0.01, device="cuda")
    step = compiled(AdamW(mine, lr=rate, capturable=True))
    for number in range(4):
        draw(mine, seed=number)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error" if number else "default")
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_graph_steps_at_each_replay(launches):
    mine = tensors()
    exact = doubles(mine)
    rate = torch.tensor(0.01, device="cuda")
    ours = AdamW(mine, lr=rate, capturable=True, weight_decay=0.1)
    theirs = AdamW(exact, lr=0.01, weight_decay=0.1, foreach=False)
    step = compiled(ours)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(2):
            draw(mine, exact, seed=number)
            step()
            theirs.step()
    torch.cuda.current_stream().wait_stream(side)
    draw(mine, seed=5)
    graph = torch.cuda.CUDAGraph()
    launches.clear()
    with torch.cuda.graph(graph):
        step()
    assert len(launches) == 3
    held = [p.grad for p in mine]
    for number in range(3):
        draw(mine, exact, seed=10 + number)
        for p, grad in zip(mine, held, strict=True):
            p.grad = grad.copy_(p.grad)
        if number == 1:
            rate.fill_(0.05)
            theirs.param_groups[0]["lr"] = float(rate)
        graph.replay()
        theirs.step()
        if number == 1:  # a step outside changes nothing that a replay reads
            draw(mine, exact, seed=20)
            step()
            theirs.step()
    close(ours, theirs, mine, exact)
    assert {int(s["step"]) for s in ours.state.values()} == {6}


def test_reduce_overhead(launches):
    """The step is launched all the same, and the report says why it is in no CUDA graph."""
    mine = tensors()
    exact = doubles(mine)
    ours, theirs = AdamW(mine, lr=0.01), AdamW(exact, lr=0.01, foreach=False)
    step = torch.compile(ours.step, backend="ipex", mode="reduce-overhead")
    for number in range(4):
        draw(mine, exact, seed=number)
        step()
        theirs.step()
    close(ours, theirs, mine, exact)
    assert len(launches) == 12
    assert said("fired") == ["8 rows of tensors, kernels: 1"]
    assert any("no CUDA graph" in reason for reason in said("choice"))


def test_a_training_function(launches):
    """Forward and backward are compiled as ever; the step, which Dynamo sets apart, is ours."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8)).cuda()
    twin = copy.deepcopy(model).double()

    def trained(net, optimizer):
        def train(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return train

    ours = trained(model, SGD(model.parameters(), lr=0.05, momentum=0.9))
    theirs = trained(twin, SGD(twin.parameters(), lr=0.05, momentum=0.9))
    ours = torch.compile(ours, backend="ipex")
    for _ in range(4):
        x, y = torch.randn(32, 64, device="cuda"), torch.randn(32, 8, device="cuda")
        loss, wanted = ours(x, y), theirs(x.double(), y.double())
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-4, atol=1e-5)  # sums of 2048
    assert len(launches) == 8
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-4, atol=1e-5)


def test_what_is_not_read_says_why(launches):
    mine = tensors(shapes=[(5, 7)])
    exact = doubles(mine)
    ours, theirs = RAdam(mine, capturable=True), RAdam(exact, foreach=False)
    draw(mine, exact, seed=0)
    compiled(ours)()
    theirs.step()
    assert not launches
    assert "none of the operations" in said("missed")[0]
    for p, q in zip(mine, exact, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-5)


def test_memory_that_is_shared_later(launches):
    mine = tensors(shapes=[(6,), (6,)])
    step = compiled(SGD(mine, lr=0.1, foreach=False))  # lists race there, in torch too
    draw(mine, seed=0)
    step()
    mine[1].data = mine[0].data
    start, count = mine[0].detach().clone(), len(launches)
    step()
    assert len(launches) == count
    expected = start - 0.1 * mine[0].grad - 0.1 * mine[1].grad
    torch.testing.assert_close(mine[0].detach(), expected)


COLD = """
import json, sys, time
import torch
form, second, backend = sys.argv[1], sys.argv[2] == "second", sys.argv[3]
if second:
    from ipex_inductor.templates.build import gpu
    def built(*args):
        raise AssertionError("a kernel was compiled")
    gpu._compile_kernel = built
spent = {"printing tensors": 0.0, "printed": 0}
printed = torch._tensor_str._str
def counted(*args, **kwargs):
    begun = time.monotonic()
    try:
        return printed(*args, **kwargs)
    finally:
        spent["printed"] += 1
        spent["printing tensors"] += time.monotonic() - begun
torch._tensor_str._str = counted
size = (2048, 2686)  # 1.1e9 elements in all
ps = [torch.nn.Parameter(torch.full(size, 0.5, device="cuda")) for _ in range(200)]
for p in ps:
    p.grad = torch.full_like(p, 0.25)
optimizer = torch.optim.AdamW(ps, foreach=form == "foreach")
torch.cuda.synchronize()
step = torch.compile(optimizer.step, backend=backend)
begun = time.monotonic()
step()
torch.cuda.synchronize()
spent["first step"] = time.monotonic() - begun
phases = torch._dynamo.utils.compilation_time_metrics
spent["phases"] = {name: round(sum(times), 2) for name, times in phases.items() if sum(times) > 0.1}
if backend == "ipex":
    from ipex_inductor.reporting import decisions
    spent["report"] = [str(e) for r in decisions.reports() for e in r.events]
def per_step(call):
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record()
    begun = time.monotonic()
    for _ in range(20):
        call()
    host = (time.monotonic() - begun) / 20
    events[1].record()
    torch.cuda.synchronize()
    return round(events[0].elapsed_time(events[1]) / 20, 3), round(1e3 * host, 3)
spent["a step, ms, and the host's"] = per_step(step)
value = float(ps[7][3, 5])
if second:
    del optimizer, step
    fused = torch.optim.AdamW(ps, fused=True)
    spent["torch's fused step, ms"] = per_step(fused.step)
print(json.dumps(spent | {"value": value}))
"""


def cold(home, *args):
    env = os.environ | {"IPEX_HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "torch")}
    command = [sys.executable, "-c", COLD, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said_last = json.loads(done.stdout.splitlines()[-1])
    print(*args, json.dumps(said_last, indent=1))
    return said_last


@pytest.mark.alone
def test_cold_compilation_takes_seconds(tmp_path):
    """Of 200 tensors, Dynamo, Triton and imports included; and then from the kernel cache."""
    first = cold(tmp_path, "foreach", "first", "ipex")
    again = cold(tmp_path, "foreach", "second", "ipex")
    one_by_one = cold(tmp_path, "single", "first", "ipex")
    alone = cold(tmp_path, "foreach", "first", "eager")  # Dynamo alone, for the record
    assert any("200 rows of tensors, kernels: 1" in each for each in first["report"])
    assert first["report"] == again["report"] == one_by_one["report"]
    assert first["value"] == again["value"] == pytest.approx(alone["value"], abs=1e-5)
    assert one_by_one["value"] == pytest.approx(alone["value"], abs=1e-5)
    assert first["first step"] <= 8
    # One by one, Dynamo's own tracing takes 6 to 8 s of a host.
    assert one_by_one["phases"]["OutputGraph.call_user_compiler"] <= 2
