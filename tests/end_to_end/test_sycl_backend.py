"""`options={"sycl": "cpu"}` end to end: ResNet-50 and its layers, a layer of BERT."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipex_inductor.aot_cache import log_once, toolkit
from ipex_inductor.cli.demo.models import _fill_batch_norms
from ipex_inductor.errors import SyclAbsentError, SyclCompileError, SyclDeviceError
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.sycl import calls, shim, wheels, worker
from ipex_inductor.templates.sycl.device import device_of
from support.sycl_device import DEEP, ENDLESS, needs_sycl

pytestmark = needs_sycl


class Bottleneck(nn.Module):
    """ResNet-50's, with a stem before it and, beside it, a convolution in groups."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.first, self.norm = nn.Conv2d(64, 16, 1), nn.BatchNorm2d(16)
        self.middle, self.last = nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 64, 1)
        self.apart = nn.Conv2d(64, 64, 3, 1, 1, groups=64)

    def forward(self, x):
        x = F.relu(self.stem(x))
        y = F.relu(self.norm(self.first(x)))
        y = self.last(F.relu(self.middle(y)))
        return F.silu(self.apart(F.relu(x + y)))


class BertLayer(nn.Module):
    """BERT's: attention, add and norm, and the two layers behind it."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x):
        split = [p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.projections]
        y = F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.out(y))
        return self.norms[1](x + self.down(F.gelu(self.up(x))))

    @property
    def projections(self):
        return self.query, self.key, self.value


def made(model, dtype):
    model = model().eval()
    for each in model.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.running_mean.normal_()
            each.running_var.uniform_(0.5, 2)
    return model.to(dtype)


def events(kind, word):
    """What was decided about SYCL, in all graphs."""
    found = (event for report in decisions.reports() for event in report.events)
    return [event for event in found if event.kind == kind and word in f"{event}"]


CASES = [
    pytest.param(Bottleneck, (2, 3, 33, 29), 5, torch.float32, id="ResNet-50's in fp32"),
    pytest.param(BertLayer, (2, 13, 64), 4, torch.float32, id="BERT's in fp32"),
    pytest.param(
        Bottleneck,
        (1, 3, 32, 32),
        5,
        torch.bfloat16,
        id="ResNet-50's in bf16",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        BertLayer, (1, 16, 64), 4, torch.bfloat16, id="BERT's in bf16", marks=pytest.mark.slow
    ),
]
# fp32: sums of some hundred terms, one after the other layer; bf16: each layer rounds to 2^-9.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.mark.sampled("ResNet-50's in fp32")
@pytest.mark.parametrize(("model", "shape", "least", "dtype"), CASES)
def test_a_layer(model, shape, least, dtype):
    model, x = made(model, dtype), torch.randn(shape).to(dtype)
    compiled = torch.compile(model, backend="ipex", options={"sycl": "cpu", "strict": True})
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(x.double())
        found = compiled(x)
        assert found.stride() == model(x).stride()
    assert (found.double() - wanted).abs().max() <= CLOSE[dtype] * wanted.abs().max()
    assert len(events("choice", "a kernel in SYCL")) >= least
    assert not events("missed", "SYCL")


@pytest.mark.slow  # `make sycl` runs it; each kind of its layers is above
@pytest.mark.timeout(600)
def test_all_of_resnet_50():
    """Its 53 convolutions and the classifier, no other product."""
    transformers = pytest.importorskip("transformers")
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
    _fill_batch_norms(model.eval())
    x = torch.randn(1, 3, 64, 64)
    compiled = torch.compile(model, backend="ipex", options={"sycl": "cpu", "strict": True})
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(x.double()).logits
        found = compiled(x).logits
    assert (found.double() - wanted).abs().max() <= CLOSE[x.dtype] * wanted.abs().max()
    assert len(events("choice", "a kernel in SYCL")) == 54
    assert not events("missed", "SYCL")


@pytest.fixture
def unknown():
    """What kernels there are is asked anew, here and afterwards."""
    calls.forget()
    yield
    calls.forget()


def test_it_is_off_unless_asked_for():
    with torch.no_grad():
        torch.compile(nn.Linear(24, 40).eval(), backend="ipex")(torch.randn(3, 24))
    assert not events("choice", "SYCL")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_that_does_not_compile_leaves_the_layer_to_onednn(dtype, unknown, monkeypatch):
    """One line says why; the result is the same, and torch's where oneDNN lacks the dtype."""

    def refuses(*args, **kwargs):
        raise SyclCompileError("code", "a crash", "Planted.")

    model = nn.Sequential(nn.Linear(24, 40), nn.ReLU()).eval().to(dtype)
    x = torch.randn(3, 24, dtype=dtype)
    monkeypatch.setattr(calls.product, "source", refuses)
    with torch.no_grad():
        found = torch.compile(model, backend="ipex", options={"sycl": "cpu", "strict": True})(x)
        torch.testing.assert_close(found, model(x))
    assert "a crash" in f"{events('missed', 'SYCL')[0]}"
    assert not events("choice", "a kernel in SYCL")


def _crashes(patch, home):
    patch.setattr(calls.product, "source", lambda *_: DEEP)


def _hangs(patch, home):
    patch.setattr(calls.product, "source", lambda *_: ENDLESS)
    patch.setattr(worker, "compile_source", functools.partial(worker.compile_source, patience=3.0))


def _no_wheel(patch, home):
    def missing(name):
        raise wheels.metadata.PackageNotFoundError(name)

    patch.setattr(wheels.metadata, "distribution", missing)


def _another_sycl(patch, home):
    (other,) = {*wheels.VERSIONS} - {wheels.runtime().soname}
    patch.setattr(wheels, "list_mapped_files", lambda prefix: iter([Path(f"/torch/{other}.0.1")]))


def _no_compiler(patch, home):
    patch.setenv("IPEX_HOME", str(home))
    patch.setattr(toolkit.compat, "cxx", lambda: (None, "/nowhere/g++"))


@pytest.fixture
def nothing_known(unknown):
    """As if no SYCL were in this process yet."""
    forget = device_of.cache_clear, shim._shim.cache_clear, wheels.runtime.cache_clear
    for each in forget:
        each()
    yield
    for each in forget:
        each()


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (_crashes, "an end of the compiler by SIGSEGV. The process was its own."),
        (_hangs, "none after 3 seconds. It was ended."),
        (_no_wheel, 'pip install "ipex-inductor[sycl-cpu]"'),
        (_another_sycl, 'pip install "intel-sycl-rt==202'),  # 2025.3.*, or 2026.* beside that
        (_no_compiler, "a C++ compiler, as no cache has SYCL's functions; got none."),
    ],
)
def test_what_goes_wrong_is_a_line_and_onednn_computes(
    plant, said, nothing_known, monkeypatch, tmp_path, caplog
):
    log_once.say.cache_clear()
    plant(monkeypatch, tmp_path)
    model, x = nn.Linear(24, 40).eval(), torch.randn(3, 24)
    with torch.no_grad():
        found = torch.compile(model, backend="ipex", options={"sycl": "cpu", "strict": True})(x)
        torch.testing.assert_close(found, model(x))
    (event,) = events("missed", "SYCL")
    (line,) = (record.message for record in caplog.records if "SYCL" in record.message)
    for told in (f"{event}", line):
        assert said in told
        assert "\n" not in told
    assert not events("choice", "a kernel in SYCL")


class Both(nn.Module):
    """What calls both operators, with addends and scalars."""

    def __init__(self):
        super().__init__()
        self.conv, self.layer = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x):
        return F.leaky_relu(self.layer(F.silu(self.conv(x)).mean((2, 3))), 0.2)


def absent(*given):
    raise SyclAbsentError("the package intel-sycl-rt", "none installed", "pip install it.")


def breaks(*given):
    raise SyclDeviceError("product to run", "a lost device", "The log has all.")


@pytest.mark.parametrize(
    ("place", "name", "planted", "said"),
    [
        pytest.param(calls, "device_of", absent, "none installed", id="the runtime is gone"),
        pytest.param(calls.product, "_launch", breaks, "a lost device", id="a launch fails"),
    ],
)
def test_a_compiled_graph_without_its_kernels_computes_the_same(
    place, name, planted, said, unknown, monkeypatch, caplog
):
    """As one from a cache may: in torch's ops, with one line however often it is called."""
    model, x = Both().eval(), torch.randn(2, 3, 9, 9)
    compiled = torch.compile(model, backend="ipex", options={"sycl": "cpu", "strict": True})
    with torch.no_grad():
        compiled(x)
        assert len(events("choice", "a kernel in SYCL")) == 2
        calls.forget()
        log_once.say.cache_clear()
        monkeypatch.setattr(place, name, planted)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
    lines = [record.message for record in caplog.records if "in torch's ops" in record.message]
    assert len(lines) == 1
    assert said in lines[0]
    assert "\n" not in lines[0]


@pytest.mark.parametrize(
    ("layer", "size"),
    [(nn.Linear(64, 32), (4, 64)), (nn.Conv2d(16, 8, 3), (1, 16, 8, 8))],
    ids=["linear", "conv"],
)
def test_a_bare_layer_runs_by_a_kernel(layer, size):
    """Without an epilogue it is still torch's op when its kernel is chosen."""
    model, x = layer.eval(), torch.randn(size)
    compiled = torch.compile(model, backend="ipex", options={"sycl": "cpu", "strict": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)  # sums of 144
