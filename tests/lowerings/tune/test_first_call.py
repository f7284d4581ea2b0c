"""Library calls measured at a first call: which, for how long, what wins, and what is kept."""

import dataclasses
import os
import stat
import time

import pytest
import torch

from ipex_inductor import compat
from ipex_inductor.autotune import select
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.record import encode
from ipex_inductor.lowerings.problem.selector_hook import Offer
from ipex_inductor.lowerings.select import library, peaks
from ipex_inductor.lowerings.tune import first_call
from ipex_inductor.lowerings.tune.first_call import FirstCall
from support.first_call_problems import CONV, LINEAR, problem

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")
PLAIN, RELU, PRODUCT = "aten.convolution", "cudnn.convolution_relu", "aten.mm"
ACTIVATION = "cublaslt.addmm_activation"
CALLS = (PLAIN, RELU, PRODUCT, ACTIVATION, "cudnn.convolution_add_relu")
ALIKE = dict.fromkeys(CALLS, 9.0)


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))


class Clock:
    """Times of calls by name, in microseconds; the rounds' values in turn."""

    def __init__(self, times):
        self.times, self.timed = times, []

    def prepare(self, run, buffers, sizes=1):
        run(buffers[0])
        self.timed.append(run.name)
        values = self.times[run.name]
        rounds = iter(range(1000))
        return lambda: values[next(rounds) % len(values)]


class Named:
    def __init__(self, run, name):
        self.run, self.name = run, name

    def __call__(self, operands):
        return self.run(operands)


@pytest.fixture
def timed(monkeypatch):
    """Returns the measuring of offers, and its clock, by the times of calls."""
    make_run = first_call.stand_in.run_of_call
    monkeypatch.setattr(
        first_call.stand_in,
        "run_of_call",
        lambda problem, call: Named(make_run(problem, call), call.name),
    )

    def measure(lines, times, compiled_for=100.0, now=lambda: 1000.0):
        offers = {encode(o.problem): o for o in map(offer, lines)}
        clock = Clock({n: [t] if isinstance(t, float) else t for n, t in times.items()})
        measurer = FirstCall(lambda device: clock, now, now() - compiled_for)
        return measurer.measure(offers, set(offers), CPU), clock

    return measure


def offer(line):
    found = problem(line)
    choices = tuple(call.choice for call in library.calls(found))
    return Offer(found, choices, choices[0])


def names(measured):
    return [s.choice.name for s in measured.selections.values()]


def test_the_fastest_library_call_is_selected_with_its_reason(timed):
    measured, clock = timed([CONV["3x3"]], {PLAIN: 40.0, RELU: 31.0})
    (selection,) = measured.selections.values()
    assert str(selection) == f"{RELU}: 31 us, {PLAIN} 40, measured at the first call"
    assert sorted(clock.timed) == sorted([PLAIN, RELU] * first_call.MOST_BLOCKS)
    assert measured.summary.startswith("1 of 1 problems without a record in 0.00 s, of 30.00 s")
    assert not measured.reasons


@pytest.mark.parametrize("faster", [38.5, 40.0, 50.0])
def test_a_call_within_the_margin_leaves_the_default(timed, faster):
    measured, _ = timed([CONV["3x3"]], {PLAIN: 40.0, RELU: faster})
    (selection,) = measured.selections.values()
    assert selection.choice.name == PLAIN
    assert str(selection) == f"{PLAIN}: 40 us, measured at the first call"


def test_a_call_within_the_noise_leaves_the_default(timed):
    noisy = [10.0, 60.0, 35.0, 36.0, 37.0, 90.0, 20.0, 34.0]
    measured, _ = timed([CONV["3x3"]], {PLAIN: [v * 1.1 for v in noisy], RELU: noisy})
    assert names(measured) == [PLAIN]


def test_all_calls_without_compilation_are_compared(timed):
    _, clock = timed([CONV["1x1"]], {PLAIN: 40.0, RELU: 31.0, PRODUCT: 30.0, ACTIVATION: 20.0})
    assert {*clock.timed} == {PLAIN, RELU, PRODUCT, ACTIVATION}
    measured, _ = timed([LINEAR], {"aten.addmm": 40.0, ACTIVATION: 20.0})
    assert names(measured) == [ACTIVATION]


def test_what_was_measured_is_read_later_and_not_measured_again(timed):
    first, _ = timed(
        [CONV["3x3"], CONV["1x1"]], {PLAIN: 40.0, RELU: 31.0, PRODUCT: 39.0, ACTIVATION: 39.0}
    )
    again, clock = timed([CONV["3x3"], CONV["1x1"]], {})
    assert not clock.timed
    assert again.selections == first.selections
    assert len(again.selections) == 2
    assert again.summary == ""


def test_the_default_stays_the_default_for_a_later_process(timed):
    """Also where the record says that another call is a little faster."""
    first, _ = timed([CONV["3x3"]], {PLAIN: 40.0, RELU: 38.5})
    again, _ = timed([CONV["3x3"]], {})
    assert names(first) == names(again) == [PLAIN]


def test_records_of_another_torch_are_measured_again(timed, monkeypatch):
    timed([CONV["3x3"]], {PLAIN: 40.0, RELU: 31.0})
    monkeypatch.setattr(compat, "VERSION", "1.0.0")
    measured, clock = timed([CONV["3x3"]], {PLAIN: 40.0, RELU: 50.0})
    assert clock.timed
    assert names(measured) == [PLAIN]


def test_its_records_are_whole_and_in_no_database(timed, tmp_path):
    """So tuning still measures templates, and graphs are not lowered twice for records."""
    timed([CONV["1x1"]], {PLAIN: 40.0, RELU: 31.0, PRODUCT: 30.0, ACTIVATION: 20.0})
    (record,) = Records(first_call.folder())
    assert [o.choice.name for o in record.outcomes] == [PLAIN, RELU, PRODUCT, ACTIVATION]
    assert all(o.error <= 1e-5 for o in record.outcomes)
    database = tmp_path / "home" / "autotune"
    assert not database.exists()
    assert not select.lookup({encode(record.problem)}, database)


def test_a_wrong_call_is_out_however_fast(timed, monkeypatch):
    line = CONV["3x3"]
    plain, relu, *_ = library.CALLS[problem(line).op]

    def forgets(x, weight, bias, *rest):
        return torch.conv2d(x, weight, bias, padding=1)

    calls = (plain, dataclasses.replace(relu, body=forgets))
    monkeypatch.setitem(library.CALLS, problem(line).op, calls)
    measured, clock = timed([line], {PLAIN: 40.0, RELU: 1.0})
    (record,) = Records(first_call.folder())
    assert next(o.reason[:8] for o in record.outcomes if not o.timing) == "wrong by"
    assert {*clock.timed} == {PLAIN}
    assert names(measured) == [PLAIN]


def test_a_last_row_that_is_wrong_is_seen(timed, monkeypatch):
    line = CONV["3x3"]
    plain, relu, *_ = library.CALLS[problem(line).op]

    def spoils(*args):
        result = plain.body(*args)
        result[-1, -1] += 1
        return result

    monkeypatch.setitem(
        library.CALLS, problem(line).op, (plain, dataclasses.replace(relu, body=spoils))
    )
    measured, _ = timed([line], {PLAIN: 40.0, RELU: 1.0})
    assert RELU not in names(measured)


def test_the_budget_is_a_share_of_the_compile_time(timed):
    """Each problem takes two seconds by this clock, of 7.8."""
    seconds = iter(range(1000, 2000, 2))
    lines = [CONV["3x3"], CONV["1x1"], CONV["3x3 add"], CONV["1x1 add"]]
    # The clock is read once to compute `began`, once to start, and once for a problem.
    measured, _ = timed(lines, ALIKE, compiled_for=24.0, now=lambda: float(next(seconds)))
    assert len(measured.selections) == 3
    assert [*measured.reasons.values()] == ["the budget of the first call is spent"]
    assert "3 of 4 problems" in measured.summary
    nothing, clock = timed([LINEAR], ALIKE, compiled_for=0.0)
    assert not nothing.selections
    assert not clock.timed


def test_a_problem_is_not_timed_if_verifying_it_took_the_budget(timed, monkeypatch):
    verify, monotonic = first_call._verify, time.monotonic

    def verify_slowly(*args):
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 1000.0)
        return verify(*args)

    monkeypatch.setattr(first_call, "_verify", verify_slowly)
    measured, clock = timed([CONV["3x3"]], ALIKE)
    assert not clock.timed
    assert [*measured.reasons.values()] == ["the budget of the first call is spent"]
    assert not first_call.folder().exists()


def test_the_reference_is_computed_without_a_search_of_cudnn(timed, monkeypatch):
    """Candidates run as in the compiled graph, and afterwards all settings are as before."""
    cudnn, searching = torch.backends.cudnn, []
    for name in ("_judge", "_verify"):
        compute = getattr(first_call, name)

        def note(*args, compute=compute):
            searching.append(cudnn.benchmark)
            return compute(*args)

        monkeypatch.setattr(first_call, name, note)
    for benchmark in (True, False):
        monkeypatch.setattr(cudnn, "benchmark", benchmark)
        before = compat.cudnn_settings()
        timed([CONV["3x3"] if benchmark else CONV["1x1"]], ALIKE)
        assert compat.cudnn_settings() == before
    assert searching == [False, True, False, False]


def test_what_takes_most_time_is_measured_first(timed, monkeypatch):
    floors = {
        problem(line).operands[1].shape[2]: t
        for line, t in [(CONV["3x3"], 1.0), (CONV["1x1"], 2.0)]
    }
    monkeypatch.setattr(peaks, "floor", lambda p: floors[p.operands[1].shape[2]])
    times = {PLAIN: 40.0, RELU: 31.0, PRODUCT: 50.0, ACTIVATION: 50.0}
    _, clock = timed([CONV["3x3"], CONV["1x1"]], times)
    assert clock.timed[:4] == [PLAIN, RELU, PRODUCT, ACTIVATION]
    floors[3] = 0.01
    for record in first_call.folder().iterdir():
        record.unlink()
    measured, _ = timed([CONV["3x3"], CONV["1x1"]], times)
    assert [*measured.reasons.values()] == ["it takes less than 1% of the estimated time"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (CONV["3x3"] + " -> aten.mul.Tensor(y, 2.0)", "Inductor may fuse what follows"),
        (CONV["3x3"].replace("'relu'", "'sigmoid'"), "no library call competes"),
        (CONV["3x3"].replace("4x12x7x9:L", "4x12x7x9"), "no library call competes"),
    ],
)
def test_what_cannot_be_compared_fairly_is_left(timed, line, reason):
    measured, clock = timed([line], {})
    (said,) = measured.reasons.values()
    assert said.startswith(reason)
    assert not clock.timed


def test_an_error_leaves_the_default_with_its_reason(timed):
    measured, _ = timed([CONV["3x3"]], {})  # a clock that knows no call
    assert not measured.selections
    (said,) = measured.reasons.values()
    assert said == f"it cannot be measured: ValueError: {PLAIN} could not be timed"
    assert not first_call.folder().exists()


def test_want_of_memory_leaves_the_default(timed, monkeypatch):
    monkeypatch.setattr(first_call, "_free_bytes", lambda device: 1 << 10)
    measured, clock = timed([CONV["3x3"]], {PLAIN: 40.0, RELU: 31.0})
    (said,) = measured.reasons.values()
    assert said.endswith("free would be taken")
    assert not clock.timed


def test_a_folder_that_others_may_write_is_neither_read_nor_written(timed):
    timed([CONV["3x3"]], {PLAIN: 40.0, RELU: 31.0})
    first_call.folder().chmod(0o777)
    measured, clock = timed([CONV["3x3"]], {PLAIN: 40.0, RELU: 50.0})
    assert clock.timed
    assert names(measured) == [PLAIN]
    assert len([*Records(first_call.folder())]) == 1


def test_a_graph_adds_one_file_with_one_wait_for_the_disk(timed, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_mode) or fsync(fd))
    timed([CONV["3x3"], CONV["1x1"]], ALIKE)
    assert len([*Records(first_call.folder())]) == 2
    assert len([*first_call.folder().iterdir()]) == 1
    assert len([*filter(stat.S_ISREG, synced)]) == 1


def test_many_files_are_merged_and_no_record_is_lost(timed, monkeypatch):
    monkeypatch.setattr(first_call, "MOST_FILES", 2)
    lines = [CONV["3x3"], CONV["1x1"], CONV["3x3 add"], CONV["1x1 add"]]
    counts = []
    for line in lines:
        timed([line], ALIKE)
        counts.append(len([*first_call.folder().iterdir()]))
    assert counts == [1, 2, 1, 2]
    again, clock = timed(lines, {})
    assert not clock.timed
    assert len(again.selections) == len(lines)


def test_it_runs_under_the_modes_of_a_compilation(timed):
    from torch._subclasses import FakeTensorMode

    peaks._work.cache_clear()
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        (seconds,) = first_call._estimate_seconds({b"": offer(CONV["3x3"])}).values()
        assert seconds > 0
        measured, _ = timed([CONV["3x3"]], {PLAIN: 40.0, RELU: 31.0})
    assert names(measured) == [RELU]
