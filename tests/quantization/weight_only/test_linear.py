"""`WeightOnlyLinear`: outputs, state, moves and casts, gradients of activations, packed tensors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.weight_only import quantize_weights
from ipex_inductor.quantization.weight_only.linear import (
    QuantDtype,
    QuantMethod,
    WeightOnlyLinear,
)
from ipex_inductor.quantization.weight_only.qconfig import QConfigWoq
from ipex_inductor.runtime import huge_pages
from support.packed_weights import pack_awq, pack_gptq

pytestmark = pytest.mark.unit

SETTINGS = [
    *({"weight_dtype": dtype} for dtype in (1, 2, 3, 4)),
    {"weight_dtype": 2, "group_size": 32},
    {"weight_dtype": 1, "group_size": 32, "weight_qscheme": 2},
    {"weight_dtype": 2, "group_size": 32, "lowp_mode": 3},
]
EACH = pytest.mark.parametrize("settings", SETTINGS, ids=str)
BUFFERS = ("quantized_weight", "scales", "zeros", "order")


def layer_of(settings, bias=True, dtype=torch.float32):
    torch.manual_seed(1)
    linear = nn.Linear(72, 20, bias=bias).to(dtype)
    return linear, WeightOnlyLinear.from_linear(linear, QConfigWoq(**settings))


def same(a, b):
    return all(
        (x is None and y is None) or (x.dtype == y.dtype and torch.equal(x.cpu(), y.cpu()))
        for x, y in ((getattr(a, n), getattr(b, n)) for n in BUFFERS)
    )


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_are_those_of_the_dequantized_weight(settings, dtype, bias):
    linear, layer = layer_of(settings, bias, dtype)
    x = torch.randn(2, 3, 72).to(dtype)
    with torch.no_grad():
        y = layer(x)
        b = None if linear.bias is None else linear.bias.double()
        exact = F.linear(x.double(), layer.dequantize().double(), b)
    assert (y.dtype, y.shape) == (dtype, (2, 3, 20))
    # The weight is rounded to the activation's dtype, or the activation to 8 bits: about 2^-8 of
    # each of the 72 products, whose sum is of the order of one.
    tolerance = 1e-5 if dtype == torch.float32 and not layer.compute else 3e-2
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)


def test_the_float_layer_is_not_changed_and_not_kept():
    linear, layer = layer_of({"weight_dtype": 2})
    before = linear.weight.clone()
    layer.bias.add_(1)
    assert torch.equal(linear.weight, before)
    assert not torch.equal(linear.bias, layer.bias)
    assert layer.weight is None
    assert [*layer.parameters()] == []


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_change_the_bias_alone(settings, dtype):
    _, layer = layer_of(settings)
    cast = copy.deepcopy(layer).to(dtype)
    assert same(cast, layer)
    assert cast.bias.dtype is dtype
    assert same(copy.deepcopy(layer).half().float(), layer)


@EACH
def test_moves_take_all_tensors_along(settings):
    _, layer = layer_of(settings)
    moved = copy.deepcopy(layer).to("meta")
    for name in (*BUFFERS, "bias"):
        before, after = getattr(layer, name), getattr(moved, name)
        assert (before is None) == (after is None)
        assert after is None or (after.is_meta and after.dtype == before.dtype)
    empty = moved.to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    assert same(empty, layer)


def test_a_cast_that_fails_leaves_the_layer_as_it_was():
    _, layer = layer_of({"weight_dtype": 4, "group_size": 32})
    twin = copy.deepcopy(layer)

    def fail(tensor):
        raise MemoryError

    with pytest.raises(MemoryError):
        layer._apply(fail)
    assert same(layer, twin)


@EACH
def test_state_dicts_go_round(settings, tmp_path):
    _, layer = layer_of(settings)
    torch.manual_seed(5)
    other = WeightOnlyLinear.from_linear(nn.Linear(72, 20), QConfigWoq(**settings))
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(other, layer)
    assert torch.equal(other.bias, layer.bias)


def test_a_state_of_another_type_is_refused_although_its_shapes_fit():
    _, four = layer_of({"weight_dtype": 2, "weight_qscheme": 2})
    _, nf4 = layer_of({"weight_dtype": 3})
    with pytest.raises(QuantizationError, match=r"nf4:72.*int4:72"):
        nf4.load_state_dict(four.state_dict())


@pytest.mark.parametrize("settings", SETTINGS[:-1], ids=str)
@pytest.mark.parametrize("act_order", [False, True])
def test_gradients_flow_to_activations_alone(settings, act_order):
    _, layer = layer_of(settings)
    if act_order:
        layer.order = torch.randperm(72).int()
    x = torch.randn(4, 72, requires_grad=True)
    y = layer.train()(x)
    y.square().sum().backward()
    expected = 2 * y.detach() @ layer.dequantize()
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-5)  # sums of 20 in fp32
    assert not any(b.requires_grad for b in layer.buffers())


def test_activations_that_are_rounded_have_no_gradient():
    _, layer = layer_of(SETTINGS[-1])
    y = layer(torch.randn(4, 72, requires_grad=True))
    with pytest.raises(QuantizationError, match="compute"):
        y.sum().backward()


def test_a_representation_names_the_settings():
    _, layer = layer_of({"weight_dtype": 2, "group_size": 32, "lowp_mode": 3})
    text = repr(layer)
    for part in ("in_features=72", "weight_dtype=int4", "group_size=32", "compute=int8"):
        assert part in text


def test_autocast_computes_in_its_dtype():
    _, layer = layer_of({"weight_dtype": 1})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 72)).dtype is torch.bfloat16


@pytest.mark.parametrize("act_order", [False, True])
def test_tensors_of_gptq_are_read_to_the_bit(act_order):
    torch.manual_seed(2)
    stored, zeros = torch.randint(0, 16, (24, 64)), torch.randint(1, 17, (24, 4))
    scales = torch.rand(4, 24).half()
    groups = torch.arange(64) // 16
    groups = groups[torch.randperm(64)] if act_order else groups
    qweight, qzeros = pack_gptq(stored, zeros - 1)
    layer = WeightOnlyLinear.from_weight(
        qweight, scales, qzeros, 64, 24, group_size=16, g_idx=groups.int(), bias=torch.ones(24)
    )
    exact = (stored - zeros[:, groups]).float() * scales.t()[:, groups].float()
    assert torch.equal(layer.dequantize(), exact)
    assert (layer.order is not None) == act_order
    x = torch.randn(5, 64)
    y = F.linear(x.double(), exact.double(), torch.ones(24).double())
    torch.testing.assert_close(layer(x).double(), y, rtol=1e-5, atol=1e-4)  # sums of 64 in fp32


def test_tensors_of_awq_are_read_to_the_bit():
    torch.manual_seed(3)
    stored, zeros = torch.randint(0, 16, (24, 64)), torch.randint(0, 16, (24, 4))
    scales = torch.rand(4, 24).half()
    qweight, qzeros = pack_awq(stored, zeros)
    layer = WeightOnlyLinear.from_weight(
        *(qweight, scales, qzeros, 64, 24, None, None, 16, None),
        QuantMethod.AWQ_GEMM,
        QuantDtype.INT4,
    )
    groups = torch.arange(64) // 16
    exact = (stored - zeros[:, groups]).float() * scales.t()[:, groups].float()
    assert torch.equal(layer.dequantize(), exact)


def test_packed_tensors_of_other_sizes_are_refused():
    stored, zeros = torch.randint(0, 16, (24, 64)), torch.randint(1, 16, (24, 4))
    qweight, qzeros = pack_gptq(stored, zeros - 1)
    scales = torch.rand(4, 24).half()
    with pytest.raises(QuantizationError, match="32 inputs"):
        WeightOnlyLinear.from_weight(qweight, scales, qzeros, 32, 24, group_size=16)
    with pytest.raises(QuantizationError, match="scales"):
        WeightOnlyLinear.from_weight(qweight, scales, qzeros, 64, 24, group_size=32)
    g_idx = torch.zeros(64).int()
    g_idx[0] = 3
    with pytest.raises(QuantizationError, match="columns in each group"):
        WeightOnlyLinear.from_weight(qweight, scales, qzeros, 64, 24, None, None, 16, g_idx)


def test_a_large_weight_lies_on_huge_pages():
    """A token reads all weights once, and small pages cost address translations."""
    huge_pages.begin_mapping()
    layer = WeightOnlyLinear.from_linear(nn.Linear(1024, 1024), QConfigWoq(weight_dtype=1))
    room = huge_pages._last()
    first, last = range_of(room)
    assert first <= layer.quantized_weight.data_ptr() < last
    moved = layer.to("meta").to_empty(device="cpu").quantized_weight
    assert first <= moved.data_ptr() < last
    assert moved.untyped_storage().nbytes() == moved.nbytes


def test_layers_on_one_weight_share_its_memory():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    model = quantize_weights(Tied(), QConfigWoq(weight_dtype=1))
    addresses = {layer.quantized_weight.data_ptr() for layer in (model.first, model.second)}
    assert len(addresses) == 1


def test_a_small_or_shared_weight_stays_where_it_is():
    small = torch.zeros(64, 64, dtype=torch.uint8)
    assert huge_pages.copy_to_huge_pages(small) is small
    shared = torch.zeros(1024, 1024, dtype=torch.uint8).share_memory_()
    assert huge_pages.copy_to_huge_pages(shared) is shared


def range_of(room):
    """The addresses of a mapping."""
    first = torch.frombuffer(room, dtype=torch.uint8).data_ptr()
    return first, first + len(room)
