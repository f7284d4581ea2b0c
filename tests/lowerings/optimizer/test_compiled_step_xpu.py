"""Compiled steps on an Intel GPU, as far as they can be seen without one.

Graphs are Dynamo's of fake tensors on a described GPU; kernels run on SYCL's CPU device, launched
by the code that launches them there.
"""

import contextlib
import os
import subprocess
import sys
from array import array
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adam, AdamW

from ipex_inductor import backend, compat
from ipex_inductor.compiler.request import Request
from ipex_inductor.config import resolve
from ipex_inductor.errors import MissingPackageError, SyclAbsentError
from ipex_inductor.lowerings.optimizer import step as launching
from ipex_inductor.lowerings.optimizer.step_sycl import SyclKernel
from ipex_inductor.passes.optimizer.updates import Writing
from ipex_inductor.prebuild import described_xpu
from ipex_inductor.prebuild import sycl as building
from ipex_inductor.reporting import decisions
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import find_target as target
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.sycl import device as sycl_device
from ipex_inductor.templates.sycl import ocloc
from ipex_inductor.templates.sycl import step as templates
from support.optim.optimizer_variants import copies, tensors
from support.sycl_device import needs_sycl

pytestmark = pytest.mark.host("graphs of a GPU that is not there")

XPU = torch.device("xpu", 0)
SHAPES = [(3, 5), (7,)]
MADE = {
    "adamw in lists": partial(AdamW, foreach=True, capturable=True),
    "adam one by one": partial(Adam, amsgrad=True, foreach=False, capturable=True),
    "sgd": partial(SGD, momentum=0.9),
}


@needs_sycl
@pytest.mark.slow
@pytest.mark.timeout(1800)  # a suite of its own, ten minutes where others work too
def test_kernels_of_all_optimizers_step_as_those_of_the_cpu(tmp_path):
    """The tests of compiled steps once more, by a plugin."""
    here = Path(__file__).parent
    tests = here.parents[1]
    env = os.environ | {"IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([str(tests), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-p", "support.optim.xpu_plugin", "-q", "-n", "0"]
    # Those three are about C++'s compiler, and what it takes.
    others = "not no_compiler and not cold_compilation and not cases"
    command += ["-m", "slow or not slow", "-k", others, str(here / "test_compiled_step.py")]
    done = subprocess.run(command, env=env, cwd=tests.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


# What Dynamo gives for a GPU


@contextlib.contextmanager
def on_a_gpu(make, rate=0.1, name="xe:bmg"):
    """A graph of a step on that described GPU, as it was launched; the sources that were asked."""
    launched = []

    def told(gm, given):
        config = resolve(None, {"strict": True}, compat.inductor_option_types())
        report = GraphReport()
        launched.append((backend._compile_step(Request(gm, given, config), report), report))
        return gm.forward

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with described_xpu.device(target(name)) as asked, mode:
        params = [nn.Parameter(torch.empty(shape, device=XPU)) for shape in SHAPES]
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer = make(params, lr=0.1)
        optimizer.step()  # Dynamo would make a state that is not fake
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device=XPU) if rate is None else rate
        torch.compile(optimizer.step, backend=told)()
        ((made, report),) = launched
        yield made, report, asked


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("rate", [0.1, None], ids=["of the host", "of the device"])
def test_a_graph_becomes_launches(name, rate):
    with on_a_gpu(MADE[name], rate) as (made, report, asked):
        assert isinstance(made, launching.Launch)
        assert made.program.device == "xpu:0"
        (kernel,) = made.kernels
        assert isinstance(kernel, SyclKernel)
        (update,) = made.program.updates
        held = {dtype for _, dtype in update.numbers}
        assert held == ({"", "float32"} if rate is None else {""})
        assert bool(update.counted) == (name != "sgd")
        (source,) = asked
        assert ("held<float>(mine" in source.text) == (rate is None)
        assert made.source == source.text
        assert [e.kind for e in report.events] == ["fired"]


def test_the_device_and_its_graphs_are_torch_xpus(monkeypatch):
    """And never CUDA's; while a graph is captured a kernel is not to be had."""

    def cuda(*_):
        raise AssertionError("CUDA is asked")

    with on_a_gpu(MADE["sgd"]) as (made, *_):
        entered = []

        def there(device):
            entered.append(device)
            return contextlib.nullcontext()

        monkeypatch.setattr(torch.cuda, "device", cuda)
        monkeypatch.setattr(torch.xpu, "device", there)
        with made._on_device():
            assert entered == [XPU]
            assert made._lock.locked()
        monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: True)
        with pytest.raises(NotBuiltError, match="graph is captured"):
            made.kernels[0].ready([], [])


def test_without_a_runtime_it_is_inductors(monkeypatch):
    """With the reason, which is asked for by those who explain."""

    def absent(device):
        raise SyclAbsentError("the package intel-sycl-rt", "none installed", "Install it.")

    monkeypatch.setattr(templates, "device_of", absent)
    with on_a_gpu(MADE["sgd"]) as (made, report, asked):
        assert made is None
        (event,) = report.events
        assert event.kind == "missed"
        assert "a SYCL kernel is not to be had" in event.reason
        assert not asked


# On SYCL's CPU device


@pytest.fixture
def as_on_xpu(monkeypatch):
    """Compiled steps of the CPU's tensors go that way; kernels read numbers that tensors hold."""
    from support.optim.xpu_plugin import _held_as

    for kind in ("cpu", "sycl"):
        monkeypatch.setitem(launching.KINDS, kind, launching.KINDS["xpu"])
    monkeypatch.setattr(Writing, "_held_as", _held_as)


def stepping(make, params, **options):
    optimizer = make(params)
    step = torch.compile(optimizer.step, backend="ipex", options={"strict": True} | options)
    for p in params:
        p.grad = torch.ones_like(p)
    return optimizer, step


def events(kind):
    return [e.reason for r in decisions.reports() for e in r.events if e.kind == kind]


@needs_sycl
@pytest.mark.parametrize(
    "make",
    [
        partial(AdamW, capturable=True),
        pytest.param(partial(Adam, amsgrad=True), marks=pytest.mark.slow),
    ],
    ids=["adamw capturable", "adam amsgrad"],
)
def test_kernels_step_as_torch_does(as_on_xpu, make):
    """In several dtypes at once; each optimizer's kernel alone: test_launch_groups_sycl.py."""
    dtypes = torch.float32, torch.float64, torch.bfloat16
    ours = [p for dtype in dtypes for p in tensors(dtype, SHAPES)]
    theirs = copies(ours)
    reference = make(theirs, foreach=False, capturable=False)
    _, step = stepping(partial(make, foreach=True), ours)
    for _ in range(2):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        step()
        reference.step()
    assert events("fired")
    assert not events("missed")
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)  # two steps: its defaults are the rounding of storage


@needs_sycl
def test_the_host_reads_no_tensor(as_on_xpu, monkeypatch):
    """A rate that is written between two calls is met by the second."""
    rate = torch.tensor(0.5)
    ours = tensors(shapes=SHAPES)
    theirs = copies(ours)
    optimizer, step = stepping(partial(SGD, lr=rate), ours)
    step()
    rate.fill_(0.25)
    with monkeypatch.context() as changed:
        for name in ("item", "__float__", "tolist"):
            changed.setattr(torch.Tensor, name, partial(pytest.fail, "the host reads a tensor"))
        step()
    assert events("fired")
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q - 0.75)  # exact but for two roundings
    assert optimizer.param_groups[0]["lr"] is rate


@needs_sycl
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
    ids=str,
)
def test_numbers_are_read_in_their_dtype(dtype, as_on_xpu):
    (p,) = tensors(shapes=[(7,)])
    start, rate = p.detach().clone(), torch.tensor(0.3).to(dtype)
    _, step = stepping(partial(SGD, lr=rate), [p])
    step()
    assert events("fired")
    torch.testing.assert_close(p.detach(), start - rate.float())


@needs_sycl
def test_a_device_without_fp64_leaves_it_to_inductor(as_on_xpu, monkeypatch):
    """Which scalars are made in; some of Intel's GPUs have none."""
    on = sycl_device.device_of(torch.device("cpu"))
    monkeypatch.setattr(on, "facts", {**on.facts, "fp64": False})
    monkeypatch.setattr(on, "_modules", {})
    (p,) = tensors(shapes=[(9,)])
    start = p.detach().clone()
    _, step = stepping(partial(SGD, lr=0.5), [p])
    step()
    assert not events("fired")
    assert "without fp64" in events("missed")[0]
    torch.testing.assert_close(p.detach(), start - 0.5)


@needs_sycl
def test_what_fails_later_runs_op_by_op(as_on_xpu, monkeypatch, caplog):
    caplog.set_level("INFO", "ipex_inductor")
    (p,) = tensors(shapes=[(9,)])
    start = p.detach().clone()
    _, step = stepping(partial(SGD, lr=0.5), [p])
    step()

    def captured(*_):
        raise NotBuiltError("a graph is captured")

    monkeypatch.setattr(SyclKernel, "ready", captured)
    step()
    torch.testing.assert_close(p.detach(), start - 1)
    said = [m for m in caplog.messages if "op by op" in m]
    assert said == ["an optimizer's step runs op by op: a graph is captured"]


@pytest.fixture(params=["the GPU's way", "the CPU's"])
def either(request):
    """By the code of either device."""
    if request.param != "the CPU's":
        request.getfixturevalue("as_on_xpu")


@needs_sycl
def test_an_update_without_numbers(either):
    """Its rows share nothing, yet their scalars have room: it was in others' memory."""
    p, count = tensors(shapes=[(3, 5), (4,)])
    start = count.detach().clone()
    _, step = stepping(Adds, [p, count], sycl="cpu")
    step()
    assert events("fired")
    torch.testing.assert_close(count.detach(), start + 1)


class Adds(torch.optim.Optimizer):
    """1 to each parameter."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        torch._foreach_add_(self.param_groups[0]["params"], 1)


@needs_sycl
def test_steps_of_tensors_without_elements_are_counted(either):
    (p,) = tensors(shapes=[(0,)])
    make = partial(AdamW, lr=torch.tensor(0.1), capturable=True, foreach=True)
    optimizer, step = stepping(make, [p], sycl="cpu")
    for _ in range(3):
        step()
    assert events("fired")
    assert float(optimizer.state[p]["step"]) == 3


def test_a_table_is_sent_when_it_or_the_stream_is_another(monkeypatch):
    on, sent = SimpleNamespace(queue=1), []
    monkeypatch.setattr(templates, "device_of", lambda device: on)
    monkeypatch.setattr(torch, "frombuffer", lambda *a, **k: sent.append(a) or torch.ones(2))
    table, there = array("q", [3, 4]), templates.Sent(torch.device("cpu"))
    for change in (None, None, "table", None, "stream", None):
        if change == "table":
            table[0] = 5
        on.queue += change == "stream"
        there(table)
    assert [[*a[0]] for a in sent] == [[3, 4], [5, 4], [5, 4]]


# Native code


@pytest.mark.slow
@needs_sycl
@pytest.mark.parametrize(("chip", "spilled"), [("xe:bmg", 0), ("xe:pvc", 896)])
def test_native_code_of_elements_spills_nothing(chip, spilled):
    """Scalars may: powers in fp64 by 32 lanes do on pvc, once a tensor."""
    try:
        ocloc.compiler_name()
    except MissingPackageError as error:
        pytest.skip(str(error))
    with on_a_gpu(MADE["adamw in lists"], None, chip) as (*_, asked):
        (source,) = asked
    built = building._Built(target(chip))
    built.add(source, "adamw")
    rows = {row["kernel"].removeprefix("__sycl_kernel_"): row for row in built.gate}
    assert rows.keys() == {"scalars", "update"}
    assert rows["update"]["wrong"] == ""
    assert rows["scalars"]["spilled"] <= spilled
    assert not rows["scalars"]["stack_calls"]
