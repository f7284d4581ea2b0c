"""The garbage collector: off while a graph is looked for, on while one is compiled."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from ipex_inductor import collector, compat
from ipex_inductor.backend import compile_graph
from ipex_inductor.errors import OptionError


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

    with pytest.raises(KeyError), collector.paused():
        fail()
    assert gc.isenabled()


def test_one_that_was_off_stays_off():
    gc.disable()
    with collector.paused():
        collector.resume()
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_resumed_before_the_end_it_is_on():
    with collector.paused():
        collector.resume()
        assert gc.isenabled()
        collector.resume()
    assert gc.isenabled()
    collector.resume()


def test_threads_that_overlap_wait_for_the_last():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with collector.paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with collector.paused():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_forked_child_collects():
    with collector.paused():
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

    thresholds = gc.get_threshold()
    gc.set_threshold(100, 1, 1)  # a full one soon, if a quarter more has come
    gc.collect()
    with collector.paused():
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
        with collector.paused():
            pass
        # Of what was frozen some temporaries die meanwhile; all would be thawed, or all be frozen.
        assert abs(gc.get_freeze_count() - frozen) < len(kept)
    finally:
        gc.unfreeze()


def test_put_off_it_is_as_before_after_the_next_resume():
    usual = gc.get_threshold()
    collector.put_off()
    collector.put_off()
    assert gc.get_threshold() == (500_000, *usual[1:])
    collector.resume()
    assert gc.get_threshold() == usual
    collector.resume()
    assert gc.get_threshold() == usual


def test_put_off_it_still_collects():
    """What was made is bounded, also where nobody ever resumes."""

    class Node:
        pass

    gc.collect()
    collector.put_off()
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
    collector.put_off()
    assert gc.get_threshold()[0] == own
    collector.resume()
    assert gc.get_threshold()[0] == own


def test_a_threshold_that_users_set_meanwhile_stays():
    collector.put_off()
    gc.set_threshold(1234, 10, 10)
    collector.resume()
    assert gc.get_threshold()[0] == 1234


def test_a_child_forked_meanwhile_collects_as_usual():
    usual = gc.get_threshold()
    collector.put_off()
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


FIRST = """
import gc, sys
import torch
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


@pytest.mark.parametrize("first", ["ours", "another's"])
def test_it_is_put_off_from_where_dynamo_begins_to_trace_the_first_graph(first, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FIRST, first],
        env=os.environ | {"IPEX_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    usual, *seen = done.stdout.split() or [done.stderr]
    assert seen == ["500000", usual, usual, usual]
    assert usual != "500000"
