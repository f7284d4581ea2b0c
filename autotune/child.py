"""Measure in a separate process, so that a choice that crashes or hangs costs only that choice.

The parent writes one problem a line and reads one answer a line. The number of the running choice
is in a file that both processes map: reading a pipe during timing would cost the parent a core.
"""

import contextlib
import mmap
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ipex_inductor.autotune.record import Choice, Outcome, Problem, Record, encode

PATIENCE = 300.0  # seconds one choice may take for one step; compilation is the longest
POLL = 0.25
_WORD = 8  # bytes of each field: a counter of starts, and the running choice or -1
CRASHES = 8  # crashes of one problem before it is given up


class Task(msgspec.Struct, frozen=True):
    """A request to the child: a problem, its earlier failures, and the time limit in seconds."""

    problem: Problem
    out: tuple[Outcome, ...]
    seconds: float


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message from the child: first the choices, then a record or the reason for its lack."""

    choices: tuple[Choice, ...] = ()
    record: Record | None = None
    reason: str = ""


Tuned = tuple[Problem, Record | str]  # or the reason why there is no record
SPENT = "the budget is spent"


class Refused(Exception):
    """Raised for a problem that cannot be measured here, with the reason."""


class Child:
    """A process that measures problems, started on demand and restarted after it died.

    `command` starts it; it must call `serve`. `patience` is in seconds.
    """

    def __init__(self, command: Sequence[str], patience: float = PATIENCE) -> None:
        self._command = [*command]
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = b""

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tune(self, problem: Problem, seconds: float) -> Record:
        """Return a record of all choices of `problem`; raise `Refused` if none can be measured.

        A choice at which the process crashes or hangs is recorded as failed, and the process is
        restarted, at most `CRASHES` times. `seconds` is the time limit for all choices together.
        """
        out: list[Outcome] = []
        deadline = time.monotonic() + seconds
        while True:
            self._start()
            choices: tuple[Choice, ...] = ()
            self._send(Task(problem, tuple(out), max(0.0, deadline - time.monotonic())))
            try:
                while True:
                    answer = self._answer()
                    if answer.reason:
                        raise Refused(answer.reason)
                    if answer.record is not None:
                        return answer.record
                    choices = answer.choices
            except _Died as died:
                at = self._doing()
                self.close()
                if died.killed or not 0 <= at < len(choices) or len(out) >= CRASHES:
                    raise Refused(f"the measuring process {died}") from None
                out.append(Outcome(choices[at], reason=f"it {died}"))

    def close(self) -> None:
        """Kill the process and its compilers, and close its pipes and files."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and its compilers
        process.wait()
        for pipe in (process.stdin, self._pipe):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._status.close()
        self._file.close()
        self._answers = b""

    def _start(self) -> None:
        """Start the process unless it runs; map the status file that both share."""
        if self._process is not None:
            return
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._file.write(bytes(2 * _WORD))
        self._file.flush()
        self._status = mmap.mmap(self._file.fileno(), 2 * _WORD)
        reading, writing = os.pipe()
        fds = (writing, self._file.fileno())
        self._pipe = os.fdopen(reading, "rb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [*self._command, *map(str, fds)],
                stdin=subprocess.PIPE,
                stdout=2,  # output of libraries must not mix with answers
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except BaseException:
            for resource in (self._pipe, self._status, self._file):
                resource.close()
            raise
        finally:
            os.close(writing)

    def _send(self, task: Task) -> None:
        """Write one task to the process; a broken pipe is left for `_answer` to report."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: the answer will say so
            self._process.stdin.write(encode(task) + b"\n")
            self._process.stdin.flush()

    def _answer(self) -> Answer:
        """Return the next answer; raise `_Died` if the process ended or hung before it came."""
        assert self._process is not None
        last_status, changed_at = b"", time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while b"\n" not in self._answers:
                if selector.select(POLL):
                    data = self._pipe.read(1 << 16)
                    if not data:
                        raise self._end()
                    self._answers += data
                elif self._process.poll() is not None:
                    raise self._end()  # its compilers may still hold the pipe open
                status = self._status[:]
                if status != last_status:
                    last_status, changed_at = status, time.monotonic()
                elif time.monotonic() - changed_at > self._patience:
                    raise _Died(f"hung: nothing happened for {self._patience:g} seconds")
        line, self._answers = self._answers.split(b"\n", 1)
        return msgspec.json.decode(line, type=Answer)

    def _doing(self) -> int:
        """Return the number of the running choice; -1 for none."""
        return int.from_bytes(self._status[_WORD:], "little", signed=True)

    def _end(self) -> "_Died":
        """Wait for the process to end and return an exception that says how it ended."""
        assert self._process is not None
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return _Died("was killed, perhaps for want of memory", killed=True)
        crashed = f"crashed with {signal.Signals(-code).name}" if code < 0 else ""
        return _Died(crashed or f"ended with {code}")


class _Died(Exception):
    """Raised when the process ended; the message is a predicate, such as "crashed with SIGSEGV".

    `killed` says that it was killed from outside, which is not the fault of a choice.
    """

    def __init__(self, how: str, killed: bool = False) -> None:
        super().__init__(how)
        self.killed = killed


class Say:
    """Messages from the child to the parent during measurement."""

    def __init__(self, answers: Any, status: mmap.mmap) -> None:
        self._answers, self._status, self._begun = answers, status, 0

    def choices(self, choices: tuple[Choice, ...]) -> None:
        """Send the choices; `doing` refers to them by their position."""
        self.answer(Answer(choices=choices))

    def doing(self, number: int) -> None:
        """Publish the number of the choice that runs from now on; -1 for none."""
        self._begun += 1
        self._status[:] = self._begun.to_bytes(_WORD, "little") + number.to_bytes(
            _WORD, "little", signed=True
        )

    def answer(self, answer: Answer) -> None:
        """Write one answer to the parent, as a line."""
        self._answers.write(encode(answer) + b"\n")
        self._answers.flush()


def serve(
    make: Callable[[Say], Callable[[Problem, Sequence[Outcome], float], Record]],
) -> None:
    """Run the child's main loop: one task a line until the parent closes the pipe.

    `make` builds the function that measures: it takes a problem, the earlier failures and a time
    limit in seconds, and returns a record. An exception is answered with its message as the reason;
    only `torch.AcceleratorError` ends the process.
    """
    import torch  # here: the parent needs only this module's types

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    writing, shared = map(int, sys.argv[-2:])
    status = mmap.mmap(shared, 2 * _WORD)
    with os.fdopen(writing, "wb") as answers:
        say = Say(answers, status)
        tune = make(say)
        for line in sys.stdin.buffer:
            task = msgspec.json.decode(line, type=Task)
            say.doing(-1)
            try:
                answer = Answer(record=tune(task.problem, task.out, task.seconds))
            except torch.AcceleratorError:
                raise  # the device is unusable: the running choice is at fault
            except Exception as error:
                answer = Answer(reason=f"{type(error).__name__}: {error}"[:2000])
            say.answer(answer)


def _end_with(parent: int) -> None:
    """End this process and its compilers once `parent` has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)
