"""Pause the garbage collector while a graph is looked up and nothing is compiled.

Importing Inductor and loading a graph create hundreds of thousands of long-lived objects. Full
collections meanwhile walk them and all objects of torch in vain. Dynamo's tracing creates such
objects too, but it may run user code, and the backend of its graph is not known yet: collection is
only postponed then. Dynamo is imported before it calls this backend; if this package was imported
earlier, collection is paused during that import too, for whichever backend it happens.
"""

import contextlib
import functools
import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

DYNAMO = "torch._dynamo"

# Objects. Python 3.12 freezes some hundreds at its start; a user's own freeze has many more.
_PYTHONS = 5_000
_PUT_OFF = 500_000  # objects; tracing ResNet-50 leaves 94 000
_pausing: set[int] = set()  # ids of threads
_usual: tuple[int, int, int] | None = None  # the user's thresholds, while collection is postponed
_was_on = True
_lock = threading.Lock()


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Disable the collector until the block ends or this thread calls `resume`.

    Blocks of threads may overlap: the last one enables it again. A collector that was disabled
    stays so, but a `gc.disable()` of another thread inside the block is undone, as it cannot be
    distinguished. A nested block of a thread has no effect.
    """
    global _was_on
    if threading.get_ident() in _pausing:
        yield
        return
    with _lock:
        if not _pausing:
            _was_on = gc.isenabled()
            gc.disable()
        _pausing.add(threading.get_ident())
    try:
        yield
    finally:
        resume()


def pause_while_dynamo_is_imported() -> None:
    """Pause the collector during a later import of Dynamo; do nothing if it is imported already."""
    if DYNAMO not in sys.modules and _DynamosFinder not in sys.meta_path:
        sys.meta_path.insert(0, _DynamosFinder)


def postpone() -> None:
    """Collect only after half a million new objects, instead of some hundreds, until `resume`.

    A threshold that is as high already, or a disabled collector, stays.
    """
    global _usual
    with _lock:
        thresholds = gc.get_threshold()
        if _usual is None and 0 < thresholds[0] < _PUT_OFF:
            _usual = thresholds
            gc.set_threshold(_PUT_OFF, *thresholds[1:])


def resume() -> None:
    """Collect normally again in this thread, before work that may create much garbage."""
    with _lock:
        _restore_thresholds()
        if threading.get_ident() in _pausing:
            _pausing.remove(threading.get_ident())
            if not _pausing and _was_on:
                _age_new_objects()
                gc.enable()


def _restore_thresholds() -> None:
    """Restore the thresholds, unless the user has set others meanwhile."""
    global _usual
    if _usual and gc.get_threshold()[0] == _PUT_OFF:  # else the user has set another one
        gc.set_threshold(*_usual)
        _age_new_objects()
    _usual = None


def _age_new_objects() -> None:
    """Move new objects to the oldest generation, as most of them are long-lived.

    Else a collection that walks everything is due at once. Objects that users froze must stay
    frozen.
    """
    if gc.get_freeze_count() < _PYTHONS:
        gc.freeze()
        gc.unfreeze()


class _DynamosFinder:
    """Find Dynamo as the finders after it do, and pause the collector during its import.

    Code that only looks for Dynamo gets their result, and no pause. It stays in `sys.meta_path`:
    another thread that iterates over the list would skip a finder if this one were removed.
    """

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of Dynamo if it is not imported yet, else None."""
        if name != DYNAMO or name in sys.modules:
            return None
        finders = iter(sys.meta_path)
        any(finder is cls for finder in finders)  # advances the iterator past this finder
        specs = (f.find_spec(name, path, target) for f in finders if hasattr(f, "find_spec"))
        spec = next(filter(None, specs), None)
        if spec and isinstance(spec.loader, SourceFileLoader):
            execute_once = functools.partial(_execute, spec.loader)
            # No other module has this loader.
            spec.loader.__dict__.setdefault("exec_module", execute_once)
        return spec


def _execute(loader: SourceFileLoader, module: ModuleType) -> None:
    """Execute a module with the collector paused, and restore the loader's own method."""
    loader.__dict__.pop("exec_module", None)
    with pause():
        loader.exec_module(module)


def _reset_in_child() -> None:
    """Reset the state in a forked child, which has no other threads to resume."""
    global _lock
    _lock = threading.Lock()
    _restore_thresholds()
    if _pausing:
        _pausing.clear()
        if _was_on:
            gc.enable()


os.register_at_fork(after_in_child=_reset_in_child)
