"""The garbage collector: off while a graph is looked for, on while one is compiled."""

import copy
import gc
import importlib
import importlib.util
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from ipex_inductor import compat
from ipex_inductor.backend import compile_graph
from ipex_inductor.errors import OptionError
from ipex_inductor.runtime import gc_pause

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True, scope="module")
def _what_is_frozen_is_not_counted():
    """It is, here."""


@pytest.fixture(autouse=True)
def _on():
    thresholds = gc.get_threshold()
    gc.enable()
    yield
    gc.enable()
    gc.set_threshold(*thresholds)


def test_it_is_off_inside_and_on_again_whatever_is_raised():
    def fail():
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError), gc_pause.pause():
        fail()
    assert gc.isenabled()


def test_one_that_was_off_stays_off():
    gc.disable()
    with gc_pause.pause():
        gc_pause.resume()
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_resumed_before_the_end_it_is_on():
    with gc_pause.pause():
        gc_pause.resume()
        assert gc.isenabled()
        gc_pause.resume()
    assert gc.isenabled()
    gc_pause.resume()


def test_threads_that_overlap_wait_for_the_last():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with gc_pause.pause():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with gc_pause.pause():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_forked_child_collects():
    with gc_pause.pause():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not gc.isenabled()


def test_a_cold_graph_is_lowered_with_the_collector_on(monkeypatch):
    from ipex_inductor import compat

    seen = []
    compile_inner = compat.compile_inner

    def compiled(*args, **kwargs):
        seen.append(gc.isenabled())
        return compile_inner(*args, **kwargs)

    monkeypatch.setattr(compat, "compile_inner", compiled)
    torch.compiler.reset()
    with torch.no_grad(), compat.graph_caches_off():
        torch.compile(torch.nn.Linear(3, 3), backend="ipex")(torch.ones(2, 3))
    assert seen == [True]
    assert gc.isenabled()


def test_an_error_of_the_users_leaves_it_on():
    gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    with pytest.raises(OptionError):
        compile_graph(gm, [torch.ones(2)], options={"no_such_option": 1})
    assert gc.isenabled()


def test_what_was_made_meanwhile_is_old_then_and_still_collected():
    """No full collection is due at the end, which would walk all that torch has."""
    full = []

    def note(phase, info):
        full.append(info["generation"] == 2 and phase == "start")

    class Node:
        pass

    gc.unfreeze()  # what conftest.py froze counts as old here
    thresholds = gc.get_threshold()
    gc.set_threshold(100, 1, 1)  # a full one soon, if a quarter more has come
    gc.collect()
    with gc_pause.pause():
        kept = [[] for _ in range(200_000)]
        node = Node()
        node.itself = node
        dead = weakref.ref(node)
        del node
    gc.callbacks.append(note)
    try:
        more = [[] for _ in range(2_000)]
        assert full
        assert not any(full)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert len(kept) + len(more) == 202_000
    gc.collect()
    assert dead() is None


def test_what_users_froze_stays_frozen():
    kept = [[] for _ in range(10_000)]
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert frozen > len(kept)
        with gc_pause.pause():
            pass
        # Of what was frozen some temporaries die meanwhile; all would be thawed, or all be frozen.
        assert abs(gc.get_freeze_count() - frozen) < len(kept)
    finally:
        gc.unfreeze()


def test_put_off_it_is_as_before_after_the_next_resume():
    usual = gc.get_threshold()
    gc_pause.postpone()
    gc_pause.postpone()
    assert gc.get_threshold() == (500_000, *usual[1:])
    gc_pause.resume()
    assert gc.get_threshold() == usual
    gc_pause.resume()
    assert gc.get_threshold() == usual


def test_put_off_it_still_collects():
    """What was made is bounded, also where nobody ever resumes."""

    class Node:
        pass

    gc.collect()
    gc_pause.postpone()
    node = Node()
    node.itself = node
    dead = weakref.ref(node)
    del node
    kept = [[] for _ in range(500_000)]
    assert dead() is None
    assert len(kept) == 500_000


@pytest.mark.parametrize("own", [0, 600_000])
def test_thresholds_of_users_that_collect_less_stay(own):
    gc.set_threshold(own, 10, 10)
    gc_pause.postpone()
    assert gc.get_threshold()[0] == own
    gc_pause.resume()
    assert gc.get_threshold()[0] == own


def test_a_threshold_that_users_set_meanwhile_stays():
    gc_pause.postpone()
    gc.set_threshold(1234, 10, 10)
    gc_pause.resume()
    assert gc.get_threshold()[0] == 1234


def test_a_child_forked_meanwhile_collects_as_usual():
    usual = gc.get_threshold()
    gc_pause.postpone()
    child = os.fork()
    if not child:
        os._exit(0 if gc.get_threshold() == usual else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert gc.get_threshold() != usual


@pytest.mark.parametrize("fails", [False, True])
def test_the_next_compile_is_told_its_begin_and_its_end_once(fails):
    from torch._dynamo.callback import callback_handler

    def backend(gm, _):
        told.append("compiled")
        if fails:
            raise RuntimeError
        return gm.forward

    def another(_):
        told.append("another's")

    told = []
    torch.compiler.reset()
    compat.around_next_compile(lambda: told.append("begin"), lambda: told.append("end"))
    callback_handler.register_start_callback(another)
    try:
        for number in (1, 2):
            call = torch.compile(lambda x, n=number: x + n, backend=backend)
            try:
                call(torch.ones(2))
            except Exception:
                assert fails
        assert told == ["begin", "another's", "compiled", "end", "another's", "compiled"]
    finally:
        torch.compiler.reset()


IMPORTED = """
import gc, sys, torch, ipex_inductor
usual = gc.get_threshold(), gc.isenabled()
from ipex_inductor.runtime import gc_pause as collector
assert sys.meta_path[0] is collector._DynamosFinder
begun = []
gc.callbacks.append(lambda phase, info: phase == "start" and begun.append(info["generation"]))
import torch._dynamo
print(len(begun), (gc.get_threshold(), gc.isenabled()) == usual)
sys.meta_path.remove(collector._DynamosFinder)
collector.pause_while_dynamo_is_imported()
print(collector._DynamosFinder in sys.meta_path)
"""
FIRST = """
from torch._dynamo.callback import callback_handler
seen = []
note = lambda _=None: seen.append(gc.get_threshold()[0])
ours = torch.compile(lambda x: x + 1, backend="ipex")
note()
callback_handler.register_start_callback(note)
if sys.argv[1] == "ours":
    ours(torch.ones(2))
else:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
note()
torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
note()
print(*seen)
"""


# Dynamo's callbacks are the same, whose backend the first graph is for.
@pytest.fixture(scope="module", params=["ours", pytest.param("another's", marks=pytest.mark.slow)])
def fresh(request, instructions_known, tmp_path_factory):
    """The lines of a process that imports Dynamo, and has a first graph."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED + FIRST, request.param],
        env=os.environ | {"IPEX_HOME": str(tmp_path_factory.mktemp("home"))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_it_is_put_off_from_where_dynamo_begins_to_trace_the_first_graph(fresh):
    usual, *seen = fresh[-1]
    assert seen == ["500000", usual, usual, usual]
    assert usual != "500000"


def test_torchs_own_dynamo_is_imported_without_a_collection(fresh):
    assert fresh[:-1] == [["0", "True"], ["False"]]


def test_a_block_within_another_of_its_thread_changes_nothing():
    with gc_pause.pause():
        with gc_pause.pause():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.fixture
def twin(tmp_path, monkeypatch):
    """A module in Dynamo's place; what it holds is for the test to write."""
    name = f"dynamos_twin_{os.getpid()}"
    monkeypatch.setattr(gc_pause, "DYNAMO", name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    gc_pause.pause_while_dynamo_is_imported()
    yield tmp_path / f"{name}.py"
    sys.modules.pop(name, None)


LOOK = "import gc; on = gc.isenabled()"


def imported(twin):
    importlib.invalidate_caches()
    return importlib.import_module(twin.stem)


def test_dynamo_is_imported_with_the_collector_off_and_by_its_own_loader(twin):
    twin.write_text(LOOK)
    module = imported(twin)
    assert (module.on, gc.isenabled()) == (False, True)
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader
    assert vars(module.__loader__).keys() == {"name", "path"}
    assert importlib.reload(module).on  # as any other module


def test_one_that_was_off_before_dynamo_is_imported_stays_off(twin):
    twin.write_text(LOOK)
    gc.disable()
    imported(twin)
    assert not gc.isenabled()


def test_an_import_of_dynamo_that_raises_leaves_it_on_and_the_next_one_is_paused_too(twin):
    twin.write_text("raise KeyError")
    with pytest.raises(KeyError):
        imported(twin)
    assert gc.isenabled()
    twin.write_text(LOOK + "  # longer: other bytecode")
    assert (imported(twin).on, gc.isenabled()) == (False, True)


def test_who_looks_for_dynamo_pauses_nothing(twin):
    twin.write_text(LOOK)
    spec = importlib.util.find_spec(twin.stem)
    for same in (spec, copy.deepcopy(spec)):  # which asks it what pickle would
        assert (same.origin, gc.isenabled()) == (str(twin), True)
        by_hand = importlib.util.module_from_spec(same)
        same.loader.exec_module(by_hand)  # which does execute it
        assert (by_hand.on, gc.isenabled()) == (False, True)
    assert (imported(twin).on, gc.isenabled()) == (False, True)
    assert importlib.util.find_spec(twin.stem) is sys.modules[twin.stem].__spec__


def test_other_finders_are_asked_as_ever(twin):
    """One before ours, one of the old kind behind it, one behind it that finds, in its own way."""
    asked = []

    class Finder:
        def __init__(self, found):
            self.found = found

        def find_spec(self, name, path, target=None):
            asked.append((self, name))
            return self.found

    loader = type("Loader", (importlib.machinery.SourceFileLoader,), {})(twin.stem, str(twin))
    loader.exec_module = lambda module: module.__dict__.update(on="theirs")
    first = Finder(None)
    last = Finder(importlib.util.spec_from_loader(twin.stem, loader))
    sys.meta_path[:0] = [first]
    at = next(i for i, f in enumerate(sys.meta_path) if f is gc_pause._DynamosFinder)
    sys.meta_path[at + 1 : at + 1] = [object(), last]
    twin.write_text(LOOK)
    assert imported(twin).on == "theirs"
    assert asked == [(first, twin.stem), (last, twin.stem)]


def test_a_dynamo_that_is_not_there_is_missed_as_ever(twin):
    with pytest.raises(ModuleNotFoundError, match=twin.stem):
        imported(twin)


def test_threads_that_import_dynamo_together_get_one_and_it_is_on_again(twin):
    twin.write_text(LOOK + "; import time; time.sleep(0.1)")
    found = []
    threads = [threading.Thread(target=lambda: found.append(imported(twin))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [module.on for module in found] == [False] * 4
    assert len(set(map(id, found))) == 1
    assert gc.isenabled()
