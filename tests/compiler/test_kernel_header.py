"""C++ kernels of training graphs are compiled with their header precompiled, once a machine."""

import itertools
import subprocess
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import nn

from ipex_inductor import compat
from ipex_inductor.aot_cache import default_store
from ipex_inductor.aot_cache.graph_files import workroom
from ipex_inductor.compiler import kernel_header

HERE = "g++ -O3"


@pytest.fixture
def unknown(monkeypatch):
    """This process has begun no header."""
    monkeypatch.setattr(kernel_header, "_begun", {})
    monkeypatch.setattr(kernel_header, "_kernels", Counter())


@pytest.fixture
def commands(monkeypatch, tmp_path, unknown):
    """What g++ is run with, where nothing is cached."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # there Inductor has its own
    ran, run, lock = [], subprocess.run, threading.Lock()

    def note(command, *args, **kwargs):
        with lock:
            ran.append(command)
        return run(command, *args, **kwargs)

    monkeypatch.setattr(subprocess, "run", note)
    return ran


def wait_for_begun():
    return [made.result(timeout=120) for made in kernel_header._begun.values()]


def of_kernels(commands):
    return [c for c in commands if any(str(word).endswith(".main.cpp") for word in c)]


def of_headers(commands):
    return [c for c in commands if "c++-header" in c]


def test_each_kernel_of_a_training_step_is_compiled_once_with_one_header(commands):
    """Forward and backward; a second process makes none, and g++ takes what is kept."""
    widths = (7, 11, 13, 17, 19, 23)
    layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*(layer for pair in layers for layer in pair))
    assert 2 * len(layers) >= kernel_header.MANY
    compiled = torch.compile(model, backend="ipex", options={"strict": True})
    compiled(torch.randn(3, 7)).sum().backward()

    kernels = of_kernels(commands)
    assert len(kernels) > kernel_header.DUE
    sources = Counter(next(w for w in c if w.endswith(".main.cpp")) for c in kernels)
    assert set(sources.values()) == {1}
    (header,) = wait_for_begun()
    # Begun before the first kernel was there, by the very command that compiles them.
    with_vectors = [c for c in kernels if "-include" in c]
    assert all(c[c.index("-include") + 1] == str(header) for c in with_vectors)
    assert len(kernels) - len(with_vectors) == sum(kernel_header._kernels.values()) == 0
    assert len(of_headers(commands)) == 1
    at = with_vectors[0].index("-o")
    checked = [*with_vectors[0][:at], "-fsyntax-only", "-Winvalid-pch", "-H"]
    told = subprocess.run(checked, capture_output=True, text=True, check=True).stderr
    assert f"! {header}.gch" in told  # g++'s word for a precompiled header that it has taken

    bytes_made = Path(f"{header}.gch").read_bytes()
    commands.clear()
    kernel_header._renew()  # as a process that knows none
    Path(f"{header}.gch").unlink()
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    kernel_header.begin(pick_vec_isa())
    assert wait_for_begun() == [header]
    assert Path(f"{header}.gch").read_bytes() == bytes_made
    assert not of_headers(commands)


def in_room(name="kernel.so"):
    return str(workroom.room() / "graph" / name)


@pytest.fixture
def made_at_once(monkeypatch, tmp_path):
    """Every header is there when it is begun."""
    header = tmp_path / "kernels.h"
    header.touch()
    monkeypatch.setattr(kernel_header, "_make", lambda command, made: made.set_result(header))
    return header


def test_the_first_few_kernels_are_compiled_without_one(unknown, made_at_once):
    found = [kernel_header._find(in_room(), HERE) for _ in range(kernel_header.DUE + 2)]
    assert found == [None] * kernel_header.DUE + [made_at_once] * 2


def test_kernels_of_a_header_that_is_begun_have_it_from_the_first_on(unknown, made_at_once):
    with kernel_header._lock:
        kernel_header._begin(HERE)
    assert kernel_header._find(in_room(), HERE) == made_at_once
    assert kernel_header._find(in_room(), "g++ -O1") is None  # others must agree in every flag


def test_kernels_of_other_backends_have_none(unknown, made_at_once, tmp_path):
    with kernel_header._lock:
        kernel_header._begin(HERE)
    assert kernel_header._find(str(tmp_path / "kernel.so"), HERE) is None


def test_a_header_that_was_removed_is_not_used(unknown, made_at_once):
    with kernel_header._lock:
        kernel_header._begin(HERE)
    made_at_once.unlink()
    assert kernel_header._find(in_room(), HERE) is None


@pytest.mark.parametrize("error", [OSError("full"), subprocess.CalledProcessError(1, "g++")])
def test_kernels_do_not_wait_for_a_header_that_cannot_be_made(unknown, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(kernel_header, "_run", fail)
    with kernel_header._lock:
        kernel_header._begin(HERE)
    assert kernel_header._find(in_room(), HERE) is None


def test_a_header_is_made_though_none_can_be_kept(unknown, monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(kernel_header, "_run", lambda *words: ran.append(words) or b"")
    monkeypatch.setattr(kernel_header, "_compress", lambda path: b"")
    monkeypatch.setattr(default_store, "headers", lambda: None)
    made: Future[Path | None] = Future()
    kernel_header._make(HERE, made)
    assert made.result().suffix == ".h"
    assert [words[1:3] for words in ran] == [("-x", "c++-header")]


def test_a_forked_child_waits_for_no_header_of_its_parent(unknown):
    kernel_header._begun[HERE] = Future()  # of a thread that a child has not
    kernel_header._renew()
    assert not kernel_header._begun


@pytest.fixture
def kernel(tmp_path):
    """What Inductor hands to the one that compiles a kernel, as far as it is looked at."""
    source = tmp_path / "kernel.main.cpp"
    source.write_text(f"\n#include <{compat.HEADER}>\n")

    class Builder:
        _compiler, _definitions_args, _cflags_args = "g++", "-D A ", "-O3 -shared "
        _include_dirs_args, _passthrough_parameters_args = "-I/here ", "-mavx2 "
        _sources_args = str(source)

        def get_target_file_path(self):
            return str(tmp_path / "kernel.so")

    return Builder()


@pytest.fixture
def compile_with(monkeypatch, tmp_path):
    """Compile in the place of Inductor's function with a header; says what was included."""
    from torch._inductor import codecache

    def compile_with(builder, failures=0):
        included = []

        def usual(lock_path, builders):
            included.append(builders[0]._include_dirs_args)
            if len(included) <= failures:
                from torch._inductor.exc import CppCompileError

                raise CppCompileError(["g++"], "no")

        asked = []

        def find(target, command):
            asked.append(command)
            return tmp_path / "kernels.h"

        monkeypatch.setattr(codecache, "_worker_compile_cpp", usual)
        compat.use_headers(find)
        codecache._worker_compile_cpp("lock", (builder,))
        return included, asked

    return compile_with


def test_a_kernel_is_compiled_with_the_header_of_its_command(kernel, compile_with, tmp_path):
    included, asked = compile_with(kernel)
    assert included == [f"-include {tmp_path}/kernels.h -I/here "]
    assert asked == ["g++ -D A -O3 -I/here -mavx2"]


def test_what_fails_with_a_header_is_compiled_without(kernel, compile_with, tmp_path):
    included, _ = compile_with(kernel, failures=1)
    assert included == [f"-include {tmp_path}/kernels.h -I/here ", "-I/here "]


def test_a_kernel_that_fails_without_one_too_raises(kernel, compile_with):
    from torch._inductor.exc import CppCompileError

    with pytest.raises(CppCompileError):
        compile_with(kernel, failures=2)


@pytest.mark.parametrize("what", ["is there", "has one", "reads another"])
def test_what_needs_no_header_is_asked_for_none(kernel, compile_with, tmp_path, what):
    if what == "is there":
        (tmp_path / "kernel.so").touch()
    elif what == "has one":
        kernel._include_dirs_args = "-include theirs.h -I/here "
    else:
        (tmp_path / "kernel.main.cpp").write_text("#include <vector>\n")
    before = kernel._include_dirs_args
    included, asked = compile_with(kernel)
    assert included == [before]
    assert not asked
