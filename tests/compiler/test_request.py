"""Where a graph computes, by which it is found: of what is on a GPU alone nothing is the host's."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ipex_inductor.compiler.request import Request
from ipex_inductor.config import resolve

pytestmark = pytest.mark.unit

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


def graph(device, **branches):
    """As Dynamo gives it: one value, on `device`, and submodules."""
    gm = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    for name, branch in branches.items():
        gm.add_submodule(name, branch)
    node = gm.graph.placeholder("x")
    with FakeTensorMode():
        node.meta["example_value"] = torch.empty(2, device=device)
    return gm


def places(gm, **options):
    config = resolve(None, options, dict.fromkeys(options, object))
    return Request(gm, [], config).places


def test_a_gpu_alone():
    assert places(graph(GPU)) == {GPU}
    assert places(graph(CPU)) == {CPU}


def test_what_branches_compute_on_counts():
    assert places(graph(GPU, then=graph(CPU))) == {GPU, CPU}


@pytest.mark.parametrize(
    "options", [{"cpp_wrapper": True}, {"max_autotune_gemm_backends": "TRITON,Cutlass"}], ids=str
)
def test_compilers_of_the_host_count(options):
    assert places(graph(GPU), **options) == {GPU, CPU}
