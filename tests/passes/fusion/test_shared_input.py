"""Linear layers on one input on a GPU: joined whatever the rows, and read in place.

No GPU is needed: what would be on one is fake. Values are tested in tests/gpu and, of the same
function on a CPU, in tests/passes/fusion/test_whole_patterns.py.
"""

import functools
import operator

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor.passes.fusion import shared_input
from ipex_inductor.reporting.decisions import GraphReport

pytestmark = pytest.mark.unit

aten = torch.ops.aten
WIDTHS = (64, 64, 32)


def activated(*tensors):
    """What follows in most graphs: an op that asks how its input lies."""
    return [aten.relu.default(aten.view.default(t, [8, 128, -1])) for t in tensors]


def products(behind, x, *weights_and_biases):
    """Each layer views its input anew, as AOT autograd writes it."""
    count = len(WIDTHS)
    weights, biases = weights_and_biases[:count], weights_and_biases[count:]
    rows = [aten.view.default(x, [-1, 128]) for _ in weights]
    if not biases:
        pairs = zip(rows, weights, strict=True)
        return behind(*(aten.mm.default(r, aten.permute.default(w, [1, 0])) for r, w in pairs))
    triples = zip(biases, rows, weights, strict=True)
    return behind(
        *(aten.addmm.default(b, r, aten.permute.default(w, [1, 0])) for b, r, w in triples)
    )


def joined(device, biases=True, dtypes=(), behind=activated, dtype=torch.bfloat16, any_rows=False):
    """The graph and what is said of it, of 1024 rows; `dtypes` are those of the last weights."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(8, 128, 128, device=device, dtype=dtype)
        shapes = [(w, 128) for w in WIDTHS] + [(w,) for w in WIDTHS] * biases
        own = [torch.empty(s, device=device, dtype=dtype) for s in shapes]
        graph = make_fx(functools.partial(products, behind))(x, *own).graph
    weights = graph.find_nodes(op="placeholder")[1:]
    for node, dtype in zip(reversed(weights), dtypes, strict=False):  # biases: no op between
        node.meta["val"] = node.meta["val"].to(dtype)
    report = GraphReport()
    shared_input.join_linears(graph, set(weights), report, any_rows)
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
    assert [next(iter(share.users)).target for share in shares] == [aten.view.default] * 3


def test_on_a_cpu_many_rows_are_joined_where_few_rows_share_the_packed_weights():
    graph, said = joined("cpu", dtype=torch.float32)
    assert said == [("missed", "1024 rows: several calls are as fast from 17 on")]
    graph, said = joined("cpu", dtype=torch.float32, any_rows=True)
    assert said == [("fired", "3 layers")]
    (node,) = graph.find_nodes(op="call_function", target=aten.addmm.default)
    assert node.meta["val"].shape == (1024, sum(WIDTHS))


STRIDES = {
    "what the caller gets": lambda t: t,
    "a view that the caller gets": lambda t: aten.view.default(t, [8, 128, -1]),
    "as_strided, as in Longformer": lambda t: aten.relu.default(
        aten.as_strided.default(aten.view.default(t, [8, 128, -1]), [15, 128, 64], [4096, 64, 1])
    ),
}


@pytest.fixture
def on_gpu(monkeypatch):
    """What a GPU gets, on a CPU, where torch need not be built for GPUs."""
    monkeypatch.setattr(shared_input, "_on_gpu", lambda group: True)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("use", STRIDES.values(), ids=STRIDES)
def test_who_counts_on_strides_gets_a_copy_that_has_them(use):
    graph, said = joined("cpu", behind=lambda a, b, c: [use(a), *activated(b, c)])
    assert said == [("fired", "3 layers")]
    first, second, third = graph.find_nodes(op="call_function", target=operator.getitem)
    (copy,) = first.users
    assert copy.target is aten.clone.default
    assert copy.meta["val"].stride() == (64, 1)
    for share in second, third:
        assert next(iter(share.users)).target is aten.view.default, "read in place"


@pytest.mark.usefixtures("on_gpu")
def test_values_where_strides_are_counted_on():
    """Overlapping windows of what one of the layers makes."""
    torch.manual_seed(0)
    queries, keys = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def windows(x):
        k = keys(x).view(4, 8, 32)
        return queries(x).relu(), k.as_strided((7, 8, 32), (128, 32, 1)) * 2

    x = torch.randn(32, 32)
    with torch.no_grad():
        made = torch.compile(windows, backend="ipex", options={"strict": True})(x)
        for one, wanted in zip(made, windows(x), strict=True):
            torch.testing.assert_close(one, wanted)  # fp32: sums of 32 terms in another order


def test_on_a_cpu_many_rows_stay_three():
    graph, said = joined("cpu")
    ((kind, reason),) = said
    assert (kind, reason.partition(":")[0]) == ("missed", "1024 rows")
    assert len(graph.find_nodes(op="call_function", target=aten.addmm.default)) == 3


def test_several_dtypes_are_not_put_side_by_side():
    _, said = joined("cuda", dtypes=(torch.float32,))
    assert said == [("missed", "of several dtypes")]
