"""The verbs over databases: what they say, as JSON and in tables, and how they end."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from ipex_inductor.autotune.database import Records, digest, write
from ipex_inductor.autotune.record import Choice, Outcome
from ipex_inductor.cli import app
from ipex_inductor.cli.autotune.autotune import VERBS
from support.autotune.autotune_records import LIBRARY, PROVENANCE, TILES, failed, record, timed

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
SYNTAX = Choice("library", "\x1b[31m[b]red[/b]")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def run(*args):
    return CliRunner().invoke(app, ["autotune", *map(str, args)])


def facts(*args, code=0):
    done = run(*args, "--json")
    assert done.exit_code == code, done.output
    found = json.loads(done.stdout)
    assert found.pop("schema") == 1
    return found


def database(path, *records):
    write(path, records)
    return path


def spoiled(path):
    """The same file, with a line nobody wrote and one cut off behind it."""
    path.write_bytes(b"no record\n" + path.read_bytes() + b'{"record":')
    return path


@pytest.fixture
def a(tmp_path):
    return database(
        tmp_path / "a.jsonl",
        record(timed(LIBRARY, 10.0), rows=1),
        record(timed(LIBRARY, 10.0), timed(TILES[0], 20.0), rows=2),
        record(timed(LIBRARY, 10.0), rows=3),
    )


@pytest.fixture
def b(tmp_path):
    return database(
        tmp_path / "b.jsonl",
        record(timed(LIBRARY, 10.1), rows=1),
        record(timed(LIBRARY, 20.0), timed(TILES[0], 10.1), rows=2),
        record(timed(LIBRARY, 20.0), rows=3),
    )


def test_every_verb_is_listed_and_has_help():
    listed = run("--help").output
    for verb, line in VERBS.items():
        assert line in listed
        done = run(verb, "--help")
        assert done.exit_code == 0, done.output
        assert "--json" in done.output


def test_torch_is_not_imported():
    """Not by the help of any verb, all of which one process is asked for."""
    code = (
        "import sys; from ipex_inductor.cli import app\n"
        "for verb in sys.argv[1:]:\n"
        "    app(['autotune', verb, '--help'], standalone_mode=False)\n"
        "    print(verb, sorted({'torch', 'triton', 'plotly'} & sys.modules.keys()))"
    )
    line = [sys.executable, "-c", code, *VERBS]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [f"{verb} []" in done.stdout for verb in VERBS] == [True] * len(VERBS), done.stdout


def rows_of(found):
    return {row["problem"]["operands"][0]["shape"][0]: row for row in found["rows"]}


def test_compare_json(a, b):
    found = facts("compare", a, b, code=1)
    rows = rows_of(found)
    assert {n: row["verdict"] for n, row in rows.items()} == {
        1: "same choice",
        2: "within noise",
        3: "slower",
    }
    assert rows[2]["b"]["choice"]["parameters"] == {"flat": False, "tile": "64x64", "warps": 2}
    assert rows[2]["a"] == {"choice": {"kind": "library", "name": "aten.mm"}, "p50": 10.0} | {
        "noise": 0.01
    }
    assert rows[3]["effect"] == pytest.approx(math.log(2))
    assert rows[3]["band"] == pytest.approx(3 * 0.01 * math.sqrt(2))
    assert found["count"] == {"same choice": 1, "within noise": 1, "slower": 1}
    assert found["geometric_mean"] == pytest.approx((1.01 * 1.01 * 2) ** (1 / 3))
    assert (found["verdict"], found["reason"]) == ("regressions", "")
    assert found["rows"][0] is not None
    assert found["rows"][0]["verdict"] == "slower"


def test_compare_table(a, b):
    done = run("compare", a, b)
    assert done.exit_code == 1
    assert "aten.mm.default + relu bf16[3x32] bf16[32x16] out_dtype=None on sm_90" in done.stdout
    assert "tiled flat=False tile=64x64 warps=2" in done.stdout
    assert "3 problems: 1 same choice, 1 within noise, 1 slower" in done.stdout
    assert "B takes 1.268 times as long as A (geometric mean)" in done.stdout
    assert done.stdout.endswith("verdict: B is worse\n")
    assert done.stderr == ""
    better = run("compare", b, a)
    assert better.exit_code == 0
    assert better.stdout.endswith("verdict: nothing is worse in B\n")


def test_what_runs_no_more_comes_first_and_is_a_regression(a, tmp_path):
    b = database(
        tmp_path / "b.jsonl",
        record(failed(LIBRARY), rows=1),
        record(timed(LIBRARY, 99.0), rows=2),
    )
    found = facts("compare", a, b, code=1)
    assert [row["verdict"] for row in found["rows"]] == [
        "nothing runs in B",
        "slower",
        "only in A",
    ]
    assert found["rows"][0]["b"] is found["rows"][0]["effect"] is None


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_what_cannot_be_compared_ends_with_two(a, tmp_path, arguments):
    other = database(tmp_path / "other.jsonl", record(arch="sm_80", rows=1))
    done = run("compare", a, other, *arguments)
    assert done.exit_code == 2
    assert "A is of sm_90, B of sm_80" in done.stdout
    assert run("compare", a, other, "--cross", *arguments).exit_code == 0
    apart = database(tmp_path / "apart.jsonl", record(rows=77))
    assert run("compare", a, apart, *arguments).exit_code == 2
    empty = database(tmp_path / "empty.jsonl")
    assert "A and B have no problem in common" in run("compare", a, empty, *arguments).stdout


def test_folders_are_databases(a, b, tmp_path):
    (tmp_path / "A").mkdir()
    a.rename(tmp_path / "A" / "one.jsonl")
    assert facts("compare", tmp_path / "A", b, code=1)["count"]["slower"] == 1


def test_a_database_that_is_not_there_is_one_line(a):
    done = run("compare", a, "/nowhere/typo.jsonl")
    assert done.exit_code == 2
    assert done.stderr == (
        "error: expected a file of records, or a folder of such files; got /nowhere/typo.jsonl, "
        "which is not there. Check the path.\n"
    )


def test_a_file_that_cannot_be_read_is_one_line(a, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(a))

    monkeypatch.setattr("ipex_inductor.autotune.database.open", refuse, raising=False)
    done = run("show", a)
    assert done.exit_code == 2
    assert f"got {a}: Permission denied." in done.stderr


@pytest.mark.parametrize("verb", ["compare", "show", "regret"])
def test_refused_lines_are_told(verb, a, b):
    done = run(verb, spoiled(a), spoiled(b), "--json")
    assert json.loads(done.stdout)
    assert done.stderr.startswith(
        f"4 lines refused:\n  {a}:1: not a whole record: cut off, or no line of ours\n"
    )


def test_only_the_first_refused_lines_are_told(a):
    a.write_bytes(b"x\n" * 1000 + a.read_bytes())
    done = run("show", a)
    assert done.stderr.endswith(
        f"  {a}:5: not a whole record: cut off, or no line of ours\n  and 995 more\n"
    )


def test_long_tables_end_with_how_much_more_there_is(tmp_path):
    many = database(tmp_path / "many.jsonl", *(record(rows=n) for n in range(1, 51)))
    done = run("compare", many, many)
    assert "and 10 more rows (--all)" in done.stdout
    assert done.stdout.count("same choice") == 40 + 1
    assert run("compare", many, many, "--all").stdout.count("same choice") == 50 + 1
    shown = run("show", many)
    assert "and 10 more problems (--all, --problem TEXT)" in shown.stdout


def test_show_json(tmp_path):
    later = replace(PROVENANCE, date="2026-11-22T12:00:00Z")
    path = database(
        tmp_path / "db.jsonl",
        record(timed(LIBRARY, 10.0), timed(TILES[0], 8.0), failed(TILES[1])),
        record(timed(LIBRARY, 12.0), provenance=later),
    )
    (found,) = facts("show", path)["problems"]
    best, library, bad = found["choices"]
    assert best["choice"]["name"] == "tiled"
    assert (best["best"], library["best"], bad["best"]) == (True, False, False)
    assert (best["p20"], best["p50"], best["p80"]) == pytest.approx((7.92, 8.0, 8.16))
    assert (best["error"], best["tolerance"], best["noise"]) == (1e-3, 1e-2, 0.01)
    assert (library["p50"], library["measured"]) == (11.0, 2)
    assert library["noise"] == pytest.approx(0.01 / math.sqrt(2))
    assert (bad["p50"], bad["reasons"]) == (None, ["wrong by 0.5"])
    assert [each["date"][8:10] for each in found["provenance"]] == ["21", "22"]


def test_show_says_how_near_the_best_comes_to_the_peak(tmp_path):
    """Of what is chosen, not of the runner-up."""
    best, other = (
        replace(timed(choice, p50), bandwidth=share, rate=share / 7)
        for choice, p50, share in ((TILES[0], 8.0, 0.7), (LIBRARY, 10.0, 0.56))
    )
    path = database(tmp_path / "db.jsonl", record(best, other), record(timed(LIBRARY, 9.0), rows=7))
    shown = run("show", path).stdout
    assert "best: 70% of the peak bandwidth, 10% of the peak rate\n" in shown
    assert shown.count("of the peak bandwidth") == 1


def test_winners_are_a_line_each(tmp_path):
    """The slowest first, those of other tools not at all."""
    near = replace(timed(LIBRARY, 20.0), bandwidth=0.7, rate=0.101)
    path = database(
        tmp_path / "db.jsonl",
        record(timed(TILES[0], 8.0), timed(LIBRARY, 9.0)),
        record(near, timed(TILES[0], 30.0), rows=7),
        record(failed(TILES[0]), rows=9),
    )
    lines = run("show", path, "--winners").stdout.splitlines()
    assert re.search(r"bf16\[7x.* aten.mm +20 +70% +10%", lines[1])
    assert re.search(r"tiled.* 8 *$", lines[2])
    assert len(lines) == 3
    assert run("show", path, "--winners", "--problem", "conv").stdout.endswith("no problem\n")


def test_show_table_and_filter(a):
    done = run("show", a, "--problem", "BF16[2x32]")
    assert done.stdout.count("aten.mm.default") == 1
    assert re.search("best +aten.mm .* 1.0e-03", done.stdout)
    assert "measured 2026-11-21T12:00:00Z on test device: torch 2.13.0" in done.stdout
    assert run("show", a, "--problem", "conv").stdout == "no problem\n"


def test_a_reader_that_goes_is_no_error(a):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from ipex_inductor.cli import app; app()"]
    command += ["autotune", "show", str(a)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode not in (0, 2)  # 141 or 1, as typer's version has it
    assert "error:" not in done.stderr


def test_choices_that_this_version_does_not_know_are_shown(tmp_path):
    gone = Choice("template", "of another version", {"warps": 99})
    path = database(tmp_path / "db.jsonl", record(timed(gone, 1.0)))
    assert "of another version warps=99" in run("show", path).stdout
    records = Records(path)
    assert not list(records)
    assert "there is no template" in records.refused[0].reason


def test_terminals_are_told_nothing_by_names(tmp_path):
    path = database(tmp_path / "db.jsonl", record(timed(SYNTAX, 1.0)))
    for args in (("show", path), ("compare", path, path)):
        done = run(*args)
        assert "\x1b" not in done.stdout
        assert "[b]red[/b]" in done.stdout


def test_a_reader_that_leaves_is_no_verdict_and_no_traceback(a, b):
    command = [sys.executable, "-m", "ipex_inductor", "autotune", "compare", a, b]
    read, write_end = os.pipe()
    os.close(read)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for args in ([], ["--json"]):
        done = subprocess.run(
            [*command, *args], stdout=write_end, stderr=subprocess.PIPE, env=env, text=True
        )
        assert (done.returncode, done.stderr) == (141, "")


def tunings(tmp_path, *times):
    """A database of each tuning: what the library and a template took in it, for problem 1."""
    return [
        database(
            tmp_path / f"{turn}.jsonl",
            record(timed(LIBRARY, library, 0.001), timed(TILES[0], tile, 0.001), rows=1),
            record(timed(LIBRARY, 10.0), rows=2, provenance=replace(PROVENANCE, clock=str(turn))),
        )
        for turn, (library, tile) in enumerate(times)
    ]


def test_regret_json(tmp_path):
    found = facts("regret", *tunings(tmp_path, (10.0, 11.0), (10.0, 11.2), (11.0, 10.0)))
    rows = rows_of(found)
    assert rows[1]["identical"] == pytest.approx(2 / 3)
    assert rows[1]["best"]["choice"] == {"kind": "library", "name": "aten.mm"}
    assert [w["name"] for w in rows[1]["winners"]] == ["aten.mm", "aten.mm", "tiled"]
    assert rows[1]["regrets"] == pytest.approx([0, 0, 0.1])
    assert rows[2]["identical"] == 1.0
    assert (found["problems"], found["identical"], found["alone"]) == (2, 0.5, 0)
    assert found["agreements"] == [1.0, 0.5, 0.5]  # first and second, first and third, ...
    assert (found["worst"], found["mean"]) == pytest.approx((0.1, 0.1 / 6))


@pytest.mark.parametrize(
    ("limits", "code", "missed"),
    [
        ((), 0, 0),
        (("--max-regret", 0.11, "--min-identical", 0.5), 0, 0),
        (("--max-regret", 0.09), 1, 1),
        (("--min-identical", 0.51), 1, 1),
        (("--min-agreement", 0.5), 0, 0),
        (("--min-agreement", 0.51), 1, 1),
        (("--max-regret", 0.02, "--min-identical", 0.9), 1, 2),
    ],
)
def test_regret_ends_with_one_where_a_limit_is_missed(limits, code, missed, tmp_path):
    databases = tunings(tmp_path, (10.0, 11.0), (10.0, 11.2), (11.0, 10.0))
    assert len(facts("regret", *databases, *limits, code=code)["missed"]) == missed
    done = run("regret", *databases, *limits)
    assert done.exit_code == code
    assert "identical winners: 1 of 2 problems (50.0%)" in done.stdout
    assert "two of them agree on 66.7% of the problems" in done.stdout
    assert "those that differ most on 50.0%" in done.stdout
    assert "regret: worst 10.00%, mean 1.67%" in done.stdout
    assert "tiled flat=False tile=64x64 warps=2: 10.00%" in done.stdout


def test_a_winner_that_fails_elsewhere_is_regretted_without_end(tmp_path):
    one = database(tmp_path / "1.jsonl", record(timed(LIBRARY, 10.0), timed(TILES[0], 5.0)))
    other = database(tmp_path / "2.jsonl", record(timed(LIBRARY, 10.0), failed(TILES[0])))
    assert facts("regret", one, other)["rows"][0]["regrets"] == [None, 0.0]
    done = run("regret", one, other, "--max-regret", 100)
    assert done.exit_code == 1
    assert "fails elsewhere" in done.stdout


def test_a_winner_that_ties_with_the_best_and_is_faster_costs_nothing(tmp_path):
    one = database(tmp_path / "1.jsonl", record(timed(LIBRARY, 10.5), timed(TILES[0], 10.0)))
    other = database(tmp_path / "2.jsonl", record(timed(LIBRARY, 9.7), timed(TILES[0], 10.0)))
    (row,) = facts("regret", one, other)["rows"]
    assert [winner["name"] for winner in row["winners"]] == ["tiled", "aten.mm"]
    assert (row["best"]["choice"]["name"], row["best"]["p50"]) == ("aten.mm", pytest.approx(10.1))
    assert row["regrets"] == [0.0, 0.0]


def test_regret_needs_tunings_of_the_same_problems(tmp_path, a):
    apart = database(tmp_path / "apart.jsonl", record(rows=77))
    assert run("regret", a).exit_code == 2
    done = run("regret", a, apart)
    assert done.exit_code == 2
    assert "expected databases that share a problem" in done.stderr
    both = database(tmp_path / "both.jsonl", record(rows=77), record(rows=1))
    assert "3 problems have a winner in fewer than two" in run("regret", a, both).stdout


def digests(*sources):
    return {digest(r) for r in Records(*sources)}


def test_merge_is_the_same_in_any_order(a, b, tmp_path):
    for out, sources in ((tmp_path / "1", (a, b)), (tmp_path / "2", (b, a, b))):
        assert facts("merge", out, *sources) == {
            "file": str(out),
            "records": 6,
            "refused": [],
            "removed": [],
        }
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert digests(tmp_path / "1") == digests(a, b)
    assert a.exists()


def test_merge_carries_what_this_version_does_not_know_and_tells_what_it_leaves(a, tmp_path):
    unknown = Choice("template", "of another version")
    other = spoiled(database(tmp_path / "other.jsonl", record(timed(unknown, 1.0))))
    done = run("merge", tmp_path / "out", a, other)
    assert done.stdout == f"4 records in {tmp_path / 'out'}\n"
    assert done.stderr.startswith(f"2 lines refused:\n  {other}:1: ")
    assert b"of another version" in (tmp_path / "out").read_bytes()


def test_merge_replaces_no_records_that_it_did_not_read(a, b, tmp_path):
    before = b.read_bytes()
    done = run("merge", b, a)
    assert done.exit_code == 2
    assert "name it among the databases" in done.stderr
    assert b.read_bytes() == before
    assert run("merge", b, a, b).exit_code == 0
    assert len(digests(b)) == 6


def test_a_merge_that_fails_leaves_nothing(a, tmp_path):
    done = run("merge", tmp_path / "none" / "out", a)
    assert done.exit_code == 2
    assert "No such file or directory" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_export_holds_winners_and_runners_up(tmp_path):
    slow = replace(PROVENANCE, date="2026-11-20T12:00:00Z")
    path = database(
        tmp_path / "db.jsonl",
        record(timed(LIBRARY, 10.0), timed(TILES[0], 8.0), timed(TILES[1], 9.0), failed(TILES[2])),
        record(timed(LIBRARY, 10.0), timed(TILES[0], 8.8), provenance=slow),
        record(timed(LIBRARY, 10.0), timed(TILES[0], 8.3), provenance=replace(slow, clock="low")),
        record(arch="sm_80"),
        record(failed(LIBRARY), rows=5),
        record(Outcome(LIBRARY, reported=1.0), rows=6, provenance=replace(PROVENANCE, source="x")),
    )
    assert facts("export", path, tmp_path / "1") == {"file": str(tmp_path / "1"), "problems": 2}
    assert run("export", path, tmp_path / "2", "--arch", "sm_90").exit_code == 0
    (cut,) = Records(tmp_path / "2")
    assert cut.provenance.clock == "low"  # of the three that in the middle
    assert [(o.choice, o.timing.p50) for o in cut.outcomes] == [(TILES[0], 8.3)]
    (tmp_path / "shuffled.jsonl").write_bytes(
        b"".join(reversed(path.read_bytes().splitlines(keepends=True)))
    )
    run("export", tmp_path / "shuffled.jsonl", tmp_path / "3")
    assert (tmp_path / "3").read_bytes() == (tmp_path / "1").read_bytes()


def test_an_exported_table_chooses_as_all_records_do(tmp_path):
    """Over all records the tile wins; in the one that is cut the library was faster."""
    path = database(
        tmp_path / "db.jsonl",
        record(timed(LIBRARY, 7.0, 0.001), timed(TILES[0], 8.0, 0.001)),
        record(timed(LIBRARY, 12.0, 0.001), provenance=replace(PROVENANCE, clock="low")),
        record(timed(LIBRARY, 13.0, 0.001), provenance=replace(PROVENANCE, clock="lower")),
    )
    run("export", path, tmp_path / "table")
    (cut,) = Records(tmp_path / "table")
    assert [o.choice for o in cut.outcomes] == [TILES[0]]


def test_export_names_what_it_lacks_and_eats_nothing(a, tmp_path):
    done = run("export", a, tmp_path / "out", "--arch", "gfx942")
    assert done.exit_code == 2
    assert "expected a problem with a winner for gfx942" in done.stderr
    assert not (tmp_path / "out").exists()
    for source in (a, tmp_path):
        assert run("export", source, a).exit_code == 2
    assert len(digests(a)) == 3


@pytest.mark.slow
def test_100_000_records_are_compared_in_5_seconds_and_500_megabytes():
    """Of the processor, in the least of five runs: other work on the machine adds to the rest."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, str(ROOT / "benchmarks" / "studies" / "autotune_compare.py")]
    done = subprocess.run(line, env=env, cwd="/", capture_output=True, text=True, check=True)
    least = re.search(r"worked ([\d.]+) s, peak (\d+) MB", done.stdout)
    assert float(least[1]) < 5, done.stdout
    assert int(least[2]) < 500, done.stdout
