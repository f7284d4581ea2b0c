"""Note accesses to the memory of tensors in the C functions of torch's methods.

No object of Python is replaced: `torch.Tensor.numpy` stays what it was, for Dynamo, for
`__torch_function__` and for tables of handlers.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.compat import private_memory
from ipex_inductor.templates.build.cpp import NotBuiltError, load
from ipex_inductor.templates.tensor_reader.look_cpp import address_of

Note = Callable[[Any, Any], None]  # gets the tensor and what was handed out


@functools.cache
def library() -> ctypes.CDLL:
    """Return the C++ functions, compiled or from the cache. Raises `NotBuiltError`."""
    source = Path(__file__).with_name("accesses.cpp").read_text
    return load(source, pairs({"template": "accesses"}), portable=True)


def note_accesses(
    array: Note, storage: Note, capsule: Note, alias: Note, value: Note, watched: dict[int, Any]
) -> None:
    """Call these functions after each access, while `watched` is not empty.

    Raises `NotBuiltError`, before anything is changed, where the functions are not as expected.

    Args:
        array: after `Tensor.numpy`.
        storage: after `Tensor.untyped_storage`.
        capsule: after `torch.to_dlpack` and `Tensor.__dlpack__`.
        alias: after a read of `Tensor.data`.
        value: after an assignment to `Tensor.data`; gets the value.
        watched: the storages that are of interest.
    """
    if reason := private_memory.why_not():
        raise NotBuiltError(reason)
    methods = {"numpy": array, "untyped_storage": storage}
    definitions = [private_memory.method_definition(name) for name in methods]
    exports, attribute = (
        private_memory.export_definitions(),
        private_memory.attribute_definition("data"),
    )
    if not exports or not all((*definitions, *exports, attribute)):
        raise NotBuiltError("torch's accessors are not defined as expected")
    built = library()
    _with_lock(built.watch, 1)(watched)
    for definition, note in zip(definitions, methods.values(), strict=True):
        assert definition is not None
        replace = built.replace_keyed if definition.has_keywords else built.replace_plain
        _with_lock(replace, 2)(definition.function, note)
    for export in exports:
        assert export is not None
        _with_lock(built.replace_function, 2)(export.function, capsule)
    _with_lock(built.replace_attribute, 3)(attribute, alias, value)


def _with_lock(function: Any, count: int) -> Any:
    """Return a function of the library that is called with Python's lock held.

    Its arguments are a pointer, if there are several, and objects.
    """
    pointer = (ctypes.c_void_p,) if count > 1 else ()
    objects = (ctypes.py_object,) * (count - len(pointer))
    return ctypes.PYFUNCTYPE(None, *pointer, *objects)(address_of(function))
