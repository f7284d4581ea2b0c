"""The garbage collector: off while a graph is looked for, on while one is compiled."""

import gc
import os
import threading
import weakref

import pytest
import torch

from ipex_inductor import collector
from ipex_inductor.backend import compile_graph
from ipex_inductor.errors import OptionError


@pytest.fixture(autouse=True)
def _on():
    gc.enable()
    yield
    gc.enable()


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
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
