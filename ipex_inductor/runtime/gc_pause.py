"""The garbage collector of the process, off while a graph is looked for and nothing is compiled.

Importing Inductor and loading a graph make objects that stay, hundreds of thousands, and full
collections meanwhile walk them and all that torch has for nothing. Dynamo's tracing makes such
objects too, but users' code may run in it, and nobody knows yet whose graph it will be: then
collecting is only put off. Importing Dynamo comes before all that asks us; who has imported us
earlier still has it paused there, whatever backend Dynamo is imported for.
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

_PYTHONS = (
    5_000  # objects: Python 3.12 freezes some hundreds at its start, who asks for it many more
)
_PUT_OFF = 500_000  # objects; tracing ResNet-50 leaves 94 000
_pausing: set[int] = set()  # threads
_usual: tuple[int, int, int] | None = None  # thresholds, while collecting is put off
_was_on = True
_lock = threading.Lock()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """The collector is off until the block ends or this thread says `resume`.

    Threads may overlap: it is on again after the last of them. One that was off stays off, but a
    `gc.disable()` of another thread's meanwhile is undone: nothing tells it from ours. A block in
    another one of its thread's changes nothing.
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
    """Whenever that will be, and by whomever; nothing where Dynamo is there already."""
    if DYNAMO not in sys.modules and _DynamosFinder not in sys.meta_path:
        sys.meta_path.insert(0, _DynamosFinder)


def put_off() -> None:
    """Until a `resume`, collect when half a million objects are new, instead of some hundreds.

    Where users set a threshold as high, or have switched the collector off, that stays.
    """
    global _usual
    with _lock:
        now = gc.get_threshold()
        if _usual is None and 0 < now[0] < _PUT_OFF:
            _usual = now
            gc.set_threshold(_PUT_OFF, *now[1:])


def resume() -> None:
    """This thread goes on to what may leave much garbage."""
    with _lock:
        _put_off_no_longer()
        if threading.get_ident() in _pausing:
            _pausing.remove(threading.get_ident())
            if not _pausing and _was_on:
                _settle()
                gc.enable()


def _put_off_no_longer() -> None:
    global _usual
    if _usual and gc.get_threshold()[0] == _PUT_OFF:  # else the user has set another meanwhile
        gc.set_threshold(*_usual)
        _settle()
    _usual = None


def _settle() -> None:
    """Count as old, for the next full collection, what was made meanwhile: most of it stays.

    Else one that walks everything is due at once. What users froze must stay frozen.
    """
    if gc.get_freeze_count() < _PYTHONS:
        gc.freeze()
        gc.unfreeze()


class _DynamosFinder:
    """Finds Dynamo as the finders behind it do, and has its import pause the collector.

    Whoever only looks for Dynamo gets what they found, and no pause. It stays in `sys.meta_path`:
    another thread that goes through that list would miss a finder if this one were removed.
    """

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for all but Dynamo, and for that once it is there."""
        if name != DYNAMO or name in sys.modules:
            return None
        finders = iter(sys.meta_path)
        any(finder is cls for finder in finders)  # goes on behind it
        found = (f.find_spec(name, path, target) for f in finders if hasattr(f, "find_spec"))
        spec = next(filter(None, found), None)
        if spec and isinstance(spec.loader, SourceFileLoader):
            once = functools.partial(_execute, spec.loader)
            spec.loader.__dict__.setdefault("exec_module", once)  # no other module has this loader
        return spec


def _execute(loader: SourceFileLoader, module: ModuleType) -> None:
    """In the place of the loader's own way to execute a module, which it then has again."""
    loader.__dict__.pop("exec_module", None)
    with paused():
        loader.exec_module(module)


def _of_one_thread() -> None:
    """A forked child has none of the other threads, which would never resume."""
    global _lock
    _lock = threading.Lock()
    _put_off_no_longer()
    if _pausing:
        _pausing.clear()
        if _was_on:
            gc.enable()


os.register_at_fork(after_in_child=_of_one_thread)
