"""Provenance of a measurement: time, device and versions, as far as this process can tell."""

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
    """Return the provenance of a measurement made now on `device`.

    Args:
        device: device of the measurement.
        source: tool that measured, if it was another one.
    """
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
    match = re.search(r"\b\d{3}\.\d[\d.]*", file.read_text())
    return match[0] if match else ""


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _clock(device: torch.device) -> str:
    """Return the current clock of the multiprocessors, or the load of a CPU; "" if unknown."""
    if device.type == "cpu":
        return f"load {os.getloadavg()[0]:.2f}"  # The load shows what else ran on this machine.
    try:
        return f"{getattr(torch, device.type).clock_rate(device)} MHz"
    except Exception:  # The vendor's library, or the permission to query it, may be missing.
        return ""
