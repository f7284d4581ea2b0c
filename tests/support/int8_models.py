"""Small networks for tests of INT8 quantization, and what the tests count in converted graphs."""

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor import compat
from ipex_inductor.quantization.converted import convert_prepared
from ipex_inductor.quantization.prepared import prepare_graph
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping

DEFAULT = SchemeMapping(Scheme())
CORRECTED = SchemeMapping(Scheme(bias_correction=True))


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution where sizes change."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        changes = stride > 1 or inputs != outputs
        shortcut = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.downsample = nn.Sequential(*shortcut) if changes else None

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    """As torchvision's: a stem with a max pool, two stages, a pool and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = Block(16, 16)
        self.layer2 = Block(16, 32, 2)
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class DepthwiseNet(nn.Module):
    """Expand, depthwise, project, as MobileNetV2; one tail of a few channels is dead."""

    def __init__(self, channels=16):
        super().__init__()

        def layer(inputs, outputs, size, groups=1, stride=1):
            conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
            return [conv, nn.BatchNorm2d(outputs)]

        wide = 4 * channels
        self.stem = nn.Sequential(*layer(3, channels, 3, stride=2), nn.ReLU6())
        self.expand = nn.Sequential(*layer(channels, wide, 1), nn.ReLU6())
        self.depthwise = nn.Sequential(*layer(wide, wide, 3, wide), nn.ReLU6())
        self.project = nn.Sequential(*layer(wide, channels, 1))
        self.fc = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.project(self.depthwise(self.expand(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def trained_like(model, *shape):
    """Return `model` in eval mode with channels of unequal size and statistics of real data."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):  # as trained ones: within a factor of about ten
                spread = torch.exp(0.6 * torch.randn(module.out_channels, 1, 1, 1))
                module.weight.mul_(spread)
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.uniform_(module.bias, -0.5, 0.5)
                module.momentum = None  # averages over all batches
        model.train()
        for _ in range(4):
            model(torch.randn(8, *shape))
    return model.eval()


@torch.no_grad()
def calibrate(model, *batches, mapping=DEFAULT, kwargs=None):
    """Return `model` prepared with the first of the batches, and calibrated with all of them."""
    prepared = prepare_graph(model, mapping, batches[0], kwargs)
    for batch in batches:
        prepared(*batch, **(kwargs or {}))
    return prepared


def quantize(model, *batches, mapping=DEFAULT, **options):
    """Return the converted form of `model`."""
    return convert_prepared(calibrate(model, *batches, mapping=mapping, **options))


def operators(graph_module):
    """Return how often each operator is in a graph, by its name without overload."""
    names = (n.target for n in graph_module.graph.nodes if n.op == "call_function")
    return Counter(getattr(t, "overloadpacket", t).__name__ for t in names)


def node_of(graph_module, name):
    """Return the only node of the operator `name`."""
    (node,) = [n for n in graph_module.graph.nodes if is_operator(n, name)]
    return node


def is_operator(node, name):
    return node.op == "call_function" and node.target.overloadpacket.__name__ == name


def is_dequantized(node):
    return node.target is compat.quantized_ops().dequantize_per_tensor.tensor


def signal_to_noise(exact, other):
    """Return 10 log10 of the power of `exact` over that of the difference."""
    return (20 * torch.log10(exact.norm() / (exact - other).norm())).item()
