"""Low-precision weights under fully_shard, in several processes, against fp32 that is whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.host(
    "two processes of the CPU; tests/gpu/test_fused_fsdp.py has those of GPUs"
)

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "support" / "optim" / "fsdp_ranks.py"
PATHS = (TESTS, TESTS.parent)

# By number of processes. They start slowly, so one set of them runs several checks.
CHECKS = {
    "training": (
        2,
        "split_trains",
        "halves_train",
        "other_optimizers_train",
        "clipped_and_scheduled",
        "scaled",
        "fused",
        "fused_clip",
        "distributed_otherwise",
        "norms_that_one_process_cannot_take",
        "gradients_that_one_process_lacks",
        # Ways to shard and to save.
        "in_any_order",
        "mixed_precision",
        "moved",
        "memory",
        "state_dicts",
        "checkpoints",
    ),
    "uneven": (3, "uneven_shards", "parts_of_what_each_had", "norms_of_shards"),
    "meshes": (4, "norms_on_meshes", "clipped_on_meshes"),
}


# Every optimizer in every way; a minute and more, of kernels that are compiled. And masters, which
# are cut as halves are; meshes and state dicts, of which there are others above.
OTHERWISE = "others_train", "fused_otherwise", "masters_train", "on_meshes_of_any_kind"
OTHERWISE += ("resumed_at_once", "in_every_order")
MORE = pytest.param((2, *OTHERWISE), marks=pytest.mark.slow, id="training otherwise")
LONG = ("uneven", "meshes")  # 20 seconds each, of three and four processes
ALL = [
    *(pytest.param(c, id=n, marks=[pytest.mark.slow] * (n in LONG)) for n, c in CHECKS.items()),
    MORE,
]


@pytest.mark.parametrize("checks", ALL)
def test_under_fully_shard(checks, tmp_path):
    """See fsdp_ranks.py."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS)), "OMP_NUM_THREADS": "1"}
    size, *names = map(str, checks)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), size, str(tmp_path), *names],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
