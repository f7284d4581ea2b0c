"""A remote tier in S3: a server of moto's, behind a wire that cuts, delays and changes."""

import itertools
import os

import pytest

from ipex_inductor.aot_cache import log_once, remote
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.remote import Remote
from ipex_inductor.aot_cache.store import Store
from support.cache.cache_keys import blob, key
from support.cache.remote_servers import FAULTS, META, TIMEOUT, Server, Wire, built

pytestmark = pytest.mark.reliability

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

NUMBERS = itertools.count()
KEYS = {"key": "testing", "secret": "testing"}


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch):
    log_once.say.cache_clear()
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)


def lines(caplog):
    return [r.message for r in caplog.records if r.name == "ipex_inductor"]


# --- the server, and the wire to it


def start():
    return Server("-m", "moto.server", "-H", "127.0.0.1", "-p")


@pytest.fixture(scope="module")
def server():
    started = start()
    yield started
    started.kill()


@pytest.fixture
def wire(server):
    made = Wire(server.port)
    yield made
    made.close()


def options(port):
    return {**KEYS, "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}}


@pytest.fixture
def bucket(server):
    """A file system to look into a new bucket, whose name is `root`."""
    import s3fs

    files = s3fs.S3FileSystem(**options(server.port))
    files.root = f"bucket-{next(NUMBERS)}"
    files.mkdir(files.root)
    return files


def far(bucket, port, **more):
    return Remote(f"s3://{bucket.root}/kernels", **more, **options(port))


def name_of(number):
    return f"{key(number).digest}.entry"


def put(bucket, number, data):
    bucket.pipe_file(f"{bucket.root}/kernels/{name_of(number)}", data)


def packed(tmp_path, number, size=1024):
    store = Store(tmp_path / "made", bundles=())
    store.put(key(number), META, blob(number, size))
    return (tmp_path / "made" / name_of(number)).read_bytes()


# --- as it should be


def test_entries_go_there_and_come_from_there(server, bucket, tmp_path):
    one = Store(tmp_path / "one", remotes=[far(bucket, server.port, write_back=True)])
    for number in range(3):
        assert one.put(key(number), META, blob(number))
    files = sorted(bucket.ls(f"{bucket.root}/kernels", detail=False))
    assert files == sorted(f"{bucket.root}/kernels/{name_of(n)}" for n in range(3))
    assert bucket.cat_file(files[0]) == (tmp_path / "one" / files[0].split("/")[-1]).read_bytes()
    two = Store(tmp_path / "two", remotes=[far(bucket, server.port)])
    assert two.get(key(3)) is None
    assert [two.get(key(n)) for n in range(3)] == [Entry(META, blob(n)) for n in range(3)]
    assert two.counts()["hits", f"s3://{bucket.root}/kernels"] == 3
    assert len(list((tmp_path / "two").iterdir())) == 3, "and are kept"
    two.put(key(3), META, blob(3))
    assert not bucket.exists(f"{bucket.root}/kernels/{name_of(3)}"), "nobody asked for that"


def test_how_often_the_server_is_asked(bucket, wire, tmp_path):
    """For a miss: the object, and whether it is a folder; for a hit: its size, by s3fs too, it."""
    put(bucket, 1, packed(tmp_path, 1))
    store = Store(tmp_path / "one", remotes=[far(bucket, wire.port)])
    assert store.get(key(2)) is None
    assert wire.answers == 2
    assert store.get(key(1)) == Entry(META, blob(1))
    assert wire.answers <= 5


def test_an_entry_of_many_megabytes(server, bucket, tmp_path):
    far_one = far(bucket, server.port, write_back=True)
    Store(tmp_path / "one", remotes=[far_one]).put(key(1), META, blob(1, 20 << 20))
    assert Store(tmp_path / "two", remotes=[far_one]).get(key(1)).blob == blob(1, 20 << 20)


def test_where_there_is_no_bucket_there_is_no_entry(server, tmp_path, caplog):
    store = Store(tmp_path / "one", remotes=[Remote("s3://nosuch/kernels", **options(server.port))])
    assert store.get(key(1)) is None
    assert lines(caplog) == []


# --- wrong objects


def test_wrong_objects_are_not_served_and_the_remote_lives(server, bucket, tmp_path, caplog):
    good = packed(tmp_path, 1)
    changed = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), 60)]
    cut = [good[:size] for size in range(0, len(good), 90)]
    wrong = [*changed, *cut, good + b"\0", packed(tmp_path, 2), b"<Error/>"]
    for data in wrong:
        put(bucket, 1, data)
        store = Store(tmp_path / "one", remotes=[far(bucket, server.port)])
        assert store.get(key(1)) is None
        assert store.counts()["corrupt", f"s3://{bucket.root}/kernels"] == 1
        assert not (tmp_path / "one" / name_of(1)).exists()
    put(bucket, 1, good)
    assert store.get(key(1)) == Entry(META, blob(1)), "asked again"
    assert not [line for line in lines(caplog) if "is not asked again" in line]
    print(f"{len(wrong)} wrong objects, none served")
    assert len(wrong) >= 50


def test_what_is_too_large_is_not_fetched(server, bucket, wire, tmp_path, monkeypatch, caplog):
    put(bucket, 1, packed(tmp_path, 1, size=1 << 20))
    monkeypatch.setattr(remote, "LIMIT", 1 << 20)
    came = []
    wire.fault = lambda data: came.append(len(data)) or data
    store = Store(tmp_path / "one", remotes=[far(bucket, wire.port)])
    assert store.get(key(1)) is None
    assert sum(came) < 10_000
    assert "is not fetched: " in lines(caplog)[0]
    put(bucket, 2, packed(tmp_path, 2))
    assert store.get(key(2)) == Entry(META, blob(2)), "the remote lives"


# --- a network that fails


# Each waits for a timeout. After any of them nothing is written back: one stands for all. What is
# unavailable is told of as in test_remote_gs.py.
WAYS = [
    pytest.param(fault, back, marks=[pytest.mark.slow] * rare)
    for fault in FAULTS
    for back in (False, True)
    for rare in [fault == "unavailable" or (back and fault != "late")]
]


@pytest.mark.sampled("late-True", "garbage-False")
@pytest.mark.parametrize(("fault", "write_back"), WAYS)
def test_a_network_that_fails_costs_one_timeout(bucket, wire, tmp_path, caplog, fault, write_back):
    for number in range(20):
        put(bucket, number, packed(tmp_path, number))
    wire.fault = FAULTS[fault]
    remote = far(bucket, wire.port, timeout=TIMEOUT, write_back=write_back)
    waited = built(Store(tmp_path / "one", remotes=[remote]))
    print(f"{fault}: waited {waited:.1f} s for 20 kernels")
    assert waited < 2 * TIMEOUT
    assert len(lines(caplog)) == 1
    assert "is not asked again by this process: " in lines(caplog)[0]


def test_what_is_changed_on_the_wire_is_not_served(bucket, wire, tmp_path):
    """Whether S3's own checksum sees it or ours."""
    put(bucket, 1, packed(tmp_path, 1))
    wire.fault = lambda data: data.replace(b"\x89ipexk", b"\x89ipeyk")
    remote = far(bucket, wire.port, timeout=TIMEOUT)
    store = Store(tmp_path / "one", remotes=[remote])
    assert store.get(key(1)) is None
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "in the middle"])
def test_a_server_that_dies_costs_one_timeout(tmp_path, caplog, when):
    import s3fs

    server = start()
    try:
        wire = Wire(server.port)
        bucket = s3fs.S3FileSystem(**options(server.port))
        bucket.root = f"dies-{when.replace(' ', '-')}"
        bucket.mkdir(bucket.root)
        for number in range(20):
            put(bucket, number, packed(tmp_path, number, size=1 << 20))
        store = Store(tmp_path / "one", remotes=[far(bucket, wire.port, timeout=TIMEOUT)])
        if when == "before":
            server.kill()
        else:
            assert store.get(key(0)) == Entry(META, blob(0, 1 << 20))
            seen = []

            def kill_at_the_third(data):
                seen.append(b"\x89ipexk" in data)
                if sum(seen) == 3:
                    server.kill()
                    return data[:100] if seen[-1] else None
                return data

            wire.fault = kill_at_the_third
        assert built(store, 1 << 20) < 2 * TIMEOUT
        hits = store.counts().get(("hits", store.remotes[0].label), 0)
        assert hits == (0 if when == "before" else 3)
        assert len(lines(caplog)) == 1
    finally:
        server.kill()
