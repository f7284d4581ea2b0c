"""`ipex-inductor autotune run` as a user starts it."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.record import Choice, Record
from ipex_inductor.cli import app
from ipex_inductor.compiler.kernel_selection import problems_of
from ipex_inductor.lowerings.select import selection
from support.autotune.autotune_records import PROVENANCE, timed
from support.helpers import wait_for

pytestmark = pytest.mark.usefixtures("instructions_known")

COMMAND = (sys.executable, "-m", "ipex_inductor", "autotune", "run")
BMM = "aten.bmm.default float32 2x{}x16 2x16x24 -> aten.relu.default(y)"
NO_CHOICE = "aten.relu.default float32 4x4"


@pytest.fixture
def shapes(tmp_path):
    def write(*lines):
        file = tmp_path / "shapes.txt"
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    return write


def environment(tmp_path):
    return {**os.environ, "IPEX_HOME": str(tmp_path / "home")}


def run(tmp_path, *arguments):
    done = subprocess.run(
        [*COMMAND, *arguments],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow  # 12 s; what a child measures gets into a database in test_harmful_choices.py
def test_a_file_is_measured_once_and_what_cannot_be_has_a_reason(tmp_path, shapes, monkeypatch):
    file = shapes(BMM.format(8), NO_CHOICE)
    code, out, _ = run(tmp_path, "--shapes", file, "--json")
    assert code == 1
    first, second = json.loads(out)["problems"]
    assert first["choice"]["name"] in ("aten.bmm", "inductor.cpp.bmm")
    assert first["microseconds"] > 0
    assert second["choice"] is None
    assert "nothing to choose from" in second["reason"]
    (record,) = Records(tmp_path / "home" / "autotune")
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    again = ["autotune", "run", "--shapes", shapes(BMM.format(8))]
    done = CliRunner().invoke(app, again)
    assert done.exit_code == 0
    assert "1 problems, 1 known before" in done.stdout
    assert list(Records(tmp_path / "home" / "autotune")) == [record]


def test_what_came_before_ctrl_c_is_kept(tmp_path, shapes, monkeypatch):
    def here(todo, budget):
        outcome = timed(Choice("library", "aten.bmm"), 10.0)
        yield todo[0], Record(todo[0], (outcome,), PROVENANCE)
        raise KeyboardInterrupt

    monkeypatch.setattr(selection, "tune_locally", here)
    file, folder = shapes(*(BMM.format(rows) for rows in (1, 2, 3))), tmp_path / "db"
    done = CliRunner().invoke(app, ["autotune", "run", "--shapes", file, "--into", str(folder)])
    assert done.exit_code == 130
    assert len(list(Records(folder))) == 1
    assert "2 without a choice" in done.stdout


def test_what_is_known_is_not_measured_again(tmp_path, shapes, monkeypatch):
    def here(todo, budget):
        for problem in todo:
            asked.append(problem.op)
            if problem.op == "aten.bmm.default":
                outcome = timed(Choice("library", "aten.bmm"), 10.0)
                yield problem, Record(problem, (outcome,), PROVENANCE)
            else:
                yield problem, "nothing to choose from"

    def said():
        command = ["autotune", "run", "--shapes", file, "--into", str(tmp_path / "db"), "--json"]
        done = CliRunner().invoke(app, command)
        return done.exit_code, json.loads(done.stdout)["problems"]

    asked = []
    monkeypatch.setattr(selection, "tune_locally", here)
    file = shapes(BMM.format(8), NO_CHOICE)
    code, (first, second) = said()
    assert (code, first["choice"]["name"], first["microseconds"]) == (1, "aten.bmm", 10.0)
    assert (second["choice"], second["reason"]) == (None, "nothing to choose from")
    assert len(list(Records(tmp_path / "db"))) == 1
    assert said()[0] == 1
    assert asked == ["aten.bmm.default", "aten.relu.default", "aten.relu.default"]


@pytest.mark.slow  # 24 s; a signal of its own, and children that get it too
def test_ctrl_c_keeps_what_was_measured(tmp_path, shapes):
    file, folder = shapes(*(BMM.format(rows) for rows in range(1, 33))), tmp_path / "db"
    process = subprocess.Popen(
        [*COMMAND, "--shapes", file, "--into", str(folder)],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: folder.exists() and list(Records(folder)), 300)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=100)
    kept = list(Records(folder))
    assert process.returncode == 130
    assert 1 <= len(kept) < 32
    assert f"{32 - len(kept)} without a choice" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected a MODEL or --shapes FILE; got neither"),
        (("bert", "--shapes", "x"), "got both"),
        (("--shapes", "/nowhere"), "/nowhere: No such file"),
        (("--shapes", "BAD"), "expected OP DTYPE SHAPE"),
        (("--shapes", "BAD", "--arch", "h200"), "expected target h200; got"),
    ],
)
def test_bad_arguments_are_a_line(arguments, message, shapes):
    bad = shapes("aten.mm.default float32 4x6")
    given = [bad if a == "BAD" else a for a in arguments]
    done = CliRunner().invoke(app, ["autotune", "run", *given])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not done.stdout
    assert isinstance(done.exception, SystemExit), "a line, no traceback"


def test_the_problems_of_what_runs_are_those_of_forward_and_backward():
    a = torch.randn(2, 5, 4, requires_grad=True)
    b = torch.randn(2, 4, 3, requires_grad=True)

    def call():
        torch.bmm(a, b).relu().sum().backward()

    found = problems_of(call)
    sizes = {tuple(o.shape for o in p.operands) for p in found}
    assert ((2, 5, 4), (2, 4, 3)) in {s[:2] for s in sizes}
    assert ((2, 5, 3), (2, 3, 4)) in {s[:2] for s in sizes}
    assert a.grad is not None
