"""Servers of remote entries, and a wire to them that cuts, delays and changes."""

import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress

from ipex_inductor.aot_cache.entry import Entry
from support.cache.cache_keys import blob, key

META = {"shared": 49152}
TIMEOUT = 2.0  # s of a remote that fails here


class Server:
    """`python arguments... PORT` in a process of its own, with nothing said."""

    def __init__(self, *arguments):
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, *arguments, str(self.port)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, **quiet)
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.1)
        raise TimeoutError(f"{arguments} does not start")

    def kill(self):
        self._process.kill()
        self._process.wait()


class Wire:
    """Passes bytes on; `fault(connection, data)` may do something else with what comes back."""

    def __init__(self, port):
        self._to, self.fault, self.answers = port, None, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listening.close()

    def _accept(self):
        while True:
            try:
                near = self._listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            for pair in ((near, far, None), (far, near, self)):
                threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source, target, wire):
    with suppress(OSError), source, target:
        while data := source.recv(1 << 16):
            if wire:
                wire.answers += data.startswith(b"HTTP/")
                data = wire.fault(data) if wire.fault else data
                if data is None:
                    return
            target.sendall(data)


def late(data):
    time.sleep(2 * TIMEOUT)
    return data


def cut(data):
    return None if b"\x89ipexk" in data else data


def stopped(data):
    """The head of an answer, and never the rest."""
    if b"\x89ipexk" in data:
        time.sleep(4 * TIMEOUT)
    return data


def garbage(data):
    return b"\0" * len(data)


def unavailable(_):
    return b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"


FAULTS = {f.__name__: f for f in (late, cut, stopped, garbage, unavailable)}


def built(store, size=1024):
    """Have twenty kernels, compiled if need be; the seconds that this waited for the remote."""
    (remote,), waited = store.remotes, []
    asked = remote._call

    def timed(call):
        begun = time.monotonic()
        try:
            return asked(call)
        finally:
            waited.append(time.monotonic() - begun)

    remote._call = timed
    for number in range(20):
        found = store.compile_once(key(number), lambda n=number: (META, blob(n, size)))
        assert found == Entry(META, blob(number, size))
    assert len(waited) >= 20
    return sum(waited)
