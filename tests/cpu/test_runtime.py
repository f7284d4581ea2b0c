"""`ipex.cpu.runtime`: pools limit and pin, tasks overlap, streams share a batch out."""

import os
import subprocess
import sys
import threading
import time
import warnings
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch
from torch import nn

import ipex_inductor
from ipex_inductor import backend
from ipex_inductor.cpu import cores
from ipex_inductor.cpu.runtime import (
    CPUPool,
    MultiStreamModule,
    MultiStreamModuleHint,
    Task,
    get_default_num_streams,
    is_runtime_ext_enabled,
    pin,
)
from ipex_inductor.errors import ArgumentError, CoresError, OptionError, ThreadsError
from ipex_inductor.runtime import openmp
from support.helpers import Mlp, wait_for

HERE = CPUPool().core_ids
pytestmark = pytest.mark.skipif(
    not is_runtime_ext_enabled() or len(HERE) < 2, reason="needs Linux, OpenMP and two cores"
)
TWO, FIRST, SECOND = HERE[:2], HERE[:1], HERE[1:2]


def of_threads():
    """As Linux says it, for each thread of this process: the cores it may use."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        found[int(task.name)] = cores.parse(status["Cpus_allowed_list"])
    return found


def team(count=None):
    """The cores of the threads that this thread's work is done by, in order."""
    seen = openmp._cores_of_team(count or torch.get_num_threads())
    return [sorted(seen[n]) for n in sorted(seen)]


def work():
    """A product large enough for all threads."""
    return torch.ones(512, 512) @ torch.ones(512, 512)


class Where(nn.Module):
    """What its caller's thread and team look like, beside a result."""

    def forward(self, x):
        work()
        return x + 1, threading.get_native_id(), team(), torch.get_num_threads()


# Pools


def test_a_pool_is_of_cores_of_a_node_or_of_all():
    assert CPUPool(TWO).core_ids == TWO
    assert CPUPool(core_ids=range(HERE[0], HERE[0] + 1)).core_ids == FIRST
    assert CPUPool().core_ids == HERE
    node = next(core.node for core in cores.machine() if core.number == HERE[0])
    assert set(CPUPool(node_id=node).core_ids) <= set(HERE)


def test_cores_that_are_not_ours_are_left_out_and_said():
    with pytest.warns(UserWarning, match="left out: 9999"):
        assert CPUPool([HERE[0], 9999]).core_ids == FIRST
    with pytest.raises(CoresError, match="9999"):
        CPUPool([9999])


def test_cores_win_over_a_node():
    with pytest.warns(UserWarning, match="node_id is not looked at"):
        assert CPUPool(FIRST, node_id=0).core_ids == FIRST


@pytest.mark.parametrize("wrong", [[], [-1], [0.5], [True], [0, 0], ["0"]])
def test_what_are_no_cores(wrong):
    with pytest.raises(CoresError):
        CPUPool(wrong)


@pytest.mark.parametrize("wrong", [7, object()])
def test_what_is_no_list(wrong):
    with pytest.raises(ArgumentError, match="list"):
        CPUPool(wrong)


def test_a_pool_is_asked_for_by_its_class():
    for use in (pin, lambda pool: Task(nn.Identity(), pool)):
        with pytest.raises(ArgumentError, match="CPUPool"):
            use([0])


def test_where_threads_cannot_be_pinned_it_is_said(monkeypatch):
    monkeypatch.setattr(openmp, "_parallel", lambda: None)
    assert not is_runtime_ext_enabled()
    with pytest.raises(ThreadsError, match="OpenMP"):
        pin(CPUPool(FIRST))


# Pinned blocks


def test_inside_a_thread_a_core_and_behind_it_all_as_before():
    work()
    before, count = team(), torch.get_num_threads()
    with pin(CPUPool(TWO)):
        work()
        assert torch.get_num_threads() == 2
        assert team() == [[core] for core in TWO]
        pinned = [allowed for allowed in of_threads().values() if len(allowed) == 1]
        assert sorted(pinned) == [[core] for core in TWO]
    assert torch.get_num_threads() == count
    assert team() == before
    assert all(len(allowed) > 1 for allowed in of_threads().values())


@pytest.mark.parametrize(
    "more", [{}, pytest.param({"OMP_PROC_BIND": "true"}, marks=pytest.mark.slow)], ids=str
)
def test_the_pool_limits_threads_that_torch_starts_afterwards(more):
    """What a process of its own does, whose OpenMP has no thread yet."""
    code = f"""
import torch
from ipex_inductor.cpu.runtime import CPUPool, pin
from tests.cpu.test_runtime import of_threads
with pin(CPUPool({SECOND})):
    torch.ones(512, 512) @ torch.ones(512, 512)
    print(torch.get_num_threads(), [c for c in of_threads().values() if len(c) == 1])
"""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, f"{root}/tests", os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, **more}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    count, rest = run.stdout.split(maxsplit=1)
    assert int(count) == 1
    assert str(SECOND) in rest


def test_blocks_nest():
    with pin(CPUPool(TWO)):
        with pin(CPUPool(SECOND)):
            assert (team(), torch.get_num_threads()) == ([SECOND], 1)
            with pin(CPUPool(TWO)):
                assert team() == [FIRST, SECOND]
            assert (team(), torch.get_num_threads()) == ([SECOND], 1)
        assert team() == [FIRST, SECOND]


def test_the_same_pool_again_costs_no_region(monkeypatch):
    with pin(CPUPool(TWO)):
        monkeypatch.setattr(openmp, "in_each", None)
        with pin(CPUPool(TWO)):
            pass
        monkeypatch.undo()


def test_an_exception_travels_and_all_is_as_before():
    before = team()
    with pytest.raises(KeyError), pin(CPUPool(SECOND)):
        raise KeyError
    assert team() == before


def test_a_function_is_pinned_for_each_call_and_may_call_itself():
    @pin(CPUPool(SECOND))
    def depth(n):
        """What it says."""
        return [team()] + (depth(n - 1) if n else [])

    assert depth(2) == [[SECOND]] * 3
    assert depth.__doc__ == "What it says."
    assert len(team()) == torch.get_num_threads()


def test_other_threads_keep_their_cores_and_their_number():
    count, seen = torch.get_num_threads(), []
    started, leave = threading.Event(), threading.Event()

    def other():
        work()
        started.set()
        leave.wait(60)
        seen.append((torch.get_num_threads(), team()))

    thread = threading.Thread(target=other)
    thread.start()
    started.wait(60)
    with pin(CPUPool(SECOND)):
        leave.set()
        thread.join()
    assert seen == [(count, [HERE] * count)]


def test_threads_that_start_afterwards_get_the_number_of_the_process():
    """`torch.set_num_threads` would have told them that of the pool."""
    count, seen = torch.get_num_threads(), []
    with pin(CPUPool(SECOND)):
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert seen == [count]


def test_mkl_has_the_number_of_the_pool_and_its_own_again():
    local = openmp._mkl_local()
    if local is None:
        pytest.skip("this torch has no MKL")
    own = local(0)
    local(own)
    with pin(CPUPool(SECOND)):
        assert local(1) == 1
    assert local(own) == own


def test_what_is_started_for_others_is_not_kept_on_the_core():
    """Compile workers, which outlive the compilation."""
    seen = []
    with pin(CPUPool(SECOND)):
        with openmp.unbind():
            thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
            thread.start()
            thread.join()
        assert team() == [SECOND]
    assert seen == [set(HERE)]
    with openmp.unbind():
        assert sorted(os.sched_getaffinity(0)) == HERE


def test_compiling_inside_is_on_all_cores(monkeypatch):
    seen, compile_graph = [], backend._compile_or_fall_back
    monkeypatch.setattr(
        backend,
        "_compile_or_fall_back",
        lambda *a: seen.append(sorted(os.sched_getaffinity(0))) or compile_graph(*a),
    )
    with pin(CPUPool(SECOND)):
        compiled(Mlp().eval())(torch.randn(3, 32))
        assert team() == [SECOND]
    assert seen == [HERE]


# Tasks


def scripted(model):
    return torch.jit.script(model)


def compiled(model):
    torch.compiler.reset()
    return torch.compile(model, backend="ipex", options={"strict": True})


@pytest.mark.parametrize("made", [lambda model: model, scripted, compiled])
def test_a_task_has_the_results_of_its_module(made):
    model, x = Mlp().eval(), torch.randn(3, 32)
    task = Task(made(model), CPUPool(SECOND))
    with torch.no_grad():
        futures = [task(x + n) for n in range(3)]
        for n, future in enumerate(futures):
            # another number of threads, another order of sums
            torch.testing.assert_close(future.get(), model(x + n), rtol=1e-5, atol=1e-6)
        assert not task.run_sync(x).requires_grad
    assert task(x).get(60).requires_grad


def test_a_task_keeps_to_its_cores():
    task = Task(Where(), CPUPool(SECOND))
    y, thread, seen, count = task(torch.zeros(1)).get()
    assert (y.item(), seen, count) == (1, [SECOND], 1)
    assert of_threads()[thread] == SECOND
    assert task(torch.zeros(1)).get()[1] == thread != threading.get_native_id()
    assert sorted(os.sched_getaffinity(0)) == HERE
    both = Task(Where(), CPUPool(TWO))
    assert both(torch.zeros(1)).get()[2:] == ([FIRST, SECOND], 2)


def test_two_tasks_on_two_pools_run_at_once():
    meet = threading.Barrier(2, timeout=60)  # broken, and an error, if they took turns
    tasks = [Task(meet.wait, CPUPool(core)) for core in (FIRST, SECOND)]
    assert sorted(future.get() for future in [task() for task in tasks]) == [0, 1]


def test_a_call_does_not_wait():
    go = threading.Event()
    task = Task(lambda x: (go.wait(60), x), CPUPool(SECOND))
    future = task(7)
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.get(0.01)
    go.set()
    assert future.get() == (True, 7)


def test_an_exception_travels_to_who_asks():
    task = Task(Mlp(), CPUPool(SECOND))
    future = task(torch.ones(1, 7))
    with pytest.raises(RuntimeError, match="shapes"):
        future.get()
    assert task(torch.ones(1, 32)).get().shape == (1, 32)


def test_calls_keep_their_order_and_one_can_be_cancelled():
    done, go = [], threading.Event()
    task = Task(lambda n: (go.wait(60), done.append(n)), CPUPool(SECOND))
    futures = [task(n) for n in range(4)]
    assert futures[2].cancel()
    go.set()
    futures[3].get()
    assert done == [0, 1, 3]


def test_a_task_that_calls_itself_or_another_does_not_wait_for_ever():
    inner = Task(lambda n: n + 1, CPUPool(FIRST))

    def count(n):
        return inner(n).get() + (outer(n - 1).get(60) if n else 0)

    outer = Task(count, CPUPool(SECOND))
    assert outer(2).get(60) == 6


NAME = ContextVar("NAME", default="none")


def test_what_the_caller_set_for_itself_counts():
    def state(x):
        linear = nn.functional.linear(x, x)
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), linear.dtype, NAME.get()

    task, x = Task(state, CPUPool(SECOND)), torch.ones(2, 2)
    assert task(x).get() == (True, False, torch.float32, "none")
    NAME.set("mine")
    with torch.no_grad():
        assert task(x).get() == (False, False, torch.float32, "mine")
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert task(x).get() == (False, True, torch.bfloat16, "mine")


def test_the_thread_goes_with_its_task():
    task = Task(nn.Identity(), CPUPool(SECOND))
    (thread,) = (t for t in threading.enumerate() if t.ident == task._thread)
    del task
    wait_for(lambda: not thread.is_alive(), 30)


def test_other_threads_run_while_a_task_computes():
    """What computes lets go of the interpreter: torch's own kernels do, TorchScript whole."""
    a = torch.randn(1500, 1500)
    task = Task(scripted(Chain()), CPUPool(SECOND))
    task(a[:8, :8]).get()
    future, turns = task(a), 0
    while not future.done():
        turns += 1
        time.sleep(0.0005)
    future.get()
    assert turns > 5  # of a chain that takes a tenth of a second at least


class Chain(nn.Module):
    def forward(self, x):
        y = x
        for _ in range(8):
            y = torch.tanh(y @ x)
        return y


# Streams


class Pair(nn.Module):
    """Two results, and a number."""

    def forward(self, x, scale: float, y):
        return x * scale, scale, y + 1


def test_streams_give_what_the_module_gives():
    model, x = Mlp().eval(), torch.randn(5, 32)
    with torch.no_grad():
        for made in (model, scripted(model), compiled(model)):
            for streams, pool in (("AUTO", CPUPool(TWO)), (2, CPUPool(TWO)), (1, CPUPool(SECOND))):
                many = MultiStreamModule(made, streams, pool)
                # another number of threads, another order of sums
                torch.testing.assert_close(many(x), model(x), rtol=1e-5, atol=1e-6)
    assert many.get_stream_number() == 1


def test_cores_and_batch_are_shared_out():
    many = MultiStreamModule(Where(), 2, CPUPool(TWO), concat_output=False)
    assert get_default_num_streams(CPUPool(TWO)) == 2
    results = many(torch.zeros(5, 2))
    assert [y.shape[0] for y, *_ in results] == [3, 2]
    assert [seen for _, _, seen, _ in results] == [[FIRST], [SECOND]]
    assert [task.cpu_pool.core_ids for task in many.tasks] == [FIRST, SECOND]


@pytest.mark.parametrize("size", [1, 0])
def test_a_batch_smaller_than_the_streams(size):
    x = torch.randn(size, 32)
    many = MultiStreamModule(nn.Tanh(), 2, CPUPool(TWO), concat_output=False)
    (only,) = many(x)
    assert torch.equal(only, torch.tanh(x))


def test_one_stream_runs_here_on_the_pool():
    many = MultiStreamModule(Where(), 1, CPUPool(SECOND), concat_output=False)
    ((_, thread, seen, _),) = many(torch.zeros(2))
    assert (thread, seen) == (threading.get_native_id(), [SECOND])
    assert sorted(os.sched_getaffinity(0)) == HERE


def test_hints_for_arguments_and_results():
    x, y = torch.randn(4, 2), torch.randn(3, 4)
    many = MultiStreamModule(
        Pair(),
        2,
        CPUPool(TWO),
        input_split_hint=MultiStreamModuleHint(0, None, 1),
        output_concat_hint=MultiStreamModuleHint((0, None, 1)),
    )
    got, want = many(x, 2.0, y), Pair()(x, 2.0, y)
    assert [torch.equal(got[n], want[n]) for n in (0, 2)] == [True, True]
    assert got[1] == 2.0


def test_hints_by_keyword_and_inside_of_containers():
    def model(parts, *, scale=1):
        return {"sum": parts["a"] + parts["b"][0] * scale, "whole": parts["b"][1]}

    parts = {"a": torch.randn(4, 2), "b": (torch.randn(4, 2), torch.randn(3)), "rest": "kept"}
    many = MultiStreamModule(
        model,
        2,
        CPUPool(TWO),
        input_split_hint=MultiStreamModuleHint({"a": 0, "b": (0, None)}),
        output_concat_hint=MultiStreamModuleHint(sum=0, whole=None),
    )
    got, want = many(parts, scale=3), model(parts, scale=3)
    assert torch.equal(got["sum"], want["sum"])
    assert torch.equal(got["whole"], want["whole"])


@pytest.mark.parametrize(
    ("hint", "joined", "word"),
    [
        (MultiStreamModuleHint(0, 0, 0, 0), (0, None, 0), "none at 3"),
        (MultiStreamModuleHint(0, None, 1), (0, None, 0), "sizes"),
        (MultiStreamModuleHint(0, 0, 0), (0, None, 0), "float"),
        (MultiStreamModuleHint(0, None, (0,)), (0, None, 0), "tensor of shape"),
        (MultiStreamModuleHint(0, None, "x"), (0, None, 0), "'x'"),
        (MultiStreamModuleHint(0, None, 0), 0, "output_concat_hint"),
        (MultiStreamModuleHint(0, None, 0), (0, None), "tuple"),
    ],
)
def test_a_hint_that_does_not_fit_is_said(hint, joined, word):
    out = MultiStreamModuleHint(joined)
    many = MultiStreamModule(Pair(), 2, CPUPool(TWO), input_split_hint=hint, output_concat_hint=out)
    with pytest.raises(ArgumentError, match=word):
        many(torch.ones(4, 2), 2.0, torch.ones(4, 3))


def test_a_result_that_the_hint_leaves_out_is_not_lost():
    many = MultiStreamModule(
        lambda x: {"a": x, "b": x},
        2,
        CPUPool(TWO),
        output_concat_hint=MultiStreamModuleHint(a=0),
    )
    with pytest.raises(ArgumentError, match="a, b"):
        many(torch.ones(4))


def test_numbers_of_streams():
    with pytest.warns(UserWarning, match="2 it will be"):
        assert MultiStreamModule(nn.Tanh(), 5, CPUPool(TWO)).num_streams == 2
    for wrong in (0, "MANY", 1.5, True):
        with pytest.raises(OptionError, match="AUTO"):
            MultiStreamModule(nn.Tanh(), wrong, CPUPool(TWO))


def test_an_exception_of_one_stream_travels_when_none_runs_any_more():
    running = []

    def model(x):
        running.append(1)
        if x.shape[0] == 3:  # the first, which is asked for its result first
            raise KeyError("long")
        time.sleep(0.2)
        running.pop()

    many = MultiStreamModule(model, 2, CPUPool(TWO))
    with pytest.raises(KeyError, match="long"):
        many(torch.ones(5))
    assert running == [1]


def test_it_is_a_module_of_its_model():
    many = MultiStreamModule(model := Mlp(), 2, CPUPool(TWO))
    assert list(many.parameters()) == list(model.parameters())
    many.eval()
    assert not model.training


def test_it_is_reached_as_before():
    assert ipex_inductor.cpu.runtime.CPUPool is CPUPool
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ipex_inductor.cpu.runtime.is_runtime_ext_enabled()
