"""Compile every SYCL template to native code of absent Intel GPUs, and check it statically.

    PATH=$PATH:FOLDER python -m benchmarks sycl_aot [--arch pvc ...] [--write]

FOLDER has ocloc (`make ocloc`). The check reads the metadata of the binary: no spills, no private
memory, no stack calls, the matrix engine where it is promised, registers and local memory within
the device's limits. Nothing runs, so there are no speeds. `--write` saves the table to
benchmarks/results/sycl_aot.jsonl.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from ipex_inductor.aot_cache import kernels
from ipex_inductor.errors import SyclError
from ipex_inductor.target import device as target
from ipex_inductor.templates.sycl import binaries, catalog, ocloc, wheels, worker, zebin
from ipex_inductor.templates.sycl.shim import shim
from ipex_inductor.templates.sycl.tiles import NAMES

RESULTS = Path(__file__).parents[1] / "results" / "sycl_aot.jsonl"


def check_source(name, listed):
    """Return a row for each kernel of one source on one architecture; the cache keeps the code."""
    arch, source = NAMES[name], listed.source
    about = {"arch": name, "template": listed.name}
    device = next(d for d in shim().devices if d["type"] == "cpu")
    seconds = {}

    def timed(what, build):
        begin = time.perf_counter()
        made = build()
        seconds[what] = round(time.perf_counter() - begin, 2)
        return made

    def spirv():
        return timed("spirv_s", lambda: worker.compile_source(source, device, native=False).spirv)

    def native():
        given = binaries.spirv(source, spirv).blob
        return source.manifest, timed("native_s", lambda: ocloc.native(source, given, arch))

    try:
        entry = kernels.kernel(binaries.native_key(source, arch, ocloc.compiler_name()), native)
        found = zebin.facts(entry.blob)
    except (SyclError, ValueError) as error:
        return [about | {"wrong": str(error).splitlines()[0]}]
    wanted = next(t for t in target.table() if t.arch == arch)
    rows = [about | asdict(f) | {"wrong": f.wrong(wanted, listed.engine)} for f in found]
    return [each | seconds for each in rows] or [about | {"wrong": "no kernel in it"}]


def shown(found):
    """One line of the table."""
    facts = ("lanes", "registers", "local", "spilled", "private", "engine")
    figures = " ".join(f"{found[name]!s:>9}" for name in facts) if "kernel" in found else ""
    return f"{found['arch']:5}{found['template']:32}{figures}  {found['wrong'] or 'ok'}"


def main():
    """All of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", nargs="*", choices=[*NAMES], default=[*NAMES])
    parser.add_argument("--only", default="", help="templates with this in their name")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    work = [
        (name, listed)
        for name in given.arch
        for listed in catalog.list_kernels(NAMES[name])
        if given.only in listed.name
    ]
    rows = []
    with ThreadPoolExecutor(2) as pool:
        for made in pool.map(lambda pair: check_source(*pair), work):
            rows += made
            for found in made:
                print(shown(found), flush=True)
    wrong = [found for found in rows if found["wrong"]]
    print(f"{len(rows)} kernels of {len(work)} sources, {len(wrong)} refused by the gate")
    if given.write:
        command = "python -m benchmarks sycl_aot --write"
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "command": command,
            "compiler": ocloc.compiler_name(),
        }
        about |= {"intel-sycl-rt": wheels.runtime().version, "torch": version("torch")}
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in (about, *rows)))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
