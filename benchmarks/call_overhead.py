"""What a compiled call costs beside its kernels: guards, wrappers, our check of the weights.

    python benchmarks/call_overhead.py [mlp resnet50 bert] [--rounds 300] [--whole]

Each model is compiled by three backends in one process, in inference, and called in turns:

* `identity` gives back results it made once: what Dynamo alone costs, its guards included;
* `inductor` and `ipex` with the generated code exchanged for results that were made once: what
  stands around that code, which does not depend on how long the kernels take.

Printed are the least and the median microseconds a call, and what is above `identity`. `--whole`
leaves the generated code in: its kernels are then most of what is seen, but for the small model.
"""

import argparse
import gc
import statistics
import time

import torch
from torch import nn
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._pytree import tree_leaves

from ipex_inductor.cli.demo_models import load

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
    """One of the three, in eval mode."""
    if name == "mlp":
        return Small().eval(), (torch.randn(1, WIDTH),)
    model, inputs = load(name, "fp32", 1, "cpu")
    return model, tuple(x[..., :32, :32] if x.dim() == 4 else x[:, :16] for x in inputs)


def identity(gm, inputs):
    """A backend that computes once, and then gives back what it has."""
    results = gm(*inputs)
    return lambda *_: results


def graphs():
    """All that Inductor has generated in this process."""
    return {id(g): g for g in gc.get_objects() if type(g) is CompiledFxGraph}


def stub(graph):
    """Have `graph` give back what its first call gives."""
    generated, results = graph.current_callable, []

    def call(inputs):
        if not results:
            results.append(generated(inputs))
        inputs.clear()
        return results[0]

    graph.current_callable = call


def interleaved(calls, rounds):
    """Microseconds a call, for each of `calls`, one figure a round."""
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return times


def compiled(model, inputs, backend, whole):
    """A call of the model, compiled and checked, its generated code exchanged unless `whole`."""
    with torch.no_grad():
        want = [x for x in tree_leaves(model(*inputs)) if isinstance(x, torch.Tensor)]
    # A function of its own: Dynamo keeps what it compiles with the code, for all backends in turn.
    scope = {"model": model}
    exec("def run(*inputs): return model(*inputs)", scope)
    fast, before = torch.compile(scope["run"], backend=backend, dynamic=False), graphs()

    def call():
        with torch.no_grad():
            return fast(*inputs)

    got = [x for x in tree_leaves(call()) if isinstance(x, torch.Tensor)]
    for g, w in zip(got, want, strict=True):
        # fp32 sums in another order, through fifty layers
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3)
    for number, graph in graphs().items():
        if number not in before and not whole:
            stub(graph)
    call()
    return call


def main():
    """Print a table for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["mlp", "resnet50", "bert"])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--whole", action="store_true")
    asked = parser.parse_args()
    print(f"{'model':10}{'backend':10}{'least':>9}{'median':>9}{'above identity':>17} us a call")
    for name in asked.models:
        calls = {}
        model, inputs = model_and_inputs(name)  # one: where weights lie moves guards by 10 us
        for backend in (identity, "inductor", "ipex"):
            label = backend if isinstance(backend, str) else backend.__name__
            calls[label] = compiled(model, inputs, backend, asked.whole)
        times = interleaved(calls, asked.rounds)
        least = {label: min(t) for label, t in times.items()}
        middle = {label: statistics.median(t) for label, t in times.items()}
        for label in calls:
            more, typical = (kind[label] - kind["identity"] for kind in (least, middle))
            above = f"{more:8.1f} {typical:8.1f}"
            print(f"{name:10}{label:10}{least[label]:9.1f}{middle[label]:9.1f}{above:>17}")


if __name__ == "__main__":
    main()
