"""Bundles: packed, signed, opened, used by a store; keys, trust, and what is older."""

import hashlib
import importlib.util
import os
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ipex_inductor
from ipex_inductor.aot_cache import disk, log_once, manifest, signing, trust, use
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.bundling import packing
from ipex_inductor.aot_cache.bundling.merging import Merged, merge
from ipex_inductor.aot_cache.entry import CorruptError, Entry
from ipex_inductor.aot_cache.key import Key, nearest
from ipex_inductor.aot_cache.store import Store
from ipex_inductor.errors import (
    ArgumentError,
    BundleError,
    KeyFileError,
    MissingPackageError,
    OlderBundleError,
    UntrustedError,
)
from support.cache.cache_keys import KEY, blob, key
from support.cache.signed_bundles import META, SERIAL, filled, literal, packed, pair

pytestmark = pytest.mark.unit

FOREIGN = 65534


@pytest.fixture(autouse=True)
def trust_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "ipex"))
    monkeypatch.delenv("IPEX_AOT_BUNDLES", raising=False)
    monkeypatch.setattr(use, "_used", [])
    use._from_environment.cache_clear()
    log_once.say.cache_clear()
    yield tmp_path / "ipex" / "trust"
    use._from_environment.cache_clear()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kernels.bundle"


@pytest.fixture
def mine(tmp_path):
    return pair(tmp_path)


def lines(caplog):
    return [r.message for r in caplog.records if r.name == "ipex_inductor"]


def entry(number):
    return Entry(META | {"n": number}, blob(number))


# --- what is in it


def test_the_bytes_are_as_the_docstring_says(path, mine):
    packed(path, mine)
    data = path.read_bytes()
    folder = path.with_name(f"entries of {path.name}")
    entries = [file.read_bytes() for file in sorted(folder.iterdir())]
    magic, version, length, held, public = struct.unpack_from(">8sHIQ32s", data)
    assert (magic, version, held) == (b"\x89ipexb\r\n", 1, sum(map(len, entries)))
    assert data[118 : 118 + held] == b"".join(entries)
    text = data[118 + held :]
    assert len(text) == length
    assert signing.is_signed(data[:54] + text, public, data[54:118])
    found = msgspec.json.decode(text)
    assert list(found) == ["name", "serial", "provenance", "entries"]
    assert (found["name"], found["serial"]) == ("kernels", SERIAL)
    assert found["provenance"].keys() == {"ipex_inductor", "python"}
    numbers = {key(n).digest: n for n in range(5)}
    assert [e["key"] for e in found["entries"]] == sorted(numbers)
    assert found["entries"][0] == {
        "key": min(numbers),
        "size": len(entries[0]),
        "sha256": hashlib.sha256(entries[0]).hexdigest(),
        "kind": "cubin",
        "architecture": "sm_90:NVIDIA-H100",
        "toolchain": {"flags": "-O3", "ptxas": "12.8", "torch": "2.13.0+cu130", "triton": "3.6.0"},
        "source": "0" * 64,
    }


def test_the_same_entries_are_the_same_bytes(tmp_path, mine):
    one = packed(tmp_path / "one", mine, numbers=range(5))
    two = packed(tmp_path / "two", mine, numbers=(4, 2, 3, 0, 1))
    assert one.read_bytes() == two.read_bytes()


def test_some_entries_are_packed_and_bad_ones_never(path, tmp_path):
    folder = filled(tmp_path / "some")
    names = {n: f"{key(n).digest}.entry" for n in range(5)}
    flipped, cut, swapped = (folder.path / names[n] for n in (0, 1, 2))
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
    cut.write_bytes(b"cut")
    (folder.path / names[3]).rename(swapped)
    done = packing.pack(folder, path, "some", lambda k: k["problem"] != (("number", 5),))
    assert [item.key for item in done.manifest.entries] == [key(4).digest]
    assert done.refused == {
        names[0]: "it changed after it was written: the digest is another",
        names[1]: "it is cut off",
        names[2]: "its name is that of another key",
    }
    assert path.stat().st_mode & 0o777 == 0o644 & ~_umask()


def _umask():
    os.umask(now := os.umask(0))
    return now


def test_what_cannot_be_packed_leaves_nothing_behind(path, tmp_path, mine):
    folder = filled(tmp_path / "some")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ArgumentError, match="expected an entry to pack; got none"):
        packing.pack(folder, path, "some", lambda key: False, mine)
    with pytest.raises(ArgumentError, match=r"a name of up to 64 letters.*'\.\./some'"):
        packing.pack(folder, path, "../some")
    with pytest.raises(KeyFileError, match=r"a key's file; got .*nobody: No such file"):
        packing.pack(folder, path, "some", key=tmp_path / "nobody")
    with pytest.raises(ArgumentError, match="a file that can be written"):
        packing.pack(folder, tmp_path / "no" / "folder", "some")
    assert sorted(os.listdir(tmp_path)) == before
    path.write_bytes(b"mine")
    with pytest.raises(ArgumentError, match="a file to write that is not there yet"):
        packing.pack(folder, path, "some")
    assert path.read_bytes() == b"mine"


def test_keys_with_any_text_are_packed(path, tmp_path):
    strange = Key(**KEY.fields | {"kind": "\x1b[31m", "torch": "\ud800", "toolkit": (("a", b"b"),)})
    store = Store(tmp_path / "some", bundles=())
    store.put(strange, {}, b"x")
    packing.pack(store.folder, path, "some")
    bundle = open_bundle(path, allow_unsigned=True)
    assert bundle.manifest.entries[0].toolchain == {"a": "b'b'", "torch": "?", "triton": "3.6.0"}
    assert Store(tmp_path / "other", bundles=[bundle]).get(strange) == Entry({}, b"x")


texts = st.text(st.characters(exclude_categories=["Cs"]))
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
items = st.builds(
    manifest.Item,
    key=digests,
    size=st.integers(58, 1 << 30),
    sha256=digests,
    kind=texts,
    architecture=texts,
    toolchain=st.dictionaries(texts, texts),
    source=texts,
)
manifests = st.builds(
    manifest.Manifest,
    name=st.from_regex(rf"\A{manifest.NAME}\Z"),
    serial=st.integers(0, (1 << 63) - 1),
    provenance=st.dictionaries(texts, texts),
    entries=st.lists(items, unique_by=lambda i: i.key).map(
        lambda found: tuple(sorted(found, key=lambda i: i.key))
    ),
)


@given(manifests)
def test_a_manifest_comes_back(made):
    text = manifest.write_manifest(made)
    assert manifest.read_manifest(text, manifest.Head(len(text), made.size)) == made


ITEM = {
    "key": "a" * 64,
    "size": 100,
    "sha256": "b" * 64,
    "kind": "",
    "architecture": "",
    "toolchain": {},
    "source": "",
}
MANIFEST = {"name": "x", "serial": 1, "provenance": {}, "entries": [ITEM]}


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x"},
        {"name": "x\n"},
        {"serial": -1},
        {"serial": 1 << 63},
        {"serial": 1.0},
        {"more": 1},
        {"entries": [ITEM, ITEM]},
        {"entries": [ITEM | {"key": "b" * 64, "size": 58}, ITEM | {"size": 58}]},
        {"entries": [ITEM | {"size": 99}]},
        {"entries": [ITEM | {"size": -100}]},
        {"entries": [ITEM | {"size": (1 << 30) + 1}]},
        {"entries": [ITEM | {"key": "A" * 64}]},
        {"entries": [ITEM | {"key": "../" + "a" * 61}]},
        {"entries": [ITEM | {"key": "a" * 64 + "\n"}]},
        {"entries": [ITEM | {"path": "/etc"}]},
    ],
    ids=str,
)
def test_another_manifest_is_none(change):
    text = msgspec.json.encode(MANIFEST)
    assert manifest.read_manifest(text, manifest.Head(len(text), 100)).name == "x"
    changed = MANIFEST | change
    text, held = msgspec.json.encode(changed), sum(item["size"] for item in changed["entries"])
    held = held if held != 99 else 100
    with pytest.raises(CorruptError):
        manifest.read_manifest(text, manifest.Head(len(text), held))


@pytest.mark.parametrize("text", [b"", b"[]", b"[" * 100_000, b"\xff", b'{"name":"x"}'])
def test_what_is_no_manifest_is_none(text):
    with pytest.raises(CorruptError, match="its manifest is none"):
        manifest.read_manifest(text, manifest.Head(len(text), 0))


def test_a_manifest_has_one_spelling():
    text = msgspec.json.encode(MANIFEST)
    twice = text.replace(b'"serial":1', b'"serial":9,"serial":1')
    for changed in (text + b" ", text.replace(b'"x"', b'"\\u0078"'), twice):
        with pytest.raises(CorruptError, match="its manifest is not as ours are"):
            manifest.read_manifest(changed, manifest.Head(len(changed), 100))


# --- as a tier


def test_a_store_serves_from_it_and_counts(path, tmp_path, mine):
    bundle = open_bundle(packed(path, mine))
    filled(tmp_path / "layer", [1])
    store = Store(tmp_path / "ours", layers=[tmp_path / "layer"], bundles=[bundle])
    assert [store.get(key(n)) for n in (0, 1, 2, 9)] == [entry(0), entry(1), entry(2), None]
    read = sum(i.size for i in bundle.manifest.entries if i.key in (key(0).digest, key(2).digest))
    assert {k: v for k, v in store.counts().items() if k[1] == f"bundle {path}"} == {
        ("hits", f"bundle {path}"): 2,
        ("misses", f"bundle {path}"): 1,
        ("bytes read", f"bundle {path}"): read,
    }
    assert store.counts()["hits", f"layer {tmp_path / 'layer'}"] == 1
    assert store.counts()["hits", ""] == 3
    assert not (tmp_path / "ours").exists(), "it is a layer: nothing is copied"
    store.put(key(0), {"from": "ours"}, b"")
    assert store.get(key(0)).meta == {"from": "ours"}


def test_a_miss_is_explained_by_what_is_in_it(path, tmp_path, mine):
    store = Store(tmp_path / "ours", bundles=[open_bundle(packed(path, mine, numbers=[7]))])
    assert nearest(key(8), store.keys())[1] == ("problem: number=8 here, 7 there",)


def test_a_forked_child_reads_too(path, tmp_path, mine):
    store = Store(tmp_path / "ours", bundles=[open_bundle(packed(path, mine))])
    child = os.fork()
    if not child:
        os._exit(0 if all(store.get(key(n)) == entry(n) for n in range(5)) else 1)
    assert [store.get(key(n)) for n in range(5)] == [entry(n) for n in range(5)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_descriptors_are_closed(path, mine, tmp_path):
    packed(path, mine)
    bad = tmp_path / "bad"
    bad.write_bytes(path.read_bytes()[:-1])
    before = os.listdir("/proc/self/fd")
    bundle = open_bundle(path)
    with pytest.raises(BundleError):
        open_bundle(bad)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del bundle
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("how", ["changed", "cut", "all zeros"])
def test_what_changes_after_it_was_opened_is_not_served(path, tmp_path, mine, caplog, how):
    bundle = open_bundle(packed(path, mine, numbers=[1]))
    with path.open("r+b") as file:
        if how == "changed":  # into another whole entry of the same key
            other = Store(tmp_path / "other", bundles=())
            other.put(key(1), META | {"n": 1}, blob(2))
            file.seek(118)
            file.write((tmp_path / "other" / f"{key(1).digest}.entry").read_bytes())
        elif how == "cut":
            file.truncate(1000)
        else:
            file.write(bytes(bundle.manifest.size + 118))
    store = Store(tmp_path / "ours", bundles=[bundle])
    assert store.get(key(1)) is None
    why = {"cut": "it is cut off"}.get(how, "the bundle changed after it was opened")
    name = f"{key(1).digest}.entry in bundle {path}"
    assert lines(caplog) == [f"kernel cache: {name} is not used: {why}"]


def test_a_replaced_file_does_not_concern_who_has_it_open(path, tmp_path, mine):
    store = Store(tmp_path / "ours", bundles=[open_bundle(packed(path, mine))])
    path.unlink()
    assert store.get(key(1)) == entry(1)


def test_a_disk_that_fails_is_a_miss(path, tmp_path, mine, monkeypatch, caplog):
    store = Store(tmp_path / "ours", bundles=[open_bundle(packed(path, mine))])

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk, "pread", fail)
    assert store.get(key(1)) is None
    assert list(store.keys()) == []
    assert len(lines(caplog)) == 1


# --- who signed it


def test_unsigned_is_refused_unless_allowed(path, tmp_path):
    packed(path)
    came = f"got {path}, which is unsigned. Sign it with `ipex-inductor cache sign`, or allow it"
    with pytest.raises(UntrustedError, match=literal(came)):
        open_bundle(path)
    bundle = open_bundle(path, allow_unsigned=True)
    assert bundle.signer is None
    assert Store(tmp_path / "ours", bundles=[bundle]).get(key(1)) == entry(1)


def test_an_unknown_key_is_refused_unless_allowed(path, tmp_path):
    packed(path, pair(tmp_path, "stranger", trusted=False))
    public = signing.public_key(tmp_path / "stranger.pub")
    came = f"{path}, signed by a key that is not trusted ({public.hex()}). If you know whose"
    with pytest.raises(UntrustedError, match=literal(came)):
        open_bundle(path)
    assert not open_bundle(path, allow_unsigned=True).signer.is_trusted
    trust.add("stranger", public)
    assert open_bundle(path).signer.name == "stranger"
    assert trust.remove("stranger")
    assert not trust.remove("stranger")
    with pytest.raises(UntrustedError, match="a bundle signed by a key that you trust"):
        open_bundle(path)


def test_an_allowed_bundle_must_be_whole_all_the_same(path, tmp_path):
    packed(path, pair(tmp_path, "stranger", trusted=False))
    data = bytearray(path.read_bytes())
    for at in (60, 200, len(data) - 1):
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(BundleError, match="a whole bundle, as it was packed"):
            open_bundle(path, allow_unsigned=True)
        data[at] ^= 1


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("place", ["file", "folder", "foreign file", "foreign folder"])
def test_whose_file_it_is_matters_where_no_signature_does(tmp_path, mine, signed, place):
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    path = packed(folder / "x", mine if signed else None)
    changed = folder if "folder" in place else path
    if "foreign" in place:
        try:
            os.chown(changed, FOREIGN, -1)
        except PermissionError:
            pytest.skip("only root can give a file away")
    else:
        changed.chmod(0o777)
    if signed:
        assert len(open_bundle(path).manifest.entries) == 5
        return
    with pytest.raises(UntrustedError, match="an unsigned bundle that only you can write"):
        open_bundle(path, allow_unsigned=True)


def test_a_trust_folder_that_others_can_write_vouches_for_nothing(path, mine, trust_folder):
    packed(path, mine)
    assert trust_folder.stat().st_mode & 0o777 == 0o700
    trust_folder.chmod(0o777)
    with pytest.raises(UntrustedError, match="trust has mode 0777: others can write it"):
        open_bundle(path)
    with pytest.raises(UntrustedError, match="a folder of trusted keys that only you can write"):
        trust.add("other", b"x" * 32)


def test_a_key_file_that_others_can_write_is_not_trusted(path, mine, trust_folder, caplog):
    packed(path, mine)
    (trust_folder / "me.pub").chmod(0o666)
    (trust_folder / "none.pub").write_bytes(b"no key")
    with pytest.raises(UntrustedError, match="signed by a key that is not trusted"):
        open_bundle(path)
    assert len(lines(caplog)) == 2
    assert "others can write it: not used" in lines(caplog)[0]
    assert "none.pub, which holds none" in lines(caplog)[1]


def test_names_of_keys(mine):
    public = trust.trusted_keys()["me"]
    trust.add("me", public)
    with pytest.raises(ArgumentError, match="'me', which is another key's"):
        trust.add("me", signing.new_pair(mine.with_name("a"), mine.with_name("b")))
    for name in ("", "../me", "a/b", ".me", "x" * 65, "me\n"):
        with pytest.raises(ArgumentError, match="a name of up to 64 letters"):
            trust.add(name, public)


def test_signing_again_replaces_the_signature_and_nothing_else(path, tmp_path, mine):
    packed(path)
    before = path.read_bytes()
    with pytest.raises(KeyFileError, match="an Ed25519 private key in PEM"):
        packing.sign(path, _no_key(tmp_path))
    assert packing.sign(path, mine).serial == SERIAL
    assert open_bundle(path).signer.name == "me"
    assert (path.read_bytes()[:22], path.read_bytes()[118:]) == (before[:22], before[118:])
    packing.sign(path, pair(tmp_path, "two"))
    assert open_bundle(path).signer.name == "two"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match="its length is another than it says"):
        packing.sign(path, mine)


def _no_key(folder):
    file = folder / "none.key"
    file.touch(0o600)
    return file


# --- what is older


def test_an_older_one_is_refused_once_a_newer_was_accepted(tmp_path, mine, trust_folder):
    old = packed(tmp_path / "old", mine, serial=1)
    new = packed(tmp_path / "new", mine, serial=2)
    open_bundle(old)
    open_bundle(new)
    open_bundle(new)
    came = f"'kernels' that is no older than serial 2, seen before; got {old}, with serial 1"
    with pytest.raises(OlderBundleError, match=literal(came)):
        open_bundle(old)
    open_bundle(old, allow_older=True)
    with pytest.raises(OlderBundleError):
        open_bundle(old)
    assert len(list(trust_folder.glob("*.accepted"))) == 1
    open_bundle(packed(tmp_path / "another name", mine, name="more", serial=1))
    open_bundle(packed(tmp_path / "another key", pair(tmp_path, "two"), serial=1))


def test_what_was_accepted_is_not_lowered_nor_forgotten(tmp_path, mine):
    public = trust.trusted_keys()["me"]
    trust.accept(public, "x", 7)
    trust.accept(public, "x", 3)
    assert trust.newest(public, "x") == 7
    assert trust.remove("me")
    assert trust.newest(public, "x") == 7
    assert trust.newest(public, "y") == -1


def test_what_nobody_trusted_signed_is_not_remembered(path, tmp_path, trust_folder):
    open_bundle(packed(path, pair(tmp_path, "x", trusted=False)), allow_unsigned=True)
    assert not trust_folder.exists()


def test_a_bad_bundle_is_not_remembered(path, mine, trust_folder):
    packed(path, mine)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError):
        open_bundle(path)
    assert not list(trust_folder.glob("*.accepted"))


def test_a_home_that_cannot_be_written_is_said(path, mine, trust_folder, caplog):
    packed(path, mine)
    trust_folder.chmod(0o500)
    open_bundle(path)
    assert len(lines(caplog)) == 1
    assert "an older bundle 'kernels' would be used later" in lines(caplog)[0]


# --- by the process


def test_a_process_uses_it(path, tmp_path, mine):
    store = Store(tmp_path / "ours")
    assert store.get(key(1)) is None
    found = ipex_inductor.use_bundle(str(packed(path, mine)))
    assert (found.name, len(found.entries)) == ("kernels", 5)
    ipex_inductor.use_bundle(path)
    assert len(store.bundles) == 1, "once"
    assert store.get(key(1)) == entry(1)
    assert Store(tmp_path / "ours", bundles=()).get(key(1)) is None


def test_use_bundle_raises_and_passes_on_what_is_allowed(path, tmp_path, mine):
    with pytest.raises(BundleError, match=literal(f"{path}: No such file or directory")):
        ipex_inductor.use_bundle(path)
    packed(path)
    with pytest.raises(UntrustedError):
        ipex_inductor.use_bundle(path)
    ipex_inductor.use_bundle(path, allow_unsigned=True)
    ipex_inductor.use_bundle(packed(tmp_path / "new", mine, serial=2))
    with pytest.raises(OlderBundleError):
        ipex_inductor.use_bundle(packed(tmp_path / "old", mine, serial=1))
    ipex_inductor.use_bundle(tmp_path / "old", allow_older=True)


def test_the_environment_names_some_and_bad_ones_are_a_line(
    path, tmp_path, mine, monkeypatch, caplog
):
    packed(path, mine, numbers=[1])
    unsigned = packed(tmp_path / "unsigned", numbers=[2])
    cut = packed(tmp_path / "cut", mine, numbers=[3])
    cut.write_bytes(cut.read_bytes()[:-1])
    last = packed(tmp_path / "last", mine, numbers=[4], name="last")
    paths = [unsigned, cut, tmp_path / "gone", path, "", last]
    monkeypatch.setenv("IPEX_AOT_BUNDLES", os.pathsep.join(map(str, paths)))
    for _ in range(2):
        store = Store(tmp_path / "ours")
        assert [store.get(key(n)) for n in range(1, 5)] == [entry(1), None, None, entry(4)]
    assert [bundle.path for bundle in use.in_use()] == [path, last]
    told = [line.split(": ", 2)[1:] for line in lines(caplog)]
    assert [words[0] for words in told] == ["a bundle of IPEX_AOT_BUNDLES is not used"] * 3
    assert [str(p) in words[1] for p, words in zip(paths, told, strict=False)] == [True] * 3


# --- without the library, and keys in files


@pytest.mark.parametrize("call", ["open", "pair", "private", "public"])
def test_signatures_need_a_package(path, tmp_path, mine, monkeypatch, call):
    packed(path, mine)
    unsigned = packed(tmp_path / "unsigned")
    monkeypatch.setattr(signing, "find_spec", lambda name: None)
    calls = {
        "open": lambda: open_bundle(path),
        "pair": lambda: signing.new_pair(tmp_path / "a", tmp_path / "b"),
        "private": lambda: signing.private_key(mine),
        "public": lambda: signing.public_key(tmp_path / "me.pub"),
    }
    with pytest.raises(MissingPackageError, match=r'pip install "ipex-inductor\[sign\]"'):
        calls[call]()
    assert len(open_bundle(unsigned, allow_unsigned=True).manifest.entries) == 5
    assert importlib.util.find_spec("cryptography")


def test_a_private_key_is_its_owners_alone(tmp_path, mine):
    assert mine.stat().st_mode & 0o777 == 0o600
    for bits in (0o640, 0o604, 0o666):
        mine.chmod(bits)
        with pytest.raises(KeyFileError, match="a private key that only you can read"):
            signing.private_key(mine)
    before = mine.read_bytes()
    with pytest.raises(KeyFileError, match="a file that is not there yet"):
        signing.new_pair(mine, tmp_path / "new.pub")
    assert mine.read_bytes() == before


def _pem(key, password=None):
    from cryptography.hazmat.primitives import serialization as s

    how = s.BestAvailableEncryption(password) if password else s.NoEncryption()
    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, how)


@pytest.mark.parametrize("kind", ["empty", "text", "rsa", "password", "public", "fifo", "folder"])
def test_what_is_no_private_key(tmp_path, mine, kind):
    from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

    file = tmp_path / "key"
    if kind == "fifo":
        os.mkfifo(file, 0o600)
    elif kind == "folder":
        file.mkdir(0o700)
    else:
        data = {
            "empty": lambda: b"",
            "text": lambda: b"-----BEGIN PRIVATE KEY-----\nxx\n-----END PRIVATE KEY-----\n",
            "rsa": lambda: _pem(rsa.generate_private_key(65537, 1024)),
            "password": lambda: _pem(ed25519.Ed25519PrivateKey.generate(), b"secret"),
            "public": (tmp_path / "me.pub").read_bytes,
        }[kind]()
        file.write_bytes(data)
        file.chmod(0o600)
    with pytest.raises(KeyFileError, match="an Ed25519 private key in PEM, without a password"):
        signing.private_key(file)


@pytest.mark.parametrize("kind", ["rsa", "x25519"])
def test_another_kind_of_public_key_is_none(tmp_path, kind):
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import rsa, x25519

    key = (
        rsa.generate_private_key(65537, 1024)
        if kind == "rsa"
        else x25519.X25519PrivateKey.generate()
    )
    text = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key").write_bytes(text)
    with pytest.raises(KeyFileError, match="an Ed25519 public key in PEM"):
        signing.public_key(tmp_path / "key")


def test_what_is_no_public_key(tmp_path, mine):
    with pytest.raises(KeyFileError, match="an Ed25519 public key in PEM"):
        signing.public_key(mine)
    assert (
        signing.to_pem(signing.public_key(tmp_path / "me.pub"))
        == (tmp_path / "me.pub").read_bytes()
    )


# --- into a store


def test_merging_takes_good_entries_and_leaves_what_is_there(path, tmp_path, mine):
    bundle = open_bundle(packed(path, mine, numbers=range(3)))
    folder = filled(tmp_path / "more", range(2, 6))
    cut, wrong = (folder.path / f"{key(n).digest}.entry" for n in (4, 6))
    cut.write_bytes(cut.read_bytes()[:-1])
    cut.with_name(f"{key(5).digest}.entry").rename(wrong)
    store = Store(tmp_path / "ours", bundles=())
    store.put(key(0), {"mine": True}, b"0")
    store.put(key(1), {}, b"1")
    spoilt = tmp_path / "ours" / f"{key(1).digest}.entry"
    spoilt.write_bytes(spoilt.read_bytes()[:-1])
    done = merge(store, [bundle, folder])
    assert (done.found, done.held) == (7, 5)
    assert sorted(done.refused) == sorted(
        [
            f"{key(4).digest}.entry in ours: its length is another than it says",
            f"{key(6).digest}.entry in ours: its name is that of another key",
        ]
    )
    assert store.get(key(0)).meta == {"mine": True}
    assert [store.get(key(n)) for n in range(1, 4)] == [entry(n) for n in range(1, 4)]
    assert store.get(key(4)) is None
    assert merge(store, [bundle]) == Merged(3, 3, ())


def test_merging_into_a_folder_that_cannot_be_written_holds_nothing(path, tmp_path, mine):
    bundle = open_bundle(packed(path, mine))
    (tmp_path / "ours").mkdir(mode=0o777)
    (tmp_path / "ours").chmod(0o777)
    assert merge(Store(tmp_path / "ours"), [bundle]) == Merged(5, 0, ())


def test_what_is_found_in_a_bundle_says_whose_it_is(tmp_path):
    signed = open_bundle(packed(tmp_path / "s.bundle", pair(tmp_path), serial=17))
    plain = open_bundle(packed(tmp_path / "p.bundle", name="mine"), allow_unsigned=True)
    said = []
    for bundle in (signed, plain):
        entry, origin = Store(tmp_path / "none", bundles=[bundle]).find(key(1))
        assert entry.blob == blob(1)
        said.append(origin)
    public = signed.signer.public.hex()
    assert said == [
        f"the bundle {tmp_path}/s.bundle ('kernels', serial 17, signed by me ({public}))",
        f"the bundle {tmp_path}/p.bundle ('mine', serial {SERIAL}, unsigned)",
    ]
