"""Statistics of batch norms by our kernel, without a GPU: values, binaries, where the rule fires.

And what Inductor makes of them for an H200 that is not here: one kernel of ours in the forward of
each batch norm, none in the backward.
"""

import copy
import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor import lowering
from torch._inductor.graph import GraphLowering

from ipex_inductor import lowerings
from ipex_inductor.ops.pointwise.moments import moments
from ipex_inductor.passes.training import moments as rule
from ipex_inductor.prebuild import graphs
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import find_target
from ipex_inductor.templates.build.gpu import _module
from ipex_inductor.templates.triton.moments import FASTER, SOURCE, TILE, constants, parts_of
from support.case_sampling import few_with_each
from support.cases import moment_cases
from support.helpers import compile_until
from support.rendered_templates import source, usage

pytestmark = pytest.mark.unit

LAST = torch.channels_last


def checked(home, *names):
    """What each check raised, in one process in which Triton interprets."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(home)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, moment_cases.__file__, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    return checked(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("check", ["some_values", "extremes", "not_finite", "reference"])
def test_values_against_fp64(check, interpreted):
    assert len(moment_cases.SHAPES) >= 40
    assert not interpreted[check]


@pytest.mark.slow
def test_all_values_against_fp64(tmp_path):
    """In every dtype each shape."""
    assert not checked(tmp_path, "values")["values"]


def test_the_comparison_sees_a_row_that_is_missing(interpreted):
    assert "AssertionError" in interpreted["without_last_rows"]


RESNET = [(401408, 64), (401408, 256), (25088, 1024), (6272, 2048)]
# The first each time: test_every_template.py has a small tile of each dtype for each of them.
GPUS = ("h200", "a100-80gb", "b200", "mi300x")
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@pytest.mark.parametrize(
    ("dtype", "gpu"), few_with_each(itertools.product(NAMES, GPUS), lambda *_: ["the first"])
)
def test_it_compiles_where_there_is_no_gpu(dtype, gpu):
    """Without spills, its programs at once on a multiprocessor, by loads of 16 bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = find_target(gpu)
    rows, columns = RESNET[1]
    parts = parts_of(rows, columns, TILE, target.multiprocessors)
    given = constants(rows, columns, parts, TILE)
    text = source(SOURCE, given, 2 * parts + 1, epilogue=False)
    types = dict.fromkeys(("X", "BIAS", "OTHER"), f"*{NAMES[dtype]}") | {"OUT": "*fp32"}
    arch = int(target.arch[3:]) if target.kind == "cuda" else target.arch
    with triton.knobs.cache.scope():
        made = triton.compile(
            ASTSource(
                _module(text)["kernel"],
                types,
                constexprs={},
                attrs={(n,): [["tt.divisibility", 16]] for n in range(len(types))},
            ),
            target=GPUTarget(target.kind, arch, target.subgroup or 32),
            options={"num_warps": TILE.num_warps, "num_stages": TILE.num_stages},
        )
    registers, spilled = usage(made)
    assert not spilled
    if target.kind == "cuda":
        assert registers * 32 * TILE.num_warps * TILE.programs <= 65536
        assert made.metadata.shared * TILE.programs <= target.shared_memory
        assert re.search(r"v4\.b32|cp\.async\.cg\.shared\.global.*0x10", made.asm["ptx"])


@pytest.mark.parametrize("rows", [1, 100, 6272, 401408, 1605632])
@pytest.mark.parametrize("columns", [64, 72, 512, 2048])
def test_every_row_has_a_part(rows, columns):
    tile = TILE
    blocks = -(-rows // tile.BLOCK_M)
    parts = parts_of(rows, columns, tile, 132)
    assert 1 <= parts <= blocks
    at_once = 132 * tile.programs
    assert parts * -(-columns // tile.BLOCK_C) <= max(at_once, -(-columns // tile.BLOCK_C))


def test_the_reference_is_the_variance_and_the_mean():
    x = torch.randn(1000, 24, dtype=torch.float64) * 3 + 5
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        moment_cases.close(torch.ops.ipex.column_moments(given, 5, [16, 8, 1, 1, 1]), given)
    partial = torch.ops.ipex.column_moments(given, 5, [16, 8, 1, 1, 1])
    torch.library.opcheck(torch.ops.ipex.column_moments, (given, 5, [16, 8, 1, 1, 1]))
    torch.library.opcheck(moments, (partial, 1000))


@pytest.fixture(autouse=True)
def _small_images(monkeypatch):
    """As `image` makes them, and no smaller ones."""
    monkeypatch.setitem(FASTER, "sm_90", image().numel() * 8)


class Net(nn.Module):
    """Convolutions with batch norms; of the second the mean is large beside the deviation."""

    def __init__(self, bias=False, norm=nn.BatchNorm2d, **how):
        super().__init__()
        self.one = nn.Conv2d(8, 64, 3, padding=1, bias=bias)
        self.two = nn.Conv2d(64, 72, 1, bias=bias)
        self.norms = nn.ModuleList([norm(64, **how), norm(72, **how)])

    def forward(self, x):
        x = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(self.norms[1](self.two(x)))


def image(dtype=torch.float32, batch=8):
    return torch.randn(batch, 8, 28, 28).to(dtype, memory_format=LAST)


@pytest.fixture
def on_cpu(monkeypatch):
    """The rule fires on the CPU too, with the references in the place of the kernels."""
    lowerings.register()
    for op in (torch.ops.ipex.column_moments, torch.ops.ipex.moments):
        monkeypatch.delitem(lowering.lowerings, op.default)
        monkeypatch.delitem(lowering.lowerings, op, raising=False)
    monkeypatch.setattr(rule, "nvidia", lambda device: find_target("h200"))
    yield
    for op in (torch.ops.ipex.column_moments, torch.ops.ipex.moments):
        lowering.lowerings.pop(op.default, None)  # the fallback that Inductor made


def step(model, fn, x):
    """The result, all gradients and the running statistics."""
    x = x.clone().requires_grad_()
    y = fn(x)
    (y.float() * torch.linspace(-1, 1, y.shape[1]).view(-1, 1, 1)).square().mean().backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **named, **dict(model.named_buffers())}


def fired():
    return counters["ipex"][rule.NAME]


def refused():
    events = [event for report in decisions.reports() for event in report.events]
    return [e.reason for e in events if (e.kind, e.subject) == ("missed", rule.NAME)]


@pytest.mark.parametrize(
    "how",
    [{"momentum": 0.3}, pytest.param({"track_running_stats": False}, marks=pytest.mark.slow)],
    ids=str,
)
def test_results_gradients_and_running_statistics(how, on_cpu):
    """As near to fp64 as eager, which rounds as often, or nearly so."""
    model = Net(**how).train().to(memory_format=LAST)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = image()
    ours = step(model, torch.compile(model, backend="ipex", options={"strict": True}), x)
    assert fired() == 2
    theirs, truth = step(eager, eager, x), step(exact, exact, x.double())
    for name, want in truth.items():
        if not want.is_floating_point():
            assert torch.equal(ours[name], want)
            continue
        size = want.abs().max()
        off, usual = ((each[name] - want).abs().max() / size for each in (ours, theirs))
        assert off <= 4 * usual + 1e-6, (name, off, usual)  # a few roundings of sums


def test_in_half_precision_the_image_itself_is_read(on_cpu, op_by_op, monkeypatch):
    """What is summed are numbers of 16 bits, from a convolution."""
    seen = []
    inline = rule.inline
    monkeypatch.setattr(
        rule, "inline", lambda g, n, *a, **k: (seen.append(n.args), inline(g, n, *a, **k))
    )
    model = Net().train().to(memory_format=LAST)
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend="ipex", options={"strict": True})(image()).sum().backward()
    assert fired() == 2
    for x, *_ in seen:
        assert x.target is torch.ops.aten.convolution.default
        assert x.meta["val"].dtype == torch.bfloat16


@pytest.fixture
def told(on_cpu, monkeypatch):
    """What gives the reasons why the rule left a model's batch norms; nothing more is compiled."""

    def of(model, x):
        compile_until(rule, monkeypatch, model.train(), x)
        assert not fired()
        return {*refused()}

    return of


class Flat(nn.Module):
    """A batch norm over three dimensions, two of an image by hand."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv3d(8, 64, 1, bias=False), nn.BatchNorm3d(64)

    def forward(self, x):
        return self.norm(self.conv(x.unsqueeze(2)))


class Computed(nn.Module):
    """What is normalised is computed: Inductor sums it up as it computes it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 64, 1, bias=False), nn.BatchNorm2d(64)

    def forward(self, x):
        return self.norm(torch.relu(self.conv(x)))


class Rounded(nn.Module):
    """Moments in the dtype of the image."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 64, 1, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        x = self.conv(x.bfloat16())
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
        return (x - mean) / variance


LEFT = {
    "contiguous": (lambda: Net(), lambda: image().contiguous(), "its input is not channels-last"),
    "over a volume": (Flat, image, "it is not over a plane"),
    "a bias": (lambda: Net(bias=True), image, "its input is computed where it is read"),
    "computed": (Computed, image, "its input is computed where it is read"),
    "few pixels": (
        Net,
        lambda: image(batch=7),
        "for so small an image Inductor's kernels are as fast",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_near_misses_are_left_with_a_reason(name, told):
    make, x, reason = LEFT[name]
    model, x = make(), x()
    if x.is_contiguous(memory_format=LAST):
        for module in (m for m in model.modules() if isinstance(m, nn.Conv2d)):
            module.to(memory_format=LAST)
    assert told(model, x) == {reason}


def test_moments_that_are_rounded_are_no_batch_norms(told):
    assert not told(Rounded().to(memory_format=LAST), image())


def test_sizes_that_vary_are_left(told):
    x = image()
    torch._dynamo.mark_dynamic(x, 0)
    assert told(Net().to(memory_format=LAST), x) == {"its sizes vary"}


def test_other_gpus_are_left(told, monkeypatch):
    monkeypatch.setattr(rule, "nvidia", lambda device: find_target("a100-80gb"))
    reason = "it was not measured on sm_80"
    assert told(Net().to(memory_format=LAST), image()) == {reason}


@pytest.mark.parametrize(
    ("train", "options"), [(False, {}), (True, {"rules": "-moments"})], ids=["inference", "off"]
)
def test_nothing_is_said_in_inference_or_where_it_is_off(train, options, on_cpu, op_by_op):
    model = Net().train(train).to(memory_format=LAST)
    torch.compile(model, backend="ipex", options={"strict": True, **options})(image())
    assert not fired()
    assert not refused()


def test_on_a_cpu_nothing_is_said(op_by_op):
    """Nor is anything done."""
    model = Net().train().to(memory_format=LAST)
    torch.compile(model, backend="ipex", options={"strict": True})(image()).sum().backward()
    assert not fired()
    assert not refused()


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            return self.model(x).float().mean()


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="an H200 is pretended here; tests/gpu has the real one"
)
@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"track_running_stats": False}, marks=pytest.mark.slow),
        pytest.param({"affine": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_kernel_for_each_batch_norm_and_none_in_the_backward(how, tmp_path, monkeypatch):
    """Behind it one more, of each channel; in the backward nothing is summed up again."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if not torch.version.cuda:  # such a torch does not ask cuDNN how it lays out its results
        name = "_conv_determine_backend_memory_format"
        monkeypatch.setattr(torch._C, name, lambda *_, **__: LAST)
    codes = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
    model = Loss(Net(**how).to(memory_format=LAST)).train()
    with inductor.patch(force_disable_caches=True):  # nothing is to be kept
        done = graphs.prebuild(model, (image(),), find_target("h200"), training=True)
    assert [e.kind for e in done.events if e.subject == rule.NAME] == ["fired"] * 2
    forward, backward = ([*re.findall(r"(triton_\w+)\.run\(", code)] for code in codes)
    ours = [name for name in forward if "column_moments" in name]
    assert len(ours) == 2
    assert all(name.startswith("triton_tem_") for name in ours)
    first = forward.index(ours[0])
    assert forward[first + 1].startswith("triton_per_")
    assert forward[first + 2].startswith("triton_poi_")
    assert not any("moments" in name for name in backward)
    assert not any("var_mean" in name for name in (*forward, *backward))
