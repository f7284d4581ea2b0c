"""Many processes on one kernel cache, killed at random: nothing torn, nothing wrong."""

import pytest

from support.cache.store_stress import hammered

pytestmark = pytest.mark.reliability


@pytest.mark.parametrize(
    ("kills", "operations"),
    [(60, 8_000), pytest.param(1000, 500_000, marks=pytest.mark.slow)],
)
def test_killed_processes_tear_nothing(tmp_path, kills, operations):
    result = hammered(tmp_path / "kernels", kills=kills, operations=operations)
    assert result["puts"] > operations / 100


@pytest.mark.parametrize(
    ("kills", "operations"),
    [(40, 4000), pytest.param(300, 50_000, marks=pytest.mark.slow)],
)
def test_a_network_disk_costs_compiles_and_nothing_else(tmp_path, kills, operations):
    """Names appear up to a second late, handles are stale, locks hold nothing, pids are equal."""
    hammered(tmp_path / "kernels", kills=kills, operations=operations, network=True)
