"""Convolutions of a separate oneDNN (extra `[onednn]`), with cached primitives.

Torch creates oneDNN's descriptors at each call, which takes as long as a small convolution.
"""

import ctypes
import functools
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.aot_cache.toolkit import ONEDNN, version_of
from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.ops.conv.cached_primitives import Geometry, reference
from ipex_inductor.reporting.decisions import warn_once
from ipex_inductor.templates.build.cpp import NotBuiltError, load

LIBRARY = "libdnnl.so.3"
TYPES = {torch.float32: 3, torch.bfloat16: 2}  # by their numbers in oneDNN
ERRORS = {
    -4: "all libraries of this process see another oneDNN, as of LD_PRELOAD",
    -3: "another version than 3.2 with OpenMP",
    -2: "its layout has no name",
    -1: "no such library",
    1: "out of memory",
    3: "no kernel",
}
# The last operation: oneDNN's number, and the alpha and beta that torch gives to its own oneDNN.
# An activation with scalars has them there.
UNARY: Mapping[str, tuple[float, ...]] = {
    "none": (0,),
    "gelu": (0x31,),
    "gelu_tanh": (0x2B,),
    "hardsigmoid": (0x28, 1 / 6, 1 / 2),
    "hardswish": (0x34, 1 / 6, 1 / 2),
    "hardtanh": (0x2E,),
    "leaky_relu": (0x20,),
    "relu": (0x20,),
    "sigmoid": (0x29,),
    "silu": (0x2C, 1),
    "tanh": (0x21,),
}
_TAG, _POINTER = ctypes.c_int64, ctypes.c_void_p
SIGNATURES = {
    "open": [ctypes.c_char_p],
    "layout": [_POINTER] * 4,
    "arrange": [_POINTER, _TAG, _POINTER, _POINTER],
    "begin": [_POINTER, _POINTER, _TAG, _POINTER],
    "run": [_POINTER] * 6,
}


class _Unary(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_int),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
    )

    def __init__(self, unary: str, scalars: Sequence[float]) -> None:
        algorithm, *coefficients = *UNARY[unary], *scalars
        super().__init__(int(algorithm), *coefficients)


ROOM = 1024  # geometries, of which a primitive each takes 0.1 MiB that oneDNN gives back half of
# Geometries of graphs compiled here, and of cached graphs that ran.
_met: set[tuple[Any, ...]] = set()


class KeptError(RuntimeError):
    """A failure of oneDNN; the text says why."""


@functools.cache
def why_not() -> str | None:
    """Return why this library cannot be used, None if it can."""
    try:
        _library()
    except (NotBuiltError, KeptError) as error:
        return str(error)
    return None


def installed_version() -> str:
    """Return the version of the wheel, "" without it."""
    return version_of(ONEDNN)


def path() -> str:
    """Return the path of the wheel's library. Raises `KeptError`."""
    if not installed_version():
        raise KeptError(f"{ONEDNN} is not installed (extra [onednn])")
    for file in distribution(ONEDNN).files or []:
        if file.name == LIBRARY:
            return str(Path(str(file.locate())).resolve())
    raise KeptError(f"{ONEDNN} has no {LIBRARY}")


@functools.cache
def _library() -> ctypes.CDLL:
    library_path, torchs = path(), str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    source = Path(__file__).with_name("cached_primitives.cpp").read_text
    library = load(source, pairs({"template": "kept"}), portable=True)
    for name, takes in SIGNATURES.items():
        getattr(library, f"kept_{name}").argtypes = takes
    if code := library.kept_open(library_path.encode()):
        raise KeptError(f"{library_path}: {_describe_error(code)}")
    if _openmp(library_path) != _openmp(torchs):
        raise KeptError(f"{library_path}: its threads would be others than torch's")
    return library


def _openmp(library: str) -> int | None:
    """Return the address of a function of a library's OpenMP runtime, None without OpenMP."""
    try:
        function = ctypes.CDLL(library).omp_get_max_threads
    except (AttributeError, OSError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def _describe_error(code: int) -> str:
    return ERRORS.get(code, f"oneDNN's error {code}")


def _numbers(flat: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(flat))(*flat)


def layout(
    geometry: Geometry, unary: str = "none", scalars: Sequence[float] = ()
) -> tuple[int, int]:
    """Return the format tag that oneDNN prefers for the weight, and its bytes in that layout.

    Raises `KeptError`. The tag depends on the number of threads that is set: with another tag
    oneDNN uses a slow kernel.
    """
    return _layout(geometry, unary, tuple(scalars), torch.get_num_threads())


@functools.cache
def _layout(
    geometry: Geometry, unary: str, scalars: tuple[float, ...], threads: int
) -> tuple[int, int]:
    tag, size = ctypes.c_int64(), ctypes.c_int64()
    arguments = _numbers(geometry.flat()), ctypes.byref(_Unary(unary, scalars))
    code = _library().kept_layout(*arguments, ctypes.byref(tag), ctypes.byref(size))
    if code:
        raise KeptError(_describe_error(code))
    _met.add((*geometry.flat(), unary, scalars, threads))
    return tag.value, size.value


def why_no_more() -> str | None:
    """Return why further graphs of this process get no such calls, None if they may."""
    full = len(_met) >= ROOM
    return f"there are {ROOM} geometries in this process already" if full else None


def arrange(groups: int, tag: int, weight: Tensor, arranged: Tensor) -> None:
    """Copy `weight` [O, C / groups, h, w], contiguous, to `arranged` in the layout `tag`."""
    shape = _numbers((TYPES[weight.dtype], groups, *weight.shape))
    code = _library().kept_arrange(shape, tag, weight.data_ptr(), arranged.data_ptr())
    if code:
        raise KeptError(_describe_error(code))


class Primitive:
    """A convolution on a weight in layout `tag`, by a number of threads. Raises `KeptError`."""

    def __init__(self, geometry: Geometry, unary: str, scalars: Sequence[float], tag: int) -> None:
        self.geometry = geometry
        self._library, handle = _library(), ctypes.c_void_p()
        arguments = _numbers(geometry.flat()), ctypes.byref(_Unary(unary, scalars))
        code = self._library.kept_begin(*arguments, tag, ctypes.byref(handle))
        if code:
            raise KeptError(_describe_error(code))
        self.address = handle.value or 0

    def run(self, x: Tensor, arranged: Tensor, bias: Any, other: Any, out: Tensor) -> None:
        """Write the convolution of `x` with its epilogue to `out`. Raises `KeptError`.

        Args:
            x: the activation [B, C, H, W], channels-last.
            arranged: the weight in the primitive's layout.
            bias: [O], or None.
            other: the addend of the epilogue, of the result's shape, or None.
            out: the result, channels-last.
        """
        code = self._library.kept_run(
            self.address,
            x.data_ptr(),
            arranged.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if other is None else other.data_ptr(),
            out.data_ptr(),
        )
        if code:
            raise KeptError(_describe_error(code))


@functools.cache
def _primitive(
    numbers: tuple[int, ...], unary: str, scalars: tuple[float, ...], tag: int, threads: int
) -> Primitive:
    """Return the cached primitive of a geometry; oneDNN makes it for `threads` threads.

    Args:
        numbers: the geometry as numbers.
        unary: the unary operation of the epilogue.
        scalars: the scalars of that operation.
        tag: the layout of the weight.
        threads: the number of threads.
    """
    _met.add((*numbers, unary, scalars, threads))
    return Primitive(Geometry.of(numbers), unary, scalars, tag)


def primitive(words: str) -> int:
    """Return the address of a primitive, for C++. Raises `KeptError`.

    Args:
        words: the last four arguments of `call`, as JSON with its infinities.
    """
    if reason := why_not():
        raise KeptError(f"{reason}; torch.compile makes code without it")
    numbers, unary, scalars, tag = json.loads(words)
    return _primitive(tuple(numbers), unary, tuple(scalars), tag, torch.get_num_threads()).address


def address(name: str) -> int:
    """Return the address of a function of the library, for C++. Raises `KeptError`."""
    function_address = ctypes.cast(_library()[name], ctypes.c_void_p).value
    assert function_address is not None
    return function_address


def call(x: Tensor, arranged: Tensor, *rest: Any, out: Tensor) -> None:
    """Write a convolution to `out`; called by Inductor's code.

    Args:
        x: the activation [B, C, H, W], channels-last.
        arranged: the weight in oneDNN's layout.
        rest: the bias and the addend, if any, then the geometry's numbers, the unary operation, its
            scalars and the tag of the layout.
        out: the result, channels-last.
    """
    *tensors, numbers, unary, scalars, tag = rest
    is_missing, problem = why_not() is not None, (tuple(numbers), unary, tuple(scalars), tag)
    cached = None if is_missing else _primitive(*problem, torch.get_num_threads())
    geometry = cached.geometry if cached else Geometry.of(numbers)
    bias = tensors[0] if geometry.biased else None
    addend = tensors[-1] if geometry.added else None
    if cached:
        cached.run(x, arranged, bias, addend, out)
    else:  # the graph was cached where there was a library; the weight has torch's layout
        out.copy_(reference(x, arranged, bias, addend, geometry, unary, scalars))


@op("kept_weight")
def kept_weight(weight: Tensor, groups: int, tag: int, size: int) -> Tensor:
    """Return a weight in oneDNN's layout: `laid_out` as an op."""
    return laid_out(weight, groups, tag, size)


def laid_out(weight: Tensor, groups: int, tag: int, size: int) -> Tensor:
    """Return a weight [O, C / groups, h, w] in oneDNN's layout `tag`, of `size` elements.

    Without the library it stays in torch's layout, and is read accordingly.
    """
    if why_not() is not None:
        warn_once(f"a compiled graph runs slowly, without oneDNN's kept primitives: {why_not()}")
        return F.pad(weight.flatten(), (0, size - weight.numel()))
    arranged = weight.new_empty(size)
    arrange(groups, tag, weight.contiguous(), arranged)
    return arranged


@kept_weight.register_fake
def _(weight: Tensor, groups: int, tag: int, size: int) -> Tensor:
    return weight.new_empty(size)


@op("kept_conv")
def kept_conv(
    x: Tensor,
    arranged: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    geometry: list[int],
    unary: str,
    scalars: list[float],
    tag: int,
) -> Tensor:
    """Return `unary(convolution(x, weight, bias) + other, *scalars)`; see `ops/common/epilogue.py`.

    Args:
        x: the activation [B, C, H, W], channels-last.
        arranged: the weight in oneDNN's layout `tag`.
        bias: [O], or None.
        other: the addend, as the result, or None.
        geometry: the numbers of `ops/conv/cached_primitives.py`; they say if there are a bias and
            an addend.
        unary: the unary operation.
        scalars: the scalars of the unary operation.
        tag: the layout of the weight.

    Returns:
        [B, O, H', W'], channels-last.
    """
    out = _result(x, Geometry.of(geometry))
    tensors = [t for t in (bias, other) if t is not None]
    call(x, arranged, *tensors, geometry, unary, scalars, tag, out=out)
    return out


@fake(kept_conv)
def _(call: Arguments) -> object:
    return _result(call.x, Geometry.of(call.geometry))


KEPT_WEIGHT, KEPT_CONV = torch.ops.ipex.kept_weight.default, torch.ops.ipex.kept_conv.default


def _result(x: Tensor, geometry: Geometry) -> Tensor:
    sizes = geometry.batch, geometry.out_channels, *geometry.out
    return x.new_empty(sizes).contiguous(memory_format=torch.channels_last)
