"""Lines on stderr while a compile takes long: what is compiled, and what is being done meanwhile.

A thread waits beside each compile until that ends, so that a short one costs a thread's start. What
is being done is read off the stack of the thread that compiles: no other module marks its phases.
The lines are plain, on a terminal too, where a spinner would fight with the program's own bars.
"""

import contextlib
import contextvars
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.compiler import graph_cache
from ipex_inductor.config import CompileConfig
from ipex_inductor.reporting import decisions

FIRST = 5.0  # seconds until a line says what is compiled
SECOND = 20.0  # seconds until a line says what is being done
# Seconds between two compiles of one thread from which on the second has lines of its own: graphs
# that a model breaks into follow each other sooner, and are one wait to who waits.
PAUSE = 2.0

# What is being done, by the ends of the paths of files; the innermost frame decides.
PHASES = {
    "waiting for a process that compiles the same": (
        "aot_cache/lock.py",
        "aot_cache/single_flight.py",
    ),
    "timing kernels": (
        *(
            "_inductor/select_algorithm.py",
            "_inductor/autotune_process.py",
            "lowerings/tune/tuner.py",
        ),
        *("_inductor/runtime/benchmarking.py", "autotune/measure.py"),
    ),
    "compiling Triton kernels": (
        *("triton/compiler/compiler.py", "_inductor/runtime/triton_heuristics.py"),
    ),
    "waiting for the compilers of its kernels": ("_inductor/async_compile.py",),
    "compiling C++": (
        *("_inductor/cpp_builder.py", "_inductor/codecache.py"),
        *("templates/build/cpp.py", "templates/cpu/cpu_library.py"),
    ),
    "generating code": ("_inductor/scheduler.py", "_inductor/codegen/common.py"),
    "lowering its operations": ("_inductor/graph.py", "_inductor/lowering.py"),
    "rewriting the graph": (
        *("_inductor/pattern_matcher.py", "_inductor/fx_passes/joint_graph.py"),
        *("_inductor/fx_passes/post_grad.py", "ipex_inductor/passes/joint.py"),
    ),
    "choosing kernels": ("ipex_inductor/compiler/kernel_selection.py",),
    "dividing it into forward and backward": ("_functorch/partitioners.py",),
    "tracing": ("_functorch/_aot_autograd/graph_capture.py", "fx/experimental/proxy_tensor.py"),
}
UNKNOWN = "between two phases"
NEXT = "the next process"
TORCH = str(Path(torch.__file__).parent)
SOURCE = re.compile(r'File "(.+)", line (\d+)')


@contextlib.contextmanager
def told(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], config: CompileConfig, backward: bool = False
) -> Iterator[None]:
    """Say on stderr what is compiled inside, once that has taken `FIRST` seconds.

    Nothing is said inside of another such block of the thread, with option `progress` off, where
    our log is set above warnings, and by any but the first process of a machine.
    """
    if _wait.inside or not config.progress or not _is_wanted():
        yield
        return
    _wait.begin()
    # The settings of this thread, some of which are context variables, say what is kept.
    watch = _Watch(_wait.since, _wait.said, contextvars.copy_context(), gm, inputs, backward)
    try:
        yield
    finally:
        _wait.end(watch.end())


class _Wait(threading.local):
    """What the thread has waited for without a pause, through one compile or several."""

    inside = False
    since = until = -PAUSE  # of time.monotonic()
    said = 0  # lines

    def begin(self) -> None:
        now = time.monotonic()
        if now - self.until >= PAUSE:
            self.since, self.said = now, 0
        self.inside = True

    def end(self, said: int) -> None:
        self.inside, self.until, self.said = False, time.monotonic(), said


_wait = _Wait()


class _Watch:
    """A thread beside one compile of the thread that makes it, which writes the lines when due."""

    def __init__(
        self,
        since: float,
        said: int,
        context: contextvars.Context,
        gm: torch.fx.GraphModule,
        inputs: Sequence[Any],
        backward: bool,
    ) -> None:
        self._since, self._said = since, said
        # Which model it is Dynamo knows in the thread that compiles, and only while it does.
        self._about: tuple[Any, ...] = (compat.traced_name(), gm, inputs, backward)
        self._compiling = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)
        if said < 2:
            self._thread.start()

    def end(self) -> int:
        """Let the thread go; return how many lines were written so far. Never waits for it."""
        self._ended.set()
        self._about = ()  # the thread may end a little later, and is to keep no graph alive
        return self._said

    def _run(self) -> None:
        lines = ((FIRST, self._what), (SECOND, self._how))
        for due, line in lines[self._said :]:
            if self._ended.wait(max(0.0, self._since + due - time.monotonic())):
                return
            self._said += 1
            with contextlib.suppress(Exception):  # a line is not worth a compile's failure
                _write(line())

    def _what(self) -> str:
        why = graph_cache.why_not_kept()
        again = f"will compile it again, as {why}" if why else "will find it in the kernel cache"
        return f"compiling {name_of(*self._about)} takes longer than {FIRST:.0f} s; {NEXT} {again}"

    def _how(self) -> str:
        seconds = time.monotonic() - self._since
        return f"still compiling {name_of(*self._about)} after {seconds:.0f} s: {self._phase()}"

    def _phase(self) -> str:
        return phase(sys._current_frames().get(self._compiling))


def name_of(name: str, gm: torch.fx.GraphModule, inputs: Sequence[Any], backward: bool) -> str:
    """Return what a graph is: "MyModel (cuda)", "the graph of model.py:7 (backward, cpu)"."""
    places = {t.device.type for t in (*inputs, *gm.parameters()) if isinstance(t, torch.Tensor)}
    facts = [*(["backward"] if backward else []), *sorted(places)]
    return f"{name or _source_of(gm)}" + f" ({', '.join(facts)})" * bool(facts)


def _source_of(gm: torch.fx.GraphModule) -> str:
    """Return the line of the user's source that the first operation comes from."""
    traces = (node.stack_trace for node in gm.graph.nodes if node.stack_trace)
    found = [each for each in SOURCE.findall(next(traces, "")) if TORCH not in each[0]]
    return f"the graph of {Path(found[-1][0]).name}:{found[-1][1]}" if found else "a graph"


def phase(frame: Any) -> str:
    """Return what the thread with this innermost frame is doing."""
    while frame is not None:
        file = frame.f_code.co_filename
        for what, files in PHASES.items():
            if file.endswith(files):
                return what
        frame = frame.f_back
    return UNKNOWN


def _is_wanted() -> bool:
    """Return whether lines of this process are to be seen."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    return is_first and decisions.log.isEnabledFor(logging.WARNING)


def _write(line: str) -> None:
    """Write a line to stderr, which may be closed, or not there."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"ipex: {line}\n")
            sys.stderr.flush()
