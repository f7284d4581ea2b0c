"""Kernels in SYCL for Intel GPUs that are not here: chosen, written into code, built, found."""

import importlib
import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from ipex_inductor import compat
from ipex_inductor.autotune.pool import Estimate
from ipex_inductor.autotune.record import encode
from ipex_inductor.autotune.select import Selection
from ipex_inductor.cli import app
from ipex_inductor.compiler import compile_fx, inner_compile
from ipex_inductor.compiler.kernel_selection import list_candidates
from ipex_inductor.compiler.request import Request
from ipex_inductor.config import resolve
from ipex_inductor.errors import DeviceError, MissingPackageError, TargetError
from ipex_inductor.optim import FusedStep, Lamb, Lars
from ipex_inductor.prebuild import described_xpu, graphs, sycl
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import CHIPS, current
from ipex_inductor.target.device import find_target as target
from ipex_inductor.templates.sycl import ocloc, tiles, worker
from support.sycl_device import needs_sycl

XPU = torch.device("xpu", 0)


class Net(nn.Module):
    """A convolution that folds, one in groups, layers with epilogues and without."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.apart = nn.Conv2d(16, 16, 3, groups=16)
        self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = F.silu(self.apart(x)).mean((2, 3))
        return self.two(F.gelu(self.one(x)))


def seen(model, inputs, name, learn):
    """`learn` gets each graph of `model` on that described GPU."""

    def told(gm, given):
        eager = inner_compile.copy_graph(gm)
        learn(gm, given)
        return eager.forward

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with described_xpu.device(target(name)) as asked, mode, torch.no_grad():
        twin, args, _ = graphs.fake_copy((model, inputs, {}), XPU)
        torch.compile(twin, backend=told)(*args)
    return asked


def request(gm, inputs, **options):
    config = resolve(None, {"strict": True, **options}, compat.inductor_option_types())
    return Request(gm, inputs, config)


@pytest.mark.parametrize("chip", CHIPS)
def test_chips_are_targets(chip):
    assert target(chip).arch == tiles.NAMES[chip.removeprefix("xe:")]


def test_every_product_has_onednn_and_sycl_to_choose_from():
    offers = []
    seen(
        Net().eval(),
        (torch.randn(2, 3, 8, 8),),
        "xe:bmg",
        lambda *given: offers.extend(list_candidates(request(*given), compat.read_inner)),
    )
    ours = [o for o in offers if o.problem.op.startswith("ipex.")]
    assert len(ours) == 4
    for offer in ours:
        names = [choice.name for choice in offer.choices]
        grouped = offer.problem.constants.get("groups", 1) > 1
        assert names[0] == offer.taken.name
        assert names[0].startswith("aten.")
        assert names.count("ipex.sycl.grouped" if grouped else "ipex.sycl.product") >= 1
        assert offer.problem.arch.startswith("xe:20.1:")


def lowered(model, inputs, name, selected=None, **options):
    """The sources of kernels that the code asks for, what was decided, and the code itself."""
    from torch._inductor.graph import GraphLowering

    reports, code = [], []
    usual = GraphLowering.compile_to_module

    def written(graph):
        wrapper, _ = graph.codegen()
        code.append(wrapper.value if hasattr(wrapper, "value") else str(wrapper))
        raise StopIteration

    def learn(gm, given):
        report = decisions.GraphReport()
        reports.append(report)
        with pytest.raises(Exception, match="StopIteration"):
            compile_fx.compile_request(request(gm, given, **options), selected or {}, report, None)

    GraphLowering.compile_to_module = written
    try:
        asked = seen(model, inputs, name, learn)
    finally:
        GraphLowering.compile_to_module = usual
    return asked, [e for report in reports for e in report.events], code


class Layers(nn.Module):
    """Bound by memory: an epilogue of its own would be as dear as the product."""

    def __init__(self):
        super().__init__()
        self.one, self.conv = nn.Linear(64, 4096), nn.Conv2d(64, 1000, 1)

    def forward(self, x, image):
        return F.silu(self.one(x)), F.relu(self.conv(image))


def large():
    image = torch.randn(8, 64, 56, 56).to(memory_format=torch.channels_last)
    return Layers().eval().bfloat16(), (torch.randn(8192, 64).bfloat16(), image.bfloat16())


def test_generated_code_calls_kernels_in_sycl_where_a_model_is_believed():
    asked, events, (code,) = lowered(*large(), "xe:bmg", sycl="xpu")
    taken = [
        e for e in events if e.kind == "choice" and "ipex.sycl.product: a model says" in str(e)
    ]
    assert len(taken) == 2
    assert "torch.ops.ipex.sycl_linear.default(" in code
    assert "torch.ops.ipex.sycl_conv.default(" in code
    assert "sycl_packed" not in code  # work on weights alone, of 1000 columns too
    assert "'silu'" in code  # the epilogue is in the call
    assert len(asked) == 2
    assert all("matrix" in source.needs for source in asked)


class Images(nn.Module):
    """What our Triton templates are for: a stem, each channel by itself, groups, few rows."""

    def __init__(self):
        super().__init__()
        self.stem, self.apart = nn.Conv2d(3, 64, 7, 2, 3), nn.Conv2d(64, 64, 3, 1, 1, groups=64)
        self.grouped, self.plain = nn.Conv2d(64, 64, 3, 1, 1, groups=4), nn.Conv2d(64, 256, 3, 1, 1)
        self.head = nn.Linear(256, 4096)

    def forward(self, x):
        x = F.silu(self.apart(F.relu(self.stem(x))))
        return F.gelu(self.head(self.plain(F.relu(self.grouped(x))).mean((2, 3))))


TEMPLATES = ("stem", "depthwise", "grouped", "fprop", "few_rows")


def images(dtype=torch.bfloat16):
    x = torch.randn(8, 3, 64, 64, dtype=dtype).to(memory_format=torch.channels_last)
    return Images().eval().to(dtype=dtype, memory_format=torch.channels_last), (x,)


def triton_offers(name, dtype=torch.bfloat16):
    """For each op of `Images` that has any: the problem, and our Triton templates for it."""
    offers = []
    seen(
        *(*images(dtype), name),
        lambda *given: offers.extend(list_candidates(request(*given), compat.read_inner)),
    )
    ours = ("ipex.triton.", "ipex.few_rows")
    found = [(o.problem, [c for c in o.choices if c.name.startswith(ours)]) for o in offers]
    return [(problem, choices) for problem, choices in found if choices]


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("xe:bmg", torch.bfloat16, TEMPLATES),
        ("xe:pvc", torch.float16, TEMPLATES),
        # No product of theirs has a matrix engine there.
        ("xe:dg2", torch.bfloat16, ("depthwise",)),
        ("xe:bmg", torch.float32, ("depthwise",)),
    ],
    ids=str,
)
def test_our_triton_templates_are_choices_in_tiles_for_intels_gpus(name, dtype, expected):
    found = triton_offers(name, dtype)
    kinds = [choices[0].name.rpartition(".")[2] for _, choices in found]
    assert sorted(kinds) == sorted(expected)
    for kind, (_, choices) in zip(kinds, found, strict=True):
        tiles_ = [tuple(choice.parameters.values()) for choice in choices]
        assert len({*tiles_}) == len(tiles_)
        if kind != "few_rows":
            file = {"stem": "small_channel", "boxes": "tma"}.get(kind, kind)
            module = importlib.import_module(f"ipex_inductor.templates.triton.conv_{file}")
            assert {*tiles_} <= {tuple(vars(tile).values()) for tile in module.XE_TILES}


def test_a_record_puts_our_triton_templates_into_the_code():
    selected = {}
    for problem, choices in triton_offers("xe:bmg"):
        estimate = Estimate(choices[0], 1.0, 0.01)
        selected[encode(problem)] = Selection(estimate, None, "database")
    _, events, (code,) = lowered(*images(), "xe:bmg", selected=selected)
    taken = [str(e) for e in events if e.kind == "choice"]
    for kind in TEMPLATES:
        assert any(kind in each and "database" in each for each in taken), kind
    kernels = [k for k in code.split("async_compile.triton(") if k.startswith("'triton_tem")]
    assert len(kernels) == len(TEMPLATES)
    assert "extern_kernels.convolution" not in code
    assert any("num_warps=16" in kernel for kernel in kernels)
    assert any("exp2" in kernel for kernel in kernels)  # GELU, behind the product


def test_without_a_record_the_library_is_kept_and_it_is_said():
    report = decisions.GraphReport()

    def learn(gm, given):
        compile_fx.compile_request(request(gm, given), {}, report, None, compat.read_inner)

    assert seen(*large(), "xe:bmg", learn) == []
    said = [str(e) for e in report.events if e.kind == "choice" and "nothing is recorded" in str(e)]
    assert len(said) == 2
    assert all("taken with option sycl=xpu" in each for each in said)


def test_nothing_of_it_stays():
    with described_xpu.device(target("xe:lnl")):
        pass
    names = ("is_available", "device_count", "get_device_properties", "_lazy_init")
    before = [getattr(torch.xpu, name) for name in names]
    with described_xpu.device(target("xe:bmg")):
        assert str(current("xpu:0")) == str(target("xe:bmg"))
    assert [getattr(torch.xpu, name) for name in names] == before
    with pytest.raises(DeviceError):
        current("xpu:0")
    with pytest.raises(TargetError), described_xpu.device(target("h200")):
        pass


# Built


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.GELU()).eval().bfloat16(), (
        torch.ones(2, 16, dtype=torch.bfloat16),
    )


def make_step():
    model = nn.Linear(8, 8)
    return model, (torch.ones(2, 8),), torch.optim.SGD(model.parameters(), momentum=0.9)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def at_home(home, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(home))


@pytest.fixture
def one_block(monkeypatch):
    """A test of two kernels, and not of seven."""
    kept = sycl.sycl_kernels

    def few(*given):
        wanted = ("linear 4x4 by 4x4", "linear 1x2 by 1x4 in lanes")
        return {source: name for source, name in kept(*given).items() if name in wanted}

    monkeypatch.setattr(sycl, "sycl_kernels", few)


def no_ocloc():
    raise MissingPackageError("ocloc", "none on the PATH", "`make ocloc` unpacks Debian's.")


@needs_sycl
def test_without_ocloc_it_is_spirv_which_another_process_finds(
    at_home, one_block, monkeypatch, tmp_path
):
    monkeypatch.setattr(ocloc, "compiler_name", no_ocloc)
    done = sycl.prebuild(*make(), target("xe:bmg"))
    assert done.missing == []
    assert "none on the PATH" in done.native
    assert [key.kind for key in done.own] == ["spirv", "spirv", "sycl-shim"]
    assert [row["wrong"] for row in done.gate] == ["", ""]
    out = tmp_path / "out.ipexbundle"
    graphs.pack([done], out)
    assert found_by(out, tmp_path) == {"spirv": True, "native": False, "children": 0}


FIND = """
import json, sys
import ipex_inductor
from ipex_inductor.templates.sycl import binaries, calls, product, tiles, worker
children = []
worker.compile_source = lambda *given, **more: children.append(given)
ipex_inductor.use_bundle(sys.argv[1], allow_unsigned=True)
source, _ = calls.source_of("xe:20.1", "bf16", "rows", False, product.Epilogue("none", "gelu"))
spirv = binaries.stored_spirv(source, "xe:20.1")
native = [*binaries.stored_native(source, "xe:20.1", "1.6.a-driver")]
print(json.dumps({"spirv": spirv is not None, "native": bool(native), "children": len(children)}))
"""


def found_by(bundle, folder):
    """What the runtime of that GPU would find in a bundle, in a process with an empty cache."""
    env = {**os.environ, "IPEX_HOME": str(folder / "user")}
    command = [sys.executable, "-c", FIND, str(bundle)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@needs_sycl
def test_with_ocloc_native_code_is_held_against_the_gate(at_home, one_block, monkeypatch, tmp_path):
    try:
        ocloc.compiler_name()
    except MissingPackageError as error:
        pytest.skip(str(error))
    done = sycl.prebuild(*make(), target("xe:bmg"))
    assert done.missing == []
    assert sorted({key.kind for key in done.own}) == ["spirv", "sycl-native", "sycl-shim"]
    engines = {row["name"]: row["engine"] for row in done.gate}
    assert engines == {"linear 4x4 by 4x4": True, "linear 1x2 by 1x4 in lanes": False}
    assert [row["spilled"] for row in done.gate] == [0, 0]
    out = tmp_path / "out.ipexbundle"
    graphs.pack([done], out)
    assert found_by(out, tmp_path) == {"spirv": True, "native": True, "children": 0}
    monkeypatch.setattr(sycl.zebin.Facts, "wrong", lambda *given: "spills 8 bytes")
    refused = sycl.prebuild(*make(), target("xe:bmg"))
    assert len(refused.missing) == 2
    assert {key.kind for key in refused.own} == {"spirv", "sycl-shim"}


@pytest.mark.slow
@needs_sycl
def test_a_step_is_built_as_the_gpu_asks_for_it(at_home, monkeypatch):
    monkeypatch.setattr(ocloc, "compiler_name", no_ocloc)
    model, inputs, optimizer = make_step()
    done = sycl.prebuild(
        model.train(), inputs, target("xe:dg2"), training=True, optimizer=optimizer
    )
    (entry,) = (entry for key, entry in done.own.items() if key.kind == "spirv")
    assert [each["name"] for each in entry.meta["entries"]] == ["update"]
    assert sorted(key.kind for key in done.own) == ["cpp", "spirv", "sycl-shim"]
    assert done.missing == []


FORMULAS = {  # with the kernels of each: norms and what clips are in them
    "lamb, clipped": (partial(Lamb, lr=0.1, weight_decay=0.1), 0.5, False),
    "lars": (partial(Lars, lr=0.1, momentum=0.9, weight_decay=0.01), None, False),
    "adamw, unscaled": (partial(torch.optim.AdamW, lr=0.1), None, True),
}
KERNELS = {
    "lamb, clipped": ["before", "ratios", "update"],
    "lars": ["before", "ratios", "update"],
    "adamw, unscaled": ["update"],
}


def optimizers():
    """Each with a model of its own, and whether a scaler is around it."""
    for name, (make, clip, scaler) in FORMULAS.items():
        model = nn.Linear(70, 90)
        yield name, model, FusedStep(make(model.parameters()), clip_norm=clip).optimizer, scaler


@pytest.mark.slow  # 13 s; a bundle of such kernels: above
@needs_sycl
def test_norms_clipping_and_unscaling_are_in_the_bundle(at_home, monkeypatch, tmp_path):
    """Another process with it and an empty cache compiles nothing, and steps as torch does."""
    monkeypatch.setattr(ocloc, "compiler_name", no_ocloc)
    built = []
    for name, model, optimizer, scaler in optimizers():
        inputs = (torch.ones(2, 70),)
        given = {"training": True, "optimizer": optimizer, "scaler": scaler}
        done = sycl.prebuild(model.train(), inputs, target("xe:bmg"), **given)
        assert done.missing == []
        (entry,) = (entry for key, entry in done.own.items() if key.kind == "spirv")
        assert [each["name"] for each in entry.meta["entries"]] == KERNELS[name]
        built.append(done)
    out = tmp_path / "out.ipexbundle"
    graphs.pack(built, out)
    here = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    env = {**os.environ, "IPEX_HOME": str(tmp_path / "user"), "PYTHONPATH": here}
    command = [sys.executable, "-c", STEP, str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"left": [], "started": [], "steps": 9}


STEP = """
import copy, json, sys
started = []
def watch(event, given):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
        started.append(str(given[1] if len(given) > 1 else given))
import torch
import ipex_inductor
from ipex_inductor.optim import planning
from ipex_inductor.optim.launching.launch_groups_sycl import SyclBatch
from test_prebuild_xe import FORMULAS, optimizers
sys.addaudithook(watch)
ipex_inductor.use_bundle(sys.argv[1], allow_unsigned=True)
steps = []

def batched(made, kernel, columns, group, step, first, looks):  # as those of an Intel GPU
    far = planning.count_steps_before(step, first)
    return planning._find_batch(made, SyclBatch, kernel, columns[0].device, group, far)

run = SyclBatch.run
def counted(*given):
    steps.append(given)
    run(*given)

planning._batch, SyclBatch.run = batched, counted
left = []
for name, model, optimizer, scaled in optimizers():
    make, clip, _ = FORMULAS[name]
    twin = copy.deepcopy(model)
    reference = make(twin.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=scaled)
    for _ in range(3):
        x = torch.randn(5, 70)
        for net in (model, twin):
            net.zero_grad()
        scaler.scale(model(x).square().sum()).backward()
        twin(x).square().sum().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        left += planning.plan(optimizer, {}, scaled or clip is not None).left.values()
        scaler.step(optimizer)
        scaler.update()
        reference.step()
        # Roundings of norms and squares; AdamW divides gradients near 0 by themselves.
        pair = [*model.parameters()], [*twin.parameters()]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
print(json.dumps({"left": left, "started": started, "steps": len(steps)}))
"""


MODEL = """
import torch
def make():
    layers = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.GELU()).eval().bfloat16()
    return layers, (torch.ones(2, 16, dtype=torch.bfloat16),)
"""


@needs_sycl
def test_the_verb_ends_with_1_where_a_kernel_is_missing(at_home, one_block, monkeypatch, tmp_path):
    monkeypatch.setattr(ocloc, "compiler_name", no_ocloc)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "made_for_xe.py").write_text(MODEL)

    def said(*arguments):
        done = CliRunner().invoke(app, ["prebuild", "made_for_xe:make", *arguments])
        return done.exit_code, done.output

    code, text = said("--arch", "xe:pvc", "-o", "out")
    assert (code, "kernels only" in text) == (0, True), text
    assert "native code: none: expected ocloc" in text
    assert (tmp_path / "out").exists()
    monkeypatch.setattr(sycl.worker, "compile_source", refuses)
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "empty"))
    code, text = said("--arch", "xe:pvc", "--json")
    (row,) = json.loads(text[text.index("{") :])["targets"]
    assert code == 1
    assert len(row["missing"]) == 2
    assert "planted" in row["missing"][0]


def refuses(source, *given, **more):
    raise worker.SyclCompileError(f"code of {source.kernel_names}", "planted", "No more.")
