"""Inductor's Triton kernels that are timed, and compiled for it, when they first run.

Coordinate descent compiles some tens of configurations of a kernel in its first call, and kernels
with several configurations are timed there. This happens in the folder of their graph: the fastest
of each kernel becomes part of the graph's entry, and another process loads it without timing.
"""

import functools
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

_GROUP = "__grp__*.json"  # file in each of Triton's folders that holds a kernel


def follow(
    folder: Path, within: Callable[[], AbstractContextManager[None]], done: Callable[[], None]
) -> None:
    """Run each kernel of the code in `folder` inside a `within` block until it was timed.

    Results of the other kernels stay in this process if one of them never runs.

    Args:
        folder: folder of the graph.
        within: returns a context that directs Triton's files to the folder.
        done: called when all kernels were timed.
    """
    kernels = [kernel for kernel in _kernels_in(folder) if _is_timed(kernel)]
    # Files that these kernels' own runs compiled; files of a backward graph must stay.
    tried: set[Path] = set()
    pending = set(map(id, kernels))

    def first_run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        with within():
            with suppress(Exception):  # a kernel without a stored result is timed
                kernel.launchers = [_load_fastest(kernel)]
            before = frozenset(_binaries(folder))
            result = type(kernel).run(kernel, *args, **kwargs)
            tried.update(frozenset(_binaries(folder)) - before)
        if vars(kernel).pop("run", None):  # unless another thread was first
            pending.discard(id(kernel))
            if not pending:
                _forget_slower(tried, [*kernels, *_kernels_in(folder)])
                done()
        return result

    for kernel in kernels:
        _redirect_results(kernel, folder)
        kernel.run = functools.partial(first_run, kernel)


def _kernels_in(folder: Path) -> Iterator[Any]:
    """Yield the kernels that Inductor's code in `folder` calls, once each."""
    heuristics = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    if heuristics is None:
        return
    from torch._inductor.codecache import PyCodeCache

    kernels = {}
    for module in getattr(PyCodeCache, "modules", ()):
        path = getattr(module, "__file__", None)
        if path and hasattr(module, "call") and Path(path).is_relative_to(folder):
            values = vars(module).values()
            kernels.update({id(v): v for v in values if isinstance(v, heuristics.CachingAutotuner)})
    yield from kernels.values()


def _is_timed(kernel: Any) -> bool:
    """Return True if the next run of the kernel times something; False if already followed."""
    about = kernel.inductor_meta
    descends = about.get("coordinate_descent_tuning") or about.get("combo_tuning_groups")
    is_tuned = len(kernel.launchers) == 1 and _is_descent_result(kernel.launchers[0].config)
    return "run" not in vars(kernel) and (
        len(kernel.launchers) != 1 or (bool(descends) and not is_tuned)
    )


def _is_descent_result(config: Any) -> bool:
    return bool(getattr(config, "found_by_coordesc", False))


def _redirect_results(kernel: Any, folder: Path) -> None:
    """Redirect the results of a kernel to its source in `folder`, if compiled elsewhere."""
    cache = getattr(kernel.save_cache_hook, "__self__", None)
    source = folder.joinpath(*Path(kernel.filename or "").parts[-2:])
    if source.is_file():
        kernel.filename = str(source)
        if cache is not None and cache.local_cache:
            backend, key = cache.local_cache
            cache.local_cache = backend, str(source.parent / Path(key).name)


def _load_fastest(kernel: Any) -> Any:
    """Return the launcher that another process found fastest; raise if none is stored."""
    configs = [launcher.config for launcher in kernel.launchers]
    best = kernel.save_cache_hook.__self__.read_best(kernel.inductor_meta, configs)
    best.found_by_combo_autotune = True  # the last stored result is the final one
    for launcher in kernel.launchers:
        if launcher.config is best:
            return launcher
    if kernel.fn.fn is None:  # compiled by a worker process
        kernel.fn = kernel._reload_kernel().fn
    return kernel._precompile_config(best).make_launcher()


def _binaries(folder: Path) -> Iterator[Path]:
    yield from {group.parent for group in folder.rglob(_GROUP)}


def _forget_slower(tried: Iterable[Path], kernels: Iterable[Any]) -> None:
    """Remove kernels that were compiled only to be timed."""
    used = {launcher.cache_hash for kernel in kernels for launcher in kernel.launchers}
    for binary in tried:
        if binary.name not in used:
            shutil.rmtree(binary, ignore_errors=True)
