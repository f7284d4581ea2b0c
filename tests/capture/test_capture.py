"""Which graphs may be captured, what is decided by what was timed, and that results stay whose."""

import contextlib
import copy
import functools
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor import compat, explain
from ipex_inductor.capture import cuda, policy, reasons
from ipex_inductor.capture.code import CapturedCode
from ipex_inductor.capture.cuda import Time
from ipex_inductor.capture.policy import CAPTURES, MOVED, NAME, ROUNDS, WARM_UP, Calls
from ipex_inductor.compat import uncapturable
from ipex_inductor.compiler.request import Request
from ipex_inductor.reporting import decisions
from ipex_inductor.reporting.decisions import GraphReport
from support.helpers import Mlp, pickled

pytestmark = pytest.mark.unit

aten = torch.ops.aten

# Of a trial: the first call, those before the capture, the upload, replays and calls in turns.
TIMINGS = 1 + ROUNDS + 1 + 2 * ROUNDS


class Machine:
    """A device whose graphs are calls on places, and whose clock says what the test wants."""

    launched, replayed, host = 3e-3, 1e-3, 0.9
    free, fails = True, None

    def __init__(self, index=0):
        self.index, self.graphs, self.timings = index, [], 0

    def is_free(self):
        return self.free

    def settle(self):
        pass

    def time_call(self, call):
        self.timings += 1
        before = sum(graph.calls for graph in self.graphs)
        results = call()
        after = sum(graph.calls for graph in self.graphs)
        total = self.replayed if after > before else self.launched
        return results, Time(total * self.host, total)

    def capture(self, call, inputs, moving):
        if self.fails is not None:
            raise self.fails
        self.graphs.append(Replayed(call, inputs, moving))
        return self.graphs[-1]


class Replayed:
    """`cuda.Graph` without a graph: its results are one memory, as a graph's are."""

    def __init__(self, call, inputs, moving):
        given = [torch.full_like(x, 99) if i in moving else x for i, x in enumerate(inputs)]
        self.places = [given[i] for i in moving]
        self.call, self.given, self.calls = call, given, 0

    def __call__(self, moving):
        self.calls += 1
        for place, value in zip(self.places, moving, strict=True):
            place.copy_(value)
        return [r.clone() for r in self.call([*self.given])]


class Code:
    """Inductor's code, boxed: the first input by the second, which is a weight."""

    def __init__(self):
        self.calls = 0

    def __call__(self, inputs):
        self.calls += 1
        x, weight = inputs
        inputs.clear()
        return [x * weight]


@pytest.fixture
def machine(monkeypatch):
    """The one that each graph's first call asks for."""
    made = Machine()
    monkeypatch.setattr(cuda, "Device", lambda index: made)
    return made


def started():
    report = GraphReport()
    return Calls(Code(), (1,), (0,), report), report


def said(report):
    return [event.reason for event in report.events if event.subject == NAME]


def called(calls, x, weight):
    inputs = [x, weight]
    (result,) = calls(inputs)
    assert inputs == []
    torch.testing.assert_close(result, x * weight, rtol=0, atol=0)
    return result


def test_a_graph_is_captured_where_launching_it_takes_longer(machine):
    calls, report = started()
    weight = torch.randn(4)
    for _ in range(WARM_UP):
        called(calls, torch.randn(4), weight)
    assert (machine.timings, said(report)) == (0, [])
    called(calls, torch.randn(4), weight)
    assert said(report) == ["captured: a call takes 1 ms in a CUDA graph, 3 ms kernel by kernel"]
    assert machine.timings == TIMINGS
    before = calls._call.calls
    kept = [(x, called(calls, x, weight)) for x in torch.randn(5, 4)]
    for x, result in kept:  # nobody's result is written by a later call
        torch.testing.assert_close(result, x * weight, rtol=0, atol=0)
    assert calls._call.calls == before + len(kept)  # each of them through the graph
    assert machine.graphs[0].calls == 1 + ROUNDS + len(kept)
    weight.mul_(2)  # in place: the graph reads it where it is
    called(calls, torch.randn(4), weight)
    assert machine.graphs[0].calls == 2 + ROUNDS + len(kept)


@pytest.mark.parametrize(
    ("changes", "reason", "timings"),
    [
        ({"host": 0.3}, "0.9 ms to launch what takes 3 ms, so the host does not hold up", 1),
        ({"replayed": 2.95e-3}, "a call takes 2.95 ms in a CUDA graph, 3 ms kernel", TIMINGS),
        ({"fails": RuntimeError("no")}, "not captured: RuntimeError: no", 1 + ROUNDS),
        ({"fails": torch.OutOfMemoryError("full")}, "OutOfMemoryError: full", 1 + ROUNDS),
    ],
)
def test_what_is_not_kept_runs_as_it_did_and_says_why(machine, changes, reason, timings):
    vars(machine).update(changes)
    calls, report = started()
    weight = torch.randn(4)
    for _ in range(WARM_UP + 3):
        called(calls, torch.randn(4), weight)
    (line,) = said(report)
    assert reason in line
    assert line.startswith("not captured")
    assert calls._graph is None
    assert machine.timings == timings  # and never again


def test_an_interrupted_capture_is_raised_and_leaves_a_working_graph(machine):
    machine.fails = KeyboardInterrupt()
    calls, report = started()
    x, weight = torch.randn(2, 4)
    for _ in range(WARM_UP):
        called(calls, x, weight)
    with pytest.raises(KeyboardInterrupt):
        calls([x, weight])
    assert said(report) == ["not captured: it was interrupted"]
    called(calls, x, weight)
    assert not calls._lock.locked()


def test_weights_that_moved_are_run_as_they_are_then_captured_anew(machine):
    calls, report = started()
    weights = torch.randn(CAPTURES + 2, 4)
    x = torch.randn(4)
    for turn, weight in enumerate(weights[:CAPTURES]):
        for _ in range(WARM_UP + 1 if not turn else MOVED):
            called(calls, x, weight)
        assert len(machine.graphs) == turn + 1
        replays = machine.graphs[-1].calls
        called(calls, x, weight)
        assert machine.graphs[-1].calls == replays + 1
    for _ in range(2 * MOVED):
        called(calls, x, weights[-1])
    assert len(machine.graphs) == CAPTURES
    assert calls._graph is None
    assert said(report)[-1] == f"not captured again: weights moved {CAPTURES} times"


@pytest.mark.parametrize("setting", ["allow_tf32", "deterministic", "benchmark", "enabled"])
def test_what_cudnn_is_told_later_is_done(setting, machine, monkeypatch):
    """A replay would go on as it was told when it was captured; Dynamo guards none of these."""
    calls, _ = started()
    x, weight = torch.randn(2, 4)
    for _ in range(WARM_UP + 1):
        called(calls, x, weight)
    replays = machine.graphs[-1].calls
    monkeypatch.setattr(torch.backends.cudnn, setting, not getattr(torch.backends.cudnn, setting))
    called(calls, x, weight)
    assert machine.graphs[-1].calls == replays


def test_large_inputs_and_results_are_not_kept_twice(machine, monkeypatch):
    monkeypatch.setattr(policy, "COPIED", 31)
    calls, report = started()
    for _ in range(WARM_UP + 1):
        called(calls, *torch.randn(2, 4))
    assert not machine.graphs
    assert "would be held a second time" in said(report)[-1]


def test_two_models_in_turns_keep_the_graph_of_one(machine):
    calls, _ = started()
    one, two = torch.randn(2, 4)
    for _ in range(WARM_UP + 1):
        called(calls, torch.randn(4), one)
    for _ in range(2 * MOVED):
        called(calls, torch.randn(4), two)
        called(calls, torch.randn(4), one)
    assert len(machine.graphs) == 1
    assert machine.graphs[0].calls == 1 + ROUNDS + 2 * MOVED


def test_what_the_user_captures_or_traces_himself_is_no_call_of_the_graph(machine):
    calls, _ = started()
    x, weight = torch.randn(2, 4)
    machine.free = False
    for _ in range(WARM_UP + 3):
        called(calls, x, weight)
    assert machine.timings == 0
    machine.free = True
    called(calls, x, weight)
    replays = machine.graphs[0].calls
    machine.free = False
    called(calls, x, weight)
    assert machine.graphs[0].calls == replays


def test_fake_tensors_decide_nothing(machine):
    calls, report = started()
    with FakeTensorMode():
        for _ in range(WARM_UP + 2):
            calls([torch.empty(4), torch.empty(4)])
    assert (machine.timings, said(report)) == (0, [])


def test_explain_has_it_decided_in_one_call(machine):
    calls, report = started()
    with policy.at_once():
        called(calls, *torch.randn(2, 4))
    assert said(report)[0].startswith("captured: ")


def test_a_thread_that_comes_meanwhile_runs_as_it_is(machine):
    calls, _ = started()
    x, weight = torch.randn(2, 4)
    for _ in range(WARM_UP):
        called(calls, x, weight)
    inside, other = machine.capture, []

    def capture(*args):
        thread = threading.Thread(target=lambda: other.append(called(calls, x, weight)))
        thread.start()
        thread.join(10)
        return inside(*args)

    machine.capture = capture
    called(calls, x, weight)
    assert len(other) == 1
    assert len(machine.graphs) == 1


def test_a_dropped_graph_leaves_nothing(machine):
    calls, _ = started()
    x, weight = torch.randn(2, 4)
    for _ in range(WARM_UP + 1):
        called(calls, x, weight)
    place = weakref.ref(machine.graphs[0].places[0])
    machine.graphs.clear()
    del calls
    assert place() is None  # without a collection: there is no cycle


X = torch.randn(4, 4)


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ([X + 1, None, X.new_zeros(3)[::2]], ""),
        ([X], "a result is an input"),
        ([X.t()], "a result is an input"),
        ([(y := X + 1), y[0]], "two results share their memory"),
        ([torch.ones(4).expand(2, 4)], "a result overlaps itself"),
        ([torch.ones(4, device="meta")], "a result is on another device"),
        ([X.to_sparse()], "a result is not a plain tensor"),
    ],
)
def test_results_that_cannot_be_copied(results, reason):
    found = reasons.why_not_results(results, [X])
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.ones(3, 4), False),
        (torch.ones(3, 4).t(), False),
        (torch.ones(8, 4)[::2, 1:3], False),
        (torch.ones(1, 4).expand(1, 4), False),
        (torch.ones(4).expand(2, 4), True),
        (torch.ones(9).as_strided((3, 3), (2, 1)), True),
        (torch.ones(0, 4).expand(0, 4), False),
        (torch.ones(()), False),
    ],
)
def test_overlaps(value, expected):
    assert reasons.overlaps(value) is expected


def traced(fn, *args):
    """As AOT autograd would."""
    return make_fx(fn, tracing_mode="fake")(*args)


def attention(p):
    def call(x):
        q = x.view(1, 1, 4, 4)
        return aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, p)[0]

    return call


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: aten.relu(x).sum(), ""),
        (lambda x: aten.native_dropout(x, 0.5, True)[0], "aten.native_dropout.default draws"),
        (lambda x: aten.rand_like(x), "aten.rand_like.default draws random numbers"),
        (attention(0.0), ""),
        (attention(0.1), "draws random numbers"),
        (lambda x: aten.as_strided(aten.view(x, [16]), [2], [1], 3), "beyond an input"),
        (lambda x: aten.as_strided(x + 1, [2], [1], 3), ""),
    ],
)
def test_ops_that_are_not_captured(fn, reason):
    gm = traced(fn, X)
    found = reasons.why_not(gm, [X], (0,))
    assert reason in found
    assert bool(found) == bool(reason)


def test_inputs_that_are_not_captured():
    gm = traced(lambda x, y: x + y, X, X)
    assert reasons.why_not(gm, [X, X.new_ones(4).expand(4, 4)], (0, 1)) == "input 1 overlaps itself"
    assert reasons.why_not(gm, [X, X.new_ones(4).expand(4, 4)], (0,)) == ""
    assert reasons.why_not(gm, [X, 3], ()) == "a size or number among the inputs varies"
    with FakeTensorMode() as mode:
        elsewhere = FakeTensor(mode, torch.empty(4, 4, device="meta"), torch.device("cuda:0"))
    assert "several devices: cpu, cuda:0" in reasons.why_not(gm, [X, elsewhere], ())
    assert reasons.why_not(traced(lambda: torch.ones(3)), [], ()) == "it has no inputs"


def test_inputs_that_nobody_reads_are_neither_copied_nor_compared():
    gm = traced(lambda x, y, z, w: x + z, *(X.clone() for _ in range(4)))
    assert reasons.inputs_read(gm, (0, 1)) == ((0,), (2,))


def test_what_inductor_says():
    class Made:
        disabled_cudagraphs_reason = None
        device_types, device_idxs = ("cuda",), (0,)

    def of(**changes):
        return reasons.why_not_code(type("Other", (Made,), changes)())

    assert of() == ""
    assert of(disabled_cudagraphs_reason="skipping ...\n at") == "skipping ..."
    assert of(device_types=("cuda", "cpu")) == "its code runs on cpu, cuda"
    assert of(device_idxs=(0, 1)) == "its code runs on cuda"


def test_torch_names_what_it_cannot_capture():
    assert uncapturable(traced(lambda x: aten.relu(x), X)) is None
    assert uncapturable(traced(lambda x: aten.nonzero(x.new_ones(4)), X)) is not None


@pytest.fixture
def captures(machine, monkeypatch):
    """Graphs on this CPU may be captured."""
    may = property(lambda r: r.config.capture and r.config.mode == "default" and not r.training)
    monkeypatch.setattr(Request, "may_capture", may)
    monkeypatch.setattr(reasons, "KINDS", {"cpu"})
    return machine


class Norm(nn.Module):
    """Weights derived from others, which are plain tensors on a CPU too."""

    def __init__(self):
        super().__init__()
        self.w, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return F.relu(x * (self.w * self.scale).sum(0))


def events(kind="choice"):
    found = (e for report in decisions.reports() for e in report.events)
    return [e.reason for e in found if e.subject == NAME and e.kind == kind]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_compiled_model_and_its_weights(captures, mode):
    model = Norm().eval()
    run = torch.compile(model, backend="ipex", options={"strict": True})
    with mode():
        for _ in range(WARM_UP + 3):
            x = torch.randn(4, 8)
            torch.testing.assert_close(run(x), model(x))
        (graph,) = captures.graphs
        replays = graph.calls
        with torch.no_grad():
            model.scale.mul_(-2)
        for _ in range(2):
            x = torch.randn(4, 8)
            torch.testing.assert_close(run(x), model(x))
    assert events()[0].startswith("captured: ")
    # Derived weights are written to where they were: the first call after a change derives them.
    assert (captures.graphs, graph.calls) == ([graph], replays + 2)
    model.load_state_dict(Norm().state_dict(), assign=True)
    with mode():
        for _ in range(MOVED + 2):
            torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize(
    ("options", "mode"),
    [({"capture": False}, None), ({}, "max-autotune-no-cudagraphs")],
    ids=["option", "mode"],
)
def test_off(captures, options, mode):
    options = {"strict": True, "autotune": "never", **options, **({"mode": mode} if mode else {})}
    run = torch.compile(Norm(), backend="ipex", options=options)
    with torch.no_grad():
        for _ in range(WARM_UP + 2):
            run(torch.randn(4, 8))
    assert (captures.timings, events(), events("missed")) == (0, [], [])


def test_training_and_varying_sizes_are_not_captured(captures):
    run = torch.compile(Mlp(), backend="ipex", options={"strict": True}, dynamic=True)
    run(torch.randn(4, 32)).sum().backward()
    assert events("missed") == []
    with torch.no_grad():
        for size in (4, 5, 6, 7):
            run(torch.randn(size, 32))
    assert captures.timings == 0
    assert any("varies" in reason for reason in events("missed"))


class Counts(nn.Module):
    """Writes a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


class Cache(nn.Module):
    """A step of decoding: writes a row of a cache behind the last, and reads all of them."""

    def __init__(self, rows=64):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8))
        self.start(rows)

    def start(self, rows=64):
        """Another cache, at another address."""
        self.register_buffer("rows", torch.zeros(rows, 8))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        self.rows.index_copy_(0, self.at, x * self.w)
        self.at.add_(1)
        return F.relu(self.rows.sum(0))


def written(model):
    return {name: value.clone() for name, value in model.named_buffers()}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [Counts, Cache])
def test_a_graph_that_writes_its_inputs_is_captured_and_runs_once_a_call(captures, make, mode):
    """Sums and positions would show one run too many: the last call writes the last row."""
    calls = WARM_UP + TIMINGS + 5
    model = Cache(calls) if make is Cache else make()
    twin, where = copy.deepcopy(model), [value.data_ptr() for value in model.buffers()]
    run = torch.compile(model, backend="ipex", options={"strict": True})
    results = []
    with mode():
        for _ in range(calls):
            x = torch.randn(*(1, 8)[make is Counts :])
            results.append((run(x), twin(x)))
            torch.testing.assert_close(written(model), written(twin))
    for result, expected in results:  # nobody's result is written by a later call
        torch.testing.assert_close(result, expected)
    assert [value.data_ptr() for value in model.buffers()] == where
    (graph,) = captures.graphs
    assert graph.calls == 1 + ROUNDS + 5
    assert captures.timings == TIMINGS
    assert (events("missed"), len(events())) == ([], 1)
    assert events()[0].startswith("captured: a call takes 1 ms in a CUDA graph")


def test_another_cache_is_written_where_it_is(captures):
    model = Cache()
    twin = copy.deepcopy(model)
    run = torch.compile(model, backend="ipex", options={"strict": True})
    with torch.no_grad():
        for turn in range(CAPTURES + 1):
            for _ in range(MOVED + TIMINGS + 2):
                x = torch.randn(1, 8)
                torch.testing.assert_close(run(x), twin(x))
                torch.testing.assert_close(written(model), written(twin))
            before = written(model)
            kept = dict(model.named_buffers())
            assert len(captures.graphs) == min(turn + 1, CAPTURES)
            model.start()
            twin.start()
            x = torch.randn(1, 8)
            torch.testing.assert_close(run(x), twin(x))
            torch.testing.assert_close(kept, before)  # nothing is written where the cache was
    assert events()[-1] == f"not captured again: weights moved {CAPTURES} times"


def test_two_caches_in_turns_are_each_written_once_a_call(captures):
    """Whatever is under way: warm-up, a trial that is begun again each time, and no trial more."""
    model = Cache()
    twin, spare = copy.deepcopy(model), [dict(Cache().named_buffers()) for _ in range(2)]
    run = torch.compile(model, backend="ipex", options={"strict": True})
    with torch.no_grad():
        for _ in range(60):
            x = torch.randn(1, 8)
            torch.testing.assert_close(run(x), twin(x))
            torch.testing.assert_close(written(model), written(twin))
            for each, (one, other) in zip((model, twin), [spare[:2]] * 2, strict=True):
                aside = other if each is twin else one
                for name, value in dict(each.named_buffers()).items():
                    setattr(each, name, aside[name])
                    aside[name] = value
    assert len(captures.graphs) == CAPTURES
    assert events() == ["not captured: what it writes moved while it was timed"]


def test_an_input_in_memory_that_is_written_is_read_where_it_is(captures):
    """Inductor has no guard for it; a copy made before the write would never see that."""
    report = GraphReport()

    def code(inputs):
        x, cache = inputs
        inputs.clear()
        cache.add_(1)
        return [x * 2]

    calls = Calls(code, (1,), (0,), report, (1,))
    cache, apart = torch.zeros(4, 8), torch.ones(8)
    for count in range(1, WARM_UP + TIMINGS + 12):
        x = cache[1] if count % 2 else apart
        (result,) = calls([x, cache])
        torch.testing.assert_close(result, x * 2, rtol=0, atol=0)
        torch.testing.assert_close(cache, torch.full((4, 8), float(count)), rtol=0, atol=0)
    while not said(report):
        calls([apart, cache])
    (graph,) = captures.graphs
    replays = graph.calls
    (result,) = calls([cache[1:2, 2:4], cache])
    torch.testing.assert_close(result, cache[1:2, 2:4] * 2, rtol=0, atol=0)
    assert graph.calls == replays
    calls([apart, cache])
    assert graph.calls == replays + 1


BASE = torch.zeros(100)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (BASE[:10], False),
        (BASE[5:11], True),
        (BASE[12:14], True),
        (BASE[20:30], False),
        (BASE[29:31], True),
        (BASE[39:45], True),
        (BASE[40:41], False),
        (BASE[:100:50], True),  # between its elements, which is more than need be
        (BASE[90:90], False),
        (torch.zeros(3), False),
    ],
)
def test_memory_that_is_written(value, expected):
    written = policy.addresses([BASE[30:40], BASE[10:20].view(2, 5).t(), BASE[32:34]])
    assert len(written) == 4
    assert policy.lies_in(value, written) is expected


def test_a_trial_under_way_holds_nobodys_tensors(captures):
    model = Cache()
    run = torch.compile(model, backend="ipex", options={"strict": True})
    with torch.no_grad():
        for number in range(WARM_UP + TIMINGS - 1):
            x = torch.randn(1, 8)
            result = run(x)
            if number == WARM_UP + ROUNDS:
                continue  # what was captured is in a graph of this test's, with all it reads
            gone = [weakref.ref(value) for value in (x, result)]
            del x, result
            assert [each() for each in gone] == [None, None], number
    assert (len(captures.graphs), events()) == (1, [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": 0.3}, "so the host does not hold up the device"),
        ({"replayed": 2.95e-3}, "not captured: a call takes 2.95 ms in a CUDA graph"),
        ({"fails": RuntimeError("no")}, "not captured: RuntimeError: no"),
    ],
)
def test_a_graph_that_writes_and_is_not_kept_runs_once_a_call_too(captures, changes, reason):
    vars(captures).update(changes)
    model, x = Counts(), torch.randn(8)
    run = torch.compile(model, backend="ipex", options={"strict": True})
    with torch.no_grad():
        for n in range(WARM_UP + TIMINGS + 3):
            torch.testing.assert_close(run(x), x + n + 1)
    (line,) = events()
    assert reason in line
    assert captures.timings <= TIMINGS


def test_explain_says_that_a_graph_that_writes_takes_more_than_its_one_call(captures):
    with torch.no_grad():
        text = str(explain(Counts(), torch.randn(8)))
    assert "not decided in one call: it writes its inputs" in " ".join(text.split())
    assert captures.timings == 0


def test_captures_that_paid_are_made_as_often_as_addresses_move(machine, monkeypatch):
    monkeypatch.setattr(policy, "PAID", 3)
    calls, _ = started()
    x = torch.randn(4)
    for turn, weight in enumerate(torch.randn(2 * CAPTURES, 4)):
        for _ in range((MOVED if turn else WARM_UP + 1) + 3):
            called(calls, x, weight)
        assert len(machine.graphs) == turn + 1


def test_explain_says_it(captures):
    with torch.no_grad():
        text = str(explain(Norm().eval(), torch.randn(4, 8)))
    assert "captured: a call takes 1 ms" in " ".join(text.split())


def test_a_saved_graph_decides_for_itself(captures, monkeypatch):
    made, start = [], CapturedCode.start
    monkeypatch.setattr(CapturedCode, "start", lambda s, r: (made.append(s), start(s, r)))
    model = Norm().eval()
    run = torch.compile(model, backend="ipex", options={"strict": True})
    x = torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(WARM_UP + 2):
            expected = run(x)
    code = copy.copy(made[-1])
    code.prepare_for_serialization()
    loaded = pickled(code)
    assert (loaded._calls, made[-1]._calls is None) == (None, False)
    assert loaded.static == made[-1].static
    with torch.no_grad():
        torch.testing.assert_close(run(x), expected)


class Stream:
    """Notes what it is asked to wait for."""

    def __init__(self, log):
        self.log = log

    def wait_event(self, event):
        self.log.append(("waits", self, event))


class Event:
    def __init__(self, log):
        self.log = log

    def record(self, stream):
        self.log.append(("records", stream, self))


class Replays:
    """A graph that adds one to its place; its result is a memory of its own."""

    def __init__(self, place, result, log):
        self.place, self.result, self.log = place, result, log

    def replay(self):
        self.log.append("replays")
        self.result.copy_(self.place + 1)


@pytest.fixture
def replaying(monkeypatch):
    """A `cuda.Graph` on this CPU, its log, and what sets the current stream."""
    log, place, result = [], torch.zeros(4, 2), torch.zeros(2, 4).t()
    current = [Stream(log)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current[0])
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(log))
    graph = cuda.Graph(Replays(place, result, log), [place], (result, None, 3), 0)

    def on(stream):
        current[0] = stream

    return graph, log, on


def test_results_of_a_replay_are_fresh_and_lie_as_the_graphs(replaying):
    graph, _, _ = replaying
    xs = torch.randn(3, 4, 2)
    found = [graph((x,)) for x in xs]
    for x, (result, none, three) in zip(xs, found, strict=True):
        torch.testing.assert_close(result, x + 1, rtol=0, atol=0)
        assert result.stride() == (1, 4)
        assert (none, three) == (None, 3)


def test_a_replay_waits_for_the_one_before_on_another_stream(replaying):
    graph, log, on = replaying
    first, second = Stream(log), Stream(log)
    for stream in (first, first, second, first):
        on(stream)
        graph((torch.zeros(4, 2),))
    event = graph._done
    assert log == [
        *("replays", ("records", first, event)) * 2,
        *(("waits", second, event), "replays", ("records", second, event)),
        *(("waits", first, event), "replays", ("records", first, event)),
    ]


def test_a_replay_that_fails_is_waited_for_too(replaying):
    graph, log, _ = replaying
    with pytest.raises(RuntimeError):
        graph((torch.zeros(3, 5),))
    assert [entry[0] for entry in log] == ["records"]


@pytest.fixture
def drawn(monkeypatch):
    """What `Device.capture` asks of torch.cuda, in order, without a GPU."""
    log = []

    @contextlib.contextmanager
    def noted(name, *args, **kwargs):
        log.append((f"{name} begins", kwargs))
        try:
            yield
        finally:
            log.append((f"{name} ends", {}))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "side")
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, functools.partial(noted, name))
    for name in ("drop_cublas_memory", "end_capture"):
        said = functools.partial(lambda name, *args: log.append((name, args)), name)
        monkeypatch.setattr(compat, name, said)
    return log


CAPTURED = [
    *("device begins", "drop_cublas_memory", "stream begins", "graph begins"),
    *("graph ends", "stream ends"),
]


def test_what_moves_has_places_in_the_graph_and_weights_are_read_where_they_are(drawn):
    x, weight = torch.randn(2, 4, 3)
    seen = []

    def call(inputs):
        seen.extend(inputs)
        inputs.clear()
        return (seen[0] * seen[1],)

    with torch.inference_mode():
        graph = cuda.Device(0).capture(call, [x.t(), weight.t()], (0,))
    assert seen[0] is graph._places[0]
    assert (seen[0].stride(), seen[0].is_inference()) == ((1, 3), False)
    assert seen[1].data_ptr() == weight.data_ptr()
    assert [name for name, _ in drawn] == [*CAPTURED, "drop_cublas_memory", "device ends"]
    mode = {"pool": "pool", "stream": "side", "capture_error_mode": "thread_local"}
    assert dict(drawn)["graph begins"] == mode


def test_after_a_capture_that_failed_torch_is_put_right(drawn):
    def call(inputs):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cuda.Device(0).capture(call, [X], (0,))
    empty = ["stream begins", "graph begins", "graph ends", "stream ends"]
    assert [name for name, _ in drawn] == [
        *(*CAPTURED, "end_capture", *empty, "drop_cublas_memory", "device ends"),
    ]
    assert dict(drawn)["end_capture"] == (0, "pool")
