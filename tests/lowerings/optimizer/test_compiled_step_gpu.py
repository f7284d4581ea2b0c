"""Compiled steps on a GPU, as far as they can be seen without one."""

import os
import subprocess
import sys
from array import array
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, AdamW

from ipex_inductor import backend, compat
from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.compiler.request import Request
from ipex_inductor.config import resolve
from ipex_inductor.lowerings.optimizer import step as launching
from ipex_inductor.lowerings.optimizer import step_cuda
from ipex_inductor.passes.optimizer import step as reading
from ipex_inductor.passes.optimizer.terms import UnreadError
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import find_target
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.build.gpu import binary
from ipex_inductor.templates.optimizer.step_cuda import APART
from ipex_inductor.templates.optimizer.update_triton import (
    scalars_signature,
    step_signature,
    update_triton_source,
)

pytestmark = pytest.mark.host(
    "graphs of a GPU that is not there; tests/gpu/test_compiled_step.py runs them"
)

SHAPES = [(3, 5), (7,), ()]
ADAMW = partial(AdamW, lr=torch.tensor(0.1), capturable=True)
MADE = {
    "in lists": partial(ADAMW, foreach=True),
    "one by one": partial(ADAMW, foreach=False),
    "sgd": partial(SGD, lr=torch.tensor(0.1), momentum=0.9, foreach=True),
}
# What the interpreter cuts to bf16 it does not round: no low precision.
TESTS = "as_near or several_dtypes or changing_rate or layouts or shared_later or read_on_elements"
TESTS += " or rate_in_fp32"
LONG = pytest.mark.timeout(1800)
QUICK = TESTS.replace("as_near", "(as_near and (capturable or rmsprop or momentum))")
QUICK = QUICK.replace("rate_in_fp32", "(rate_in_fp32 and adamw)")
QUICK = QUICK.replace("changing_rate or layouts or ", "")  # whose kernels are those of the others
fakes = FakeTensorMode()


@pytest.mark.slow  # 16 s; formulas by the interpreter: test_step_triton.py
@pytest.mark.parametrize(
    ("marks", "tests"),
    [
        ("not slow", QUICK),
        pytest.param(
            "slow or not slow", TESTS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]
        ),
    ],
    ids=["some", "all"],
)
def test_interpreted_kernels_step_as_those_of_the_cpu(marks, tests, tmp_path):
    """Some of the tests of compiled steps once more, by a plugin."""
    here = Path(__file__).parent
    folder = here.parents[1]
    env = os.environ | {"TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-p", "support.optim.triton_plugin", "-q", "-n", "0"]
    command += ["-m", marks, "-k", tests, str(here / "test_compiled_step.py")]
    done = subprocess.run(command, env=env, cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def on(device, value):
    """A fake of that tensor on `device`, of any nesting."""
    if isinstance(value, (list, tuple)):
        return [on(device, each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    with fakes:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def graph_of(make, device="cuda:0", stays=lambda name: False):
    """Dynamo's graph of a second step, as it is for tensors of `device`; but for those that stay.

    Graphs of tensors of a GPU were compared with those of the CPU, where `capturable` is set.
    """
    graphs = []

    def kept(gm, _):
        graphs.append((gm, {**gm._buffers}, {**gm._parameters}))
        return gm.forward

    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    for p in params:
        p.grad = torch.randn_like(p)
    step = torch.compile(make(params).step, backend=kept)
    step()
    step()
    gm, buffers, parameters = graphs[-1]
    gm.meta["step"] = step  # with an optimizer the attributes of its graphs go
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if value is not None and not (node.op == "placeholder" and stays(node.name)):
            node.meta["example_value"] = on(device, value)
    for held, known in ((gm._buffers, buffers), (gm._parameters, parameters)):
        held.update((name, t if stays(name) else on(device, t)) for name, t in known.items())
    return gm


@torch.no_grad()
def program_of(gm):
    return reading.program_of(gm)


# Quickly each of the two for a GPU of its own.
WHERE = {"host": "a100-80gb", "device": "h200"}
PLACES = [
    pytest.param(rate, gpu, marks=[pytest.mark.slow] * (gpu != WHERE[rate]))
    for rate, gpu in product(WHERE, WHERE.values())
]


@pytest.mark.sampled("host-a100-80gb-in lists", "device-h200-one by one", "device-h200-sgd")
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(("rate", "gpu"), PLACES)
def test_a_graph_of_a_gpu_is_read_and_compiled(name, rate, gpu, tmp_path, monkeypatch):
    """For GPUs that are not here; a rate is a number of the host's, or read where it lies."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    gm = graph_of(MADE[name], stays=lambda node: rate == "host" and "_lr" in node)
    program, _ = program_of(gm)
    assert program.device == "cuda:0"
    (update,) = program.updates
    dtypes = {dtype for _, dtype in update.numbers}
    assert dtypes == ({"", "float32"} if rate == "device" else {""})
    compiled(update, "step", step_signature(update), {"ALIGNED": 16, "BLOCK": 1024}, gpu)
    compiled(update, "scalars", scalars_signature(update), {"BLOCK": 32}, gpu)


def compiled(update, name, signature, constants, gpu):
    problem = pairs({"template": "update", **vars(update)})
    source, options = update_triton_source(update), {"num_warps": 4, **APART}
    made = binary(source, name, find_target(gpu), problem, signature, constants, options)
    assert made.blob[:4] == b"\x7fELF"
    assert made.meta["signature"] == list(signature.values())


@pytest.fixture
def asked(monkeypatch):
    """The kernels that would have been loaded."""
    names = []

    def loaded(source, name, device, *_):
        names.append((name, str(device)))

    monkeypatch.setattr(step_cuda, "load_triton_kernel", loaded)
    step_cuda._kernel_or_why.cache_clear()
    yield names
    step_cuda._kernel_or_why.cache_clear()


@torch.no_grad()
def test_the_report_says_why_there_is_no_cuda_graph(asked):
    gm, report = graph_of(MADE["in lists"]), GraphReport()
    options = compat.inductor_option_types()
    config = resolve("reduce-overhead", {}, options)
    launched = backend._compile_step(Request(gm, [], config), report)
    assert isinstance(launched, launching.Launch)
    assert asked == [("scalars", "cuda:0"), ("step", "cuda:0")]
    assert "def scalars" in launched.source
    kinds = {e.kind: e.reason for e in report.events}
    assert kinds["fired"] == "3 rows of tensors, kernels: 1"
    assert "no CUDA graph" in kinds["choice"]


@torch.no_grad()
def test_a_variant_that_cannot_be_built_is_tried_once(monkeypatch):
    """Unaligned rows come at some later step, and may come at each from then on."""
    tried = []

    def loaded(source, name, device, problem, signature, constants, warps):
        if constants.get("ALIGNED") == 1:
            tried.append(name)
            raise NotBuiltError("too many registers")

    monkeypatch.setattr(step_cuda, "load_triton_kernel", loaded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    step_cuda._kernel_or_why.cache_clear()
    gm = graph_of(MADE["in lists"])
    program, examples = program_of(gm)
    ((update, rows),) = program.updates.items()
    kernel = step_cuda.CudaKernel(update, rows, examples)
    odd = array("q", [8] * len(rows) * (len(update.columns) + 1))
    for _ in range(3):
        with pytest.raises(NotBuiltError, match="too many registers"):
            kernel._launches(odd)
    assert tried == ["step"]
    step_cuda._kernel_or_why.cache_clear()


def test_steps_of_the_host_are_not_read():
    """Which Dynamo moves to the device, but for those of an optimizer that has stepped in part."""
    gm = graph_of(MADE["in lists"], stays=lambda name: name.endswith("____0"))
    with pytest.raises(UnreadError, match="of the host"):
        program_of(gm)


def test_tensors_of_two_gpus_are_not_read():
    gm = graph_of(MADE["in lists"])
    grad = next(n for n in gm.graph.nodes if "_grad" in n.name)
    grad.meta["example_value"] = on("cuda:1", torch.empty(3, 5))
    with pytest.raises(UnreadError, match="several devices"):
        program_of(gm)


def test_other_devices_have_no_kernel(asked):
    gm = graph_of(MADE["in lists"], device="mps:0")
    assert launching.launch(gm, *program_of(gm)) == "no kernel for mps yet"
    assert not asked
