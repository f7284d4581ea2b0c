"""Every changed bit, cut, swap and hostile byte of an entry: a miss, or the entry."""

import random
import resource
import time

import msgspec
import pytest

from ipex_inductor.aot_cache import entry, log_once
from ipex_inductor.aot_cache import key as keys
from ipex_inductor.aot_cache.entry import HEAD, CorruptError, Entry, pack, unpack, unpack_any
from ipex_inductor.aot_cache.store import Store
from support.cache.cache_keys import blob, key

pytestmark = pytest.mark.reliability

META = {"shared": 49152, "warps": 4, "name": "matmul", "grid": [1, 2, 3.5], "none": None}
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def _unsaid():
    log_once.say.cache_clear()


def damaged(data, step):
    """Every `step`th flip of a bit, truncation, and up to 64 bytes more."""
    for at in range(0, 8 * len(data), step):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        yield bytes(changed)
    for size in range(0, len(data), step):
        yield data[:size]
    for more in range(1, 65):
        yield data + bytes(more)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=slow)])
@pytest.mark.parametrize("size", [0, 1000, 4128])
def test_every_damage_is_detected(tmp_path, size, step):
    """In the bytes; every fifth case also on the disk, where the next put mends it."""
    store, good = Store(tmp_path / "kernels"), Entry(META, blob(1, size))
    store.put(key(1), META, good.blob)
    (file,) = (tmp_path / "kernels").iterdir()
    data, cases, served = file.read_bytes(), 0, 0
    for changed in damaged(data, step):
        cases += 1
        for read in (lambda c: unpack(c, key(1).framed), unpack_any):
            try:
                read(changed)
                served += 1
            except CorruptError:
                pass
        if cases % 5 == 0:
            file.write_bytes(changed)
            served += store.get(key(1)) is not None
    print(f"{cases} cases of damage, {served} served")
    assert served == 0
    assert cases >= 9 * len(data) // step
    assert store.put(key(1), META, good.blob)
    assert store.get(key(1)) == good


def test_swapped_entries_are_misses(tmp_path):
    path = tmp_path / "kernels"
    store = Store(path)
    for number in range(50):
        store.put(key(number), {}, blob(number))
    files = [path / f"{key(n).digest}.entry" for n in range(50)]
    data, misses = [f.read_bytes() for f in files], 0
    for one in range(50):
        for two in set(range(50)) - {one}:
            files[two].write_bytes(data[one])
            misses += store.get(key(two)) is None
        for two in range(50):
            files[two].write_bytes(data[two])
    assert misses == 2450
    assert all(store.get(key(n)).blob == blob(n) for n in range(50))


def signed(changed):
    """With the digest that the bytes now have: what a hostile writer would make of them."""
    first = changed[: entry._FIRST.size]
    return first + entry._digest(first, changed[HEAD:]) + changed[HEAD:]


def json_bombs():
    yield b"[" * 100_000
    yield b'{"a":' * 50_000
    yield b'{"a":1e999999}'
    yield b'{"a":"\\ud800"}'
    yield b'{"a":' + b"9" * 100_000 + b"}"
    yield b"[]"
    yield b"null"
    yield b""
    yield b'{"a":1}{"a":2}'


def key_bombs():
    yield b"t" + (1 << 63).to_bytes(8, "big")
    yield (b"t" + (9).to_bytes(8, "big")) * 100_000
    nested = b""
    for _ in range(20_000):
        nested = b"t" + len(nested).to_bytes(8, "big") + nested
    yield nested
    yield b"i" + (400_000).to_bytes(8, "big") + b"f" * 400_000
    yield b"n" + bytes(8)
    yield (b"n" + bytes(8)) * 100_000


def framed(framed_key, meta, code=b""):
    first = entry._FIRST.pack(entry.MAGIC, entry.VERSION, len(framed_key), len(meta), len(code))
    return first + entry._digest(first, framed_key, meta, code) + framed_key + meta + code


@pytest.mark.parametrize("meta", list(json_bombs()), ids=lambda b: repr(b[:12]))
def test_hostile_metadata_is_a_value_or_a_miss(meta):
    try:
        found = unpack(framed(key(1).framed, meta), key(1).framed)
    except CorruptError:
        return
    assert type(found.meta) is dict


@pytest.mark.parametrize("bomb", list(key_bombs()), ids=lambda b: repr(b[:12]))
def test_hostile_keys_are_a_value_or_a_miss(bomb):
    begun = time.thread_time()
    with pytest.raises(ValueError, match="not"):
        keys.read(unpack_any(framed(bomb, b"{}"))[0])
    assert (
        time.thread_time() - begun < 0.5
    )  # a megabyte of key; entries of ours have one thousandth


@pytest.mark.parametrize("lengths", [(2**32 - 1, 0, 0), (0, 2**32 - 1, 0), (0, 0, 2**64 - 1)])
def test_lengths_that_lie_reserve_nothing(lengths):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    head = entry._FIRST.pack(entry.MAGIC, entry.VERSION, *lengths)
    for data in (head + bytes(32), head + bytes(4000)):
        with pytest.raises(CorruptError):
            unpack_any(data)
    with pytest.raises(CorruptError, match="too large"):
        entry.head_end(head + bytes(32), HEAD + sum(lengths))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB


def mutated(rng, seeds):
    """Bytes like an entry's, half of them with a digest that is right."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data))
        kind = rng.randrange(5)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 40))
        elif kind == 3:
            data[at : at + 8] = rng.choice((bytes(8), b"\xff" * 8, (1 << 40).to_bytes(8, "big")))
        else:
            other = rng.choice(seeds)
            data[at : at + 30] = other[at : at + 30]
        data = data or bytearray(b"\0")
    if rng.random() < 0.5 and len(data) > HEAD:
        key_length = int.from_bytes(data[10:14], "big")
        rest = len(data) - HEAD - key_length
        if rng.random() < 0.8 and rest > 0:  # lengths that add up, so that more is read
            meta = min(int.from_bytes(data[14:18], "big"), rest)
            data[14:26] = meta.to_bytes(4, "big") + (rest - meta).to_bytes(8, "big")
        return signed(bytes(data))
    return bytes(data)


def parsed(data):
    """Seconds it takes to read these bytes, and whether they are an entry; no other exception."""
    begun, value = time.thread_time(), False
    try:
        framed_key, found = unpack_any(data)
        value = True
        assert type(found.meta) is dict
        assert type(found.blob) is bytes
        msgspec.json.encode(found.meta)
        keys.read(framed_key)
    except ValueError:  # CorruptError, or a key that is none
        pass
    return time.thread_time() - begun, value


@pytest.mark.parametrize("cases", [30_000, pytest.param(1_000_000, marks=slow)])
def test_mutated_entries_are_a_value_or_a_miss(cases):
    rng = random.Random(cases)
    seeds = [pack(key(n).framed, META | {"n": n}, blob(n, 64)) for n in range(8)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values, slowest = 0, 0.0
    for _ in range(cases):
        data = mutated(rng, seeds)
        took, value = parsed(data)
        values += value
        if took > slowest:
            slowest = max(slowest, min(took, *(parsed(data)[0] for _ in range(3))))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{cases} mutations, {values} values, slowest {1e3 * slowest:.1f} ms, {grown} KiB more")
    assert values > cases / 100, "some must get past the digest"
    assert slowest < 0.01
    assert grown < 1 << 16
