"""Whose folder and whose file it is: what others could write is never read, nothing is followed."""

import ast
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ipex_inductor.aot_cache
from ipex_inductor.aot_cache import disk, lock, log_once
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.store import Store
from support.cache.cache_keys import blob, key

pytestmark = pytest.mark.reliability

FOREIGN = 65534
MODES = (0o700, 0o755, 0o750, 0o770, 0o775, 0o777, 0o1777)
PARENTS = {"ok": 0o755, "world-writable": 0o777, "sticky": 0o1777}
META = {"shared": 1}
GOOD = Entry(META, blob(1))


@pytest.fixture(autouse=True)
def _unsaid():
    log_once.say.cache_clear()


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "above" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    folder.parent.chmod(0o755)
    return folder


def give_away(path):
    try:
        os.chown(path, FOREIGN, -1, follow_symlinks=False)
    except PermissionError:
        pytest.skip("only root can give a file away")


def lines(caplog):
    return [r.message for r in caplog.records if r.name == "ipex_inductor"]


def file_of(path, number=1):
    return path / f"{key(number).digest}.entry"


# --- the folder


@pytest.mark.parametrize("linked", [False, True], ids=["folder", "link"])
@pytest.mark.parametrize("parent", PARENTS)
@pytest.mark.parametrize("bits", MODES, ids=oct)
@pytest.mark.parametrize("owner", ["self", "other"])
def test_a_folder_that_others_can_write_is_neither_read_nor_written(
    path, caplog, owner, bits, parent, linked
):
    Store(path).put(key(1), META, GOOD.blob)
    used = path
    if linked:
        used = path.parent / "link"
        used.symlink_to(path)
    path.chmod(bits)
    path.parent.chmod(PARENTS[parent])
    if owner == "other":
        give_away(path)
    ours = owner == "self" and not bits & 0o022 and parent != "world-writable" and not linked
    before = sorted(os.listdir(path))
    store = Store(used)
    assert (store.get(key(1)) == GOOD) == ours
    assert store.put(key(2), META, blob(2)) == ours
    assert store.get(key(2)) == Entry(META, blob(2)), "from memory, if need be"
    assert store.compile_once(key(3), lambda: (META, blob(3))) == Entry(META, blob(3))
    assert len(lines(caplog)) == (not ours)
    assert ours or sorted(os.listdir(path)) == before


# --- one file


@pytest.mark.parametrize("bits", [0o600, 0o400, 0o644, 0o660, 0o606, 0o666])
@pytest.mark.parametrize("owner", ["self", "other"])
def test_a_file_that_others_can_write_is_not_read(path, caplog, owner, bits):
    store = Store(path)
    store.put(key(1), META, GOOD.blob)
    file_of(path).chmod(bits)
    if owner == "other":
        give_away(file_of(path))
    ours = owner == "self" and not bits & 0o022
    assert (store.get(key(1)) == GOOD) == ours
    assert len(lines(caplog)) == (not ours)
    assert store.put(key(1), META, GOOD.blob), "another file takes its name"
    assert store.get(key(1)) == GOOD


def plant(kind, at, target):
    """Something that is no entry of ours, under the name of one; `target` must stay as it is."""
    if kind == "symlink":
        at.symlink_to(target)
    elif kind == "dangling":
        at.symlink_to(target.with_name("nowhere"))
    elif kind == "hard link":
        os.link(target, at)
    elif kind == "fifo":
        os.mkfifo(at)
    elif kind == "socket":
        bound = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(at.parent)  # the names of sockets are short
        bound.bind("s")
        os.rename("s", at.name)
        os.chdir(here)
        bound.close()
    elif kind == "device":
        try:
            os.mknod(at, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("only root can make a device")
    elif kind == "folder":
        (at / "sub").mkdir(parents=True)
    elif kind == "empty":
        at.touch(0o600)
    else:
        with at.open("wb") as file:
            file.truncate(4 << 30)


KINDS = (
    "symlink",
    "dangling",
    "hard link",
    "fifo",
    "socket",
    "device",
    "folder",
    "empty",
    "4 GiB",
)


@pytest.fixture
def target(tmp_path):
    """A whole entry of the user's elsewhere: it would be served if it were followed."""
    Store(tmp_path / "elsewhere").put(key(1), META, GOOD.blob)
    file = file_of(tmp_path / "elsewhere")
    os.utime(file, (1e9, 1e9))
    return file


def identity(file):
    found = file.stat()
    return file.read_bytes(), found.st_mtime_ns, found.st_mode, found.st_size


@pytest.fixture
def quick():
    """Nobody was waited for, nor four gigabytes read, which costs a processor seconds."""
    begun, worked = time.monotonic(), time.process_time()
    yield
    assert time.process_time() - worked < 1
    assert time.monotonic() - begun < lock.PATIENCE, "however slow the disk is"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_under_an_entrys_name_is_not_followed(path, target, kind):
    store, before = Store(path), identity(target)
    plant(kind, file_of(path), target)
    assert store.get(key(1)) is None
    assert list(store.keys()) == []
    kept = store.put(key(1), META, GOOD.blob)
    assert kept == (kind != "folder")
    assert store.get(key(1)) == GOOD
    assert identity(target) == before
    assert not target.with_name("nowhere").exists()
    assert not list(path.glob("*.tmp"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_under_a_temporary_name_is_not_followed(path, target, kind, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)
    before = identity(target)
    plant(kind, path / f".{file_of(path).name}.{'0' * 16}.tmp", target)
    store = Store(path)
    reaped = kind == "hard link"  # as the file it links to is old
    assert store.put(key(1), META, GOOD.blob) == reaped
    assert store.get(key(1)) == GOOD
    assert identity(target) == before
    store.folder.reap()
    assert identity(target) == before


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_under_a_locks_name_is_not_followed(path, target, kind, monkeypatch):
    monkeypatch.setattr(lock, "PULSE", 0.01)
    store, before = Store(path), identity(target)
    plant(kind, path / f".{key(1).digest}.lock", target)

    def build():
        time.sleep(0.05)  # for signs of life, which write
        return META, GOOD.blob

    assert store.compile_once(key(1), build) == GOOD
    assert identity(target) == before
    assert not target.with_name("nowhere").exists()
    assert Store(path).get(key(1)) == GOOD


def test_descriptors_are_closed_and_not_inherited(path, monkeypatch):
    flags = []
    real = disk.open
    monkeypatch.setattr(disk, "open", lambda p, f, *m: (flags.append((p, f)), real(p, f, *m))[1])
    before = os.listdir("/proc/self/fd")
    store = Store(path)
    store.compile_once(key(1), lambda: (META, GOOD.blob))
    store.get(key(1))
    store.folder.reap()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    for name, flag in flags:
        assert flag & os.O_CLOEXEC, name
        folder = flag & os.O_DIRECTORY
        assert folder or flag & (os.O_NOFOLLOW | os.O_NONBLOCK) == os.O_NOFOLLOW | os.O_NONBLOCK


# --- read-only


@pytest.mark.parametrize("how", ["mode", "mount"])
def test_a_layer_that_cannot_be_written_serves_and_is_not_written(path, tmp_path, how, monkeypatch):
    layer = tmp_path / "layer"
    for number in range(20):
        Store(layer).put(key(number), META, blob(number))
        os.utime(file_of(layer, number), (1e9, 1e9))
    layer.chmod(0o555)
    asked = []

    def refused(name, real):
        def run(*args):
            if layer in (Path(str(args[0])), Path(str(args[0])).parent):
                writes = name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                if writes:
                    asked.append((name, args))
                    raise OSError(30, "Read-only file system")
            return real(*args)

        return run

    for name in ("open", "rename", "unlink"):
        monkeypatch.setattr(disk, name, refused(name, getattr(disk, name)))
    monkeypatch.setattr(disk, "utime", lambda file: asked.append(("utime", file)))
    store = Store(path, layers=[layer])
    for number in range(20):
        built = store.compile_once(key(number), lambda: pytest.fail("it is in the layer"))
        assert built == Entry(META, blob(number))
    store.put(key(1), META, b"other")
    store.folder.reap()
    assert asked == []


def test_a_home_that_cannot_be_written_serves_and_is_said_once(path, caplog):
    Store(path).put(key(1), META, GOOD.blob)
    path.chmod(0o500)
    store = Store(path)
    for number in range(1, 20):
        built = store.compile_once(key(number), lambda n=number: (META, blob(n)))
        assert built == Entry(META, blob(number))
        assert store.get(key(number)) == built
    assert [f.name for f in path.iterdir()] == [file_of(path).name]
    assert len(lines(caplog)) == 1
    assert "has mode 0500: you cannot write it: kernels are kept in memory only" in lines(caplog)[0]


# --- no code out of files


EXPLOIT = """
import os, pickle, sys
from pathlib import Path
from support.cache.cache_keys import blob, key
from ipex_inductor.aot_cache import lock, remote
from ipex_inductor.aot_cache import quota as room
from ipex_inductor.aot_cache.key import nearest
from ipex_inductor.aot_cache.store import Store
import fsspec.implementations.local
path, layer, far, marker = map(Path, sys.argv[1:])
def store():
    return Store(path, layers=[layer], remotes=[f"file://{far}"])
store().get(key(0))  # whatever is imported late is imported now
watched = {"pickle.find_class", "marshal.loads", "exec", "compile", "import", "ctypes.dlopen",
           "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"}
seen = []
sys.addaudithook(lambda event, args: event in watched and seen.append((event, args)))
s = store()
for number in range(3):
    assert s.get(key(number)) is None
assert nearest(key(0), s.keys()) is None
room.sweep(s.folder, 1 << 30)
assert s.compile_once(key(1), lambda: ({}, b"good")).blob == b"good"
assert s.get(key(1)).blob == b"good"
assert not seen, seen
assert not marker.exists()
"""


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("kind", ["pickle", "python"])
def test_nothing_that_is_planted_is_run(tmp_path, kind):
    import pickle

    marker = tmp_path / "it ran"
    code = f"import os; os.system('touch {marker}')"
    payload = pickle.dumps(Hostile(marker)) if kind == "pickle" else code.encode()
    folders = [tmp_path / name for name in ("kernels", "layer", "far")]
    for folder in folders:
        folder.mkdir(mode=0o700)
        for number in range(3):
            digest = key(number).digest
            for name in (f"{digest}.entry", f".{digest}.lock", f".{digest}.entry.0.tmp"):
                (folder / name).write_bytes(payload)
                (folder / name).chmod(0o600)
        for name in ("__init__.py", "sitecustomize.py", "msgspec.py", "key.pkl"):
            (folder / name).write_bytes(payload)
    tests = Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-c", EXPLOIT, *folders, marker],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])},
        cwd=tests,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert not marker.exists()


FORBIDDEN = {
    "pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "ctypes",
    "runpy",
    "yaml",
}


def test_our_sources_cannot_run_what_they_read():
    for file in Path(ipex_inductor.aot_cache.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile", "__import__"}, file
            assert not FORBIDDEN & set(names), file
