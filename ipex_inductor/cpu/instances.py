"""Processes on cores of their own, watched by one: their output, their exit codes, their end.

Imports no torch, and starts no thread, so that what runs between fork and exec is safe.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from ipex_inductor.errors import OptionError

GRACE = 10.0  # seconds between being asked to end and being ended
TICK = 0.05  # seconds: how late the end of a process may be noticed
BIND = 2  # MPOL_BIND
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_MEMPOLICY = SET_MEMPOLICY.get(os.uname().machine)


@dataclass(frozen=True)
class Instance:
    """One process: its cores, the NUMA nodes of its memory, what is added to its environment."""

    index: int
    command: tuple[str, ...]
    cores: tuple[int, ...]
    nodes: tuple[int, ...]
    settings: Mapping[str, str]
    log: Path | None = None


def become(instance: Instance) -> NoReturn:
    """Be this instance from now on, with terminal, signals and exit code of one's own."""
    settle(instance)
    os.execvpe(instance.command[0], instance.command, {**os.environ, **instance.settings})


def settle(instance: Instance) -> None:
    """Put this process on the cores and the memory of `instance`.

    Where the system forbids to say whose memory (some containers do), Linux's rule stays: that of
    the node whose core touches it first.
    """
    os.sched_setaffinity(0, instance.cores)
    if _MEMPOLICY is not None:
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask = (ctypes.c_ulong * (max(instance.nodes) // bits + 1))()
        for node in instance.nodes:
            mask[node // bits] |= 1 << node % bits
        _libc.syscall(_MEMPOLICY, BIND, mask, len(mask) * bits + 1)


def run(instances: Sequence[Instance]) -> int:
    """Start all, wait for all; the exit code of the first (by index) that failed, else 0.

    What ended by signal N counts as 128 + N. Asked to end (Ctrl-C, SIGTERM, SIGHUP) this asks each
    instance and all that it started, once, and ends them where they have not after `GRACE`, or
    when it is asked again. Raises `OptionError` where one cannot be started; then none runs.
    """
    watched: list[_Watched] = []
    with _asked_to_end() as asked, selectors.DefaultSelector() as selector:
        try:
            for instance in instances:
                watched.append(_Watched(instance, len(instances) > 1))
                selector.register(watched[-1].output, selectors.EVENT_READ, watched[-1])
            told, deadline = 0, float("inf")
            while any(each.runs() for each in watched):
                for key, _ in selector.select(TICK):
                    if not key.data.read():
                        selector.unregister(key.fileobj)
                if told < len(asked) or time.monotonic() > deadline:
                    kill = told or time.monotonic() > deadline
                    _tell(watched, signal.SIGKILL if kill else asked[0])
                    told, deadline = len(asked), time.monotonic() + GRACE
        except BaseException:
            _tell(watched, signal.SIGKILL)
            raise
        finally:
            codes = [each.close() for each in watched]
    if asked:
        return 128 + asked[0]
    return next((code for code in codes if code), 0)


class _Watched:
    """An instance that was started: a group of processes, and what they print."""

    def __init__(self, instance: Instance, several: bool) -> None:
        self.instance = instance
        self._mark = f"[{instance.index}] ".encode() if several else b""
        self._line = b""
        self._log: IO[bytes] | None = None
        try:
            if instance.log is not None:
                instance.log.parent.mkdir(parents=True, exist_ok=True)
                self._log = instance.log.open("wb", buffering=0)
            self.process = subprocess.Popen(
                instance.command,
                env={**os.environ, **instance.settings},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,  # a Ctrl-C in the terminal is ours to hand on, once
                preexec_fn=lambda: _prepare(instance),
            )
        except OSError as error:
            if self._log is not None and instance.log is not None:
                self._log.close()
                instance.log.unlink()
            todo = "Is the program there, and may it be run? May the log be written?"
            raise OptionError("an instance that can be started", str(error), todo) from error
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)

    def runs(self) -> bool:
        """Whether its first process has not ended."""
        return self.process.poll() is None

    def read(self) -> bool:
        """Hand on what was printed; whether more may come."""
        try:
            text = os.read(self.output.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if self._log is not None:
            self._log.write(text)
        if self._mark:
            *lines, self._line = (self._line + text).split(b"\n")
            _show(b"".join(self._mark + line + b"\n" for line in lines))
        else:
            _show(text)
        return bool(text)

    def close(self) -> int:
        """Wait; the exit code. What lies in the pipe is handed on, and nothing is waited for."""
        code = self.process.wait()
        while _readable(self.output) and self.read():
            pass
        if self._mark and self._line:
            _show(self._mark + self._line + b"\n")
        self.output.close()
        if self._log is not None:
            self._log.close()
        code = 128 - code if code < 0 else code
        if code:
            name = f"instance {self.instance.index}" if self._mark else self.instance.command[0]
            print(f"launch: {name} ended with exit code {code}", file=sys.stderr, flush=True)
        return code


def _readable(output: IO[bytes]) -> bool:
    """Whether there is something to read, or the end."""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        return bool(selector.select(0))


def _show(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def _prepare(instance: Instance) -> None:
    """In the child: its cores and memory; it ends when the launcher does, however that does."""
    settle(instance)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _tell(watched: Sequence[_Watched], number: int) -> None:
    """Send a signal to each instance and all that it started."""
    for each in watched:
        try:
            os.killpg(each.process.pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def _asked_to_end() -> Iterator[list[int]]:
    """The signals that came meanwhile, in order."""
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in asked}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
