"""Every change to a signed bundle, and every bundle of a stranger: refused before an entry is read.

Spies stand where entries are read and unpacked; they see nothing until the good bundle is opened.
"""

import errno
import os
import random
import socket
import stat

import msgspec
import pytest

from ipex_inductor.aot_cache import disk, entry, log_once, signing, survey, trust, use
from ipex_inductor.aot_cache import store as stores
from ipex_inductor.aot_cache.bundle import Bundle, open_bundle
from ipex_inductor.aot_cache.bundling import packing
from ipex_inductor.aot_cache.manifest import HEAD, Head, checksum, read_head
from ipex_inductor.aot_cache.store import Store
from ipex_inductor.errors import ArgumentError, BundleError, OlderBundleError, UntrustedError
from support.cache.cache_keys import blob, key
from support.cache.signed_bundles import META, SERIAL, packed, pair

pytestmark = pytest.mark.reliability

slow = pytest.mark.slow
COUNT = 6


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "ipex"))
    log_once.say.cache_clear()


@pytest.fixture
def mine(tmp_path):
    return pair(tmp_path)


@pytest.fixture
def path(tmp_path, mine):
    return packed(tmp_path / "good", mine, range(COUNT))


class Spy:
    """What was read of entries: calls by name, and the parts of the file that were looked at."""

    def __init__(self, monkeypatch):
        self.seen, self.read, self._patch = [], [], monkeypatch
        for owner, name in (
            (Bundle, "__init__"),
            (Bundle, "load"),
            (entry, "unpack"),
            (entry, "unpack_any"),
            (stores, "unpack"),
            (survey, "unpack_any"),
        ):
            self._watch(owner, name)
        pread = disk.pread
        monkeypatch.setattr(
            disk, "pread", lambda f, n, at: (self.read.append(at), pread(f, n, at))[1]
        )

    def _watch(self, owner, name):
        call = getattr(owner, name)

        def seen(*args, **kwargs):
            self.seen.append(name)
            return call(*args, **kwargs)

        self._patch.setattr(owner, name, seen)


@pytest.fixture
def spy(monkeypatch):
    return Spy(monkeypatch)


def refused(path, spy, kind=BundleError, **allow):
    """Whether it is, with one error of that kind, no entry read and nothing served by a store."""
    with pytest.raises(kind):
        open_bundle(path, **allow)
    return not spy.seen


def served(path, tmp_path, monkeypatch):
    """The kernels that a store serves where the environment names the bundle."""
    monkeypatch.setattr(use, "_used", [])
    monkeypatch.setenv("IPEX_AOT_BUNDLES", str(path))
    use._from_environment.cache_clear()
    store = Store(tmp_path / "store")
    found = [store.get(key(n)) for n in range(COUNT)]
    use._from_environment.cache_clear()
    return [n for n, each in enumerate(found) if each]


def parts(data):
    """Head, entries and manifest of a good bundle."""
    head = read_head(data, len(data))
    text = data[HEAD + head.entries :]
    entries, at = [], HEAD
    for item in msgspec.json.decode(text)["entries"]:
        entries.append(data[at : at + item["size"]])
        at += item["size"]
    return head, entries, text


# --- bytes


def bytes_changed(data, step, rng):
    """Flips of bits, cuts, bytes appended, put in, taken out and moved: no two are the same."""
    for at in range(0, 8 * len(data), step):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        yield bytes(changed)
    for size in range(0, len(data), 5 * step):
        yield data[:size]
    for more in range(1, 65):
        yield data + rng.randbytes(more)
    for _ in range(40_000 // step):
        at, to = rng.randrange(len(data)), rng.randrange(len(data))
        size = rng.randrange(1, 64)
        for changed in (
            data[:at] + rng.randbytes(size) + data[at:],
            data[:at] + data[at + size :],
            data[:at] + data[to : to + size] + data[at + size :],
        ):
            if changed != data:
                yield changed


@pytest.mark.parametrize(
    ("step", "least"),
    [(201, 150), pytest.param(31, 1000, marks=slow), pytest.param(4, 1000, marks=slow)],
)
def test_every_change_of_bytes_is_refused(path, tmp_path, mine, spy, monkeypatch, step, least):
    data, changed_file = path.read_bytes(), tmp_path / "changed"
    end = HEAD + read_head(data, len(data)).entries
    cases, early = 0, 0
    for changed in bytes_changed(data, step, random.Random(step)):
        cases += 1
        changed_file.write_bytes(changed)
        spy.read.clear()
        assert refused(changed_file, spy)
        if changed[:HEAD] != data[:HEAD] or changed[end:] != data[end:]:
            early += 1
            assert not [at for at in spy.read if HEAD <= at < end], "by the signature alone"
        if cases % 10 == 0:
            assert refused(changed_file, spy, allow_unsigned=True, allow_older=True)
            assert served(changed_file, tmp_path, monkeypatch) == []
            assert not spy.seen
    print(f"{cases} changed bundles, all refused, {early} before any byte of an entry was read")
    assert cases >= least
    assert served(path, tmp_path, monkeypatch) == list(range(COUNT))
    assert spy.seen.count("load") == spy.seen.count("unpack") == COUNT, "the spies do see"


@pytest.mark.parametrize("step", [291, pytest.param(31, marks=slow)])
def test_every_accident_shows_where_there_is_no_signature(tmp_path, spy, step):
    """Though whoever means it can make another such bundle."""
    data, file = packed(tmp_path / "unsigned", numbers=range(COUNT)).read_bytes(), tmp_path / "x"
    spy.seen.clear()
    for changed in bytes_changed(data, step, random.Random(step)):
        file.write_bytes(changed)
        assert refused(file, spy, allow_unsigned=True)


# --- what somebody made anew


def joined(entries, manifest, signer=None, public=None, signature=None):
    """A bundle put together by hand, sound but for what it is to show."""
    text = manifest if isinstance(manifest, bytes) else msgspec.json.encode(manifest)
    if signer:
        public = signer.public_key().public_bytes_raw()
    head = Head(len(text), sum(map(len, entries)), public or bytes(32))
    if signer:
        signature = signer.sign(head.first + text)
    return b"".join((head.first, signature or checksum(head.first + text), *entries, text))


def edits(entries, items):
    """Other entries and what the manifest says of them, made as whoever has a right key would."""
    import hashlib

    last = len(items) - 1
    other = entry.pack(key(99).framed, META, blob(99))
    digest = hashlib.sha256(other).hexdigest()
    theirs = items[0] | {"key": key(99).digest, "size": len(other), "sha256": digest}
    for at in range(len(items)):
        without = [*items[:at], *items[at + 1 :]]
        fewer = [*entries[:at], *entries[at + 1 :]]
        yield "removed", fewer, without
        both = sorted(
            zip([*without, theirs], [*fewer, other], strict=True), key=lambda p: p[0]["key"]
        )
        yield "replaced", [e for _, e in both], [i for i, _ in both]
        yield "renamed", entries, [*items[:at], items[at] | {"key": "f" * 64}, *items[at + 1 :]]
    both = sorted(zip([*items, theirs], [*entries, other], strict=True), key=lambda p: p[0]["key"])
    yield "added", [e for _, e in both], [i for i, _ in both]
    yield "twice", [*entries, entries[last]], [*items, items[last]]
    yield "another order", entries[::-1], items[::-1]
    yield "none", [], []


@pytest.mark.parametrize("how", ["old signature", "wrong key", "wrong key, right name", "unsigned"])
def test_other_entries_are_refused_with_the_signature_of_nobody_trusted(
    path, tmp_path, mine, spy, how
):
    """Whatever else fits: the manifest, the sizes and the digests."""
    head, entries, text = parts(path.read_bytes())
    about = msgspec.json.decode(text)
    stranger = signing.private_key(pair(tmp_path, "stranger", trusted=False))
    cases = 0
    for what, changed, items in edits(entries, about["entries"]):
        made = about | {"entries": items}
        if how == "old signature":
            data = joined(changed, made, public=head.public, signature=head.signature)
        elif how == "wrong key":
            data = joined(changed, made, stranger)
        elif how == "unsigned":
            data = joined(changed, made)
        else:
            text = msgspec.json.encode(made)
            first = Head(len(text), sum(map(len, changed)), head.public).first
            data = joined(changed, made, public=head.public, signature=stranger.sign(first + text))
        file = tmp_path / "made"
        file.write_bytes(data)
        kind = BundleError if "signature" in how or "name" in how else UntrustedError
        spy.read.clear()
        assert refused(file, spy, kind), what
        assert all(at < HEAD or at >= HEAD + sum(map(len, changed)) for at in spy.read)
        cases += 1
    assert cases == 3 * COUNT + 4


def strange(items):
    """What even a trusted key may not put into a manifest."""
    first, *rest = items
    for name in ("../" + "a" * 61, "/etc/" + "a" * 59, "A" * 64, "", "a" * 63, "a" * 64 + "\n", 7):
        yield [first | {"key": name}, *rest]
        yield [first | {"sha256": name}, *rest]
    for size in (-1, 0, 57, first["size"] + 1, 1 << 31, 1 << 62, 1 << 80, 1.5, "1", None):
        yield [first | {"size": size}, *rest]
    yield [first | {"path": "../../etc/passwd"}, *rest]
    yield [first | {"toolchain": []}, *rest]
    yield [first, first, *rest]
    yield items[::-1]
    yield items[:-1]
    yield {"a": 1}


def test_a_strange_manifest_is_refused_though_a_trusted_key_signed_it(path, tmp_path, mine, spy):
    _, entries, text = parts(path.read_bytes())
    about, signer = msgspec.json.decode(text), signing.private_key(mine)
    file = tmp_path / "made"
    file.write_bytes(joined(entries, about, signer))
    assert file.read_bytes() == path.read_bytes(), "by hand as by pack"
    made = [about | {"entries": items} for items in strange(about["entries"])]
    made += [about | {"name": n} for n in ("../x", "", "x" * 65, "x\n", None)]
    made += [about | {"serial": s} for s in (-1, 1 << 63, "1", 1.0, None)]
    spelt = [text + b" ", b" " + text, text.replace(b":", b": "), b"\xef\xbb\xbf" + text]
    for manifest in [*made, *spelt, b"", b"null", b"[" * 10_000, about | {"more": 1}]:
        file.write_bytes(joined(entries, manifest, signer))
        spy.read.clear()
        assert refused(file, spy), manifest
        assert refused(file, spy, allow_unsigned=True, allow_older=True), manifest
        assert not [at for at in spy.read if HEAD <= at < HEAD + sum(map(len, entries))]


def test_an_entry_of_another_key_is_never_served_though_a_trusted_key_signed_it(
    path, tmp_path, mine
):
    """A signer's mistake: the manifest names entries by digests of keys that they have not."""
    _, entries, text = parts(path.read_bytes())
    about = msgspec.json.decode(text)
    for item, digest in zip(
        about["entries"], sorted(key(100 + n).digest for n in range(COUNT)), strict=True
    ):
        item["key"] = digest
    file = tmp_path / "made"
    file.write_bytes(joined(entries, about, signing.private_key(mine)))
    store = Store(tmp_path / "store", bundles=[open_bundle(file)])
    assert [store.get(key(100 + n)) for n in range(COUNT)] == [None] * COUNT
    assert store.counts()["corrupt", f"bundle {file}"] == COUNT


@pytest.mark.parametrize(
    "public", [bytes(32), b"\1" + bytes(31), b"\xff" * 32, bytes(31) + b"\x80"]
)
def test_keys_that_verify_anything_are_not_trusted(path, tmp_path, spy, public):
    """Points of small order, for which zeros are a signature of many messages."""
    _, entries, text = parts(path.read_bytes())
    for signature in (bytes(64), b"\1" + bytes(63)):
        file = tmp_path / "made"
        file.write_bytes(joined(entries, text, public=public, signature=signature))
        assert refused(file, spy)


def test_older_bundles_are_refused(tmp_path, mine, spy):
    """A thief's replay: each was good in its time."""
    files = [packed(tmp_path / str(n), mine, [n], serial=SERIAL + n) for n in range(40)]
    open_bundle(files[-1])
    spy.seen.clear()
    for file in files[:-1]:
        assert refused(file, spy, OlderBundleError)
        assert refused(file, spy, OlderBundleError, allow_unsigned=True)


def test_a_key_that_is_trusted_no_longer_opens_nothing(path, mine, spy):
    trust.remove("me")
    assert refused(path, spy, UntrustedError)


# --- what is no file, or a strange one


def plant(kind, at, good):
    if kind == "link":
        at.symlink_to(good)
    elif kind == "dangling":
        at.symlink_to(good.with_name("nowhere"))
    elif kind == "fifo":
        os.mkfifo(at)
    elif kind == "socket":
        bound = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(at.parent)
        bound.bind(at.name)
        os.chdir(here)
        bound.close()
    elif kind == "device":
        try:
            os.mknod(at, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("only root can make a device")
    elif kind == "folder":
        at.mkdir()
    elif kind == "empty":
        at.touch()
    elif kind == "1 TiB":
        with at.open("wb") as file:
            file.write(good.read_bytes())
            file.truncate(1 << 40)
    elif kind == "1 TiB, as it says":
        with at.open("wb") as file:
            file.write(Head(1 << 26, (1 << 40) - HEAD - (1 << 26), b"x" * 32).first)
            file.truncate(1 << 40)
    elif kind == "manifest of 4 GiB":
        with at.open("wb") as file:
            file.write(Head((1 << 32) - 1, 0).first)
            file.truncate(HEAD + (1 << 32) - 1)


KINDS = (
    *("missing", "link", "dangling", "fifo", "socket", "device", "folder", "empty"),
    *("1 TiB", "1 TiB, as it says", "manifest of 4 GiB"),
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_bundle_is_refused(path, tmp_path, spy, kind, monkeypatch):
    at = tmp_path / "planted"
    plant(kind, at, path)
    spy.read.clear()
    assert refused(at, spy)
    assert refused(at, spy, allow_unsigned=True, allow_older=True)
    assert served(at, tmp_path, monkeypatch) == []
    entries = read_head(path.read_bytes(), path.stat().st_size).entries
    assert not [at for at in spy.read if HEAD <= at < HEAD + entries]


@pytest.mark.sampled("5", "24", "116")
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE, errno.EROFS])
def test_any_system_call_may_fail_while_it_is_opened(tmp_path, mine, monkeypatch, code):
    """The k-th, for every k: a typed error, or the bundle whole; nothing stays open."""
    names = [name for name in disk.__all__ if name not in ("close", "time")]
    outcomes = []
    for kth in range(1, 100):
        path = packed(tmp_path / f"{kth}", mine, [1], serial=kth)
        calls = 0

        def failing(real, kth=kth):
            def run(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == kth:
                    raise OSError(code, os.strerror(code))
                return real(*args, **kwargs)

            return run

        before = os.listdir("/proc/self/fd")
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(disk, name, failing(getattr(disk, name)))
            try:
                outcomes.append(len(open_bundle(path).manifest.entries))
            except BundleError:
                outcomes.append(0)
        assert len(os.listdir("/proc/self/fd")) == len(before)
        if calls < kth:
            break
    assert outcomes[-1] == 1
    assert set(outcomes) == {0, 1}
    assert len(outcomes) > 10


def test_a_signer_that_goes_while_it_packs_leaves_no_bundle(path, tmp_path, mine, monkeypatch):
    """Nor one that is taken for whole, at any of its system calls."""
    calls = ("open", "fsync", "rename")
    for name in calls:
        real = getattr(disk, name)

        def fail(*args, real=real):
            if "made" in str(args[0]) or isinstance(args[0], int):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(disk, name, fail)
            folder = Store(tmp_path / "entries of good", bundles=()).folder
            with pytest.raises(ArgumentError, match="No space left"):
                packing.pack(folder, tmp_path / "made", "x", key=mine)
        assert not [f for f in os.listdir(tmp_path) if "made" in f]
