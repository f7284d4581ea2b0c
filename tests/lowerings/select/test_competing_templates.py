"""Which templates of Inductor's compute what a linear layer's call does."""

import pytest

from ipex_inductor.autotune.pool import Estimate
from ipex_inductor.autotune.record import Choice, encode
from ipex_inductor.autotune.select import Selection
from ipex_inductor.lowerings.problem import shapes
from ipex_inductor.lowerings.select import competing_templates, library
from support.cases.skinny_cases import linear

pytestmark = pytest.mark.unit

H200 = "sm_90:NVIDIA-H200"
ACTIVATION = "cublaslt.addmm_activation"
HALF = "aten.mul.Tensor({0}, 0.5)"
ERF = "aten.erf.default(aten.mul.Tensor({0}, 0.7071067811865476))"
GELU = f"aten.mul.Tensor({HALF}, aten.add.Tensor({ERF}, 1))"
CAST = "prims.convert_element_type.default({}, torch.{})"
DECOMPOSED = CAST.format(GELU.format(CAST.format("y", "float32")), "bfloat16")


def product(epilogue, op="aten.addmm.default", rows=4, columns=48, bias="48"):
    """Of [rows, 32] and a weight's transpose, as Inductor has it in its lists."""
    factors = f"{rows}x32 32x{columns}:T"
    operands = f"{bias} {factors}" if op == "aten.addmm.default" else f"{factors} {bias}"
    (found,) = shapes.problems([f"{op} bfloat16 {operands} -> {epilogue}"], H200, {})
    return found


RIVALS = {
    "as Inductor decomposes it": (product(DECOMPOSED), "gelu"),
    "the bias apart": (product(GELU.format("aten.add.Tensor(y, x2)"), "aten.mm.default"), "gelu"),
    "relu": (product("aten.relu.default(y)"), "relu"),
}
OTHERS = {
    "the other gelu": (product(DECOMPOSED), "gelu_tanh"),
    "no epilogue": (product("y"), "relu"),
    "no bias": (product("aten.relu.default(y)", "aten.mm.default", bias=""), "relu"),
    "a matrix for a bias": (product("aten.relu.default(y)", bias="4x48"), "relu"),
    "other rows": (product("aten.relu.default(y)", rows=5), "relu"),
    "other columns": (product("aten.relu.default(y)", columns=47, bias="47"), "relu"),
}


@pytest.mark.parametrize("name", [*RIVALS, *OTHERS])
def test_a_rival_computes_the_same(name):
    other, unary = {**RIVALS, **OTHERS}[name]
    ours = linear("bfloat16", 4, 48, 32, unary)
    assert competing_templates.is_torch_form(other, ours) == (name in RIVALS)


def test_of_more_dimensions_there_is_none():
    """Inductor flattens those, and has their epilogue behind a view."""
    words = "other=None binary='none' unary='relu' scalars=() packed=False"
    line = f"ipex.linear.default bfloat16 2x2x32 48x32 48 {words}"
    (ours,) = shapes.problems([line], H200, {})
    assert not competing_templates.is_torch_form(RIVALS["relu"][0], ours)


@pytest.mark.parametrize(
    ("source", "p50", "listed"),
    [
        ("recorded", 4.0, True),
        ("recorded", 6.0, True),
        ("model", 4.0, True),
        ("recorded", 4.0, False),  # as where `max_autotune_gemm_backends` has no Triton
    ],
)
def test_what_a_template_was_measured_to_beat_is_left_to_inductor(source, p50, listed):
    ours, (other, _) = linear("bfloat16", 4, 48, 32, "relu"), RIVALS["relu"]
    (call,) = (c for c in library.calls(ours) if c.name == ACTIVATION)
    template = Selection(
        Estimate(Choice("template", "inductor.triton.mm"), p50, 0.01), None, source
    )
    known = {
        encode(ours): Selection(Estimate(call.choice, 5.0, 0.01), None, "recorded"),
        encode(other): template,
    }
    offered = [template.choice] if listed else [Choice("library", "aten.addmm")]
    settled = competing_templates.prefer_templates(known, {encode(other): offered})
    if (source, p50, listed) == ("recorded", 4.0, True):
        assert settled[encode(ours)].choice.name == "aten.addmm"
        assert f"as a template is faster than {ACTIVATION}" in str(settled[encode(ours)])
        assert settled[encode(other)] == template
    else:
        assert settled == known
