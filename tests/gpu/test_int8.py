"""Products of 8-bit integers on a GPU: which fire, and values beside the net of quantize nodes."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.reporting import decisions
from support.helpers import code_of
from support.int8_models import ResNet, quantize, signal_to_noise, trained_like
from support.int8_nets import (
    PATTERNS,
    AllPatterns,
    Conv,
    Linear,
    Net,
    Quantize,
    make_inputs,
    subject_of,
)

pytestmark = pytest.mark.gpu

LAST = torch.channels_last
GROUPED = ("conv in groups", "conv depthwise")


@pytest.fixture(autouse=True)
def _fp32_products():
    """Nets of quantize nodes compute products in fp32, not in TF32, beside integers."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


def events():
    """Return the decisions about integers since the last test began: kind, subject and reason."""
    every = itertools.chain(*(report.events for report in decisions.reports()))
    return [(e.kind, e.subject, e.reason) for e in every if e.subject.startswith("int8 ")]


def compiled(model, tmp_path, **options):
    options = {"strict": True, "autotune_database": str(tmp_path), **options}
    return torch.compile(model, backend="ipex", options=options)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@torch.no_grad()
def test_each_pattern_is_the_reference(bf16, tmp_path):
    """At most one step apart where values are ties; twice, with other weights and scales."""
    torch.manual_seed(0)
    model = AllPatterns().eval().cuda()
    run = compiled(model, tmp_path)
    for _ in range(2):
        inputs = [value.cuda() for value in make_inputs(3, bf16)]
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            results, eager = run(*inputs), model(*inputs)
        exact = [value.double() for value in model(*(value.float() for value in inputs))]
        for branch, result, plain, want in zip(model.branches, results, eager, exact, strict=True):
            name = f"{branch.pattern.name} quantized={branch.quantized}"
            assert result.dtype == plain.dtype, name
            assert result.stride() == plain.stride(), name
            off = (result.double() - want).abs()
            if branch.quantized:
                apart = (off / branch.result.scale.double()).round()
                assert apart.max() <= 1, name
                # Ties are one value of ten thousand; bf16 rounds biases and addends outside of it.
                assert (apart > 0).double().mean() < (0.3 if bf16 else 2e-3), name
            else:
                rtol, atol = (2**-7, 2**-6) if bf16 else (1e-5, 1e-4)
                assert (off <= rtol * want.abs() + atol).all(), name
        for branch in model.branches:
            branch.layer.weight.mul_(0.7).add_(0.01)
            branch.input.scale.mul_(1.1)
            branch.result.scale.mul_(1.3)
    fired = [subject for kind, subject, _ in events() if kind == "fired"]
    served = [branch for branch in model.branches if branch.pattern.name not in GROUPED]
    assert len(fired) == len(served)
    # Addends that no rule of GPUs fuses are summed outside, where the product is no integer.
    subjects = {subject_of(b.pattern, b.quantized, bf16) for b in served if not b.pattern.addend}
    assert subjects <= {*fired}
    missed = {reason for kind, _, reason in events() if kind == "missed"}
    assert missed == {"kernels of GPUs have no groups"}


GEOMETRIES = {
    "1x1": (64, 96, 1, {}),
    "1x1 strided": (64, 96, 1, {"stride": 2}),
    "3x3": (64, 128, 3, {"padding": 1}),
    "3x3 strided": (64, 128, 3, {"padding": 1, "stride": 2}),
    "3x3 dilated": (48, 32, 3, {"padding": 2, "dilation": 2}),
    "5x5 beyond the image": (32, 64, 5, {"padding": 4}),
    "odd channels": (40, 24, 3, {"padding": 1}),
    "few channels": (3, 64, 7, {"padding": 3, "stride": 2}),
    "one channel out": (64, 1, 3, {"padding": 1}),
}


@pytest.mark.parametrize("name", GEOMETRIES)
@torch.no_grad()
def test_convolutions_of_all_shapes(name, tmp_path):
    """Borders too, where the zero point is not zero; one kernel has epilogue and quantization."""
    channels, out, window, words = GEOMETRIES[name]
    torch.manual_seed(0)
    layers = Quantize(0.02, 117), Conv(channels, out, window, **words), Quantize(0.05, 3)
    net = Net(lambda q, conv, end, x: end(F.relu(conv(q(x)))), *layers).eval().cuda()
    x = torch.randn(5, channels, 20, 18, device="cuda").to(memory_format=LAST)
    run = compiled(net, tmp_path)
    (code,) = code_of(run, x)
    want = net(x).double()
    apart = ((run(x).double() - want) / 0.05).round().abs()
    assert apart.max() <= 1
    assert (apart > 0).double().mean() < 2e-3  # ties
    assert [subject for kind, subject, _ in events() if kind == "fired"] == [
        "int8 conv+relu+quantize"
    ]
    assert code.count("triton_tem_fused") >= 1
    assert "extern_kernels" not in code.split("def call")[1]


@pytest.mark.parametrize("rows", [1, 3, 17, 64, 300, 5000])
@pytest.mark.parametrize("columns", [8, 100, 768])
@torch.no_grad()
def test_linear_layers_of_all_sizes(rows, columns, tmp_path):
    torch.manual_seed(0)
    layers = Quantize(0.02, 117), Linear(384, columns), Quantize(0.02, 90)
    net = Net(lambda q, linear, end, x: end(F.gelu(linear(q(x)))), *layers).eval().cuda()
    x = torch.randn(rows, 384, device="cuda")
    run = compiled(net, tmp_path)
    result, want = run(x), net(x)
    apart = ((result - want).double() / 0.02).round().abs()
    assert apart.max() <= 1
    assert (apart > 0).sum() <= max(2, 4e-3 * apart.numel())  # ties
    assert [subject for kind, subject, _ in events() if kind == "fired"] == [
        "int8 linear+gelu+quantize"
    ]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@torch.no_grad()
def test_a_net_of_the_frontend(bf16, tmp_path):
    """Quantized on the CPU as users do, moved to the GPU; follows new weights without compiling."""
    torch.manual_seed(0)
    model = quantize(trained_like(ResNet(), 3, 32, 32), (torch.randn(4, 3, 32, 32),)).cuda()
    x = torch.randn(8, 3, 32, 32, device="cuda").to(memory_format=LAST)
    run = compiled(model, tmp_path)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            result = run(x)
        assert signal_to_noise(model(x), result.float()) > (25 if bf16 else 40)
        for p in model.parameters():
            p.mul_(0.9)
    assert len([e for e in events() if e[0] == "fired"]) == 7
    assert len(decisions.reports()) == 1


@torch.no_grad()
def test_rows_with_scales_of_their_own(tmp_path):
    """Dynamic quantization, of a batch of one row and of many."""
    from ipex_inductor.quantization import convert, default_dynamic_qconfig, prepare

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).eval()
    x = torch.randn(40, 256)
    model = convert(prepare(net, default_dynamic_qconfig, example_inputs=x, inplace=False)).cuda()
    run = compiled(model, tmp_path)
    for rows in (40, 1):
        part = x[:rows].cuda()
        assert signal_to_noise(model(part), run(part)) > 60
    assert {e[0] for e in events()} == {"fired"}


@torch.no_grad()
def test_sizes_that_vary_stay_floats_with_a_reason(tmp_path):
    net = Net(lambda q, linear, x: linear(q(x)), Quantize(0.02, 117), Linear(64, 32)).eval().cuda()
    x = torch.randn(6, 64, device="cuda")
    torch._dynamo.mark_dynamic(x, 0)
    run = compiled(net, tmp_path)
    assert signal_to_noise(net(x), run(x)) > 60
    (event,) = events()
    assert event[0] == "missed"
    assert "static sizes" in event[2]


def test_patterns_are_those_of_cpus():
    assert {*GROUPED} <= {pattern.name for pattern in PATTERNS}
