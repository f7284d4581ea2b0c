"""One process builds and the others wait, but not for one that is stopped, killed or forked."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ipex_inductor.aot_cache import disk, lock
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.store import Store
from support.cache.cache_keys import blob, key
from support.cache.concurrent_builders import rounds

pytestmark = pytest.mark.reliability

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("count", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_a_cold_key_is_built_once(tmp_path, count):
    found = rounds(tmp_path / "kernels", count)
    once = sum(r["built"] == 1 for r in found)
    print(f"built once in {once} of {count} rounds")
    assert once >= 0.99 * count


@pytest.mark.parametrize(
    ("harm", "count", "patience"),
    [
        ("kill", 3, 5),
        ("stop", 1, 10),
        pytest.param("kill", 30, 5, marks=pytest.mark.slow),
        pytest.param("stop", 5, 10, marks=pytest.mark.slow),
    ],
)
def test_waiters_go_on_without_a_stopped_or_killed_builder(tmp_path, harm, count, patience):
    found = rounds(tmp_path / "kernels", count, harm)
    print(harm, [(r["built"], r["waited"]) for r in found])
    assert max(r["waited"] for r in found) <= patience
    if harm == "kill":
        assert all(r["built"] == 2 for r in found), "and one of them builds"


def test_a_forked_child_of_a_killed_builder_holds_nobody_up(tmp_path, monkeypatch):
    """It inherits the lock, and shows no signs of life."""
    monkeypatch.setattr(lock, "PATIENCE", 0.5)
    store = Store(tmp_path / "kernels")
    assert store.put(key(1), {}, b"")
    path = store.folder.lock_path(key(2).digest)
    file, _ = lock._try_lock(path)  # held for as long as this process lives, and never touched
    begun = time.monotonic()
    assert store.compile_once(key(2), lambda: ({}, b"x")) == Entry({}, b"x")
    assert 0.4 < time.monotonic() - begun < 5
    os.close(file)


def test_a_lock_that_lost_its_name_is_no_lock(tmp_path, monkeypatch):
    """Who waited holds the file that the builder removed; another one locks a new file."""
    path, real = str(tmp_path / "lock"), lock._lock_file
    removed = []

    def late(file):
        if not removed:
            removed.append(os.unlink(path))
        return real(file)

    monkeypatch.setattr(lock, "_lock_file", late)
    with lock.hold_lock(path) as ours:
        assert ours
        monkeypatch.setattr(lock, "_lock_file", real)
        assert lock._try_lock(path)[0] is None, "both would build"
    assert not os.path.exists(path)


def test_signs_of_life_are_waited_for(tmp_path, monkeypatch):
    """For longer than patience: a long compile is not done twice."""
    monkeypatch.setattr(lock, "PATIENCE", 2)  # twenty signs, as a busy machine skips some
    script = f"""
import time
from pathlib import Path
from support.cache.cache_keys import blob, key
from ipex_inductor.aot_cache import lock
from ipex_inductor.aot_cache.store import Store
lock.PULSE = 0.1
def build():
    print("building", flush=True)
    time.sleep(3)
    return {{}}, blob(1)
Store(Path({str(tmp_path / "kernels")!r})).compile_once(key(1), build)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    builder = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE)
    assert builder.stdout.readline() == b"building\n"
    store = Store(tmp_path / "kernels")
    found = store.compile_once(key(1), lambda: pytest.fail("it was being built"))
    assert found == Entry({}, blob(1))
    assert builder.wait() == 0
    builder.stdout.close()


@pytest.mark.parametrize("how", ["none", "no-op"])
def test_a_disk_without_locks_costs_compiles_only(tmp_path, monkeypatch, how):
    def flock(file, what):
        if how == "none":
            raise OSError(38, "Function not implemented")

    monkeypatch.setattr(disk, "flock", flock)
    begun = time.monotonic()
    store = Store(tmp_path / "kernels")
    assert store.compile_once(key(1), lambda: ({}, b"x")) == Entry({}, b"x")
    assert store.get(key(1)) == Entry({}, b"x")
    assert time.monotonic() - begun < lock.PATIENCE
