"""Rounding to nearest: values within half a step, scales of the stored dtype, packed nibbles."""

import pytest
import torch

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant.weight_only import NF4
from ipex_inductor.quantization.weight_only import rounding
from ipex_inductor.quantization.weight_only.rounding import round_to_nearest
from ipex_inductor.quantization.weight_only.storage import (
    QuantizedWeight,
    dequantize,
    pack_nibbles,
    unpack_nibbles,
)

pytestmark = pytest.mark.unit

TYPES = pytest.mark.parametrize(
    ("name", "symmetric"),
    [
        ("int8", True),
        ("int8", False),
        ("int4", True),
        ("int4", False),
        ("nf4", True),
        ("fp8", True),
    ],
)
SIZES = pytest.mark.parametrize(("columns", "size"), [(96, 32), (72, 32), (33, -1), (7, 64)])


def weight_of(rows, columns, dtype=torch.float32):
    torch.manual_seed(0)
    return (torch.randn(rows, columns) * torch.linspace(0.01, 2, rows)[:, None]).to(dtype)


E4M3 = [
    v for v in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist() if v == v
]


def levels_of(q, n, k):
    """The numbers that the group of a weight can have, in fp64, and the place of its own."""
    group = k // q.group_size
    scale = float(q.scales[n, group].double())
    stored = q.weight[n, k // 2] if q.weight_dtype in ("int4", "nf4") else q.weight[n, k]
    if q.weight_dtype in ("int4", "nf4"):
        stored = int(stored) >> 4 if k % 2 else int(stored) & 15
    if q.weight_dtype == "nf4":
        return scale, [v * scale for v in NF4], NF4[stored] * scale
    if q.weight_dtype == "fp8":
        return scale, [v * scale for v in E4M3], float(stored) * scale
    is_int4 = q.weight_dtype == "int4"
    zero = (8 if is_int4 else 0) if q.zeros is None else int(q.zeros[n, group])
    integers = range(16) if is_int4 else range(-128, 128)
    return scale, [(v - zero) * scale for v in integers], (int(stored) - zero) * scale


@TYPES
@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_value_is_the_nearest_that_its_group_has(name, symmetric, columns, size, dtype):
    weight = weight_of(3, columns, dtype)
    q = round_to_nearest(weight, name, size, symmetric)
    q.check()
    assert (q.zeros is None) == symmetric
    values = dequantize(q)
    for n in range(3):
        for k in range(columns):
            scale, levels, value = levels_of(q, n, k)
            assert abs(float(values[n, k]) - value) <= 1e-6 * abs(value)  # one product in fp32
            exact = float(weight[n, k])
            nearest = min(abs(exact - level) for level in levels)
            # A quotient of up to 128 in fp32 has an error of 8e-6, by which a tie may be decided.
            assert abs(exact - value) <= nearest + 1e-5 * scale


@TYPES
def test_groups_cover_their_range(name, symmetric):
    """Scales are rounded up, so the error is half a step also at the ends."""
    weight = weight_of(16, 256)
    q = round_to_nearest(weight, name, 32, symmetric)
    error = (dequantize(q) - weight).abs().view(16, 8, 32).amax(2)
    # Half of the widest step: integers 1; NF4 0.304 between -1 and -0.696; E4M3 32 near 448.
    # An asymmetric zero point is rounded too, so an end may lie half a step outside.
    half = {"int8": 0.5, "int4": 0.5, "nf4": 0.152, "fp8": 16}[name] * (1 if symmetric else 2)
    assert bool((error <= half * q.scales.float() * 1.001).all())


def test_scales_are_rounded_before_weights_are():
    """Weights rounded with exact scales, then read with rounded ones, would be off by more."""
    weight = weight_of(8, 64, torch.float32)
    q = round_to_nearest(weight, "int8", 32)
    assert q.scales.dtype is torch.float16
    steps = weight.view(8, 2, 32) / q.scales.float().unsqueeze(2)
    assert torch.equal(q.weight.view(8, 2, 32).float(), torch.round(steps).clamp(-128, 127))


@pytest.mark.parametrize(
    ("factor", "name", "dtype"),
    [(1, "int4", torch.float16), (1e-6, "int4", torch.bfloat16), (1e-6, "int8", torch.float32)],
)
def test_scales_beyond_fp16_have_a_wider_dtype(factor, name, dtype):
    weight = weight_of(4, 64) * factor
    q = round_to_nearest(weight, name, 32)
    assert q.scales.dtype is dtype
    error = (dequantize(q) - weight).abs().view(4, 2, 32).amax(2)
    assert bool((error <= 0.501 * q.scales.float()).all())


def test_a_scale_for_each_row_stays_exact():
    q = round_to_nearest(weight_of(4, 64), "int4", -1, symmetric=False)
    assert (q.scales.dtype, q.group_size) == (torch.float32, 64)


def test_groups_of_zeros_are_zeros():
    for name in ("int8", "int4", "nf4", "fp8"):
        q = round_to_nearest(torch.zeros(3, 40), name, 32, symmetric=name in ("nf4", "fp8"))
        assert not dequantize(q).any()


def test_chunks_of_rows_change_nothing(monkeypatch):
    weight = weight_of(9, 50)
    at_once = round_to_nearest(weight, "int4", 16, symmetric=False)
    monkeypatch.setattr(rounding, "CHUNK", 100)
    in_chunks = round_to_nearest(weight, "int4", 16, symmetric=False)
    assert torch.equal(at_once.weight, in_chunks.weight)
    assert torch.equal(at_once.zeros, in_chunks.zeros)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value):
    weight = weight_of(3, 32)
    weight[1, 5] = value
    with pytest.raises(QuantizationError, match="finite weights"):
        round_to_nearest(weight, "int8")


def test_an_empty_weight_is_refused():
    with pytest.raises(QuantizationError, match=r"\[N, K\]"):
        round_to_nearest(torch.empty(0, 4), "int8")


@pytest.mark.parametrize("columns", [1, 8, 13])
def test_nibbles_are_packed_low_first(columns):
    values = torch.randint(0, 16, (3, columns), dtype=torch.uint8)
    packed = pack_nibbles(values)
    assert packed.shape == (3, (columns + 1) // 2)
    assert int(packed[0, 0]) & 15 == int(values[0, 0])
    assert torch.equal(unpack_nibbles(packed, columns), values)


def test_tensors_that_do_not_fit_are_refused():
    q = round_to_nearest(weight_of(4, 64), "int4", 32)
    for name, tensor in {
        "scales": q.scales[:, :1],
        "zeros": torch.zeros(4, 2, dtype=torch.int8),
        "order": torch.arange(64),
        "weight": q.weight[:, :3],
    }.items():
        fields = {**vars(q), name: tensor}
        with pytest.raises(QuantizationError, match=name):
            QuantizedWeight(**fields).check()
