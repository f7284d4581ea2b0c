"""Measure the overhead of a compiled call beside its kernels: wrappers and weight checks.

    python -m benchmarks call_overhead [mlp resnet50 bert] [--rounds 300] [--whole]

Each model is compiled by `inductor` and by `ipex` for inference. Each is called in turns in two
variants behind the same Dynamo guards, as the place of guards in memory changes their time by 20
microseconds:

* `identity` returns precomputed results: the cost of Dynamo alone, its guards included;
* the backend with its generated code replaced by precomputed results: the wrapper around that code,
  which does not depend on kernel time.

Prints the least and the median microseconds of both, and their difference: of the least, and the
median over pairs of calls. `--whole` keeps the generated code: kernels then dominate, except in the
small model.
"""

import argparse
import gc
import statistics
import time

import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._pytree import tree_leaves

from ipex_inductor.cli.demo.models import load

CALLS = 10
WIDTH = 16


class Small(nn.Module):
    """Four layers of hardly any work."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        """One after another."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def model_and_inputs(name):
    """Return one of the models, in eval mode, and its inputs."""
    if name == "mlp":
        return Small().eval(), (torch.randn(1, WIDTH),)
    model, inputs = load(name, "fp32", 1, "cpu")
    return model, tuple(x[..., :32, :32] if x.dim() == 4 else x[:, :16] for x in inputs)


class Switch:
    """A backend that can be told to give back what it gave last instead."""

    def __init__(self, backend):
        self.backend = lookup_backend(backend)
        self.identity = False

    def __call__(self, gm, inputs):
        """Compile a graph, the only one."""
        made, results = self.backend(gm, inputs), None

        def run(*args):
            nonlocal results
            if self.identity:
                return results
            results = made(*args)
            return results

        return run


def graphs():
    """All that Inductor has generated in this process."""
    return {id(g): g for g in gc.get_objects() if type(g) is CompiledFxGraph}


def stub_graph(graph):
    """Make `graph` return the results of its first call."""
    generated, results = graph.current_callable, []

    def call(inputs):
        if not results:
            results.append(generated(inputs))
        inputs.clear()
        return results[0]

    graph.current_callable = call


def interleaved(calls, rounds):
    """Microseconds a call in each of two ways, for each of `calls`, one pair a round."""
    times = {label: ([], []) for label in calls}
    for _ in range(rounds):
        for label, (call, switch) in calls.items():
            for switch.identity, taken in zip((True, False), times[label], strict=True):
                call()  # what the other way left in caches
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                taken.append((time.perf_counter() - start) / CALLS * 1e6)
    return times


def compile_model(model, inputs, backend, whole):
    """Return the compiled and checked call, its generated code replaced unless `whole`."""
    with torch.no_grad():
        want = [x for x in tree_leaves(model(*inputs)) if isinstance(x, torch.Tensor)]
    # A function of its own: Dynamo keeps what it compiles with the code, for all backends in turn.
    scope, switch = {"model": model}, Switch(backend)
    exec("def run(*inputs): return model(*inputs)", scope)
    fast, before = torch.compile(scope["run"], backend=switch, dynamic=False), graphs()

    def call():
        with torch.no_grad():
            return fast(*inputs)

    got = [x for x in tree_leaves(call()) if isinstance(x, torch.Tensor)]
    for g, w in zip(got, want, strict=True):
        # fp32 sums in another order, through fifty layers
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3)
    for number, graph in graphs().items():
        if number not in before and not whole:
            stub_graph(graph)
    call()
    return call, switch


def main():
    """Print a table for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["mlp", "resnet50", "bert"])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--whole", action="store_true")
    asked = parser.parse_args()
    print(f"{'':20}{'identity':>18}{'backend':>18}{'above identity':>18}")
    print(f"{'model':10}{'backend':10}" + 3 * f"{'least':>9}{'median':>9}" + " us a call")
    for name in asked.models:
        model, inputs = model_and_inputs(name)
        calls = {b: compile_model(model, inputs, b, asked.whole) for b in ("inductor", "ipex")}
        for label, (alone, all_of_it) in interleaved(calls, asked.rounds).items():
            between = [a - b for a, b in zip(all_of_it, alone, strict=True)]
            figures = [f(t) for t in (alone, all_of_it) for f in (min, statistics.median)]
            figures += [min(all_of_it) - min(alone), statistics.median(between)]
            print(f"{name:10}{label:10}" + "".join(f"{each:9.1f}" for each in figures))


if __name__ == "__main__":
    main()
