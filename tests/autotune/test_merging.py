"""Compaction loses nothing, whoever writes, reads or dies meanwhile; our folder is judged."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ipex_inductor.autotune import database, merging, own
from ipex_inductor.autotune.database import Records, Shard, digest, write
from ipex_inductor.autotune.merging import compact
from ipex_inductor.cli import app
from support.autotune.autotune_records import LIBRARY, record, timed

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def digests(folder):
    return {digest(r) for r in Records(folder)}


@pytest.fixture
def folder(tmp_path):
    """A database of five closed files."""
    shard = Shard(tmp_path / "db")
    for rows in range(1, 6):
        shard.append(record(rows=rows))
        shard.close()
    return tmp_path / "db"


def test_many_files_become_one(folder):
    before = digests(folder)
    merged = compact(folder)
    assert list(folder.iterdir()) == [merged.path]
    assert (merged.records, len(merged.removed), merged.refused) == (5, 5, ())
    assert digests(folder) == before
    content = merged.path.read_bytes()
    again = compact(folder)
    assert (again.path, again.removed) == (None, ())
    shard = Shard(folder)
    shard.append(record(rows=1))
    shard.close()
    third = compact(folder)
    assert third.path == merged.path  # a record it had: the same content, so the same name
    assert merged.path.read_bytes() == content


def test_a_file_that_is_being_written_stays(folder):
    shard = Shard(folder)
    shard.append(record(rows=6))
    merged = compact(folder)
    assert merged.records == 5
    assert len(list(folder.iterdir())) == 2
    named = shard.append(record(rows=7))
    shard.close()
    assert named in digests(folder)
    assert len(digests(folder)) == 7
    compact(folder)
    assert len(list(folder.iterdir())) == 1
    assert len(digests(folder)) == 7


def test_damage_stays_where_it_is_and_an_unfinished_line_does_not(folder):
    cut, damaged, *_ = sorted(folder.iterdir())
    cut.write_bytes(cut.read_bytes() + b'{"record":{"problem"')
    damaged.write_bytes(damaged.read_bytes() + b"damaged\n")
    before = digests(folder)
    merged = compact(folder)
    assert {str(r).rpartition(": ")[0].rpartition("/")[2] for r in merged.refused} == {
        f"{cut.name}:2: not a whole record",
        f"{damaged.name}:2: not a whole record",
    }
    assert set(folder.iterdir()) == {merged.path, damaged}
    assert digests(folder) == before


@pytest.mark.parametrize("change", ["grown", "replaced", "gone"])
def test_a_file_that_changes_meanwhile_stays(change, folder, monkeypatch):
    one = min(folder.iterdir())
    name_of = merging.name_of

    def change_it(*args):
        if change == "grown":
            with one.open("ab") as file:
                file.write(database._line(record(rows=8))[1])
        elif change == "replaced":
            write(one, [record(rows=8)])
        else:
            one.unlink()
        return name_of(*args)

    monkeypatch.setattr(merging, "name_of", change_it)
    compact(folder)
    assert one.exists() == (change != "gone")
    assert len(digests(folder)) == 5 + (change != "gone")


@pytest.mark.parametrize("step", range(8))
def test_whatever_fails_nothing_is_lost(step, folder, monkeypatch):
    before, calls = digests(folder), iter(range(100))

    def failing(real):
        def call(*args, **kwargs):
            if next(calls) == step:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    monkeypatch.setattr(Path, "replace", failing(Path.replace))
    monkeypatch.setattr(Path, "unlink", failing(Path.unlink))
    with pytest.raises(OSError, match="No space left"):
        compact(folder)
    monkeypatch.undo()
    assert digests(folder) == before
    compact(folder)
    assert digests(folder) == before


def test_a_record_whose_file_was_removed_before_it_was_locked_is_written_again(folder, monkeypatch):
    flock, removed = database.fcntl.flock, []

    def late(file, how):
        if not removed:
            removed.append(os.readlink(f"/proc/self/fd/{file}"))
            os.unlink(removed[0])
        flock(file, how)

    monkeypatch.setattr(database.fcntl, "flock", late)
    named = Shard(folder).append(record(rows=9))
    assert removed
    assert named in digests(folder)


def test_who_removes_every_file_is_told(folder, monkeypatch):
    flock = database.fcntl.flock

    def remove(file, how):
        os.unlink(os.readlink(f"/proc/self/fd/{file}"))
        flock(file, how)

    monkeypatch.setattr(database.fcntl, "flock", remove)
    with pytest.raises(OSError, match="somebody removes the files"):
        Shard(folder).append(record(rows=9))


def test_a_reader_misses_nothing_that_is_compacted_while_it_reads(folder):
    before = digests(folder)
    reading = iter(Records(folder))
    found = {digest(next(reading))}
    compact(folder)
    assert found | {digest(r) for r in reading} == before


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support.autotune.autotune_records import LIBRARY, record, timed
from ipex_inductor.autotune.database import Shard
shard = Shard(Path(sys.argv[1]))
for turn in range(10**6):
    print(shard.append(record(timed(LIBRARY, 1.0 + turn), rows=int(sys.argv[3]))), flush=True)
    if turn % 7 == 6:
        shard.close()
"""


def test_writers_that_are_killed_while_others_compact_lose_nothing(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    folder, told = tmp_path / "db", [tmp_path / f"told by {n + 1}" for n in range(12)]
    folder.mkdir()

    def acknowledged(writer):
        lines = told[writer].read_text().splitlines(keepends=True)
        return {line.strip() for line in lines if line.endswith("\n")}

    for turn in range(3):
        numbers = range(4 * turn, 4 * turn + 4)
        command = [sys.executable, "-c", WRITER, str(folder), str(ROOT / "tests")]
        writers = []
        for n in numbers:
            with told[n].open("w") as out:
                writers.append(subprocess.Popen([*command, str(n + 1)], env=env, stdout=out))
        while min(len(acknowledged(n)) for n in numbers) < 100:
            compact(folder)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
        for writer in writers:
            writer.wait()
    compact(folder)
    found = digests(folder)
    assert set().union(*map(acknowledged, range(12))) <= found
    assert len(list(folder.iterdir())) == 1


def test_the_command(folder):
    done = CliRunner().invoke(app, ["autotune", "compact", str(folder), "--json"])
    found = json.loads(done.stdout)
    assert (found["records"], len(found["removed"])) == (5, 5)
    done = CliRunner().invoke(app, ["autotune", "compact", str(folder)])
    assert done.stdout == "nothing to compact\n"
    done = CliRunner().invoke(app, ["autotune", "compact", str(folder / "typo")])
    assert done.exit_code == 2
    assert "expected a folder of record files" in done.stderr


@pytest.fixture
def ours(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("IPEX_HOME", str(home))
    own._say.cache_clear()
    return home / "autotune"


def test_our_own_database(ours, caplog):
    assert own.default_folder() == ours
    assert own.is_default_trusted()
    assert not ours.exists()
    Shard(ours).append(record(timed(LIBRARY, 3.0)))
    assert own.is_default_trusted()
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_what_others_can_write_is_not_trusted_and_that_is_said_once(mode, ours, caplog):
    Shard(ours).append(record())
    ours.chmod(mode)
    with caplog.at_level(logging.WARNING, "ipex_inductor"):
        assert not own.is_default_trusted()
        assert not own.is_default_trusted()
    (said,) = caplog.messages
    assert said.startswith(f"autotune records are not used: {ours} has mode 0{mode:o}")
    assert list(Records(ours))  # who names it reads it


def test_a_link_in_our_place_is_not_trusted(ours, tmp_path, caplog):
    Shard(tmp_path / "elsewhere").append(record())
    ours.parent.mkdir()
    ours.symlink_to(tmp_path / "elsewhere")
    assert not own.is_default_trusted()
    assert "symbolic link" in caplog.text
