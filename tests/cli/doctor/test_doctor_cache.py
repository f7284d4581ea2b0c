"""What the doctor says of the kernel cache: the home, what else is asked, and who is trusted."""

import os

import pytest

from ipex_inductor.aot_cache import log_once, trust
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.bundling import packing
from ipex_inductor.aot_cache.store import default_folder
from ipex_inductor.cli.doctor.doctor import CHECKS, examine
from support.cache.signed_bundles import filled, packed, pair

pytestmark = pytest.mark.unit

NAMES = ("LAYERS", "REMOTES", "WRITE_BACK", "QUOTA", "BUNDLES")


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    for name in NAMES:
        monkeypatch.delenv(f"IPEX_AOT_{name}", raising=False)
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    log_once.say.cache_clear()


def only(name):
    return examine({name: CHECKS[name]})[0]


def told(name):
    found = only(name)
    assert bool(found.todo) == (found.status != "ok")
    return found.status, found.detail


def test_a_new_user_has_nothing_and_that_is_fine(tmp_path):
    words = {
        "cache entries": "none yet, 8.0 GiB may be kept",
        "cache layers": "none; IPEX_AOT_LAYERS names them",
        "cache bundles": "none; IPEX_AOT_BUNDLES names them",
        "cache remotes": "none; IPEX_AOT_REMOTES names them",
        "trusted keys": "none; signed bundles need `ipex-inductor cache trust add`",
    }
    assert {name: told(name) for name in words} == {n: ("ok", w) for n, w in words.items()}
    assert not (tmp_path / "home").exists()


def test_the_home_says_its_mode_and_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_AOT_QUOTA", "64M")
    filled(default_folder())
    assert told("cache folder") == ("ok", f"{tmp_path}/home, yours, mode 0700")
    status, detail = told("cache entries")
    assert status == "ok"
    assert detail.startswith(f"5 in {default_folder()}, ")
    assert detail.endswith(" of 64.0 MiB")


def test_entries_that_are_not_used(monkeypatch):
    at = filled(default_folder()).path
    next(at.glob("*.entry")).write_bytes(b"torn")
    found = only("cache entries")
    assert (found.status, found.todo) == ("warn", "`ipex-inductor cache verify` names them")
    assert found.detail.endswith("; 1 are not used")
    at.chmod(0o777)
    status, detail = told("cache entries")
    assert status == "fail"
    assert "others can write it" in detail
    monkeypatch.setenv("IPEX_AOT_QUOTA", "much")
    assert told("cache entries") == ("warn", "IPEX_AOT_QUOTA=much is not used")


def test_layers_are_judged_each(monkeypatch, tmp_path):
    good, shared, missing = (tmp_path / name for name in ("good", "shared", "missing"))
    good.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("IPEX_AOT_LAYERS", str(good))
    assert told("cache layers") == ("ok", str(good))
    monkeypatch.setenv("IPEX_AOT_LAYERS", os.pathsep.join(map(str, (good, shared, missing))))
    status, detail = told("cache layers")
    assert status == "warn"
    assert detail.split("; ")[0] == str(good)
    assert "shared has mode 0777" in detail
    assert detail.endswith(f"{missing} is not there")


def test_bundles_say_who_signed_them_or_why_they_are_not_used(monkeypatch, tmp_path):
    bundle = packed(tmp_path / "k.bundle", pair(tmp_path), serial=17)
    monkeypatch.setenv("IPEX_AOT_BUNDLES", str(bundle))
    status, detail = told("cache bundles")
    assert status == "ok"
    assert f"the bundle {bundle} ('kernels', serial 17, signed by me (" in detail
    assert detail.endswith(", 5 entries")
    assert told("trusted keys") == ("ok", "me")
    assert trust.remove("me")
    status, detail = told("cache bundles")
    assert status == "warn"
    assert "expected a bundle signed by a key that you trust" in detail


def test_a_bundle_that_was_only_looked_at_shuts_out_no_older_one(monkeypatch, tmp_path):
    mine = pair(tmp_path)
    old, new = (packed(tmp_path / f"{n}.bundle", mine, serial=n) for n in (1, 2))
    packing.sign(new, mine)
    for bundle in (new, old):
        monkeypatch.setenv("IPEX_AOT_BUNDLES", str(bundle))
        assert told("cache bundles")[0] == "ok"
    open_bundle(new)
    assert told("cache bundles")[0] == "warn"


def test_remotes_say_whether_they_answer(monkeypatch):
    monkeypatch.setenv("IPEX_AOT_REMOTES", "memory://kernels")
    monkeypatch.setenv("IPEX_AOT_WRITE_BACK", "1")
    assert told("cache remotes") == ("ok", "memory://kernels answers, written to as well")
    monkeypatch.setenv("IPEX_AOT_REMOTES", "memory://kernels nosuch://x")
    status, detail = told("cache remotes")
    assert status == "warn"
    assert detail.endswith("nosuch://x: Protocol not known: nosuch")


def test_a_trust_store_that_others_can_write_fails(tmp_path):
    pair(tmp_path)
    trust.trust_folder().chmod(0o777)
    status, detail = told("trusted keys")
    assert status == "fail"
    assert "others can write it" in detail
