"""Graphs for GPUs that are not here: compiled, found there, and the process left as it was."""

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from ipex_inductor import compat
from ipex_inductor.aot_cache import toolkit
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.entry import unpack_any
from ipex_inductor.aot_cache.folder import SUFFIX
from ipex_inductor.aot_cache.graph_files import workroom
from ipex_inductor.cli import app
from ipex_inductor.errors import (
    ArgumentError,
    CompilerNotFoundError,
    OptionError,
    TargetError,
)
from ipex_inductor.optim import FusedStep
from ipex_inductor.prebuild import described, describing, driver, graphs
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import current
from ipex_inductor.target.device import find_target as target
from support.helpers import Mlp

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="an H200 is pretended here; tests/gpu has the real one"
    ),
    pytest.mark.usefixtures("guard_known"),
]

cpu_build = pytest.mark.skipif(bool(torch.version.cuda), reason="torch makes graphs here")


@pytest.fixture(autouse=True)
def _a_folder_of_ours(monkeypatch):
    """A torch that makes graphs here keeps them, which it does not in a folder that tests name."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


ARCHS = ("a100-80gb", "l4", "h200", "b200", "rtx-5090", "mi300x", "mi355x")


class Net(nn.Module):
    """A convolution that folds, a product, a reduction: library calls and Triton's kernels."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 64)
        self.two.weight = nn.Parameter(self.two.weight.detach().t())
        self.tied = self.one

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return torch.softmax(self.two(F.gelu(self.tied(x))), -1)


def make():
    """What the command asks for."""
    torch.manual_seed(0)
    return Net().eval(), (torch.randn(2, 3, 8, 8),)


class Loss(nn.Module):
    """What a training step compiles."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return F.gelu(self.layer(x)).square().mean()


def make_step():
    """The same of a training step, and its optimizer, which clips."""
    torch.manual_seed(0)
    model = Loss().train()
    fused = FusedStep(torch.optim.AdamW(model.parameters()), clip_norm=1.0)
    return model, (torch.randn(4, 32),), fused.optimizer


def everything():
    """All that `described.device` may change, by identity."""
    from torch._dynamo import device_interface
    from torch._functorch._aot_autograd import graph_compile
    from torch._inductor import config, constant_folding
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime import hints, triton_helpers, triton_heuristics
    from torch._subclasses import fake_tensor
    from triton.runtime import driver

    from ipex_inductor.templates.build import cuda

    owners = {
        "torch.cuda": torch.cuda,
        "torch._C": torch._C,
        "torch.version": torch.version,
        "fake_tensor": fake_tensor,
        "FakeTensorMode": fake_tensor.FakeTensorMode,
        "device_interface": device_interface,
        "CudaInterface": device_interface.CudaInterface,
        "ConstantFolder": constant_folding.ConstantFolder,
        "pad_mm": pad_mm,
        "triton_helpers": triton_helpers,
        "CachingAutotuner": triton_heuristics.CachingAutotuner,
        "driver": driver,
        "cuda kernels": cuda,
        "graph_compile": graph_compile,
    }
    found = {
        (name, key): id(value)
        for name, owner in owners.items()
        for key, value in vars(owner).items()
    }
    for counter in ("cache_hits", "cache_misses"):
        del found["FakeTensorMode", counter]
    found["interfaces"] = dict(device_interface.device_interfaces)
    found["properties"] = hints.DeviceProperties.create.cache_info().currsize
    found["config"] = config.save_config_portable()
    found["available"] = torch.cuda.is_available(), torch.cuda.device_count()
    found["modes"] = torch._C._len_torch_dispatch_stack()
    return found


def compiled_on_cpu():
    model, x = Mlp().eval(), torch.randn(3, 32)
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(model, backend="ipex", options={"strict": True})(x)
        # One fused product and GELU in another order: a few roundings in fp32.
        torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-6)


def test_nothing_of_it_stays():
    compiled_on_cpu()
    model, inputs = make()
    weights = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    with described.device(target("h200")):  # imports what is imported for good
        pass
    before = everything()
    with contextlib.suppress(ZeroDivisionError), described.device(target("h200")):
        assert str(current("cuda:0")) == "sm_90:NVIDIA-H200"
        assert current("cuda:0").multiprocessors == 132
        raise ZeroDivisionError
    done = graphs.prebuild(model, inputs, target("h200"))
    assert len(done.made.kernels) >= 3
    after = everything()
    assert {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)} == set()
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.empty(1, device="cuda")
    assert {n: id(t) for n, t in model.state_dict(keep_vars=True).items()} == weights
    assert all(type(t) is not torch._subclasses.FakeTensor for t in model.parameters())
    compiled_on_cpu()
    with torch.no_grad():
        assert model(*inputs).shape == (2, 64)


RARE = {*ARCHS} - {"h200", "mi300x"}  # of kinds of which there is another; two seconds each


@cpu_build
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in RARE)) for n in ARCHS]
)
def test_kernels_compile_for_every_architecture(name):
    model, inputs = make()
    done = graphs.prebuild(model, inputs, target(name))
    assert (done.graphs, done.missing) == (1, [])
    assert "is not built for" in done.kernels_only
    assert done.entries == {}
    assert len(done.made.kernels) >= 3
    fired = {event.subject for event in done.events if event.kind == "fired"}
    assert "conv2d+batch_norm" in fired


class Inverted(nn.Module):
    """A residual of MobileNetV2 (arXiv:1801.04381)."""

    def __init__(self):
        super().__init__()
        self.wide, self.back = nn.Conv2d(24, 144, 1), nn.Conv2d(144, 24, 1)
        self.each = nn.Conv2d(144, 144, 3, padding=1, groups=144)

    def forward(self, x):
        return x + self.back(F.relu6(self.each(F.relu6(self.wide(x)))))


def test_relu6_and_a_sum_stay_with_their_convolutions(monkeypatch):
    """Templates of ours may then have all of it; what no call has is written as torch's ops."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # or the graph could not be kept
    last = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    model, x = Inverted().eval().to(**last), torch.zeros(64, 24, 56, 56).to(**last)
    done = graphs.prebuild(model, (x,), target("h200"))
    fired = [event.subject for event in done.events if event.kind == "fired"]
    assert sorted(fired) == ["conv+add", "conv+hardtanh", "conv+hardtanh"]
    asked = Counter(event.subject for event in done.events if event.kind == "choice")
    assert asked >= Counter(fired)
    assert done.missing == []


class Bottleneck(nn.Module):
    """As ResNet-50 has five of (arXiv:1512.03385), its batch norms folded."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1024, 256, 1), nn.Conv2d(256, 1024, 1)
        self.middle = nn.Conv2d(256, 256, 3, padding=1)

    def forward(self, x):
        return F.relu(self.last(F.relu(self.middle(F.relu(self.first(x))))) + x)


def test_a_model_that_is_not_channels_last_finds_the_same_records():
    """Its windows of one pixel lie as they do in one that is, whatever their strides say."""
    said = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = Bottleneck().eval().bfloat16().to(memory_format=layout)
        x = torch.zeros(64, 1024, 14, 14).bfloat16().to(memory_format=layout)
        done = graphs.prebuild(model, (x,), target("h200"))
        choices = [e for e in done.events if e.kind == "choice" and e.subject.startswith("conv")]
        # Behind the last one torch for GPUs copies the result to the layout that eager gives it.
        said.append([(e.subject, e.reason.removesuffix(" without a copy")) for e in choices])
    assert said[0] == said[1]
    assert len(said[0]) == 3
    assert any("shipped" in reason for _, reason in said[0])


class Seen(TorchDispatchMode):
    """The names of ops that reach torch's kernels."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


CUDNN, FLASH, EFFICIENT = (
    f"_scaled_dot_product_{kind}_attention" for kind in ("cudnn", "flash", "efficient")
)


# A mask is given by its sizes; "e" is a last one that is expanded.
@pytest.mark.parametrize(
    ("dtype", "width", "mask", "causal", "cudnn", "kernel"),
    [
        (torch.bfloat16, 64, None, False, True, CUDNN),
        (torch.bfloat16, 64, None, False, False, FLASH),
        (torch.bfloat16, 256, None, True, True, FLASH),  # too wide for cuDNN
        (torch.float16, 64, (16, 16), False, False, EFFICIENT),
        (torch.bfloat16, 64, (2, 1, 16, 16), False, True, CUDNN),
        (torch.bfloat16, 64, (1, 1, 16, "e"), False, True, None),  # what transformers gives BERT
        (torch.float16, 64, (1, 1, 16, "e"), False, False, None),
        (torch.bfloat16, 64, (4, 16, 16), False, True, None),  # three dimensions
        (torch.float32, 64, None, False, True, EFFICIENT),
        (torch.float32, 63, None, False, True, None),
        (torch.float64, 64, None, False, True, None),
    ],
)
def test_attention_gets_a_kernel_that_can_compute_it(
    dtype, width, mask, causal, cudnn, kernel, monkeypatch
):
    """The results' strides, which the graph's key holds, follow from the kernel."""
    monkeypatch.setattr(compat, "prefers_cudnn_attention", lambda major: cudnn and major == 9)
    with described.device(target("h200")), FakeTensorMode(), torch.no_grad(), Seen() as seen:
        q = torch.empty(2, 16, 4, width, dtype=dtype, device="cuda:0").transpose(1, 2)
        m = None
        if mask:
            sizes = [1 if size == "e" else size for size in mask]
            m = torch.empty(sizes, dtype=dtype, device="cuda:0").expand(*sizes[:-1], 16)
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=m, is_causal=causal)
    fused = [name for name in seen.names if name.startswith("_scaled_dot")]
    assert fused == ([kernel] if kernel else [])  # torch's own products otherwise
    assert out.is_contiguous() == (kernel is None)


class Attention(nn.Module):
    """A layer and attention under the mask that transformers gives BERT, expanded in the last."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, x):
        q = self.layer(x).view(1, 16, 1, 64).transpose(1, 2)
        mask = torch.arange(16, device=x.device)[None, None, :, None] >= 0
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask.expand(1, -1, 16, 16))
        return y.transpose(1, 2).reshape(1, 16, 64).float().square().mean()


@pytest.mark.sampled("inference", "training")
@pytest.mark.parametrize(
    ("rules", "training"),
    [
        ("", False),
        ("", True),
        pytest.param("-constant-mask,-mask-layout", False, marks=pytest.mark.slow),
        ("-constant-mask,-mask-layout", True),
    ],
    ids=["inference", "training", "off, inference", "off, training"],
)
def test_a_mask_that_hides_nothing_costs_no_kernel(rules, training, monkeypatch):
    """With it a GPU has torch's products, forward and backward."""
    traced, show = [], GraphReport.show

    def noted(report, stage, graph):
        if stage == "traced":
            traced.extend(str(node.target) for node in graph.nodes)
        show(report, stage, graph)

    monkeypatch.setattr(GraphReport, "show", noted)
    model, x = Attention().train(training), torch.zeros(1, 16, 64, dtype=torch.bfloat16)
    done = graphs.prebuild(model, (x,), target("h200"), training=training, options={"rules": rules})
    fused = [op for op in traced if "_scaled_dot_product_" in op]
    assert len(fused) == (0 if rules else 1 + training), traced
    assert any("bmm" in op for op in traced) == bool(rules)
    told = [event for event in done.events if event.subject == "constant-mask"]
    assert [event.kind for event in told] == ([] if rules else ["fired"])


class Biased(nn.Module):
    """Attention with a bias of distances as T5 has it: heads last, filled where it is hidden."""

    def __init__(self, tokens, width, how):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(tokens, tokens, 2, dtype=torch.bfloat16))
        self.layer = nn.Linear(2 * width, 2 * width, dtype=torch.bfloat16)
        self.tokens, self.width, self.how = tokens, width, how

    def forward(self, x):
        q = self.layer(x).view(3, self.tokens, 2, self.width).transpose(1, 2)
        bias = self.bias.permute(2, 0, 1)[None]
        if self.how == "by hand":
            y = torch.softmax(q @ q.transpose(-2, -1) + bias, -1) @ q
        elif self.how == "as it is":
            y = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
        else:
            seen = torch.arange(self.tokens, device=x.device)[None, None, :, None] >= 0
            mask = torch.where(seen.expand(3, 1, -1, self.tokens), bias, -1e9)
            y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return y.transpose(1, 2).reshape(3, self.tokens, 2 * self.width)


@pytest.mark.parametrize(
    ("tokens", "width", "how", "rules", "kernel"),
    [
        (96, 64, "filled", "", CUDNN),
        (96, 64, "filled", "-mask-layout", None),
        (96, 64, "as it is", "", CUDNN),
        (96, 64, "by hand", "", CUDNN),
        (49, 32, "by hand", "", EFFICIENT),  # a window
        (49, 64, "by hand", "", CUDNN),  # not measured
    ],
)
def test_a_bias_of_heads_costs_no_kernel(tokens, width, how, rules, kernel, monkeypatch):
    monkeypatch.setattr(compat, "prefers_cudnn_attention", lambda major: major == 9)
    compiled = []

    def noted(report, stage, graph):
        if stage == "compiled":
            names = (str(node.target).split(".") for node in graph.nodes)
            compiled.extend(name[1] for name in names if name[0] == "aten")

    monkeypatch.setattr(GraphReport, "show", noted)
    model = Biased(tokens, width, how).eval()
    x = torch.zeros(3, tokens, 2 * width, dtype=torch.bfloat16)
    graphs.prebuild(model, (x,), target("h200"), options={"rules": rules})
    fused = [op for op in compiled if op.startswith("_scaled_dot_product_")]
    assert fused == ([kernel] if kernel else []), compiled


RUN = """
import contextlib, json, os, sys
import torch, triton
from torch._dynamo.utils import counters
sys.path.insert(0, sys.argv[1])
from test_prebuild_gpu import make, make_step
import ipex_inductor
from ipex_inductor import backend, compat
from ipex_inductor.compiler import graph_cache as graph_files
from ipex_inductor.errors import BundleError
from ipex_inductor.prebuild import described as describing, graphs
from ipex_inductor.target.device import find_target

with describing.device(find_target("h200")):  # while the compiler is still the one that is known
    pass
# This build of torch stands for the one that is on the GPU's machine too.
compat.why_not_for = lambda kind: ""
compiled = []
triton.knobs.compilation.listener = lambda **about: compiled.append(not about["cache_hit"])
usual, aot = compat.dynamo_unchanged, {}

@contextlib.contextmanager
def counting():
    with usual() as breaks:
        yield breaks
        aot.update(counters["aot_autograd"])

compat.dynamo_unchanged = counting

def step(
    arch="h200", bundle="", out="", home="", version="", sources="", options=None, env=(),
    train=False, lazy=False, rows=0, most=16,
):
    if lazy:  # as where a backward is compiled when it is needed
        compat.backward_too = contextlib.nullcontext
    usual = compat.VERSION, graph_files.source_digest
    os.environ["IPEX_HOME"] = home
    os.environ.update(env)
    refused = ""
    try:
        if bundle:
            ipex_inductor.use_bundle(bundle, allow_unsigned=True)
    except BundleError as error:
        refused = str(error)
    compat.VERSION = version or usual[0]
    graph_files.source_digest = (lambda: sources) if sources else usual[1]
    compiled.clear()
    model, inputs, *optimizer = make_step() if train else make()
    more = {"training": True, "optimizer": optimizer[0]} if train else {}
    if rows:
        model, inputs = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), (
            torch.ones(rows, 8),
        )
        more = {"dynamic": {0: {0: (2, most)}}} if most else {}
    done = graphs.prebuild(model, inputs, find_target(arch), options=options, **more)
    compat.VERSION, graph_files.source_digest = usual
    for name, _ in env:
        del os.environ[name]
    if out:
        graphs.pack([done], out)
    (event,) = (event for event in done.events if event.kind == "cache")
    found = {"outcome": event.subject, "why": event.reason, "refused": refused, "aot": dict(aot)}
    found["own"] = [key.kind for key in done.own]
    return found | {"compiled": sum(compiled), "kernels": len(done.made.kernels)}

for each in json.loads(sys.argv[2]):
    print("RESULT", json.dumps(step(**each)))
"""


def run(*steps):
    """What one process found at each of `steps`, which are arguments of its `step`."""
    ours = ("TORCHINDUCTOR_", "TRITON_")  # folders of this process, which Triton would find full
    env = {n: v for n, v in os.environ.items() if not n.startswith(ours)}
    here = os.path.dirname(__file__)
    env["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.path.dirname(here), env.get("PYTHONPATH")])
    )
    command = [sys.executable, "-c", RUN, here, json.dumps(steps)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return [json.loads(line.removeprefix("RESULT")) for line in lines]


def packed(folder, **how):
    """A bundle for an H200, and what its builder counted."""
    path = folder / "made.ipexbundle"
    (built,) = run({"home": str(folder / "home"), "out": str(path), **how})
    assert built["outcome"] == "miss"
    return path, built


@pytest.fixture(scope="module")
def bundle(guard_known, tmp_path_factory):
    """Of a net."""
    path, built = packed(tmp_path_factory.mktemp("net"))
    # Beside the graph's kernels, those that hash weights and compare them at each call.
    assert built["compiled"] - 2 == built["kernels"] >= 3
    assert built["own"].count("cubin") == 2
    return path


@pytest.fixture(scope="module")
def trained(guard_known, tmp_path_factory):
    """Of a training step."""
    return packed(tmp_path_factory.mktemp("step"), train=True)


ELSEWHERE = [("CXX", "/usr/bin/c++"), ("CPATH", "/nowhere")]


def test_another_process_compiles_nothing_of_what_is_in_a_bundle(bundle, tmp_path):
    """In another folder, on another CPU, with another C++ compiler, that it never asks for."""
    env = [*ELSEWHERE, ("CUDA_HOME", "/nowhere"), ("ATEN_CPU_CAPABILITY", "avx2")]
    (found,) = run({"home": str(tmp_path), "bundle": str(bundle), "env": env})
    assert (found["outcome"], found["compiled"]) == ("hit", 0)
    assert found["kernels"] >= 3
    assert "all verified, from the bundle" in found["why"]


def test_tritons_own_module_is_in_it_so_that_no_compiler_is_asked(bundle):
    opened = open_bundle(bundle, allow_unsigned=True, allow_older=True)
    (item,) = (item for item in opened.manifest.entries if item.kind == "graph")
    _, entry = unpack_any(opened.load(item.key + SUFFIX))
    files = workroom.unpack_files(entry.blob)
    modules = {name: data for name, data in files.items() if "/cuda_utils." in name}
    # With the program `file` and without, where Inductor has named Triton's folder and before.
    assert len(modules) == 4
    assert {name.count("/") for name in modules} == {2, 3}
    assert all(driver.DRIVER.encode() in data for data in modules.values())


def test_without_a_c_compiler_it_is_missing(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(driver.shutil, "which", lambda name: None)
    driver._build_modules.cache_clear()
    with pytest.raises(driver.NoModuleError, match="no C compiler was found"):
        driver.files()
    driver._build_modules.cache_clear()
    (missing,) = graphs.Prebuilt(target("h200"), "", unbuilt="no C compiler was found").missing
    assert "Triton's module for the driver" in missing


@pytest.mark.slow
def test_ranges_of_sizes_are_found_by_all_sizes_in_them(tmp_path):
    out = str(tmp_path / "range.ipexbundle")
    (built,) = run({"home": str(tmp_path / "builder"), "out": out, "rows": 4})
    assert built["outcome"] == "miss"
    steps = ({"rows": 7}, {"rows": 7, "most": 32}, {"rows": 7, "most": 0})
    homes = ({"home": str(tmp_path / f"user{n}"), "bundle": out} for n in range(3))
    found, wider, fixed = run(*({**a, **b} for a, b in zip(homes, steps, strict=True)))
    assert (found["outcome"], found["compiled"]) == ("hit", 0)
    assert (wider["outcome"], fixed["outcome"]) == ("miss", "miss")
    assert "VR[2, 32]" in wider["why"]
    assert "VR[2, 16]" in wider["why"]


@pytest.mark.parametrize(
    "dynamic", [{0: {0: (4, 8)}}, {0: {4: (2, 8)}}, {1: {0: (2, 8)}}, {"x": {0: None}}]
)
def test_ranges_that_no_input_has_are_told(dynamic):
    with pytest.raises(ArgumentError, match="ranges of sizes that the example has"):
        graphs.prebuild(*make(), target("h200"), dynamic=dynamic)


@pytest.mark.slow  # 25 s and more
@pytest.mark.parametrize("whole", [False, True], ids=["some", "all"])
def test_what_does_not_fit_is_compiled_and_named(whole, bundle, tmp_path):
    """Four seconds each; some: a file that is not whole, another device, and other sources.

    All fields of keys: aot_cache/test_key.py; other changes of bytes: test_bundle_tampering.py.
    """
    data = bundle.read_bytes()
    cut, forged = tmp_path / "cut", tmp_path / "forged"
    cut.write_bytes(data[:-1])
    forged.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    first = [{"bundle": str(cut)}, {"bundle": str(forged), "options": {"weight_prologue": False}}]
    others = [
        ({"arch": "h100"}, "built for sm_90:NVIDIA-H200, running on sm_90:NVIDIA-H100-80GB-HBM3"),
        ({"arch": "a100-80gb"}, "built for sm_90:NVIDIA-H200, running on sm_80:NVIDIA-A100"),
        ({"version": "2.99.0+cu130"}, f"torch: 2.99.0+cu130 here, {compat.VERSION} there"),
        ({"sources": "changed"}, "built by other sources of ipex_inductor"),
        ({"options": {"epilogue_fusion": False}}, "options: epilogue_fusion=False here, unset"),
        ({"env": [("TRITON_F32_DEFAULT", "ieee")]}, "TRITON_F32_DEFAULT=ieee here, unset there"),
    ]
    if not whole:
        first, others = first[1:], [others[0], others[3]]
    steps = first + [{"bundle": str(bundle), **change} for change, _ in others]
    found = run(*({**step, "home": str(tmp_path / f"home{n}")} for n, step in enumerate(steps)))
    for each in found:
        assert each["outcome"] == "miss"
        # The two kernels that hash weights are found where the bundle is whole and the GPU alike.
        assert each["compiled"] - each["kernels"] in (0, 2), each
    for each in found[: len(first)]:
        assert "expected a whole bundle" in each["refused"]
        assert each["why"] == "no entry has this graph"
    for each, (change, words) in zip(found[len(first) :], others, strict=True):
        assert words in each["why"], change


@pytest.mark.slow  # 30 s; a bundle's steps are quickly those of test_prebuild_xe.py
def test_a_training_step_is_found_forward_backward_and_optimizer(trained, tmp_path):
    path, built = trained
    # The step, and the norm of the gradients by itself and with the step's scalars, each of aligned
    # gradients and of others; these scalars alone; what hashes weights, and what compares hashes;
    # what reads tensors, what reads weights, and what notes accesses to them.
    assert sorted(built["own"]) == ["cpp"] * 3 + ["cubin"] * 9
    assert built["compiled"] == built["kernels"] + 9 >= 11
    user = {"bundle": str(path), "train": True, "lazy": True, "env": ELSEWHERE}
    (found,) = run({"home": str(tmp_path), **user})
    assert (found["outcome"], found["compiled"], found["kernels"]) == ("hit", 0, built["kernels"])
    assert found["aot"].get("autograd_cache_hit") == 1
    assert not found["aot"].get("autograd_cache_miss")


@pytest.mark.slow
def test_an_optimizers_kernels_are_of_no_torch(trained, tmp_path):
    """Where the graph of a training step is of another, they are found."""
    path, built = trained
    user = {"bundle": str(path), "train": True, "lazy": True, "version": "2.99.0+cu130"}
    (other,) = run({"home": str(tmp_path), **user})
    assert (other["outcome"], other["compiled"]) == ("miss", other["kernels"])
    assert other["own"] == built["own"]


def test_graphs_are_not_packed_from_a_folder_of_the_users(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "why_not_for", lambda kind: "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(ArgumentError, match="as TORCHINDUCTOR_CACHE_DIR says"):
        graphs.prebuild(*make(), target("h200"))


def test_what_cannot_be_prebuilt_is_told(tmp_path):
    model, inputs = make()
    with pytest.raises(OptionError, match="a mode in which no kernel is timed"):
        graphs.prebuild(model, inputs, target("h200"), mode="max-autotune")
    with pytest.raises(TargetError, match="a GPU of NVIDIA or AMD"):
        graphs.prebuild(model, inputs, target("max-1100"))
    with pytest.raises(ArgumentError, match="a module in eval mode"):
        graphs.prebuild(model.train(), inputs, target("h200"))
    with pytest.raises(ArgumentError, match="an entry to pack"):
        graphs.pack([], tmp_path / "out")


def test_without_a_compiler_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    monkeypatch.delenv("IPEX_AOT_LAYERS")
    monkeypatch.setattr(toolkit, "compiler", lambda: None)
    describing.guard_of.cache_clear()
    model, inputs = make()
    with pytest.raises(CompilerNotFoundError, match="that builds the guard of described devices"):
        graphs.prebuild(model, inputs, target("h200"))


MODEL = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), (torch.ones(2, 8),)

class Reads(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.sum().item() > 0 else x

def reads():
    return Reads(), (torch.ones(2, 8),)
"""


@cpu_build
def test_the_verb_says_which_of_the_two_it_makes(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made_for_gpus.py").write_text(MODEL)

    def said(*arguments):
        done = CliRunner().invoke(app, ["prebuild", *arguments])
        return done.exit_code, done.output

    code, text = said("made_for_gpus:make", "--arch", "h200", "--arch", "mi300x")
    assert (code, text.count("kernels only"), "no bundle" in text) == (0, 2, True)
    code, text = said("made_for_gpus:make", "--arch", "h200", "-o", "out")
    assert code == 1
    line = "missing for sm_90:NVIDIA-H200: made_for_gpus:make: its graphs:"
    assert f"{line} torch {compat.VERSION} is not built" in text
    code, text = said("made_for_gpus:reads", "--arch", "h200", "--json")
    (row,) = json.loads(text[text.index("{") :])["targets"]
    assert (code, row["makes"], len(row["missing"])) == (1, "nothing", 1)
    code, text = said("made_for_gpus:make", "-o", "out")
    assert (code, "expected --arch or --package" in text) == (2, True)
    code, text = said("made_for_gpus:make", "--arch", "h200", "--package", "-o", "out")
    assert (code, f"torch {compat.VERSION} is not built for CUDA" in text) == (2, True)
    assert not (tmp_path / "out").exists()
