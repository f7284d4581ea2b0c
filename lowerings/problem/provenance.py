"""When and on what something is measured, as far as this process can tell."""

import os
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ipex_inductor import compat
from ipex_inductor.aot_cache.digest import source_digest
from ipex_inductor.autotune.record import Provenance
from ipex_inductor.target import device as target


def provenance_of(device: torch.device, source: str = "") -> Provenance:
    """Of a measurement now, on `device`; by another tool if it has a `source`."""
    return Provenance(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=target.current(device).name,
        torch=compat.VERSION,
        package=source_digest(),
        driver=_driver(device),
        triton=_triton(),
        toolkit=str(torch.version.cuda or torch.version.hip or torch.version.xpu or ""),
        clock=_clock(device),
        source=source,
    )


def _driver(device: torch.device) -> str:
    file = Path("/proc/driver/nvidia/version")
    if device.type != "cuda" or not file.exists():
        return ""
    found = re.search(r"\b\d{3}\.\d[\d.]*", file.read_text())
    return found[0] if found else ""


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _clock(device: torch.device) -> str:
    """The clock of the multiprocessors now, where the vendor's library says it."""
    if device.type == "cpu":
        return f"load {os.getloadavg()[0]:.2f}"  # what else this machine did lately
    try:
        return f"{getattr(torch, device.type).clock_rate(device)} MHz"
    except Exception:  # the library, or the right to ask it, may be missing
        return ""
