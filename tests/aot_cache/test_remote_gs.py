"""A remote tier in Google Cloud Storage: an emulator of it, behind a wire that cuts and changes."""

import itertools
import os
from pathlib import Path

import pytest

from ipex_inductor.aot_cache import log_once
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.remote import Remote
from ipex_inductor.aot_cache.store import Store
from support.cache.cache_keys import blob, key
from support.cache.remote_servers import FAULTS, META, TIMEOUT, Server, Wire, built

pytestmark = pytest.mark.reliability

# Read once: it would ask what kind of bucket this is by a protocol that the emulator has not.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
pytest.importorskip("gcsfs")
pytest.importorskip("gcp_storage_emulator")

NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def _unsaid():
    log_once.say.cache_clear()


def lines(caplog):
    return [r.message for r in caplog.records if r.name == "ipex_inductor"]


@pytest.fixture(scope="module")
def server():
    gcs_emulator = str(Path(__file__).parents[1] / "support" / "cache" / "gcs_emulator.py")
    at = ("--host", "127.0.0.1", "--in-memory", "--port")
    started = Server(gcs_emulator, "start", *at)
    yield started
    started.kill()


@pytest.fixture
def wire(server):
    made = Wire(server.port)
    yield made
    made.close()


def options(port):
    return {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon"}


@pytest.fixture
def bucket(server):
    """A file system to look into a new bucket, whose name is `root`."""
    import gcsfs

    files = gcsfs.GCSFileSystem(project="tests", **options(server.port))
    files.root = f"bucket-{next(NUMBERS)}"
    files.mkdir(files.root)
    return files


def far(bucket, port, **more):
    return Remote(f"gs://{bucket.root}/kernels", **more, **options(port))


def name_of(number):
    return f"{key(number).digest}.entry"


def put(bucket, number, data):
    bucket.pipe_file(f"{bucket.root}/kernels/{name_of(number)}", data)


def packed(tmp_path, number):
    Store(tmp_path / "made", bundles=()).put(key(number), META, blob(number))
    return (tmp_path / "made" / name_of(number)).read_bytes()


def test_entries_go_there_and_come_from_there(server, bucket, tmp_path):
    one = Store(tmp_path / "one", remotes=[far(bucket, server.port, write_back=True)])
    for number in range(3):
        assert one.put(key(number), META, blob(number))
    bucket.invalidate_cache()
    files = sorted(bucket.ls(f"{bucket.root}/kernels", detail=False))
    assert files == sorted(f"{bucket.root}/kernels/{name_of(n)}" for n in range(3))
    two = Store(tmp_path / "two", remotes=[far(bucket, server.port)])
    assert two.get(key(3)) is None
    assert [two.get(key(n)) for n in range(3)] == [Entry(META, blob(n)) for n in range(3)]
    assert two.counts()["hits", f"gs://{bucket.root}/kernels"] == 3
    assert len(list((tmp_path / "two").iterdir())) == 3, "and are kept"


def test_an_entry_of_many_megabytes(server, bucket, tmp_path):
    there = far(bucket, server.port, write_back=True)
    Store(tmp_path / "one", remotes=[there]).put(key(1), META, blob(1, 20 << 20))
    assert Store(tmp_path / "two", remotes=[there]).get(key(1)).blob == blob(1, 20 << 20)


def test_where_there_is_no_bucket_there_is_no_entry(server, tmp_path, caplog):
    store = Store(tmp_path / "one", remotes=[Remote("gs://nosuch/kernels", **options(server.port))])
    assert store.get(key(1)) is None
    assert lines(caplog) == []


def test_wrong_objects_are_not_served_and_the_remote_lives(server, bucket, tmp_path):
    good = packed(tmp_path, 1)
    wrong = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), 90)]
    wrong += [*(good[:size] for size in range(1, len(good), 90)), good + b"\0", packed(tmp_path, 2)]
    remote = far(bucket, server.port)
    for data in wrong:
        put(bucket, 1, data)
        store = Store(tmp_path / "one", remotes=[remote])
        assert store.get(key(1)) is None
        assert store.counts()["corrupt", remote.label] == 1
    put(bucket, 1, good)
    assert store.get(key(1)) == Entry(META, blob(1)), "asked again"
    assert len(wrong) >= 30


# The faults are those of test_remote_s3.py, and what meets them is the same for both: quickly, two.
SOME = [
    pytest.param(fault, marks=[pytest.mark.slow] * (fault not in ("cut", "unavailable")))
    for fault in FAULTS
]


@pytest.mark.parametrize("fault", SOME)
def test_a_network_that_fails_costs_one_timeout(bucket, wire, tmp_path, caplog, fault):
    for number in range(20):
        put(bucket, number, packed(tmp_path, number))
    wire.fault = FAULTS[fault]
    waited = built(Store(tmp_path / "one", remotes=[far(bucket, wire.port, timeout=TIMEOUT)]))
    assert waited < 2 * TIMEOUT
    assert len(lines(caplog)) == 1
    assert "is not asked again by this process: " in lines(caplog)[0]
