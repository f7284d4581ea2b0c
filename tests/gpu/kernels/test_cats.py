"""Concatenations on a GPU whose parts others read: values, layout, and who computes the parts."""

import re

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor import compat
from ipex_inductor.passes.layout import cats
from support.helpers import code_of, no_farther_off_than_eager

pytestmark = pytest.mark.gpu


def layer(inputs, outputs, window=3):
    conv = nn.Conv2d(inputs, outputs, window, padding=window // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU())


class Block(nn.Module):
    """A half goes through residual pairs; all that was made is read side by side."""

    def __init__(self, width=32, depth=3):
        super().__init__()
        self.split = layer(width, width, 1)
        half = width // 2
        self.pairs = nn.ModuleList(
            nn.Sequential(layer(half, half), layer(half, half)) for _ in range(depth)
        )
        self.join = layer((2 + depth) * half, width, 1)

    def forward(self, x):
        parts = [*self.split(x).chunk(2, 1)]
        for pair in self.pairs:
            parts.append(parts[-1] + pair(parts[-1]))
        return self.join(torch.cat(parts, 1))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_parts_are_computed_once(layout):
    model = Block().eval().cuda().half().to(memory_format=layout)
    x = torch.randn(4, 32, 40, 40, device="cuda", dtype=torch.half).to(memory_format=layout)
    before = counters["ipex"][cats.NAME]
    fn = torch.compile(model, backend="ipex", options={"strict": True})
    (code,) = code_of(fn, x)
    again = compat.computes_shared_parts_again()
    assert counters["ipex"][cats.NAME] == before + again
    no_farther_off_than_eager(fn, model, x)
    assert fn(x).stride() == model(x).stride()
    # A kernel of the whole would choose by the channel: `where` for each part but the last.
    kernels = [k for k in code.split("async_compile.triton") if re.search(r"fused_\w*cat", k)]
    assert kernels
    assert not any("tl.where" in kernel for kernel in kernels)
