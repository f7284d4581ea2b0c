"""Graphs and steps for levels of x86-64: built for other CPUs than this one, found where they are.

A CPU of AVX2 is this one under ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA, in a process of its own
with an empty home; one without a compiler has CXX point to nothing.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ipex_inductor import compat
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.entry import unpack_any
from ipex_inductor.aot_cache.folder import SUFFIX
from ipex_inductor.aot_cache.graph_files import workroom
from ipex_inductor.aot_cache.key import read
from ipex_inductor.compiler import graph_cache
from ipex_inductor.errors import CompilerNotFoundError
from ipex_inductor.passes.weights import packing
from ipex_inductor.prebuild import graphs
from ipex_inductor.target import device, x86_levels
from ipex_inductor.templates.build import cpp

OWN = device.architecture()
AVX2, AVX512 = (device.find_target(f"x86-64:{name}") for name in ("avx2", "avx512"))
AS_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
NO_COMPILER = {"CXX": "/nonexistent/g++"}
FOUND = [0, 0, 1]  # a miss of Inductor's and of AOT autograd's cache, and a hit of the latter

MODELS = """
import torch
from torch import nn
from ipex_inductor.optim.fused import FusedStep

class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layer = nn.Linear(width, width)
    def forward(self, x):
        return torch.softmax(torch.tanh(self.layer(x)) * x, -1).sum(0)

class Trained(Model):
    def forward(self, x):
        return super().forward(x).square().mean()

def make():
    torch.manual_seed(0)
    return Model().eval(), (torch.randn(8, 64),)

def halves():
    torch.manual_seed(0)
    return Model(256).eval().bfloat16(), (torch.randn(8, 256).bfloat16(),)

def trained():
    torch.manual_seed(0)
    model = Trained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    FusedStep(optimizer, clip_norm=0.01)
    return model, (torch.randn(8, 64),), optimizer
"""

USE = """
import json, sys
launched = []
sys.addaudithook(lambda event, args: event == "subprocess.Popen" and launched.append(str(args[1])))
import torch
import ipex_inductor, made_for_levels
from ipex_inductor.reporting import decisions
from torch._inductor import codecache
from torch._dynamo.utils import counters

bundle, function, saved = sys.argv[1:]
system = {"device": {"name": "NVIDIA H200"}, "version": {}, "hash": "0"}
codecache.CacheBase.get_system = staticmethod(lambda: system)  # of a machine that has a GPU too
if bundle:
    ipex_inductor.use_bundle(bundle, allow_unsigned=True)
model, inputs, *optimizer = getattr(made_for_levels, function)()
compiled = torch.compile(model, backend="ipex", options={"strict": True})
results = []
if optimizer:
    for _ in range(3):
        results.append(compiled(*inputs))
        results[-1].backward()
        optimizer[0].step()
        optimizer[0].zero_grad()
    results += model.parameters()
else:
    with torch.no_grad():
        results += [compiled(*inputs), model(*inputs)]
torch.save([result.detach() for result in results], saved)
(events,) = [report.events for report in decisions.reports()]
(cache,) = [[event.subject, event.reason] for event in events if event.kind == "cache"]
inductor, aot = counters["inductor"], counters["aot_autograd"]
counts = inductor["fxgraph_cache_miss"], aot["autograd_cache_miss"], aot["autograd_cache_hit"]
# Torch 2.15 asks what kind of compiler there would be, and Triton where libraries lie.
launched = [each for each in launched if "--version" not in each and "ldconfig" not in each]
print("TOLD", json.dumps({"launched": launched, "cache": cache, "counts": counts}))
"""

on_x86 = pytest.mark.skipif(
    not (device.runs_on("x86-64:avx2", OWN) and compat.compiles_for_levels()),
    reason="not x86-64, or a torch that compiles for the CPU here alone",
)
on_levels = pytest.mark.skipif(OWN not in x86_levels.LEVELS, reason="not a level")


class Place:
    """A folder with the models, in which processes build bundles and use them."""

    def __init__(self, folder):
        self.folder, self._homes = folder, itertools.count()
        (folder / "made_for_levels.py").write_text(MODELS)

    def run(self, command, home, env):
        unset = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "IPEX_AOT_BUNDLES")
        kept = {k: v for k, v in os.environ.items() if k not in unset}
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        ours = {"IPEX_HOME": str(self.folder / home), "PYTHONPATH": path, "COLUMNS": "300"}
        ours |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
        return subprocess.run(
            [sys.executable, *map(str, command)],
            env=kept | ours | env,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )

    def build(self, *arguments, **env):
        """What the verb says as JSON; its exit code."""
        command = ["-m", "ipex_inductor", "prebuild", *arguments, "--json"]
        done = self.run(command, "builders", env)
        assert "{" in done.stdout, done.stderr[-3000:]
        return json.loads(done.stdout[done.stdout.index("{") :])["targets"], done.returncode

    def use(self, bundle, function="make", **env):
        """What a process with an empty home tells that uses it."""
        home = f"home{next(self._homes)}"
        saved = self.folder / f"{home}.pt"
        done = self.run(["-c", USE, bundle, function, saved], home, env)
        assert done.returncode == 0, done.stderr[-3000:]
        told = json.loads(done.stdout.partition("TOLD ")[2])
        return SimpleNamespace(**told, results=torch.load(saved))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("levels")
    folder.chmod(0o700)
    return Place(folder)


@pytest.fixture(scope="module")
def made(place):
    """What the builder told of `two`, a bundle with `make` for two levels."""
    archs = "--arch", "x86-64:avx2", "--arch", "x86-64:avx512"
    rows, code = place.build("made_for_levels:make", *archs, "-o", "two")
    assert code == 0
    return rows


def seen():
    """What a level that is described may change."""
    from torch._inductor import cpp_builder, cpu_vec_isa

    return (
        cpu_vec_isa.valid_vec_isa_list,
        cpp_builder.get_cpp_compiler,
        cpp_builder.CppBuilder.get_command_line,
        torch.ops.mkldnn._is_mkldnn_bf16_supported,
        packing.onednn_dtypes(),
        device.architecture(),
        x86_levels.compiled_ahead(),
    )


def entries(bundle):
    """The keys and the files of a bundle's graphs, by what they are for."""
    opened, found = open_bundle(bundle, True, True), {}
    for item in opened.manifest.entries:
        framed, entry = unpack_any(opened.load(item.key + SUFFIX))
        key = read(framed)
        if key["kind"] == "graph":
            found[key["architecture"]] = key, workroom.unpack_files(entry.blob)
    return found


# Graphs that other processes find are quickly those of test_graph_files.py; which are taken, below.
@on_x86
@pytest.mark.slow  # 30 seconds, of which `made` takes most
def test_a_cpu_of_that_level_compiles_nothing_with_another_number_of_threads(place, made):
    """Nor does it need a compiler."""
    told = place.use("two", **AS_AVX2, **NO_COMPILER, OMP_NUM_THREADS="1")
    assert (told.launched, told.counts) == ([], FOUND)
    outcome, reason = told.cache
    assert outcome == "hit"
    assert reason.endswith("; for all CPUs of x86-64:avx2")
    compiled, eager = told.results
    torch.testing.assert_close(compiled, eager)  # fp32's: other vectors, another order of sums


@on_x86
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_its_libraries_have_that_levels_instructions(place, made, tmp_path):
    found = {}
    for arch, (key, files) in entries(place.folder / "two").items():
        libraries = [data for name, data in files.items() if name.endswith(".so")]
        told = ""
        for data in libraries:
            (tmp_path / "library").write_bytes(data)
            command = ["objdump", "-d", str(tmp_path / "library")]
            told += subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "vpermb" not in told  # of the CPU here, if it was not for the level
        assert dict(key["toolkit"]) == {"c++": "any", "python": "{}.{}".format(*sys.version_info)}
        found[arch] = bool(libraries), "%ymm" in told, "%zmm" in told
    assert found == {"x86-64:avx2": (True, True, False), "x86-64:avx512": (True, True, True)}


@on_x86
@pytest.mark.slow
def test_what_the_verb_says(made):
    assert [row["target"] for row in made] == ["x86-64:avx2:any", "x86-64:avx512:any"]
    for row in made:
        assert (row["makes"], row["graphs"], row["missing"]) == ("graphs", 1, [])
        assert (row["kernels"] > 0, row["own_kernels"]) == (
            True,
            2,
        )  # they read weights and note accesses


@on_x86
def test_a_level_is_described_to_one_thread_and_put_back():
    from torch._inductor import cpu_vec_isa

    def picked():
        told.append((torch.ops.mkldnn._is_mkldnn_bf16_supported(), device.architecture()))

    told, before = [], seen()
    with x86_levels.target_level(x86_levels.LEVELS["x86-64:avx2"]):
        assert [str(each) for each in cpu_vec_isa.valid_vec_isa_list()] == ["avx2"]
        assert packing.onednn_dtypes() == {torch.float32}
        assert device.architecture() == "x86-64:avx2"
        with x86_levels.target_level(x86_levels.LEVELS["x86-64:amx"]):
            assert str(cpu_vec_isa.pick_vec_isa()) == "avx512 avx512_vnni"
            assert packing.onednn_dtypes() == {torch.float32, torch.bfloat16, torch.float16}
        assert [str(each) for each in cpu_vec_isa.valid_vec_isa_list()] == ["avx2"]
        other = threading.Thread(target=picked)
        other.start()
        other.join()
    picked()
    assert told == [told[1]] * 2
    assert seen() == before


@on_x86
def test_a_builder_without_a_compiler_is_told(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(graphs.toolkit, "compiler", lambda: None)
    with pytest.raises(CompilerNotFoundError, match="that builds graphs for CPUs"):
        graphs.prebuild(nn.Linear(2, 2).eval(), (torch.ones(1, 2),), AVX2)


@on_levels
def test_what_a_hypervisor_hides_is_not_used(monkeypatch):
    able = torch.cpu.get_capabilities() | {"bmi2": False}
    assert x86_levels._levels_of.__wrapped__(OWN)[0].arch == OWN
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert x86_levels._levels_of.__wrapped__(OWN) == ()


def test_levels_are_served_from_the_highest_down(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # nothing is known to be missing
    served = x86_levels._levels_of.__wrapped__
    names = "avx512_bf16", "avx512", "avx2"
    assert [each.arch for each in served("x86-64:avx512_bf16")] == [f"x86-64:{n}" for n in names]
    assert [each.arch for each in served("x86-64:avx2")] == ["x86-64:avx2"]
    assert served("x86-64") == served("aarch64:sve256") == ()


@on_x86
@pytest.mark.parametrize(
    "options",
    [{"cpp.march": "x86-64"}, {"cpp.simdlen": 256}, {"cpp_wrapper": True}, {"max_autotune": True}],
)
def test_who_says_how_c_is_compiled_gets_that(options):
    from ipex_inductor.compiler.request import Request
    from ipex_inductor.config import resolve

    def levels_of(options):
        config = resolve(None, options, compat.inductor_option_types())
        gm = torch.fx.symbolic_trace(nn.Linear(2, 2))
        return Request(gm, [torch.ones(2, 2)], config).levels()

    assert levels_of({})
    assert levels_of(options) == ()


def test_a_torch_without_a_setting_has_none_of_it(monkeypatch):
    """As 2.11 has no `cpp.march`: what is asked there is no error."""
    from ipex_inductor.compiler import request
    from ipex_inductor.config import resolve

    monkeypatch.setattr(request, "TOLD", ("cpp.no_such_setting",))
    config = resolve(None, {}, compat.inductor_option_types())
    gm = torch.fx.symbolic_trace(nn.Linear(2, 2))
    assert request.Request(gm, [torch.ones(2, 2)], config).levels() == x86_levels.served_levels()


@on_x86
def test_the_very_cpus_own_entry_comes_first(monkeypatch):
    """Then the highest level that is there; where there is none, this CPU's is made."""
    low, high = (x86_levels.LEVELS[f"x86-64:{name}"] for name in ("avx2", "avx512"))
    there = set()
    monkeypatch.setattr(
        graph_cache.default_store, "store", lambda: SimpleNamespace(holds=there.__contains__)
    )

    def found():
        return graph_cache._find_key(lambda level: level and level.arch, (high, low))

    assert found() == (None, None, (high.arch, low.arch))
    there.add(low.arch)
    assert found() == (low.arch, low, ())
    there.add(high.arch)
    assert found() == (high.arch, high, ())
    there.add(None)
    assert found() == (None, None, ())
    with x86_levels.compile_ahead(low):
        assert found() == (low.arch, low, ())


def test_a_kernel_for_others_is_found_by_any_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    level = next((each for each in x86_levels.served_levels() if each.arch == OWN), None)
    if level is None:
        pytest.skip("not a level")
    asked, problem = [], (("template", "test of levels"),)

    def source():
        asked.append(1)
        return 'extern "C" int answer() { return 42; }'

    with x86_levels.target_level(level):
        cpp.ship(source, problem)
    monkeypatch.setattr(cpp.toolkit, "compiler_identity", lambda: "another, 1 bytes")
    monkeypatch.setenv("CPATH", "/elsewhere")
    assert cpp.load(source, problem).answer() == 42
    assert len(asked) == 1


@on_x86
@pytest.mark.slow  # 25 seconds: a CPU that has not that level compiles for itself
def test_a_level_that_the_cpu_lacks_is_refused(place, made):
    _, code = place.build("made_for_levels:make", "--arch", "x86-64:avx512", "-o", "avx512")
    assert code == 0
    told = place.use("avx512", **AS_AVX2)
    assert told.cache == ["miss", "built for x86-64:avx512, running on x86-64:avx2"]
    assert told.launched
    torch.testing.assert_close(*told.results)


@on_x86
@pytest.mark.slow  # 10 seconds
def test_a_builder_whose_torch_keeps_no_graphs_is_told(place):
    asked = "made_for_levels:make", "--arch", "x86-64:avx2", "-o", "none"
    off = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    (row,), code = place.build(*asked, **off, IPEX_HOME=str(place.folder / "off"))
    assert (code, row["missing"]) == (1, ["1 of 1 graphs, which could not be kept"])


@on_levels
@pytest.mark.slow  # 60 seconds
def test_it_computes_what_a_cold_compile_does(place, made):
    """This CPU's level: the same vectors and no contraction, so the same bits."""
    _, code = place.build("made_for_levels:make", "--arch", OWN, "-o", "own")
    assert code == 0
    told, cold = place.use("own"), place.use("")
    assert (told.launched, told.cache[0], cold.cache[0]) == ([], "hit", "miss")
    assert torch.equal(told.results[0], cold.results[0])
    lower = place.use("two")  # a higher CPU runs the highest that it has
    assert (lower.launched, lower.cache[0]) == ([], "hit")
    torch.testing.assert_close(*lower.results)


@pytest.mark.skipif(OWN != "x86-64:avx512_bf16", reason="our products are for AVX-512 with bf16")
@pytest.mark.slow  # 60 seconds
def test_our_products_are_in_the_bundle(place):
    (row,), code = place.build("made_for_levels:halves", "--arch", OWN, "-o", "halves")
    assert (code, row["own_kernels"]) == (0, 2)
    assert any("by this package's GEMM kernel" in choice for choice in row["choices"])
    told, cold = place.use("halves", "halves"), place.use("", "halves")
    assert (told.launched, told.counts, told.cache[0]) == ([], FOUND, "hit")
    assert torch.equal(told.results[0], cold.results[0])


@on_levels
@pytest.mark.slow  # 120 seconds
def test_training_graphs_and_steps(place):
    archs = "--arch", OWN, "--arch", "x86-64:avx2"
    rows, code = place.build("made_for_levels:trained", "--train", *archs, "-o", "steps")
    assert code == 0
    for row in rows:
        assert (row["makes"], row["graphs"], row["missing"]) == ("graphs", 1, [])
        assert row["kernels"] > 1  # forward and backward
        assert row["own_kernels"] == 4  # the step, and what looks at tensors, weights and accesses
    alone = {"OMP_NUM_THREADS": "1"}  # sums that threads divide are divided otherwise
    cold = place.use("", "trained", **alone)
    for env in (alone, NO_COMPILER, AS_AVX2):
        told = place.use("steps", "trained", **env)
        assert (told.launched, told.counts, told.cache[0]) == ([], FOUND, "hit")
        if env is alone:
            assert all(map(torch.equal, told.results, cold.results))
        # AdamW's first steps are near the sign of gradients, whose last bits are other ones.
        torch.testing.assert_close(told.results, cold.results, rtol=1e-4, atol=1e-5)


@on_x86
@pytest.mark.slow  # 15 seconds
@pytest.mark.skipif(torch.version.cuda is not None, reason="of a CPU build of torch")
def test_levels_and_gpus_are_asked_for_at_once(place):
    archs = "--arch", "x86-64:avx2", "--arch", "h200"
    rows, code = place.build("made_for_levels:make", *archs)
    assert [(row["target"], row["makes"]) for row in rows] == [
        ("x86-64:avx2:any", "graphs"),
        ("sm_90:NVIDIA-H200", "kernels only"),
    ]
    assert code == 0
