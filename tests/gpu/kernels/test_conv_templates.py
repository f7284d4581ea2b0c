"""Our convolution templates on a GPU: values of many shapes, through Inductor, and in a model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.autotune import measure
from ipex_inductor.autotune.measure import Candidate
from ipex_inductor.lowerings.problem import settings, shapes
from ipex_inductor.lowerings.problem.workload import function_of, inputs_of
from ipex_inductor.lowerings.select import library, selection
from ipex_inductor.lowerings.tune import compiling, tuner
from ipex_inductor.reporting import decisions
from ipex_inductor.target import device
from support.autotune.autotune_records import plant
from support.cases.conv_cases import CLOSE, COMPILED, HALVES, IN_FP16, SEEDS, drawn, in_each_dtype
from support.helpers import code_of, no_farther_off_than_eager
from support.rendered_templates import ERRORS, error

pytestmark = pytest.mark.gpu

WINDOW = "transposed=False output_padding=0,0 packed=''"
PLAIN = "other=None binary='none'"
PROBLEMS = {
    "stem": f"8x3x64x64:L 64x3x7x7:L 64 {PLAIN} unary='relu' stride=2,2 padding=3,3 dilation=1,1 "
    "groups=1",
    "stem, contiguous": f"8x3x64x64 64x3x7x7:L 64 {PLAIN} unary='gelu' stride=2,2 padding=3,3 "
    "dilation=1,1 groups=1",
    "patches": f"4x3x64x64:L 96x3x4x4:L 96 {PLAIN} unary='none' stride=4,4 padding=0,0 "
    "dilation=1,1 groups=1",
    "depthwise": f"4x96x28x28:L 96x1x3x3:L 96 {PLAIN} unary='silu' stride=2,2 padding=1,1 "
    "dilation=1,1 groups=96",
    "depthwise, add": "4x64x14x14:L 64x1x7x7:L 64 4x64x14x14:L binary='add' unary='relu' "
    "stride=1,1 padding=3,3 dilation=1,1 groups=64",
    "depthwise, relu6": f"4x96x28x28:L 96x1x3x3:L 96 {PLAIN} unary='hardtanh' scalars=0.0,6.0 "
    "stride=1,1 padding=1,1 dilation=1,1 groups=96",
    "rows, relu6": f"8x96x28x28:L 24x96x1x1:L 24 {PLAIN} unary='hardtanh' scalars=0.0,6.0 "
    "stride=1,1 padding=0,0 dilation=1,1 groups=1",
    "rows, add alone": "8x96x28x28:L 24x96x1x1:L 24 8x24x28x28:L binary='add' unary='none' "
    "stride=1,1 padding=0,0 dilation=1,1 groups=1",
    "rows, add": "8x64x28x28:L 256x64x1x1:L 256 8x256x28x28:L binary='add' unary='relu' "
    "stride=1,1 padding=0,0 dilation=1,1 groups=1",
    "rows": f"8x200x23x29:L 72x200x1x1:L 72 {PLAIN} unary='silu' stride=1,1 padding=0,0 "
    "dilation=1,1 groups=1",
    "groups of 24": f"4x72x14x14:L 72x24x3x3:L 72 {PLAIN} unary='relu' stride=2,2 padding=1,1 "
    "dilation=1,1 groups=3",
    "groups of 4, add": "4x64x14x14:L 64x4x3x3:L 64 4x64x14x14:L binary='add' unary='relu' "
    "stride=1,1 padding=1,1 dilation=1,1 groups=16",
    "many 3x3 by boxes": f"128x64x14x14:L 96x64x3x3:L 96 {PLAIN} unary='silu' stride=1,1 "
    "padding=1,1 dilation=1,1 groups=1",
    "many 3x3 by boxes, by 2, add": "128x128x28x28:L 96x128x3x3:L 96 128x96x14x14:L binary='add' "
    "unary='relu' stride=2,2 padding=1,1 dilation=1,1 groups=1",
    "many 3x3 by 2": f"4x32x14x14:L 24x32x3x3:L 24 {PLAIN} unary='relu' stride=2,2 padding=1,1 "
    "dilation=1,1 groups=1",
}


@pytest.mark.parametrize("number", range(len(COMPILED)))
def test_values(number):
    """Against float64, into memory full of NaN, with infinities beside windows."""
    check(COMPILED[number])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(IN_FP16)))
def test_values_in_fp16(number):
    check(IN_FP16[number])


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_values_of_drawn_sizes(seed):
    """Of each template, in each of its dtypes."""
    for case in in_each_dtype(drawn(seed)):
        check(case)


def check(case):
    # In bf16 one rounding, of what is no larger than the largest exact value; in front of a pool,
    # as by themselves, a convolution's values are rounded too.
    close = {**CLOSE, "bfloat16": 8e-3 if case["template"] == "stem_pool" else 4e-3}
    assert ERRORS.get(case["template"], error)(case, "cuda") <= close[case["dtype"]], case


EACH = [
    (name, dtype)
    for name in PROBLEMS
    for dtype in (HALVES if name.startswith(("rows", "many", "groups")) else (*HALVES, "float32"))
]


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_through_inductor(name, dtype):
    """No farther off than torch's own may be, and laid out as its result is."""
    problem = problem_of(name, dtype)
    trial = tuner._trial(problem, torch.device("cuda"))
    ours = [call for call in library.calls(problem) if call.parameters]
    assert ours
    for call in ours[:2]:
        run = compiling.compile_choice(problem, call.choice, trial.inputs)
        found = measure.verify_candidate(Candidate(call.choice, run), trial.judge, trial.inputs)
        assert isinstance(found, float), (call.choice, found.reason)


@pytest.mark.parametrize("name", PROBLEMS)
@torch.no_grad()
def test_no_images(name, tmp_path):
    """What templates are for, but for its images: torch's to compute, where all is timed too."""
    problem = problem_of(name, "bfloat16")
    operands = inputs_of(problem, torch.device("cuda"), 0)
    operands = [t[:0] if t.dim() == 4 and t is not operands[1] else t for t in operands]
    layer = function_of(problem)
    options = {"strict": True, "autotune": "always", "autotune_database": str(tmp_path)}
    found = torch.compile(layer, backend="ipex", options=options)(*operands)
    torch.testing.assert_close(found, layer(*operands))


def problem_of(name, dtype):
    known = str(device.current("cuda")), settings.settings_of("cuda")
    line = f"ipex.conv.default {dtype} {PROBLEMS[name]} {WINDOW}"
    line += "" if "scalars" in line else " scalars=()"
    (problem,) = shapes.problems([line], *known)
    return problem


class Net(nn.Module):
    """A stem with a pool behind it, and a depthwise convolution."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.separate = nn.Conv2d(64, 64, 5, 1, 2, groups=64)
        for values in (self.norm.running_mean, self.norm.weight.data, self.norm.bias.data):
            values.normal_(0.5, 0.5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)  # no stem's pool
        return F.silu(self.separate(x))


@torch.no_grad()
def test_in_a_model(tmp_path, monkeypatch):
    """By record, with weights arranged once, and again when they change."""

    def times(*_):
        raise AssertionError("something was to be measured")

    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(selection, "tune_locally", times)
    last = {"memory_format": torch.channels_last}
    model = Net().cuda().eval().bfloat16().to(**last)
    x = torch.randn(4, 3, 64, 64, device="cuda").bfloat16().to(**last)
    assert len(plant(tmp_path / "database", lambda: model(x))) == 2
    options = {"strict": True, "autotune_database": str(tmp_path / "database")}
    fn = torch.compile(model, backend="ipex", options=options)
    (code,) = code_of(fn, x)
    assert code.count("async_compile.triton('triton_tem_") == 2
    assert "extern_kernels.convolution" not in code
    said = [e.reason for r in decisions.reports() for e in r.events if e.kind == "choice"]
    assert sorted(reason.split()[0] for reason in said) == [
        "ipex.triton.depthwise",
        "ipex.triton.stem",
    ]
    for _ in range(2):
        no_farther_off_than_eager(fn, model, x)
        model.norm.bias.add_(1.0)
        model.separate.weight.mul_(2.0)
