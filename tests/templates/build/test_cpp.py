"""C++ kernels: what their keys name, who compiles them and when, and where they are loaded from."""

import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import ipex_inductor
from ipex_inductor.aot_cache import default_store, kernels, log_once, toolkit
from ipex_inductor.aot_cache.digest import source_digest
from ipex_inductor.aot_cache.entry import Entry, unpack_any
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.aot_cache.store import default_folder
from ipex_inductor.optim.launching import launch_groups_cpu
from ipex_inductor.target.device import as_cpu, current
from ipex_inductor.templates.build import cpp
from ipex_inductor.templates.cpu import cpu_library
from ipex_inductor.templates.optimizer import step_cpp
from ipex_inductor.templates.optimizer.step import StepKernel

pytestmark = pytest.mark.unit

SOURCE = 'extern "C" int answer() { return 42; }\n'
PROBLEM = (("template", "answer"),)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A home of its own, and nothing loaded before."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    forget()
    yield tmp_path / "home"
    forget()


def forget():
    """As in a new process."""
    launch_groups_cpu._library.cache_clear()
    default_store._store_in.cache_clear()
    log_once.say.cache_clear()


@pytest.fixture
def runs(monkeypatch):
    """The commands that were run."""
    seen, run = [], subprocess.run

    def watched(command, **kwargs):
        seen.append(command)
        return run(command, **kwargs)

    monkeypatch.setattr(cpp.subprocess, "run", watched)
    return seen


@pytest.fixture
def without_compiler(monkeypatch):
    def remove():
        monkeypatch.setattr(toolkit.compat, "cxx", lambda: (None, "/nowhere/g++"))

    return remove


def answer():
    return cpp.load(lambda: SOURCE, PROBLEM).answer()


def entries():
    return list(default_folder().glob("*.entry"))


# Keys

ARCHITECTURES = [
    "x86-64",
    "x86-64:avx2",
    "x86-64:avx512",
    "x86-64:amx",
    "aarch64:sve256",
    "ppc64le",
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_flags_follow_from_the_architecture_alone(arch):
    """Kernels go to other machines with the cache: nothing may be tuned for this one."""
    flags = cpp._flags(arch)
    assert not any("native" in flag for flag in flags)
    assert any(flag.startswith("-march=") for flag in flags) == (":" in arch and "x86" in arch)
    with as_cpu(arch):
        key = cpp.key_of(PROBLEM)
    assert key.architecture == cpp._level(arch)[0]
    assert dict(key.options)["flags"].split() == list(flags)


def test_a_key_names_all_that_code_depends_on():
    key = cpp.key_of(PROBLEM)
    assert (key.kind, key.problem, key.source) == ("cpp", PROBLEM, source_digest())
    assert key.architecture == cpp._level(current().arch)[0]
    assert dict(key.toolkit) == {"c++": toolkit.compiler_identity()}
    assert (key.torch, key.triton, key.environment) == ("", "", ())


def test_cpus_that_run_the_same_code_share_it():
    keys = []
    for arch in ("x86-64:avx512", "x86-64:avx512_bf16", "x86-64:amx"):
        with as_cpu(arch):
            keys.append(cpp.key_of(PROBLEM))
    assert len(set(keys)) == 1


def test_only_variables_that_the_compiler_reads_are_in_the_key(monkeypatch):
    plain = cpp.key_of(PROBLEM)
    for name in ("CC", "CXX", "CUDA_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CPP_WRAPPER"):
        monkeypatch.setenv(name, "/somewhere")
    assert cpp.key_of(PROBLEM).environment == plain.environment
    for name in sorted(cpp.READ):
        before = cpp.key_of(PROBLEM)
        monkeypatch.setenv(name, "/somewhere")
        assert cpp.key_of(PROBLEM) != before, name


def test_step_kernels_have_keys_of_their_own(monkeypatch):
    """Every field of a kernel is in its key."""
    asked = []

    def ask(source, problem):
        asked.append(problem)
        raise cpp.NotBuiltError

    monkeypatch.setattr(step_cpp, "load", ask)
    first = StepKernel("SGD", ("momentum",), "float32", "", "float32", ("float32",))
    others = [
        replace(first, formula="Lars"),
        replace(first, flags=("maximize", "momentum")),
        replace(first, param="bfloat16"),
        replace(first, param="bfloat16", rest="int16"),
        replace(first, grad="float16"),
        replace(first, state=("bfloat16",)),
        replace(first, scaled=True),
        replace(first, zeroed=True),
        StepKernel("Adam", (), "float32", "", "float32", ("float32",) * 2, counted="float32"),
        StepKernel("Adam", (), "float32", "", "float32", ("float32",) * 2, counted="float64"),
    ]
    for kernel in (first, *others):
        with pytest.raises(cpp.NotBuiltError):
            launch_groups_cpu.library(kernel)
    assert len({cpp.key_of(problem).digest for problem in asked}) == len(others) + 1


# Libraries


def test_a_closed_descriptor_makes_no_two_libraries_one(home):
    """As daemons do: the loader compares names before it opens anything."""
    script = (
        "import os\n"
        "from ipex_inductor.templates.build import cpp\n"
        "def made(n): return cpp.load("
        "lambda: f'extern \"C\" int answer() {{ return {n}; }}', (('n', n),))\n"
        "one = made(1); os.closerange(3, 256); two = made(2)\n"
        "assert (one.answer(), two.answer()) == (1, 2)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_a_compiler_says_in_other_letters_is_no_error(monkeypatch, tmp_path):
    real = toolkit.compiler()
    wordy = tmp_path / "g++"
    wordy.write_bytes(b"#!/bin/sh\nprintf 'caf\\351' >&2\nexec " + real.encode() + b' "$@"\n')
    wordy.chmod(0o755)
    monkeypatch.setattr(toolkit.compat, "cxx", lambda: (str(wordy),))
    assert answer() == 42


# Compilers


def test_the_compiler_is_inductors(monkeypatch, tmp_path):
    """The first that is here, by its real path and size; it is not run for that."""
    binary = tmp_path / "cc-9"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (tmp_path / "cc").symlink_to(binary)
    monkeypatch.setattr(
        toolkit.compat, "cxx", lambda: (None, "/nowhere/g++", str(tmp_path / "cc"), "g++")
    )
    assert toolkit.compiler() == str(tmp_path / "cc")  # ccache and clang go by their names
    assert toolkit.compiler_identity() == f"{binary}, 10 bytes"


def test_no_compiler(without_compiler):
    without_compiler()
    assert toolkit.compiler() is None
    assert toolkit.compiler_identity() == "none"


# From source to code


def test_compiled_once_and_then_read(runs, caplog):
    with caplog.at_level(logging.INFO, "ipex_inductor"):
        assert answer() == answer() == 42
    assert len(runs) == len(entries()) == 1
    assert "cpp is compiled: the cache has no entry of its kind" in caplog.text
    forget()
    assert answer() == 42
    assert len(runs) == 1
    with caplog.at_level(logging.INFO, "ipex_inductor"):
        cpp.load(lambda: SOURCE, (("template", "other"),))
    assert "problem: template=other here, answer there" in caplog.text


def test_the_loader_opens_no_file_of_a_disk(home):
    assert answer() == 42
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if "ipex_kernel" in line}
    assert all(name.startswith("/memfd:ipex_kernel") for name in mapped)
    assert mapped


def test_libraries_are_told_apart():
    """The loader knows libraries by name; two alike would be one."""
    made = [
        cpp.load(lambda n=n: f'extern "C" int answer() {{ return {n}; }}', (("number", n),))
        for n in range(3)
    ]
    assert [library.answer() for library in made] == [0, 1, 2]


def test_a_corrupt_entry_is_built_anew(runs, caplog):
    answer()
    (file,) = entries()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    forget()
    assert answer() == 42
    assert len(runs) == 2
    assert "is not used: it changed after it was written" in caplog.text
    forget()
    assert answer() == 42
    assert len(runs) == 2


def test_without_a_compiler_any_compilers_will_do(runs, without_compiler):
    answer()
    forget()
    without_compiler()
    assert answer() == 42
    assert len(runs) == 1


@pytest.mark.parametrize("loadable", [0, 1, 2])
def test_without_a_compiler_one_that_can_be_loaded_is_looked_for(without_compiler, loadable):
    """A compiler's run-time library may be missing here; another's need not be."""
    answer()
    (file,) = entries()
    _, good = unpack_any(file.read_bytes())
    file.unlink()
    torn = Entry(good.meta, b"\x7fELF, but no more")
    for number in range(3):
        known = cpp.key_of(PROBLEM)
        other = replace(known, toolkit=(("c++", f"g++ {number}"),))
        found = good if number == loadable else torn
        default_store.store().put(other, dict(found.meta), found.blob)
    forget()
    without_compiler()
    assert answer() == 42


@pytest.mark.parametrize("field", ["source", "options", "architecture", "problem"])
def test_but_only_if_all_else_is_the_same(field, without_compiler, monkeypatch):
    answer()
    forget()
    without_compiler()
    key_of = cpp.key_of

    def otherwise(problem, *how) -> Key:
        value = "other" if field in ("source", "architecture") else (("other", 1),)
        return replace(key_of(problem, *how), **{field: value})

    monkeypatch.setattr(cpp, "key_of", otherwise)
    with pytest.raises(cpp.NotBuiltError, match=r"no C\+\+ compiler was found"):
        answer()


def test_another_compiler_compiles_for_itself(runs, monkeypatch, tmp_path):
    answer()
    forget()
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {toolkit.compiler()} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(toolkit.compat, "cxx", lambda: (str(wrapper),))
    assert answer() == 42
    assert len(runs) == len(entries()) == 2


def test_headers_are_read_before_the_target_changes():
    """GCC 13 to 15 refuse `std::vector` of headers that were read behind it (GCC 12 does not)."""
    before, behind = cpu_library.source().split("#pragma GCC push_options")
    assert "#include <vector>" in before
    assert "#include" not in behind


def test_what_the_compiler_says_is_the_reason():
    with pytest.raises(cpp.NotBuiltError, match="not_declared"):
        cpp.load(lambda: 'extern "C" int answer() { return not_declared; }', PROBLEM)
    assert not entries()


def test_what_cannot_be_loaded_is_not_built(monkeypatch):
    """A library of another system's loader, say."""
    monkeypatch.setattr(cpp, "_compile_library", lambda *_: ({}, b"\x7fELF, but no more"))
    with pytest.raises(cpp.NotBuiltError, match="not to be had"):
        answer()


def test_what_failed_once_is_not_tried_at_every_step(monkeypatch, without_compiler):
    """Neither is the compiler run again, nor the cache searched."""
    without_compiler()
    asked, search = [], kernels.by_any_compiler
    monkeypatch.setattr(kernels, "by_any_compiler", lambda *a: (asked.append(1), search(*a))[1])
    wanted = StepKernel("SGD", (), "float32", "", "float32", ())
    for _ in range(3):
        with pytest.raises(cpp.NotBuiltError, match=r"no C\+\+ compiler was found"):
            launch_groups_cpu.library(wanted)
    assert len(asked) == 1


# Stores


def test_one_store_for_each_home(monkeypatch, tmp_path):
    first = default_store.store()
    assert default_store.store() is first
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "other"))
    assert default_store.store() is not first
    assert default_store.store().folder.path == tmp_path / "other" / "kernels" / "1"


@pytest.mark.skipif(os.name != "posix", reason="mode bits")
def test_a_home_that_others_can_write_is_not_used(home, runs, caplog):
    """Kernels are compiled, each process for itself, and that is said once."""
    default_folder().mkdir(parents=True)
    default_folder().chmod(0o777)
    for _ in range(2):
        assert default_store.store() is None
        assert answer() == 42
    assert len(runs) == 2
    assert not entries()
    assert caplog.text.count("what is compiled is not kept") == 1


def test_no_store_and_no_compiler(home, without_compiler):
    default_folder().mkdir(parents=True)
    default_folder().chmod(0o777)
    without_compiler()
    with pytest.raises(cpp.NotBuiltError, match=r"no C\+\+ compiler was found"):
        answer()


def test_torchs_own_step_stands_in_with_the_reason_said_once(without_compiler, caplog):
    from ipex_inductor.optim import fuse_step
    from ipex_inductor.optim import kernels as steps

    without_compiler()
    steps._said.clear()
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.ones(n)) for n in (2, 3)]
    theirs = [torch.nn.Parameter(torch.ones(n)) for n in (2, 3)]
    optimizer, reference = torch.optim.AdamW(ours), torch.optim.AdamW(theirs)
    fuse_step(optimizer)
    with caplog.at_level(logging.INFO, "ipex_inductor"):
        for _ in range(3):
            for p, q in zip(ours, theirs, strict=True):
                p.grad = torch.randn(p.shape)
                q.grad = p.grad.clone()
            optimizer.step()
            reference.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    (line,) = (r.message for r in caplog.records if "torch itself" in r.message)
    assert line.startswith("AdamW: torch itself steps 2 parameters: no C++ compiler was found")


def test_a_compiler_without_half_precision_is_in_the_report(monkeypatch, tmp_path):
    """g++ knows `_Float16` from 12 on."""
    old = tmp_path / "g++"
    old.write_text(
        "#!/bin/sh\n"
        'for last; do :; done; grep -q _Float16 "$last" || exec '
        f'{toolkit.compiler()} "$@"\n'
        "echo \"error: '_Float16' does not name a type\" >&2; exit 1\n"
    )
    old.chmod(0o755)
    monkeypatch.setattr(toolkit.compat, "cxx", lambda: (str(old),))
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = ipex_inductor.optimize(
        net.train(), dtype=torch.float16, optimizer=optimizer, level="O1", inplace=True
    )
    report = ipex_inductor.report(model)
    assert report.count("fired")["fuse_update_step"] == 1
    assert "fuse_update_step" not in report.count("missed")
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    (missed,) = (e for e in report.events if (e.kind, e.subject) == ("missed", "fuse_update_step"))
    assert missed.where == "SGD"
    assert "torch itself steps 2 parameters" in missed.reason
    assert "'_Float16' does not name a type" in missed.reason
