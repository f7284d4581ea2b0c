"""Many processes, killed at random, on one kernel cache: nothing torn, nothing wrong, no exception."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DEFAULTS = {
    "processes": 8,
    "keys": 200,
    "size": 4096,
    "seconds": 500,
    "kills": 0,
    "operations": 0,
    "quota": 1 << 30,
    "network": False,
    "evict": 0.05,
    "pause": (0.005, 0.06),
}


def hammer(folder, **spec):
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    given = json.dumps(DEFAULTS | {"folder": str(folder)} | spec)
    ran = subprocess.run(
        [sys.executable, TESTS / "hammer.py", given],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    print(result)
    assert result["exceptions"] == 0, ran.stderr
    assert result["wrong"] == 0
    assert "is not used" not in ran.stderr, ran.stderr
    return result


@pytest.mark.parametrize(
    ("kills", "operations"),
    [(150, 20_000), pytest.param(1000, 500_000, marks=pytest.mark.slow)],
)
def test_killed_processes_tear_nothing(tmp_path, kills, operations):
    result = hammer(tmp_path / "kernels", kills=kills, operations=operations)
    assert result["kills"] >= kills
    assert result["operations"] >= operations
    assert result["puts"] > operations / 100
    assert result["bad"] == 0
    assert result["orphans"] == 0


@pytest.mark.parametrize(
    ("kills", "operations"),
    [(40, 4000), pytest.param(300, 100_000, marks=pytest.mark.slow)],
)
def test_a_network_disk_costs_compiles_and_nothing_else(tmp_path, kills, operations):
    """Names appear up to a second late, handles are stale, locks hold nothing, pids are equal."""
    result = hammer(tmp_path / "kernels", kills=kills, operations=operations, network=True)
    assert result["kills"] >= kills
    assert result["operations"] >= operations
    assert result["bad"] == 0
    assert result["orphans"] == 0
