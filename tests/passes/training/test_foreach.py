"""Conversions and counters of a training graph in one kernel each, without a GPU.

On the CPU, where the rule is made to fire and Inductor leaves each a loop of its own: the same
numbers to the bit. For an H200 that is not here: one kernel of a list.
"""

import copy
import re

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering

from ipex_inductor.ops.pointwise.foreach import foreach_convert
from ipex_inductor.passes.training import foreach as rule
from ipex_inductor.prebuild import graphs
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import find_target

pytestmark = pytest.mark.unit

LAST = torch.channels_last


class Net(nn.Module):
    """Five convolutions, of one and of nine pixels, with batch norms, then a linear layer."""

    def __init__(self, count=5, width=8):
        super().__init__()
        kernels = [(1, 3)[at % 2] for at in range(count)]
        sizes = [(width, width, k, 1, k // 2) for k in kernels]
        self.convs = nn.ModuleList(nn.Conv2d(*size, bias=False) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in kernels)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return self.last(x.mean((2, 3)))


class OnDevice(nn.Module):
    """A net under autocast, as a training script has it."""

    def __init__(self, net, device):
        super().__init__()
        self.net, self.device = net, device

    def forward(self, x):
        with torch.autocast(self.device, torch.bfloat16):
            return self.net(x).float().square().mean()


def net(kind=Net, *args):
    torch.manual_seed(0)
    return kind(*args).to(memory_format=LAST).train()


def image(width=8):
    torch.manual_seed(1)
    return torch.randn(4, width, 9, 9).to(memory_format=LAST)


@pytest.fixture
def on_cpu(monkeypatch):
    """The rule fires on the CPU too."""
    monkeypatch.setattr(rule, "on_gpu", lambda device: True)


def step(model, **options):
    """The loss, all gradients and buffers after it."""
    compiled = torch.compile(
        OnDevice(model, "cpu"), backend="ipex", options={"strict": True, **options}
    )
    loss = compiled(image())
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **named, **dict(model.named_buffers())}


def said():
    events = [event for report in decisions.reports() for event in report.events]
    return [e.reason for e in events if (e.kind, e.subject) == ("fired", rule.NAME)]


@pytest.fixture
def of_two(monkeypatch):
    """Lists are worth it from two on, so that a net of two convolutions has some."""
    monkeypatch.setattr(rule, "FEWEST", 2)


def test_to_the_bit_what_it_is_without(op_by_op, on_cpu, of_two):
    model = net(Net, 2)
    twin = copy.deepcopy(model)
    ours = step(model)
    assert counters["ipex"][rule.NAME] == 3
    # Of two convolutions and a linear layer, whose bias's gradient is summed up by a loop.
    assert said() == ["4 weights converted", "2 counters", "3 gradients converted"]
    decisions.clear()
    theirs = step(twin, rules=f"-{rule.NAME}")
    assert not said()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
        assert ours[name].stride() == value.stride(), name
    assert ours["norms.0.num_batches_tracked"] == 1


def test_a_cpu_is_left_alone(op_by_op):
    step(net())
    assert not said()


class Scaled(Net):
    """Weights that loops read: converted there, without a kernel of their own."""

    def forward(self, x):
        for conv in self.convs:
            x = x + (conv.weight.bfloat16() * 2).sum((1, 2, 3)).view(-1, 1, 1)
        return x


class Counted(Net):
    """Counters that a loop reads, too; and what is two more."""

    def forward(self, x):
        for norm in self.norms:
            x = x * norm.num_batches_tracked.add_(1).float() + self.last.weight.mean()
        for norm in self.norms:
            norm.num_batches_tracked.add_(2)
        return x


@pytest.mark.parametrize("kind", [Scaled, Counted])
def test_what_is_no_kernel_of_its_own_is_left(kind, on_cpu, op_by_op):
    step(net(kind))
    assert not said()


@pytest.mark.parametrize(
    ("name", "value", "left"),
    [
        ("FEWEST", 7, ["7 weights converted"]),
        ("LARGEST", 8 * 8 * 9, ["5 weights converted", "5 counters", "4 gradients converted"]),
        # 64 + 576 + 64 + 576; three weights are left.
        ("ALIVE", 1300, ["4 weights converted", "5 counters", "4 gradients converted"]),
    ],
)
def test_few_large_and_many_elements(name, value, left, on_cpu, op_by_op, monkeypatch):
    monkeypatch.setattr(rule, name, value)
    step(net())
    assert said() == left


def test_products_may_be_templates_that_convert(on_cpu, op_by_op):
    """Of Inductor's, where it measures; convolutions stay calls then."""
    step(net(), max_autotune_gemm=True, max_autotune_gemm_backends="ATEN")
    assert said() == ["5 weights converted", "5 counters", "5 gradients converted"]


@pytest.mark.slow  # on a GPU in tests/gpu/kernels/test_foreach.py
def test_on_an_h200_each_list_is_a_kernel(of_two, monkeypatch):
    """Of so many channels that Inductor has images channels-last, as the weights come."""
    codes = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
    for rules in ("", f"-{rule.NAME}"):
        graphs.prebuild(
            OnDevice(net(Net, 2, 72), "cuda"),
            [image(72)],
            find_target("h200"),
            training=True,
            options={"rules": rules} if rules else {},
        )
    forward, backward, *_ = (code[code.index("def call(") :] for code in codes)
    assert len(re.findall(r"triton_for_\w+\.run", forward)) == 2
    assert len(re.findall(r"triton_for_\w+\.run", backward)) == 1
    ours, theirs = (len(re.findall(r"\.run\(", "".join(c))) for c in (codes[:2], codes[2:]))
    assert theirs - ours == 4 + 2 + 3 - 3


def test_the_reference():
    given = [torch.randn(3, 4).t(), torch.randn(2, 3, 4, 5).to(memory_format=LAST)]
    for x, made in zip(given, foreach_convert(given, torch.bfloat16), strict=True):
        assert torch.equal(made, x.to(torch.bfloat16))
        assert made.stride() == x.stride()
    torch.library.opcheck(foreach_convert, (given, torch.bfloat16))
