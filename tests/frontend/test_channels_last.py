"""The layout of convolution weights, and who decides about it."""

import copy

import pytest
import torch
from torch import nn

import ipex_inductor
from ipex_inductor.frontend import layout


@pytest.fixture(autouse=True)
def _policy(monkeypatch):
    monkeypatch.setattr(layout, "_policy", layout.Policy.AUTO)


class Deep(nn.Module):
    """Convolutions of every kind, some a few modules down, one of them a subclass."""

    def __init__(self):
        class Own(nn.Conv2d):
            pass

        super().__init__()
        kinds = [nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d, Own]
        self.inner = nn.Sequential(nn.Sequential(*[kind(3, 4, 2) for kind in kinds]))
        self.flat = nn.ModuleList([nn.Conv1d(3, 4, 2), nn.ConvTranspose1d(3, 4, 2)])
        self.linear = nn.Linear(3, 4)


def is_channels_last(weight):
    if weight.dim() == 3:
        weight = weight.unsqueeze(2)
    form = layout.FORMATS[weight.dim()]
    return weight.is_contiguous(memory_format=form) and not weight.is_contiguous()


def test_all_convolutions_in_2d_and_3d():
    model = Deep().eval()
    ours = ipex_inductor.optimize(model)
    assert all(is_channels_last(conv.weight) for conv in ours.inner[0])
    assert all(conv.weight.is_contiguous() for conv in (*ours.flat, ours.linear))
    assert all(conv.weight.is_contiguous() for conv in model.inner[0])  # the caller's
    for name, value in model.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    assert ipex_inductor.report(ours).count("fired")["channels_last"] == 5
    assert ipex_inductor.report(ours).count("left")["channels_last"] == 1  # all in 1-D


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.sampled
def test_one_dimension_on_request(kind, dtype):
    """In auto they keep their layout, as oneDNN was slower."""
    ipex_inductor.enable_auto_channels_last()
    model, x = nn.Sequential(kind(3, 4, 3), kind(4, 5, 2)), torch.randn(2, 3, 8)
    twin = copy.deepcopy(model)
    ours, optimizer = ipex_inductor.optimize(
        model, dtype, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    assert all(is_channels_last(conv.weight) for conv in ours)
    for net, stepper in ((ours, optimizer), (twin, reference)):
        with torch.autocast("cpu", torch.bfloat16, dtype == torch.bfloat16 and net is ours):
            net(x).float().square().mean().backward()
        stepper.step()
    # fp32: another kernel's sum of 12 terms; bf16: three roundings of 2**-8 of numbers around 1
    atol = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(ours.state_dict(), twin.state_dict(), rtol=0, atol=atol)
    with torch.no_grad():
        compiled = torch.compile(ours.eval(), backend="ipex")(x)
        torch.testing.assert_close(compiled.float(), twin(x), rtol=0, atol=4 * atol)


SHAPES = {
    nn.Conv2d: [(3, 4, 1), (1, 1, 3), (4, 1, 3), (3, 1, (1, 3)), (1, 8, 1), (3, 4, 2)],
    nn.Conv3d: [(3, 4, 1), (4, 1, 3), (3, 4, (1, 1, 3)), (1, 1, 1)],
    nn.ConvTranspose2d: [(3, 4, 1), (4, 1, 3)],
    nn.ConvTranspose3d: [(3, 4, 1), (1, 4, (2, 1, 1))],
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_strides_are_those_of_torchs_own_conversion(kind, dtype):
    """Also of dimensions of one element, which `contiguous` leaves as they are."""
    form = layout.FORMATS[5 if "3d" in kind.__name__ else 4]
    net = nn.ModuleList([kind(*shape) for shape in SHAPES[kind]])
    twin = copy.deepcopy(net).to(memory_format=form)
    steps = torch.optim.SGD(net.parameters(), lr=0.1)
    ours, _ = ipex_inductor.optimize(net, dtype, steps)
    evaluated = ipex_inductor.optimize(net.eval(), dtype)
    for made in (ours, evaluated):
        strides = [layer.weight.stride() for layer in made]
        assert strides == [layer.weight.stride() for layer in twin]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_gradients_fit_the_buckets_of_ddp(alone, dtype, recwarn):
    from torch.nn.parallel import DistributedDataParallel

    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8))
    net, steps = ipex_inductor.optimize(net, dtype, torch.optim.SGD(net.parameters(), lr=0.1))
    wrapped = DistributedDataParallel(net)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for _ in range(2):
        steps.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            wrapped(x).float().square().mean().backward()
        steps.step()
    assert not [w for w in recwarn if "strides" in str(w.message)]


def test_results_follow_the_weights_and_are_right():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3)).eval()
    x = torch.randn(2, 3, 8, 8)
    y = ipex_inductor.optimize(model)(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, model(x))  # another kernel sums 36 terms


@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "copy"])
def test_parameters_stay_the_same_objects_in_place(inplace):
    model = Deep().eval()
    params = list(model.parameters())
    ours = ipex_inductor.optimize(model, inplace=inplace)
    assert all(a is b for a, b in zip(params, ours.parameters(), strict=True)) == inplace


def test_on_and_off():
    def laid_out(level="O1"):
        model = ipex_inductor.optimize(Deep().eval(), level=level)
        return is_channels_last(model.inner[0][0].weight)

    assert laid_out()
    assert not laid_out("O0")
    ipex_inductor.disable_auto_channels_last()
    assert not laid_out()
    ipex_inductor.enable_auto_channels_last()
    assert laid_out()
    assert laid_out("O0")


def test_cast_and_trained_weights_keep_the_layout():
    for dtype in (torch.bfloat16, torch.float16):
        assert is_channels_last(ipex_inductor.optimize(Deep().eval(), dtype).inner[0][0].weight)
    model = Deep()
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _ = ipex_inductor.optimize(model, torch.bfloat16, optimizer)
        assert is_channels_last(model.inner[0][0].weight)
        assert is_channels_last(model.state_dict()["inner.0.0.weight"])


@pytest.mark.parametrize("split", [True, False], ids=["split", "master"])
def test_weights_in_training_can_be_laid_out_later(split):
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    grads = [torch.randn_like(p).bfloat16() for p in twin.parameters()]
    off, on = ipex_inductor.disable_auto_channels_last, ipex_inductor.enable_auto_channels_last
    for change in (off, on):
        change()
        model, optimizer = ipex_inductor.optimize(
            model, torch.bfloat16, optimizer, split_master_weight_for_bf16=split
        )
        for net, stepper in ((model, optimizer), (twin, reference)):
            for param, grad in zip(net.parameters(), grads, strict=True):
                param.grad = grad.to(param.dtype)
            stepper.step()
    assert is_channels_last(model[0].weight)
    # Fused steps round once where torch rounds twice: an ulp of numbers below 1, each step.
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=2 * 2**-24)


def test_a_parametrized_weight_is_left_alone():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))).eval()
    assert ipex_inductor.optimize(model)[0].weight.shape == (4, 3, 3, 3)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("cpu", True), ("meta", False)],
)
def test_auto_goes_by_the_device(kind, expected):
    assert layout._gains(torch.device(kind)) == expected


def test_auto_goes_by_capability(monkeypatch):
    class Properties:
        has_subgroup_2d_block_io = True

    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: Properties)
    assert layout._gains(torch.device("xpu"))
    Properties.has_subgroup_2d_block_io = False
    assert not layout._gains(torch.device("xpu"))
    for capability, expected in (((6, 1), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert layout._gains(torch.device("cuda")) == expected
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not layout._gains(torch.device("cuda"))
