"""Progress lines on stderr while a compile takes long: the graph, then the current phase.

A thread waits beside each compile until the compile ends, so a short compile costs one thread
start. The phase is read off the stack of the compiling thread: no other module marks its phases.
The lines are plain on a terminal too, where a spinner would clash with the program's own bars.
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

FIRST = 5.0  # seconds until the line that names the graph
SECOND = 20.0  # seconds until the line that names the phase
# Minimum pause in seconds between two compiles of one thread for the second to get its own lines:
# the graphs that a model breaks into follow each other sooner, and are one wait for the user.
PAUSE = 2.0

# Phases, by suffixes of file paths on the stack; the innermost frame decides.
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
        *("templates/build/cpp.py", "templates/cpu/kernel_library.py"),
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
def show_progress(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], config: CompileConfig, backward: bool = False
) -> Iterator[None]:
    """Print on stderr what is compiled inside the block, once that has taken `FIRST` seconds.

    Nothing is printed inside another such block of the thread, with option `progress` off, if the
    log level is above warnings, and by processes other than the first of a machine.

    Args:
        gm: the graph.
        inputs: its inputs.
        config: options of the compilation.
        backward: True for a backward graph.
    """
    if _wait.inside or not config.progress or not _is_wanted():
        yield
        return
    _wait.begin()
    # The line depends on cache settings, some of which are context variables of this thread.
    watch = _Watch(_wait.since, _wait.said, contextvars.copy_context(), gm, inputs, backward)
    try:
        yield
    finally:
        _wait.end(watch.end())


class _Wait(threading.local):
    """State of the current wait of a thread, which may span several compiles without a pause."""

    inside = False
    since = until = -PAUSE  # of time.monotonic()
    said = 0  # lines printed

    def begin(self) -> None:
        time_now = time.monotonic()
        if time_now - self.until >= PAUSE:
            self.since, self.said = time_now, 0
        self.inside = True

    def end(self, lines: int) -> None:
        self.inside, self.until, self.said = False, time.monotonic(), lines


_wait = _Wait()


class _Watch:
    """A thread beside one compile that prints the lines when due."""

    def __init__(
        self,
        since: float,
        lines_printed: int,
        context: contextvars.Context,
        gm: torch.fx.GraphModule,
        inputs: Sequence[Any],
        backward: bool,
    ) -> None:
        self._since, self._said = since, lines_printed
        # Dynamo knows the name of the model only in the compiling thread, during the compile.
        self._about: tuple[Any, ...] = (compat.traced_name(), gm, inputs, backward)
        self._compiling = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)
        if lines_printed < 2:
            self._thread.start()

    def end(self) -> int:
        """Stop the thread without waiting for it; return the number of lines printed so far."""
        self._ended.set()
        self._about = ()  # the thread may end a little later, and must not keep the graph alive
        return self._said

    def _run(self) -> None:
        lines = ((FIRST, self._graph_line), (SECOND, self._phase_line))
        for due, line in lines[self._said :]:
            if self._ended.wait(max(0.0, self._since + due - time.monotonic())):
                return
            self._said += 1
            with contextlib.suppress(Exception):  # a progress line must not fail a compile
                _write(line())

    def _graph_line(self) -> str:
        line = f"compiling {name_of(*self._about)} takes longer than {FIRST:.0f} s"
        if compat.graph_caches_are_off():  # by our own tools: the user set nothing
            return line
        why = graph_cache.why_not_kept()
        again = f"will compile it again, as {why}" if why else "will find it in the kernel cache"
        return f"{line}; {NEXT} {again}"

    def _phase_line(self) -> str:
        seconds = time.monotonic() - self._since
        return f"still compiling {name_of(*self._about)} after {seconds:.0f} s: {self._phase()}"

    def _phase(self) -> str:
        return phase(sys._current_frames().get(self._compiling))


def name_of(name: str, gm: torch.fx.GraphModule, inputs: Sequence[Any], backward: bool) -> str:
    """Return the name of a graph: "MyModel (cuda)", "the graph of model.py:7 (backward, cpu)"."""
    device_types = {
        t.device.type for t in (*inputs, *gm.parameters()) if isinstance(t, torch.Tensor)
    }
    facts = [*(["backward"] if backward else []), *sorted(device_types)]
    return f"{name or _source_of(gm)}" + f" ({', '.join(facts)})" * bool(facts)


def _source_of(gm: torch.fx.GraphModule) -> str:
    """Return the line of the user's source of the first operation."""
    traces = (node.stack_trace for node in gm.graph.nodes if node.stack_trace)
    locations = [
        location for location in SOURCE.findall(next(traces, "")) if TORCH not in location[0]
    ]
    return (
        f"the graph of {Path(locations[-1][0]).name}:{locations[-1][1]}" if locations else "a graph"
    )


def phase(frame: Any) -> str:
    """Return the phase of the thread whose innermost frame is `frame`."""
    while frame is not None:
        file = frame.f_code.co_filename
        for what, files in PHASES.items():
            if file.endswith(files):
                return what
        frame = frame.f_back
    return UNKNOWN


def _is_wanted() -> bool:
    """Return True if this process prints progress lines."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    return is_first and decisions.log.isEnabledFor(logging.WARNING)


def _write(line: str) -> None:
    """Write a line to stderr, which may be closed or missing."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"ipex: {line}\n")
            sys.stderr.flush()
