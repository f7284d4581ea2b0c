"""`optimize` on a GPU: casts that need no autocast, layout by capability, master weights."""

import copy

import pytest
import torch
from torch import nn

import ipex_inductor

pytestmark = pytest.mark.gpu

TOLERANCE = {"rtol": 0.05, "atol": 0.05}  # a few roundings of 2**-8 on numbers around 1


def net():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten()),
        *(nn.Linear(288, 16), nn.LayerNorm(16), nn.Linear(16, 4)),
    ).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inference(dtype):
    model, x = net().eval(), torch.randn(2, 3, 8, 8, device="cuda")
    ours = ipex_inductor.optimize(model, dtype, sample_input=x)
    assert type(ours[1]) is nn.Identity
    assert ours[0].weight.dtype == dtype
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x), **TOLERANCE)
        with torch.autocast("cuda", dtype):
            torch.testing.assert_close(ours(x).float(), model(x).float(), **TOLERANCE)


def test_layout_by_capability():
    weight = ipex_inductor.optimize(net().eval())[0].weight
    fast = torch.version.hip is None and torch.cuda.get_device_capability() >= (7, 0)
    assert weight.is_contiguous(memory_format=torch.channels_last) == fast


def test_training():
    model, x = net(), torch.randn(2, 3, 8, 8, device="cuda")
    model[3].p = 0.0
    twin = copy.deepcopy(model)
    ours, stepper = ipex_inductor.optimize(
        model, torch.bfloat16, torch.optim.SGD(model.parameters(), lr=0.01)
    )
    reference = torch.optim.SGD(twin.parameters(), lr=0.01)
    for trained, optimizer in ((ours, stepper), (twin, reference)):
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16, enabled=trained is ours):
                loss = trained(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), twin.state_dict(), **TOLERANCE)
