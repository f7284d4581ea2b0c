"""Processes that use one kernel cache at once and are killed: run as `python store_stress.py SPEC`.

SPEC is JSON with a folder and the fields of DEFAULTS. Prints what was found, as JSON. Imports no
torch, so that children are forked by the hundred.
"""

import errno
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

from ipex_inductor.aot_cache import disk, folder
from ipex_inductor.aot_cache.quota import sweep
from ipex_inductor.aot_cache.store import Store
from support.cache.cache_keys import blob, key

EVENTS = ("operations", "hits", "puts", "wrong", "exceptions", "corrupt", "evicted")


DEFAULTS = {
    "processes": 8,
    "keys": 200,
    "size": 4096,  # bytes of a blob
    "seconds": 500,  # at most
    "kills": 0,  # at least, as the next two
    "operations": 0,
    "puts": 0,
    "quota": 1 << 30,
    "network": False,
    "evict": 0.05,  # of the operations, one more evicts
    "pause": (0.005, 0.06),  # s between two kills
}


def hammered(path, **spec):
    """What one run found, after the checks that every run must pass."""
    tests = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, __file__, json.dumps(DEFAULTS | {"folder": str(path)} | spec)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    print(result)
    assert result["exceptions"] == 0, ran.stderr
    assert result["wrong"] == result["bad"] == 0, result
    assert "is not used" not in ran.stderr, "a torn entry"
    assert spec.get("network") or "memory only" not in ran.stderr, ran.stderr
    assert result["orphans"] == 0, "all that killed writers left was reaped"
    for least in ("kills", "operations", "puts"):
        assert result[least] >= spec.get(least, 0), result
    return result


class Tally:
    """Counters of every process in shared memory: what a killed one did counts too."""

    def __init__(self, processes):
        self._cells = mmap.mmap(-1, 8 * processes * len(EVENTS))

    def add(self, process, event, by=1):
        at = 8 * (process * len(EVENTS) + EVENTS.index(event))
        (value,) = struct.unpack_from("q", self._cells, at)
        struct.pack_into("q", self._cells, at, value + by)

    def sums(self):
        values = struct.unpack(f"{len(self._cells) // 8}q", self._cells)
        return {e: sum(values[i :: len(EVENTS)]) for i, e in enumerate(EVENTS)}


def meta_of(number):
    return {"number": number, "shared": 1024 * number}


def work(spec, process, tally):
    """Random gets, puts of what is missing, and evictions, until killed."""
    rng = random.Random(f"{process} {os.getpid()} {time.time_ns()}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if spec["network"]:
        network(rng)
    keys, blobs = spec["key_objects"], spec["blobs"]
    store = Store(Path(spec["folder"]), quota=spec["quota"])
    while True:
        number = rng.randrange(spec["keys"])
        try:
            entry = store.get(keys[number])
            if entry is None:
                store.put(keys[number], meta_of(number), blobs[number])
                tally.add(process, "puts")
            else:
                tally.add(process, "hits")
                good = entry.blob == blobs[number] and entry.meta == meta_of(number)
                tally.add(process, "wrong", not good)
            if rng.random() < spec["evict"]:
                name = f"{keys[rng.randrange(spec['keys'])].digest}{folder.SUFFIX}"
                tally.add(process, "evicted", store.folder.remove(name))
        except Exception:
            tally.add(process, "exceptions")
            traceback.print_exc()
        tally.add(process, "operations")
        store._memory.__init__()  # what the disk has is to be tried, not what this process knows


def network(rng):
    """A disk over a network: late names, stale handles, locks that hold nothing, equal pids."""

    def failing(call):
        def run(*args, **kwargs):
            if rng.random() < 0.01:
                raise OSError(rng.choice((errno.ESTALE, errno.EBUSY)), "as a network disk says")
            return call(*args, **kwargs)

        return run

    rename = disk.rename

    def late(source, target):
        def act():
            time.sleep(rng.random() * 0.3 if rng.random() < 0.9 else rng.random())
            try:
                rename(source, target)
            except OSError:
                return

        threading.Thread(target=act, daemon=True).start()

    disk.rename = failing(late)
    disk.flock = lambda file, how: None
    os.getpid = lambda: 4711
    for name in ("open", "read", "write", "fsync", "fstat", "lstat", "unlink", "listdir", "utime"):
        setattr(disk, name, failing(getattr(disk, name)))


def start(spec, process, tally):
    child = os.fork()
    if not child:
        try:
            work(spec, process, tally)
        finally:
            os._exit(1)
    return child


def run(spec):
    spec["key_objects"] = [key(n) for n in range(spec["keys"])]
    spec["blobs"] = [blob(n, spec["size"]) for n in range(spec["keys"])]
    tally, rng = Tally(spec["processes"]), random.Random(0)
    children = [start(spec, p, tally) for p in range(spec["processes"])]
    kills, largest, begun = 0, 0, time.monotonic()
    try:
        while time.monotonic() - begun < spec["seconds"] and (
            kills < spec["kills"] or any(tally.sums()[e] < spec[e] for e in ("operations", "puts"))
        ):
            until = time.monotonic() + rng.uniform(*spec["pause"])
            while time.monotonic() < until:
                time.sleep(0.01)
                largest = max(largest, held(spec["folder"]))
            process = rng.randrange(spec["processes"])
            os.kill(children[process], signal.SIGKILL)
            kills += os.WIFSIGNALED(os.waitpid(children[process], 0)[1])
            children[process] = start(spec, process, tally)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return {**tally.sums(), "kills": kills, "largest": largest, **after(spec)} | {
        "seconds": round(time.monotonic() - begun, 1)
    }


def held(path):
    total = 0
    try:
        for file in os.scandir(path):
            try:
                total += file.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
    except FileNotFoundError:
        return 0
    return total


def after(spec):
    """What is left: bad entries, files of killed writers before and after an hour."""
    store = Store(Path(spec["folder"]), quota=spec["quota"])
    names = {k.digest: n for n, k in enumerate(spec["key_objects"])}
    bad = 0
    for file in list(store.folder.files()):
        number = names[file.name.removesuffix(folder.SUFFIX)]
        entry = store.get(spec["key_objects"][number])
        bad += entry is None or entry.blob != spec["blobs"][number]
    temps = sum(name.endswith(".tmp") for name in os.listdir(spec["folder"]))
    folder.DEAD_AFTER = 0
    time.sleep(0.01)
    sweep(store.folder, spec["quota"])
    others = [n for n in os.listdir(spec["folder"]) if not n.endswith(folder.SUFFIX)]
    return {"bad": bad, "temps": temps, "orphans": len(others)}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
