"""Folder and cache of the files that Inductor and Triton write for a graph of backend `ipex`.

Both get a folder of this process that holds the contents of a verified entry (`aot_cache.graphs`).
Models that another backend compiles are not affected.
"""

import contextlib
import ctypes
import functools
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.aot_cache import default_store
from ipex_inductor.aot_cache.digest import source_digest
from ipex_inductor.aot_cache.env_fingerprint import environment, triton_settings
from ipex_inductor.aot_cache.graph_files import graphs, workroom
from ipex_inductor.aot_cache.key import Key, Pairs, pairs
from ipex_inductor.aot_cache.toolkit import ONEDNN, compiler, compiler_identity, version_of
from ipex_inductor.compiler import timed_kernels
from ipex_inductor.reporting import decisions
from ipex_inductor.target import x86_levels
from ipex_inductor.target.device import architecture, current, instructions
from ipex_inductor.target.x86_levels import Level

NO_HEADERS = {"cpp_cache_precompile_headers": False}  # 150 MB in /tmp, and g++ run in every process


_looked_for: ContextVar[list[graphs.GraphFiles] | None] = ContextVar("looked_for", default=None)


@contextlib.contextmanager
def collect_files() -> Iterator[list[graphs.GraphFiles]]:
    """Collect the files of each graph that this thread compiles inside the block."""
    files: list[graphs.GraphFiles] = []
    token = _looked_for.set(files)
    try:
        yield files
    finally:
        _looked_for.reset(token)


class Folder:
    """The folder of one graph, forward and backward.

    Args:
        key: key of the cache entry; None: not cached.
        before_waiting: called before waiting for another process that compiles the graph.
        text: text of the graph.
        level: x86-64 level that it is compiled for; None: this CPU alone.
        others: further keys that the graph could have been found by.
    """

    def __init__(
        self,
        key: Key | None,
        before_waiting: Callable[[], None] = lambda: None,
        text: str = "",
        level: Level | None = None,
        others: tuple[Key, ...] = (),
    ) -> None:
        self.files = graphs.GraphFiles(key, not compat.graph_caches_are_off(), text, others)
        self.level = level
        self._before_waiting = before_waiting
        self._checks = _vector_checks()
        self._open = False

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Have torch work in the folder, and store its files at the end.

        Nothing is stored if an exception was raised.
        """
        if self._open:
            yield
            return
        self._open = True
        try:
            with self.files.alone(None if is_rank() else self._before_waiting):
                with self._cache_folder(), self._for_level():
                    yield
                self.files.keep()
                self._checks.keep()
            timed_kernels.follow(self.files.folder, self._cache_folder, self.files.keep)
        finally:
            self._open = False

    def _cache_folder(self) -> contextlib.AbstractContextManager[None]:
        return compat.cache_folder(self.files.folder, self._checks.answers)

    @contextlib.contextmanager
    def _for_level(self) -> Iterator[None]:
        """Compile for the level of the folder, under the cache paths of that level."""
        if self.level is None:
            yield
            return
        named = compat.use_portable_names(self.level.arch, compiler() or "g++")
        with x86_levels.target_level(self.level), named:
            yield

    @contextlib.contextmanager
    def enter_late(self) -> Iterator[None]:
        """Enter the folder for a backward graph, which AOT autograd saves after compiling."""
        until_saved = contextlib.ExitStack()
        until_saved.enter_context(self.enter())
        if not compat.at_end_of_compile(until_saved.close):
            with until_saved:
                yield
            return
        yield


@contextlib.contextmanager
def compiling(
    make_key: Callable[[Level | None], Key],
    report: decisions.GraphReport,
    before_waiting: Callable[[], None] = lambda: None,
    text: Callable[[], str] = str,
    served: Callable[[], Sequence[Level]] = tuple,
) -> Iterator[Folder | None]:
    """Yield a folder for the graph that is compiled inside; None if torch keeps its own folder.

    Args:
        make_key: returns the cache key for an x86-64 level; None: for this very kind of CPU.
        report: receives the outcome of the cache lookup.
        before_waiting: called before waiting for another process that compiles the graph.
        text: returns the text of the graph.
        served: returns levels whose entry serves if there is none for this very kind of CPU.
    """
    folder = None
    if not (reason := why_not_ours()):
        try:
            if compat.caches_forbidden():
                folder = Folder(None, before_waiting)
            else:
                key, level, other_keys = _find_key(make_key, served())
                folder = Folder(key, before_waiting, text(), level, other_keys)
        except (OSError, TypeError) as error:
            reason = f"cannot create a folder for Inductor's files: {error}"
    if folder is None:
        _log_once(reason)
        yield None
        return
    if (collected := _looked_for.get()) is not None:
        collected.append(folder.files)
    with folder.enter():
        yield folder
    wide = f"; for all CPUs of {folder.level.arch}" if folder.level else ""
    report.add("cache", folder.files.outcome, folder.files.reason + wide)


def _find_key(
    make_key: Callable[[Level | None], Key], served: Sequence[Level]
) -> tuple[Key, Level | None, tuple[Key, ...]]:
    """Return the key of a graph, its x86-64 level (None: this CPU), and keys that have no entry."""
    if ahead := x86_levels.compiled_ahead():
        return make_key(ahead), ahead, ()
    cpu_key, store = make_key(None), default_store.store()
    if store is None or not served or store.holds(cpu_key):
        return cpu_key, None, ()
    level_keys = {level: make_key(level) for level in served}
    for level, key in level_keys.items():
        if store.holds(key):
            return key, level, ()
    return cpu_key, None, tuple(level_keys.values())


def spare() -> contextlib.AbstractContextManager[None]:
    """Enter a temporary folder for a graph that is only lowered."""
    return _spare() if not why_not_ours() else contextlib.nullcontext()


def key_of(
    identity: Mapping[str, Any],
    problem: Mapping[str, Any],
    options: Mapping[str, Any],
    devices: set[torch.device],
    kind: str = graphs.KIND,
    level: Level | None = None,
) -> Key:
    """Return the key of a graph's cache entry.

    The key holds nothing of the host for a graph without the CPU among its `devices`, and no
    compiler for a graph of a `level`.

    Args:
        identity: the parts of the key that backend `ipex` depends on.
        problem: facts of the graph.
        options: Inductor's options.
        devices: the devices that the graph computes on.
        kind: kind of the entry.
        level: x86-64 level that it is compiled for; None: this CPU.

    Raises:
        TypeError: if a value has no exact digest.
    """
    on_gpu = any(device.type != "cpu" for device in devices)
    on_cpu = any(device.type == "cpu" for device in devices)
    changed = {
        f"torch._inductor.config.{k}": option_text(v) for k, v in compat.inductor_changes().items()
    }
    return Key(
        kind=kind,
        source=source_digest(),
        tables=(),
        options=pairs(
            {**identity, **{name: option_text(value) for name, value in options.items()}}
        ),
        problem=pairs(problem),
        architecture=level.arch if level else " and ".join(sorted(map(_architecture_of, devices))),
        toolkit=(("c++", "any"), *_toolkit(False)) if level else _toolkit(on_cpu),
        triton=version_of("triton") if on_gpu else "",
        torch=compat.VERSION,
        environment=pairs(
            {
                **compat.without_torchs_own(dict(environment(host=on_cpu and not level))),
                **dict(triton_settings()),
                **changed,
            }
        ),
    )


def _architecture_of(device: torch.device) -> str:
    """Return the architecture of a device; of a GPU with its name, as torch's own keys have it."""
    target = current(device)
    return target.arch if device.type == "cpu" else str(target)


def option_text(value: object) -> str:
    """Return the value of an option as text that is equal in every process."""
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


@contextlib.contextmanager
def _spare() -> Iterator[None]:
    try:
        folder = Folder(None)
    except OSError as error:
        _log_once(f"cannot create a folder for Inductor's files: {error}")
        yield
        return
    try:
        with folder.enter():
            yield
    finally:
        shutil.rmtree(folder.files.folder, ignore_errors=True)


def why_not_ours() -> str:
    """Return why torch keeps its own folder, "" if this backend's folder is used."""
    configured = compat.named_folder()
    if configured is None or workroom.is_room(configured):  # a child process inherits our folder
        return ""
    return (
        f"Inductor's files are stored unverified in {configured}, as TORCHINDUCTOR_CACHE_DIR says"
    )


def why_not_kept() -> str:
    """Return why another process must compile the graph again, "" if it finds it in the cache."""
    if reason := compat.why_no_graph_cache():
        return reason
    if why_not_ours():
        return ""  # torch keeps it by itself
    return "" if default_store.store() else "the folder of the kernel cache cannot be used"


def is_rank() -> bool:
    """Return True if this process is one of several that may wait for each other while compiling.

    With a process group, torch's own compilers may communicate; before there is one, ranks have
    other ways (a store, MPI) that cannot be detected. A redundant compilation costs less than a
    hung job.
    """
    distributed = torch.distributed
    together = distributed.is_available() and distributed.is_initialized()
    return together or os.environ.get("WORLD_SIZE", "1") != "1"


@functools.cache
def _log_once(reason: str) -> None:
    decisions.log.info("%s", reason)


def _vector_checks() -> graphs.VectorChecks:
    return _vector_checks_of(environment(), architecture())


@functools.lru_cache(maxsize=8)
def _vector_checks_of(variables: Pairs, arch: str) -> graphs.VectorChecks:
    return graphs.VectorChecks(
        Key(
            kind=graphs.CHECKS,
            source=source_digest(),
            tables=(),
            options=(),
            problem=(),
            architecture=arch,
            toolkit=_toolkit(),
            triton="",
            torch=compat.VERSION,
            environment=variables,
        )
    )


def onednn() -> str:
    """Return the version of oneDNN whose primitives generated code may call, "" without one.

    It is "" if the wheel is not installed, or if all libraries of the process see another oneDNN,
    e.g. through LD_PRELOAD.
    """
    return "" if hasattr(ctypes.CDLL(None), "dnnl_version") else version_of(ONEDNN)


def _toolkit(on_cpu: bool = True) -> Pairs:
    if not on_cpu:
        return pairs({"python": ".".join(platform.python_version_tuple()[:2])})
    tools = {"c++": compiler_identity(), "cpu": instructions(), "python": platform.python_version()}
    version = onednn()  # generated code may call its primitives
    return pairs(tools | ({"onednn": version} if version else {}))
