"""A quota under churn: never passed by more than an entry a writer, and what is used stays."""

import json
import os
import random
from collections import OrderedDict

import pytest

from ipex_inductor.aot_cache import disk
from ipex_inductor.aot_cache.entry import pack
from ipex_inductor.aot_cache.store import Store
from support.cache.cache_keys import blob, key
from support.cache.store_stress import hammered

pytestmark = pytest.mark.reliability

MIB = 1 << 20


@pytest.mark.parametrize(
    ("quota", "size", "volume", "kills"),
    [
        pytest.param(8 * MIB, 1 << 16, 100 * MIB, 30, id="100-MiB"),
        pytest.param(64 * MIB, MIB, 5120 * MIB, 100, id="5-GiB", marks=pytest.mark.slow),
    ],
)
def test_churn_stays_within_the_quota(tmp_path, quota, size, volume, kills):
    """Eight writers, of which one after the other is killed, some while they evict."""
    keys = 4 * quota // size
    result = hammered(
        tmp_path / "kernels",
        keys=keys,
        size=size,
        kills=kills,
        puts=volume // size,
        quota=quota,
        evict=0,
        pause=(0.05, 0.3) if kills < 100 else (0.2, 0.6),
    )
    assert result["largest"] <= quota + 8 * (size + 2048)


@pytest.mark.parametrize("accesses", [2000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_what_is_used_stays(tmp_path, monkeypatch, accesses):
    """An access a minute, 300 kernels, room for 100: at least 0.95 of an exact LRU's hits."""
    now = [2e9]
    monkeypatch.setattr(disk, "time", lambda: now[0])
    monkeypatch.setattr(disk, "utime", lambda f: os.utime(f, (now[0], now[0])))
    monkeypatch.setattr(disk, "fsync", lambda file: None)
    rename = os.rename

    def dated(source, target):
        os.utime(source, (now[0], now[0]))
        rename(source, target)

    monkeypatch.setattr(disk, "rename", dated)
    quota = 100 * len(pack(key(100).framed, {}, blob(100)))
    store, exact, room = Store(tmp_path / "kernels", quota=quota), OrderedDict(), 100
    rng = random.Random(0)
    numbers = rng.choices(range(300), [1 / (1 + n) for n in range(300)], k=accesses)
    hits = ideal = 0
    for number in numbers:
        now[0] += 60
        if store.get(key(number)):
            hits += 1
        else:
            store.put(key(number), {}, blob(number))
        ideal += exact.pop(number, False)
        exact[number] = True
        if len(exact) > room:
            exact.popitem(last=False)
    print(json.dumps({"accesses": accesses, "hits": hits, "ideal": ideal, "of": hits / ideal}))
    assert hits >= 0.95 * ideal
    assert store.counts()["evicted", "ours"] > 0
