"""Attention whose queries share keys: repeated ones are not written, and nothing else changes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode

from ipex_inductor.compiler.inner_compile import copy_graph
from ipex_inductor.passes.attention import grouped_queries
from ipex_inductor.passes.engine import literals
from ipex_inductor.passes.engine.source import attentions
from ipex_inductor.prebuild import described as described_gpu
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import find_target
from support.helpers import code_of

B, KEYS, TIMES, TOKENS, D = 2, 2, 4, 33, 16
HEADS = KEYS * TIMES
# In fp32 other sums in another order: a few bits of results about 1.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
STRICT = {"strict": True}


def repeat_kv(x, times=TIMES):
    """As transformers has it."""
    batch, heads, tokens, width = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, times, tokens, width)
    return x.reshape(batch, heads * times, tokens, width)


def unsqueezed(x):
    shape = x.shape
    return (
        x.unsqueeze(2).expand(-1, -1, TIMES, -1, -1).contiguous().view(shape[0], HEADS, *shape[2:])
    )


WAYS = {
    "repeat_kv": repeat_kv,
    "unsqueeze": unsqueezed,
    "flatten": lambda x: x.unsqueeze(-3).expand(B, KEYS, TIMES, TOKENS, D).flatten(1, 2),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, TIMES, dim=1),
    "its method": lambda x: x.repeat_interleave(repeats=TIMES, dim=-3),
}


def inputs(rows=1, dtype=torch.float32, grad=False):
    torch.manual_seed(0)
    q = torch.randn(B, rows, HEADS, D, dtype=dtype).transpose(1, 2)
    made = q, *(torch.randn(B, KEYS, TOKENS, D, dtype=dtype) for _ in "kv")
    return [x.detach().requires_grad_(grad) for x in made]


def attention(repeat=repeat_kv, **given):
    def attend(q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=mask, **given)

    return attend


def fired():
    return counters["ipex"]["grouped-queries"]


def reasons():
    return [
        event.reason
        for report in decisions.reports()
        for event in report.events
        if event.subject == grouped_queries.NAME
    ]


def check(attend, given, times=1):
    """Values against float64, strides, and how often the rule fired."""
    exact = attend(*(x.double() if x.is_floating_point() else x for x in given))
    eager = attend(*given)
    result = torch.compile(attend, backend="ipex", options=STRICT)(*given)
    assert fired() == times, reasons()
    torch.testing.assert_close(result.double(), exact, **CLOSE)
    assert result.shape == eager.shape
    wide = [step for size, step in zip(result.shape, result.stride(), strict=True) if size > 1]
    plain = [step for size, step in zip(eager.shape, eager.stride(), strict=True) if size > 1]
    assert wide == plain, "of dimensions of one element strides say nothing"


@pytest.mark.parametrize("way", WAYS)
def test_however_they_are_repeated(way):
    check(attention(WAYS[way]), inputs())


MASKS = {
    "none": None,
    "of keys": (1, TOKENS),
    "of rows": ("rows", TOKENS),
    "of each sequence": (B, 1, 1, TOKENS),
    "of each sequence and row": (B, 1, "rows", TOKENS),
    "of each head": (1, HEADS, "rows", TOKENS),
}


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.sampled
def test_masks(op_by_op, kind, rows):
    given = inputs(rows)
    if MASKS[kind]:
        shape = [rows if size == "rows" else size for size in MASKS[kind]]
        given.append(torch.rand(shape) > 0.3)
    check(attention(scale=0.3), given)


def test_a_mask_that_is_added(op_by_op):
    check(attention(), [*inputs(3), torch.randn(B, 1, 3, TOKENS)])


@pytest.mark.parametrize(
    ("repeat", "given", "times"),
    [
        (repeat_kv, {}, 1),
        (lambda x: x, {"enable_gqa": True}, 1),  # beside a mask torch's kernels know no groups
    ],
)
def test_on_an_h200(repeat, given, times):
    """Which kernels there are hangs on the device."""
    names = []

    def learn(gm, example_inputs):
        names.append(grouped_queries.find_shared_keys(gm.graph, decisions.GraphReport()))
        return gm.forward

    gpu, fake = (
        described_gpu.device(find_target("h200")),
        FakeTensorMode(allow_non_fake_inputs=True),
    )
    with gpu, torch.no_grad(), fake:
        q, k, v = (torch.empty(x.shape, dtype=torch.bfloat16, device="cuda") for x in inputs())
        mask = torch.ones(B, 1, 1, TOKENS, dtype=torch.bool, device="cuda")
        torch.compile(attention(repeat, **given), backend=learn)(q, k, v, mask)
    assert [*map(len, names)] == [times]


def test_gradients(op_by_op):
    attend = attention()
    ours, exact = inputs(grad=True), inputs(dtype=torch.float64, grad=True)
    mask = torch.rand(1, TOKENS) > 0.3
    for x, y in zip(ours, inputs(), strict=True):
        assert torch.equal(x, y)
    exact = [x.detach().double().requires_grad_() for x in ours]
    torch.compile(attend, backend="ipex", options=STRICT)(*ours, mask).square().sum().backward()
    attend(*exact, mask).square().sum().backward()
    assert fired() == 1
    for x, y in zip(ours, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, **CLOSE)


def test_sizes_that_vary():
    """Sequences and tokens; how many heads there are a model says."""
    attend = attention()
    compiled = torch.compile(attend, backend="ipex", options=STRICT)
    for batch, tokens in ((5, 33), (3, 40)):
        q = torch.randn(batch, HEADS, 1, D)
        k, v = torch.randn(2, batch, KEYS, tokens, D)
        mask = torch.rand(batch, 1, 1, tokens) > 0.3
        for x in (q, k, v, mask):
            torch._dynamo.mark_dynamic(x, 0)
        for x, dim in ((k, 2), (v, 2), (mask, 3)):
            torch._dynamo.mark_dynamic(x, dim)
        exact = attend(q.double(), k.double(), v.double(), mask)
        torch.testing.assert_close(compiled(q, k, v, mask).double(), exact, **CLOSE)
    assert fired() == 1


@pytest.mark.parametrize("way", WAYS)
def test_an_exported_graph(way):
    """What packages are compiled from."""

    class Model(torch.nn.Module):
        def forward(self, *given):
            return attention(WAYS[way])(*given)

    given = inputs()
    module = torch.export.export(Model(), tuple(given)).module()
    names = grouped_queries.find_shared_keys(module.graph, decisions.GraphReport())
    made = copy_graph(module, functools.partial(grouped_queries.change, names=names))
    torch.testing.assert_close(made(*given), module(*given), **CLOSE)
    assert len([*attentions(made.graph)]) == len(names) == 1
    kept = {literals.torch_name(node) for node in made.graph.nodes}
    assert not {"expand", "repeat_interleave", "reshape"} & kept


class Cache(torch.nn.Module):
    """A token that is written into a cache, and reads it, twice."""

    def __init__(self):
        super().__init__()
        for name in ("k", "v", "k2", "v2"):
            self.register_buffer(name, torch.zeros(B, KEYS, TOKENS, D))

    def forward(self, q, k, v, place):
        mask = (torch.arange(TOKENS) <= place)[None]
        for keys, values in ((self.k, self.v), (self.k2, self.v2)):
            keys.index_copy_(2, place, k)
            values[:, :, place] = v
            q = attention()(q, keys, values, mask)
        return q


def test_caches_are_written_and_no_copy_is_made():
    ours, plain = Cache(), Cache()
    compiled = torch.compile(ours, backend="ipex", options=STRICT)
    with torch.no_grad():
        for token in range(3):
            q = torch.randn(B, HEADS, 1, D)
            k, v = torch.randn(2, B, KEYS, 1, D)
            place = torch.tensor([token])
            wanted = plain(q, k, v, place)
            torch.testing.assert_close(compiled(q, k, v, place), wanted, **CLOSE)
            for name, buffer in plain.named_buffers():
                assert torch.equal(ours.get_buffer(name), buffer), name
    assert fired() == 2


def test_the_generated_code_has_no_repeated_keys():
    torch.compiler.reset()
    given = *inputs(), torch.rand(1, TOKENS) > 0.3
    sizes = f"({B}, {HEADS}, {TOKENS}, {D})"
    (plain,) = code_of(torch.compile(attention()), *given)
    torch.compiler.reset()
    (ours,) = code_of(torch.compile(attention(), backend="ipex", options=STRICT), *given)
    assert sizes in plain
    assert sizes not in ours


def other_times(q, k, v):
    return F.scaled_dot_product_attention(
        q, repeat_kv(k), v.expand(B, KEYS, -1, -1).repeat(1, 4, 1, 1)
    )


def written_between(q, k, v):
    keys, values = repeat_kv(k), repeat_kv(v)
    k.mul_(2)
    return F.scaled_dot_product_attention(q, keys, values)


def tiled(x):
    """Heads one after the other, all of them again: another head's keys."""
    return x[:, None].expand(B, TIMES, KEYS, TOKENS, D).reshape(B, HEADS, TOKENS, D)


def swapped(x):
    """Not the heads as they stand."""
    x = x[:, [1, 0], None].expand(B, KEYS, TIMES, TOKENS, D)
    return x.reshape(B, HEADS, TOKENS, D)


NOT = {
    "swapped": (attention(swapped), 1, None),
    "tiled": (attention(tiled), 1, None),
    "of tokens": (
        lambda q, k, v: attention(lambda x: x.repeat_interleave(TIMES, dim=2))(q[:, :KEYS], k, v),
        1,
        None,
    ),
    "values otherwise": (other_times, 1, None),
    "told of, where torch has a kernel": (attention(lambda x: x, enable_gqa=True), 1, None),
    "as many heads": (lambda q, k, v: attention(lambda x: x)(q[:, :KEYS], k, v), 1, None),
    "many rows": (attention(), 17, None),
    "causal": (attention(is_causal=True), 3, "is_causal"),
    "dropped": (attention(dropout_p=0.5), 1, "other numbers"),
    "written between": (written_between, 1, "may be written"),
}


def test_as_many_groups_as_heads_of_keys(op_by_op):
    """Then heads all over again have the very shapes of each by itself, and other keys."""

    def attend(q, k, v):
        batch, heads, tokens, width = k.shape
        again = [x[:, None].expand(batch, 2, heads, tokens, width) for x in (k, v)]
        return F.scaled_dot_product_attention(
            q, *(x.reshape(batch, 4, tokens, width) for x in again)
        )

    q, k, v = torch.randn(B, 4, 1, D), *torch.randn(2, B, 2, TOKENS, D)
    check(attend, [q, k, v], times=0)


@pytest.mark.parametrize("name", NOT)
@pytest.mark.sampled
def test_left_as_it_is(op_by_op, name):
    attend, rows, reason = NOT[name]
    given = inputs(rows)
    wanted = attend(*(x.clone() for x in given))
    torch.manual_seed(1)
    result = torch.compile(attend, backend="ipex", options=STRICT)(*(x.clone() for x in given))
    assert not fired()
    assert [r for r in reasons() if reason and reason in r] or not reason
    if name != "dropped":
        torch.testing.assert_close(result, wanted, **CLOSE)


def test_off():
    options = {**STRICT, "rules": "-grouped-queries"}
    torch.compile(attention(), backend="ipex", options=options)(*inputs())
    assert not fired()
