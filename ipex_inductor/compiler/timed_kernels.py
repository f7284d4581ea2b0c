"""Inductor's Triton kernels that are timed, and compiled for that, when they first run.

Coordinate descent compiles some tens of configurations of a kernel in its first call, and kernels
with several are timed there. That is done in the folder of their graph: the fastest of each becomes
a part of the graph's entry, and another process takes it from there, without timing.
"""

import functools
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

_GROUP = "__grp__*.json"  # lies in each of Triton's folders that holds a kernel


def follow(
    folder: Path, within: Callable[[], AbstractContextManager[None]], done: Callable[[], None]
) -> None:
    """Have each kernel of the code in `folder` run `within` until it was timed.

    `done` is called when all of them were. One that never runs keeps what was found of the others
    to this process.
    """
    kernels = [kernel for kernel in _kernels_in(folder) if _is_timed(kernel)]
    tried: set[Path] = set()  # by these kernels' own runs; a backward's are not ours to remove
    left = set(map(id, kernels))

    def first(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        with within():
            with suppress(Exception):  # what is not to be had is timed
                kernel.launchers = [_recalled(kernel)]
            before = frozenset(_binaries(folder))
            result = type(kernel).run(kernel, *args, **kwargs)
            tried.update(frozenset(_binaries(folder)) - before)
        if vars(kernel).pop("run", None):  # and not by another thread
            left.discard(id(kernel))
            if not left:
                _forget_slower(tried, [*kernels, *_kernels_in(folder)])
                done()
        return result

    for kernel in kernels:
        _look_into(kernel, folder)
        kernel.run = functools.partial(first, kernel)


def _kernels_in(folder: Path) -> Iterator[Any]:
    """Those that Inductor's code in `folder` calls, once each."""
    heuristics = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    if heuristics is None:
        return
    from torch._inductor.codecache import PyCodeCache

    found = {}
    for module in getattr(PyCodeCache, "modules", ()):
        path = getattr(module, "__file__", None)
        if path and hasattr(module, "call") and Path(path).is_relative_to(folder):
            values = vars(module).values()
            found.update({id(v): v for v in values if isinstance(v, heuristics.CachingAutotuner)})
    yield from found.values()


def _is_timed(kernel: Any) -> bool:
    """Whether its next run times something; not if that is followed already."""
    about = kernel.inductor_meta
    descends = about.get("coordinate_descent_tuning") or about.get("combo_tuning_groups")
    known = len(kernel.launchers) == 1 and _is_found(kernel.launchers[0].config)
    return "run" not in vars(kernel) and (
        len(kernel.launchers) != 1 or (bool(descends) and not known)
    )


def _is_found(config: Any) -> bool:
    return bool(getattr(config, "found_by_coordesc", False))


def _look_into(kernel: Any, folder: Path) -> None:
    """Have it keep what it finds beside its source here, and not where it was first compiled."""
    cache = getattr(kernel.save_cache_hook, "__self__", None)
    source = folder.joinpath(*Path(kernel.filename or "").parts[-2:])
    if source.is_file():
        kernel.filename = str(source)
        if cache is not None and cache.local_cache:
            backend, key = cache.local_cache
            cache.local_cache = backend, str(source.parent / Path(key).name)


def _recalled(kernel: Any) -> Any:
    """The launcher of what another process found to be the fastest; raises if that is not known."""
    configs = [launcher.config for launcher in kernel.launchers]
    best = kernel.save_cache_hook.__self__.read_best(kernel.inductor_meta, configs)
    best.found_by_combo_autotune = True  # what was kept last is what came out of all of it
    for launcher in kernel.launchers:
        if launcher.config is best:
            return launcher
    if kernel.fn.fn is None:  # a worker compiled it
        kernel.fn = kernel._reload_kernel().fn
    return kernel._precompile_config(best).make_launcher()


def _binaries(folder: Path) -> Iterator[Path]:
    yield from {group.parent for group in folder.rglob(_GROUP)}


def _forget_slower(tried: Iterable[Path], kernels: Iterable[Any]) -> None:
    """Remove what was compiled to be timed only."""
    used = {launcher.cache_hash for kernel in kernels for launcher in kernel.launchers}
    for binary in tried:
        if binary.name not in used:
            shutil.rmtree(binary, ignore_errors=True)
