"""Statistics of a caching allocator as a table, in the layout of torch.cuda.memory_summary."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

WIDTH = 75
COLUMNS = ("current", "peak", "allocated", "freed")
HEADER = "        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  "
POOLS = (("large_pool", "      from large pool"), ("small_pool", "      from small pool"))


@dataclass(frozen=True)
class _Unit:
    """Abbreviation of a number: divided by `step` until it is below `most`."""

    names: tuple[str, ...]
    step: int
    most: int
    text: str

    def show(self, value: int, like: int) -> str:
        """Return `value` in the unit that suits `like`."""
        power = 0
        while like >= self.most * self.step**power and power < len(self.names) - 1:
            power += 1
        return self.text.format(value // self.step**power, self.names[power])


_BYTES = _Unit(("B  ", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024, 768 * 1024, "{:6d} {}")
_COUNT = _Unit((" ", "K", "M"), 1000, 750 * 1000, "{:7d} {} ")

METRICS = (
    ("allocated_bytes.all", "Allocated memory", _BYTES),
    ("active_bytes.all", "Active memory", _BYTES),
    ("requested_bytes.all", "Requested memory", _BYTES),
    ("reserved_bytes.all", "GPU reserved memory", _BYTES),
    ("inactive_split_bytes.all", "Non-releasable memory", _BYTES),
    ("allocation.all", "Allocations", _COUNT),
    ("active.all", "Active allocs", _COUNT),
    ("segment.all", "GPU reserved segments", _COUNT),
    ("inactive_split.all", "Non-releasable allocs", _COUNT),
    ("oversize_allocations", "Oversize allocations", _COUNT),
    ("oversize_segments", "Oversize GPU segments", _COUNT),
)


def memory_table(stats: Mapping[str, int], kind: str, device: int, abbreviated: bool) -> str:
    """Return allocator statistics as a table, one row per counted metric.

    Args:
        stats: as `torch.cuda.memory_stats` returns them.
        kind: device type in capitals, such as "XPU".
        device: index of the device.
        abbreviated: True to leave out the rows of each pool.
    """
    rule, thin = "=" * WIDTH, "-" * WIDTH
    lines = [rule, f"{'':17} PyTorch {kind} memory summary, device ID {device}"]
    if "num_ooms" in stats and "num_alloc_retries" in stats:
        ooms, retries = stats["num_ooms"], stats["num_alloc_retries"]
        cell = f"{'':11} {kind} OOMs: {ooms}".ljust(36)
        lines += [thin, f"{cell}|{'':7} {kind.lower()}Malloc retries: {retries}"]
    lines += [rule, HEADER]
    for key, title, unit in METRICS:
        rows = [*_rows(stats, key, title, unit, abbreviated)]
        lines += [thin, *rows] if rows else []
    return "".join(f"|{line.ljust(WIDTH)}|\n" for line in [*lines, rule])


def _rows(
    stats: Mapping[str, int], key: str, title: str, unit: _Unit, abbreviated: bool
) -> Iterator[str]:
    rows = [(key, title)]
    if key.endswith(".all") and not abbreviated:
        rows += [(key.removesuffix("all") + pool, label) for pool, label in POOLS]
    for name, label in rows:
        if f"{name}.current" in stats:
            cells = (unit.show(stats[f"{name}.{c}"], stats[f"{key}.{c}"]) for c in COLUMNS)
            yield f" {label:<21} | {' | '.join(cells)} "
