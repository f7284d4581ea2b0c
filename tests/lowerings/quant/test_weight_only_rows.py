"""GEMMs on quantized weights for NVIDIA GPUs: candidates, bodies, and what is offered."""

import pytest
import torch

from ipex_inductor.autotune.space import why_unknown
from ipex_inductor.lowerings.problem.workload import inputs_of, to_float64
from ipex_inductor.lowerings.quant import weight_only_rows as lowering
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import tuner
from ipex_inductor.ops.quant import weight_only_rows
from ipex_inductor.ops.quant.weight_only import STORED, Scheme
from support.cases.weight_only_cases import weight_only_problem
from support.weight_only_ops import BF16, F16, F32, make_operands

pytestmark = pytest.mark.unit

SCHEMES = [("int4", 64, True), ("int4", 32, False), ("int8", 96, True), ("nf4", 32, False)]
SCHEMES += [("fp8", 96, False)]


@pytest.mark.parametrize("scale_dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("name", "group", "zeros"), SCHEMES)
def test_factors_are_read_as_they_were(name, group, zeros, dtype, scale_dtype):
    """Scales and zero points, 0 to 16 of int4 and all of int8, are in words to the bit."""
    torch.manual_seed(0)
    scheme = Scheme(name, group, "bfloat16")
    o = make_operands(1, 96, 300, scheme, scale_dtype=scale_dtype, zeros=zeros)
    words = torch.ops.ipex.weight_only_factors(o.scales, o.zeros, name, dtype)
    assert words.dtype == torch.int32
    found = weight_only_rows.read_factors(words, scheme, dtype, scale_dtype, o.zeros is not None)
    assert torch.equal(found[0], o.scales.float())
    if o.zeros is not None:
        assert torch.equal(found[1], o.zeros.float())


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize(("name", "group", "zeros"), SCHEMES)
def test_the_body_is_the_op(name, group, zeros, order):
    """Sums in fp32 of weights that are not rounded: closer to fp64 than the op may be."""
    torch.manual_seed(0)
    scheme = Scheme(name, group, "bfloat16")
    words = {"dtype": BF16, "scale_dtype": F16, "zeros": zeros, "order": order, "bias": True}
    o = make_operands(6, 96, 40, scheme, **words)
    o.x = o.x.view(2, 3, 96)
    result = weight_only_rows.compute([], *o.arguments)
    exact = weight_only_rows.compute_exactly(
        *(t.double() if t is not None and t.is_floating_point() else t for t in o.arguments[:6]),
        *scheme,
    )
    assert result.dtype == BF16
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(("name", "group"), [("int4", 64), ("int8", 96), ("int8", 32)])
def test_quantized_activations(name, group):
    """Integers and scales of groups: equal to the op but for the order of sums."""
    torch.manual_seed(0)
    o = make_operands(6, 96, 40, Scheme(name, group, "int8"), zeros=True, order=True, bias=True)
    result = weight_only_rows.compute([], *o.arguments)
    torch.testing.assert_close(result, o.by_op(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_dtype", STORED)
def test_candidates_are_verified_against_fp64(weight_dtype):
    problem = weight_only_problem(3, 72, 576, weight_dtype, zeroed=weight_dtype.startswith("int"))
    inputs = inputs_of(problem, torch.device("cpu"), seed=0)
    trial = tuner._trial(problem, torch.device("cpu"))
    calls = library.calls(problem)
    assert calls[0].name == "ipex.weight_only"
    assert calls[1].name == "ipex.weight_only_dequantized"
    assert len(calls) > 3
    for call in calls:
        assert why_unknown(call.choice) is None
        result = tuner.function_of(problem, call.body)(*inputs)
        assert trial.judge.why_wrong(result) is None, call.choice


def test_fp64_is_of_the_problem_alone():
    problem = weight_only_problem(3, 72, 576, "fp8", zeroed=False)
    assert to_float64(problem).operands[1].dtype == "float64"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"compute": "int8", "group": 32}, "not of 32"),
        ({"compute": "float32"}, 'not in "float32"'),
        ({"group": 48}, "not of 48"),
        ({"arch": "gfx942:AMD-Instinct-MI300X"}, "not for gfx942"),
    ],
)
def test_refused(change, reason):
    problem = weight_only_problem(1, 4096, 4096, **change)
    assert [call.name for call in library.calls(problem)] == [
        "ipex.weight_only",
        "ipex.weight_only_dequantized",
    ]
    reasons = {call.why_not(problem) for call in lowering.CALLS[2:]}
    assert any(reason in each for each in reasons)


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 512])
def test_offered(rows):
    """Tiles of the number of rows alone, of both depths where groups allow it."""
    calls = library.calls(weight_only_problem(rows, 4096, 4096))[2:]
    assert len({call.parameters["BLOCK_M"] for call in calls}) == 1
    assert {call.parameters["BLOCK_K"] for call in calls} == {64, 128}
    assert {call.parameters["parts"] for call in calls} >= {1, 2, 4}


@pytest.mark.parametrize(
    ("arch", "change", "reason"),
    [
        ("sm_90:NVIDIA-H200", {}, None),
        ("sm_80:NVIDIA-A100", {}, None),
        ("sm_75:NVIDIA-T4", {}, "sm_80 and later"),
        ("sm_80:NVIDIA-A100", {"weight_dtype": "fp8"}, "sm_89 and later"),
        ("sm_90:NVIDIA-H200", {"compute": "float32"}, 'not in "float32"'),
        ("sm_90:NVIDIA-H200", {"compute": "int8"}, "not of 32"),
        ("sm_90:NVIDIA-H200", {"compute": "int8", "group_size": 64}, None),
        ("sm_90:NVIDIA-H200", {"group_size": 48}, "not of 48"),
        ("sm_90:NVIDIA-H200", {"x": torch.empty(0, 96, device="meta")}, "a size is zero"),
        ("sm_90:NVIDIA-H200", {"x": torch.empty(2, 97, device="meta")}, "K is odd"),
    ],
)
def test_why_not(arch, change, reason, monkeypatch):
    monkeypatch.setattr(lowering.selector_hook, "arch_of", lambda device: arch)
    values = {"weight_dtype": "int4", "group_size": 32, "compute": "bfloat16"}
    values |= {"x": torch.empty(2, 96, device="meta"), "weight": torch.empty(40, 48, device="meta")}
    found = lowering.why_not(torch.device("cuda"), values | change)
    assert found is None if reason is None else reason in found


def test_other_devices_dequantize():
    assert "for xpu" in lowering.why_not(torch.device("xpu"), {"x": torch.empty(1)})
