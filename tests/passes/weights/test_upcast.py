"""Products in 16 bits on CPUs that have none: in fp32, rounded once, and what stays as it is."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from ipex_inductor.passes.engine import packable
from ipex_inductor.passes.weights import blocked as in_blocks
from ipex_inductor.passes.weights import upcast
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.cpu import blocked
from support.helpers import no_farther_off_than_eager

DTYPES = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16")]


@pytest.fixture(autouse=True)
def without_narrow_products(monkeypatch):
    """As on AVX2, also where oneDNN has them; what was packed is torch's own all the same."""
    monkeypatch.setattr(packable, "_onednn_dtypes", lambda _: frozenset({torch.float32}))
    monkeypatch.setattr(upcast, "CPUS", {packable.architecture()})
    for dtype in (torch.float32, torch.bfloat16):
        bounds = in_blocks.FASTER["x86-64:avx2", dtype]
        monkeypatch.setitem(in_blocks.FASTER, (packable.architecture(), dtype), bounds)
    monkeypatch.delitem(in_blocks.FASTER, (packable.architecture(), torch.float16), raising=False)
    torch.compiler.reset()
    decisions.clear()


def compiled(fn, **options):
    options = {"strict": True, **options}
    return torch.compile(fn, backend="ipex", options=options)


def said(subject):
    return [e.reason for r in decisions.reports() for e in r.events if e.subject == subject]


class Block(nn.Module):
    """Two convolutions with what follows them, a sum, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(16, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 32, 1)
        self.last = nn.Linear(32, 24)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.second(x) + x)
        return F.gelu(self.last(x.mean((2, 3))))


@pytest.mark.sampled("bf16-channels-last")
@torch.no_grad()
@pytest.mark.parametrize("last", [True, False], ids=["channels-last", "contiguous"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_computed_in_fp32_and_its_rules_fire(dtype, last):
    torch.manual_seed(0)
    form = torch.channels_last if last else torch.contiguous_format
    model = Block().eval().to(dtype).to(memory_format=form)
    x = torch.randn(2, 16, 9, 9).to(dtype).to(memory_format=form)
    counters["ipex"].clear()
    fn = compiled(model)
    no_farther_off_than_eager(fn, model, x)
    assert fn(x).dtype == dtype
    fired = {"conv2d+batch_norm": 1, "conv+relu": 1, "conv+add+relu": 1, "linear+gelu": 1}
    assert counters["ipex"] == fired
    assert said(upcast.NAME) == ["3 products in fp32: this CPU has none in bfloat16, float16"]


@torch.no_grad()
@pytest.mark.usefixtures("in_python")
def test_between_two_products_nothing_is_rounded():
    """One cast in front of a chain, and one behind it."""
    model = nn.Sequential(*(nn.Conv2d(16, 16, 3) for _ in range(3))).bfloat16()
    x = torch.randn(1, 16, 12, 12).bfloat16()
    _, (code,) = run_and_get_code(compiled(model), x)
    call = code[code.index("def call") :]
    assert sum("cpp_fused" in line for line in call.splitlines()) == 2
    no_farther_off_than_eager(compiled(model), model, x)


@torch.no_grad()
def test_weights_are_made_wide_once_and_written_ones_again():
    model = nn.Linear(24, 40).half()
    x = torch.randn(5, 24).half()
    fn = compiled(model)
    no_farther_off_than_eager(fn, model, x)
    (hoisted,) = said("weight preprocessing")
    assert hoisted.startswith("2 tensors"), "the bias is read by a call that nothing is fused into"
    model.weight.mul_(2)
    model.bias.zero_()
    no_farther_off_than_eager(fn, model, x)


@torch.no_grad()
@pytest.mark.parametrize("rows", [upcast.FEW, upcast.FEW + 1])
def test_two_tensors_of_few_rows_stay(op_by_op, rows):
    a, b = torch.randn(3, rows, 32).bfloat16(), torch.randn(3, 32, 16).bfloat16()

    class Times(nn.Module):
        """Beside a weight, without which a graph has no prologue."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16).bfloat16()

        def forward(self, a, b):
            return self.linear(torch.bmm(a, b))

    model = Times()
    # Two products of at most 32 terms, each rounded to eight bits on either side.
    torch.testing.assert_close(compiled(model)(a, b), model(a, b), rtol=2e-2, atol=2e-2)
    assert said(upcast.NAME)[0].startswith(f"{1 + (rows > upcast.FEW)} products")


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "depth", "stays"),
    [
        (1, upcast.LARGE // 64, True),
        (1, upcast.LARGE // 64 - 1, False),
        (2, upcast.LARGE // 64, False),
    ],
)
def test_a_row_by_a_large_weight_stays_in_fp16(op_by_op, rows, depth, stays):
    model, x = nn.Linear(depth, 64).half(), torch.randn(rows, depth).half()
    no_farther_off_than_eager(compiled(model), model, x)
    assert len(said(upcast.NAME)) == (not stays)


@pytest.mark.sampled("fp16")
@torch.no_grad()
@pytest.mark.skipif(blocked.why_not() is not None, reason=f"{blocked.why_not()}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_kernel_of_ours_multiplies_stays_narrow(monkeypatch, dtype):
    bounds = in_blocks.Bounds(16, 64), in_blocks.Bounds(16, 0)
    monkeypatch.setitem(in_blocks.FASTER, (packable.architecture(), dtype), bounds)
    model, x = nn.Linear(128, 96).to(dtype), torch.randn(40, 128).to(dtype)
    no_farther_off_than_eager(compiled(model), model, x)
    assert not said(upcast.NAME)
    assert said("layers on packed weights") == ["1 by this package's GEMM kernel"]
    torch.compiler.reset()
    decisions.clear()
    without = {"blocked_products": False}
    no_farther_off_than_eager(compiled(model, **without), model, x)
    assert said(upcast.NAME), "without the kernel, in fp32"


@torch.no_grad()
def test_sizes_may_change(op_by_op):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).bfloat16()
    fn = torch.compile(model, backend="ipex", dynamic=True, options={"strict": True})
    for rows in (3, 11, 50):
        no_farther_off_than_eager(fn, model, torch.randn(rows, 32).bfloat16())


def test_training_is_as_it_was(op_by_op):
    """Weights change with each step there, and gradients are rounded where torch rounds them."""
    model = nn.Linear(16, 16).bfloat16()
    other = copy.deepcopy(model)
    x = torch.randn(4, 16).bfloat16()
    compiled(model)(x).float().sum().backward()
    other(x).float().sum().backward()
    torch.testing.assert_close(model.weight.grad, other.weight.grad)
    assert not said(upcast.NAME)


@torch.no_grad()
@pytest.mark.parametrize("rules", [f"-{upcast.NAME}", "-*"])
def test_it_can_be_left_out(rules):
    model, x = nn.Linear(24, 40).half(), torch.randn(5, 24).half()
    no_farther_off_than_eager(compiled(model, rules=rules), model, x)
    assert not said(upcast.NAME)


VIEWS = {"a step": lambda b: b[::2], "one for all": lambda b: b[:1].expand(24)}


class Biased(nn.Module):
    """A linear layer whose bias is a view that leaves gaps, or one number for all."""

    def __init__(self, view):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(24, 33)), nn.Parameter(torch.randn(48))
        self.view = view

    def forward(self, x):
        return F.linear(x, self.weight, self.view(self.bias))


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.sampled
def test_what_is_made_wide_lies_densely(view, dtype):
    """What is hoisted lies as the graph says, which Inductor asserts at each call."""
    model = Biased(VIEWS[view]).to(dtype)
    no_farther_off_than_eager(compiled(model), model, torch.randn(5, 33).to(dtype))


@torch.no_grad()
def test_a_product_of_two_tensors_whose_bias_is_a_weight(op_by_op):
    """No kernel of ours has it, however it looks: its second factor is no weight."""

    class Scored(nn.Module):
        """A score of each row with each other."""

        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(96))

        def forward(self, x, y):
            return torch.addmm(self.bias, x, y.t())

    model = Scored().bfloat16()
    x, y = torch.randn(40, 128).bfloat16(), torch.randn(96, 128).bfloat16()
    # Sums of 128 products of size 11, rounded to eight bits.
    torch.testing.assert_close(compiled(model)(x, y), model(x, y), rtol=2e-2, atol=0.2)
    assert said(upcast.NAME)[0].startswith("1 products")


def attend(q, k, v, mask=None, causal=False):
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)


def attended(*given, **options):
    """What it gives compiled, no farther off than eager is (and a rounding), lying as its."""
    wide_ones = [x.double() if isinstance(x, torch.Tensor) else x for x in given]
    exact, eager = attend(*wide_ones), attend(*given)
    result, unit = compiled(attend, **options)(*given), exact.abs().max()
    allowed = 2 * (eager - exact).abs().max() / unit + torch.finfo(eager.dtype).eps
    assert (result - exact).abs().max() / unit <= allowed
    assert (result.dtype, result.stride()) == (eager.dtype, eager.stride())


def heads(rows, dtype, order=(0, 2, 1, 3)):
    """[1, 4, rows, 32], lying as `order` says."""
    sizes = [(1, 4, rows, 32)[n] for n in order]
    return torch.randn(sizes, dtype=dtype).permute([order.index(n) for n in range(4)])


def parts(rows, dtype):
    """Of one tensor, as a product of all three makes them: nothing of it lies densely."""
    return torch.randn(1, rows, 3, 4, 32, dtype=dtype).permute(2, 0, 3, 1, 4).unbind(0)


ATTENTIONS = {
    "heads last": lambda dtype: [heads(40, dtype) for _ in "qkv"],
    "heads first": lambda dtype: [heads(40, dtype, (0, 1, 2, 3)) for _ in "qkv"],
    "parts": lambda dtype: parts(40, dtype),
    "one query": lambda dtype: [heads(1, dtype), heads(70, dtype), heads(70, dtype)],
    "many keys": lambda dtype: [heads(9, dtype), *[heads(1100, dtype) for _ in "kv"]],
    "itself": lambda dtype: [heads(40, dtype)] * 3,
    "a mask": lambda dtype: [*(heads(40, dtype) for _ in "qkv"), torch.randn(40, 40, dtype=dtype)],
    "causal": lambda dtype: [*(heads(40, dtype) for _ in "qkv"), None, True],
}


@torch.no_grad()
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_in_fp16_is_computed_in_fp32(op_by_op, name):
    attended(*ATTENTIONS[name](torch.float16))
    assert said(upcast.NAME) == ["attention in fp32, 1 times: torch's in float16 is slow here"]


@torch.no_grad()
def test_attention_in_generated_code():
    attended(*parts(40, torch.float16))
    assert said(upcast.NAME)


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.bfloat16, {}), (torch.float32, {}), (torch.float16, {"rules": f"-{upcast.NAME}"})],
    ids=str,
)
def test_other_attention_stays(op_by_op, dtype, options):
    attended(*ATTENTIONS["heads last"](dtype), **options)
    assert not said(upcast.NAME)


def test_attention_in_training_stays(op_by_op):
    given = [t.requires_grad_() for t in ATTENTIONS["heads first"](torch.float16)]
    compiled(attend)(*given).sum().backward()
    assert all(t.grad is not None for t in given)
    assert not said(upcast.NAME)
