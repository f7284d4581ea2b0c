"""Device architectures as values: read from a present device, or described by a table.

Only `current` imports torch, so that a target can be described on a machine without a GPU.
"""

import difflib
import hashlib
import os
import platform
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipex_inductor.errors import DeviceError, TargetError

if TYPE_CHECKING:
    import torch

_KINDS = {"sm_": "cuda", "gfx": "hip", "xe:": "xpu"}
ANY = "any"  # the name of a CPU of which only the ISA level is known
_UNITS = {"shared_memory": 1 << 10, "memory": 1 << 30, "bandwidth": 1e9}  # units of targets.toml
# A device for each Intel GPU, by its name in Intel's compiler.
CHIPS = {
    "xe:pvc": "max-1550",
    "xe:bmg": "b580",
    "xe:lnl": "arc-140v",
    "xe:ptl": "arc-b390",
    "xe:dg2": "a770",
    "xe:arl": "arc-140t",
}


@dataclass(frozen=True)
class Target:
    """One device, with the facts that code generation and kernel selection need; None: unknown.

    Only `arch` decides which code can run. `memory` differs a little from driver to driver.
    """

    name: str  # as torch reports it
    arch: str  # "sm_90", "gfx942", "xe:20.1" (IP version), "x86-64:amx", "aarch64:sve256"
    multiprocessors: int  # SMs, CUs, Xe-cores, physical CPU cores
    shared_memory: int | None = None  # bytes of a multiprocessor that one block may use
    registers: int | None = None  # 32-bit registers of a multiprocessor
    threads: int | None = None  # resident threads of a multiprocessor
    subgroup: int | None = None  # threads of a warp, wavefront or the narrowest sub-group
    memory: int | None = None  # bytes
    bandwidth: float | None = None  # bytes/s, the vendor's peak
    rates: tuple[tuple[str, float], ...] = ()  # dense matrix operations/s by type: "bf16", ...
    source: str = "torch, on this machine"

    def __str__(self) -> str:
        """Return a text that `find_target` parses, fit for a command line: `sm_90:NVIDIA-H200`."""
        return f"{self.arch}:{_strip_marks(self.name)}"

    @property
    def kind(self) -> str:
        """Return the kind of its code generator: "cpu", "cuda", "hip" or "xpu"."""
        return _KINDS.get(self.arch[:3], "cpu")

    def rate(self, dtype: str) -> float | None:
        """Return peak dense matrix operations/s on `dtype` ("bf16", "tf32", "int8"), or None."""
        return dict(self.rates).get(dtype)

    def describe(self) -> str:
        """Return the known facts in one line."""
        facts = [
            (self.multiprocessors, 1, "multiprocessors"),
            (self.shared_memory, 1 << 10, "KiB shared memory"),
            (self.memory, 1 << 30, "GiB"),
            (self.bandwidth, 1e9, "GB/s"),
            *((rate, 1e12, f"Top/s {dtype}") for dtype, rate in self.rates),
        ]
        texts = (f"{value / unit:.4g} {what}" for value, unit, what in facts if value)
        return f"{self.name} ({self.arch}): {', '.join(texts)}"


def current(device: "torch.device | str" = "cpu") -> Target:
    """Return the target of a device of this machine, completed from the table if listed there.

    Raises:
        DeviceError: if the device is absent or has no code generator.
    """
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        level, features = torch.backends.cpu.get_cpu_capability(), torch.cpu.get_capabilities()
        name = _first_match("/proc/cpuinfo", r"^model name\s*: (.+)$") or platform.machine()
        arch = _as_if.get() or _cpu_arch(platform.machine(), level, features)
        return Target(name, arch, _physical_cores())
    read = {"cuda": _cuda, "xpu": _xpu}.get(device.type)
    count = getattr(torch, device.type).device_count() if read else 0
    if read is None or (device.index or 0) >= count:
        received = f"{device} ({count} {device.type} devices present)"
        advice = "Use a present one, or find_target() for one that need not be."
        raise DeviceError("cpu, or a cuda or xpu device of this machine", received, advice)
    return _complete(read(getattr(torch, device.type).get_device_properties(device)))


def nvidia(device: "torch.device") -> Target | None:
    """Return the target of an NVIDIA GPU; None for all other devices."""
    import torch

    return current(device) if device.type == "cuda" and not torch.version.hip else None


def architecture() -> str:
    """Return the CPU's `arch`, as `current` does, but cached."""
    return _as_if.get() or _cpu_architecture()


@cache
def _cpu_architecture() -> str:
    return current().arch


@cache
def instructions() -> str:
    """Return a short digest of all CPU instructions that torch knows of.

    It is in the keys of code for this CPU alone.
    """
    import torch

    capabilities = torch.cpu.get_capabilities()
    able = " ".join(sorted(name for name, value in capabilities.items() if value is True))
    return hashlib.sha256(able.encode()).hexdigest()[:16]


@contextmanager
def as_cpu(arch: str) -> Iterator[None]:
    """Let `current` report a CPU of that architecture inside the block, in this thread."""
    token = _as_if.set(arch)
    try:
        yield
    finally:
        _as_if.reset(token)


_as_if: ContextVar[str] = ContextVar("as_if", default="")


def find_target(name: str) -> Target:
    """Return the table's target of that alias (`h200`), name or `arch:name`, or a CPU level.

    Case and dashes are ignored. A CPU level of x86-64 is written as `x86-64:avx2`.

    Raises:
        TargetError: if no target or several have the name; it lists the nearest ones.
    """
    wanted, devices = _normalize(CHIPS.get(name.lower(), name)), _tables()[1]
    for arch in _X86[1:]:
        if wanted in map(_normalize, (arch, f"{arch}:{ANY}")):
            return Target(ANY, arch, 1, source="a level of instructions")
    matches = [t for a, t in devices.items() if wanted in map(_normalize, (a, t.name, str(t)))]
    if len(matches) == 1:
        return matches[0]
    aliases = {_normalize(spelling): a for a, t in devices.items() for spelling in (t.name, a)}
    near = dict.fromkeys(aliases[k] for k in difflib.get_close_matches(wanted, aliases, 3, 0.4))
    nearest = ", ".join(map(str, matches or near or devices))
    raise TargetError("one target of the table", repr(name), f"Nearest: {nearest}.")


def first_of(arch: str) -> Target | None:
    """Return the table's first target of that architecture (`sm_90`), None if it has none."""
    return next((target for target in table() if _normalize(target.arch) == _normalize(arch)), None)


def table() -> tuple[Target, ...]:
    """Return every target that targets.toml describes, in its order."""
    return tuple(_tables()[1].values())


@cache
def _tables() -> tuple[dict[str, dict[str, Any]], dict[str, Target]]:
    """Return targets.toml in bytes and operations/s: facts by architecture, targets by alias."""
    file = tomllib.loads(Path(__file__).with_name("targets.toml").read_text("utf-8"))
    for row in (*file["arch"].values(), *file["device"].values()):
        row |= {name: row[name] * unit for name, unit in _UNITS.items() if name in row}
        row["rates"] = tuple((dtype, tera * 1e12) for dtype, tera in row.get("rates", {}).items())
    arch = file["arch"]
    return arch, {a: Target(**(arch[row["arch"]] | row)) for a, row in file["device"].items()}


def _complete(measured: Target) -> Target:
    """Return `measured` with the table's facts.

    A partition (MIG, one XCD, a trimmed stack) may have the whole device's name but has fewer
    multiprocessors: it gets its architecture's facts and no rates.
    """
    for row in table():
        if (str(row), row.multiprocessors) == (str(measured), measured.multiprocessors):
            return replace(row, memory=measured.memory)
    return replace(measured, **_tables()[0].get(measured.arch, {}))


def _cuda(p: Any) -> Target:
    """Return the target of torch.cuda's properties; ROCm adds a gcnArchName (`gfx942:sramecc+`)."""
    gfx = p.gcnArchName.split(":")[0] if p.gcnArchName.startswith("gfx") else ""
    arch = gfx or f"sm_{p.major}{p.minor}"
    shared = p.shared_memory_per_block if gfx else p.shared_memory_per_block_optin
    registers = None if gfx else p.regs_per_multiprocessor  # HIP omits accumulation registers
    count, memory = p.multi_processor_count, p.total_memory
    return Target(p.name, arch, count, shared, registers, subgroup=p.warp_size, memory=memory)


def xe(architecture: int) -> str:
    """Return the architecture name of an Intel GPU.

    SYCL's number `architecture` is the GMDID register, shifted up by one byte.
    """
    gmdid = architecture >> 8
    return f"xe:{gmdid >> 22}.{gmdid >> 14 & 0xFF}"


def _xpu(p: Any) -> Target:
    """Return the target of torch.xpu's properties."""
    arch = xe(p.architecture)
    count, shared, subgroup = p.gpu_subslice_count, p.local_mem_size, min(p.sub_group_sizes)
    memory = p.total_memory
    return Target(p.name, arch, count, shared, subgroup=subgroup, memory=memory)


# Each level runs the code of all levels before it.
_X86 = ("x86-64", *(f"x86-64:{isa}" for isa in ("avx2", "avx512", "avx512_bf16", "amx")))


def level(arch: str) -> int:
    """Return the rank of an architecture in its family; 0 for a family without order."""
    return _X86.index(arch) if arch in _X86 else 0


def runs_on(built: str, here: str) -> bool:
    """Return True if a CPU of architecture `here` runs code built for `built`."""
    return built == here or (built in _X86 and here in _X86 and level(built) <= level(here))


def _cpu_arch(machine: str, level: str, features: Mapping[str, Any]) -> str:
    """Return the name of a CPU architecture.

    `level` is torch's (ATEN_CPU_CAPABILITY lowers it), refined by the matrix extensions.
    """
    base = {"amd64": "x86-64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
    level = level.lower().replace(" ", "")
    if level == "avx512" and features.get("avx512_bf16"):
        level = "amx" if features.get("amx_bf16") else "avx512_bf16"
    return base.replace("_", "-") + ("" if level in ("default", "noavx") else f":{level}")


def _physical_cores() -> int:
    """Return the number of physical cores this process may use."""
    allowed = getattr(os, "sched_getaffinity", lambda pid: range(os.cpu_count() or 1))(0)
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return len({_first_match(siblings.format(n), "(.+)") or n for n in allowed})


def _first_match(path: str, pattern: str) -> str | None:
    """Return the first match in a file that only Linux has, None if there is none."""
    text = Path(path).read_text() if Path(path).exists() else ""
    match = re.search(pattern, text, re.MULTILINE)
    return match and match[1]


def _strip_marks(name: str) -> str:
    return re.sub(r"\((R|TM)\)", "", name).replace(" ", "-")


def _normalize(name: str) -> str:
    return _strip_marks(name).replace("-", "").lower()
