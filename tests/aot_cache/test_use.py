"""What the environment says of the kernel cache: layers, remotes and the quota."""

import logging
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ipex_inductor.aot_cache import default_store, log_once, use
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.quota import QUOTA
from ipex_inductor.aot_cache.store import Store
from ipex_inductor.cli import app
from support.cache.cache_keys import blob, key

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _as_a_new_process(monkeypatch, tmp_path):
    for name in ("LAYERS", "REMOTES", "WRITE_BACK", "QUOTA", "BUNDLES"):
        monkeypatch.delenv(f"IPEX_AOT_{name}", raising=False)
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    log_once.say.cache_clear()


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_nothing_is_named_by_default():
    assert (use.layers(), use.remotes(), use.quota()) == ((), (), QUOTA)


def test_layers_and_remotes_in_the_order_named(monkeypatch):
    monkeypatch.setenv("IPEX_AOT_LAYERS", os.pathsep.join(["/opt/one", "", "~/two"]))
    monkeypatch.setenv("IPEX_AOT_REMOTES", " s3://bucket/kernels  file:///mnt/shared ")
    assert use.layers() == (Path("/opt/one"), Path.home() / "two")
    found = [(remote.label, remote.write_back) for remote in use.remotes()]
    assert found == [("s3://bucket/kernels", False), ("file:///mnt/shared", False)]


@pytest.mark.parametrize(("text", "back"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_what_is_compiled_goes_to_remotes_if_asked_for(text, back, monkeypatch):
    monkeypatch.setenv("IPEX_AOT_REMOTES", "memory://kernels")
    monkeypatch.setenv("IPEX_AOT_WRITE_BACK", text)
    assert [remote.write_back for remote in use.remotes()] == [back]


def test_what_cannot_be_read_is_a_line_and_the_default(monkeypatch, caplog):
    monkeypatch.setenv("IPEX_AOT_REMOTES", "memory://kernels")
    monkeypatch.setenv("IPEX_AOT_WRITE_BACK", "yes please")
    monkeypatch.setenv("IPEX_AOT_QUOTA", "much")
    assert [remote.write_back for remote in use.remotes()] == [False]
    assert use.quota() == QUOTA
    flag, quota = said(caplog)
    assert "IPEX_AOT_WRITE_BACK is not used: expected 0 or 1; got 'yes please'" in flag
    assert "IPEX_AOT_QUOTA is not used: expected a size such as 512M or 8GiB; got 'much'" in quota


def test_the_store_of_the_process_has_them(monkeypatch, tmp_path):
    """An entry of a layer and one of a remote are served, and the remote's is kept."""
    for number, where in enumerate(("layer", "remote")):
        assert Store(tmp_path / where, bundles=()).put(key(number), {"n": number}, blob(number))
    monkeypatch.setenv("IPEX_AOT_LAYERS", str(tmp_path / "layer"))
    monkeypatch.setenv("IPEX_AOT_REMOTES", (tmp_path / "remote").as_uri())
    monkeypatch.setenv("IPEX_AOT_QUOTA", "1GiB")
    store = default_store.store()
    found = [store.get(key(number)) for number in range(2)]
    assert found == [Entry({"n": number}, blob(number)) for number in range(2)]
    counted = store.counts()
    assert counted["hits", f"layer {tmp_path / 'layer'}"] == 1
    assert counted["hits", (tmp_path / "remote").as_uri()] == 1
    assert [f.name for f in store.folder.files(".entry")] == [f"{key(1).digest}.entry"]
    assert store._room.quota == 1 << 30


def test_the_commands_go_by_the_same_quota(monkeypatch):
    monkeypatch.setenv("IPEX_AOT_QUOTA", "512M")
    done = CliRunner().invoke(app, ["cache", "stats"])
    assert "of 512.0 MiB" in done.stdout
