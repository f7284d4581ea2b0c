"""Lists of cores, and the machine as Linux describes it."""

import subprocess
import sys
from itertools import chain

import pytest

from ipex_inductor.cpu import cores
from ipex_inductor.errors import CoresError

pytestmark = pytest.mark.unit

# number: (package, core), as on Xeons: the second threads of all cores come behind the first
TWO_SOCKETS = {n: (n // 2 % 2, n % 2) for n in range(8)}
NODES = {0: "0-1,4-5", 1: "2-3,6-7"}


def lay_out(root, places, nodes, online):
    (root / "cpu").mkdir()
    (root / "cpu/online").write_text(online + "\n")
    for number, (package, core) in places.items():
        folder = root / f"cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    for node, listed in nodes.items():
        (root / f"node/node{node}").mkdir(parents=True)
        (root / f"node/node{node}/cpulist").write_text(listed + "\n")
    if nodes:
        (root / "node/online").write_text(",".join(map(str, nodes)) + "\n")
    return cores.machine(root)


@pytest.mark.parametrize(
    ("said", "numbers"),
    [("", []), ("3", [3]), ("0-3,8", [0, 1, 2, 3, 8]), (" 4 - 5 , 1\n", [4, 5, 1])],
)
def test_a_list_is_read_as_it_is_written(said, numbers):
    assert cores.parse(said) == numbers


@pytest.mark.parametrize("said", ["a", "3-1", "1-", "-1", "1 2"])
def test_what_is_no_list_is_an_error_that_shows_it(said):
    with pytest.raises(CoresError, match='"0-3,8"') as caught:
        cores.parse(said)
    assert repr(said) in str(caught.value)


@pytest.mark.parametrize("numbers", [[], [7], [0, 1, 2], [0, 2, 3, 9]])
def test_a_list_is_written_as_it_is_read(numbers):
    assert cores.parse(cores.text(reversed(numbers))) == numbers


def test_the_shortest_list():
    assert cores.text([0, 1, 2, 8, 9, 4]) == "0-2,4,8-9"


def test_threads_nodes_and_cores_that_are_off(tmp_path):
    found = lay_out(tmp_path, TWO_SOCKETS, NODES, "0-6")
    assert [core.number for core in found] == [*range(7)]
    assert [core.node for core in found] == [0, 0, 1, 1, 0, 0, 1]
    assert [core.number for core in found if core.first] == [0, 1, 2, 3]


def test_without_nodes_there_is_one(tmp_path):
    assert {core.node for core in lay_out(tmp_path, TWO_SOCKETS, {}, "0-7")} == {0}


def test_this_machine_has_the_cores_that_this_process_may_use():
    assert cores.available() <= {core.number for core in cores.machine()}


def test_a_node_by_its_number():
    first = [core.number for core in cores.machine() if core.node == 0 and core.first]
    assert cores.get_core_list_of_node_id(0) == first
    with pytest.raises(CoresError, match="99"):
        cores.get_core_list_of_node_id(99)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_shares_are_even_and_the_first_take_what_is_left(count):
    shares = cores.shared_out(range(5), count)
    assert [*chain(*shares)] == [*range(5)]
    assert [len(share) for share in shares] == sorted(map(len, shares), reverse=True)
    assert len(shares) == count
    assert len(shares[0]) - len(shares[-1]) <= 1


def test_no_torch_is_imported():
    code = "import sys, ipex_inductor.cpu.cores; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
