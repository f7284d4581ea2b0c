"""Graphs that are compiled at once: in what order, what fails in company, and what is left."""

import itertools
import math
import os
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CodeCacheFuture
from torch.utils._triton import has_triton_package

from ipex_inductor import compat
from ipex_inductor.autotune.record import Choice, Operand, Problem
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.tune import compiling
from ipex_inductor.lowerings.tune.compiling import Begun
from ipex_inductor.lowerings.tune.parallel_compile import Graphs
from ipex_inductor.target import device

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parents[2]
CHOICES = [Choice("library", f"made up {i}") for i in range(5)]


@pytest.fixture
def said(monkeypatch):
    """What happens, in order, where two compile at once."""
    monkeypatch.setattr(compat, "compilers", lambda: 2)
    return []


def graphs(said, monkeypatch, fails=(), company=(), usual=None):
    """Of `CHOICES`: those in `fails` never compile, those in `company` only alone."""
    alone = []

    def begun(problem, choice, inputs):
        number = CHOICES.index(choice)
        said.append(f"{'alone' if alone else 'begin'} {number}")

        def wait():
            said.append(f"wait {number}")
            if number in fails or (number in company and not alone):
                raise RuntimeError(f"number {number} of {len(alone)}")

        return Begun(lambda operands: number, wait, ())

    class Alone:
        def __enter__(self):
            alone.append(True)

        def __exit__(self, *_):
            alone.clear()

    monkeypatch.setattr(compiling, "start_choice", begun)
    monkeypatch.setattr(compat, "compiles_anew_in_this_process", Alone)
    return Graphs(None, CHOICES, (), usual or {}, lambda i: said.append(f"doing {i}"))


def acts(said):
    return [each for each in said if not each.startswith("doing")]


def test_as_many_begin_as_there_are_compilers_before_any_is_waited_for(said, monkeypatch):
    left = deque(range(5))
    found = graphs(said, monkeypatch).next(left, 0, math.inf)
    assert [graph.run(()) for graph in found.values()] == [*found] == [0, 1]
    assert [*left] == [2, 3, 4]
    assert acts(said) == ["begin 0", "begin 1", "wait 0", "wait 1"]
    assert said[::2] == ["doing 0", "doing 1", "doing 0", "doing 1"]


def test_what_is_begun_is_not_begun_again(said, monkeypatch):
    usual = Begun(lambda operands: "usual", lambda: said.append("wait usual"), ())
    found = graphs(said, monkeypatch, usual={1: usual}).next(deque([0, 1]), 0, math.inf)
    assert found[1].run(()) == "usual"
    assert acts(said) == ["begin 0", "wait 0", "wait usual"]


def test_what_fails_in_company_is_compiled_alone_when_the_others_are_done(said, monkeypatch):
    found = graphs(said, monkeypatch, company=[0]).next(deque([0, 1]), 0, math.inf)
    assert [graph.run(()) for graph in found.values()] == [0, 1]
    assert acts(said) == ["begin 0", "begin 1", "wait 0", "wait 1", "alone 0", "wait 0"]
    assert said[said.index("alone 0") - 1] == "doing 0"  # whom the parent is to blame


def test_what_fails_alone_has_its_own_reason_and_the_others_none(said, monkeypatch):
    found = graphs(said, monkeypatch, fails=[1]).next(deque([0, 1]), 0, math.inf)
    assert found[0].run(()) == 0
    assert str(found[1]) == "number 1 of 1"  # alone


def test_who_has_one_compiler_tries_nothing_twice(said, monkeypatch):
    monkeypatch.setattr(compat, "compilers", lambda: 1)
    found = graphs(said, monkeypatch, fails=[0]).next(deque([0, 1]), 0, math.inf)
    assert [*found] == [0]
    assert acts(said) == ["begin 0", "wait 0"]


@pytest.mark.parametrize(("fewest", "begun"), [(-1, 0), (0, 0), (1, 1), (2, 2), (3, 2)])
def test_past_the_deadline_only_the_fewest_begin(fewest, begun, said, monkeypatch):
    left = deque(range(5))
    found = graphs(said, monkeypatch).next(left, fewest, time.monotonic() - 1)
    assert [*found] == [*range(begun)]
    assert [*left] == [*range(begun, 5)]


def test_short_memory_is_no_choices_failure(said, monkeypatch):
    def short():
        raise torch.OutOfMemoryError("no memory")

    usual = {0: Begun(lambda operands: 0, short, ())}
    with pytest.raises(torch.OutOfMemoryError):
        graphs(said, monkeypatch, usual=usual).next(deque([0, 1]), 0, math.inf)


def test_code_is_loaded_while_its_kernels_compile():
    operands = tuple(Operand(s, (s[1] * s[2], s[2], 1), "float32") for s in ((2, 5, 7), (2, 7, 3)))
    epilogue = "aten.relu.default(y)"
    problem = Problem("aten.bmm.default", operands, str(device.current()), {}, epilogue)
    inputs = inputs_of(problem, torch.device("cpu"), seed=0)
    with torch._inductor.config.patch(compile_threads=2):
        graph = compiling.start_graph(problem, inputs, compiling.USUALLY)
        begun = kernels(graph)
        assert begun
        assert all(isinstance(kernel, CodeCacheFuture) for kernel in begun)
        graph.wait_compiled()
    assert not any(isinstance(kernel, CodeCacheFuture) for kernel in kernels(graph))
    # The same product by the same kernel, then nothing that rounds.
    torch.testing.assert_close(graph.run(inputs), torch.bmm(*inputs).relu(), rtol=0, atol=0)


def kernels(graph):
    found = [vars(module).items() for module in graph.modules]
    return [value for name, value in itertools.chain(*found) if name.startswith("cpp_fused")]


def test_only_who_puts_off_does_not_wait(monkeypatch):
    waited = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: waited.append(scope))
    usual = AsyncCompile.wait
    with compat.kernels_put_off() as wait, ThreadPoolExecutor() as others:
        others.submit(AsyncCompile().wait, {"theirs": 1}).result()
        ours = {"__file__": "graph.py"}
        AsyncCompile().wait(ours)
        assert waited == [{"theirs": 1}]
        AsyncCompile().wait({"run at once": 1})
    assert AsyncCompile.wait is usual
    AsyncCompile().wait({"later": 1})
    wait()
    assert waited == [{"theirs": 1}, {"run at once": 1}, {"later": 1}, ours]


def test_inductor_hands_kernels_over_by_name_too(monkeypatch):
    """What times templates does (`select_algorithm`, `scheduler`)."""
    given = []
    monkeypatch.setattr(AsyncCompile, "triton", lambda *args, **how: given.append((args[1:], how)))
    with compat.kernels_put_off():
        AsyncCompile().triton(kernel_name="one", source_code="text")
        AsyncCompile().triton("one", "text\n\n", "cuda")
    assert given == [(("one", "text\n"), {}), (("one", "text\n", "cuda"), {})]


# In a process of its own, whose workers it forks, for they are to know of the GPU that is not here.
TWO = """
import collections, math, sys
import torch
from support.h200 import NAME
from test_rows import conv, offered
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers
from torch._subclasses import FakeTensorMode
from ipex_inductor import lowerings
from ipex_inductor.lowerings.tune import parallel_compile as together
from ipex_inductor.lowerings.problem.workload import empty
from ipex_inductor.prebuild import described as described_gpu
from ipex_inductor.target.device import find_target

lowerings.register()
problem = conv([128, 64, 56, 56], 256, True)
choices = [call.choice for call in offered(problem, "ipex.triton.streamed")][:2]
seen = []

def doing(number):
    seen.append(number)

def kinds(graph):
    found = [vars(module).items() for module in graph.modules]
    return [type(v).__name__ for each in found for k, v in each if k.startswith("triton_tem")]

with described_gpu.device(find_target("h200")), torch.no_grad(), torch._inductor.config.patch(
    compile_threads=2, worker_start_method="fork"
):
    AsyncCompile.wait_pool_ready()
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [empty(o, torch.device("cuda:0")) for o in problem.operands]
        graphs = together.Graphs(problem, choices, inputs, {}, doing)
        begun = graphs._start_graphs(collections.deque([0, 1]), 2, math.inf)
        print(counters["inductor"]["async_compile_cache_hit"])
        print(*(kind for graph in begun.values() for kind in kinds(graph)))
        print(*(kind for graph in begun.values() for kind in kinds(graph.wait_compiled())))
    shutdown_compile_workers()
"""


@pytest.mark.slow  # 22 s; how choices are begun and waited for is tested above
@pytest.mark.skipif(not has_triton_package(), reason="there is no Triton")
def test_workers_compile_triton_kernels_of_two_choices(tmp_path):
    places = map(str, (TESTS / "lowerings" / "gemm", TESTS, *sys.path))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(places), "CUDA_VISIBLE_DEVICES": ""}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", TWO], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Handed over as soon as they are written, and again by the code: that time they are known.
    assert done.stdout.split() == ["2"] + ["LambdaFuture"] * 2 + ["CachingAutotuner"] * 2
