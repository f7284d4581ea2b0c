"""The store by its face: what goes in comes out, or is a miss; tiers, counters, one builder."""

import os
import signal
import threading

import pytest

from ipex_inductor.aot_cache import disk, log_once
from ipex_inductor.aot_cache import folder as folders
from ipex_inductor.aot_cache import store as stores
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.key import nearest
from ipex_inductor.aot_cache.remote import Remote
from ipex_inductor.aot_cache.store import Store, default_folder
from support.cache.cache_keys import blob, key

pytestmark = pytest.mark.unit

META = {"shared": 49152, "warps": 4, "name": "matmul", "nested": {"grid": [1, 2]}}


@pytest.fixture(autouse=True)
def _unsaid():
    log_once.say.cache_clear()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "kernels"


@pytest.fixture
def store(path):
    return Store(path)


def file_of(path, number):
    return path / f"{key(number).digest}.entry"


def lines(caplog):
    return [r.message for r in caplog.records if r.name == "ipex_inductor"]


def test_what_was_put_comes_back(store, path):
    assert store.get(key(1)) is None
    assert store.put(key(1), META, blob(1))
    assert store.get(key(1)) == Entry(META, blob(1))
    assert store.get(key(2)) is None
    assert Store(path).get(key(1)) == Entry(META, blob(1))
    assert [f.name for f in path.iterdir()] == [f"{key(1).digest}.entry"]


def test_nothing_is_made_by_looking(store, path):
    assert store.get(key(1)) is None
    assert list(store.keys()) == []
    assert not path.parent.exists()


def test_files_and_folders_are_the_owners_alone(store, path):
    os.umask(old := os.umask(0))
    try:
        os.umask(0)
        store.put(key(1), META, blob(1))
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o700
    assert file_of(path, 1).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("size", [0, 1, 100, 1 << 20, (1 << 21) + 1])
def test_blobs_of_any_size(store, size):
    store.put(key(1), {}, blob(1, size))
    assert store.get(key(1)) == Entry({}, blob(1, size))


@pytest.mark.parametrize(
    "meta", [{"a": float("nan")}, {"a": (1,)}, {1: "a"}, {"a": {1}}, [], {"a": b""}]
)
def test_metadata_is_plain_json(store, meta):
    with pytest.raises(TypeError, match="metadata must be a dict that JSON gives back as it is"):
        store.put(key(1), meta, b"")


def test_the_default_is_in_our_home(monkeypatch, tmp_path):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "ipex"))
    assert default_folder() == tmp_path / "ipex" / "kernels" / "1"
    assert Store().put(key(1), META, b"x")
    assert file_of(default_folder(), 1).exists()


def test_a_corrupt_entry_is_a_miss_said_once_and_replaced(store, path, caplog):
    store.put(key(1), META, blob(1))
    data = bytearray(file_of(path, 1).read_bytes())
    data[-1] ^= 1
    file_of(path, 1).write_bytes(data)
    for _ in range(3):
        assert store.get(key(1)) is None
    assert len(lines(caplog)) == 1
    assert "is not used: it changed after it was written" in lines(caplog)[0]
    assert store.counts()["corrupt", "ours"] == 3
    assert store.compile_once(key(1), lambda: (META, blob(1))) == Entry(META, blob(1))
    assert store.get(key(1)) == Entry(META, blob(1))


def test_counters_say_what_happened(path, tmp_path):
    Store(tmp_path / "layer").put(key(2), META, blob(2))
    store = Store(path, layers=[tmp_path / "layer"])
    store.compile_once(key(1), lambda: (META, blob(1)))
    for number in (1, 2, 3):
        store.get(key(number))
    counts = store.counts()
    layer = f"layer {tmp_path / 'layer'}"
    size = file_of(path, 1).stat().st_size
    assert {k: v for k, v in counts.items() if k[1] != "memory"} == {
        ("misses", ""): 2,
        ("hits", ""): 2,
        ("misses", "ours"): 3,
        ("misses", layer): 2,
        ("hits", "ours"): 1,
        ("hits", layer): 1,
        ("bytes read", "ours"): size,
        ("bytes read", layer): size,
        ("bytes written", "ours"): size,
        ("evicted", "ours"): 0,
        ("reaped", "ours"): 0,
    }


def test_what_build_raises_comes_out_and_the_next_may_build(store):
    with pytest.raises(ZeroDivisionError):
        store.compile_once(key(1), lambda: 1 / 0)
    assert store.compile_once(key(1), lambda: (META, b"x")).blob == b"x"


def test_threads_build_once(store):
    built, found, gate = [], [], threading.Barrier(8)

    def build():
        built.append(1)
        return META, blob(1)

    def run():
        gate.wait()
        found.append(store.compile_once(key(1), build))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]
    assert found == [Entry(META, blob(1))] * 8


@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_a_forked_child_goes_on(store, path, count):
    """Though other threads of the parent were making keys, reading and counting meanwhile."""
    store.put(key(1), META, blob(1))
    stop = threading.Event()

    def read():
        while not stop.is_set():
            store.get(key(1))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(2, 2 + count):
            child = os.fork()
            if not child:
                signal.alarm(20)
                good = store.get(key(1)) and store.put(key(number), META, blob(number))
                os._exit(0 if good else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert store.get(key(number)) == Entry(META, blob(number))
    finally:
        stop.set()


def test_a_child_forked_while_another_thread_counts_does_not_wait_for_it(store):
    store.put(key(1), META, blob(1))
    with stores._counting:
        child = os.fork()
        if not child:
            signal.alarm(10)
            os._exit(0 if store.get(key(1)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_forked_while_another_thread_makes_a_key_makes_its_own(monkeypatch):
    from ipex_inductor.aot_cache import key as keys

    real, inside, go = keys.frame_fields, threading.Event(), threading.Event()

    def slow(fields):
        inside.set()
        go.wait()
        return real(fields)

    monkeypatch.setattr(keys, "frame_fields", slow)
    thread = threading.Thread(target=key, args=(1,))
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        signal.alarm(10)
        keys.frame_fields = real
        os._exit(0 if key(2).digest else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go.set()
    thread.join()


def test_a_folder_that_goes_is_made_again(store, path):
    store.put(key(1), META, blob(1))
    file_of(path, 1).unlink()
    path.rmdir()
    assert store.get(key(1)) is None
    assert store.put(key(2), META, blob(2))
    assert store.get(key(2)) == Entry(META, blob(2))


def test_a_folder_that_is_opened_to_others_is_used_no_longer(store, path, caplog):
    store.put(key(1), META, blob(1))
    path.chmod(0o777)
    assert store.get(key(1)) is None
    assert not store.put(key(2), META, blob(2))
    assert store.get(key(2)) == Entry(META, blob(2)), "from memory"
    assert lines(caplog) == [
        f"kernel cache: {path} has mode 0777: others can write it; chmod 700 it: "
        "kernels are kept in memory only"
    ]


def test_memory_is_bounded():
    from ipex_inductor.aot_cache.memory import Memory

    memory = Memory(limit=100)
    for name in "abcd":
        memory.keep(name, b"x" * 30)
    assert [memory.read(name) is None for name in "abcd"] == [True, False, False, False]
    memory.keep("e", b"x" * 1000)
    assert memory.read("e") is None


def test_use_is_noted_once_an_hour(store, path):
    store.put(key(1), META, blob(1))
    file = file_of(path, 1)
    before = file.stat().st_mtime - 3700
    os.utime(file, (before, before))
    store.get(key(1))
    noted = file.stat().st_mtime
    assert noted > before + 3000
    store.get(key(1))
    assert file.stat().st_mtime == noted


# --- why


def test_heads_have_the_metadata_and_no_code(store, path):
    """Read once a file, however long its code is, and unverified."""
    blob = bytes(5 << 20)
    store.put(key(1), {"graph": "one"}, blob)
    store.put(key(2), {}, b"")
    read = []
    before = disk.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "read", lambda *args: read.append(args[1]) or before(*args))
        found = {each.key["problem"]: each.meta for each in store.heads()}
    assert sorted(found.values()) == [b'{"graph":"one"}', b"{}"]
    assert sum(read) < len(blob)


def test_the_nearest_entry_is_found_by_its_key(store, path):
    store.put(key(7), META, blob(7))
    (path / f"{'0' * 64}.entry").write_bytes(b"no entry")
    _, told = nearest(key(8), store.keys())
    assert told == ("problem: number=8 here, 7 there",)


# --- room


def test_what_was_not_used_for_longest_goes(path):
    store = Store(path, quota=30_000)
    for number in range(12):
        assert store.put(key(number), {}, blob(number, 1000))
        when = 1e9 + number
        os.utime(file_of(path, number), (when, when))
    os.utime(file_of(path, 0))
    for number in range(12, 20):
        store.put(key(number), {}, blob(number, 1000))
    held = {n for n in range(20) if file_of(path, n).exists()}
    assert sum(f.stat().st_size for f in path.iterdir()) <= 30_000
    assert 0 in held
    assert held - {0} == set(range(20 - len(held) + 1, 20))
    assert store.counts()["evicted", "ours"] == 20 - len(held)


def test_what_never_fits_is_kept_in_memory(path, caplog):
    store = Store(path, quota=2000)
    store.put(key(1), {}, b"x")
    assert not store.put(key(2), {}, blob(2, 2000))
    assert store.get(key(2)).blob == blob(2, 2000)
    assert store.get(key(1)).blob == b"x", "and nothing had to go for it"
    assert "do not fit a quota of 2000" in lines(caplog)[0]


@pytest.mark.parametrize("suffix", [".tmp", ".lock"])
def test_only_dead_files_are_reaped(store, path, suffix):
    import fcntl

    store.put(key(1), META, blob(1))
    dead, young, live = (path / f".{n}{suffix}" for n in ("dead", "young", "live"))
    for file in (dead, young, live):
        file.write_bytes(b"")
    for file in (dead, live):
        os.utime(file, (1e9, 1e9))
    with open(live) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert store.folder.reap() == 1
    assert [f.exists() for f in (dead, young, live)] == [False, True, True]


# --- layers


def test_layers_are_read_in_order_and_never_written(path, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    Store(one).put(key(1), {"from": 1}, b"1")
    for number in (1, 2):
        Store(two).put(key(number), {"from": 2}, b"2")
    for file in [*one.iterdir(), *two.iterdir()]:
        os.utime(file, (1e9, 1e9))
        file.chmod(0o444)

    def stats():
        files = [f for layer in (one, two) for f in (layer, *layer.iterdir())]
        return {f: (s.st_mtime_ns, s.st_ctime_ns, s.st_size) for f in files for s in [f.stat()]}

    before = stats()
    store = Store(path, layers=[one, two])
    assert store.get(key(1)).meta == {"from": 1}
    assert store.get(key(2)).meta == {"from": 2}
    assert store.put(key(1), {"from": 0}, b"0")
    assert store.get(key(1)).meta == {"from": 0}
    assert stats() == before


def test_a_layer_that_is_not_there_is_said_once(path, tmp_path, caplog):
    store = Store(path, layers=[tmp_path / "gone"])
    assert [store.get(key(n)) for n in range(3)] == [None] * 3
    assert lines(caplog) == [f"kernel cache: {tmp_path / 'gone'} is not there: not used"]


def test_a_layer_may_be_roots_and_linked(path, tmp_path, monkeypatch):
    layer = tmp_path / "layer"
    Store(layer).put(key(1), META, blob(1))
    os.link(file_of(layer, 1), tmp_path / "other name")
    monkeypatch.setattr(folders.os, "geteuid", lambda: 0)
    assert Store(path, layers=[layer]).get(key(1)) == Entry(META, blob(1))


# --- remotes


def test_remotes_are_read_through(path, tmp_path):
    Store(tmp_path / "far").put(key(1), META, blob(1))
    store = Store(path, remotes=[f"file://{tmp_path / 'far'}"])
    assert store.get(key(1)) == Entry(META, blob(1))
    assert file_of(path, 1).exists()
    assert store.get(key(2)) is None
    store.put(key(2), META, blob(2))
    assert not file_of(tmp_path / "far", 2).exists()
    assert store.counts()["hits", f"file://{tmp_path / 'far'}"] == 1


def test_remotes_are_written_where_asked(path, tmp_path):
    far = Remote(f"file://{tmp_path / 'far' / 'deep'}", write_back=True)
    Store(path, remotes=[far]).put(key(1), META, blob(1))
    assert file_of(tmp_path / "far" / "deep", 1).exists()
    assert Store(path.with_name("other"), remotes=[far]).get(key(1)) == Entry(META, blob(1))


def test_what_a_remote_sends_is_verified(path, tmp_path, caplog):
    far = tmp_path / "far"
    Store(far).put(key(2), META, blob(2))
    file_of(far, 2).rename(file_of(far, 1))
    store = Store(path, remotes=[f"file://{far}"])
    assert store.get(key(1)) is None
    assert "it holds another key" in lines(caplog)[0]
    assert not file_of(path, 1).exists()


def test_a_forked_child_opens_the_remote_anew(path, tmp_path, monkeypatch):
    """What fsspec made before the fork refuses to work after it, where it talks to a network."""
    import fsspec.core

    opened, real = [], fsspec.core.url_to_fs
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda u: (opened.append(os.getpid()), real(u))[1])
    Store(tmp_path / "far").put(key(1), META, blob(1))
    store = Store(path, remotes=[f"file://{tmp_path / 'far'}"])
    for _ in range(2):
        assert store.get(key(2)) is None
    assert opened == [os.getpid()]
    child = os.fork()
    if not child:
        good = store.get(key(1)) and opened == [os.getppid(), os.getpid()]
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", ["slow", "broken", "unknown"])
def test_a_dead_remote_costs_one_timeout(path, caplog, monkeypatch, kind):
    import time

    remote = Remote({"unknown": "nosuch://x"}.get(kind, "memory://x"), True, timeout=0.3)
    asked = []

    def fetched(name):
        asked.append(name)
        if kind == "broken":
            raise RuntimeError("503 Slow Down")
        time.sleep(30)

    if kind != "unknown":
        monkeypatch.setattr(remote, "_fetch", fetched)
    begun = time.monotonic()
    store = Store(path, remotes=[remote])
    for number in range(20):
        assert store.compile_once(key(number), lambda n=number: (META, blob(n))).blob == blob(
            number
        )
    assert time.monotonic() - begun < 20 * 0.3
    assert len(asked) <= 1
    assert len(lines(caplog)) == 1
    assert "is not asked again by this process: " in lines(caplog)[0]


def test_what_is_found_says_where_it_was(path, tmp_path):
    """In our folder, a layer, a remote, memory; bundles in `test_bundle.py`."""
    layer, far = tmp_path / "layer", tmp_path / "far"
    for number, folder in ((1, layer), (2, far)):
        assert Store(folder).put(key(number), META, blob(number))
    url = f"file://{far}"
    store = Store(path, layers=[layer], remotes=[url])
    assert store.put(key(0), META, blob(0))
    origins = [store.find(key(number))[1] for number in range(3)]
    assert origins == [str(path), f"the layer {layer}", f"the remote {url}"]
    assert store.find(key(2))[1] == str(path)  # kept since
    assert store.find(key(3)) is None
    path.chmod(0o777)
    full = Store(path)
    assert not full.put(key(4), META, blob(4))
    assert full.find(key(4))[1] == "memory"
