"""Linear layers on quantized weights on a GPU: values, sizes with tails, and which fire."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor.ops.quant.weight_only import Scheme
from ipex_inductor.reporting import decisions
from support.helpers import code_of
from support.weight_only_ops import BF16, F16, F32, assert_right, make_operands

pytestmark = pytest.mark.gpu

DEPTH, COLUMNS = 576, 1000  # neither is a multiple of a tile
# Weight dtype, group size (the last group of 128 is shorter), zero points, dtype of the scales;
# "int8" for activations that are quantized.
KINDS = [
    ("int4", 32, True, F16),
    ("int4", 64, False, F16),
    ("int4", 128, True, F16),
    ("int4", 128, False, F32),
    ("int4", DEPTH, True, F32),
    ("int8", 64, True, F16),
    ("int8", 128, False, BF16),
    ("int8", DEPTH, False, F32),
    ("nf4", 64, False, F16),
    ("fp8", 128, False, F16),
    ("fp8", DEPTH, False, F32),
    ("int4", 128, True, F16, "int8"),
    ("int8", DEPTH, False, F32, "int8"),
]
MANY = 512  # rows, for which a library multiplies the dequantized weight
# Tensor cores cut where they add, which a processor rounds: four times as far off. A library may
# add parts of K that are rounded to bf16, up to 2^-9 of some hundredth of the sum of magnitudes.
CUT, PARTS_CUT = 4, 128
# Generated code divides to within 2 units in the last place: of 127 steps, 3e-5 of a step.
NEAR_TIE = 1e-4


class Layers(nn.Module):
    """Layers on quantized weights, each followed by an activation."""

    def __init__(self, operands):
        super().__init__()
        self.schemes = [o.scheme for o in operands]
        self.given = []
        for i, o in enumerate(operands):
            names = ("weight", "scales", "zeros", "order", "bias")
            for name in names:
                self.register_buffer(f"{name}{i}", getattr(o, name))
            self.given.append([f"{name}{i}" for name in names])

    def forward(self, xs):
        results = []
        for x, names, scheme in zip(xs, self.given, self.schemes, strict=True):
            tensors = (getattr(self, name) for name in names)
            results.append(torch.ops.ipex.weight_only_linear(x, *tensors, *scheme).relu())
        return results


def make_layers(rows, dtype):
    """Return operands of all kinds, some with a bias, one with an order."""
    torch.manual_seed(0)
    return [
        make_operands(
            rows,
            DEPTH,
            COLUMNS,
            Scheme(name, group, *(compute or [str(dtype).split(".")[1]])),
            dtype=dtype,
            scale_dtype=scale_dtype,
            zeros=zeros,
            order=i == 2,
            bias=i % 2 == 0,
        )
        for i, (name, group, zeros, scale_dtype, *compute) in enumerate(KINDS)
    ]


def events():
    return [
        e for report in decisions.reports() for e in report.events if "weight-only" in e.subject
    ]


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(1, BF16), (3, F16), (16, BF16), (33, F16), (64, BF16), (MANY, BF16)],
    ids=str,
)
@torch.no_grad()
def test_all_kinds(rows, dtype, tmp_path):
    """One graph has all types; each layer is a template, but for many rows."""
    operands = make_layers(rows, dtype)
    model = Layers(operands).cuda()
    run = torch.compile(
        model, backend="ipex", options={"strict": True, "autotune_database": str(tmp_path)}
    )
    xs = [o.x.cuda() for o in operands]
    counters.clear()
    (code,) = code_of(run, xs)
    cut, roundings = (PARTS_CUT, 2) if rows == MANY else (CUT, 1)
    for o, out in zip(operands, run(xs), strict=True):
        assert_right(out.cpu(), o, relu=True, cut=cut, roundings=roundings, near_tie=NEAR_TIE)
    if rows == MANY:
        assert {e.kind for e in events()} == {"choice"}
        assert "triton_tem" not in code
        return
    assert {e.kind for e in events()} == {"fired"}
    assert counters["ipex"]["weight-only linear"] == len(KINDS)
    assert code.count("triton_tem_fused") >= len(KINDS)
    assert "extern_kernels.mm" not in code
    assert "weight_only_factors" not in code.split("def call")[1]


@torch.no_grad()
def test_changed_scales_are_seen(tmp_path):
    """They are laid out ahead of calls, and again when they change."""
    torch.manual_seed(0)
    scheme = Scheme("int4", 64, "bfloat16")
    o = make_operands(2, 256, 512, scheme, dtype=BF16, scale_dtype=F16, zeros=True)
    model, x = Layers([o]).cuda(), o.x.cuda()
    run = torch.compile(
        model, backend="ipex", options={"strict": True, "autotune_database": str(tmp_path)}
    )
    before = run([x])[0].clone()
    model.scales0.mul_(0.5)
    torch.testing.assert_close(run([x])[0], before * 0.5, rtol=0, atol=0)
    model.zeros0.fill_(8)
    o.scales, o.zeros = model.scales0.cpu(), model.zeros0.cpu()
    assert_right(run([x])[0].cpu(), o, relu=True, cut=CUT)


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (Scheme("int4", 32, "int8"), "not of 32"),
        (Scheme("int4", 48, "bfloat16"), "not of 48"),
        (Scheme("int8", 128, "float32"), 'not in "float32"'),
    ],
    ids=str,
)
@torch.no_grad()
def test_what_the_kernel_leaves_is_dequantized(scheme, reason):
    torch.manual_seed(0)
    o = make_operands(2, 96, 40, scheme, dtype=BF16, zeros=True)
    run = torch.compile(Layers([o]).cuda(), backend="ipex", options={"strict": True})
    assert_right(run([o.x.cuda()])[0].cpu(), o, relu=True, cut=PARTS_CUT, roundings=2)
    (event,) = events()
    assert event.kind == "missed"
    assert reason in event.reason
