"""Steps that one call of C++ looks at and launches: what each launch is given, by a driver of ours.

A GPU's half of a step, on tensors of the host, with a driver that notes what it is told.
"""

import copy
import ctypes
import gc
import random
import sys
import threading
import time
import weakref
from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW

from ipex_inductor.errors import DeviceError
from ipex_inductor.optim import Lamb, Lars, fuse_step, plan_replay, planning
from ipex_inductor.optim.launching import launch_groups_cuda
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.optimizer.step import scalars_function
from ipex_inductor.templates.optimizer.step_triton import signature

pytestmark = pytest.mark.host("a driver that does nothing is told where tensors of the host lie")

KINDS = ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
REFUSED = 719
TABLES = {}  # by their addresses
MADE = {
    "adamw, two groups": lambda p: AdamW([{"params": p[:2]}, {"params": p[2:], "lr": 0.3}], 0.1),
    "sgd": lambda p: SGD(p, 0.1, 0.9, dampening=0.1),
    "adagrad": lambda p: Adagrad(p, 0.1, lr_decay=0.01),
    "lamb": lambda p: Lamb(p, 0.1),
    "lars": lambda p: Lars(p, 0.1, 0.9, epsilon=1e-3),
}


class Sent:
    """A table that stays where it was as long as its stream is the same."""

    def __init__(self, device):
        self._stream, self._there = None, None

    def address(self, values, stream):
        if self._stream != stream:
            self._stream, self._there = stream, values[:]
        self._there[:] = values
        address, _ = self._there.buffer_info()
        TABLES[address] = self._there
        return address


class Room:
    def __init__(self, held):
        self._held = held

    def address(self, stream):
        return self._held.data_ptr()


class Gpu:
    """What the driver was told of each launch, and which stream is current."""

    def __init__(self):
        self.stream, self.refuses, self.waits = 7, 0, 0.0
        self.launches, self.kernels, self.at_once = [], {}, 0
        self.driver = SimpleNamespace(
            cuModuleLoadData=lambda *_: 0,
            cuModuleGetFunction=self._function,
            cuLaunchKernel=ctypes.CFUNCTYPE(ctypes.c_int32, *KINDS)(self._launch),
            cuGetErrorString=lambda *_: 0,
        )

    def _function(self, there, *_):
        ctypes.cast(there, ctypes.POINTER(ctypes.c_void_p))[0] = 1 + len(self.kernels)
        return 0

    def kernel_of(self, kernel, device, aligned, name):
        kinds = [*signature(kernel).values()]
        meta = {"name": name, "signature": kinds, "num_warps": 8, "shared": 0}
        made = cuda.Kernel(SimpleNamespace(blob=b"", meta=meta))
        self.kernels[1 + len(self.kernels)] = kernel
        return made

    def _launch(self, function, *given):
        *_, stream, arguments, _ = given
        time.sleep(self.waits)
        kernel = self.kernels[function]
        kinds = [*signature(kernel).values()]
        places = (ctypes.c_void_p * len(kinds)).from_address(arguments)
        rows = ctypes.c_uint64.from_address(places[0]).value
        pairs = zip(places, kinds, strict=True)
        numbers = [ctypes.c_float.from_address(p).value for p, kind in pairs if kind == "fp32"]
        if self.refuses and len(self.launches) + 1 == self.refuses:
            return REFUSED
        self.launches.append((kernel, stream or 0, rows, numbers))
        return 0


@pytest.fixture
def gpu(monkeypatch):
    there = Gpu()
    TABLES.clear()

    def batch(made, kernel, columns, group, step, first, looks):
        far = planning.count_steps_before(step, first)
        device = columns[0].device
        return planning._find_batch(
            made, launch_groups_cuda.CudaBatch, kernel, device, True, group, far
        )

    def chunks(blocks, device):
        return torch.zeros(sum(blocks), 2, dtype=torch.int32)

    def looked(*args, take):
        seen = look(*args, take=take)
        there.at_once += bool(seen and seen.taken)
        return seen

    look = plan_replay.compare_tensors
    monkeypatch.setattr(plan_replay, "compare_tensors", looked)
    monkeypatch.setattr(cuda, "_driver", lambda: there.driver)
    monkeypatch.setattr(planning, "_batch", batch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name, value in {
        "kernel_of": there.kernel_of,
        "On": lambda device: nullcontext(there.stream),
        "Sent": Sent,
        "Room": Room,
        "stream_on": lambda device: there.stream,
        "chunks_of": chunks,
        "turns_of": chunks,
    }.items():
        monkeypatch.setattr(launch_groups_cuda, name, value)
    return there


def made_by(name):
    params = [nn.Parameter(torch.randn(n)) for n in (3, 5, 4, 7)]
    optimizer = MADE[name](params)
    assert fuse_step(optimizer) is None
    return optimizer


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def trained(optimizer):
    return [p for p in params_of(optimizer) if p.grad is not None]


def draw(optimizer):
    for p in params_of(optimizer):
        p.grad = torch.randn_like(p) if p.grad is None else p.grad


def counted(optimizer):
    """The steps of each parameter, by its address, and whether it had no momentum."""
    found = {}
    for p in trained(optimizer):
        state = optimizer.state.get(p, {})
        found[p.data_ptr()] = float(state.get("step", 0)), "momentum_buffer" not in state
    return found


def agree(gpu, optimizer, before):
    """Each parameter was in one launch, with what is there now, and its group's numbers."""
    at = {p.data_ptr(): (p, group) for group in optimizer.param_groups for p in group["params"]}
    stepped = []
    for kernel, stream, rows, numbers in gpu.launches:
        assert stream == gpu.stream
        table, width = TABLES[rows], len(kernel.columns) + 1
        for first in range(0, len(table), width):
            *addresses, elements = table[first : first + width]
            p, group = at[addresses[0]]
            held = {"param": p, "grad": p.grad, **optimizer.state[p]}
            assert addresses == [held[name].data_ptr() for name, _ in kernel.columns]
            assert elements == p.numel()
            steps, fresh = before[addresses[0]]
            betas = group.get("betas", (0.0, 0.0))
            given = {**group, "beta1": betas[0], "beta2": betas[1], "scale": 1.0}
            own = [float(given.get(name, 0.0)) for name in kernel.numbers]
            far = steps + 1 if kernel.rule.counts else float(fresh)
            assert numbers == [*array("f", scalars_function(kernel)(far, *own))]
            assert not kernel.rule.counts or float(optimizer.state[p]["step"]) == far
            stepped.append(addresses[0])
    assert sorted(stepped) == sorted(before)


def step_and_agree(gpu, optimizer):
    before = counted(optimizer)
    gpu.launches.clear()
    optimizer.step()
    agree(gpu, optimizer, before)


def _group(optimizer, rnd):
    return rnd.choice(optimizer.param_groups)


def _param(optimizer, rnd):
    return rnd.choice(params_of(optimizer))


def _rate(optimizer, rnd):
    _group(optimizer, rnd)["lr"] = rnd.random()


def _same_rate(optimizer, rnd):
    group = _group(optimizer, rnd)
    group["lr"] = float(repr(float(group["lr"])))


def _filled(optimizer, rnd):
    """In its place, as torch's schedulers change a rate that is a tensor."""
    group = _group(optimizer, rnd)
    group["lr"] = torch.as_tensor(group["lr"])
    group["lr"].fill_(rnd.random())


def _decay(optimizer, rnd):
    _group(optimizer, rnd)["weight_decay"] = rnd.choice([0.0, 0.1, 0.2])


def _betas(optimizer, rnd):
    group = _group(optimizer, rnd)
    if "betas" in group:
        group["betas"] = (rnd.choice([0.8, 0.9]), 0.99)


def _moved(optimizer, rnd):
    p = _param(optimizer, rnd)
    p.grad = torch.randn_like(p)


def _absent(optimizer, rnd):
    _param(optimizer, rnd).grad = None


def _counts(optimizer, rnd):
    for own in optimizer.state.values():
        if "step" in own:
            own["step"].add_(2)


def _loaded(optimizer, rnd):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _based(optimizer, rnd):
    p = _param(optimizer, rnd)
    p.data = p.data.clone()


def _states(optimizer, rnd):
    for own in optimizer.state.values():
        own.update({name: value.clone() for name, value in own.items()})


def _turned(optimizer, rnd):
    _group(optimizer, rnd)["params"].reverse()


def _dicts(optimizer, rnd):
    optimizer.param_groups[:] = [dict(group) for group in optimizer.param_groups]


CHANGES = (
    *(_rate, _same_rate, _filled, _decay, _betas, _moved, _absent),
    *(_counts, _loaded, _based, _states, _turned, _dicts),
)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MADE)
def test_each_launch_is_of_what_is_there(name, seed, gpu):
    """Whatever happened since the last step, and on whichever stream."""
    torch.manual_seed(seed)
    rnd = random.Random(seed)
    optimizer = made_by(name)
    for _ in range(200):
        draw(optimizer)
        if rnd.random() < 0.25:
            rnd.choice(CHANGES)(optimizer, rnd)
        if rnd.random() < 0.1:
            gpu.stream = rnd.choice([0, 7, 9])
        versions = {p: p._version for p in trained(optimizer)}
        step_and_agree(gpu, optimizer)
        assert all(p._version == version + 1 for p, version in versions.items())
    assert gpu.at_once > 100


def test_a_rate_that_changes_at_each_step_is_launched_at_once(gpu):
    optimizer = made_by("adamw, two groups")
    draw(optimizer)
    for number in range(10):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number)
        step_and_agree(gpu, optimizer)
    assert gpu.at_once == 9  # all but the first


@pytest.mark.parametrize("name", MADE)
def test_a_rate_that_changes_in_its_place(name, gpu):
    """While gradients stay, and where they moved: numbers that were handed over are not its own."""
    optimizer = made_by(name)
    rates = [torch.tensor(0.1) for _ in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    draw(optimizer)
    for number in range(12):
        if number % 4 == 1:
            _moved(optimizer, random)
        step_and_agree(gpu, optimizer)
        for rate in rates:
            rate.mul_(0.5)
    assert gpu.at_once


@pytest.mark.parametrize("which", [1, 2])
def test_a_launch_that_is_refused_counts_no_steps(which, gpu):
    """Of two groups' the first or the second; the next steps are as if there had been none."""
    optimizer = made_by("adamw, two groups")
    draw(optimizer)
    for _ in range(5):
        optimizer.step()
    before = counted(optimizer)
    gpu.launches.clear()
    gpu.refuses = which
    with pytest.raises(DeviceError):
        optimizer.step()
    gpu.refuses = 0
    stepped = 2 * (which - 1)  # parameters of the first group
    steps = [steps for steps, _ in counted(optimizer).values()]
    assert steps == [5.0 + (n < stepped) for n in range(len(before))]
    for _ in range(3):
        step_and_agree(gpu, optimizer)


def test_a_table_that_was_never_sent_is_not_launched(gpu, monkeypatch):
    """Gradients moved, and the step ended before anything was launched."""
    optimizer = made_by("adagrad")
    draw(optimizer)
    for _ in range(8):  # with numbers of several steps ahead
        optimizer.step()
    _moved(optimizer, random.Random(0))
    with monkeypatch.context() as patched:
        patched.setattr(plan_replay, "run", None)
        with pytest.raises(TypeError):
            optimizer.step()
    step_and_agree(gpu, optimizer)


def test_threads_that_step_one_optimizer_take_a_number_each(gpu):
    optimizer = made_by("lamb")
    draw(optimizer)
    for _ in range(2):
        optimizer.step()
    (turn,) = [batch.turn for batch in vars(optimizer)[plan_replay.KNOWN].made.batches.values()]
    while turn.left != 1:
        optimizer.step()
    far, gpu.waits = turn.far, 0.05
    gpu.launches.clear()
    threads = [threading.Thread(target=optimizer.step) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gpu.waits = 0.0
    assert turn.far == far + 2
    first, second = (numbers for *_, numbers in gpu.launches)
    assert first != second
    step_and_agree(gpu, optimizer)


def test_another_launch_while_the_driver_is_asked(gpu):
    """By another thread, on another stream: each is let go as often as it was held."""
    optimizer = made_by("sgd")
    draw(optimizer)
    for _ in range(3):
        optimizer.step()
    (batch,) = vars(optimizer)[plan_replay.KNOWN].made.batches.values()
    while batch.turn.left < 2:
        optimizer.step()
    first, gpu.waits = batch._last, 0.3

    def other():
        while not batch.turn.busy:
            pass
        gpu.waits, gpu.stream = 0.0, 9
        optimizer.step()

    thread = threading.Thread(target=other)
    thread.start()
    optimizer.step()
    thread.join()
    assert batch._last is not first
    one, other = [sys.getrefcount(each) for each in (first, batch._last)]
    assert one == other


def test_copies_of_attributes_have_yet_to_look(gpu):
    optimizer = made_by("sgd")
    draw(optimizer)
    for _ in range(3):
        optimizer.step()
    assert vars(optimizer)[plan_replay.KNOWN] is not None
    assert copy.deepcopy(vars(optimizer)[plan_replay.KNOWN]) is None


def test_an_optimizer_that_its_parameters_lead_to_is_collected(gpu):
    optimizer = made_by("sgd")
    draw(optimizer)
    for p in params_of(optimizer):
        p.owner = optimizer
    for _ in range(4):
        optimizer.step()
    assert gpu.at_once
    there = weakref.ref(optimizer)
    del p, optimizer
    gc.collect()
    assert there() is None
