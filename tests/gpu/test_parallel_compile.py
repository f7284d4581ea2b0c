"""Choices of a problem whose kernels Inductor's workers compile at once, on a GPU."""

import math
from collections import deque

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CodeCacheFuture

from ipex_inductor import compat
from ipex_inductor.lowerings.problem import settings, shapes
from ipex_inductor.lowerings.problem.workload import inputs_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import compiling, tuner
from ipex_inductor.lowerings.tune.parallel_compile import Graphs
from ipex_inductor.target import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(compat.compilers() < 2, reason="one kernel is compiled at a time here"),
]

STEM = (
    "8x3x{}x64:L 64x3x7x7:L 64 other=None binary='none' unary='relu' stride=2,2 padding=3,3 "
    "dilation=1,1 groups=1 transposed=False output_padding=0,0 scalars=() packed=''"
)


def stem(height):
    """Of a height that no other test has, so that its kernels lie in no cache."""
    known = str(device.current("cuda")), settings.settings_of("cuda")
    (problem,) = shapes.problems([f"ipex.conv.default bfloat16 {STEM.format(height)}"], *known)
    return problem


class Quiet:
    """A parent that hears nothing."""

    def doing(self, number):
        pass

    def choices(self, choices):
        pass


def templates(graph):
    found = [vars(module).items() for module in graph.modules]
    return [kernel for each in found for name, kernel in each if name.startswith("triton_tem")]


def test_two_templates_compile_in_workers_and_are_right():
    AsyncCompile.wait_pool_ready()
    problem = stem(62)
    trial = tuner._trial(problem, torch.device("cuda"))
    choices = [call.choice for call in library.calls(problem) if call.parameters][:2]
    graphs = Graphs(problem, choices, trial.inputs, {}, Quiet().doing)
    begun = graphs._start_graphs(deque([0, 1]), 2, math.inf)
    assert all(map(templates, begun.values()))
    for graph in begun.values():
        assert all(isinstance(kernel, CodeCacheFuture) for kernel in templates(graph))
    for i, graph in begun.items():
        graph.wait_compiled()
        takes = graph.takes()
        assert 16 < takes["registers"] <= 255
        assert takes["shared_memory"] > 0
        assert isinstance(tuner._candidate(choices[i], graph, [trial]), tuple)  # it is right


def test_all_choices_are_timed_and_templates_say_what_they_take():
    """Whether the workers were there when it began or not."""
    problem = stem(58)
    record = tuner.Tuner(Quiet()).tune(problem, (), 120)
    assert all(outcome.timing for outcome in record.outcomes), record.outcomes
    written = [o for o in record.outcomes if o.choice.parameters]
    assert len(written) > 1
    assert all(o.registers for o in written)


def test_what_fails_in_company_is_compiled_alone(monkeypatch):
    """As when a compiler breaks the pool of workers, and with it all that is begun."""
    problem = stem(54)
    usual, alone = compiling.start_choice, []

    def breaks():
        raise RuntimeError("the pool is broken")

    def begun(*given):
        graph = usual(*given)
        if compat.compilers() == 1:  # in this process
            alone.append(given[1])
            return graph
        return compiling.Begun(graph.run, breaks, graph.modules)

    monkeypatch.setattr(compiling, "start_choice", begun)
    inputs = inputs_of(problem, torch.device("cuda"), seed=0)
    choices = [call.choice for call in library.calls(problem) if call.parameters][:2]
    found = Graphs(problem, choices, inputs, {}, Quiet().doing).next(deque([0, 1]), 2, math.inf)
    assert alone == choices
    first, second = (graph.run(inputs) for graph in found.values())
    # Of two tiles of one template, whose sums of 147 products in fp32 differ in order at most; then
    # one rounding to bf16, which may fall to the other side.
    torch.testing.assert_close(first, second, rtol=8e-3, atol=1e-2)
