"""Packages: compiled here, loaded where nothing compiles, refused where they do not fit."""

import ast
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.nn.functional as F
from bundles import pair
from torch import nn
from typer.testing import CliRunner

import ipex_inductor
from ipex_inductor import compat, target
from ipex_inductor.aot_cache import packing
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.digest import frame_fields, unframe_fields
from ipex_inductor.aot_cache.entry import Entry, unpack_any
from ipex_inductor.aot_cache.folder import SUFFIX
from ipex_inductor.aot_cache.key import Key, read
from ipex_inductor.cli import app
from ipex_inductor.errors import (
    ArgumentError,
    BundleError,
    DeviceError,
    PackageError,
    TargetError,
)
from ipex_inductor.ops import blocked
from ipex_inductor.prebuild import exporting, loading
from ipex_inductor.prebuild.package import decoded, encoded
from ipex_inductor.target import runs_on

# One layer after another in fp32, folded in fp64: a few roundings of numbers of about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Net(nn.Module):
    """Folds, packs, shares a weight, and has a tensor that no state dict brings."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight
        self.register_buffer("shift", torch.arange(16.0), persistent=False)
        for tensor in (self.norm.weight, self.norm.bias, self.norm.running_mean):
            nn.init.normal_(tensor)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x, scale, *, twice=None):
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        y = self.two(torch.relu(self.one(x))) + self.shift
        return {"y": y * scale, "none": None, "x": [x if twice is None else x * 2 + twice]}


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 8, 8), 3), {"twice": torch.randn(16)}


def assert_same(got, want):
    assert list(got) == ["y", "none", "x"]
    assert got["none"] is None
    torch.testing.assert_close(got["y"], want["y"], **CLOSE)
    torch.testing.assert_close(got["x"], want["x"], **CLOSE)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A signed bundle with a package of a `Net`."""
    folder = tmp_path_factory.mktemp("package")
    torch.manual_seed(0)
    model = Net().eval()
    args, kwargs = inputs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPEX_HOME", str(folder / "home"))
        private = pair(folder)
        path = folder / "net.ipexbundle"
        before = compat.inductor_changes()
        done = ipex_inductor.package(model, args, path, kwargs=kwargs, key=private, serial=7)
        changed = {n: v for n, v in compat.inductor_changes().items() if before.get(n) != v}
        facts = {"private": private, "folder": folder, "changed": changed}
        yield SimpleNamespace(path=path, model=model, done=done, **facts)


@pytest.fixture
def unloaded(monkeypatch):
    """Nothing may be run that was not judged."""

    def never(library, device):
        raise AssertionError(f"{library} was loaded")

    monkeypatch.setattr(compat, "package_runner", never)


def test_our_rules_and_the_prologue_took_part(made):
    fired = made.done.report.count("fired")
    assert fired["conv2d+batch_norm"] == fired["conv+relu"] == 1
    assert made.done.report.count("hoisted") == {"weight prologue": 1}
    assert made.done.compiled
    (item,) = made.done.manifest.entries
    assert item.kind == "package"
    assert made.done.manifest.name == "net"


def test_no_weight_is_in_it(made):
    data = made.path.read_bytes()
    for name, tensor in made.model.state_dict().items():
        if tensor.numel() >= 16:
            assert tensor.numpy().tobytes() not in data, name
    assert made.model.shift.numpy().tobytes() in data  # nobody would bring it


@torch.no_grad()
def test_other_weights_run_without_compiling(made):
    args, kwargs = inputs()
    weights = made.model.state_dict()
    loaded = ipex_inductor.load(made.path, weights)
    assert_same(loaded(*args, **kwargs), made.model(*args, **kwargs))
    other = Net().eval()
    loaded.load_weights(other.state_dict())
    assert_same(loaded(*args, **kwargs), other(*args, **kwargs))
    assert loaded.report.events == made.done.report.events
    last = args[0].to(memory_format=torch.channels_last)  # the code is for the strides there were
    assert_same(loaded(last, 3, **kwargs), other(*args, **kwargs))


@torch.no_grad()
def test_calls_in_many_threads_while_weights_change(made):
    """Each result is the one model's or the other's, of the caller's own input."""
    models = made.model, Net().eval()
    states = [model.state_dict() for model in models]
    loaded = ipex_inductor.load(made.path, states[0])
    stop = threading.Event()

    def changes():
        turns = 0
        while not stop.is_set():
            loaded.load_weights(states[turns % 2])
            turns += 1
        return turns

    def calls(seed):
        own = torch.Generator().manual_seed(seed)
        x, add = torch.randn(2, 3, 8, 8, generator=own), torch.ones(16)
        wanted = [model(x, 3, twice=add)["y"] for model in models]
        seen = set()
        for _ in range(50):
            got = loaded(x, 3, twice=add)["y"]
            near = [torch.allclose(got, want, **CLOSE) for want in wanted]
            assert any(near)
            seen.update(which for which, fits in enumerate(near) if fits)
        return seen

    with ThreadPoolExecutor(6) as pool:
        turns = pool.submit(changes)
        seen = [pool.submit(calls, seed) for seed in range(5)]
        try:
            assert set().union(*(each.result() for each in seen)) == {0, 1}
        finally:
            stop.set()
        assert turns.result() > 1


LOAD = """
import os, sys, torch
launched = []
sys.addaudithook(lambda e, a: launched.append(a) if e in ("subprocess.Popen", "os.fork") else None)
weights, (args, kwargs), want = torch.load(sys.argv[2])
from ipex_inductor import load
got = load(sys.argv[1], weights)(*args, **kwargs)
torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
heavy = ("torch._dynamo", "torch._inductor", "torch._functorch", "sympy", "triton", "cffi")
found = sorted(name for name in sys.modules if name.startswith(heavy[:2]))
print([found, launched, got["y"].requires_grad])
"""


def run(made, tmp_path, **env):
    args, kwargs = inputs()
    with torch.no_grad():
        want = made.model(*args, **kwargs)
    torch.save((made.model.state_dict(), (args, kwargs), want), tmp_path / "saved")
    command = [sys.executable, "-c", LOAD, str(made.path), str(tmp_path / "saved")]
    env = os.environ | {"IPEX_HOME": str(made.folder / "home")} | env
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_a_fresh_process_imports_neither_dynamo_nor_inductor(made, tmp_path):
    done = run(made, tmp_path)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == [[], [], False]


def test_a_weight_in_blocks_is_arranged_where_no_op_of_ours_is_known(tmp_path):
    """Whose op in Python would import Dynamo, were it there."""
    weight, step = torch.randn(128, 64), 'program._function("ipex::blocks.default")'
    torch.save((weight, blocked.arranged(weight)), tmp_path / "saved")
    code = (
        "import sys, torch; from ipex_inductor.passes import program;"
        f"weight, want = torch.load({str(tmp_path / 'saved')!r});"
        f"assert torch.equal({step}(weight), want);"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not runs_on("x86-64:avx2", loading.current().arch), reason="an x86-64 CPU")
def test_a_cpu_of_a_lower_level_refuses_it(made, tmp_path):
    done = run(made, tmp_path, ATEN_CPU_CAPABILITY="default")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "PackageError: expected a package for this torch and this CPU" in last
    assert f"built for {loading.current().arch}, running on x86-64. " in last


def changed(made, out, key=(), meta=(), files=()):
    """The bundle with an entry that says something else, properly packed and signed."""
    bundle = open_bundle(made.path, accepts=False)
    (item,) = bundle.manifest.entries
    framed, found = unpack_any(bundle.load(item.key + SUFFIX))
    entry = Entry(
        {**found.meta, **dict(meta)}, frame_fields({**unframe_fields(found.blob), **dict(files)})
    )
    known = replace(Key(**read(framed)), **dict(key))
    packing.pack_entries(out, "changed", {known: entry}, made.private)
    return out


@pytest.mark.parametrize(
    ("key", "meta", "words"),
    [
        ({"torch": "2.0.0"}, {}, f"built for torch 2.0.0, running on {compat.VERSION}"),
        ({"architecture": "aarch64:sve256"}, {}, "built for aarch64:sve256, running on"),
        ({}, {"needs": ["avx512_of_tomorrow"]}, "this CPU lacks avx512_of_tomorrow"),
        ({}, {"format": 99}, "format 99"),
        ({}, {"takes": "all"}, "it cannot be read"),
        pytest.param(
            {"architecture": "sm_90:NVIDIA-H200"},
            {"device": "cuda"},
            "built for sm_90:NVIDIA-H200, and torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it sees one"),
        ),
        ({"kind": "cpp"}, {}, "it has none"),
    ],
)
def test_what_was_made_for_another_machine_is_refused(made, tmp_path, unloaded, key, meta, words):
    path = changed(made, tmp_path / "other", key, meta)
    with pytest.raises(PackageError, match=words.replace("+", r"\+")):
        ipex_inductor.load(path, made.model.state_dict())


def test_one_for_a_gpu_runs_on_others_of_its_kind_only(made, tmp_path, monkeypatch, unloaded):
    key = {"architecture": "sm_90:NVIDIA-H200"}
    path = changed(made, tmp_path / "gpu", key, {"device": "cuda"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loading, "current", lambda _: "sm_80:NVIDIA-A100")
    with pytest.raises(PackageError, match=r"built for sm_90:.*, running on sm_80:NVIDIA-A100"):
        ipex_inductor.load(path, made.model.state_dict())
    monkeypatch.setattr(loading, "current", lambda _: "sm_90:NVIDIA-H100")
    assert loading._fitting(open_bundle(path))[0].device == "cuda"


@pytest.mark.skipif(bool(torch.version.cuda), reason="this torch is built for CUDA")
def test_to_make_one_for_a_gpu_torch_must_be_built_for_it(made, tmp_path):
    args, kwargs = inputs()
    gpu, amd = map(target.described, ("sm_90:NVIDIA-H200", "gfx942:AMD-Instinct-MI300X"))
    with pytest.raises(DeviceError, match="not built for CUDA"):
        ipex_inductor.package(made.model, args, tmp_path / "n", kwargs=kwargs, targets=[gpu])
    with pytest.raises(TargetError, match="a GPU of NVIDIA"):
        ipex_inductor.package(made.model, args, tmp_path / "n", kwargs=kwargs, targets=[amd])
    assert not (tmp_path / "n").exists()


def test_of_several_the_best_that_fits_is_taken(made, tmp_path, monkeypatch):
    bundle = open_bundle(made.path, accepts=False)
    framed, found = unpack_any(bundle.load(bundle.manifest.entries[0].key + SUFFIX))
    key = Key(**read(framed))
    levels = ("x86-64:avx512", "x86-64:amx", "x86-64:avx2", "aarch64:sve256")
    entries = {
        replace(key, architecture=arch): Entry({**found.meta, "needs": []}, arch.encode())
        for arch in levels
    } | {replace(key, torch="2.0.0", architecture="x86-64:amx"): found}
    packing.pack_entries(tmp_path / "all", "all", entries, made.private)
    together = open_bundle(tmp_path / "all")
    for here, taken in (
        ("x86-64:avx2", "x86-64:avx2"),
        ("x86-64:avx512_bf16", "x86-64:avx512"),
        ("x86-64:amx", "x86-64:amx"),
        ("aarch64:sve256", "aarch64:sve256"),
    ):
        monkeypatch.setattr(loading, "current", lambda here=here: SimpleNamespace(arch=here))
        assert loading._fitting(together)[1] == taken.encode()
    monkeypatch.setattr(loading, "current", lambda: SimpleNamespace(arch="x86-64"))
    with pytest.raises(PackageError, match="built for x86-64:avx2, running on x86-64"):
        loading._fitting(together)


@pytest.mark.parametrize("change", ["cut", "flipped", "longer", "empty"])
def test_a_bundle_that_is_not_whole_is_refused(made, tmp_path, unloaded, change):
    data = bytearray(made.path.read_bytes())
    if change == "flipped":
        data[len(data) // 2] ^= 1
    data = {"cut": data[:-1], "longer": data + b"1", "empty": b""}.get(change, data)
    (tmp_path / "bad").write_bytes(data)
    for allow in (False, True):
        with pytest.raises(BundleError):
            ipex_inductor.load(tmp_path / "bad", made.model.state_dict(), allow_unsigned=allow)


def test_a_stranger_is_refused_and_an_unsigned_one_unless_allowed(made, tmp_path, unloaded):
    (entry,) = made.done.manifest.entries
    bundle = open_bundle(made.path, accepts=False)
    framed, found = unpack_any(bundle.load(entry.key + SUFFIX))
    key = Key(**read(framed))
    stranger = pair(tmp_path, "stranger", trusted=False)
    for signed in (stranger, None):
        path = tmp_path / f"{signed is None}"
        packing.pack_entries(path, "net", {key: found}, signed)
        with pytest.raises(BundleError, match="a bundle signed by a key that you trust"):
            ipex_inductor.load(path, made.model.state_dict())
        with pytest.raises(AssertionError, match="was loaded"):
            ipex_inductor.load(path, made.model.state_dict(), allow_unsigned=True)


def test_a_library_that_is_none_is_an_error_of_ours(made, tmp_path):
    path = changed(made, tmp_path / "bad", files={"model.so": b"\x7fELF, but no more"})
    with pytest.raises(BundleError, match="a package that can be loaded"):
        ipex_inductor.load(path, made.model.state_dict())


def test_weights_that_do_not_fit_are_told(made):
    weights = made.model.state_dict()
    del weights["conv.bias"]
    weights["one.bias"] = weights["one.bias"].double()
    expected = r"conv.bias: expected float32\[16\], got nothing; one.bias: .* got float64\[16\]"
    with pytest.raises(ArgumentError, match=expected):
        ipex_inductor.load(made.path, weights)


def test_other_inputs_are_told(made):
    loaded = ipex_inductor.load(made.path, made.model.state_dict())
    (x, scale), kwargs = inputs()
    for args, more, words in (
        ((x[:1], scale), kwargs, r"float32\[2, 3, 8, 8\] as input 0; got float32\[1, 3, 8, 8\]"),
        ((x.double(), scale), kwargs, "got float64"),
        ((x, 4), kwargs, "expected 3 as input 1; got 4"),
        ((x, 3.0), kwargs, "expected 3 as input 1; got 3.0"),
        ((x, scale), {}, "arguments of the form"),
        ((x, scale), {**kwargs, "more": x}, "arguments of the form"),
        ((x,), kwargs, "arguments of the form"),
    ):
        with pytest.raises(ArgumentError, match=words):
            loaded(*args, **more)


def test_it_is_compiled_once(made, tmp_path):
    assert made.changed == {}  # or every key after it would be another
    args, kwargs = inputs()
    model = Net().eval()  # other weights
    again = ipex_inductor.package(model, args, tmp_path / "again", kwargs=kwargs)
    assert not again.compiled
    (first,), (second,) = made.done.manifest.entries, again.manifest.entries
    assert (first.key, first.sha256) == (second.key, second.sha256)
    assert again.report.events == made.done.report.events


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x + self.count


class Returns(nn.Module):
    def forward(self, x):
        return x.view(-1), x + 1


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(4, 4), "one in train mode"),
        (torch.relu, "got builtin_function_or_method"),
        (Writes().eval(), "it writes to inputs or buffers"),
        (Returns().eval(), "it returns its inputs, or views of them"),
    ],
)
def test_what_is_more_than_a_computation_is_refused(model, words, tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    with pytest.raises(ArgumentError, match=words):
        ipex_inductor.package(model, (torch.ones(4, 4),), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "value",
    [
        *(1, 1.5, True, None, "s", [1, [2.0, None]], float("inf")),
        *(torch.float64, torch.strided, torch.channels_last, torch.device("cpu")),
    ],
)
def test_arguments_of_programs_come_back(value):
    text = json.dumps(encoded(value))
    back = decoded(msgspec.json.decode(text))
    assert (type(back), back) == (type(value), value)


def test_what_is_no_plain_argument_is_refused():
    with pytest.raises(ArgumentError, match="a weight prologue of plain values"):
        encoded(object())


MODEL = """
import torch
import torch.nn.functional as F
def make():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8), (torch.ones(2, 8),)
"""


def test_the_verb_writes_a_bundle(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made_for_prebuild.py").write_text(MODEL)
    model = "made_for_prebuild:make"
    refused = CliRunner().invoke(app, ["prebuild", model, "-o", "out"])
    assert (refused.exit_code, "--package" in refused.output) == (2, True)
    done = CliRunner().invoke(app, ["prebuild", model, "--package", "-o", "out"])
    assert done.exit_code == 0, done.output
    assert "out: out " in done.output
    assert "; compiled; it is not signed" in done.output
    own = torch.nn.Linear(8, 8)
    loaded = ipex_inductor.load("out", own.state_dict(), allow_unsigned=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(torch.ones(2, 8)), own(torch.ones(2, 8)), **CLOSE)


class Shifted(nn.Module):
    """A tensor that is neither a parameter nor a buffer, and one that is written in its code."""

    def __init__(self, shift):
        super().__init__()
        self.shift = torch.tensor(shift)

    def forward(self, x):
        return x * 2 + self.shift + torch.tensor([0.5, 0.25])


def test_tensors_that_are_constants_of_the_code_are_in_the_key(tmp_path):
    x = torch.ones(3, 2)
    for name, shift in (("a", [1.0, 2.0]), ("b", [5.0, 6.0])):
        made = ipex_inductor.package(Shifted(shift).eval(), (x,), tmp_path / name)
        assert made.compiled
        model = ipex_inductor.load(tmp_path / name, {}, allow_unsigned=True)
        assert torch.equal(model(x), Shifted(shift)(x))


def test_weights_stay_inputs_whatever_is_frozen_and_inputs_may_be_lazy(tmp_path):
    """Freezing set for the process, a default device, autocast, negated and expanded inputs."""
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).eval() for _ in range(2))
    with torch._inductor.config.patch(freezing=True):
        ipex_inductor.package(model, (torch.randn(1, 4).expand(5, 4),), tmp_path / "p")
    with torch.device("meta"):
        loaded = ipex_inductor.load(tmp_path / "p", other.state_dict(), allow_unsigned=True)
    x = torch._neg_view(torch.randn(5, 4))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = loaded(x)
    torch.testing.assert_close(got, other(x).detach(), **CLOSE)


def test_parameters_that_the_state_dict_renames_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    model._register_state_dict_hook(
        lambda module, state, *_: {f"renamed.{name}": value for name, value in state.items()}
    )
    with pytest.raises(ArgumentError, match=r"lacks 0\.bias, 0\.weight"):
        ipex_inductor.package(model, (torch.ones(1, 2),), tmp_path / "p")


LEVELS = """
import sys, torch, ipex_inductor
started = []
sys.addaudithook(
    lambda event, about: started.append(str(about[0])) if event == "subprocess.Popen" else None
)
state, x, want = torch.load(sys.argv[2])
loaded = ipex_inductor.load(sys.argv[1], state, allow_unsigned=True)
with torch.no_grad():
    torch.testing.assert_close(loaded(x), want, rtol=1e-4, atol=1e-5)
print("RESULT", started)
"""


class Activated(nn.Module):
    """A library's product, and a loop that is vectorised."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return torch.softmax(torch.tanh(self.layer(x)) * x, -1)


@pytest.fixture(scope="module")
def levelled(tmp_path_factory):
    """Packages for two levels of x86-64, and what a process makes of the bundle."""
    folder = tmp_path_factory.mktemp("levels")
    model, x = Activated().eval(), torch.randn(8, 64)
    with torch.no_grad():
        torch.save((model.state_dict(), x, model(x)), folder / "saved")
    before = levels_seen()
    for name in ("avx2", "avx512"):
        made_for = [target.described(f"x86-64:{name}")]
        ipex_inductor.package(model, (x,), folder / name, targets=made_for)
    both = [target.described(f"x86-64:{name}") for name in ("avx512", "avx2")]
    ipex_inductor.package(model, (x,), folder / "both", targets=both)
    assert levels_seen() == before

    def load(bundle, **env):
        command = [sys.executable, "-c", LEVELS, str(folder / bundle), str(folder / "saved")]
        env = os.environ | {"IPEX_HOME": str(folder / "home")} | env
        return subprocess.run(command, env=env, capture_output=True, text=True)

    return SimpleNamespace(folder=folder, load=load)


def levels_seen():
    """What `levels.described` may change."""
    from torch._inductor import cpu_vec_isa

    from ipex_inductor.passes import packing

    return (
        cpu_vec_isa.valid_vec_isa_list,
        torch.ops.mkldnn._is_mkldnn_bf16_supported,
        packing.onednn_dtypes(),
        target.architecture(),
    )


def library_of(path, arch):
    bundle = open_bundle(path, True, True)
    for item in bundle.manifest.entries:
        framed, entry = unpack_any(bundle.load(item.key + SUFFIX))
        if read(framed)["architecture"] == arch:
            return unframe_fields(entry.blob)["model.so"]
    raise AssertionError(arch)


on_x86 = pytest.mark.skipif(
    not (runs_on("x86-64:avx2", loading.current().arch) and compat.compiles_for_levels()),
    reason="not x86-64, or a torch that compiles for the CPU here alone",
)


@on_x86
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_another_level_has_that_levels_instructions(levelled, tmp_path):
    found = {}
    for name in ("avx2", "avx512"):
        (tmp_path / name).write_bytes(library_of(levelled.folder / "both", f"x86-64:{name}"))
        told = subprocess.run(
            ["objdump", "-d", str(tmp_path / name)], capture_output=True, text=True, check=True
        ).stdout
        found[name] = "%ymm" in told, "%zmm" in told
        assert "vdpbf16ps" not in told
        assert "vcvtne2ps2bf16" not in told
    assert found == {"avx2": (True, False), "avx512": (True, True)}


@on_x86
@pytest.mark.parametrize("bundle", ["avx2", "both"])
def test_a_cpu_of_the_lower_level_runs_it_without_a_compiler(levelled, bundle):
    done = levelled.load(bundle, ATEN_CPU_CAPABILITY="avx2")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "RESULT []" in done.stdout
    assert levelled.load(bundle).returncode == 0


@on_x86
def test_a_level_that_the_cpu_lacks_is_refused(levelled):
    done = levelled.load("avx512", ATEN_CPU_CAPABILITY="avx2")
    assert done.returncode == 1
    assert "built for x86-64:avx512, running on x86-64:avx2" in done.stderr


@on_x86
@pytest.mark.slow  # 15 seconds; the packages themselves are tested above
def test_the_verb_makes_packages_for_levels(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made_for_levels.py").write_text(MODEL)
    asked = ["prebuild", "made_for_levels:make", "--arch", "x86-64:avx2", "-o", "out"]
    done = CliRunner().invoke(app, [*asked, "--package", "--arch", "x86-64:amx"])
    assert done.exit_code == 0, done.output
    bundle = open_bundle(tmp_path / "out", True, True)
    made_for = {
        read(unpack_any(bundle.load(item.key + SUFFIX))[0])["architecture"]
        for item in bundle.manifest.entries
    }
    assert made_for == {"x86-64:avx2", "x86-64:amx"}


def test_an_older_torch_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "compiles_for_levels", lambda: False)
    net, avx2 = Activated().eval(), target.described("x86-64:avx2")
    with pytest.raises(TargetError, match=r"a torch that compiles for other CPUs|a level of x86"):
        ipex_inductor.package(net, (torch.ones(8, 64),), tmp_path / "n", targets=[avx2])


def test_a_cpu_that_is_none_of_x86_is_told(tmp_path):
    arm, x = target.Target("any", "aarch64:sve256", 1), torch.ones(8, 64)
    with pytest.raises(TargetError, match="a level of x86-64"):
        ipex_inductor.package(Activated().eval(), (x,), tmp_path / "n", targets=[arm])


class Branch(nn.Module):
    """A choice by value, which is a higher-order op with a body for each side."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        def positive(x):
            return F.gelu(self.left(x)) + torch.arange(8, device=x.device)

        def other(x):
            return torch.relu(self.right(x))

        return torch.cond(x.sum() > 0, positive, other, (x,))


def test_bodies_of_higher_order_ops_go_to_the_gpu_as_well():
    """A device that is not there stands for it: of the graph's words, none names the CPU."""
    with torch.no_grad():
        call = exporting._Exported.of(Branch().eval(), (torch.ones(2, 8),), {})
    moved = call.on(torch.device("meta"))
    bodies = dict(exporting._graphs(moved.gm))
    words = [node.kwargs.get("device") for gm in bodies.values() for node in gm.graph.nodes]
    assert len(bodies) == 3
    assert {word for word in words if word} == {torch.device("meta")}
    assert {t.device.type for t in exporting._tensors(moved.gm).values()} == {"meta"}


@pytest.mark.slow  # 20 seconds
def test_a_package_with_a_branch_takes_either(tmp_path):
    net, x = Branch().eval(), torch.rand(2, 8) + 1
    ipex_inductor.package(net, (x,), tmp_path / "b.ipexbundle")
    call = ipex_inductor.load(
        tmp_path / "b.ipexbundle", weights=net.state_dict(), allow_unsigned=True
    )
    with torch.no_grad():
        for given in (x, -x):
            # A product of eight terms in another order, and its GELU.
            torch.testing.assert_close(call(given), net(given), rtol=1e-5, atol=1e-6)
