"""Devices that run SYCL: kernels loaded from the cache or compiled, and launched on tensors."""

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.errors import DeviceError, SyclAbsentError, SyclDeviceError
from ipex_inductor.target.device import current, xe
from ipex_inductor.templates.sycl import binaries, worker
from ipex_inductor.templates.sycl.binding import Arguments, ShimError
from ipex_inductor.templates.sycl.shim import shim
from ipex_inductor.templates.sycl.source import Source
from ipex_inductor.templates.sycl.wheels import CPU_DRIVER


class Device:
    """A SYCL device: `facts` is what SYCL reports of it, `arch` its architecture in cache keys."""

    waits = False  # whether a call returns only when the kernel is done

    def __init__(self, number: int, arch: str) -> None:
        self.facts: Mapping[str, Any] = shim().devices[number]
        self.name, self.driver = str(self.facts["name"]), str(self.facts["driver"])
        self.number, self.arch = number, arch
        self._modules: dict[Source, Module] = {}
        self._lock = threading.RLock()

    @property
    def queue(self) -> int:
        """Return the queue that launches currently go to."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until all launches on the queue are done. Raises `SyclDeviceError`."""
        with _raising_device_error(f"launches on {self.name} to end"):
            shim().wait(self.queue)

    def load(self, source: Source) -> "Module":
        """Return a source's kernels: cached native code, else cached SPIR-V, else compiled.

        Raises:
            SyclCompileError: if the source does not compile.
            SyclDeviceError: if the device lacks what the source needs, or refuses the code.
        """
        with self._lock:
            if source not in self._modules:
                self._modules[source] = self._load_module(source)
            return self._modules[source]

    def _load_module(self, source: Source) -> "Module":
        if lacking := [need for need in source.needs if not self.facts[need]]:
            device_name = f"{self.name} without {', '.join(lacking)}"
            wanted = f"a device with {', '.join(source.needs)}"
            raise SyclDeviceError(wanted, device_name, "Another template may do without.")
        for origin, find_module in (
            ("native", self._native),
            ("SPIR-V", self._spirv),
            ("source", self._compile),
        ):
            if module := find_module(source):
                return Module(self, source, module, origin)
        raise AssertionError("compiling returns a module or raises")

    def _native(self, source: Source) -> int | None:
        """Return a module of cached native code, None if the driver takes none of it."""
        for entry in binaries.stored_native(source, self.arch, self.driver):
            try:
                module, log = shim().load(
                    self.queue, entry.blob, True, _join_options(source.native)
                )
            except ShimError as error:
                say(f"native code of {source.kernel_names} is not used: {_first_line(error)}")
                continue
            if log:  # drivers compile code for another GPU again, from the SPIR-V in it
                message = log.partition("\n")[0]
                names = source.kernel_names
                say(f"native code of {names} is not {self.arch}'s to its driver: {message}")
                self._keep(source, module)
            return module
        return None

    def _spirv(self, source: Source) -> int | None:
        entry = binaries.stored_spirv(source, self.arch)
        return self._build_from_spirv(source, entry.blob) if entry else None

    def _compile(self, source: Source) -> int:
        """Compile in a child process, for this device too, and return the module.

        A compiler that crashes on a source then does not end this process.
        """
        natives = []

        def build() -> bytes:
            compiled = worker.compile_source(source, self.facts)
            natives.append(compiled.native)
            return compiled.spirv

        spirv = binaries.spirv(source, build).blob
        if not natives:  # another process was first
            return self._native(source) or self._build_from_spirv(source, spirv)
        binaries.keep_native(source, self.arch, self.driver, natives[0])
        return self._into(source, natives[0], native=True)

    def _build_from_spirv(self, source: Source, spirv: bytes) -> int:
        """Return SPIR-V compiled by the driver in this process, and cache its native code."""
        module = self._into(source, spirv, native=False)
        self._keep(source, module)
        return module

    def _keep(self, source: Source, module: int) -> None:
        with _raising_device_error(f"native code of {source.kernel_names}"):
            binaries.keep_native(source, self.arch, self.driver, shim().native(module))

    def _into(self, source: Source, code: bytes, native: bool) -> int:
        with _raising_device_error(f"code of {source.kernel_names} for {self.name}"):
            return shim().load(self.queue, code, native, _join_options(source.native))[0]


class CpuDevice(Device):
    """The CPU by Intel's driver: kernels take CPU tensors without a copy.

    It uses all cores that the process may use. Raises `SyclAbsentError`.
    """

    waits = True

    def __init__(self) -> None:
        wanted = {"type": "cpu", "backend": "opencl", "system_memory": True}
        number = _find_device(wanted)
        if number is None:
            remedy = f'pip install "ipex-inductor[sycl-cpu]", which brings {CPU_DRIVER}.'
            raise SyclAbsentError("SYCL's CPU device", _list_devices(), remedy)
        super().__init__(number, str(current("cpu")))
        with _raising_device_error("a queue"):
            self._queue = shim().queue(number)

    @property
    def queue(self) -> int:
        """Return the one in-order queue of all launches."""
        return self._queue


class XpuDevice(Device):
    """A GPU of torch's: launches go to the current stream. Raises `SyclAbsentError`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._queues: dict[int, int] = {}
        number = shim().device_of(self.queue)
        super().__init__(number, xe(shim().devices[number]["architecture"]))

    @property
    def queue(self) -> int:
        """Return the queue of the current stream."""
        stream = torch._C._xpu_getCurrentRawStream(self.index)
        if stream not in self._queues:
            with _raising_device_error("the queue of a stream"):
                self._queues[stream] = shim().queue_of(stream)
        return self._queues[stream]


class Module:
    """The kernels of a source on a device; `origin` says what they were loaded from."""

    def __init__(self, device: Device, source: Source, module: int, origin: str) -> None:
        self.device, self.source, self.origin = device, source, origin
        self._module = module

    @functools.cache  # noqa: B019  modules live as long as their device, and that as the process
    def kernel(self, name: str) -> "Kernel":
        """Return the kernel with that name in the source."""
        with _raising_device_error(f"the kernel {name}"):
            handle = shim().kernel(self.device.queue, self._module, name)
        return Kernel(self.device, name, handle, self.source)


class Kernel:
    """A kernel, launched with pointers (or tensors) and numbers; sizes are in work-items."""

    def __init__(self, device: Device, name: str, kernel: int, source: Source) -> None:
        entry = source.entry(name)
        self.device, self.name = device, name
        self._kernel, self._launch = kernel, shim().launch
        self._arguments = Arguments(entry.arguments, entry.dims)
        self._lock = threading.Lock()  # of the arguments, until they are copied

    def __call__(
        self, given: Sequence[Tensor | float], whole: Sequence[int], group: Sequence[int]
    ) -> None:
        """Run the kernel on `whole` work-items, in groups of `group`, the fastest dimension last.

        On host memory the kernel is done on return; on a GPU it is on the stream. Raises
        `SyclDeviceError`.
        """
        self._run(given, whole, group, self.device.waits)

    def enqueue(
        self, given: Sequence[Tensor | float], whole: Sequence[int], group: Sequence[int]
    ) -> None:
        """Launch the kernel on `whole` work-items without waiting for it.

        The tensors must live until `Device.wait`. Raises `SyclDeviceError`.
        """
        self._run(given, whole, group, False)

    def _run(
        self,
        arguments: Sequence[Tensor | float],
        whole: Sequence[int],
        group: Sequence[int],
        wait: bool,
    ) -> None:
        values = [v.data_ptr() if isinstance(v, Tensor) else v for v in arguments]
        with self._lock, _raising_device_error(f"{self.name} to run on {self.device.name}"):
            self._arguments.fill(values, whole, group)
            self._launch(self.device.queue, self._kernel, self._arguments, wait)


@functools.cache
def device_of(device: torch.device) -> Device:
    """Return the SYCL device of a torch device.

    Raises:
        SyclAbsentError: if SYCL is missing.
        DeviceError: if the device is neither a CPU nor an Intel GPU.
    """
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "xpu":
        return XpuDevice(device.index or 0)
    raise DeviceError("a CPU or an Intel GPU", str(device), "Triton serves other GPUs.")


def _find_device(wanted: Mapping[str, Any]) -> int | None:
    """Return the number of the first SYCL device with all these facts, or None."""
    for number, facts in enumerate(shim().devices):
        if all(facts[name] == value for name, value in wanted.items()):
            return number
    return None


def _list_devices() -> str:
    return ", ".join(f"{d['name']} ({d['backend']})" for d in shim().devices) or "no device"


@contextmanager
def _raising_device_error(expected: str) -> Iterator[None]:
    """Raise a `ShimError` of the block as a `SyclDeviceError`."""
    try:
        yield
    except ShimError as error:
        log = f"{error}\n{error.log}"
        raise SyclDeviceError(expected, _first_line(error), "The log has all.", log) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _join_options(options: Sequence[str]) -> str:
    return " ".join(options)
