"""Numbers of a call that vary with sizes: that call is left as it is, its graph is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor.passes.engine import packable
from ipex_inductor.passes.weights import packing
from ipex_inductor.reporting import decisions


class Net(nn.Module):
    """A call under test beside layers that are fused and packed whatever it is."""

    def __init__(self, call) -> None:
        super().__init__()
        self.call = call
        self.conv, self.up = nn.Conv2d(4, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 3, 2, 1)
        self.linear, self.norm = nn.Linear(4, 8), nn.BatchNorm2d(4)
        self.weight = nn.Parameter(torch.randn(8, 4, 3, 3))
        self.square = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.call(self, x), F.relu(self.linear(x.mean((2, 3)))), F.relu(self.conv(x))


def output_size(net: Net, x: Tensor) -> Tensor:
    """The decoder of a U-Net."""
    return F.relu(net.up(F.relu(net.conv(x)), output_size=x.shape[2:]))


def groups(net: Net, x: Tensor) -> Tensor:
    """One convolution for all samples, each with a weight of its own, as StyleGAN has it."""
    batch, channels, *plane = x.shape
    weight = net.weight.repeat(batch, 1, 1, 1)
    return F.conv2d(x.reshape(1, batch * channels, *plane), weight, padding=1, groups=batch)


def normed_groups(net: Net, x: Tensor) -> Tensor:
    """The same behind a batch norm."""
    return groups(net, net.norm(x))


def transposed_groups(net: Net, x: Tensor) -> Tensor:
    """The same, transposed."""
    batch, channels, *plane = x.shape
    flat, weight = x.reshape(1, batch * channels, *plane), net.weight[:4].repeat(batch, 1, 1, 1)
    return F.relu(F.conv_transpose2d(flat, weight, stride=2, groups=batch))


def padding(net: Net, x: Tensor) -> Tensor:
    """Folded batch norm, activation and padding ahead of a padding by the size."""
    padded = F.pad(net.norm(x), (1, 1, 1, 1))
    return F.relu(F.conv2d(padded, net.weight, padding=(x.shape[2] // 4, x.shape[3] // 4)))


def padded(net: Net, x: Tensor) -> Tensor:
    """As TensorFlow's "same"."""
    height, width = x.shape[2:]
    more = [max((-(-n // 2) - 1) * 2 + 3 - n, 0) for n in (width, height)]
    sides = [side for n in more for side in (n // 2, n - n // 2)]
    return F.silu(F.conv2d(F.pad(x, sides), net.weight, None, 2))


def stride(net: Net, x: Tensor) -> Tensor:
    """As of a pyramid's pooling."""
    return F.relu(F.conv2d(x, net.weight, stride=(x.shape[2] // 4, x.shape[3] // 4), padding=1))


def dilation(net: Net, x: Tensor) -> Tensor:
    """Beside a line's."""
    line = F.conv1d(x.flatten(2), net.weight[..., 0], padding=x.shape[3] // 4)
    return F.relu(F.conv2d(x, net.weight, dilation=x.shape[3] // 8, padding=1)).sum() + line


def features(net: Net, x: Tensor) -> Tensor:
    """Of a linear layer."""
    height, width = x.shape[2:]
    return F.gelu(F.linear(x, net.square[:height, :width]))


def scalars(net: Net, x: Tensor) -> Tensor:
    """Of activations behind products, and of products."""
    y, height = net.conv(x), x.shape[2]
    activated = F.elu(y, height * 0.1) + torch.clamp(net.conv(x), 0, height)
    rows = torch.addmm(net.square[0, :8], x[0, 0, :, :8], net.square[:8, :8], beta=height)
    return activated + F.leaky_relu(net.conv(x), 1 / height) + rows.sum()


CALLS = {
    each.__name__: each
    for each in (output_size, groups, normed_groups, transposed_groups, padding, padded, stride)
} | {each.__name__: each for each in (dilation, features, scalars)}
# What is said of each, if its own numbers vary and not only its sizes.
SAID = dict.fromkeys(("groups", "normed_groups", "transposed_groups"), "groups") | {
    **{name: name for name in ("padding", "stride", "dilation")},
    "output_size": "output padding",
    "padded": "pad",
}


@torch.no_grad()
@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "as sizes change"])
@pytest.mark.parametrize("name", CALLS)
def test_one_call_is_left_and_the_graph_is_not(name, dynamic, op_by_op):
    model = Net(CALLS[name]).eval()
    compiled = torch.compile(model, backend="ipex", dynamic=dynamic, options={"strict": True})
    for size in ((2, 4, 8, 8), (3, 4, 8, 12), (5, 4, 8, 16)):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    report = decisions.reports()[-1]
    fired = report.count("fired")
    assert {"linear+relu", "conv+relu"} <= {*fired}, fired
    assert "weight preprocessing" in report.count("hoisted")
    reasons = {event.reason for event in report.events if event.kind == "missed"}
    said = SAID.get(name)
    assert said is None or f"its {said} varies with sizes" in reasons, reasons
    assert not report.count("fallback")


@pytest.mark.parametrize("name", ["output_size", "groups"])
def test_in_training(name, op_by_op):
    model = Net(CALLS[name])
    compiled = torch.compile(model, backend="ipex", dynamic=True, options={"strict": True})
    for size in ((2, 4, 8, 8), (3, 4, 9, 12)):
        x = torch.randn(size)
        sums = [sum(y.sum() for y in fn(x)) for fn in (compiled, model)]
        read = [
            p
            for p in model.parameters()
            if torch.autograd.grad(sums[1], p, retain_graph=True, allow_unused=True)[0] is not None
        ]
        torch.testing.assert_close(
            *(torch.autograd.grad(total, read) for total in sums), rtol=1e-3, atol=1e-3
        )


@pytest.mark.slow  # 16 s; dynamic models in code: test_zoo.py
@torch.no_grad()
@pytest.mark.parametrize("name", ["output_size", pytest.param("groups", marks=pytest.mark.slow)])
def test_in_code(name):
    """Compiled by Inductor too; the outputs are right at sizes that were not compiled for."""
    model = Net(CALLS[name]).eval()
    compiled = torch.compile(model, backend="ipex", dynamic=True)
    for size in ((2, 4, 8, 8), (3, 4, 9, 12)):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert not any(report.count("fallback") for report in decisions.reports())


def refuse(*args: object) -> None:
    """What a fault of ours could be."""
    raise TypeError("'>' not supported between instances of 'Node' and 'int'")


def pack_linears(graph, node, product, own=packing._insert_packed_call):
    """Fail at a convolution."""
    return refuse() if "conv" in str(product.op) else own(graph, node, product)


FAULTS = {
    "read": lambda patch: patch.setattr(packable, "why_not_conv", refuse),
    "packed": lambda patch: patch.setattr(packing, "_insert_packed_call", pack_linears),
}


@torch.no_grad()
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_costs_one_product_and_is_said(fault, op_by_op, monkeypatch):
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(288, 4)).eval()
    x = torch.randn(2, 4, 8, 8)
    FAULTS[fault](monkeypatch)
    result = torch.compile(model, backend="ipex")(x)
    torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-4)
    report = decisions.reports()[-1]
    assert not report.count("fallback")
    assert "weight preprocessing" in report.count("hoisted")  # of the linear layer
    (reason,) = {e.reason for e in report.events if e.subject == "packed weights"}
    assert reason.startswith("it failed: TypeError: '>' not supported")
    torch.compiler.reset()
    with pytest.raises(Exception, match="not supported"):
        torch.compile(model, backend="ipex", options={"strict": True})(x)
