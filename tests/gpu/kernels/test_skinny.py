"""Products of few rows on a GPU: the kernel alone, as Inductor has it, and chosen by record."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor.autotune import measure
from ipex_inductor.autotune.database import Shard
from ipex_inductor.autotune.measure import Candidate
from ipex_inductor.autotune.record import Record
from ipex_inductor.compiler.kernel_selection import problems_of
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import compiling, tuner
from ipex_inductor.reporting import decisions
from ipex_inductor.target import device
from ipex_inductor.templates.triton import skinny
from support.autotune.autotune_records import PROVENANCE, timed
from support.cases.skinny_cases import cases, check, linear, offered
from support.helpers import code_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_values_against_fp64(whole):
    """Tensor cores cut where they add, which a processor rounds: four times as far off."""
    for case in cases("cuda", whole):
        check(*case, errors=16)


# Of few tiles each, as a compilation takes a second.
PROBLEMS = {
    "one row": ("bfloat16", 1, 4096, 4096, "gelu"),
    "one row, odd sizes": ("float16", 1, 4099, 1031, "silu"),
    "16 rows": ("bfloat16", 16, 4096, 4096, "gelu_tanh"),
    "some rows, odd sizes": ("float16", 11, 4099, 1031, "relu"),
    "32 rows in fp32": ("float32", 32, 4096, 1024, "gelu"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_with_its_epilogue_in_one_kernel(name):
    """Against fp64, no farther off than torch's own kernels may be; laid out as theirs."""
    problem = linear(*PROBLEMS[name], arch=str(device.current("cuda")))
    trial = tuner._trial(problem, torch.device("cuda"))
    calls = offered(problem)
    assert calls
    for call in calls[:: max(1, len(calls) // 3)]:
        run = compiling.compile_choice(problem, call.choice, trial.inputs)
        found = measure.verify_candidate(Candidate(call.choice, run), trial.judge, trial.inputs)
        assert isinstance(found, float), (call.choice, found.reason)


def joined():
    """The calls for a square layer whose parts are joined."""
    problem = linear("bfloat16", 16, 4096, 4096, "gelu", arch=str(device.current("cuda")))
    return [(problem, call) for call in offered(problem) if "joined" in call.parameters]


@torch.no_grad()
def test_the_same_bits_whatever_runs_beside():
    """Again and again, in streams at once, and in a captured chain of layers.

    There a kernel reads what the one in front has just written, and works in the same memory.
    """
    known = [*joined()]
    assert known
    streams = [torch.cuda.Stream() for _ in range(3)]
    for problem, call in known:
        sets = [inputs_of(problem, torch.device("cuda"), seed) for seed in range(len(streams))]
        run = compiling.compile_choice(problem, call.choice, sets[0])
        wanted = [once(run, inputs) for inputs in sets]
        assert all(torch.equal(once(run, sets[0]), wanted[0]) for _ in range(50)), call.choice
        results = [[] for _ in sets]
        for _ in range(50):
            for stream, inputs, made in zip(streams, sets, results, strict=True):
                with torch.cuda.stream(stream):
                    made.append(run(inputs))
        torch.cuda.synchronize()
        for made, alone in zip(results, wanted, strict=True):
            assert all(torch.equal(result, alone) for result in made), call.choice
        in_chain(run, sets, call)


def once(run, inputs):
    """The result alone on the device."""
    torch.cuda.synchronize()
    result = run(inputs).clone()
    torch.cuda.synchronize()
    return result


def in_chain(run, sets, call):
    """Layers that are one another's inputs, captured, beside one after the other."""
    layers = [inputs[1:] for inputs in sets] * 4
    x = sets[0][0]
    wanted = x
    for layer in layers:
        wanted = once(run, [wanted, *layer])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = x
        for layer in layers:
            given = run([given, *layer])
    for _ in range(20):
        given.fill_(float("nan"))
        graph.replay()
        assert torch.equal(given, wanted), call.choice


def test_a_weight_with_gaps_between_its_rows_and_a_turned_input():
    call = next(c for c in library.linear.skinny.CALLS if c.parameters["columns"] == 32)
    x = torch.randn(515, 5, device="cuda").t()
    weight = torch.randn(64, 600, device="cuda")[:, 3:518]
    body = call.body

    def fn(x, weight):
        return body(x, weight, None, None, "none", "relu", [], False)

    with torch.no_grad():
        result = compiling.static(fn, [x, weight], {})(x, weight)
    wanted = torch.relu(x.double() @ weight.double().t())
    torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-3)  # sums of 515 terms


class Mlp(nn.Module):
    """A hidden layer, whose activation no library of an NVIDIA GPU has."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024, bias=False)

    def forward(self, x):
        return F.silu(self.down(F.gelu(self.up(x))))


class Gated(nn.Module):
    """As a decoder has it: Inductor multiplies and adds behind the products."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(1024, 4096, bias=False) for _ in range(2))
        self.down = nn.Linear(4096, 1024)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


CHOICES = {Mlp: ["linear+gelu", "linear+silu"], Gated: ["linear", "linear", "linear+silu"]}


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("rows", [(1,), (2, 6)], ids=str)
@torch.no_grad()
def test_chosen_by_record_and_captured_in_a_graph(rows, kind, tmp_path):
    """The last tile of each, which of many rows joins parts."""
    model = kind().cuda().eval().bfloat16()
    x = torch.randn(*rows, 1024, device="cuda").bfloat16()
    problems = [p for p in problems_of(lambda: model(x)) if p.op in library.CALLS]
    assert problems
    shard = Shard(tmp_path / "database")
    for problem in problems:
        choices = [call.choice for call in library.calls(problem)]
        assert choices[-1].name == skinny.NAME
        times = (timed(c, 50.0 if c == choices[-1] else 100.0, noise=0.001) for c in choices)
        shard.append(Record(problem, tuple(times), PROVENANCE))
    shard.close()
    torch.compiler.reset()
    decisions.clear()
    counters.clear()
    options = {"strict": True, "autotune_database": str(tmp_path / "database")}
    fn = torch.compile(model, backend="ipex", options={**options, "triton.cudagraphs": True})
    (code,) = code_of(fn, x)
    assert code.count("triton_tem") >= 2
    assert "extern_kernels." not in code
    events = [e for r in decisions.reports() for e in r.events if e.kind == "choice"]
    assert sorted(e.subject for e in events) == CHOICES[kind]
    assert all(e.reason.startswith(skinny.NAME) for e in events)
    for _ in range(4):
        exact = copy.deepcopy(model).double()(x.double())
        eager, result = model(x), fn(x).clone()
        allowed = 2 * (eager - exact).abs().max() + torch.finfo(x.dtype).eps * exact.abs().max()
        assert (result - exact).abs().max() <= allowed  # its own rounding beside torch's
        assert result.stride() == eager.stride()
        x.mul_(-1)
    assert counters["inductor"]["cudagraph_skips"] == 0
