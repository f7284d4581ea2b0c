"""Every system call fails, the power goes, the disk is full: the kernel is right all the same."""

import errno
import itertools
import os
import random
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from ipex_inductor.aot_cache import disk, log_once
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.store import Store
from support.cache.cache_keys import blob, key

pytestmark = pytest.mark.reliability

ERRNOS = ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "EMFILE", "EINTR", "ESTALE", "EBUSY")
CALLS = tuple(name for name in disk.__all__ if name != "time")
META = {"shared": 1}


@pytest.fixture(autouse=True)
def _unsaid():
    log_once.say.cache_clear()


class Failing:
    """The `at`th call of the seam fails, and those after it if `stay`; counts them all."""

    def __init__(self, monkeypatch, at, code, stay=False):
        self.calls, self.at, self.code, self.stay = 0, at, code, stay
        for name in CALLS:
            monkeypatch.setattr(disk, name, self.wrapped(name, getattr(disk, name)))

    def wrapped(self, name, call):
        def run(*args, **kwargs):
            self.calls += 1
            if self.calls == self.at or (self.stay and self.calls > self.at):
                if name == "close":
                    call(*args)  # the kernel lets go of a file even if closing it fails
                raise OSError(self.code, os.strerror(self.code))
            return call(*args, **kwargs)

        return run


def cold(path):
    """Nothing is there, not even the folder."""


def warm(path):
    Store(path).put(key(1), META, blob(1))


def corrupt(path):
    warm(path)
    (path / f"{key(1).digest}.entry").write_bytes(b"\0" * 5000)


def full(path):
    """An entry has to go for the next, and something dead lies about."""
    store = Store(path)
    for number in range(2, 8):
        store.put(key(number), META, blob(number))
    (path / ".dead.tmp").write_bytes(b"")
    os.utime(path / ".dead.tmp", (1e9, 1e9))


def compile_once(path):
    store = Store(path, quota=10_000)
    return store.compile_once(key(1), lambda: (META, blob(1)))


WAYS = {False: "once", True: "from-then-on"}


@contextmanager
def patched():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


# Five seconds each of those with most calls: quickly each scene in one way.
SCENES = [
    pytest.param(scene, stay, marks=[pytest.mark.slow] * rare)
    for scene, stay, rare in (
        (cold, False, False),
        (cold, True, False),
        (warm, False, False),
        (warm, True, False),
        (corrupt, False, True),
        (corrupt, True, False),
        (full, False, False),
        (full, True, True),
    )
]


@pytest.mark.parametrize(
    ("scene", "stay"), SCENES, ids=lambda v: v.__name__ if callable(v) else WAYS[v]
)
def test_every_call_may_fail_and_the_kernel_is_right(tmp_path, scene, stay):
    template, runs = tmp_path / "template", 0
    scene(template)
    for name in ERRNOS:
        for at in itertools.count(1):
            path = tmp_path / "kernels"
            shutil.rmtree(path, ignore_errors=True)
            if template.exists():
                shutil.copytree(template, path)
            with patched() as monkeypatch:
                failing = Failing(monkeypatch, at, getattr(errno, name), stay)
                assert compile_once(path) == Entry(META, blob(1)), (name, at)
            runs += 1
            valid(path)
            if failing.calls < at:
                break
    print(f"{scene.__name__}: {runs} runs, right in all")
    assert runs > 9 * (5 if scene is warm else 15)


def valid(path):
    """Every entry is whole, and the next compile is right and stays."""
    store = Store(path)
    for number in range(1, 8):
        found = store.get(key(number))
        assert found is None or found == Entry(META, blob(number))
    assert compile_once(path) == Entry(META, blob(1))
    assert Store(path).get(key(1)) == Entry(META, blob(1))


def test_a_failed_put_leaves_no_temporary_file(tmp_path, monkeypatch):
    """But where removing it fails too."""
    for at in itertools.count(1):
        path = tmp_path / str(at)
        with patched() as monkeypatch:
            failing = Failing(monkeypatch, at, errno.ENOSPC)
            Store(path).put(key(1), META, blob(1))
        assert not list(path.glob("*.tmp")), at
        if failing.calls < at:
            return


# --- power loss


class Recorded:
    """What a run asks of the disk, in order, as a model of it needs: data by file, names."""

    def __init__(self, monkeypatch):
        self.log, self._files = [], {}
        real = {name: getattr(disk, name) for name in CALLS}

        def opened(path, flags, mode=0o777):
            file = real["open"](path, flags, mode)
            inode = os.fstat(file).st_ino
            self._files[file] = inode
            if flags & os.O_CREAT and str(path).endswith(".tmp"):
                identity = (inode, Path(path).name)  # inodes are used again
                self.log.append(("name", Path(path).name, identity))
                self._files[file] = identity
            return file

        def write(file, data):
            count = real["write"](file, data)
            self.log.append(("data", self._files[file], bytes(data[:count])))
            return count

        def fsync(file):
            real["fsync"](file)
            self.log.append(("sync", self._files[file]))

        def rename(source, target):
            real["rename"](source, target)
            self.log.append(("rename", Path(source).name, Path(target).name))

        def unlink(path):
            real["unlink"](path)
            self.log.append(("unlink", Path(path).name))

        for call in (opened, write, fsync, rename, unlink):
            monkeypatch.setattr(disk, {"opened": "open"}.get(call.__name__, call.__name__), call)


def states(log, begin):
    """Every disk that a loss of power from event `begin` on may leave: (acknowledged, files).

    Of what was not synced, any part of the data and any set of the names may be there, in any order
    of files; a folder's sync keeps its names, a file's its data.
    """
    for end in range(begin, len(log) + 1):
        done = log[:end]
        acknowledged = [event[1] for event in done if event[0] == "acknowledged"]
        folder_syncs = [i for i, e in enumerate(done) if e[0] == "sync" and type(e[1]) is int]
        last = max(folder_syncs, default=-1)
        names = [i for i, e in enumerate(done) if e[0] in ("name", "rename", "unlink")]
        kept, loose = [i for i in names if i < last], [i for i in names if i > last]
        for subset in itertools.product((True, False), repeat=len(loose)):
            chosen = kept + [i for i, there in zip(loose, subset, strict=True) if there]
            for share in (1.0, 0.5, 0.0, None):
                yield acknowledged, played(done, chosen, share)


def played(done, chosen, share):
    """Content by name; of a file that was not synced a share of the data, or zeros (None)."""
    data, synced = {}, {e[1] for e in done if e[0] == "sync"}
    temps, names = {e[1]: e[2] for e in done if e[0] == "name"}, {}
    for entry in done:
        if entry[0] == "data":
            data[entry[1]] = data.get(entry[1], b"") + entry[2]
    for i in chosen:
        kind, *rest = done[i]
        if kind == "name":
            names[rest[0]] = rest[1]
        elif kind == "rename":
            names.pop(rest[0], None)
            names[rest[1]] = temps[rest[0]]
        else:
            names.pop(rest[0], None)

    def content(file):
        whole = data.get(file, b"")
        if file in synced or share == 1.0:
            return whole
        return bytes(len(whole)) if share is None else whole[: int(share * len(whole))]

    return {name: content(file) for name, file in names.items()}


OLD, NEW = b"old", b"new"
NUMBERS = range(1, 5)


def put_logs(path, code):
    """What each of four writers does to put an entry with that code, recorded one by one."""
    for number in NUMBERS:
        with patched() as monkeypatch:
            recorded = Recorded(monkeypatch)
            assert Store(path).put(key(number), {"number": number}, code * 1000)
            recorded.log.append(("acknowledged", number))
        yield recorded.log


def interleaved(rng, logs):
    """The logs as one, each in its own order: writers at the same time."""
    rest = [list(log) for log in logs]
    while any(rest):
        yield rng.choice([log for log in rest if log]).pop(0)


def test_a_loss_of_power_leaves_entries_whole_or_absent(tmp_path):
    """Four entries are replaced by four writers at once; the old ones were acknowledged before."""
    path, rng, seen = tmp_path / "kernels", random.Random(0), set()
    before = [event for log in put_logs(path, OLD) for event in log]
    after = list(put_logs(path, NEW))
    for _ in range(6):
        log = before + list(interleaved(rng, after))
        for acknowledged, files in states(log, len(before)):
            state = (tuple(sorted(files.items())), tuple(sorted(acknowledged)))
            if state not in seen:
                seen.add(state)
                check_state(tmp_path / "after", files, acknowledged[len(NUMBERS) :])
    print(f"{len(seen)} different states after a loss of power")
    assert len(seen) >= 500


def check_state(path, files, acknowledged):
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    for name, content in files.items():
        (path / name).write_bytes(content)
    store = Store(path)
    for number in NUMBERS:
        found = store.get(key(number))
        assert found is not None, "one of them was acknowledged"
        assert found.meta == {"number": number}
        assert found.blob in (OLD * 1000, NEW * 1000)
        assert found.blob == NEW * 1000 or number not in acknowledged, "older than acknowledged"


# --- full


FULL = """
import resource, sys
from pathlib import Path
from support.cache.cache_keys import blob, key
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.store import Store
path = Path(sys.argv[1])
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), hard))
store = Store(path)
for number in range(8):
    for _ in range(2):
        built = store.compile_once(key(number), lambda: ({}, blob(number, 1 << 18)))
        assert built == Entry({}, blob(number, 1 << 18))
assert store.counts()["hits", ""] == 8, "from memory"
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(len(list(path.glob("*.tmp"))), len(list(path.glob("*.entry"))))
"""


def run_full(path, limit):
    tests = Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-c", FULL, path, str(limit)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("kept in memory only") == 1, ran.stderr
    return ran.stdout.split()


def test_files_may_not_grow(tmp_path):
    assert run_full(tmp_path / "kernels", 1 << 16) == ["0", "0"]


def test_a_disk_that_is_full(tmp_path):
    """A real one of 1 MiB, where this user may mount it; afterwards the space is free again."""
    disk_of_one = tmp_path / "disk"
    disk_of_one.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(disk_of_one)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is for root")
    try:
        temps, entries = run_full(disk_of_one / "kernels", resource.RLIM_INFINITY)
        assert temps == "0"
        assert 1 <= int(entries) <= 3
        shutil.rmtree(disk_of_one / "kernels")
        found = os.statvfs(disk_of_one)
        assert found.f_bfree >= found.f_blocks - 1
    finally:
        subprocess.run(["umount", str(disk_of_one)], check=True)
