"""Processes that want one kernel at once; arguments: FOLDER PROCESSES ROUNDS HARM KIND.

KIND: "kernel", or "graph" (files of a compiled graph; then FOLDER is our home), or "training" (one
whose backward is built after a while). HARM: "" (none), "stop" or "kill" (the first to build is
stopped or killed while it does). Prints, as JSON, of every round how often the kernel was built and
how many seconds the last waiter took after the harm. Imports no torch, so that children are forked
by the hundred.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.graph_files.graphs import GraphFiles
from ipex_inductor.aot_cache.store import Store
from support.cache.cache_keys import blob, key

BUILDING, DONE, WRONG = b"b", b"d", b"w"
TESTS = Path(__file__).parents[2]
PROCESSES = 16


def graph(number, build, parts):
    """As torch works: what is missing of a graph's parts is built in its folder, one by one."""
    files = GraphFiles(key(number))
    for part in parts:
        with files.alone(lambda: None):
            path = files.folder / part
            if not path.exists():
                path.write_bytes(build()[1])
            files.keep()
        time.sleep(0.02)  # the user's step
    blobs = {(files.folder / part).read_bytes() for part in parts}
    return Entry({}, *blobs)


def child(folder, number, gate, out, harm, kind):
    os.read(gate, 1)

    def build():
        os.write(out, BUILDING + os.getpid().to_bytes(4, "big"))
        time.sleep(60 if harm and first_of(folder, number) else 0.05)
        return {}, blob(number)

    if kind == "kernel":
        found = Store(Path(folder)).compile_once(key(number), build)
    else:
        found = graph(number, build, ("forward", "backward") if kind == "training" else ("all",))
    good = found.blob == blob(number)
    os.write(out, (DONE if good else WRONG) + os.getpid().to_bytes(4, "big"))
    os._exit(0)


def first_of(folder, number):
    try:
        os.close(os.open(f"{folder}-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def a_round(folder, number, processes, harm, kind):
    (gate, go), (told, out) = os.pipe(), os.pipe()
    children = []
    for _ in range(processes):
        pid = os.fork()
        if not pid:
            os.close(go)
            os.close(told)
            child(folder, number, gate, out, harm, kind)
        children.append(pid)
    os.close(out)
    os.write(go, b"g" * processes)
    built, done, wrong, harmed, begun = 0, 0, 0, None, time.monotonic()
    while done + wrong < processes - bool(harm):
        message = os.read(told, 5)
        if not message:
            break
        kind, pid = message[:1], int.from_bytes(message[1:], "big")
        built += kind == BUILDING
        done += kind == DONE
        wrong += kind == WRONG
        if kind == BUILDING and harm and harmed is None:
            time.sleep(0.2)  # the others wait by now
            os.kill(pid, signal.SIGSTOP if harm == "stop" else signal.SIGKILL)
            harmed, begun = pid, time.monotonic()
    waited = time.monotonic() - begun
    if harmed is not None:
        os.kill(harmed, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    for file in (gate, go, told):
        os.close(file)
    return {"built": built, "done": done, "wrong": wrong, "waited": round(waited, 3)}


def rounds(folder, count, harm="", kind="kernel"):
    """What a process of its own says of so many rounds, where nothing was wrong."""
    command = folder, str(PROCESSES), str(count), harm, kind
    ran = subprocess.run(
        [sys.executable, __file__, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    found = json.loads(ran.stdout)
    assert all(r["wrong"] == 0 for r in found)
    assert all(r["done"] == PROCESSES - bool(harm) for r in found)
    entries = folder if kind == "kernel" else folder / "kernels" / "1"
    left = [f.name for f in entries.iterdir() if f.suffix != ".entry"]
    assert len(left) == (count if harm == "stop" else 0), (
        "locks of those who were killed at the end"
    )
    return found


if __name__ == "__main__":
    folder, processes, rounds = sys.argv[1], *map(int, sys.argv[2:4])
    harm, kind = sys.argv[4:]
    os.environ["IPEX_HOME"] = folder
    print(json.dumps([a_round(folder, n, processes, harm, kind) for n in range(rounds)]))
