"""The verbs over the kernel cache: what they say, as JSON and in tables, and how they end."""

import json
import os
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ipex_inductor.aot_cache import log_once
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.aot_cache.quota import quota_of
from ipex_inductor.aot_cache.store import Store
from ipex_inductor.cli import app
from ipex_inductor.cli.cache.cache import VERBS
from ipex_inductor.cli.cache.shared import size
from support.cache.cache_keys import blob, key

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    log_once.say.cache_clear()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "ipex"))
    return tmp_path / "ipex" / "kernels" / "1"


def run(*args):
    return CliRunner().invoke(app, ["cache", *map(str, args)])


def facts(*args, code=0):
    done = run(*args, "--json")
    assert done.exit_code == code, done.output
    found = json.loads(done.stdout)
    assert found.pop("schema") == 1
    return found


@pytest.fixture
def filled(here):
    store = Store(here)
    for number in range(3):
        store.put(key(number), {}, blob(number))
        os.utime(here / f"{key(number).digest}.entry", (1.7e9 + number, 1.7e9 + number))
    return here


def spoil(folder, number):
    file = folder / f"{key(number).digest}.entry"
    file.write_bytes(file.read_bytes()[:-1])


def test_help_lists_every_verb():
    done = run("--help")
    assert done.exit_code == 0
    assert all(verb in done.output and line in done.output for verb, line in VERBS.items())


@pytest.mark.parametrize("verb", ["gc", "ls", "path", "stats", "verify"])
def test_every_verb_works_where_there_is_nothing(verb, here):
    assert run(verb).exit_code == 0
    assert facts(verb) is not None
    assert not here.exists()


def test_why_says_what_each_graph_was_compiled_for(here):
    store = Store(here)
    for number in range(2):
        graph = replace(key(number), kind="graph")
        store.put(graph, {"files": 1, "why": f"reason {number}"}, b"")
        os.utime(here / f"{graph.digest}.entry", (1.7e9 + number, 1.7e9 + number))
    store.put(key(7), {"why": "no graph"}, b"")
    assert [each["why"] for each in facts("why")["graphs"]] == ["reason 1", "reason 0"]
    assert "reason 0" in run("why").stdout
    spoiled = here / f"{replace(key(1), kind='graph').digest}.entry"
    flipped = bytearray(spoiled.read_bytes())
    flipped[-1] ^= 1
    spoiled.write_bytes(flipped)
    assert (
        "unknown: it changed"
        in facts("why")["graphs"][-1]["why"] + facts("why")["graphs"][0]["why"]
    )


def test_path(here):
    assert run("path").stdout == f"{here}\n"
    assert facts("path") == {"path": str(here), "exists": False, "usable": True, "reason": ""}
    here.mkdir(parents=True)
    here.chmod(0o777)
    assert f"{here} has mode 0777" in run("path").stdout.splitlines()[1]
    assert facts("path")["usable"] is False


def test_ls_shows_the_last_used_first_and_touches_nothing(filled):
    found = facts("ls")["entries"]
    assert [each["entry"] for each in found] == [f"{key(n).digest}.entry" for n in (2, 1, 0)]
    assert found[0]["key"]["problem"] == [["number", 2]]
    assert found[0]["used"] == 1.7e9 + 2
    text = run("ls").stdout
    assert f"{key(2).digest[:12]}  cubin  sm_90:NVIDIA-H100" in text
    assert "2023-11-14 22:13:22" in text
    assert "torch 2.13.0+cu130, triton 3.6.0" in text
    assert facts("ls")["entries"][0]["used"] == 1.7e9 + 2


def test_ls_shows_forty_or_all(here):
    store = Store(here)
    for number in range(43):
        store.put(key(number), {}, b"")
    assert "and 3 more (--all)" in run("ls").stdout
    assert "more" not in run("ls", "--all").stdout


def test_ls_says_what_is_bad_and_prints_no_escapes(filled):
    (filled / f"{key(0).digest}.entry").write_bytes(b"no entry at all")
    strange = Key(**key(9).fields | {"kind": "\x1b[31mred", "torch": "[b]x[/b]\ud800"})
    Store(filled).put(strange, {}, b"")
    done = run("ls")
    assert "it is cut off" in done.stdout
    assert "\x1b" not in done.stdout
    assert "[b]x[/b]" in done.stdout
    assert [each["why"] for each in facts("ls")["entries"]].count("it is cut off") == 1


def test_stats(filled):
    (filled / ".x.tmp").write_bytes(b"")
    found = facts("stats")
    held = sum(f.stat().st_size for f in filled.glob("*.entry"))
    assert found == {
        "path": str(filled),
        "entries": 3,
        "bytes": held,
        "used_first": 1.7e9,
        "used_last": 1.7e9 + 2,
        "quota": 8 << 30,
        "kinds": {"cubin": {"entries": 3, "bytes": held}},
        "temporary": 1,
    }
    text = run("stats").stdout
    assert "0.0% of 8.0 GiB" in text
    assert "1 temporary files and locks" in text


@pytest.mark.parametrize(
    ("corrupt", "refused", "code"), [(0, 0, 0), (1, 0, 1), (0, 1, 2), (2, 1, 3)]
)
def test_verify_ends_with_a_sum_of_bits(filled, corrupt, refused, code):
    for number in range(corrupt):
        spoil(filled, number)
    if refused:
        (filled / f"{key(2).digest}.entry").chmod(0o666)
    found = facts("verify", code=code)
    assert (found["entries"], len(found["bad"]), found["code"]) == (3, corrupt + refused, code)
    assert sum(each["refused"] for each in found["bad"]) == refused
    done = run("verify")
    assert done.exit_code == code
    assert f"{3 - corrupt - refused} of 3 entries are good" in done.stdout


def test_verify_knows_a_swapped_entry(filled):
    os.replace(filled / f"{key(0).digest}.entry", filled / f"{key(1).digest}.entry")
    assert facts("verify", code=1)["bad"][0]["why"] == "its name is that of another key"


def test_verify_refuses_a_folder_of_others(filled):
    filled.chmod(0o777)
    assert "has mode 0777" in facts("verify", code=2)["refused"]
    done = run("ls")
    assert done.exit_code == 2
    assert "a folder that only you can write" in done.stderr


def test_gc_reaps_and_evicts(filled):
    for name in (".dead.tmp", ".dead.lock", ".young.tmp"):
        (filled / name).write_bytes(b"")
    for name in (".dead.tmp", ".dead.lock"):
        os.utime(filled / name, (1e9, 1e9))
    held = sum(f.stat().st_size for f in filled.glob("*.entry"))
    assert facts("gc") == {"held": held, "evicted": 0, "freed": 0, "reaped": 2}
    assert facts("gc", "--quota", held - 1)["evicted"] == 1
    assert not (filled / f"{key(0).digest}.entry").exists(), "the one used first"
    assert run("gc", "--quota", "0").stdout.startswith("removed 2 entries (")
    assert [f.name for f in filled.iterdir()] == [".young.tmp"]


def test_another_folder(filled, tmp_path):
    filled.rename(tmp_path / "moved")
    assert len(facts("ls", "--folder", tmp_path / "moved")["entries"]) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("1000", 1000), ("512M", 512 << 20), ("8GiB", 8 << 30), ("1.5 kb", 1536)],
)
def test_sizes_are_read(text, expected):
    assert quota_of(text) == expected


@pytest.mark.parametrize("text", ["", "x", "-1", "1e3", "8GG", "nan"])
def test_no_sizes_are_errors(text):
    done = run("gc", "--quota", text)
    assert done.exit_code == 2
    assert "a size such as 512M or 8GiB" in done.stderr


def test_sizes_are_said():
    assert [size(n) for n in (0, 1023, 1024, 1536, 1 << 20, 8 << 30, 5 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 MiB",
        "8.0 GiB",
        "5120.0 TiB",
    ]
