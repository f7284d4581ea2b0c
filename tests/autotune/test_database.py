"""Records on disk: whole, known and possible, or refused with a reason."""

import json
import os
import random

import msgspec
import pytest

from ipex_inductor.autotune import database, space
from ipex_inductor.autotune.database import Records, Shard, write
from ipex_inductor.autotune.record import Choice, decode, encode
from support.autotune.autotune_records import LIBRARY, TILES, failed, record, timed

pytestmark = pytest.mark.unit


def read(*sources):
    """Records by digest, and what was refused."""
    records = Records(*sources)
    return {database.digest(r): r for r in records}, records.refused


RECORD = record(timed(LIBRARY, 10.0), timed(TILES[0], 8.0), failed(TILES[1]))


def test_what_is_appended_is_read(tmp_path):
    shard = Shard(tmp_path / "new")
    several = [record(timed(LIBRARY, 10.0 + n), rows=n) for n in range(1, 5)]
    digests = [shard.append(r) for r in several]
    shard.close()
    found, refused = read(tmp_path / "new")
    assert [found[digest] for digest in digests] == several
    assert not refused
    assert (tmp_path / "new").stat().st_mode & 0o77 == 0


def test_equal_records_are_equal_bytes():
    shuffled = Choice("template", "tiled", dict(reversed(TILES[0].parameters.items())), "0a1b")
    assert encode(shuffled) == encode(TILES[0])
    assert decode(encode(RECORD)) == RECORD
    assert encode(decode(encode(RECORD))) == encode(RECORD)


def test_a_writer_has_a_file_of_its_own(tmp_path):
    shards = [Shard(tmp_path) for _ in range(3)]
    for shard in shards:
        shard.append(RECORD)
        shard.append(RECORD)
    assert len(list(tmp_path.iterdir())) == 3
    assert len(list(Records(tmp_path))) == 1


def test_the_order_of_files_and_lines_changes_nothing(tmp_path):
    lines = []
    for rows in range(1, 9):
        shard = Shard(tmp_path / "one")
        shard.append(record(rows=rows))
        shard.close()
    wanted, _ = read(tmp_path / "one")
    write(tmp_path / "merged.jsonl", Records(tmp_path / "one"))
    merged = (tmp_path / "merged.jsonl").read_bytes()
    for file in (tmp_path / "one").iterdir():
        lines += file.read_bytes().splitlines(keepends=True)
    rng = random.Random(0)
    for turn in range(1000):
        drawn = rng.sample(lines, len(lines)) + rng.sample(lines, 2)
        cut = rng.randrange(len(drawn))
        for name, part in (("a", drawn[:cut]), ("b", drawn[cut:])):
            (tmp_path / f"{name}.jsonl").write_bytes(b"".join(part))
        files = rng.sample([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], 2)
        assert read(*files) == (wanted, []), turn
        if turn % 50 == 0:
            write(tmp_path / "again", Records(*files))
            assert (tmp_path / "again").read_bytes() == merged


def test_every_changed_byte_is_seen(tmp_path):
    file = tmp_path / "one.jsonl"
    write(file, [RECORD, record(rows=3)])
    good, whole = read(file)[0], file.read_bytes()
    rng = random.Random(0)
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= rng.randrange(1, 256)
        file.write_bytes(changed)
        found, refused = read(file)
        assert refused, at
        assert all(good[digest] == value for digest, value in found.items())
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert all(good[digest] == value for digest, value in read(file)[0].items())


def poisoned(**changes):
    """A row that somebody wrote with a valid digest, other values at dotted paths."""
    row = json.loads(encode(RECORD))
    for path, value in changes.items():
        *way, last = (int(step) if step.isdigit() else step for step in path.split("__"))
        at = row
        for step in way:
            at = at[step]
        at[last] = value
    return json.dumps(row, separators=(",", ":")).encode()


WARPS, TIMED = "outcomes__1__choice__parameters__warps", "outcomes__0__timing"
POISON = {
    "warps without end": {WARPS: 10**9},
    "negative warps": {WARPS: -4},
    "warps in words": {WARPS: "4"},
    "warps by truth": {WARPS: True},
    "a fraction of warps": {WARPS: 4.0},
    "another parameter": {"outcomes__1__choice__parameters__speed": 1},
    "no parameters": {"outcomes__1__choice__parameters": {}},
    "unknown template": {"outcomes__1__choice__name": "fast"},
    "unknown kind": {"outcomes__1__choice__kind": "magic"},
    "a template as a library": {"outcomes__1__choice__kind": "library"},
    "no time": {f"{TIMED}__p50": float("nan")},
    "endless time": {f"{TIMED}__p80": float("inf")},
    "less than no time": {f"{TIMED}__p20": -1.0},
    "in no time": {f"{TIMED}__p50": 0.0},
    "time in words": {f"{TIMED}__p50": "fast"},
    "percentiles out of order": {f"{TIMED}__p20": 99.0},
    "no rounds": {f"{TIMED}__rounds": 0},
    "noise unknown": {f"{TIMED}__noise": None},
    "not verified": {"outcomes__0__error": None},
    "wrong and timed": {"outcomes__0__error": 0.5},
    "neither timed nor failed": {"outcomes__2__reason": ""},
    "no outcomes": {"outcomes": []},
    "negative size": {"problem__operands__0__shape": [-1, 32]},
    "size by a symbol without range": {"problem__operands__0__shape": ["s0", 32]},
    "range without end": {"problem__symbols": [{"name": "s0", "low": 5, "high": 4}]},
    "another field": {"problem__colour": "red"},
    "a list for an object": {"problem": []},
    "no date": {"provenance__date": "yesterday"},
}


@pytest.mark.parametrize("case", POISON)
def test_poisoned_rows_are_refused(case, tmp_path, monkeypatch):
    body = poisoned(**POISON[case])
    monkeypatch.setattr(database.records, "encode", lambda _: body)
    (tmp_path / "bad.jsonl").write_bytes(database._line(None)[1])
    found, (refusal,) = read(tmp_path)
    assert not found
    assert str(refusal).startswith(f"{tmp_path}/bad.jsonl:1: ")
    assert "digest" not in refusal.reason


def test_what_no_reader_would_take_is_not_written(tmp_path):
    shard = Shard(tmp_path)
    with pytest.raises(ValueError, match="timed and not verified"):
        shard.append(record(msgspec.structs.replace(timed(LIBRARY, 1.0), error=None)))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_of_a_record(tmp_path, monkeypatch):
    shard, raw = Shard(tmp_path), os.write
    shard.append(RECORD)
    monkeypatch.setattr(os, "write", lambda file, line: raw(file, line[:100]))
    with pytest.raises(OSError, match="a part of a record"):
        shard.append(record(rows=3))
    monkeypatch.undo()
    shard.append(record(rows=4))
    found, refused = read(tmp_path)
    assert len(found) == 2
    assert not refused


def test_one_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "table.jsonl"
    write(file, [RECORD])
    before = file.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        write(file, [record(rows=3)])
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == before


def test_a_source_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(Records(tmp_path / "typo.jsonl"))
    with pytest.raises(FileNotFoundError):
        list(Records(tmp_path / "typo"))


def test_a_name_is_registered_with_one_space():
    space.register("library", "aten.mm")
    with pytest.raises(ValueError, match="with other parameters"):
        space.register("library", "aten.mm", warps=(1, 2))
