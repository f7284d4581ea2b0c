"""Compiled functions without their guards."""

import torch

from ipex_inductor import compat


def compile_function(function, **options):
    return torch.compile(function, backend="eager", **options)


def test_one_graph_is_called_without_guards_also_after_a_reset():
    scale, traced = torch.full((3,), 2.0), []

    def step(*, x):
        return x * scale

    def record_graph(gm, example_inputs):
        traced.append(gm)
        return gm

    compiled, x = torch.compile(step, backend=record_graph), torch.randn(3)
    assert compat.drop_guards(compiled) is None  # not compiled yet
    compiled(x=x)
    unguarded = compat.drop_guards(compiled)
    torch.compiler.reset()
    assert torch.equal(unguarded(x=x + 1), (x + 1) * 2)
    assert len(traced) == 1


def test_several_graphs_keep_their_guards():
    def twice(x):
        return x * 2

    compiled = compile_function(twice, dynamic=False)
    for size in (3, 4):
        compiled(torch.randn(size))
    assert compat.drop_guards(compiled) is None


def test_code_in_parts_keeps_its_guards():
    def broken(x):
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    compiled = compile_function(broken)
    compiled(torch.randn(3))
    assert compat.drop_guards(compiled) is None


def test_what_is_not_compiled_has_none():
    assert compat.drop_guards(len) is None
