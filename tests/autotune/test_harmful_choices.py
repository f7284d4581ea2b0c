"""A choice that is wrong, crashes or hangs while it is measured is out, and the others are not."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as changed

from ipex_inductor.autotune.child import Child, Refused
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.pool import pool
from ipex_inductor.autotune.record import Operand, Problem, Symbol, encode
from ipex_inductor.autotune.space import why_refused
from ipex_inductor.lowerings.problem.settings import settings_of
from ipex_inductor.lowerings.select.selection import store_results, tune_locally
from ipex_inductor.lowerings.tune import tuner
from ipex_inductor.target import device
from support.autotune import faulty_tuner
from support.helpers import ended, wait_for

PLANTED = (sys.executable, faulty_tuner.__file__)
# Each costs a child of its own. Others crash and hang, and crash a compiler; that a child ends by
# itself is tried below.
LEFT_OUT = ("breaks the device", "exits", "hangs its compiler", "crashes in the race")
QUICK = [name for name in faulty_tuner.HARM if name not in LEFT_OUT]


def product(batch, m, k, n, arch=None, dtype="float32"):
    shapes = ((batch, m, k), (batch, k, n))
    operands = tuple(Operand(s, (s[1] * s[2], s[2], 1), dtype) for s in shapes)
    arch = arch or str(device.current())
    return Problem("aten.bmm.default", operands, arch, settings=settings_of("cpu"))


class Warned(Child):
    """Whoever compiles has minutes, and the choices that are known to hang have a second."""

    names = QUICK

    @property
    def _patience(self):
        hangs = [number for number, name in enumerate(self.names) if name in faulty_tuner.HANGS]
        return 1 if self._doing() in hangs else 120

    @_patience.setter
    def _patience(self, _):
        pass


@pytest.fixture(scope="module")
def record(instructions_known):
    """The problem is small, so that the race is soon over where nothing is in the way.

    Two choices or more compile at once, also while one crashes its compiler or hangs in it.
    """
    with Warned((*PLANTED, *LEFT_OUT)) as child:
        return child.tune(product(4, 32, 16, 24), 600)


@pytest.mark.slow
def test_all_harm_is_recorded_and_never_selected(instructions_known, monkeypatch):
    monkeypatch.setattr(Warned, "names", [*faulty_tuner.HARM])
    with Warned(PLANTED) as child:
        record = child.tune(product(4, 32, 16, 24), 600)
    assert len(record.outcomes) == len(faulty_tuner.HARM) + 2
    for name in faulty_tuner.HARM:
        test_harm_is_recorded_and_never_selected(name, record)


@pytest.mark.parametrize("name", QUICK)
def test_harm_is_recorded_and_never_selected(name, record):
    by_choice = {o.choice: o for o in map(_hashable, record.outcomes)}
    outcome = by_choice[encode(faulty_tuner.CHOICES[name])]
    assert faulty_tuner.HARM[name][1] in outcome.reason
    assert outcome.timing is None
    assert "\n" not in outcome.reason


class _hashable:
    def __init__(self, outcome):
        self.choice, self.reason, self.timing = (
            encode(outcome.choice),
            outcome.reason,
            outcome.timing,
        )


def test_what_is_right_is_timed_beside_it(record):
    timed = [o for o in record.outcomes if o.timing]
    assert {o.choice.name for o in timed} == {"aten.bmm", "inductor.cpp.bmm"}
    assert all(o.timing.rounds >= 6 and o.error <= o.tolerance < 1e-4 for o in timed)
    assert len(record.outcomes) == len(QUICK) + 2
    best = pool([record])[encode(record.problem)].best()
    assert best.choice in [o.choice for o in timed]


def varying():
    """A problem whose first size is 2, 3 or 4."""
    static = product(3, 40, 24, 56)
    operands = tuple(
        changed(o, shape=("n0", *o.shape[1:]), stride=o.stride) for o in static.operands
    )
    return changed(static, operands=operands, symbols=(Symbol("n0", 2, 4),))


@pytest.fixture(scope="module")
def kept(tmp_path_factory, instructions_known):
    """What came of three problems, the first of another machine, and their database."""
    folder = tmp_path_factory.mktemp("tuned") / "db"
    alien = product(4, 32, 16, 24, arch="sm_90:none")
    return list(
        store_results(tune_locally([alien, product(2, 16, 16, 16), varying()], 600), folder)
    ), folder


def test_a_database_gets_what_was_measured_though_a_child_dies(kept):
    found, folder = kept
    assert "no device here is sm_90:none" in found[0][1]
    records = list(Records(folder))
    assert sorted(map(encode, records)) == sorted(encode(told) for _, told in found[1:])
    assert records[0].provenance.torch == torch.__version__


def test_a_size_that_varies_is_measured_at_two(kept):
    problem = varying()
    _, record = kept[0][2]
    assert record.problem == problem
    timed = [o for o in record.outcomes if o.timing]
    assert {o.choice.name for o in timed} == {"aten.bmm", "inductor.cpp.bmm"}


class Silent:
    def choices(self, choices):
        pass

    def doing(self, number):
        pass


def test_of_long_lists_only_finalists_are_measured(monkeypatch):
    """And the library, whatever Inductor says of it; the rest has its word."""
    monkeypatch.setattr(tuner, "FINALISTS", 0)
    monkeypatch.setattr(tuner, "PRUNED", ("cpu",))
    record = tuner.Tuner(Silent()).tune(product(2, 16, 16, 16), (), 600)
    library, template = record.outcomes
    assert (library.choice.kind, template.choice.kind) == ("library", "template")
    assert library.timing
    assert template.timing is None
    assert template.reported > 0
    assert why_refused(record) is None
    best = pool([record])[encode(record.problem)].best()
    assert best.choice == library.choice


def test_a_spent_budget_is_said_and_nothing_is_started(tmp_path):
    (found,) = store_results(tune_locally([product(2, 16, 16, 16)], 0), tmp_path / "db")
    assert found[1] == "the budget is spent"
    assert not (tmp_path / "db").exists()


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
DIES = "import os; os._exit(3)"
IDLES = "import time; time.sleep(1000)"


@pytest.mark.parametrize(
    ("program", "patience", "reason"),
    [
        (DIES, 100, "ended with 3"),
        (KILLED, 100, "was killed, perhaps for want of memory"),
        (IDLES, 1, "hung: nothing happened for 1 seconds"),
    ],
)
def test_a_child_that_never_begins_refuses_the_problem(program, patience, reason):
    start = time.monotonic()
    with (
        Child((sys.executable, "-c", program), patience) as child,
        pytest.raises(Refused, match=reason),
    ):
        child.tune(product(2, 16, 16, 16), 60)
    assert time.monotonic() - start < 60


def test_whom_somebody_else_kills_is_no_worse_for_it():
    """As the kernel does for want of memory, whatever choice is at work."""
    program = (
        "import os, signal\n"
        "from ipex_inductor.autotune import child\n"
        "from ipex_inductor.autotune.record import Choice\n"
        "def make(say):\n"
        "    def tune(*_):\n"
        "        say.choices((Choice('library', 'aten.bmm'),))\n"
        "        say.doing(0)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return tune\n"
        "child.serve(make)\n"
    )
    with (
        Child((sys.executable, "-c", program)) as child,
        pytest.raises(Refused, match="was killed"),
    ):
        child.tune(product(2, 16, 16, 16), 60)


def test_a_child_ends_with_its_parent(tmp_path):
    at_work = tmp_path / "at work"
    program = (
        "import sys, time\n"
        "from ipex_inductor.autotune.child import Child\n"
        "child = Child((sys.executable, '-c', sys.argv[1]))\n"
        "child._start()\n"
        "print(child._process.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    hangs = (
        "import pathlib, threading, time\n"
        "from ipex_inductor.autotune import child\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "def make(say):\n"
        f"    pathlib.Path({str(at_work)!r}).touch()\n"
        "    time.sleep(1000)\n"
        "child.serve(make)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, hangs], stdout=subprocess.PIPE, text=True
    )
    pid = parent.stdout.readline().strip()
    wait_for(at_work.exists)
    assert not ended(pid)
    parent.kill()
    parent.communicate()
    wait_for(lambda: ended(pid))


def test_a_failed_start_leaves_no_files_open():
    def open_files():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    for _ in range(3):
        with Child(("/nowhere/python",)) as child, pytest.raises(FileNotFoundError):
            child.tune(product(2, 16, 16, 16), 60)
    assert open_files() == before


def test_no_process_is_left(tmp_path):
    """Of a child that is closed while it works, and of what it started itself."""
    note = tmp_path / "pid"
    program = (
        "import subprocess, sys, time, pathlib\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(p.pid))\n"
        "time.sleep(1000)\n"
    )
    with Child((sys.executable, "-c", program), patience=1) as child:
        child._start()
        wait_for(lambda: note.exists() and note.read_text())
        assert not ended(note.read_text())
        with pytest.raises(Refused, match="hung"):
            child.tune(product(2, 16, 16, 16), 60)
    wait_for(lambda: ended(note.read_text()))  # it was killed, and may still be dying
