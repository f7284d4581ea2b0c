"""Where Inductor and Triton keep the files of a graph that backend `ipex` compiles, and the cache.

Both get a folder of this process with what a verified entry holds (`aot_cache.graphs`); nothing of
it concerns a model that another backend compiles.
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
from ipex_inductor.aot_cache import default_store, graphs, workroom
from ipex_inductor.aot_cache.digest import source_digest
from ipex_inductor.aot_cache.env_fingerprint import environment, triton_settings
from ipex_inductor.aot_cache.key import Key, Pairs, pairs
from ipex_inductor.aot_cache.toolkit import ONEDNN, compiler, compiler_named, version_of
from ipex_inductor.compiler import timed_kernels
from ipex_inductor.reporting import decisions
from ipex_inductor.target import x86_levels
from ipex_inductor.target.device import architecture, current, instructions
from ipex_inductor.target.x86_levels import Level

NO_HEADERS = {"cpp_cache_precompile_headers": False}  # 150 MB in /tmp, and g++ run in every process


_looked_for: ContextVar[list[graphs.GraphFiles] | None] = ContextVar("looked_for", default=None)


@contextlib.contextmanager
def looked_for() -> Iterator[list[graphs.GraphFiles]]:
    """The files of each graph that is compiled inside, in this thread."""
    found: list[graphs.GraphFiles] = []
    token = _looked_for.set(found)
    try:
        yield found
    finally:
        _looked_for.reset(token)


class Folder:
    """The folder of one graph, forward and backward.

    `before_waiting`: done before another process is waited for that compiles the same. `level`: of
    CPUs, if it is compiled for all of one, and for this CPU alone if not. `others`: keys that it
    could have been found by as well.
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
    def entered(self) -> Iterator[None]:
        """Torch works in it; what it has built is kept at the end, if nothing was raised."""
        if self._open:
            yield
            return
        self._open = True
        try:
            with self.files.alone(None if is_rank() else self._before_waiting):
                with self._torchs(), self._for_level():
                    yield
                self.files.keep()
                self._checks.keep()
            timed_kernels.follow(self.files.folder, self._torchs, self.files.keep)
        finally:
            self._open = False

    def _torchs(self) -> contextlib.AbstractContextManager[None]:
        return compat.cache_folder(self.files.folder, self._checks.answers)

    @contextlib.contextmanager
    def _for_level(self) -> Iterator[None]:
        """Found or not, it is what that level's graph is, and lies where that is looked for."""
        if self.level is None:
            yield
            return
        named = compat.named_alike(self.level.arch, compiler() or "g++")
        with x86_levels.described(self.level), named:
            yield

    @contextlib.contextmanager
    def entered_late(self) -> Iterator[None]:
        """As `entered`, for a backward: AOT autograd saves it after it was compiled."""
        until_saved = contextlib.ExitStack()
        until_saved.enter_context(self.entered())
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
    """A folder of its own for the graph that is compiled inside; None where torch keeps its own.

    `text` is the graph's. It may be one of those levels', if it is there and none for the very kind
    of CPU here.
    """
    folder = None
    if not (reason := why_not_ours()):
        try:
            if compat.caches_forbidden():
                folder = Folder(None, before_waiting)
            else:
                key, level, others = _which(make_key, served())
                folder = Folder(key, before_waiting, text(), level, others)
        except (OSError, TypeError) as error:
            reason = f"no folder for Inductor's files: {error}"
    if folder is None:
        _tell(reason)
        yield None
        return
    if (heard := _looked_for.get()) is not None:
        heard.append(folder.files)
    with folder.entered():
        yield folder
    wide = f"; for all CPUs of {folder.level.arch}" if folder.level else ""
    report.add("cache", folder.files.outcome, folder.files.reason + wide)


def _which(
    make_key: Callable[[Level | None], Key], served: Sequence[Level]
) -> tuple[Key, Level | None, tuple[Key, ...]]:
    """The key of a graph, the level that it is of if it is, and the keys that nothing is under."""
    if ahead := x86_levels.compiled_ahead():
        return make_key(ahead), ahead, ()
    own, store = make_key(None), default_store.store()
    if store is None or not served or store.holds(own):
        return own, None, ()
    known = {level: make_key(level) for level in served}
    for level, key in known.items():
        if store.holds(key):
            return key, level, ()
    return own, None, tuple(known.values())


def spare() -> contextlib.AbstractContextManager[None]:
    """A folder for what is lowered and no more."""
    return _spare() if not why_not_ours() else contextlib.nullcontext()


def key_of(
    identity: Mapping[str, Any],
    problem: Mapping[str, Any],
    options: Mapping[str, Any],
    devices: set[torch.device],
    kind: str = graphs.KIND,
    level: Level | None = None,
) -> Key:
    """What a graph's entry is found by: ours of `backend`, the graph, and what it is compiled with.

    Of a graph without the CPU among its `devices` nothing of the host is in it, and of one for a
    `level` no compiler. Raises `TypeError` for what has no exact digest.
    """
    on_gpu = any(device.type != "cpu" for device in devices)
    on_cpu = any(device.type == "cpu" for device in devices)
    changed = {f"torch._inductor.config.{k}": said(v) for k, v in compat.inductor_changes().items()}
    return Key(
        kind=kind,
        source=source_digest(),
        tables=(),
        options=pairs({**identity, **{name: said(value) for name, value in options.items()}}),
        problem=pairs(problem),
        architecture=level.arch if level else " and ".join(sorted(map(_named, devices))),
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


def _named(device: torch.device) -> str:
    """Torch's own keys hold the name of a GPU too."""
    here = current(device)
    return here.arch if device.type == "cpu" else str(here)


def said(value: object) -> str:
    """A value of an option as text, the same in every process."""
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


@contextlib.contextmanager
def _spare() -> Iterator[None]:
    try:
        folder = Folder(None)
    except OSError as error:
        _tell(f"no folder for Inductor's files: {error}")
        yield
        return
    try:
        with folder.entered():
            yield
    finally:
        shutil.rmtree(folder.files.folder, ignore_errors=True)


def why_not_ours() -> str:
    """Why torch's own folder is left to it, "" if it is not."""
    named = compat.named_folder()
    if named is None or workroom.is_one(named):  # a child of ours inherits our own
        return ""
    return f"Inductor's files are kept unverified in {named}, as TORCHINDUCTOR_CACHE_DIR says"


def why_not_kept() -> str:
    """Return why another process has to compile what is compiled now as well, "" if it has not."""
    if reason := compat.why_no_graph_cache():
        return reason
    if why_not_ours():
        return ""  # torch keeps it by itself
    return "" if default_store.store() else "the folder of the kernel cache cannot be used"


def is_rank() -> bool:
    """Whether this is one of several processes that may wait for each other while they compile.

    With a process group torch's own compilers may talk to each other; before there is one, ranks
    have other ways (a store, MPI) that nobody sees. A compile too many costs less than a job.
    """
    distributed = torch.distributed
    together = distributed.is_available() and distributed.is_initialized()
    return together or os.environ.get("WORLD_SIZE", "1") != "1"


@functools.cache
def _tell(reason: str) -> None:
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
    """The version of the oneDNN whose primitives code of this process may call, "" without one.

    Without one where the wheel is not, or all libraries here see another, as of LD_PRELOAD.
    """
    return "" if hasattr(ctypes.CDLL(None), "dnnl_version") else version_of(ONEDNN)


def _toolkit(on_cpu: bool = True) -> Pairs:
    if not on_cpu:
        return pairs({"python": ".".join(platform.python_version_tuple()[:2])})
    told = {"c++": compiler_named(), "cpu": instructions(), "python": platform.python_version()}
    version = onednn()  # whose primitives code may call
    return pairs(told | ({"onednn": version} if version else {}))
