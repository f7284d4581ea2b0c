"""Operators of FP8: rounding, saturation, products, updates, and their fakes."""

import math

import pytest
import torch

from ipex_inductor.errors import DeviceError
from ipex_inductor.ops.quant import fp8, fp8_states
from support.fp8_reference import Column

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
ONE = torch.ones(())
SETTINGS = fp8_states.Settings(margin=0, most_recent=False, interval=1, length=4, group="")


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_rounded_to_even_and_saturated(dtype):
    largest = torch.finfo(dtype).max
    step = torch.finfo(dtype).eps
    x = torch.tensor(
        [1 + step / 2, 1 + 1.5 * step, largest * 1.06, math.inf, -1e30, math.nan, -0.0]
    )
    values, amax = fp8.fp8_quantize(x, ONE, dtype)
    want = [1, 1 + 2 * step, largest, largest, -largest]
    assert values.float()[:5].tolist() == want
    assert values.float()[5].isnan()
    assert math.copysign(1, values.float()[6]) == -1
    assert amax.isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_magnitude_is_that_of_the_input(dtype):
    x = torch.tensor([[-3.0, 2], [0, 1]]).to(dtype)
    values, amax = fp8.fp8_quantize(x.t(), torch.tensor(64.0), torch.float8_e4m3fn)
    assert amax == 3
    assert amax.dtype is torch.float32
    assert values.float().tolist() == [[-192, 0], [128, 64]]
    assert values.is_contiguous()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_in_fp64(bias, dtype):
    """K is no multiple of 16. Sums in fp32 are off by K roundings of the largest partial sum."""
    a8, _ = fp8.fp8_quantize(torch.randn(5, 37), torch.tensor(100.0), torch.float8_e4m3fn)
    b8, _ = fp8.fp8_quantize(torch.randn(7, 37), torch.tensor(5000.0), torch.float8_e5m2)
    b = torch.randn(7) if bias else None
    got = fp8.fp8_gemm(a8, b8, torch.tensor(0.01), torch.tensor(2e-4), b, dtype, False)
    terms = a8.double() * 0.01, b8.double().t() * 2e-4
    want = terms[0] @ terms[1] + (0 if b is None else b.to(dtype).double())
    bound = (terms[0].abs() @ terms[1].abs()) * 37 * 2**-24 + 1e-6
    rounding = want.abs() * torch.finfo(dtype).eps / 2
    assert ((got.double() - want).abs() <= bound + rounding).all()
    assert got.dtype is dtype


def test_products_ignore_autocast():
    a8, _ = fp8.fp8_quantize(torch.randn(4, 64), torch.tensor(64.0), torch.float8_e4m3fn)
    arguments = a8, a8, ONE, ONE, None, torch.float32, False
    want = fp8.fp8_gemm(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fp8.fp8_gemm(*arguments), want)


def test_other_devices_are_refused():
    a = torch.empty(2, 2, device="meta", dtype=torch.float8_e4m3fn)
    with pytest.raises(DeviceError, match="meta"):
        fp8.fp8_gemm._init_fn(a, a, ONE, ONE, None, torch.float32, False)


def amaxes():
    """A hundred of them, with all that a scale must not follow."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(100, generator=generator).abs() * 10).tolist()
    special = {7: 0.0, 20: math.inf, 33: math.nan, 50: 1e-44, 60: 3e38, 61: 0.0, 62: 0.0}
    return [special.get(number, value) for number, value in enumerate(values)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("margin", "interval"), [(0, 1), (2, 1), (-1, 4)])
def test_updates_are_those_of_the_reference(dtype, algorithm, margin, interval):
    column = Column(dtype, 6, margin, interval, algorithm)
    state = torch.zeros(3 + 6, 1)
    state[:2] = 1
    most_recent = algorithm == "most_recent"
    for amax in amaxes():
        fp8_states.fp8_record(state, [torch.tensor(amax)], [0], -2)
        column.record(torch.tensor([amax]))
        scales = fp8_states.fp8_update(
            state, torch.finfo(dtype).max, -1, margin, most_recent, interval, 6, ""
        )
        column.update()
        want = [column.scale, column.scale_inv, column.updates % interval, *column.history]
        want = torch.tensor(want)[:, None]
        torch.testing.assert_close(state, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(scales[..., 0], state[:2])
        assert scales.isfinite().all()


def test_writes_count_no_version():
    """A backward that compiled code saved a state for may run after another one wrote it."""
    state = torch.zeros(7, 2)
    version = state._version
    fp8_states.fp8_record(state, [ONE, ONE], [0, 1], -2)
    fp8_states.fp8_update(state, 448.0, -1, *SETTINGS)
    fp8_states.fp8_record_gradients(state, [ONE], [0], torch.float8_e5m2, -2, *SETTINGS)
    assert state._version == version
    assert state[:, 0].tolist() == [448, fp8_inverse(448), 0, 1, 0, 0, 1]
    fp8_states.take_recorded()


def fp8_inverse(value):
    return (1 / torch.tensor(float(value))).item()


@pytest.mark.parametrize("checked", ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"])
def test_fakes_and_schemas_are_right(checked):
    x, state = torch.randn(4, 6), torch.ones(7, 2)
    a8, _ = fp8.fp8_quantize(x, ONE, torch.float8_e4m3fn)
    b8, _ = fp8.fp8_quantize(x, ONE, torch.float8_e5m2)
    calls = [
        (torch.ops.ipex.fp8_quantize.default, (x, ONE, torch.float8_e4m3fn)),
        (torch.ops.ipex.fp8_gemm.default, (a8, b8, ONE, ONE, x[0, :4], torch.bfloat16, False)),
        (torch.ops.ipex.fp8_record.default, (state, [ONE, ONE], [0, 1], -2)),
        (torch.ops.ipex.fp8_read_scales.default, (state, [1])),
        (torch.ops.ipex.fp8_quantize_transposed.default, (x, ONE, torch.float8_e4m3fn, ONE)),
        (torch.ops.ipex.fp8_update.default, (state, 448.0, -1, *SETTINGS)),
        (
            torch.ops.ipex.fp8_record_gradients.default,
            (state, [ONE], [1], torch.float8_e5m2, -2, *SETTINGS),
        ),
    ]
    if checked == "test_schema":  # it cannot compare tensors in FP8
        calls = calls[2:5]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=checked)
    fp8_states.take_recorded()
