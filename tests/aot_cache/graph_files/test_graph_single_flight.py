"""Processes that start cold together: one compiles a graph, the others wait, never in a ring."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ipex_inductor.aot_cache import default_store, disk, lock, single_flight
from ipex_inductor.aot_cache.graph_files import workroom
from ipex_inductor.aot_cache.graph_files.graphs import GraphFiles
from ipex_inductor.compiler import graph_cache
from support.cache.cache_keys import key
from support.cache.concurrent_builders import rounds
from support.compile_processes import IPEX, TRAINED, outcome, run, start

AT_ONCE = 1.5  # s; nobody waits less than PATIENCE, 6 s, for who holds a lock and shows no sign


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    monkeypatch.setattr(workroom, "_made", None)
    return tmp_path


@contextlib.contextmanager
def held_elsewhere(number, part=""):
    """As by a process that shows no signs of life."""
    file, _ = lock._try_lock(default_store.store().lock_path(key(number), part))
    lock._mark_file(file)
    try:
        yield
    finally:
        os.close(file)


def other(number, **files):
    """What another process puts into the entry."""
    mine, workroom._made = workroom._made, None
    try:
        graph = GraphFiles(key(number))
        for name, text in files.items():
            (graph.folder / name).write_text(text)
        graph.keep()
    finally:
        workroom._made = mine


def never():
    pytest.fail("it was waited")


@contextlib.contextmanager
def at_once():
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < AT_ONCE


# --- as many processes as one likes, and no torch


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "parts"), [pytest.param("graph", 1, marks=pytest.mark.slow), ("training", 2)]
)
def test_a_cold_graph_is_compiled_once(tmp_path, kind, parts, count):
    """Sixteen processes; of a training graph once forward and once backward."""
    found = rounds(tmp_path / "home", count, kind=kind)
    once_each = sum(r["built"] == parts for r in found)
    print(f"{kind}: compiled once in {once_each} of {count} rounds")
    assert once_each >= 0.99 * count


@pytest.mark.parametrize(
    ("harm", "count", "patience"),
    [
        ("kill", 3, 5),
        pytest.param("kill", 30, 5, marks=pytest.mark.slow),
        pytest.param("stop", 3, 10, marks=pytest.mark.slow),
    ],
)
def test_waiters_go_on_without_a_stopped_or_killed_compiler(tmp_path, harm, count, patience):
    found = rounds(tmp_path / "home", count, harm, kind="graph")
    print(harm, [(r["built"], r["waited"]) for r in found])
    assert max(r["waited"] for r in found) <= patience
    if harm == "kill":
        assert all(r["built"] == 2 for r in found), "and one of them compiles"


# --- in this process


def test_what_came_meanwhile_is_a_hit_that_says_so(home, caplog):
    caplog.set_level("INFO", "ipex_inductor")
    graph, told = GraphFiles(key(1)), []
    assert graph.outcome == "miss"

    def come():
        told.append(len(caplog.messages))
        other(1, code="1")
        os.unlink(path)  # released

    path = default_store.store().lock_path(key(1))
    with held_elsewhere(1), graph.alone(come):
        assert graph.outcome == "hit"
        assert (graph.folder / "code").read_text() == "1"
        assert not single_flight._busy.locked(), "nothing is left to be compiled"
    assert told == [1]
    assert "all verified, from" in graph.reason
    assert ", waited 0." in graph.reason
    said = [text for text in caplog.messages if "waiting" in text]
    assert said == ["kernel cache: another process compiles this graph: waiting for it"]
    assert not [text for text in caplog.messages if "a graph is compiled" in text]


def test_a_spoiled_entry_that_came_meanwhile_is_not_used(home):
    graph = GraphFiles(key(1))
    path = default_store.store().lock_path(key(1))

    def come():
        other(1, code="1")
        (entry,) = Path(path).parent.glob("*.entry")
        data = bytearray(entry.read_bytes())
        data[-1] ^= 1
        entry.write_bytes(data)
        os.unlink(path)

    with held_elsewhere(1), graph.alone(come):
        assert graph.outcome == "miss"
        assert list(workroom.files_in(graph.folder)) == []
    assert "for who compiled it, in vain" in graph.reason


def test_nobody_waits_for_a_second_one_where_the_first_has_failed(home, monkeypatch):
    """Or as many failures as there are processes would follow each other."""
    monkeypatch.setattr(lock, "PATIENCE", 60.0)
    path = default_store.store().lock_path(key(1))
    for _ in range(3):
        file, _ = lock._try_lock(path)
        workroom._made = None  # as another process
        graph = GraphFiles(key(1))
        with at_once(), graph.alone(functools.partial(lock._release, path, file)):
            assert graph.outcome == "miss"
            assert not single_flight._busy.locked()


def test_a_compiler_that_never_ends_is_not_waited_for_for_ever(home, monkeypatch):
    monkeypatch.setattr(single_flight, "LONGEST", 0.4)
    monkeypatch.setattr(lock, "PULSE", 0.1)
    monkeypatch.setattr(lock, "PATIENCE", 0.3)  # signs are seen, or that would end it
    graph, since = GraphFiles(key(1)), []
    path = default_store.store().lock_path(key(1))
    with lock.hold_lock(path), graph.alone(lambda: since.append(time.monotonic())):
        assert 0.4 <= time.monotonic() - since[0] < AT_ONCE
    assert graph.reason.endswith("for who compiled it, in vain")


def test_who_compiles_a_graph_waits_for_none(home):
    """Neither one inside of it, nor in another thread; nor does that one hold another lock."""
    with held_elsewhere(2), GraphFiles(key(1)).alone(never):
        with at_once(), GraphFiles(key(2)).alone(never):
            pass

        def compile_another():
            with GraphFiles(key(2)).alone(never), GraphFiles(key(3)).alone(never):
                done.append(lock._try_lock(default_store.store().lock_path(key(3))))

        done = []
        with at_once():
            thread = threading.Thread(target=compile_another)
            thread.start()
            thread.join()
        assert done[0][0] is not None, "it could be had"
        os.close(done[0][0])


def test_who_waits_in_one_thread_waits_in_no_other(home):
    """So what it holds is nothing that another one may wait for."""
    waiting = threading.Event()
    path = default_store.store().lock_path(key(1))
    with held_elsewhere(1):

        def wait():
            with GraphFiles(key(1)).alone(waiting.set):
                pass

        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(5)
        with at_once(), GraphFiles(key(2)).alone(never):
            file, _ = lock._try_lock(default_store.store().lock_path(key(2)))
            assert file is not None, "not held either"
            os.close(file)
        os.unlink(path)
    thread.join()


RING = """
import sys, time
from support.cache.cache_keys import key
from ipex_inductor.aot_cache.graph_files.graphs import GraphFiles
outer, inner = map(int, sys.argv[1:])
print("ready", flush=True)
input()
begun = time.monotonic()
with GraphFiles(key(outer)).alone(lambda: print("waits", flush=True)):
    time.sleep(0.5)
    with GraphFiles(key(inner)).alone(lambda: print("waits", flush=True)):
        pass
print(time.monotonic() - begun)
"""


def test_two_that_compile_two_graphs_in_opposite_order_do_not_wait_for_each_other(home):
    tests = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RING, *order],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for order in (("1", "2"), ("2", "1"))
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        (took,) = process.communicate(timeout=60)[0].splitlines()
        assert float(took) < lock.PATIENCE


def test_a_forked_child_of_who_compiles_goes_on_by_itself(home):
    with GraphFiles(key(1)).alone(never):
        child = os.fork()
        if not child:
            os._exit(single_flight._busy.locked())
        assert os.waitpid(child, 0)[1] == 0


def test_a_backward_is_waited_for_and_added_to_what_is_there(home):
    graph = GraphFiles(key(1))
    with graph.alone(never):
        (graph.folder / "forward").write_text("mine")
        graph.keep()
    assert graph.outcome == "miss"
    path = default_store.store().lock_path(key(1), "-backward")

    def come():
        other(1, backward="theirs")
        os.unlink(path)

    with held_elsewhere(1, "-backward"), graph.alone(come):
        found = {name: (graph.folder / name).read_text() for name in ("forward", "backward")}
        assert found == {"forward": "mine", "backward": "theirs"}
    assert graph.outcome == "miss", "of what was reported nothing changes"
    entries = list((home / "kernels" / "1").glob("*.entry"))
    before = [e.read_bytes() for e in entries]
    graph.keep()
    assert [e.read_bytes() for e in entries] == before, "there is nothing new"


def test_nothing_is_held_between_forward_and_backward(home):
    graph = GraphFiles(key(1))
    with graph.alone(never):
        (graph.folder / "forward").write_text("1")
        graph.keep()
    assert not single_flight._busy.locked()
    assert not list((home / "kernels" / "1").glob(".*.lock"))


def test_what_fails_releases(home):
    with contextlib.suppress(ZeroDivisionError), GraphFiles(key(1)).alone(never):
        raise ZeroDivisionError
    assert not single_flight._busy.locked()
    with at_once(), GraphFiles(key(1)).alone(never):
        pass


@pytest.mark.parametrize("how", ["no locks", "read-only", "others'"])
def test_where_no_lock_is_to_be_had_it_is_compiled(home, monkeypatch, how):
    default_store._store_in.cache_clear()
    if how == "no locks":

        def flock(file, what):
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(disk, "flock", flock)
    else:
        default_store.store().folder.check_writable()
        (home / "kernels" / "1").chmod(0o500 if how == "read-only" else 0o777)
    with at_once(), GraphFiles(key(1)).alone(never):
        pass
    (home / "kernels" / "1").chmod(0o700)
    default_store._store_in.cache_clear()


def test_what_only_explains_neither_waits_nor_holds(home):
    with held_elsewhere(1), at_once(), GraphFiles(key(1), keeps=False).alone(never):
        pass
    with GraphFiles(key(2), keeps=False).alone(never):
        assert not single_flight._busy.locked()


def test_ranks_do_not_wait(home, monkeypatch):
    """With a process group, or where a launcher says that there are several of them."""

    def goes_on():
        with held_elsewhere(1), at_once(), graph_cache.Folder(key(1), never).enter():
            assert not single_flight._busy.locked()

    store = torch.distributed.HashStore()
    assert not graph_cache.is_rank()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        goes_on()
    finally:
        torch.distributed.destroy_process_group()
    monkeypatch.setenv("WORLD_SIZE", "2")
    goes_on()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not graph_cache.is_rank()


def test_what_the_backend_compiles_in_holds_the_lock_and_releases_it(home):
    """The folder that torch works in: forward, then a backward that nobody tells the end of."""
    folder = graph_cache.Folder(key(1), never)
    for entered, part in ((folder.enter, ""), (folder.enter_late, "-backward")):
        path = default_store.store().lock_path(key(1), part)
        with entered():
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder.files.folder)
            assert lock._try_lock(path)[0] is None
            with folder.enter_late():  # as a backward is that is compiled with its forward
                pass
            assert os.path.exists(path)
        assert not os.path.exists(path)


# --- compiled by torch


def together(base, count, step):
    """What so many processes say that start at once."""
    started = [start(base, step) for _ in range(count)]
    done = [process.communicate(timeout=500) for process in started]
    assert not any(process.returncode for process in started), [errors for _, errors in done]
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def waits(found):
    return [text for each in found for _, text in each["said"] if "waiting for it" in text]


@pytest.mark.slow
def test_of_two_processes_that_start_cold_one_compiles(tmp_path):
    """Both compare values."""
    found = together(tmp_path, 2, IPEX)
    (waited, compiled) = sorted(found, key=lambda each: len(each["built"]))
    assert (outcome(compiled), outcome(waited)) == ("miss", "hit")
    assert (compiled["aot"], waited["aot"]) == ([0, 1], [1, 0])
    assert (waited["built"], waited["tried"], len(waits(found))) == ([], [], 1)


@pytest.mark.slow
def test_processes_that_train_from_cold_compile_once(tmp_path):
    """Values and gradients are compared in each; g++ runs as often as for one of them alone."""
    alone = run(tmp_path / "alone", TRAINED)
    found = together(tmp_path / "together", 4, TRAINED)
    built = [len(each["built"]) for each in found]
    print(f"g++ ran {built} times, {len(alone['built'])} alone; waits: {len(waits(found))}")
    assert sum(built) == len(alone["built"])
    assert sorted(map(outcome, found)) == ["hit"] * 3 + ["miss"]
    assert len(waits(found)) >= 3
    again = run(tmp_path / "together", TRAINED)
    assert (outcome(again), again["aot"], again["built"]) == ("hit", [1, 0], [])
