"""Cores of this machine, read from Linux's /sys without importing torch."""

import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ipex_inductor.errors import CoresError

SYSTEM = Path("/sys/devices/system")
_RANGE = re.compile(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*")


class Core(NamedTuple):
    """Logical core, with its physical core, and whether it is the first thread of that."""

    number: int
    node: int
    physical: tuple[int, int]  # package, core
    first: bool


def parse(text: str) -> list[int]:
    """Return the numbers of a list like "0-3,8", as Linux and the launcher write it.

    Raises `CoresError`.
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise CoresError('numbers and ranges such as "0-3,8"', repr(text), "Mend the list.")
        numbers += range(first, last + 1)
    return numbers


def text(numbers: Iterable[int]) -> str:
    """Return the shortest list of these numbers, such as "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def available() -> frozenset[int]:
    """Return the cores that this thread may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def machine(system: Path = SYSTEM) -> list[Core]:
    """Return all cores that are online, in order; one NUMA node if Linux reports none."""
    online = parse(_read(system / "cpu" / "online") or text(available()))
    nodes = {n: number for number in _nodes(system) for n in _on_node(number, system)}
    cores: list[Core] = []
    physical_cores: set[tuple[int, int]] = set()
    for number in online:
        topology = system / f"cpu/cpu{number}/topology"
        package, core = (_read(topology / n) for n in ("physical_package_id", "core_id"))
        physical = (int(package or 0), int(core or number))
        cores.append(Core(number, nodes.get(number, 0), physical, physical not in physical_cores))
        physical_cores.add(physical)
    return cores


def get_core_list_of_node_id(node_id: int) -> list[int]:
    """Return the cores of a NUMA node, one number per physical core.

    Raises `CoresError` if there is no such node.
    """
    cores = machine()
    numbers = [core.number for core in cores if core.node == node_id and core.first]
    if not numbers:
        nodes = text({core.node for core in cores})
        raise CoresError(f"a NUMA node of this machine ({nodes})", repr(node_id), "Name one.")
    return numbers


def shared_out(items: Sequence[int], count: int) -> list[list[int]]:
    """Return `items` in `count` runs; the first ones are one longer if there is a remainder."""
    size, longer = divmod(len(items), count)
    ends = [size * i + min(i, longer) for i in range(count + 1)]
    return [list(items[a:b]) for a, b in pairwise(ends)]


def _nodes(system: Path) -> list[int]:
    return parse(_read(system / "node" / "online"))


def _on_node(number: int, system: Path) -> list[int]:
    return parse(_read(system / "node" / f"node{number}" / "cpulist"))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
