"""The table of allocator statistics beside the one that torch prints for CUDA."""

import random

import pytest
import torch

from ipex_inductor.ipex_api.memory_table import COLUMNS, METRICS, memory_table

pytestmark = pytest.mark.unit

KEYS = [
    f"{key.removesuffix('all')}{pool}.{column}" if key.endswith("all") else f"{key}.{column}"
    for key, _, _ in METRICS
    for pool in ("all", "large_pool", "small_pool")
    for column in COLUMNS
]
COUNTERS = ("num_ooms", "num_alloc_retries")


def torchs(stats, abbreviated):
    """CUDA's own table, of statistics that no GPU gave."""
    cuda = torch.cuda.memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "memory_stats", lambda device: stats)
        patch.setattr(cuda, "_get_device_index", lambda *args, **kwargs: 3)
        return cuda.memory_summary(3, abbreviated)


@pytest.mark.parametrize("abbreviated", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_table_is_torchs_but_for_the_device(abbreviated, seed):
    draw = random.Random(seed)
    stats = {key: draw.randrange(1 << draw.randrange(1, 42)) for key in [*KEYS, *COUNTERS]}
    stats |= {counter: stats[counter] % 10**7 for counter in COUNTERS}  # what fits torch's field
    theirs = torchs(stats, abbreviated)
    assert memory_table(stats, "CUDA", 3, abbreviated) == theirs


@pytest.mark.parametrize("number", [0, 767 * 1024, 768 * 1024, 768 * 1024**2 - 1, 768 * 1024**2])
def test_units_change_where_torchs_do(number):
    stats = dict.fromkeys(KEYS, number) | dict.fromkeys(COUNTERS, 0)
    assert memory_table(stats, "CUDA", 3, False) == torchs(stats, False)


def test_what_an_allocator_does_not_count_has_no_row():
    stats = {f"active_bytes.{p}.{c}": 2048 for p in ("all", "small_pool") for c in COLUMNS}
    assert memory_table(stats, "XPU", 0, False) == (
        "|===========================================================================|\n"
        "|                  PyTorch XPU memory summary, device ID 0                  |\n"
        "|===========================================================================|\n"
        "|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |\n"
        "|---------------------------------------------------------------------------|\n"
        "| Active memory         |   2048 B   |   2048 B   |   2048 B   |   2048 B   |\n"
        "|       from small pool |   2048 B   |   2048 B   |   2048 B   |   2048 B   |\n"
        "|===========================================================================|\n"
    )
