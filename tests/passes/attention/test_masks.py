"""Masks that constants say: which are dropped, and that values, layout and gradients stay."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor.compiler.inner_compile import copy_graph
from ipex_inductor.passes.attention import masks
from ipex_inductor.passes.engine import literals, source
from ipex_inductor.reporting import decisions
from ipex_inductor.reporting.decisions import Event, GraphReport

B, H, S, D = 2, 3, 6, 8
INF = float("inf")
# Weights of a row add up to 1, and are rounded otherwise in another kernel: a few bits of fp32.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def attend(x, mask, **more):
    return F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=mask, **more)


def positions(rows=S, columns=S):
    return torch.arange(rows)[:, None], torch.arange(columns)[None, :]


def written(write):
    def mask(x):
        made = torch.ones(S, S, dtype=torch.bool)
        write(made)
        return made

    return mask


def packed(x):
    """What transformers gives GPT-2: sequences are told apart by where positions jump."""
    place = torch.arange(S)[None].expand(B, -1)
    jumps = torch.diff(place, prepend=place[:, :1] - 1, dim=-1) != 1
    row, column = positions()
    sequence, batch = jumps.cumsum(-1), torch.arange(B)[:, None, None, None]
    same = sequence[batch, row].__eq__(sequence[batch, column])
    return (
        row.new_ones((), dtype=torch.bool) & (column <= row)[None, None].to(x.device) & same
    ).expand(B, -1, S, S)


DROPPED = {
    "ones": lambda x: torch.ones(B, 1, S, S, dtype=torch.bool),
    "transformers' BERT": lambda x: (positions()[0] >= 0)[None, None].expand(B, 1, S, S),
    "of one key": lambda x: torch.full((S, 1), True),
    "zeros": lambda x: torch.zeros(S, S, dtype=x.dtype),
    "like": lambda x: torch.zeros_like(x[..., 0])[:, :, None],
    "1 - ones": lambda x: (1.0 - torch.ones(B, S))[:, None, None] * torch.finfo(x.dtype).min,
    "where": lambda x: torch.where(torch.ones(S, S) > 0, 0.0, -INF),
    "three dimensions": lambda x: torch.ones(1, S, S, dtype=torch.bool),
}
CAUSAL = {
    "arange": lambda x: positions()[1] <= positions()[0],
    "tril": lambda x: torch.ones(S, S, dtype=torch.bool).tril().view(1, 1, S, S),
    "-inf": lambda x: torch.full((S, S), -INF).triu(1).to(x.dtype),
    "transformers' GPT-2": packed,
}
KEPT = {
    "finfo.min": (lambda x: torch.full((S, S), -3e38).triu(1), "something else"),
    "a later start": (lambda x: torch.ones(S, S, dtype=torch.bool).tril(1), "something else"),
    "a bias": (lambda x: torch.ones(S, S).tril(), "something else"),
    "nan": (lambda x: torch.zeros(S, S) * INF, "something else"),
    "setitem": (written(lambda m: m.__setitem__((0, 1), False)), "setitem may write"),
    "a view": (written(lambda m: m.view(-1)[3:5].zero_()), "zero_ may write"),
    "detached": (written(lambda m: m.detach()[0].t().fill_(False)), "fill_ may write"),
    "out": (
        written(lambda m: torch.logical_not(torch.eye(S, dtype=torch.bool), out=m)),
        "logical_not may write",
    ),
    "in place": (lambda x: torch.ones(S, S).mul_(-1), "it comes of mul_"),
    "an input": (lambda x: x[:, :1, :, :1] > -INF, "it comes of input"),
    "random": (lambda x: torch.rand(S, S) >= 0, "it comes of rand"),
    "float range": (lambda x: torch.arange(0, 1, 1 / S)[None] >= 0, "arange may differ by device"),
}


def graph_of(fn, *inputs, dynamic=False):
    """What Dynamo makes of a function, which runs as it is."""
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    return graphs[0]


def found(gm, dropout_as_eager=False):
    report = GraphReport()
    return masks.find_changes(gm.graph, dropout_as_eager, report), [str(e) for e in report.events]


def rewritten(gm):
    return copy_graph(gm, lambda graph: masks.change(graph, found(gm)[0]))


@pytest.mark.parametrize("name", [*DROPPED, *CAUSAL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_hides_nothing_or_what_follows_needs_no_mask(name, dtype):
    mask = (DROPPED | CAUSAL)[name]
    x = torch.randn(B, H, S, D, dtype=dtype)
    gm = graph_of(lambda x: attend(x, mask(x)), x)
    calls, events = found(gm)
    change = masks.Change.CAUSAL if name in CAUSAL else masks.Change.DROPPED
    assert [*calls.values()] == [change], events
    (call,) = rewritten(gm).graph.find_nodes(op="call_function", target=source.ATTEND)
    assert call.kwargs["is_causal"] == (name in CAUSAL)
    assert "attn_mask" not in call.kwargs
    got, want = rewritten(gm)(x)[0], attend(x, mask(x))
    # bf16 rounds the result once in either kernel.
    near = CLOSE if dtype is torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    torch.testing.assert_close(got, want, **near)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("name", KEPT)
def test_what_may_be_another_mask_stays(name):
    mask, reason = KEPT[name]
    x = torch.randn(B, H, S, D)
    gm = graph_of(lambda x: attend(x, mask(x)), x)
    calls, (event,) = found(gm)
    assert not calls
    assert reason in event


def heads_last(*batch):
    return torch.randn(*batch, S, S, H).movedim(-1, -3)


def filled(condition):
    """As T5's bias: where a mask hides it, it is filled, once for each row of the batch."""
    return torch.where(condition.expand(B, 1, S, S), heads_last(1), -INF)


APART = {  # and how large the copy is
    "of heads": (lambda: heads_last(1), (1, H, S, S)),
    "of heads, as two dimensions": (lambda: torch.randn(S, S).T, (S, S)),
    "expanded": (lambda: heads_last(1).expand(B, H, S, S), (1, H, S, S)),
    "in its columns": (lambda: (torch.rand(S) < 0.5)[None, None, :, None].expand(B, 1, S, S), None),
    "filled nowhere": (lambda: filled(positions()[0] >= 0), (1, H, S, S)),
    "filled somewhere": (lambda: filled(positions()[0] >= positions()[1]), (B, H, S, S)),
}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Torch's kernels for CPUs take any mask; values are those of a mask all the same."""
    monkeypatch.setattr(masks, "lies_apart", lambda mask: mask.stride(-1) != 1)
    monkeypatch.setattr(masks, "is_fused", lambda given: given["attn_mask"].stride(-1) == 1)


@pytest.mark.parametrize("name", APART)
def test_a_mask_whose_columns_lie_apart_is_copied(name, on_a_gpu):
    make, size = APART[name]
    x, given = torch.randn(B, H, S, D), make()

    def twice(x, given):
        mask = filled(positions()[0] >= 0) if name == "filled nowhere" else given
        return attend(x, mask) + attend(x + 1, mask)

    torch.manual_seed(0)
    gm = graph_of(twice, x, given)
    calls, events = found(gm)
    assert [*calls.values()] == [masks.Change.COPIED] * 2, events
    new = rewritten(gm)
    called = new.graph.find_nodes(op="call_function", target=source.ATTEND)
    (mask,) = {call.kwargs["attn_mask"] for call in called}  # one copy for both
    assert literals.example(mask).stride(-1) == 1
    assert size is None or literals.example(mask).shape == size
    inputs = [x, given] if name != "filled nowhere" else [x]
    torch.manual_seed(1)
    got = new(*inputs)[0]
    torch.manual_seed(1)
    torch.testing.assert_close(got, twice(x, given), **CLOSE)


def with_all(x, given, pad):
    return torch.where((positions()[0] >= 0).expand(B, 1, S, S), given, -INF)


def in_place(change):
    def attended(x, given, pad):
        mask = given * 1.0
        change(mask, pad)
        return attend(x, mask)

    return attended


def base_written(x, given, pad):
    base = given * 1.0
    mask = base.narrow(0, 0, 1)
    base += pad
    return attend(x, mask)


def written_between_layers(x, given, pad):
    mask = given * 1.0
    y = attend(x, mask)
    mask.masked_fill_(pad > 0, -1.0)
    return attend(y, mask)


def filled_and_written(x, given, pad):
    mask = with_all(x, given, pad)
    mask.add_(pad)
    return attend(x, mask)


def written_and_filled(x, given, pad):
    kept = given * 1.0
    kept.add_(pad)
    mask = with_all(x, kept, pad)
    kept.zero_()
    return attend(x, mask)


@pytest.mark.parametrize(
    "attended",
    [
        in_place(lambda mask, pad: mask.add_(pad)),
        in_place(lambda mask, pad: mask.__setitem__((..., slice(3, None)), -INF)),
        in_place(lambda mask, pad: F.threshold(mask, 0.0, 0.5, True)),
        base_written,
        written_between_layers,
        filled_and_written,
        written_and_filled,
    ],
    ids=["add_", "item", "inplace", "base", "between", "fill, write", "write, fill"],
)
def test_a_mask_that_is_written_is_copied_as_it_is_read(attended, on_a_gpu):
    x, given, pad = torch.randn(B, H, S, D), heads_last(1), torch.randn(S)
    want = attended(x, given, pad)
    gm = graph_of(attended, x, given, pad)
    assert masks.Change.COPIED in found(gm)[0].values(), found(gm)[1]
    named = {"x": x, "given": given, "pad": pad}
    inputs = gm.graph.find_nodes(op="placeholder")
    got = rewritten(gm)(*(named[node.target.lower()[2:-1]] for node in inputs))[0]
    torch.testing.assert_close(got, want, **CLOSE)


def test_a_mask_that_makes_the_result_larger_stays(on_a_gpu):
    """Eager torch refuses it on some devices, and compiled it broadcasts."""
    x, given = torch.randn(1, H, S, D), heads_last(1)
    reached = []

    def backend(gm, _):
        calls, events = found(gm)
        reached.append((calls, events[-1]))
        return gm.forward

    with contextlib.suppress(RuntimeError):  # eager's
        torch.compile(lambda *of: attend(x, with_all(*of, None)), backend=backend)(x, given)
    ((calls, event),) = reached
    assert not calls
    assert "the result has the mask's sizes" in event


def test_a_mask_that_learns_is_not_copied(on_a_gpu):
    x, bias = torch.randn(B, H, S, D), heads_last(1).requires_grad_()
    calls, events = found(graph_of(attend, x, bias))
    assert not calls
    assert "the mask is to get a gradient" in events[-1]


def test_other_sizes_and_other_arguments():
    x, keys = torch.randn(B, H, S, D), torch.randn(B, H, 2 * S, D)

    def longer(x, keys):  # of more keys than queries `is_causal` is another thing in some kernels
        row, column = positions(S, 2 * S)
        return F.scaled_dot_product_attention(x, keys, keys, column <= row)

    assert "something else" in found(graph_of(longer, x, keys))[1][0]
    gm = graph_of(lambda x: attend(x, torch.ones(x.shape[2], 1) > 0), x, dynamic=True)
    assert "sizes vary" in found(gm)[1][0]
    gm = graph_of(lambda x: attend(x, x.new_full((S, S), x.shape[0])), x, dynamic=True)
    assert "is a size" in found(gm)[1][0]
    gm = graph_of(lambda x: attend(x, torch.ones(S, 1) > 0, dropout_p=0.5), x)
    assert "fallback_random" in found(gm, dropout_as_eager=True)[1][0]
    assert [*found(gm)[0].values()] == [masks.Change.DROPPED]


def test_a_rule_that_fails_costs_no_other(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("of all things")

    x = torch.randn(B, H, S, D)
    gm = graph_of(lambda x: attend(x, torch.ones(S, S) > 0), x)
    monkeypatch.setattr(masks, "value", fail)
    calls, (event,) = found(gm)
    assert not calls
    assert "ZeroDivisionError: of all things" in event


def test_a_large_mask_is_not_computed(monkeypatch):
    monkeypatch.setattr(literals, "LARGEST", S)
    x = torch.randn(B, H, S, D)
    few = graph_of(lambda x: attend(x, (torch.arange(S) >= 0).expand(S, S)), x)
    assert [*found(few)[0].values()] == [
        masks.Change.DROPPED
    ]  # expanded, it has no more numbers than a row
    many = graph_of(lambda x: attend(x, torch.ones(S, S) > 0), x)
    assert f"more than {S} elements" in found(many)[1][0]


LAID = {
    "as it is": lambda y: y,
    "seen as rows": lambda y: y.view(B * H, S, D),
    "joined": lambda y: y.transpose(1, 2).reshape(B, S, H * D),
    "copied": lambda y: y.transpose(1, 2).contiguous().view(B, S, H * D),
    "turned": lambda y: y.transpose(1, 2).reshape(B, S, H, D),
    "copied twice": lambda y: (
        y.transpose(1, 2).contiguous().mul_(2) + y.transpose(1, 2).contiguous()
    ),
}


@pytest.mark.parametrize("name", LAID)
def test_nobody_sees_that_the_kernel_is_another(name):
    """A mask of three dimensions keeps torch on CPUs from its kernel, whose results lie otherwise.

    As one that is expanded in the last does on a GPU.
    """
    x = torch.randn(B, S, H, D).transpose(1, 2)

    def net(x):
        return LAID[name](attend(x, torch.ones(1, S, S, dtype=torch.bool)))

    assert attend(x, torch.ones(1, S, S) > 0).stride() != attend(x, None).stride()
    gm = graph_of(net, x)
    got, want = rewritten(gm)(x)[0], net(x)
    torch.testing.assert_close(got, want, **CLOSE)
    assert got.stride() == want.stride()
    copies = len(rewritten(gm).graph.nodes) - len(gm.graph.nodes)
    assert copies == (name not in ("joined", "copied"))  # which copy nothing now


class Net(nn.Module):
    """Attention behind a layer that is trained, with a mask that transformers gives BERT."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        x = self.layer(x)
        y = attend(x, (positions()[0] >= 0)[None, None].expand(B, 1, S, S))
        return y.transpose(1, 2).reshape(B, S, -1)


def events():
    return [str(e) for r in decisions.reports() for e in r.events if e.subject == masks.NAME]


@pytest.mark.parametrize(
    "in_code", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["op by op", "in code"]
)
@pytest.mark.parametrize("rules", ["", "-constant-mask"])
def test_inference_training_and_the_option(rules, in_code, request):
    """In code quickly with BERT, of test_models.py."""
    if not in_code:
        request.getfixturevalue("op_by_op")
    torch.manual_seed(0)
    net, x = Net(), torch.randn(B, H, S, D)
    torch.compiler.reset()
    counters.clear()
    call = torch.compile(net, backend="ipex", options={"strict": True, "rules": rules})
    with torch.no_grad():
        got = call(x)
        torch.testing.assert_close(got, net(x), **CLOSE)
        assert got.stride() == net(x).stride()
    assert counters["ipex"][masks.NAME] == (not rules)
    x.requires_grad_()
    gradients = [
        torch.autograd.grad(fn(x).square().sum(), [x, *net.parameters()]) for fn in (net, call)
    ]
    # Sums over all rows, in another order.
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert counters["ipex"][masks.NAME] == 2 * (not rules)
    assert len(events()) == 2 * (not rules)


def test_what_was_decided_before_the_cache_was_asked_is_told_once():
    """A graph is found by what is left of it, and its entry has the decision as well."""
    here, other = Event("fired", masks.NAME, "here"), Event("fired", "linear+gelu")
    report = GraphReport([here])
    with decisions.about(report):
        decisions.recall([Event("fired", masks.NAME, "there"), other])
    assert (report.source, report.events) == ("cache", [here, other])


def test_a_mask_that_adds_dimensions_is_no_mask_of_these_scores():
    assert masks._broadcasts(torch.Size((1, S)), (B, H, S, S))
    assert not masks._broadcasts(torch.Size((4, 1, S, S)), (1, H, S, S))
    assert not masks._broadcasts(torch.Size((1, 1, 1, S, S)), (B, H, S, S))


def test_nothing_fails_where_torch_would():
    """A mask beside `is_causal` is an error of the caller's, and stays one."""
    x = torch.randn(B, H, S, D)
    gm = graph_of(lambda x: attend(x, torch.ones(S, S) > 0), x)
    (call,) = gm.graph.find_nodes(op="call_function", target=source.ATTEND)
    call.kwargs = {**call.kwargs, "is_causal": True}
    assert "is an error" in found(gm)[1][0]
