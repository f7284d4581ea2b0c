"""A whole network as its users have it: values, and the kernels left beside its layers'."""

import copy
import re

import pytest
import torch

from ipex_inductor.reporting import decisions
from support.helpers import code_of

pytestmark = pytest.mark.gpu

INDUCTORS = re.compile(r"triton_(?:poi|red|per)_\w+(?=\.run\()")


LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("images", [16, 64])
@torch.no_grad()
def test_resnet50_is_convolutions_a_pool_and_a_mean(images, layout, tmp_path):
    """By the package's records, in whatever layout it comes; a contiguous image is copied once."""
    models = pytest.importorskip("torchvision.models", reason="ResNet-50 is torchvision's")
    torch.manual_seed(0)
    form = {"memory_format": LAYOUTS[layout]}
    model = models.resnet50().eval().cuda().to(**form)
    exact = copy.deepcopy(model).double()
    x = torch.randn(images, 3, 224, 224, device="cuda").to(**form)
    want = exact(x.double())
    model, x = model.bfloat16(), x.bfloat16()
    options = {"strict": True, "autotune_database": str(tmp_path)}
    fn = torch.compile(model, backend="ipex", options=options)
    (code,) = code_of(fn, x)
    # 53 rounded layers: as near as eager's, which rounds once more behind each batch norm.
    off = [float((y.double() - want).norm() / want.norm()) for y in (fn(x), model(x))]
    assert off[0] <= 1.1 * off[1]
    beside = INDUCTORS.findall(code.split("def call")[1])
    assert len(beside) <= 3, beside  # the image's layout, the mean
    missed = [
        f"{e.subject}: {e.reason}"
        for report in decisions.reports()
        for e in report.events
        if e.subject.startswith("conv") and "nothing is recorded" in e.reason
    ]
    assert "\n".join(missed) == ""


@pytest.mark.parametrize(
    "name", ["wide_resnet50_2", pytest.param("densenet121", marks=pytest.mark.slow)]
)
@torch.no_grad()
def test_a_net_in_fp32_is_no_farther_off_than_inductors(name, tmp_path):
    """Convolutions in TF32, as torch has them by default, where a folded norm rounds other weights.

    Both are held against fp64: a net in TF32, as eager's, is as far from another as from fp64.
    """
    models = pytest.importorskip("torchvision.models", reason="the nets are torchvision's")
    torch.manual_seed(0)
    model = getattr(models, name)(weights=None).eval().cuda()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    x = torch.randn(4, 3, 224, 224, device="cuda")
    exact = copy.deepcopy(model).double()(x.double())
    options = {"strict": True, "autotune_database": str(tmp_path)}
    ours = torch.compile(model, backend="ipex", options=options)(x)
    torch.compiler.reset()
    off = [
        float((y.double() - exact).norm() / exact.norm()) for y in (ours, torch.compile(model)(x))
    ]
    assert torch.backends.cudnn.allow_tf32
    assert off[0] <= 1.5 * off[1], off
