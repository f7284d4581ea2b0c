"""Torch's accessors of a tensor's memory, as CPython defines methods and attributes in C.

The layouts are those of CPython's `descrobject.h`, `methodobject.h` and `cpython/methodobject.h`.
"""

import ctypes
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import torch

from ipex_inductor.compat.private_memory.switch import why_not

WORD = ctypes.sizeof(ctypes.c_void_p)
HEAD = object.__basicsize__  # bytes of each object's header
VARARGS, KEYWORDS, NOARGS = 1, 2, 4  # flags of a definition


class _Method(ctypes.Structure):
    """`PyMethodDef`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class _Attribute(ctypes.Structure):
    """`PyGetSetDef`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("get", ctypes.c_void_p),
        ("set", ctypes.c_void_p),
        ("doc", ctypes.c_char_p),
        ("closure", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Definition:
    """The definition of a function in C: where its pointer lies, and how it is called."""

    function: int
    has_keywords: bool


def method_definition(name: str) -> Definition | None:
    """Return the definition of a tensor's method, None if it is not as expected."""
    place = _place(vars(torch._C.TensorBase).get(name))
    return _definition(place, name, (VARARGS, VARARGS | KEYWORDS, NOARGS))


def export_definitions() -> list[Definition | None]:
    """Return the definitions of the functions that export a tensor by DLPack."""
    names = ("_to_dlpack", "_to_dlpack_versioned")
    return [
        _definition(_place_of_function(function), name, (VARARGS | KEYWORDS,))
        for name in names
        if (function := getattr(torch._C, name, None)) is not None
    ]


def attribute_definition(name: str) -> int | None:
    """Return where the pointers to an attribute's two functions lie, None if not as expected."""
    place = _place(vars(torch._C.TensorBase).get(name))
    if place is None or _Attribute.from_address(place).name != name.encode():
        return None
    return place + _Attribute.get.offset


def _definition(place: int | None, name: str, flags: tuple[int, ...]) -> Definition | None:
    if place is None:
        return None
    method = _Method.from_address(place)
    if method.name != name.encode() or method.flags not in flags:
        return None
    return Definition(place + _Method.function.offset, bool(method.flags & KEYWORDS))


def _place(descriptor: Any) -> int | None:
    """Return the address of the definition of a descriptor: behind its class and two names."""
    kinds = type(torch._C.TensorBase.numpy), type(vars(torch._C.TensorBase)["data"])
    if why_not() or type(descriptor) not in kinds:
        return None
    kind, name = _word(descriptor, 0), _word(descriptor, 1)
    if (kind, name) != (id(descriptor.__objclass__), id(descriptor.__name__)):
        return None
    return _word(descriptor, 3)


def _place_of_function(function: Any) -> int | None:
    """Return the address of the definition of a module's function: before the module."""
    if why_not() or not isinstance(function, BuiltinFunctionType):
        return None
    return _word(function, 0) if _word(function, 1) == id(function.__self__) else None


def _word(thing: Any, number: int) -> int:
    """Return a word of an object, counted from behind its header."""
    return ctypes.c_size_t.from_address(id(thing) + HEAD + number * WORD).value


_copies: list[ctypes.Structure] = []  # descriptors point to them


def _copy_descriptor(name: str, kind: type[ctypes.Structure], make: Any) -> Any:
    """Return a descriptor of its own that does the same, whatever is done to the definition."""
    descriptor: Any = vars(torch._C.TensorBase)[name]
    place = _place(descriptor)
    if place is None:
        return descriptor
    copy = kind.from_buffer_copy(kind.from_address(place))
    _copies.append(copy)
    make.restype, make.argtypes = ctypes.py_object, (ctypes.py_object, ctypes.c_void_p)
    return make(torch._C.TensorBase, ctypes.addressof(copy))


# Accesses by this package itself, which nothing notes.
open_storage: Any = _copy_descriptor("untyped_storage", _Method, ctypes.pythonapi.PyDescr_NewMethod)
tensor_data: Any = _copy_descriptor("data", _Attribute, ctypes.pythonapi.PyDescr_NewGetSet)
