"""Processes pinned to their own cores, watched by one launcher: output, exit codes, end.

Imports no torch, and starts no thread, so that the code between fork and exec is safe.
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

GRACE = 10.0  # seconds between the first signal and SIGKILL
TICK = 0.05  # seconds; the longest delay until the end of a process is noticed
BIND = 2  # MPOL_BIND
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_MEMPOLICY = SET_MEMPOLICY.get(os.uname().machine)


@dataclass(frozen=True)
class Instance:
    """One process: its cores, the NUMA nodes of its memory, and additions to its environment."""

    index: int
    command: tuple[str, ...]
    cores: tuple[int, ...]
    nodes: tuple[int, ...]
    settings: Mapping[str, str]
    log: Path | None = None


def become(instance: Instance) -> NoReturn:
    """Replace this process by the instance; terminal, signals and exit code become its own."""
    settle(instance)
    os.execvpe(instance.command[0], instance.command, {**os.environ, **instance.settings})


def settle(instance: Instance) -> None:
    """Bind this process to the cores and the memory nodes of `instance`.

    Where the system forbids to set the memory nodes (in some containers), Linux's default applies:
    the node whose core touches the memory first.
    """
    os.sched_setaffinity(0, instance.cores)
    if _MEMPOLICY is not None:
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask = (ctypes.c_ulong * (max(instance.nodes) // bits + 1))()
        for node in instance.nodes:
            mask[node // bits] |= 1 << node % bits
        _libc.syscall(_MEMPOLICY, BIND, mask, len(mask) * bits + 1)


def run(instances: Sequence[Instance]) -> int:
    """Start all instances and wait; return the exit code of the first failed one by index, else 0.

    An instance that signal N ended counts as 128 + N. On Ctrl-C, SIGTERM or SIGHUP the signal goes
    once to each instance and all its children; they are killed after `GRACE` seconds, or on the
    second signal. Raises `OptionError` if an instance cannot be started; then none runs.
    """
    watched: list[_Watched] = []
    with _collect_end_signals() as signals, selectors.DefaultSelector() as selector:
        try:
            for instance in instances:
                watched.append(_Watched(instance, len(instances) > 1))
                selector.register(watched[-1].output, selectors.EVENT_READ, watched[-1])
            sent, deadline = 0, float("inf")
            while any(instance_process.runs() for instance_process in watched):
                for key, _ in selector.select(TICK):
                    if not key.data.read():
                        selector.unregister(key.fileobj)
                if sent < len(signals) or time.monotonic() > deadline:
                    kill = sent or time.monotonic() > deadline
                    _tell(watched, signal.SIGKILL if kill else signals[0])
                    sent, deadline = len(signals), time.monotonic() + GRACE
        except BaseException:
            _tell(watched, signal.SIGKILL)
            raise
        finally:
            codes = [instance_process.close() for instance_process in watched]
    if signals:
        return 128 + signals[0]
    return next((code for code in codes if code), 0)


class _Watched:
    """A started instance: a group of processes, and their output."""

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
                process_group=0,  # the launcher alone gets a Ctrl-C, and passes it on once
                preexec_fn=lambda: _prepare(instance),
            )
        except OSError as error:
            if self._log is not None and instance.log is not None:
                self._log.close()
                instance.log.unlink()
            advice = "Is the program there, and may it be run? May the log be written?"
            raise OptionError("an instance that can be started", str(error), advice) from error
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)

    def runs(self) -> bool:
        """Return whether the instance's first process is still running."""
        return self.process.poll() is None

    def read(self) -> bool:
        """Pass on the available output; return whether more may come."""
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
        """Wait for the process, pass on what the pipe holds, and return the exit code."""
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
    """Return whether `output` has data or its end to read, without waiting."""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        return bool(selector.select(0))


def _show(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def _prepare(instance: Instance) -> None:
    """Bind the child process to its cores and memory, and tie its life to the launcher's."""
    settle(instance)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _tell(watched: Sequence[_Watched], number: int) -> None:
    """Send a signal to each instance and all its children."""
    for process in watched:
        try:
            os.killpg(process.process.pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def _collect_end_signals() -> Iterator[list[int]]:
    """Collect the end signals that arrive meanwhile, in order."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    end_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in end_signals}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
