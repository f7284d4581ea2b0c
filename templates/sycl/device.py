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
    """One of SYCL's devices: `facts` are what it says of itself, `arch` as keys name it."""

    waits = False  # until a kernel that was called is done

    def __init__(self, number: int, arch: str) -> None:
        self.facts: Mapping[str, Any] = shim().devices[number]
        self.name, self.driver = str(self.facts["name"]), str(self.facts["driver"])
        self.number, self.arch = number, arch
        self._modules: dict[Source, Module] = {}
        self._lock = threading.RLock()

    @property
    def queue(self) -> int:
        """Where launches go now."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until all that was launched on the queue is done. Raises `SyclDeviceError`."""
        with _saying(f"launches on {self.name} to end"):
            shim().wait(self.queue)

    def load(self, source: Source) -> "Module":
        """Its kernels: native code from the cache, else SPIR-V from it, else compiled.

        Raises `SyclCompileError`; `SyclDeviceError` where the device lacks what the source needs,
        or refuses the code.
        """
        with self._lock:
            if source not in self._modules:
                self._modules[source] = self._loaded(source)
            return self._modules[source]

    def _loaded(self, source: Source) -> "Module":
        if lacking := [need for need in source.needs if not self.facts[need]]:
            came = f"{self.name} without {', '.join(lacking)}"
            wanted = f"a device with {', '.join(source.needs)}"
            raise SyclDeviceError(wanted, came, "Another template may do without.")
        for origin, tried in (
            ("native", self._native),
            ("SPIR-V", self._spirv),
            ("source", self._compiled),
        ):
            if module := tried(source):
                return Module(self, source, module, origin)
        raise AssertionError("compiling returns a module or raises")

    def _native(self, source: Source) -> int | None:
        """None where the cache has none that the driver takes."""
        for entry in binaries.stored_native(source, self.arch, self.driver):
            try:
                module, log = shim().load(self.queue, entry.blob, True, _joined(source.native))
            except ShimError as error:
                say(f"native code of {source.named} is not used: {_first_line(error)}")
                continue
            if log:  # drivers compile code for another GPU again, from the SPIR-V in it
                said = log.partition("\n")[0]
                say(f"native code of {source.named} is not {self.arch}'s to its driver: {said}")
                self._keep(source, module)
            return module
        return None

    def _spirv(self, source: Source) -> int | None:
        entry = binaries.stored_spirv(source, self.arch)
        return self._built(source, entry.blob) if entry else None

    def _compiled(self, source: Source) -> int:
        """In a child, for this device too: what its compiler crashes on is not to come here."""
        natives = []

        def build() -> bytes:
            made = worker.compiled(source, self.facts)
            natives.append(made.native)
            return made.spirv

        spirv = binaries.spirv(source, build).blob
        if not natives:  # another process was first
            return self._native(source) or self._built(source, spirv)
        binaries.keep_native(source, self.arch, self.driver, natives[0])
        return self._into(source, natives[0], native=True)

    def _built(self, source: Source, spirv: bytes) -> int:
        """By the driver's compiler, here; what came of it is kept."""
        module = self._into(source, spirv, native=False)
        self._keep(source, module)
        return module

    def _keep(self, source: Source, module: int) -> None:
        with _saying(f"native code of {source.named}"):
            binaries.keep_native(source, self.arch, self.driver, shim().native(module))

    def _into(self, source: Source, code: bytes, native: bool) -> int:
        with _saying(f"code of {source.named} for {self.name}"):
            return shim().load(self.queue, code, native, _joined(source.native))[0]


class CpuDevice(Device):
    """The CPU, by Intel's driver: its kernels are given tensors of the CPU as they lie.

    It uses all cores that the process may. Raises `SyclAbsentError`.
    """

    waits = True

    def __init__(self) -> None:
        wanted = {"type": "cpu", "backend": "opencl", "system_memory": True}
        number = _numbered(wanted)
        if number is None:
            todo = f'pip install "ipex-inductor[sycl-cpu]", which brings {CPU_DRIVER}.'
            raise SyclAbsentError("SYCL's CPU device", _seen(), todo)
        super().__init__(number, str(current("cpu")))
        with _saying("a queue"):
            self._queue = shim().queue(number)

    @property
    def queue(self) -> int:
        """One for all launches, in order."""
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
        """The current stream's."""
        theirs = torch._C._xpu_getCurrentRawStream(self.index)
        if theirs not in self._queues:
            with _saying("the queue of a stream"):
                self._queues[theirs] = shim().queue_of(theirs)
        return self._queues[theirs]


class Module:
    """The kernels of a source on a device; `origin` says what they were loaded from."""

    def __init__(self, device: Device, source: Source, module: int, origin: str) -> None:
        self.device, self.source, self.origin = device, source, origin
        self._module = module

    @functools.cache  # noqa: B019  modules live as long as their device, and that as the process
    def kernel(self, name: str) -> "Kernel":
        """The kernel of that name in the source."""
        with _saying(f"the kernel {name}"):
            found = shim().kernel(self.device.queue, self._module, name)
        return Kernel(self.device, name, found, self.source)


class Kernel:
    """One kernel, launched with pointers (or tensors) and numbers; sizes are of work-items."""

    def __init__(self, device: Device, name: str, kernel: int, source: Source) -> None:
        entry = source.entry(name)
        self.device, self.name = device, name
        self._kernel, self._launch = kernel, shim().launch
        self._arguments = Arguments(entry.arguments, entry.dims)
        self._lock = threading.Lock()  # of the arguments, until they are copied

    def __call__(
        self, given: Sequence[Tensor | float], whole: Sequence[int], group: Sequence[int]
    ) -> None:
        """Run it on `whole`, in groups of `group`, the fastest dimension last.

        On the host's memory it is done on return, on a GPU's it is on the stream. Raises
        `SyclDeviceError`.
        """
        self._run(given, whole, group, self.device.waits)

    def enqueue(
        self, given: Sequence[Tensor | float], whole: Sequence[int], group: Sequence[int]
    ) -> None:
        """The same, not waited for; tensors must live until `Device.wait`."""
        self._run(given, whole, group, False)

    def _run(
        self,
        given: Sequence[Tensor | float],
        whole: Sequence[int],
        group: Sequence[int],
        wait: bool,
    ) -> None:
        values = [v.data_ptr() if isinstance(v, Tensor) else v for v in given]
        with self._lock, _saying(f"{self.name} to run on {self.device.name}"):
            self._arguments.fill(values, whole, group)
            self._launch(self.device.queue, self._kernel, self._arguments, wait)


@functools.cache
def device_of(device: torch.device) -> Device:
    """That device of torch's. Raises `SyclAbsentError`, and `DeviceError` for what has no SYCL."""
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "xpu":
        return XpuDevice(device.index or 0)
    raise DeviceError("a CPU or an Intel GPU", str(device), "Triton serves other GPUs.")


def _numbered(wanted: Mapping[str, Any]) -> int | None:
    """The first of SYCL's devices that is so."""
    for number, facts in enumerate(shim().devices):
        if all(facts[name] == value for name, value in wanted.items()):
            return number
    return None


def _seen() -> str:
    return ", ".join(f"{d['name']} ({d['backend']})" for d in shim().devices) or "no device"


@contextmanager
def _saying(expected: str) -> Iterator[None]:
    """What SYCL says becomes a `SyclDeviceError`."""
    try:
        yield
    except ShimError as error:
        log = f"{error}\n{error.log}"
        raise SyclDeviceError(expected, _first_line(error), "The log has all.", log) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _joined(options: Sequence[str]) -> str:
    return " ".join(options)
