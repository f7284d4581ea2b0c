"""Statistics of batch norms on a GPU by our kernel: values, captured in a graph, in training."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor.passes.training import moments as rule
from ipex_inductor.passes.training import relu_masks
from ipex_inductor.target import device
from ipex_inductor.templates.triton.moments import FASTER, TILE, parts_of
from support.cases import moment_cases
from support.helpers import code_of

pytestmark = pytest.mark.gpu

LAST = torch.channels_last


@pytest.fixture
def _measured(monkeypatch):
    """Where the rule fires, also for small images."""
    arch = device.current("cuda").arch
    if arch not in FASTER:
        pytest.skip(f"the rule leaves {arch}")
    monkeypatch.setitem(FASTER, arch, 1)


@pytest.mark.parametrize("check", ["values", "extremes", "not_finite", "reference"])
def test_values(check):
    """Against fp64, into memory full of NaN."""
    getattr(moment_cases, check)("cuda")


@pytest.mark.parametrize("dtype", moment_cases.DTYPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("shape", [(401408, 64), (100352, 264), (6272, 2048)], ids=str)
def test_as_many_programs_as_fill_the_device(shape, mean, dtype):
    tile = TILE
    x = moment_cases.numbers(*shape, dtype, mean, "cuda")
    count = torch.cuda.get_device_properties(0).multi_processor_count
    moment_cases.close(moment_cases.kernel(x, tile, parts_of(*shape, tile, count)), x)


class Net(nn.Module):
    """Convolutions, batch norms and relu, as nets of images begin."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.two = nn.Conv2d(64, 256, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(64), nn.BatchNorm2d(256)])

    def forward(self, x):
        x = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(self.norms[1](self.two(x)))


def step(model, fn, x, dtype):
    """The result, all gradients and the running statistics."""
    x = x.clone().requires_grad_()
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        y = fn(x)
    (y.double() * torch.linspace(-1, 1, y.shape[1], device="cuda").view(-1, 1, 1)).mean().backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **named, **dict(model.named_buffers())}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("_measured")
def test_training(dtype, monkeypatch):
    """Results, gradients and running statistics are as near to fp64 as eager's, or nearly so."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = Net().cuda().to(memory_format=LAST).train()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(16, 3, 112, 112, device="cuda").to(memory_format=LAST)
    compiled = torch.compile(model, backend="ipex", options={"strict": True})
    made = {}
    forward, backward = code_of(lambda: made.update(step(model, compiled, x, dtype)))
    assert counters["ipex"][rule.NAME] == 2
    assert counters["ipex"][relu_masks.NAME] == 2
    assert len({*_kernels(forward, "column_moments")}) == 2
    assert not _kernels(backward, "moments")
    theirs, truth = step(eager, eager, x, dtype), step(exact, exact, x.double(), None)
    for name, want in truth.items():
        if not want.is_floating_point():
            assert torch.equal(made[name], want)
            continue
        size = want.abs().max()
        off, usual = ((each[name] - want).abs().max() / size for each in (made, theirs))
        assert off <= 2 * usual + 1e-5, (name, off, usual)


def _kernels(code, word):
    calls = (line.split(".run(")[0] for line in code.splitlines() if ".run(" in line)
    return [name for name in calls if word in name]


@pytest.mark.usefixtures("_measured")
def test_captured_in_a_graph_it_reads_what_is_there_then():
    norm = nn.BatchNorm2d(64, momentum=1.0).cuda().train()
    step = torch.compile(norm, backend="ipex", options={"strict": True})
    x = torch.randn(16, 64, 28, 28, device="cuda").to(memory_format=LAST).requires_grad_()
    step(x)
    assert counters["ipex"][rule.NAME] == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(x)
    with torch.no_grad():
        x.mul_(3).add_(1)
    graph.replay()
    variance, mean = torch.var_mean(x.detach().double(), [0, 2, 3])
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var.double(), variance, rtol=1e-4, atol=0)
    wanted = torch.nn.functional.batch_norm(x.detach().double(), None, None, training=True)
    torch.testing.assert_close(y.detach().double(), wanted, rtol=1e-4, atol=1e-4)
