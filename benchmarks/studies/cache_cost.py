"""Measure the kernel cache: a verified read, a warm start of 200 kernels, a put, a bundle.

    python -m benchmarks cache_cost [--json] [--folder DIR]

Entries of 64 KiB, read by a process that has read none of them; their pages are in memory, as after
any recent use. SHA-256 of the same bytes stands beside them as the least cost of verification. The
aims are 60 microseconds (p50) for a read and 15 ms for 200.

The slowest round stands beside the fastest, each with the time of a plain Python loop. Where
another virtual machine uses the second thread of a core, that loop and everything in a read but
SHA-256 take half as long again.
"""

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.bundling.packing import pack
from ipex_inductor.aot_cache.digest import source_digest
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.aot_cache.store import Store

KERNELS, SIZE, ROUNDS = 200, 1 << 16, 15
COUNTED = range(300)  # turns of the loop of plain Python
META = {"name": "matmul", "shared": 49152, "warps": 4, "stages": 3, "grid": [128, 64, 1]}


def make_key(number: int) -> Key:
    """Return a key as long as real ones."""
    return Key(
        kind="cubin",
        source=source_digest(),
        tables=(("matmul.py.jinja", "0" * 64),),
        options=(("tile", (64, 64, 32)), ("warps", 4), ("stages", 3)),
        problem=(("number", number), ("shape", (1024, 1024)), ("dtype", "bfloat16")),
        architecture="sm_90",
        toolkit=(("ptxas", "12.8"), ("flags", "-O3")),
        triton="3.6.0",
        torch="2.13.0+cu130",
        environment=(),
    )


def time_call(call: Callable[[], object]) -> float:
    """Return seconds of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure_reads(folder: Path) -> dict[str, float]:
    """Return microseconds of one read and milliseconds of 200: the least of the rounds."""
    keys = [make_key(n) for n in range(KERNELS)]
    store = Store(folder)
    puts = [time_call(lambda k=k: store.put(k, META, bytes(SIZE))) for k in keys]
    singles, wholes, hashes, loops = [], [], [], []
    for _ in range(ROUNDS):
        store = Store(folder)
        reads = [time_call(lambda k=k, s=store: s.get(k)) for k in keys]
        assert store.counts()["hits", "ours"] == KERNELS
        singles.append(statistics.median(reads))
        wholes.append(sum(reads))
        data = bytes(SIZE)
        hashes.append(statistics.median(time_call(lambda d=data: hashlib.sha256(d)) for _ in keys))
        loops.append(statistics.median(time_call(lambda: sum(n for n in COUNTED)) for _ in keys))
    slowest = max(range(ROUNDS), key=singles.__getitem__)
    return measure_bundle(folder, keys) | {
        "read_p50_us": 1e6 * min(singles),
        "read_p50_us_median_round": 1e6 * statistics.median(singles),
        "read_p50_us_slowest_round": 1e6 * singles[slowest],
        "sha256_p50_us": 1e6 * min(hashes),
        "sha256_p50_us_slowest_round": 1e6 * hashes[slowest],
        "python_p50_us": 1e6 * min(loops),
        "python_p50_us_slowest_round": 1e6 * loops[slowest],
        "read_200_ms": 1e3 * min(wholes),
        "read_200_ms_median_round": 1e3 * statistics.median(wholes),
        "put_p50_ms": 1e3 * statistics.median(puts),
    }


def measure_bundle(folder: Path, keys: list[Key]) -> dict[str, float]:
    """Return times to open and verify a bundle of these entries, and to read from it."""
    path, empty = folder.with_name("kernels.bundle"), folder.with_name("empty")
    empty.mkdir(mode=0o700)
    pack(Store(folder).folder, path, "kernels")
    opens, singles = [], []
    for _ in range(ROUNDS):
        opens.append(time_call(lambda: open_bundle(path, allow_unsigned=True)))
        store = Store(empty, bundles=[open_bundle(path, allow_unsigned=True)])
        singles.append(statistics.median(time_call(lambda k=k, s=store: s.get(k)) for k in keys))
        assert store.counts()["hits", ""] == KERNELS
    return {"bundle_open_ms": 1e3 * min(opens), "bundle_read_p50_us": 1e6 * min(singles)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; must not exist")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure_reads(options.folder or Path(scratch) / "kernels")
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:28} {value:8.2f}")


if __name__ == "__main__":
    main()
