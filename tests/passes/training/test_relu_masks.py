"""Gradients of ReLUs behind batch norms: values, where the rule fires, what is read for them."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import NoneAsConstantBuffer

from ipex_inductor.passes.training import relu_masks as rule
from ipex_inductor.prebuild import graphs
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import find_target
from support.helpers import compile_until

pytestmark = pytest.mark.unit

LAST, STRICT = torch.channels_last, {"strict": True}
OP = torch.ops.ipex.relu_norm_gradient


def given(dtype=torch.float32):
    """A gradient, an image, and what it is normed by; some of it becomes 0, some NaN."""
    torch.manual_seed(0)
    gradient, x = torch.randn(2, 3, 8, 5, 5).to(dtype)
    mean, scale, weight, bias = torch.randn(4, 1, 8, 1, 1)
    bias[:, 0] = weight[:, 0] = 0.0
    x[0, 1, 0, 0] = float("nan")
    return gradient, x, mean, scale, weight, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_is_what_torch_computes(dtype):
    gradient, x, mean, scale, weight, bias = given(dtype)
    normed = ((x.float() - mean) * scale * weight + bias).requires_grad_()
    F.relu(normed).backward(gradient.float())
    assert torch.equal(OP(*given(dtype), 0).float(), normed.grad)
    torch.library.opcheck(OP, (*given(dtype), 3))


class Net(nn.Module):
    """Two convolutions, each with its norm; the second one's result is added to."""

    def __init__(self, convs=nn.Conv2d, norm=nn.BatchNorm2d, **how):
        super().__init__()
        self.one, self.two = convs(8, 24, 3, padding=1), convs(24, 8, 1)
        self.norms = nn.ModuleList([norm(24, **how), norm(8, **how)])

    def forward(self, x):
        y = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(self.norms[1](self.two(y)) + x)


def image(*sizes):
    torch.manual_seed(1)
    return torch.randn(4, 8, *(sizes or (9, 7)))


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(rule, "DEVICES", ("cuda", "cpu"))


def fired():
    return counters["ipex"][rule.NAME]


def missed():
    events = [event for report in decisions.reports() for event in report.events]
    return {e.reason for e in events if (e.kind, e.subject) == ("missed", rule.NAME)}


def gradients(model, fn, x):
    x = x.clone().requires_grad_()
    y = fn(x)
    (y.float() * torch.linspace(-1, 1, 8).view(8, *[1] * (x.dim() - 2))).square().sum().backward()
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


class Rows(nn.Module):
    """Linear layers, whose norm's bias is an input of the graph as it is."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 8)

    def forward(self, x):
        return self.two(torch.relu(self.norm(self.one(x))))


NETS = {
    "rows": lambda: (Rows(), torch.randn(12, 8)),
    "an image": lambda: (Net(), image()),
    "channels-last": lambda: (Net().to(memory_format=LAST), image().to(memory_format=LAST)),
    "a line": lambda: (Net(nn.Conv1d, nn.BatchNorm1d), image(30)),
    "a volume": lambda: (Net(nn.Conv3d, nn.BatchNorm3d), image(4, 5, 3)),
    "no running statistics": lambda: (Net(track_running_stats=False), image()),
}


QUICK = [("channels-last", True), ("rows", False)]


@pytest.mark.sampled("channels-last-True")
@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in itertools.product(NETS, (False, True))
    ],
)
def test_gradients(name, autocast, on_cpu):
    """As near to fp64 as plain Inductor's, but for what sums of another order round."""
    model, x = NETS[name]()
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    fn = torch.compile(model, backend="ipex", options=STRICT)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = gradients(model, fn, x), gradients(plain, torch.compile(plain), x)
    assert fired() == 1
    assert missed() == set()  # a ReLU of a sum is another thing
    for key, want in gradients(exact, exact, x.double()).items():
        off, usual = ((each[key] - want).norm() / want.norm() for each in (ours, theirs))
        assert off <= 1.2 * usual + 1e-6, key


@pytest.mark.parametrize("off", ["-relu-mask", "-*"])
def test_it_can_be_off(off, on_cpu, op_by_op):
    model = Net()
    gradients(model, torch.compile(model, backend="ipex", options={"rules": off}), image())
    assert fired() == 0


def test_on_a_cpu_it_is_left(op_by_op):
    """The backward's loops there were not looked at."""
    model = Net()
    gradients(model, torch.compile(model, backend="ipex", options=STRICT), image())
    assert fired() == 0


class Shown(Net):
    def forward(self, x):
        y = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(self.norms[1](self.two(y)) + x), y.exp()


class Frozen(Net):
    """Norms by running statistics: the backward reads the gradient for other things."""

    def train(self, mode=True):
        super().train(mode)
        self.norms.eval()
        return self


class ByHand(Net):
    """Of the form of a norm, by what are no moments of it."""

    def forward(self, x):
        weight = self.norms[1].weight.view(-1, 1, 1)
        return torch.relu(((self.two(self.one(x)) - 0.5) * 2.0 * weight + weight) + 0 * x)


class Rounded(Net):
    """What is normed was rounded to fewer bits, which fp32 has again."""

    def forward(self, x):
        y = (self.one(x) + 100).bfloat16().float()
        return torch.relu(self.two(torch.relu(self.norms[0](y))))


class Computed(Net):
    def forward(self, x):
        return torch.relu(self.norms[1](self.two(self.one(x)).sigmoid()))


NEAR = {
    "its gradient is a sum": (Shown, "it would be computed twice"),
    "running statistics": (Frozen, None),
    "by hand, with numbers": (ByHand, None),
    "an image that is computed": (Computed, "it would be computed twice"),
    "an image that was rounded": (
        Rounded,
        "its gradient and the normalized tensor differ in dtype or shape",
    ),
}


@pytest.fixture
def told(on_cpu, monkeypatch):
    """What gives the reasons why the rule left a model's ReLUs; nothing more is compiled."""

    def of(model, x):
        compile_until(rule, monkeypatch, model, x)
        return missed()

    return of


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_say_why(name, told):
    kind, reason = NEAR[name]
    assert told(kind().train(), image()) == ({reason} if reason else set())
    assert fired() == 0


class Written(Net):
    """Its norm's bias is written to behind the norm."""

    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            self.norms[0].bias.mul_(-3).add_(1)
        return y


def between(model):
    """As an optimizer of biases alone would, with two steps in flight."""
    with torch.no_grad():
        model.norms[0].bias.add_(5)


def unseen(model):
    model.norms[0].bias.data.sub_(5)


@pytest.mark.parametrize(
    ("kind", "write"),
    [(Written, None), (Net, between), (Net, unseen)],
    ids=["in the graph", "between", "unseen"],
)
def test_a_bias_may_be_written_to_before_the_backward(kind, write, on_cpu, op_by_op):
    """Torch does not keep it; so the forward keeps what it was."""
    model, x = kind(), image()
    exact = copy.deepcopy(model).double()
    found = []
    for each, given in ((model, x), (exact, x.double())):
        fn = each if each is exact else torch.compile(each, backend="ipex", options=STRICT)
        y = fn(given)
        if write:
            write(each)
        y.square().sum().backward()
        found.append([p.grad.double() for p in each.parameters()])
    assert fired() == 1
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-3)  # sums of 300 in fp32


@pytest.mark.slow  # 15 s
def test_sizes_that_vary(on_cpu):
    """Of images and pixels; channels do not."""
    model, x = Net(), image()
    exact = copy.deepcopy(model).double()
    ours = gradients(model, torch.compile(model, backend="ipex", options=STRICT, dynamic=True), x)
    assert fired() == 1
    for key, want in gradients(exact, exact, x.double()).items():
        assert (ours[key] - want).norm() <= 1e-5 * want.norm() + 1e-3, (
            key
        )  # some are 0, but for sums


class Behind(nn.Module):
    """What is behind a convolution in a block of ResNet."""

    def __init__(self, conv=False):
        super().__init__()
        self.norm = nn.BatchNorm2d(256)
        self.next = nn.Conv2d(256, 64, 1, bias=False) if conv else nn.Identity()

    def forward(self, y, other=None):
        normed = self.norm(y)
        return self.next(torch.relu(normed if other is None else normed + other))


def passes(images, options, tmp_path, monkeypatch, conv=False):
    """How often an H200's loops read or write an image of 16 bits: in the forward, the backward.

    And how many masks the forward keeps for the backward.
    """
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    last = {"dtype": torch.bfloat16, "memory_format": LAST}
    inputs = [torch.randn(64, 256, 56, 56).to(**last).requires_grad_() for _ in range(images)]
    seen, masks, codegen = [], [], GraphLowering.codegen

    def counted(self):
        code = codegen(self)
        loops = [n for n in self.scheduler.nodes if not (n.is_template() or n.is_extern())]
        loops = [n for n in loops if len(n.read_writes.reads) > 1]  # no copy for a convolution
        moved = sum(n.get_read_write_buffers_sizes() for n in loops)
        seen.append(moved / (inputs[0].numel() * 2))
        kept = [o for o in self.graph_outputs if not isinstance(o, NoneAsConstantBuffer)]
        masks.append(sum(each.get_dtype() == torch.bool for each in kept))
        return code

    monkeypatch.setattr(GraphLowering, "codegen", counted)
    dtype = torch.bfloat16 if conv else torch.float32
    model = Behind(conv).to(dtype, memory_format=LAST).train()
    graphs.prebuild(model, tuple(inputs), find_target("h200"), training=True, options=options)
    return seen, masks[0]


PASSES = {
    # The image is read and the result written; beside a read of the statistics' kernel. Backward:
    # gradient and image for the sums, both and the result for the rest. None can be left out.
    "norm": (1, {}, (2, 5), 0),
    # Without the rule the ReLU's result, which is kept anyway, is read instead of a mask: seven
    # passes by torch 2.11, nine by 2.13, which has the sums in two kernels then.
    "norm, a convolution behind": (1, {}, (2, 5), 0, True),
    "norm, masks": (1, {"rules": "-relu-mask"}, (2.5, 6), 1),
    # With a mask, as neither image says it alone; its gradient, which the addend gets, is written.
    # In one kernel with the sums, which Inductor splits, it would be 6.5.
    "norm and sum": (2, {}, (3.5, 7.5), 1),
}


@pytest.mark.sampled("norm", "norm and sum")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="an H200 is pretended here; tests/gpu has the real one"
)
@pytest.mark.usefixtures("code_alone")
@pytest.mark.parametrize("name", PASSES)
def test_how_often_an_image_is_moved(name, tmp_path, monkeypatch):
    images, options, want, kept, *conv = PASSES[name]
    found, masks = passes(images, options, tmp_path, monkeypatch, *conv)
    assert masks == kept
    assert found == pytest.approx(want, abs=0.05)  # what is of channels alone
