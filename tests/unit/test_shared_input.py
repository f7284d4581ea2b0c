"""Linear layers on one input on a GPU: joined whatever the rows, and read in place.

No GPU is needed: what would be on one is fake. Values are tested in tests/gpu and, of the same
function on a CPU, in tests/numerics/test_whole_patterns.py.
"""

import operator

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor.decisions import GraphReport
from ipex_inductor.passes import shared_input

aten = torch.ops.aten
WIDTHS = (64, 64, 32)


def products(x, *weights_and_biases):
    """Each layer views its input anew, as AOT autograd writes it."""
    count = len(WIDTHS)
    weights, biases = weights_and_biases[:count], weights_and_biases[count:]
    rows = [aten.view.default(x, [-1, 128]) for _ in weights]
    if not biases:
        pairs = zip(rows, weights, strict=True)
        return [aten.mm.default(row, aten.permute.default(w, [1, 0])) for row, w in pairs]
    triples = zip(biases, rows, weights, strict=True)
    return [aten.addmm.default(b, row, aten.permute.default(w, [1, 0])) for b, row, w in triples]


def joined(device, biases=True, dtypes=(torch.bfloat16,) * 3):
    """The graph and what is said of it, of 1024 rows."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(8, 128, 128, device=device, dtype=torch.bfloat16)
        shapes = [(w, 128) for w in WIDTHS] + [(w,) for w in WIDTHS] * biases
        own = [torch.empty(s, device=device, dtype=torch.bfloat16) for s in shapes]
        graph = make_fx(products)(x, *own).graph
    weights = set(graph.find_nodes(op="placeholder")[1:])
    for node, dtype in zip(weights, dtypes, strict=False):
        node.meta["val"] = node.meta["val"].to(dtype)
    report = GraphReport()
    shared_input.join_linears(graph, weights, report)
    return graph, [(event.kind, event.reason) for event in report.events]


@pytest.mark.parametrize("biases", [True, False])
def test_on_a_gpu_any_number_of_rows_is_one_product(biases):
    graph, said = joined("cuda", biases)
    assert said == [("fired", "3 layers")]
    product = aten.addmm.default if biases else aten.mm.default
    (node,) = graph.find_nodes(op="call_function", target=product)
    assert node.meta["val"].shape == (1024, sum(WIDTHS))
    shares = graph.find_nodes(op="call_function", target=operator.getitem)
    assert [share.meta["val"].shape[1] for share in shares] == [*WIDTHS]
    assert {share.meta["val"].stride() for share in shares} == {(sum(WIDTHS), 1)}, "no copies"
    assert list(graph.output_node().args[0]) == shares


def test_on_a_cpu_many_rows_stay_three():
    graph, said = joined("cpu")
    ((kind, reason),) = said
    assert (kind, reason.partition(":")[0]) == ("missed", "1024 rows")
    assert len(graph.find_nodes(op="call_function", target=aten.addmm.default)) == 3


def test_several_dtypes_are_not_put_side_by_side():
    _, said = joined("cuda", dtypes=(torch.float32,))
    assert said == [("missed", "of several dtypes")]
