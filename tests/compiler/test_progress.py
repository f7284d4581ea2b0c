"""Lines on stderr while a compile takes long."""

import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ipex_inductor import compat
from ipex_inductor.compiler import graph_cache, progress
from ipex_inductor.config import CompileConfig
from ipex_inductor.reporting import decisions

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
ON = CompileConfig(progress=True)


class Net(torch.nn.Module):
    """One linear layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


@pytest.fixture
def graph():
    return torch.export.export(Net(), (torch.ones(2, 4),)).graph_module


LINE = Net.forward.__code__.co_firstlineno + 1
NAME = f"the graph of {Path(__file__).name}:{LINE}"


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.1)
    monkeypatch.setattr(progress, "SECOND", 0.3)
    monkeypatch.setattr(progress, "_wait", progress._Wait())
    monkeypatch.setattr(graph_cache, "why_not_kept", lambda: "")
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def compile_for(seconds, graph, config=ON, **more):
    with progress.show_progress(graph, [torch.ones(2, 4)], config, **more):
        time.sleep(seconds)


def test_a_short_compile_says_nothing_and_leaves_no_thread(graph, capsys):
    before = threading.active_count()
    for _ in range(3):
        compile_for(0.01, graph)
        time.sleep(0.01)
    time.sleep(0.4)
    assert capsys.readouterr().err == ""
    assert threading.active_count() == before


def test_a_line_says_what_is_compiled_and_that_it_is_kept(graph, capsys):
    compile_for(0.2, graph)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ipex: compiling {NAME} (cpu) takes longer than")
    assert line.endswith("; the next process will find it in the kernel cache")


def test_what_explain_compiles_is_announced_without_a_word_of_caches(graph, capsys, monkeypatch):
    """`explain` switches them off by itself; the user has no setting to change."""
    monkeypatch.setattr(graph_cache, "why_not_kept", lambda: "Inductor's fx_graph_cache is off")
    with compat.graph_caches_off():
        compile_for(0.2, graph)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("takes longer than 0 s")


def test_it_says_why_nothing_is_kept(graph, capsys, monkeypatch):
    monkeypatch.setattr(graph_cache, "why_not_kept", lambda: "the folder cannot be used")
    compile_for(0.2, graph, backward=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"compiling {NAME} (backward, cpu) takes" in line
    assert line.endswith("; the next process will compile it again, as the folder cannot be used")


def test_a_second_line_says_what_is_being_done(graph, capsys):
    compile_for(0.5, graph)
    _, line = capsys.readouterr().err.splitlines()
    assert line == f"ipex: still compiling {NAME} (cpu) after 0 s: {progress.UNKNOWN}"


def test_graphs_that_follow_each_other_are_one_wait(graph, capsys):
    for _ in range(5):
        compile_for(0.06, graph)
    assert len(capsys.readouterr().err.splitlines()) in (1, 2)


def test_after_a_pause_there_are_lines_again(graph, capsys, monkeypatch):
    monkeypatch.setattr(progress, "PAUSE", 0.05)
    for _ in range(2):
        compile_for(0.2, graph)
        time.sleep(0.1)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_block_in_a_block_says_nothing(graph, capsys):
    with progress.show_progress(graph, [], ON):
        compile_for(0.2, graph)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_threads_have_lines_of_their_own(graph, capsys):
    threads = [threading.Thread(target=compile_for, args=(0.2, graph)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_an_exception_ends_it(graph, capsys, monkeypatch):
    monkeypatch.setattr(progress, "PAUSE", 0.05)
    with pytest.raises(KeyError), progress.show_progress(graph, [], ON):
        raise KeyError
    time.sleep(0.4)
    assert capsys.readouterr().err == ""
    compile_for(0.2, graph)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("how", ["option", "log level", "rank"])
def test_it_can_be_silenced(graph, capsys, how, monkeypatch):
    config = CompileConfig(progress=how != "option")
    monkeypatch.setenv("LOCAL_RANK", "3" if how == "rank" else "0")
    before = decisions.log.level
    decisions.log.setLevel("ERROR" if how == "log level" else "WARNING")
    try:
        compile_for(0.2, graph, config)
    finally:
        decisions.log.setLevel(before)
    assert capsys.readouterr().err == ""


class Broken(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("kind", ["none", "closed", "broken"])
def test_without_stderr_nothing_breaks(graph, kind, monkeypatch):
    closed = io.StringIO()
    closed.close()
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(sys, "stderr", {"none": None, "closed": closed, "broken": Broken()}[kind])
    compile_for(0.5, graph)
    monkeypatch.undo()
    assert not failed


def test_what_is_being_done_is_read_off_the_stack(tmp_path):
    """Of the innermost file that is listed; every listed one is there."""
    package, home = Path(torch.__file__).parent, ROOT / "ipex_inductor"
    folders = [package, home, home.parent, package.parent]
    for files in progress.PHASES.values():
        for file in files:
            if file.startswith("triton/"):
                continue
            path = file.removeprefix("ipex_inductor/")
            assert any((folder / path).is_file() for folder in folders), file

    class Code:
        def __init__(self, name):
            self.co_filename = name

    class Frame:
        def __init__(self, name, back=None):
            self.f_code, self.f_back = Code(name), back

    outer = Frame("/lib/torch/_inductor/graph.py", Frame("/lib/torch/_inductor/compile_fx.py"))
    assert progress.phase(outer) == "lowering its operations"
    assert progress.phase(Frame("/lib/torch/_inductor/cpp_builder.py", outer)) == "compiling C++"
    inner = Frame("/lib/python/subprocess.py", Frame("/lib/torch/_inductor/scheduler.py", outer))
    assert progress.phase(inner) == "generating code"
    assert progress.phase(None) == progress.UNKNOWN


def test_why_the_next_process_compiles_again(monkeypatch):
    monkeypatch.undo()
    with torch._inductor.config.patch(force_disable_caches=True):
        assert "force_disable_caches" in graph_cache.why_not_kept()
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert "fx_graph_cache" in graph_cache.why_not_kept()


GRAPH = "the graph of mine.py:11"
PROGRAM = """
import torch
from ipex_inductor.compiler import progress
progress.FIRST, progress.SECOND, progress.PAUSE = 0.0, 0.05, 0.0

class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        return torch.relu(self.layer(x))

model = torch.compile(Mine(), backend="ipex")
model(torch.ones(2, 8)).sum().backward()
"""


@pytest.mark.slow
def test_a_program_is_told_of_forward_and_backward(tmp_path):
    env = {**os.environ, "IPEX_PROGRESS": "1", "PYTHONPATH": str(ROOT)}
    env |= {"IPEX_HOME": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    env.pop("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "mine.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "mine.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("ipex: ")]
    assert "compiling Mine (cpu) takes longer" in lines[0]
    assert lines[0].endswith("; the next process will find it in the kernel cache")
    assert "still compiling Mine (cpu)" in lines[1]
    assert all("Mine (" in line or f"{GRAPH} (backward, cpu)" in line for line in lines)
