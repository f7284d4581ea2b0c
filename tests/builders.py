"""Processes that want one kernel at once: run as `python builders.py FOLDER PROCESSES ROUNDS HARM`.

HARM: "" (none), "stop" or "kill" (the first to build is stopped or killed while it does). Prints,
as JSON, of every round how often the kernel was built and how many seconds the last waiter took
after the harm. Imports no torch, so that children are forked by the hundred.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from keys import blob, key

from ipex_inductor.aot_cache.store import Store

BUILDING, DONE, WRONG = b"b", b"d", b"w"


def child(folder, number, gate, out, harm):
    os.read(gate, 1)

    def build():
        os.write(out, BUILDING + os.getpid().to_bytes(4, "big"))
        time.sleep(60 if harm and first_of(folder, number) else 0.05)
        return {}, blob(number)

    found = Store(Path(folder)).compile_once(key(number), build)
    good = found.blob == blob(number)
    os.write(out, (DONE if good else WRONG) + os.getpid().to_bytes(4, "big"))
    os._exit(0)


def first_of(folder, number):
    try:
        os.close(os.open(f"{folder}-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def a_round(folder, number, processes, harm):
    (gate, go), (told, out) = os.pipe(), os.pipe()
    children = []
    for _ in range(processes):
        pid = os.fork()
        if not pid:
            os.close(go)
            os.close(told)
            child(folder, number, gate, out, harm)
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


if __name__ == "__main__":
    folder, processes, rounds, harm = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
    print(json.dumps([a_round(folder, n, processes, harm) for n in range(rounds)]))
