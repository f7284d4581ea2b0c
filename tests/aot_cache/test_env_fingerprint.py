"""No environment variable or setting changes code unseen: each is in the key, or said why not."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from ipex_inductor.aot_cache import env_fingerprint
from ipex_inductor.aot_cache.digest import ROOMS
from ipex_inductor.config import own_options
from support.cache.cache_keys import key

pytestmark = pytest.mark.reliability

ROOT = Path(__file__).parents[2]
TRITON = find_spec("triton")
needs_triton = pytest.mark.skipif(TRITON is None, reason="Triton is not installed")
CENSUS = env_fingerprint.census()
LISTED = CENSUS.key.keys() | CENSUS.neutral.keys()

# Reads whose name is a variable, each looked at: what it can be is listed.
DYNAMIC = {
    "triton/knobs.py",  # the descriptors, whose names are seen where they are made
    "triton/profiler/profile.py",  # copies of listed names for a child
    "triton/profiler/__init__.py",  # the same
    "triton/_compile_warmup.py",
    "triton/_compile_warmup_pool.py",
    "torch/_inductor/autotune_process.py",  # CUDA_VISIBLE_DEVICES
    "torch/_inductor/compiler_bisector.py",  # TORCH_BISECT_*
    "torch/_inductor/utils.py",
    "torch/_inductor/compile_fx.py",
    "torch/_inductor/compile_fx_subproc.py",
    "torch/_inductor/async_compile.py",  # the variables a worker gets
    "torch/_inductor/cache.py",
    "torch/_inductor/runtime/caching/config.py",  # what Inductor remembers
    "torch/_inductor/runtime/compile_tasks.py",
    "torch/_inductor/runtime/flydsl_cache.py",  # FLYDSL_*
    "triton/_internal_testing.py",  # Triton's own tests
    "ipex_inductor/config.py",
    "ipex_inductor/cli/config.py",  # own_options()
}
READERS = {"getenv", "getenv_bool", "get_env_val"}


def reads(file):
    """The names of environment variables read in a file; None for one that is a variable."""
    for node in ast.walk(ast.parse(file.read_text())):
        named = []
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            last = called.split(".")[-1]
            tool = last == "env_nvidia_tool"
            knob = last.startswith("env_") and last != "env_base"
            if tool:
                binary = node.args[0].value.upper().replace("-", "_")
                yield f"TRITON_{binary}_PATH"
            elif last in READERS or knob or re.search(r"environ\.(get|pop|setdefault)$", called):
                named = [node.args[0]]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            named = [node.slice]
        elif isinstance(node, ast.Compare):
            named = [node.left] * any(ast.unparse(c).endswith("environ") for c in node.comparators)
        for name in named:
            yield name.value if isinstance(name, ast.Constant) else None


def unlisted(files, base):
    found = {(name, str(f.relative_to(base))) for f in files for name in reads(f)}
    return {
        (name, file)
        for name, file in found
        if (file not in DYNAMIC if name is None else name not in LISTED)
    }


def test_our_own_reads_are_listed():
    files = [
        f
        for room in ROOMS
        for p in find_spec(room).submodule_search_locations
        for f in Path(p).glob("*.py")
    ]
    assert len(files) > 100
    assert not unlisted(files, ROOT)
    assert {o.metadata["env"] for o in own_options().values()} <= LISTED


@needs_triton
def test_tritons_reads_are_listed():
    folder = Path(TRITON.origin).parent
    files = [f for f in folder.rglob("*.py") if f.name != "_test_runner.py"]
    assert not unlisted(files, folder.parent)


def test_inductors_reads_beside_its_config_are_listed():
    """Those of config.py are in Inductor's own digest of its config, which is in the key."""
    folder = Path(find_spec("torch").origin).parent / "_inductor"
    files = [f for f in folder.rglob("*.py") if f.name not in {"config.py", "test_case.py"}]
    assert not unlisted(files, folder.parents[1])


@needs_triton
def test_what_triton_compiled_in_is_listed():
    """Triton knows which variables its C++ reads; it tells of those that are set, so all are."""
    library = next((Path(TRITON.origin).parent / "_C").glob("libtriton*.so"))
    names = {
        m.decode() for m in re.findall(rb"\0([A-Z][A-Za-z0-9_]{4,60})(?=\0)", library.read_bytes())
    }
    names -= os.environ.keys()
    code = "from triton._C.libtriton import get_cache_invalidating_env_vars as v; print(*v())"
    env = {**os.environ, **{n: "1" for n in names if re.fullmatch(r"[A-Z0-9_x]+", n)}}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    told = set(ran.stdout.split())
    assert len(told) >= 15, ran.stderr
    assert told <= LISTED


@needs_triton
def test_settings_that_no_variable_sets_are_listed():
    from triton import knobs as triton_knobs

    listed = CENSUS.settings_key.keys() | CENSUS.settings_neutral.keys()
    for group_name, group in vars(triton_knobs).items():
        if isinstance(group, triton_knobs.base_knobs):
            read_at_import = {
                n for n, v in vars(type(group)).items() if type(v) in (bool, int, str)
            }
            for name in type(group).__annotations__.keys() - group.knob_descriptors.keys():
                assert f"{group_name}.{name}" in listed or name in read_at_import


@pytest.mark.parametrize("name", sorted(CENSUS.key))
def test_each_name_in_key_flips_the_digest(name):
    """Set is not unset, not "0", and not another value."""
    digests = {
        replace(key(), environment=env_fingerprint.environment(env)).digest
        for env in ({}, {name: ""}, {name: "0"}, {name: "1"})
    }
    assert len(digests) == 4


@pytest.mark.parametrize("name", sorted(CENSUS.neutral))
def test_neutral_names_do_not_and_say_why(name):
    assert env_fingerprint.environment({name: "1"}) == ()
    assert len(CENSUS.neutral[name]) > 4


def test_no_name_is_both():
    assert not CENSUS.key.keys() & CENSUS.neutral.keys()


NEW = ["TRITON_INTEL_DISABLE_IGC_OPT", "IGC_ForceOCLSIMDWidth", "MLIR_NEW"]


@pytest.mark.parametrize("name", NEW)
def test_what_no_list_can_name_yet_is_in_the_key(name):
    assert env_fingerprint.environment({name: "1", "HOME": "/x"}) == ((name, "1"),)


# --- what a program sets without the environment


class Group(SimpleNamespace):
    """Of knobs."""


def fake_triton(monkeypatch, group, **values):
    cls = type(group, (Group,), {"debug": values.pop("debug", False)})
    cls.knob_descriptors = {
        "ptxas_options": SimpleNamespace(key="PTXAS_OPTIONS"),
        "dump_ptx": SimpleNamespace(key="NVPTX_ENABLE_DUMP"),
    }
    module = SimpleNamespace(base_knobs=Group, **{group: cls(**values)})
    monkeypatch.setitem(sys.modules, "triton.knobs", module)


@pytest.mark.parametrize(
    ("group", "values", "expected"),
    [
        ("nvidia", {"ptxas_options": "-O1"}, (("triton.knobs.nvidia.ptxas_options", "-O1"),)),
        ("nvidia", {"dump_ptx": True}, ()),
        ("runtime", {"debug": True}, (("triton.knobs.runtime.debug at import", True),)),
        ("runtime", {"launch_enter_hook": print}, ()),
        ("nvidia", {"brand_new": 3}, (("triton.knobs.nvidia.brand_new", 3),)),
    ],
)
def test_a_programs_settings_are_in_the_key(monkeypatch, group, values, expected):
    fake_triton(monkeypatch, group, **values)
    assert env_fingerprint.triton_settings() == expected


def test_a_hook_that_adds_passes_cannot_be_in_a_key(monkeypatch):
    fake_triton(monkeypatch, "runtime", add_stages_inspection_hook=len)
    with pytest.raises(TypeError, match="add_stages_inspection_hook: no digest of builtin"):
        env_fingerprint.triton_settings()


@needs_triton
def test_the_installed_triton_says_what_was_set(monkeypatch):
    from triton import knobs as triton_knobs

    assert env_fingerprint.triton_settings() == ()
    monkeypatch.setitem(vars(triton_knobs.nvidia), "ptxas_options", "-O1")
    assert env_fingerprint.triton_settings() == (("triton.knobs.nvidia.ptxas_options", "-O1"),)


def test_inductors_config_is_in_the_key():
    from torch._inductor import config

    before = env_fingerprint.inductor_settings()
    with config.patch(epilogue_fusion=not config.epilogue_fusion):
        assert env_fingerprint.inductor_settings() != before
    assert env_fingerprint.inductor_settings() == before
