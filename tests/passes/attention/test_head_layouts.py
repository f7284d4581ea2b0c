"""Copies of heads before attention: which are removed, and that results lie as before."""

import pytest
import torch
from torch._inductor.virtualized import V

from ipex_inductor.passes.attention import head_layouts
from ipex_inductor.reporting.decisions import GraphReport
from support.rewritten import count, rewrite, trace

pytestmark = pytest.mark.unit

aten = torch.ops.aten
ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
HEADS, WIDTH = 4, 16
TOKENS = torch.randn(2, 6, 3 * HEADS * WIDTH)


def split(x):
    """Return queries, keys and values [batch, heads, tokens, width] of one linear layer."""
    parts = x.unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
    return [part.transpose(1, 2) for part in parts]


def attend(q, k, v):
    return ON_CPU(q, k, v)[0]


def join(heads):
    return heads.transpose(1, 2).reshape(2, 6, HEADS * WIDTH)


@pytest.fixture
def of_a_cpu(monkeypatch):
    """Take torch's kernel for CPUs, which computes values here, for one of a GPU."""
    monkeypatch.setattr(head_layouts, "KERNELS", (ON_CPU,))


def rewritten(fn):
    return rewrite(head_layouts.read_in_place, fn, TOKENS)


def test_copies_of_all_heads_are_removed(of_a_cpu):
    def fn(x):
        return join(attend(*(part.contiguous() for part in split(x))))

    gm, events = rewritten(fn)
    assert events == [("fired", head_layouts.NAME, "copies read no more: 3")]
    (node,) = gm.graph.find_nodes(op="call_function", target=ON_CPU)
    assert not [arg for arg in node.args[:3] if arg.target is aten.clone.default]


def test_the_query_keeps_its_copy_where_the_result_is_read_as_it_is(of_a_cpu):
    def fn(x):
        return attend(*(part.contiguous() for part in split(x)))

    gm, events = rewritten(fn)
    assert events == [("fired", head_layouts.NAME, "copies read no more: 2")]
    (node,) = gm.graph.find_nodes(op="call_function", target=ON_CPU)
    assert [arg.target is aten.clone.default for arg in node.args[:3]] == [True, False, False]


def test_heads_without_copies_stay(of_a_cpu):
    gm, events = rewritten(lambda x: join(attend(*split(x))))
    assert (events, count(gm, ON_CPU)) == ([], 1)


def test_copies_of_repeated_or_odd_heads_stay(of_a_cpu):
    def fn(x):
        q, k, v = split(x)
        repeated = k[:, :1].expand(-1, HEADS, -1, -1).contiguous()
        turned = v.transpose(2, 3).contiguous().transpose(2, 3).contiguous()
        return join(attend(q, repeated, turned))

    assert rewritten(fn)[1] == []


def test_a_query_that_is_a_key_too_keeps_its_copy(of_a_cpu):
    def fn(x):
        q, _, v = split(x)
        heads = q.contiguous()
        return attend(heads, heads, v.contiguous()).view(2, -1)

    gm, events = rewritten(fn)
    assert events == [("fired", head_layouts.NAME, "copies read no more: 1")]
    (node,) = gm.graph.find_nodes(op="call_function", target=ON_CPU)
    assert [arg.target is aten.clone.default for arg in node.args[:3]] == [True, True, False]


def test_heads_that_begin_between_vectors_are_copied(of_a_cpu):
    def fn(x):
        wide = torch.cat([x, x[..., :4]], -1)  # rows of whole vectors
        q, k, v = split(wide[..., 1:-3])
        return join(attend(q, k.contiguous(), v.contiguous()))

    assert rewritten(fn)[1] == []


def test_unaligned_heads_are_copied(of_a_cpu):
    def fn(x):
        q, k, v = split(torch.cat([x, x[..., :1]], -1)[..., :-1])
        return join(attend(q, k.contiguous(), v.contiguous()))

    assert rewritten(fn)[1] == []


def test_a_gpus_kernel_writes_heads_beside_their_tokens():
    def fn(x):
        q, k, v = (part.contiguous() for part in split(x))
        return CUDNN(q, k, v, None, False)[0].transpose(1, 2).contiguous()

    x = torch.empty(2, 6, 3 * HEADS * WIDTH, device="meta", dtype=torch.bfloat16)
    gm, mode = trace(fn, x)
    with V.set_fake_mode(mode):
        head_layouts.read_in_place(gm.graph, GraphReport())
    (attention,) = gm.graph.find_nodes(op="call_function", target=CUDNN)
    (heads,) = attention.users
    (turned,) = heads.users
    assert turned.meta["val"].is_contiguous()
