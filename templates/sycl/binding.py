"""The functions of shim.cpp as methods, with no dependency beyond the standard library."""

import ctypes
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KINDS = {"*": 0, "i32": 4, "fp32": 4, "i64": 8, "fp64": 8}  # bytes; 0 for a pointer
ENTRY = "__sycl_kernel_{}"  # the compiler's name of an `extern "C"` free function

_Pointer, _Size = ctypes.c_void_p, ctypes.c_uint64


class ShimError(RuntimeError):
    """A failure reported by SYCL or a driver; `log` is the compiler's."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
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
    """Arguments of a kernel, by kind, and its range, in the form of `Shim.launch`."""

    def __init__(self, kinds: Sequence[str], dims: int) -> None:
        self.count, self.dims = len(kinds), dims
        self.values = (_Argument * max(1, self.count))()
        self.whole, self.group = (_Size * 3)(), (_Size * 3)()
        self._slots = [(value.value, kind) for value, kind in zip(self.values, kinds, strict=False)]
        for value, kind in zip(self.values, kinds, strict=False):
            value.size = KINDS[kind]

    def fill(self, arguments: Sequence[Any], whole: Sequence[int], group: Sequence[int]) -> None:
        """Set the arguments, the range (`whole`) and the work-group size (`group`)."""
        for (slot, kind), value in zip(self._slots, arguments, strict=True):
            setattr(slot, kind, value)
        self.whole[: self.dims] = [*whole]
        self.group[: self.dims] = [*group]


class Shim:
    """The functions of the shim library in `file`, loaded after the libsycl it is linked with.

    `cpu` is the CPU's driver, if SYCL should see its device. Raises `ShimError` if loading fails.
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
        """Return a new in-order queue on a device."""
        return self._require_handle("queue", device)

    def queue_of(self, sycl_queue: int) -> int:
        """Return the shim's queue for the `sycl::queue*` of another library."""
        return self._require_handle("queue_of", _Pointer(sycl_queue))

    def device_of(self, queue: int) -> int:
        """Return the number of a queue's device."""
        return self._require_success("device_of", _Pointer(queue))

    def wait(self, queue: int) -> None:
        """Wait until all work on a queue is done."""
        self._require_success("wait", _Pointer(queue))

    def compile(self, queue: int, text: str, options: Sequence[str]) -> tuple[bytes, str]:
        """Return the SPIR-V of a source, and the warnings.

        Loads Intel's compiler into this process, which the compiler may end.
        """
        option_array = (ctypes.c_char_p * max(1, len(options)))(*(o.encode() for o in options))
        spirv, log = _Text(), _Text()
        more = (len(options), ctypes.byref(spirv), ctypes.byref(log))
        status = self._call("compile", _Pointer(queue), text.encode(), option_array, *more)
        warnings = self._take_text(log).decode(errors="replace")
        if status < 0:
            raise ShimError(self._last_error(), warnings)
        return self._take_text(spirv), warnings

    def load(self, queue: int, code: bytes, native: bool, options: str = "") -> tuple[int, str]:
        """Return SPIR-V or native code as a module on the queue's device, and the driver's log."""
        log = _Text()
        module = self._call(
            *("load", _Pointer(queue), code, _Size(len(code)), native, options.encode()),
            ctypes.byref(log),
        )
        driver_log = self._take_text(log).decode(errors="replace")
        if not module:
            raise ShimError(self._last_error(), driver_log)
        return int(module), driver_log

    def native(self, module: int) -> bytes:
        """Return the native code that the device runs of a module."""
        binary = _Text()
        self._require_success("native", _Pointer(module), ctypes.byref(binary))
        return self._take_text(binary)

    def kernel(self, queue: int, module: int, name: str) -> int:
        """Return a kernel of a module, by its name in the source."""
        return self._require_handle(
            "kernel", _Pointer(queue), _Pointer(module), ENTRY.format(name).encode()
        )

    def launch(self, queue: int, kernel: int, arguments: Arguments, wait: bool) -> None:
        """Launch a kernel; with `wait`, return when it is done."""
        a = arguments
        launch_arguments = (a.dims, a.whole, a.group, a.values, a.count, wait)
        self._require_success("launch", _Pointer(queue), _Pointer(kernel), *launch_arguments)

    def _devices(self, cpu: str | Path | None) -> list[dict[str, Any]]:
        json_ = _Text()
        with _driver_named(cpu):
            self._require_success("devices", ctypes.byref(json_))
        devices: list[dict[str, Any]] = json.loads(self._take_text(json_))
        return devices

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._library, f"ipex_sycl_{name}")(*arguments)

    def _require_handle(self, name: str, *arguments: Any) -> int:
        handle = self._call(name, *arguments)
        if not handle:
            raise ShimError(self._last_error())
        return int(handle)

    def _require_success(self, name: str, *arguments: Any) -> int:
        status = self._call(name, *arguments)
        if status < 0:
            raise ShimError(self._last_error())
        return int(status)

    def _last_error(self) -> str:
        return str(self._library.ipex_sycl_said().decode(errors="replace"))

    def _take_text(self, text: _Text) -> bytes:
        try:
            return ctypes.string_at(text.data, text.size) if text.data else b""
        finally:
            self._call("free", _Pointer(text.data))


@contextmanager
def _driver_named(cpu: str | Path | None) -> Iterator[None]:
    """Name the CPU's driver while OpenCL looks for drivers, which it does once.

    Needed because pip registers the CPU's driver nowhere.
    """
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
