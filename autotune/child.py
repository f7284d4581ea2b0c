"""Measuring in a process of its own, so that a choice that crashes or hangs costs that choice.

The parent writes a problem a line and reads answers a line; which choice is at work stands in a
file both have mapped, because a pipe that is read while clocks run would cost the parent's core.
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

PATIENCE = 300.0  # seconds that one choice may take for one step: compiling is the longest
POLL = 0.25
_WORD = 8  # bytes: how often something began; the number of the choice at work, or -1
CRASHES = 8  # of one problem, before it is given up


class Task(msgspec.Struct, frozen=True):
    """What the child is asked: a problem, what of it failed before, how many seconds it has."""

    problem: Problem
    out: tuple[Outcome, ...]
    seconds: float


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the child says: first the choices, then a record or why there is none."""

    choices: tuple[Choice, ...] = ()
    record: Record | None = None
    reason: str = ""


Tuned = tuple[Problem, Record | str]  # or the reason why there is no record
SPENT = "the budget is spent"


class Refused(Exception):
    """A problem that cannot be measured here, with the reason."""


class Child:
    """A process that measures problems, started when it is needed and anew when it died.

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
        """Measure all choices of `problem`. Raises `Refused` if nothing can be."""
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
        """End the process, whatever it does."""
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
        if self._process is not None:
            return
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  for as long as the process
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
                stdout=2,  # what libraries print is no answer
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except BaseException:
            for opened in (self._pipe, self._status, self._file):
                opened.close()
            raise
        finally:
            os.close(writing)

    def _send(self, task: Task) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: the answer will say so
            self._process.stdin.write(encode(task) + b"\n")
            self._process.stdin.flush()

    def _answer(self) -> Answer:
        """The next line. Raises `_Died` if the process ended, or had to be, before it came."""
        assert self._process is not None
        seen, since = b"", time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while b"\n" not in self._answers:
                if selector.select(POLL):
                    read = self._pipe.read(1 << 16)
                    if not read:
                        raise self._end()
                    self._answers += read
                elif self._process.poll() is not None:
                    raise self._end()  # compilers of its own may still hold the pipe
                now = self._status[:]
                if now != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > self._patience:
                    raise _Died(f"hung: nothing happened for {self._patience:g} seconds")
        line, self._answers = self._answers.split(b"\n", 1)
        return msgspec.json.decode(line, type=Answer)

    def _doing(self) -> int:
        return int.from_bytes(self._status[_WORD:], "little", signed=True)

    def _end(self) -> "_Died":
        assert self._process is not None
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return _Died("was killed, perhaps for want of memory", killed=True)
        crashed = f"crashed with {signal.Signals(-code).name}" if code < 0 else ""
        return _Died(crashed or f"ended with {code}")


class _Died(Exception):
    """How the process ended, as a predicate; `killed` by somebody else, which no choice does."""

    def __init__(self, how: str, killed: bool = False) -> None:
        super().__init__(how)
        self.killed = killed


class Say:
    """What the child tells while it measures."""

    def __init__(self, answers: Any, status: mmap.mmap) -> None:
        self._answers, self._status, self._begun = answers, status, 0

    def choices(self, choices: tuple[Choice, ...]) -> None:
        """Which ones there are; their order is that of the numbers."""
        self.answer(Answer(choices=choices))

    def doing(self, number: int) -> None:
        """The choice that is at work from now on, -1 for none."""
        self._begun += 1
        self._status[:] = self._begun.to_bytes(_WORD, "little") + number.to_bytes(
            _WORD, "little", signed=True
        )

    def answer(self, answer: Answer) -> None:
        """One line to the parent."""
        self._answers.write(encode(answer) + b"\n")
        self._answers.flush()


def serve(
    make: Callable[[Say], Callable[[Problem, Sequence[Outcome], float], Record]],
) -> None:
    """The child's main loop: a task a line until the parent closes the pipe."""
    import torch  # which whoever only reads this module's types need not wait for

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
                raise  # the device answers nothing any more: the choice at work is to blame
            except Exception as error:
                answer = Answer(reason=f"{type(error).__name__}: {error}"[:2000])
            say.answer(answer)


def _end_with(parent: int) -> None:
    """End this process and its compilers when `parent` did, whatever the other threads do."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)
