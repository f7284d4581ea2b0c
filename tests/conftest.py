"""Every test starts from a clean Dynamo and knows which rules fired."""

import atexit
import gc
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

# Threads that wait for one another sleep; two workers' on two cores would spin instead of working.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Nobody's records decide what tests get, and none are left behind.
os.environ["IPEX_HOME"] = tempfile.mkdtemp(prefix="ipex_home_")
# Lines about compiles that take long are the business of tests/compiler/test_progress.py.
os.environ.setdefault("IPEX_PROGRESS", "0")
# Passes must run in every test, so graphs are not cached; compiled C++ still is.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
# A folder that is named is torch's alone, and outlives the run; test_graph_files.py tests ours.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/ipex_tests_{os.getuid()}"
)

import hypothesis
import pytest
import torch
from torch._dynamo import guards
from torch._dynamo.utils import counters
from torch._logging import _internal as logs

from ipex_inductor import compat
from ipex_inductor.compiler import request
from ipex_inductor.passes.attention import attention
from ipex_inductor.passes.training import training
from ipex_inductor.passes.weights import plain
from ipex_inductor.reporting import decisions
from ipex_inductor.runtime import gc_pause
from support.case_sampling import mark_slow_cases

atexit.register(shutil.rmtree, os.environ["IPEX_HOME"], ignore_errors=True)
atexit.register(gc.unfreeze)  # or extensions of Python report leaks
hypothesis.settings.register_profile("ci", deadline=None)  # two noisy cores
hypothesis.settings.load_profile("ci")
# Every test compiles, and all that torch imported is walked each time: a fifth of a test's time.
gc.set_threshold(100_000, 10, 10)
# So they are in every Python that a test starts, by its sitecustomize.
STARTED = str(Path(__file__).parent / "support" / "child_site")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTED, os.environ.get("PYTHONPATH")]))
sys.path.append(STARTED)  # of which some tests make the path
# pytest takes down what any logger says, so torch would write what is for TORCH_TRACE: a fifteenth
# of the time of tests that compile, by a profile.
logs.trace_log = logging.Logger("torch.__trace")
# A figure for torch's telemetry, for which the processor's caches are flushed in each compile.
guards.profile_guard_manager = lambda *_: 0.0


# torch.testing._internal.common_utils, which some tests import, forbids to set flags of
# torch.backends. sys.modules has a stand-in for that module: the flag is a global of its functions.
BACKENDS = torch.backends.flags_frozen.__globals__


@pytest.fixture(autouse=True)
def _clean():
    BACKENDS["__allow_nonbracketed_mutation_flag"] = True
    torch.compiler.reset()
    decisions.clear()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_is_no_garbage():
    """Nor what earlier files left: to walk all that takes seconds, each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _what_is_frozen_is_not_counted():
    """It is much: a twentieth of a second in each compilation, which then leaves all as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc_pause, "_age_new_objects", int)
        yield


@pytest.fixture(autouse=True, scope="session")
def _headers_are_precompiled():
    """C++ that calls its kernels too: of each of its two sources half is the header's."""
    with pytest.MonkeyPatch.context() as patch:
        if shutil.which("openssl"):  # by which torch tells headers apart
            patch.delitem(request.WRAPPED, "cpp_cache_precompile_headers")
        yield


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python calls a graph's kernels, as in training: it says more plainly which and with what."""
    monkeypatch.setenv("TORCHINDUCTOR_CPP_WRAPPER", "0")


@pytest.fixture
def warned(monkeypatch):
    """The texts of warnings that a process gives once."""
    texts = []
    monkeypatch.setattr(decisions, "warn_once", texts.append)
    return texts


@pytest.fixture(autouse=True)
def _rules_fire_alike(monkeypatch):
    """On every CPU and of all sizes: attention is left to Inductor on some, small products are."""
    monkeypatch.setattr(attention, "architecture", lambda: "x86-64:amx")
    monkeypatch.setattr(plain, "CPUS", ())
    monkeypatch.setattr(training, "LEAST", 0)


@pytest.fixture(scope="module")
def instructions_known():
    """Processes started meanwhile do not try again what this one found AVX2, AVX-512 ... to do.

    Inductor builds a library for each in every empty folder, ten seconds of work, and loads them in
    every process.
    """
    from torch._inductor import cpu_vec_isa

    offered = {*cpu_vec_isa.x86_isa_checker()}
    kinds = [k for k in cpu_vec_isa.supported_vec_isa_list if {*str(k).split()} <= offered]
    with pytest.MonkeyPatch.context() as patch:
        if kinds and all(kinds):
            patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
        yield


def layer(folder, name):
    """The folder, with those kernels in the home of all tests that have this in their key."""
    for entry in Path(os.environ["IPEX_HOME"]).glob("kernels/1/*.entry"):
        if name in entry.read_bytes():
            shutil.copy(entry, folder)
    return folder


@pytest.fixture(scope="session")
def guard_layer(tmp_path_factory):
    """A folder of kernels with the guard of described GPUs, which g++ takes ten seconds for."""
    from ipex_inductor.prebuild import described, describing

    describing.guard_of.cache_clear()
    describing.guard_of(described.SOURCE)  # the home of all tests has it then
    return layer(tmp_path_factory.mktemp("guard"), b"guard of described devices")


@pytest.fixture(scope="session")
def products_layer(tmp_path_factory):
    """The same with our kernels for the CPU, which take as long, wherever a layer is linear."""
    from ipex_inductor.templates.cpu import cpu_library

    cpu_library.library.cache_clear()
    cpu_library.library()
    return layer(tmp_path_factory.mktemp("products"), b"cpu kernels")


@pytest.fixture(scope="module")
def guard_known(guard_layer):
    """Processes started meanwhile find it, whatever home they have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPEX_AOT_LAYERS", str(guard_layer))
        yield


@pytest.fixture(scope="module")
def products_known(products_layer):
    """The same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPEX_AOT_LAYERS", str(products_layer))
        yield


@pytest.fixture
def code_alone(monkeypatch):
    """Code for a GPU is looked at alone: Triton compiles no kernel of it, the most of the time."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "triton", lambda *_, **__: None)


@pytest.fixture
def no_garbage():
    """For what counts bytes: models of earlier tests are gone, those in reference cycles too."""
    gc.collect()


@pytest.fixture
def op_by_op(monkeypatch):
    """All of the backend but Inductor's code generation: the graph runs as it stands."""

    def run(gm, example_inputs, **kwargs):
        def call(inputs):
            given = list(inputs)
            inputs.clear()
            return gm(*given)

        call._boxed_call = True
        return call

    monkeypatch.setattr(compat, "compile_inner", run)


@pytest.fixture
def in_code():
    """For what Inductor's code could do wrong, in files whose graphs run as they stand else."""


@pytest.fixture
def op_by_op_unless_in_code(request):
    """For such files."""
    if "in_code" not in request.fixturenames:
        request.getfixturevalue("op_by_op")


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    gc.collect()  # models of tests that raised; every optimizer's step looks at all that are held
    dist.destroy_process_group()


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="of the tests of optimizers")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items):
    mark_slow_cases(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU that torch can use; there is none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
