"""Measuring on a Ray cluster of two nodes, of which one is lost on the way."""

import time

import pytest

from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.fleet import measure_problems
from ipex_inductor.autotune.record import Operand, Problem, encode
from ipex_inductor.errors import ArgumentError
from ipex_inductor.lowerings.problem.settings import settings_of
from ipex_inductor.lowerings.select.selection import COMMAND, store_results
from ipex_inductor.target import device

ray = pytest.importorskip(
    "ray", reason="Ray is not installed, and nothing but --engine ray needs it"
)


def product(rows):
    shapes = ((2, rows, 16), (2, 16, 8))
    operands = tuple(Operand(s, (s[1] * s[2], s[2], 1), "float32") for s in shapes)
    settings = settings_of("cpu") | {"threads": 1}
    return Problem("aten.bmm.default", operands, str(device.current()), settings=settings)


@pytest.fixture(scope="module")
def cluster():
    """A head, to which each test adds the other node if it is lost."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def other(cluster):
    """The node that may be lost."""
    (node,) = cluster.worker_nodes or [cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)]
    return node


# A problem takes ten seconds. The node is lost once so many have an answer, one at once.
LOSSES = [(2, 1), (4, 2)]


@pytest.mark.slow  # 50 s and more
@pytest.mark.parametrize(("count", "lost_at"), LOSSES)
def test_every_problem_is_measured_though_a_node_is_lost(cluster, other, tmp_path, count, lost_at):
    problems = [product(4 * rows) for rows in range(1, 1 + count)]
    alien = Problem("aten.bmm.default", problems[0].operands, "sm_90:none")
    told = {}
    run = measure_problems(
        [alien, *problems], 500, COMMAND, gpus=0, cpus=1, address=cluster.address
    )
    for problem, answer in store_results(run, tmp_path / "db"):
        told[encode(problem)] = answer
        if len(told) == lost_at:
            cluster.remove_node(other, allow_graceful=False)
    assert "no device here is sm_90:none" in told.pop(encode(alien))
    assert told.keys() == {encode(p) for p in problems}
    kept = {encode(r) for r in Records(tmp_path / "db")}
    assert kept == {encode(record) for record in told.values()}


@pytest.mark.usefixtures("other")
def test_what_no_machine_has_is_an_error(cluster):
    run = measure_problems([product(4)], 60, COMMAND, gpus=0, cpus=64, address=cluster.address)
    with pytest.raises(ArgumentError, match="machines with 64 CPUs for Ray; got 1, 1"):
        next(run)


@pytest.mark.usefixtures("other")
def test_a_spent_budget_starts_nothing(cluster):
    begun = time.monotonic()
    run = measure_problems([product(4)] * 3, 0, COMMAND, gpus=0, cpus=1, address=cluster.address)
    assert [told for _, told in run] == ["the budget is spent"] * 3
    assert time.monotonic() - begun < 60
