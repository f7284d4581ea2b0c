"""Packages: compiled here, loaded where nothing compiles, refused where they do not fit."""

import ast
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ipex_inductor
from ipex_inductor import compat
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.bundling import packing
from ipex_inductor.aot_cache.digest import frame_fields, unframe_fields
from ipex_inductor.aot_cache.entry import Entry, unpack_any
from ipex_inductor.aot_cache.folder import SUFFIX
from ipex_inductor.aot_cache.key import Key, read
from ipex_inductor.errors import (
    ArgumentError,
    BundleError,
    DeviceError,
    PackageError,
    TargetError,
)
from ipex_inductor.ops.gemm import blocked
from ipex_inductor.prebuild import loading
from ipex_inductor.target import device as target
from ipex_inductor.target.device import runs_on
from support.cache.signed_bundles import pair

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
    # Headers that torch would compile first, for many packages, take longer than this one.
    headers = torch._inductor.config.patch({"aot_inductor.precompile_headers": False})
    with pytest.MonkeyPatch.context() as patch, headers:
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
    assert made.done.report.count("hoisted") == {"weight preprocessing": 1}
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
    torch.save((weight, blocked.arrange_panels(weight, 16)), tmp_path / "saved")
    code = (
        "import sys, torch; from ipex_inductor.passes.weights import program;"
        f"weight, want = torch.load({str(tmp_path / 'saved')!r});"
        f"assert torch.equal({step}(weight, 16), want);"
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
    assert loading._choose_package(open_bundle(path))[0].device == "cuda"


@pytest.mark.skipif(bool(torch.version.cuda), reason="this torch is built for CUDA")
def test_to_make_one_for_a_gpu_torch_must_be_built_for_it(made, tmp_path):
    args, kwargs = inputs()
    gpu, amd = map(target.find_target, ("sm_90:NVIDIA-H200", "gfx942:AMD-Instinct-MI300X"))
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
        assert loading._choose_package(together)[1] == taken.encode()
    monkeypatch.setattr(loading, "current", lambda: SimpleNamespace(arch="x86-64"))
    with pytest.raises(PackageError, match="built for x86-64:avx2, running on x86-64"):
        loading._choose_package(together)


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
