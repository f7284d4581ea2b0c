"""Measure the call after `ipex_inductor.refresh` beside an ordinary call.

    python -m benchmarks refresh_weights

A small stack of convolutions with batch norms and of linear layers, fp32, batch 1. Prints
milliseconds: the least of interleaved rounds. Nothing is compiled in them.
"""

import time

import torch
from torch import nn
from torch._dynamo.utils import counters

import ipex_inductor

ROUNDS = 30


def main() -> None:
    """Compile, check, time, print."""
    model = make_stack().eval()
    fn = torch.compile(model, backend="ipex")
    x = torch.randn(1, 64, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(fn(x), model(x), rtol=1e-3, atol=1e-3)
        graphs = counters["stats"]["unique_graphs"]
        ordinary = one = everything = float("inf")
        for _ in range(ROUNDS):
            ordinary = min(ordinary, time_call(lambda: fn(x)))
            one = min(one, time_call(lambda: (ipex_inductor.refresh(model[0]), fn(x))))
            everything = min(everything, time_call(lambda: (ipex_inductor.refresh(model), fn(x))))
    assert counters["stats"]["unique_graphs"] == graphs
    print(f"derived from weights: {ipex_inductor.derived_memory() / 2**20:.1f} MiB")
    print(f"ordinary call                       {ordinary:8.3f} ms")
    print(f"refresh of one layer, and a call    {one:8.3f} ms")
    print(f"refresh of all, and a call          {everything:8.3f} ms")


def refreshed_call(fn, weights, x) -> None:
    """Call after weights were written in a way that torch cannot detect."""
    ipex_inductor.refresh(weights)
    fn(x)


def make_stack() -> nn.Sequential:
    """Return eight convolutions with batch norm and four linear layers."""
    convs = [
        nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        for _ in range(8)
    ]
    linears = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(4), nn.Flatten(), *linears)


def time_call(call) -> float:
    """Return milliseconds of `call`."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
