"""Library calls measured while a graph compiles: values, reasons, records and the time it takes.

The sizes are odd, so that no table knows them. All of it is in fp32, where cuDNN rounds to TF32.
"""

import copy
import re
import shutil
import statistics
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.autotune import timers
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.record import encode
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import epilogue_stand_in as stand_in
from ipex_inductor.lowerings.tune import first_call
from ipex_inductor.passes.fusion.library import FIRST_CALL
from ipex_inductor.reporting import decisions

pytestmark = pytest.mark.gpu

LAST = torch.channels_last
FARTHER = 2.0  # than eager, from fp64: as far as a candidate may be on average
OPS = 3  # with a choice in `Block`


class Block(nn.Module):
    """A wide bottleneck: each kind of convolution that cuDNN fuses."""

    def __init__(self):
        super().__init__()
        self.reduce = nn.Conv2d(232, 104, 1)
        self.window = nn.Conv2d(104, 104, 3, padding=1)
        self.expand = nn.Conv2d(104, 232, 1)

    def forward(self, x):
        y = F.relu(self.window(F.relu(self.reduce(x))))
        return F.relu(self.expand(y) + x)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    torch.compiler.reset()
    decisions.clear()
    return tmp_path / "home"


@pytest.fixture
def unhurried(monkeypatch):
    """A graph of three convolutions compiles so fast that the budget is a matter of luck."""
    monkeypatch.setattr(first_call, "PARTS", 1000.0)


def given():
    torch.manual_seed(0)
    net = Block().eval().cuda().to(memory_format=LAST)
    return net, torch.randn(13, 232, 29, 31, device="cuda").to(memory_format=LAST)


@torch.no_grad()
def compiled(net, x, **options):
    """The result, after it was compared with fp64."""
    exact = copy.deepcopy(net).double()(x.double())
    eager = net(x)
    result = torch.compile(net, backend="ipex", options={"strict": True, **options})(x)
    errors = [((y.double() - exact).norm() / exact.norm()).item() for y in (result, eager)]
    assert errors[0] <= FARTHER * errors[1] + torch.finfo(x.dtype).eps, errors
    assert result.stride() == eager.stride()
    return result


def reasons():
    events = [e for r in decisions.reports() for e in r.events if e.kind == "choice"]
    return [e.reason for e in events if e.subject.startswith("conv")]


def summaries():
    events = (e for r in decisions.reports() for e in r.events)
    return [e.reason for e in events if e.subject == FIRST_CALL]


def begin_anew():
    torch.compiler.reset()
    decisions.clear()


@pytest.fixture
def unmeasured(monkeypatch):
    """Returns a function after which measuring anything is an error."""

    def forbid():
        def measures(*_):
            raise AssertionError("something was to be measured")

        monkeypatch.setattr(first_call.FirstCall, "_try_problem", measures)

    return forbid


def test_what_is_measured_is_right_and_said(unhurried):
    compiled(*given())
    said = reasons()
    print(*said, *summaries(), sep="\n")
    assert len(said) == OPS
    assert all("measured at the first call" in reason for reason in said)
    (summary,) = summaries()
    assert summary.startswith(f"{OPS} of {OPS} problems")
    records = [*Records(first_call.folder())]
    assert len(records) == OPS
    for record in records:
        for outcome in record.outcomes:
            assert outcome.timing, (outcome.choice.name, outcome.reason)
            assert outcome.error <= outcome.tolerance
            assert outcome.bandwidth < 1.1  # no more than the memory can do: sets exceed caches
        print({o.choice.name: o.timing.p50 for o in record.outcomes})


def test_a_later_process_finds_the_graph(unhurried, unmeasured, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # graphs are not kept in tests
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", True)
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", True)
    net, x = given()
    first = compiled(net, x)
    said = reasons()
    begin_anew()
    unmeasured()
    assert torch.equal(compiled(net, x), first)
    assert reasons() == said
    outcomes = [e.subject for r in decisions.reports() for e in r.events if e.kind == "cache"]
    assert outcomes == ["hit"]


def test_another_graph_gets_what_was_measured(unhurried, unmeasured, home, tmp_path, monkeypatch):
    """By its record alone: the cache of graphs is another one."""
    net, x = given()
    compiled(net, x)
    said = reasons()
    later = tmp_path / "later"
    shutil.copytree(home / first_call.FOLDER, later / first_call.FOLDER)
    (later / first_call.FOLDER).chmod(0o700)
    later.chmod(0o700)
    monkeypatch.setenv("IPEX_HOME", str(later))
    begin_anew()
    unmeasured()
    compiled(net, x)
    assert reasons() == said
    assert not summaries()


def test_without_a_budget_the_default_is_kept(monkeypatch):
    monkeypatch.setattr(first_call, "PARTS", 0.0)
    compiled(*given())
    assert all(
        reason.endswith("choices; the budget of the first call is spent") for reason in reasons()
    )
    assert len(reasons()) == OPS


def test_the_budget_is_kept_up_to_one_problem(monkeypatch):
    """The first problem loads the library, so it may take longer than all others."""
    monkeypatch.setattr(first_call, "PARTS", 3.0)
    compiled(*given())
    begin_anew()
    other = Block().eval().cuda().to(memory_format=LAST)
    compiled(other, torch.randn(7, 232, 37, 41, device="cuda").to(memory_format=LAST))
    (summary,) = summaries()
    took, budget = map(float, re.fullmatch(r".* in (\S+) s, of (\S+) s", summary).groups())
    print(summary)
    assert took <= budget + 0.2


@pytest.mark.parametrize(
    "options", [{"autotune_first_call": False}, {"autotune": "never"}], ids=str
)
def test_it_can_be_switched_off(options, unmeasured, home):
    unmeasured()
    compiled(*given(), **options)
    assert not summaries()
    assert len(reasons()) == OPS
    assert all(re.search(r"nothing is recorded of \d+ choices$", said) for said in reasons())
    assert not (home / first_call.FOLDER).exists()


def test_training_is_not_measured(unmeasured):
    unmeasured()
    net, x = given()
    torch.compile(net, backend="ipex", options={"strict": True})(x).sum().backward()
    assert not summaries()


def test_fp32_without_tf32_is_verified_as_such(unhurried, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    compiled(*given())
    for record in Records(first_call.folder()):
        assert record.problem.settings["fp32 cuda convolutions"] == "ieee"
        assert max(o.error for o in record.outcomes if o.timing) < 1e-5


def test_a_graph_that_was_captured_before_still_replays(unhurried):
    """Nothing that it reads is freed: cuBLAS's memory, for one."""
    x, weight = (torch.randn(512, 512, device="cuda") for _ in range(2))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x @ weight
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x @ weight
    compiled(*given())
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, x @ weight)


@pytest.mark.alone
@torch.no_grad()
def test_its_timer_agrees_with_a_captured_graph(unhurried):
    compiled(*given())
    device = torch.device("cuda")
    for record in Records(first_call.folder()):
        for call in first_call.cheap_calls(record.problem):
            run = stand_in.run_of_call(record.problem, call)
            buffers = [inputs_of(record.problem, device, seed) for seed in range(8)]
            clocks = timers.QueuedClock(torch.cuda), timers.GraphClock(torch.cuda)
            rounds = [clock.prepare(run, buffers) for clock in clocks]
            times = [statistics.median(round() for _ in range(10)) for round in rounds]
            print(call.name, times)
            assert times[0] == pytest.approx(times[1], rel=0.2)


@pytest.mark.alone
@torch.no_grad()
def test_the_stand_in_is_no_slower_than_inductors_code(unhurried):
    """So a call that beats it beats what would have been compiled."""
    from ipex_inductor.lowerings.tune import compiling

    compiled(*given())
    device = torch.device("cuda")
    for record in Records(first_call.folder()):
        problem = record.problem
        default = library.calls(problem)[0]
        buffers = [inputs_of(problem, device, seed) for seed in range(8)]
        runs = [
            stand_in.run_of_call(problem, default),
            compiling.compile_choice(problem, default.choice, buffers[0]),
        ]
        clock = timers.GraphClock(torch.cuda)
        rounds = [clock.prepare(run, buffers) for run in runs]
        times = [statistics.median(round() for _ in range(20)) for round in rounds]
        print(encode(problem)[:200], times)
        assert times[0] <= 1.1 * times[1]


def test_records_are_in_no_database(unhurried, home):
    """So the package's table is still used, and graphs are not lowered twice for records."""
    compiled(*given())
    assert {p.name for p in Path(home).iterdir()} >= {first_call.FOLDER}
    assert not (home / "autotune").exists()
