"""The functions of shim.cpp as methods; nothing here needs more than the standard library."""

import ctypes
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KINDS = {"*": 0, "i32": 4, "fp32": 4, "i64": 8, "fp64": 8}  # bytes, 0 for what a pointer is
ENTRY = "__sycl_kernel_{}"  # what the compiler calls an `extern "C"` free function

_Pointer, _Size = ctypes.c_void_p, ctypes.c_uint64


class ShimError(RuntimeError):
    """What SYCL or a driver said; `log` is the compiler's."""

    def __init__(self, said: str, log: str = "") -> None:
        super().__init__(said)
        self.log = log


class _Text(ctypes.Structure):
    _fields_ = (("data", _Pointer), ("size", _Size))


class _Value(ctypes.Union):
    _fields_ = (
        ("*", _Pointer),
        ("i32", ctypes.c_int32),
        ("i64", ctypes.c_int64),
        ("fp32", ctypes.c_float),
        ("fp64", ctypes.c_double),
    )


class _Argument(ctypes.Structure):
    _fields_ = (("size", _Size), ("value", _Value))


class Arguments:
    """Of a kernel, by kind, and its range, as `Shim.launch` takes them."""

    def __init__(self, kinds: Sequence[str], dims: int) -> None:
        self.count, self.dims = len(kinds), dims
        self.values = (_Argument * max(1, self.count))()
        self.whole, self.group = (_Size * 3)(), (_Size * 3)()
        self._slots = [(value.value, kind) for value, kind in zip(self.values, kinds, strict=False)]
        for value, kind in zip(self.values, kinds, strict=False):
            value.size = KINDS[kind]

    def fill(self, given: Sequence[Any], whole: Sequence[int], group: Sequence[int]) -> None:
        """Set them all."""
        for (slot, kind), value in zip(self._slots, given, strict=True):
            setattr(slot, kind, value)
        self.whole[: self.dims] = [*whole]
        self.group[: self.dims] = [*group]


class Shim:
    """The library in that file, loaded after the libsycl that it is linked with.

    `cpu` is the CPU's driver, if its device is to be seen. Raises `ShimError` for what fails.
    """

    def __init__(self, libsycl: str | Path, file: str | Path, cpu: str | Path | None) -> None:
        try:
            self._libsycl = ctypes.CDLL(str(libsycl))
            self._library = ctypes.CDLL(str(file))
        except OSError as error:
            raise ShimError(str(error)) from error
        self._library.ipex_sycl_said.restype = ctypes.c_char_p
        for name in ("queue", "queue_of", "load", "kernel"):
            getattr(self._library, f"ipex_sycl_{name}").restype = _Pointer
        self.devices: list[dict[str, Any]] = self._devices(cpu)

    def queue(self, device: int) -> int:
        """One of our own, in order."""
        return self._made("queue", device)

    def queue_of(self, theirs: int) -> int:
        """Ours for a `sycl::queue*` of others."""
        return self._made("queue_of", _Pointer(theirs))

    def device_of(self, queue: int) -> int:
        """The number of a queue's device."""
        return self._done("device_of", _Pointer(queue))

    def wait(self, queue: int) -> None:
        """Until all on it is done."""
        self._done("wait", _Pointer(queue))

    def compile(self, queue: int, text: str, options: Sequence[str]) -> tuple[bytes, str]:
        """SPIR-V of a source, and warnings. Maps Intel's compiler, and may end the process."""
        given = (ctypes.c_char_p * max(1, len(options)))(*(o.encode() for o in options))
        spirv, log = _Text(), _Text()
        more = (len(options), ctypes.byref(spirv), ctypes.byref(log))
        said = self._call("compile", _Pointer(queue), text.encode(), given, *more)
        warnings = self._taken(log).decode(errors="replace")
        if said < 0:
            raise ShimError(self._said(), warnings)
        return self._taken(spirv), warnings

    def load(self, queue: int, code: bytes, native: bool, options: str = "") -> tuple[int, str]:
        """SPIR-V or native code as a module on the queue's device, and what the driver said."""
        log = _Text()
        made = self._call(
            *("load", _Pointer(queue), code, _Size(len(code)), native, options.encode()),
            ctypes.byref(log),
        )
        said = self._taken(log).decode(errors="replace")
        if not made:
            raise ShimError(self._said(), said)
        return int(made), said

    def native(self, module: int) -> bytes:
        """What the device runs of it."""
        binary = _Text()
        self._done("native", _Pointer(module), ctypes.byref(binary))
        return self._taken(binary)

    def kernel(self, queue: int, module: int, name: str) -> int:
        """One of its kernels, by the name in the source."""
        return self._made("kernel", _Pointer(queue), _Pointer(module), ENTRY.format(name).encode())

    def launch(self, queue: int, kernel: int, arguments: Arguments, wait: bool) -> None:
        """Run it; `wait` until that is done."""
        a = arguments
        given = (a.dims, a.whole, a.group, a.values, a.count, wait)
        self._done("launch", _Pointer(queue), _Pointer(kernel), *given)

    def _devices(self, cpu: str | Path | None) -> list[dict[str, Any]]:
        json_ = _Text()
        with _driver_named(cpu):
            self._done("devices", ctypes.byref(json_))
        found: list[dict[str, Any]] = json.loads(self._taken(json_))
        return found

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._library, f"ipex_sycl_{name}")(*arguments)

    def _made(self, name: str, *arguments: Any) -> int:
        made = self._call(name, *arguments)
        if not made:
            raise ShimError(self._said())
        return int(made)

    def _done(self, name: str, *arguments: Any) -> int:
        said = self._call(name, *arguments)
        if said < 0:
            raise ShimError(self._said())
        return int(said)

    def _said(self) -> str:
        return str(self._library.ipex_sycl_said().decode(errors="replace"))

    def _taken(self, text: _Text) -> bytes:
        try:
            return ctypes.string_at(text.data, text.size) if text.data else b""
        finally:
            self._call("free", _Pointer(text.data))


@contextmanager
def _driver_named(cpu: str | Path | None) -> Iterator[None]:
    """While OpenCL looks for drivers, which it does once: pip registers the CPU's nowhere."""
    before = os.environ.get("OCL_ICD_FILENAMES")
    if cpu is None:
        yield
        return
    os.environ["OCL_ICD_FILENAMES"] = f"{cpu}:{before}" if before else str(cpu)
    try:
        yield
    finally:
        del os.environ["OCL_ICD_FILENAMES"]
        if before is not None:
            os.environ["OCL_ICD_FILENAMES"] = before
