"""The verbs over bundles and trusted keys: what they do, say, and how they end."""

import json
import os
import subprocess

import pytest
from typer.testing import CliRunner

from ipex_inductor.aot_cache import log_once, signing, trust
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.aot_cache.store import Store
from ipex_inductor.cli import app
from ipex_inductor.cli.cache.trust.trust import VERBS
from support.cache.cache_keys import KEY, blob, key
from support.cache.signed_bundles import SERIAL, filled, packed, pair

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """The kernel cache of the user; the test is in a folder of his."""
    log_once.say.cache_clear()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "ipex"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ipex" / "kernels" / "1"


@pytest.fixture
def mine(tmp_path):
    return pair(tmp_path)


def run(*args):
    return CliRunner().invoke(app, ["cache", *map(str, args)])


def said(*args):
    """The lines on stdout of a verb that ends well."""
    done = run(*args)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout.splitlines()


def facts(*args, code=0):
    done = run(*args, "--json")
    assert done.exit_code == code, done.output
    found = json.loads(done.stdout)
    assert found.pop("schema") == 1
    return found


def error(*args):
    """The error a verb ends with."""
    done = run(*args)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    return done.stderr


def digests(path):
    return {item.key for item in open_bundle(path, allow_unsigned=True).manifest.entries}


def test_from_one_machine_to_another(here, tmp_path, monkeypatch):
    """The way of a bundle, as the documentation has it."""
    filled(here, range(3))
    public = said("trust", "new", "builder")[-1]
    packed_line = said("pack", "h100.bundle", "--arch", "sm_90", "--key", "builder.key")
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "other"))
    other = tmp_path / "other" / "kernels" / "1"
    assert "signed by a key that is not trusted" in error("unpack", "h100.bundle")
    assert not other.exists()
    assert said("trust", "add", "builder", "builder.pub") == [public]
    assert said("trust", "ls") == [public]
    assert said("unpack", "h100.bundle") == [f"3 of 3 entries are in {other}"]
    assert [Store(other).get(key(n)).blob for n in range(3)] == [blob(n) for n in range(3)]
    serial = open_bundle(tmp_path / "h100.bundle").manifest.serial
    assert packed_line == [f"h100.bundle: h100 {serial}, 3 entries (5.4 KiB)"]
    assert said("trust", "rm", "builder") == ["builder is not trusted any more"]
    assert said("trust", "ls") == []
    assert "a bundle signed by a key that you trust" in error("unpack", "h100.bundle")


def test_pack_says_what_it_did(here, mine):
    filled(here)
    found = facts("pack", "x.bundle", "--key", mine, "--name", "mine", "--serial", 7)
    size = sum(f.stat().st_size for f in here.iterdir())
    assert found == {
        "path": "x.bundle",
        "name": "mine",
        "serial": 7,
        "entries": 5,
        "bytes": size,
        "refused": {},
    }
    assert said("pack", "y.bundle", "--serial", 7) == [
        "y.bundle: y 7, 5 entries (9.0 KiB); it is not signed"
    ]
    assert "expected a file to write that is not there yet; got y.bundle" in error(
        "pack", "y.bundle"
    )


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["--arch", "sm_90"], {0, 1}),
        (["--arch", "sm_90:NVIDIA-H200"], {1}),
        (["--arch", "sm_9"], set()),
        (["--arch", "sm_90:NVIDIA-H100", "--arch", "x86-64:amx"], {0, 2}),
        (["--kind", "cpp"], {2}),
        (["--kind", "cpp", "--kind", "cubin"], {0, 1, 2}),
        (["--kind", "cpp", "--arch", "sm_90"], set()),
    ],
    ids=str,
)
def test_pack_selects(here, tmp_path, options, numbers):
    made = [
        Key(**KEY.fields | {"kind": kind, "architecture": architecture})
        for kind, architecture in (
            ("cubin", "sm_90:NVIDIA-H100"),
            ("cubin", "sm_90:NVIDIA-H200"),
            ("cpp", "x86-64:amx"),
        )
    ]
    for each in made:
        Store(here).put(each, {}, b"")
    if not numbers:
        assert "expected an entry to pack; got none" in error("pack", "x.bundle", *options)
        assert not (tmp_path / "x.bundle").exists()
        return
    said("pack", "x.bundle", *options)
    assert digests(tmp_path / "x.bundle") == {made[n].digest for n in numbers}


def test_pack_leaves_bad_entries_out_and_says_so(here, tmp_path):
    filled(here, range(8))
    for number in range(7):
        file = here / f"{key(number).digest}.entry"
        file.write_bytes(file.read_bytes()[:-1])
    done = run("pack", "x.bundle")
    assert done.exit_code == 0
    told = done.stderr.splitlines()
    assert (told[0], told[-1], len(told)) == ("7 entries refused:", "  and 2 more", 7)
    assert digests(tmp_path / "x.bundle") == {key(7).digest}
    names = {f"{key(n).digest}.entry": "its length is another than it says" for n in range(7)}
    assert facts("pack", "y.bundle")["refused"] == names


def test_pack_where_there_is_nothing_or_a_folder_of_others(here, mine):
    assert "expected an entry to pack" in error("pack", "x.bundle")
    filled(here)
    here.chmod(0o777)
    assert "a folder that only you can write" in error("pack", "x.bundle")
    assert "expected a name of up to 64" in error("pack", "x.bundle", "--name", "a b")


def test_sign_says_who_may_use_it(here, tmp_path, mine):
    packed(tmp_path / "x.bundle")
    assert "which is unsigned" in error("unpack", "x.bundle")
    assert said("sign", "x.bundle", "--key", mine) == [
        f"signed: x.bundle: kernels {SERIAL}, 5 entries (9.0 KiB)"
    ]
    assert facts("sign", "x.bundle", "--key", mine)["entries"] == 5
    assert said("unpack", "x.bundle") == [f"5 of 5 entries are in {here}"]
    mine.chmod(0o644)
    assert "a private key that only you can read" in error("sign", "x.bundle", "--key", mine)
    assert "No such file" in error("sign", "gone", "--key", tmp_path / "gone.key")


def test_unpack_takes_what_is_allowed(here, tmp_path, mine):
    packed(tmp_path / "unsigned", numbers=[1])
    assert said("unpack", "unsigned", "--allow-unsigned") == [f"1 of 1 entries are in {here}"]
    packed(tmp_path / "new", mine, serial=2)
    packed(tmp_path / "old", mine, serial=1)
    said("unpack", "new")
    assert "no older than serial 2, seen before" in error("unpack", "old")
    assert facts("unpack", "old", "--allow-older") == {
        "path": str(here),
        "found": 5,
        "held": 5,
        "refused": [],
    }


def test_unpack_into_another_folder(here, tmp_path, mine):
    packed(tmp_path / "x", mine)
    said("unpack", "x", "--folder", tmp_path / "there")
    assert len(list((tmp_path / "there").iterdir())) == 5
    assert not here.exists()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    assert facts("unpack", "x", "--folder", tmp_path / "shared", code=1)["held"] == 0


def test_merge_takes_folders_and_bundles(here, tmp_path, mine):
    filled(tmp_path / "one", [0, 1])
    packed(tmp_path / "two", mine, [1, 2])
    spoilt = filled(tmp_path / "three", [3, 4]).path / f"{key(4).digest}.entry"
    spoilt.write_bytes(b"no entry")
    done = run("merge", "one", "two", "three")
    assert done.exit_code == 1
    assert done.stdout == f"5 of 6 entries are in {here}\n"
    assert done.stderr == f"1 entries refused:\n  {spoilt.name} in three: it is cut off\n"
    assert [Store(here).get(key(n)) is not None for n in range(5)] == [True] * 4 + [False]


def test_merge_takes_nothing_where_one_source_is_bad(here, tmp_path):
    filled(tmp_path / "one")
    packed(tmp_path / "two")
    assert "which is unsigned" in error("merge", "one", "two")
    assert "No such file" in error("merge", "one", "gone")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    assert "a folder that only you can write" in error("merge", "shared", "one")
    assert not here.exists()


# --- trust


def test_help_lists_every_verb_over_keys():
    done = run("trust", "--help")
    assert all(verb in done.output and line in done.output for verb, line in VERBS.items())


def test_new_makes_files_that_openssl_reads(tmp_path):
    lines = said("trust", "new", "me", "--into", tmp_path)
    raw = trust.trusted_keys()["me"]
    assert lines == [
        f"private key: {tmp_path / 'me.key'}",
        f"public key:  {tmp_path / 'me.pub'}",
        f"me {raw.hex()}",
    ]
    assert (tmp_path / "me.key").stat().st_mode & 0o777 == 0o600
    try:
        read = subprocess.run(
            ["openssl", "pkey", "-in", "me.key", "-pubout"], capture_output=True, check=True
        )
    except FileNotFoundError:
        pytest.skip("no openssl here")
    assert read.stdout == (tmp_path / "me.pub").read_bytes()


def test_new_overwrites_nothing(tmp_path):
    said("trust", "new", "me")
    before = (tmp_path / "me.key").read_bytes()
    assert "which is another key's" in error("trust", "new", "me")
    said("trust", "rm", "me")
    assert "expected a file that is not there yet" in error("trust", "new", "me")
    assert (tmp_path / "me.key").read_bytes() == before
    assert trust.trusted_keys() == {}
    assert "a folder that can be written" in error("trust", "new", "you", "--into", "gone")
    assert "a name of up to 64" in error("trust", "new", "../you")


def test_keys_are_listed_as_json(tmp_path, mine):
    public = signing.public_key(tmp_path / "me.pub").hex()
    assert facts("trust", "ls") == {
        "path": str(tmp_path / "ipex" / "trust"),
        "keys": {"me": public},
    }
    assert "got 'you'. There are: me." in error("trust", "rm", "you")
    said("trust", "rm", "me")
    assert "got 'me'. There are: none." in error("trust", "rm", "me")


def test_a_folder_of_keys_that_others_can_write_is_an_error(tmp_path, mine):
    os.chmod(tmp_path / "ipex" / "trust", 0o770)
    for verb in (["ls"], ["rm", "me"], ["add", "you", "me.pub"]):
        assert "a folder of trusted keys that only you can write" in error("trust", *verb)
