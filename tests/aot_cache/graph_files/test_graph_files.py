"""Torch's own files under backend `ipex`: private, verified before torch looks, and never fatal."""

import ast
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ipex_inductor import compat
from ipex_inductor.aot_cache import default_store
from ipex_inductor.aot_cache.digest import frame_fields, unframe_fields
from ipex_inductor.aot_cache.entry import pack, unpack_any
from ipex_inductor.aot_cache.graph_files import graphs as cached
from ipex_inductor.aot_cache.graph_files import workroom
from ipex_inductor.compat import tries as vector_tries
from support.cache.cache_keys import key
from support.compile_processes import INDUCTOR, IPEX, TRAINED, outcome, run, start
from support.helpers import wait_for


def entries(base):
    return sorted((base / "home" / "kernels" / "1").glob("*.entry"))


def graphs(base):
    return [e for e in entries(base) if b"graph" in e.read_bytes()[60:100]]


def usual(base):
    """The files in the folder that torch uses without us."""
    (folder,) = (base / "tmp").glob("torchinductor_*") or [None]
    return sorted(p for p in folder.rglob("*") if p.is_file()) if folder else []


def traced(folder):
    """What tlparse lists of our cache."""
    return re.findall(
        r'"name": ?"(ipex_cache_\w+)"', "".join(f.read_text() for f in folder.iterdir())
    )


pytestmark = pytest.mark.usefixtures("products_known")


@pytest.fixture(scope="module")
def filled(products_known, tmp_path_factory):
    """Home and usual folder as one process leaves them, and what it told."""
    base = tmp_path_factory.mktemp("filled")
    return base, run(base, IPEX, TORCH_TRACE=str(base / "trace"))


SHIFTED = {**IPEX, "shift": 1.0}


@pytest.fixture(scope="module")
def more(filled, tmp_path_factory):
    """The same where another process adds two graphs, one for training, and what it told."""
    base = tmp_path_factory.mktemp("more") / "base"
    shutil.copytree(filled[0], base, symlinks=True)
    return base, run(base, IPEX, SHIFTED, TRAINED)


@pytest.fixture(scope="module")
def again(more, tmp_path_factory):
    """What the next process told, and its trace; what the others share it asks for first."""
    folder = tmp_path_factory.mktemp("again")
    return folder, run(more[0], SHIFTED, IPEX, TRAINED, TORCH_TRACE=str(folder))


@pytest.fixture
def base(filled, tmp_path):
    """A copy of them to spoil."""
    shutil.copytree(filled[0], tmp_path / "base", symlinks=True)
    return tmp_path / "base"


def test_the_first_process_builds_and_leaves_one_entry(filled):
    base, done = filled
    assert (outcome(done), done["aot"]) == ("miss", [0, 1])
    assert done["built"]
    assert len(graphs(base)) == 1
    assert list((base / "home" / "torch").iterdir()) == []
    assert ["INFO", "kernel cache: a graph is compiled: no entry has this graph"] in done["said"]
    assert traced(base / "trace") == ["ipex_cache_miss"]


def test_the_second_process_builds_nothing(again):
    folder, done = again
    assert traced(folder) == ["ipex_cache_hit"] * 3
    assert [outcome(done, step) for step in range(3)] == ["hit"] * 3
    assert done["aot"] == [3, 0]
    assert (done["built"], done["tried"]) == ([], [])
    assert not [text for level, text in done["said"] if level != "INFO"]


def test_the_collector_is_off_while_a_graph_is_loaded_and_on_again_then(again):
    _, done = again
    loaded = [
        on
        for name, on in zip(done["unpickled"], done["collecting"], strict=True)
        if name.endswith((".PrologueCode", ".CompiledFxGraph"))  # with packed weights, or without
    ]
    assert loaded
    assert not any(loaded)
    assert done["collects"]


def test_what_torch_gets_is_private_and_new(filled, monkeypatch, tmp_path):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(workroom, "_made", None)  # of another home, after some tests
    room = workroom.room()
    assert room.parent == tmp_path / "home" / "torch"
    assert [p.stat().st_mode & 0o777 for p in (room, room.parent, room.parent.parent)] == [
        0o700
    ] * 3


def test_nothing_of_ours_in_the_usual_folder(filled):
    """Importing Dynamo makes it; not a file in it is ours."""
    assert usual(filled[0]) == []


def test_training_hits_both_and_the_backward_leaves_nothing_behind(more, again):
    """Of graphs for inference only AOT autograd's cache is asked where that hits."""
    (base, first), (_, second) = more, again
    assert [outcome(first, step) for step in range(3)] == ["hit", "miss", "miss"]
    assert (first["aot"], first["fx"]) == ([1, 2], [0, 3])
    assert (second["aot"], second["fx"], outcome(second, 2)) == ([3, 0], [2, 0], "hit")
    assert second["built"] == []
    assert usual(base) == []
    assert "/home/torch/" not in str(first["env"])


@pytest.mark.slow
def test_inductor_keeps_its_folder(base):
    """Before, between and after compilations of ours, in one process."""
    done = run(
        base, IPEX, INDUCTOR, {**TRAINED, "shift": 2.0}, {**INDUCTOR, "shift": 2.0, "grad": True}
    )
    assert {p.relative_to(base / "tmp").parts[1] for p in usual(base)} >= {"fxgraph", "aotautograd"}
    assert done["env"]["ipex"] == done["env"]["inductor"]
    assert done["env"]["inductor"][0].startswith(str(base / "tmp" / "torchinductor_"))
    again = run(base, INDUCTOR, {**INDUCTOR, "shift": 2.0, "grad": True})
    kernels = [c for c in again["built"] if "main.cpp" in str(c)]  # beside trials of instructions
    assert (again["aot"], kernels) == ([2, 0], [])
    assert len(graphs(base)) == 2


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size * 2 // 3)


def empty(path):
    path.write_bytes(b"")


def dumps(value):
    import pickle

    return pickle.dumps(value)


OPEN = "io.open"  # what a hostile pickle is made of, and no other


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def hostile(path):
    path.write_bytes(dumps(Hostile(path.parent / "executed")))


# 16 s each. Every length and bit of an entry: tests/aot_cache/test_entry_bits.py.
ALSO = [pytest.param(spoil, marks=pytest.mark.slow) for spoil in (flip, cut, empty)]


@pytest.mark.parametrize("spoil", [hostile, *ALSO], ids=lambda f: f.__name__)
def test_a_spoiled_entry_is_said_once_rebuilt_once_and_never_loaded(base, spoil):
    (path,) = graphs(base)
    spoil(path)
    done = run(base, IPEX, IPEX)
    assert ([outcome(done, step) for step in range(2)], done["aot"]) == (["miss", "hit"], [1, 1])
    assert len(done["built"]) >= 1
    warnings = [text for level, text in done["said"] if level == "WARNING"]
    assert len(warnings) == 1
    assert "is not used" in warnings[0]
    assert OPEN not in done["unpickled"]
    assert not (path.parent / "executed").exists()
    assert unpack_any(path.read_bytes()), "it is whole, and on the disk"


@pytest.mark.slow  # 25 s; that torch's folder is private, and no such entry is loaded: above
def test_hostile_pickles_wherever_torch_would_look(base):
    """R8: at every name that the graph's files have, in the usual folder and in other rooms.

    Neither run nor looked into: unpickling one would ask for `open` first.
    """
    (path,) = graphs(base)
    names = unframe_fields(unpack_any(path.read_bytes())[1].blob)
    pickles = [name for name in names if name.startswith(("fxgraph/", "aotautograd/"))]
    assert pickles
    marker = base / "executed"
    source = f"open({str(marker)!r}, 'w')\n"
    (folder,) = (base / "tmp").glob("torchinductor_*")
    for room in (folder, base / "home" / "torch", base / "home" / "torch" / path.stem[:32]):
        for name in names:
            target = room / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in pickles:
                target.write_bytes(dumps(Hostile(marker)))
            else:
                target.write_text(source)
    planted = usual(base)
    done = run(base, IPEX)
    assert (outcome(done), done["aot"], done["built"]) == ("hit", [1, 0], [])
    assert OPEN not in done["unpickled"]
    assert any(name.startswith("ipex_inductor.") for name in done["unpickled"])  # our own entry
    assert not marker.exists()
    path.unlink()
    done = run(base, IPEX)
    assert (outcome(done), done["aot"]) == ("miss", [0, 1])
    assert OPEN not in done["unpickled"]
    assert not marker.exists()
    assert usual(base) == planted


def other_source(path):
    """Have an entry hold other code than torch generates, whole and with a right digest."""
    framed, found = unpack_any(path.read_bytes())
    files = unframe_fields(found.blob)
    (name,) = [name for name in files if name.endswith(".cpp") and b"1.5" in files[name]]
    files[name] = files[name].replace(b"1.5", b"2.5")
    path.write_bytes(pack(framed, dict(found.meta), frame_fields(files)))


VERIFY = {"IPEX_AOT_VERIFY": "1"}


@pytest.mark.slow  # 38 s
def test_a_hit_is_compiled_again_and_compared_when_asked(base):
    (path,) = graphs(base)
    before = path.read_bytes()
    done = run(base, {**IPEX, "shift": 1.0}, **VERIFY)  # another graph: what is numbered differs
    assert outcome(done) == "miss"
    done = run(base, {**IPEX, "shift": 1.0}, IPEX, **VERIFY)
    assert (outcome(done, 0), outcome(done, 1)) == ("same", "same")
    assert done["aot"] == [0, 2]
    assert done["built"]
    assert not [text for level, text in done["said"] if level == "WARNING"]
    other_source(path)
    changed = path.read_bytes()
    done = run(base, IPEX, **VERIFY)
    assert outcome(done) == "different"
    (said,) = [text for level, text in done["said"] if level == "WARNING"]
    assert path.stem[:12] in said
    assert "1.5" in said.partition(" here, ")[0]
    assert "2.5" in said.partition(" here, ")[2]
    assert before != changed == path.read_bytes()  # it stays, to be looked at


@pytest.mark.slow
def test_a_backward_is_compared_too(base):
    run(base, TRAINED)
    done = run(base, TRAINED, **VERIFY)
    assert (outcome(done), done["aot"]) == ("same", [0, 1])
    told = [text for _, text in done["said"] if "comes out the same" in text]
    assert len(told) == 2
    assert told[0] != told[1]  # more sources


MODEL = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x.sin() + 1.5
def make():
    return Model(), (torch.ones(4, 16),)
"""


@pytest.mark.slow  # 34 seconds; what it runs is compared in the test above
def test_verify_recompile_says_what_comes_out_otherwise(tmp_path):
    (tmp_path / "own_model.py").write_text(MODEL)
    env = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    env |= {"IPEX_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}

    def verified():
        command = "cache", "verify", "--recompile", "own_model:make", "--json"
        done = subprocess.run(
            [sys.executable, "-m", "ipex_inductor", *command],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.stdout, done.stderr
        found = json.loads(done.stdout)
        assert found["code"] == done.returncode
        return found

    first = verified()
    assert (first["code"], first["compared"], first["missing"]) == (
        8,
        [],
        ["no entry has this graph"],
    )
    (path,) = graphs(tmp_path)
    again = verified()
    assert (again["code"], again["missing"]) == (0, [])
    assert again["compared"] == [{"entry": path.stem, "sources": 3, "differing": []}]
    other_source(path)
    other = verified()
    assert other["code"] == 4
    assert "1.5" in other["compared"][0]["differing"][0]


EXPLAIN = """
import sys, torch, ipex_inductor
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()), torch.randn(4, 16)
def told():
    (graph,) = ipex_inductor.explain(model, x).graphs
    return [(row.subject, row.reason) for row in graph.rows if row.kind == "cache"]
def run():
    torch.compile(model, backend="ipex")(x)
    events = ipex_inductor.reporting.decisions.reports()[-1].events
    return [(e.subject, e.reason) for e in events if e.kind == "cache"]
with torch.no_grad():
    print([f() for f in ([told, told, run, told] if sys.argv[1] == "cold" else [told, run])])
"""


@pytest.mark.slow  # 40 s
@pytest.mark.usefixtures("instructions_known")
def test_explain_says_what_a_run_would_find_and_fills_nothing(tmp_path):
    def outcomes(state):
        unset = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        env = {k: v for k, v in os.environ.items() if k not in unset}
        env |= {"IPEX_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
        env |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
        command = [sys.executable, "-c", EXPLAIN, state]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = ast.literal_eval(done.stdout)
        assert [len(each) for each in found] == [1] * len(found)
        return [each[0] for each in found]

    missed = ("miss", "no entry has this graph")
    assert outcomes("cold") == [missed] * 3 + [("hit", "compiled before by this process")]
    told, ran = outcomes("warm")
    assert (told[0], told) == ("hit", ran)
    assert "all verified" in told[1]


@pytest.mark.slow  # 25 seconds; keys of other fields are compared above
def test_where_a_model_stands_is_not_in_the_key(tmp_path):
    """Built in one folder, unpacked in another, edited above: the same graph."""

    def outcomes(home, text):
        home.mkdir()
        (home / "own_model.py").write_text(text)
        env = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
        env |= {"IPEX_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
        env |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
        command = [sys.executable, "-c", MOVED]
        done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert outcomes(tmp_path / "one", MODEL) == "miss"
    assert outcomes(tmp_path / "two", "# Edited\n" + MODEL) == "hit"


MOVED = """
import torch, own_model, ipex_inductor
model, inputs = own_model.make()
with torch.no_grad():
    torch.compile(model, backend="ipex")(*inputs)
(report,) = ipex_inductor.reporting.decisions.reports()
print(*(event.subject for event in report.events if event.kind == "cache"))
"""


@pytest.mark.slow  # 38 s; kills: test_graph_single_flight.py, test_store_stress.py
def test_a_killed_compile_leaves_nothing_that_is_used(base):
    (path,) = graphs(base)
    path.unlink()
    process = start(base, IPEX)
    wait_for(lambda: list((base / "home" / "torch").glob("*/*/*/*.cpp")))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert graphs(base) == []
    done = run(base, IPEX)
    assert (outcome(done), done["aot"]) == ("miss", [0, 1])
    assert outcome(run(base, IPEX)) == "hit"


def test_a_kernel_that_two_graphs_share_is_in_both_entries(more, again):
    """Torch does not build what the process has loaded; the entry must have it all the same."""
    (_, loaded), (_, alone) = more, again
    assert [outcome(loaded, step) for step in range(2)] == ["hit", "miss"]
    assert (outcome(alone), alone["built"]) == ("hit", [])


@pytest.mark.slow
def test_a_folder_that_the_user_named_is_torchs(base, tmp_path):
    named = tmp_path / "named"
    done = run(base, {**IPEX, "shift": 1.0}, TORCHINDUCTOR_CACHE_DIR=str(named))
    assert (named / "fxgraph").is_dir()
    assert len(graphs(base)) == 1
    assert [text for level, text in done["said"] if str(named) in text and level == "INFO"]
    assert done["env"]["ipex"][0] == str(named)


@pytest.mark.slow
def test_a_home_that_others_can_write_is_not_used(base):
    (base / "home").chmod(0o777)
    done = run(base, IPEX)
    assert (outcome(done), done["aot"]) == ("miss", [0, 1])
    assert len([text for _, text in done["said"] if "what is compiled is not kept" in text]) == 1
    assert usual(base) == []


@pytest.mark.parametrize("name", ["my home", "o'home"])
def test_where_torchs_compiler_cannot_be_told_of_the_home_it_works_elsewhere(
    tmp_path, monkeypatch, name
):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / name))
    monkeypatch.setattr(workroom, "_made", None)
    room = workroom.room()
    assert not room.is_relative_to(tmp_path)
    assert room.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_home_with_a_space_keeps_what_is_compiled(tmp_path):
    home = {"IPEX_HOME": str(tmp_path / "my home")}
    cold, warm = (run(tmp_path / "base", IPEX, **home) for _ in range(2))
    assert [(outcome(done), done["aot"]) for done in (cold, warm)] == [
        ("miss", [0, 1]),
        ("hit", [1, 0]),
    ]
    assert len([text for _, text in warm["said"] if "cannot be directed" in text]) == 1
    assert usual(tmp_path / "base") == []


@pytest.mark.slow  # 28 s; options, sources and devices that differ: test_prebuild_gpu.py
def test_a_miss_names_what_differs(base):
    options = {"rules": "-linear+gelu"}, {"max_fusion_size": 7}
    steps = [{**IPEX, "options": {"strict": True, **each}} for each in options]
    done = run(base, *steps, {**IPEX, "shift": 2.0})
    first, second, third = [text for _, text in done["said"] if "a graph is compiled" in text]
    assert "rules_off" in first
    assert "max_fusion_size=7 here, unset there" in second
    _, differs = third.split("no entry has this graph; the most similar one differs first in: ")
    here, there = differs.removesuffix(" there").split(" here, ")
    assert ".t()" in here
    assert there.startswith("return")


# --- in this process


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "a//x", "a/./x", "x\0y", "/".join("abcdefghi")]
)
def test_names_that_lead_out_are_refused_before_anything_is_written(tmp_path, name):
    blob = frame_fields({"good": b"1", name: b"2"})
    with pytest.raises(ValueError, match=r"is no name|too deep"):
        workroom.unpack(blob, tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_files_come_back_as_they_were(tmp_path):
    (tmp_path / "one" / "deep").mkdir(parents=True)
    (tmp_path / "one" / "deep" / "a.so").write_bytes(bytes(range(256)))
    (tmp_path / "one" / "b.py").write_text("1")
    for passing in ("b.lock", ".1.2.tmp"):
        (tmp_path / "one" / passing).write_text("x")
    blob = workroom.pack_files(tmp_path / "one")
    assert workroom.unpack(blob, tmp_path / "two") == {"deep/a.so", "b.py"}
    assert (tmp_path / "two" / "deep" / "a.so").read_bytes() == bytes(range(256))
    carried = workroom.compress_files(blob)
    assert workroom.unpack_files(carried) == workroom.unpack_files(blob)
    with pytest.raises(ValueError, match="not what was packed"):
        workroom.unpack(carried[:-1], tmp_path / "three")
    assert not (tmp_path / "three").exists()


def test_what_is_there_stays_as_it_is(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "loaded").write_text("mine")
    blob = frame_fields({"loaded": b"theirs", "deep/new": b"1"})
    assert workroom.unpack(blob, tmp_path / "one") == {"loaded", "deep/new"}
    assert (tmp_path / "one" / "loaded").read_text() == "mine"
    assert (tmp_path / "one" / "deep" / "new").read_text() == "1"


def test_triton_finds_its_files_where_they_came_to(tmp_path, monkeypatch):
    """Its lists name them by where they were; 3.6 and 3.9 compile again where one is not there."""
    cache = pytest.importorskip("triton.runtime.cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "one" / "triton"))
    made = cache.get_cache_manager("ab")
    files = {name: made.put(b"1", name) for name in ("kernel.cubin", "kernel.json")}
    made.put_group("kernel.json", files)
    workroom.unpack(workroom.pack_files(tmp_path / "one"), tmp_path / "two")
    shutil.rmtree(tmp_path / "one")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "two" / "triton"))
    found = cache.get_cache_manager("ab").get_group("kernel.json")
    assert found == {n: p.replace("/one/", "/two/") for n, p in files.items()}


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"child_paths": 1}', b"\xff"])
def test_what_is_no_list_of_tritons_stays_as_it_is(tmp_path, data):
    workroom.unpack(frame_fields({"a/__grp__x": data}), tmp_path / "one")
    assert (tmp_path / "one" / "a" / "__grp__x").read_bytes() == data


@pytest.mark.parametrize("built", [{}, {"fxgraph/a": b"pickle"}])
def test_an_entry_without_a_source_to_compare_is_not_called_the_same(tmp_path, monkeypatch, built):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    monkeypatch.setattr(workroom, "_made", None)
    monkeypatch.setattr(cached, "compared", [])
    default_store.store().put(key(0), {}, frame_fields({"a.py": b"1"}))
    monkeypatch.setenv("IPEX_AOT_VERIFY", "1")
    files = cached.GraphFiles(key(0))
    for name, data in built.items():
        (files.folder / name).parent.mkdir()
        (files.folder / name).write_bytes(data)
    files.keep()
    assert (files.outcome, files.reason) == ("nothing to compare", "torch generated no source")
    assert cached.compared == []


def test_rooms_of_the_dead_are_reaped_and_those_of_the_living_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    monkeypatch.setattr(workroom, "_made", None)
    mine = workroom.room()
    dead, young = mine.parent / "dead", mine.parent / "young"
    for room in (dead, young):
        room.mkdir()
        (room / ".held").touch()
    for room in (dead, mine):
        os.utime(room, (1, 1))
    monkeypatch.setattr(workroom, "_made", None)
    other = workroom.room()
    assert set(mine.parent.iterdir()) == {mine, young, other}


def test_compilations_that_overlap_leave_the_environment_as_it_was(tmp_path, monkeypatch):
    from torch._inductor.cpu_vec_isa import VecISA

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/before")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/users")
    tried = VecISA.check_build
    first = compat.cache_folder(tmp_path / "a", dict)
    second = compat.cache_folder(tmp_path / "b", dict)
    first.__enter__()
    assert compat.named_folder() == "/before"
    second.__enter__()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "b")
    first.__exit__(None, None, None)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "b")
    assert os.environ["TRITON_CACHE_DIR"] == "/users"
    second.__exit__(None, None, None)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/before"
    assert VecISA.check_build is tried


def test_vector_checks_are_asked_once(tmp_path, monkeypatch):
    from torch._inductor.cpu_vec_isa import VecAVX2, VecISA

    asked, answers = [], {}
    monkeypatch.setattr(VecISA, "check_build", lambda isa, code: asked.append(code) or False)
    for _ in range(2):
        with compat.cache_folder(tmp_path, lambda: answers):
            assert VecAVX2().check_build("code") is False
    assert asked == ["code"]
    assert list(answers.values()) == [False]


@pytest.mark.parametrize("can", [True, False])
def test_what_compiles_for_more_vectors_is_not_tried_for_fewer(tmp_path, monkeypatch, can):
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, VecAVX512VNNI, VecISA

    asked, answers, kinds = [], {}, (VecAVX512VNNI, VecAVX512, VecAVX2)
    monkeypatch.setattr(VecISA, "check_build", lambda isa, code: asked.append(type(isa)) or can)
    with compat.cache_folder(tmp_path, lambda: answers):
        assert [kind().check_build("code") for kind in kinds] == [can] * 3
    assert asked == ([VecAVX512VNNI, VecAVX2] if can else [*kinds])
    assert len(answers) == 3


def test_a_kind_of_vectors_has_its_flags_once_it_is_made(tmp_path, monkeypatch):
    """As SVE's from torch 2.13 on, which other CPUs compile nothing for."""
    from torch._inductor import cpu_vec_isa

    class VecMade(cpu_vec_isa.VecISA):
        def __init__(self):
            self._arch_flags = "-march=made"

    monkeypatch.setattr(cpu_vec_isa, "VecMade", VecMade, raising=False)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, code: True)
    answers = {}
    with compat.cache_folder(tmp_path, lambda: answers):
        assert VecMade().check_build("code")
    assert [*answers] == ["VecMade -march=made\ncode"]


@pytest.fixture
def tries(monkeypatch):
    """What is tried of vectors, by kind and thread; this process knows nothing of them yet."""
    from torch._inductor import cpu_vec_isa

    asked = []
    monkeypatch.setattr(vector_tries, "_tried", False)

    def check_build(isa, code):
        asked.append((type(isa).__name__, threading.current_thread().name.rpartition("_")[0]))
        return False

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", functools.cache(list))
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512"])
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    return asked


def test_vectors_are_tried_while_a_graph_is_traced(tries):
    with compat.vectors_tried():
        wait_for(lambda: len(tries) == 2)
    assert tries == [("VecAVX512", "ipex vectors"), ("VecAVX2", "ipex vectors")]


def test_what_this_process_knows_of_vectors_is_not_tried(tries):
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list()
    with compat.vectors_tried():
        time.sleep(0.1)
    assert not tries


def test_what_the_best_vectors_are_for_begins_as_soon_as_they_are_tried(tries, monkeypatch):
    from torch._inductor import cpu_vec_isa

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, code: True)
    begun = []
    with compat.vectors_tried(begun.append):
        wait_for(lambda: begun)
    assert [type(isa).__name__ for isa in begun] == ["VecAVX512"]


def test_what_the_best_vectors_are_for_begins_at_once_where_they_are_known(tries, monkeypatch):
    from torch._inductor import cpu_vec_isa

    known = cpu_vec_isa.VecAVX2()
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", functools.cache(lambda: [known]))
    cpu_vec_isa.valid_vec_isa_list()
    begun = []
    with compat.vectors_tried(begun.append):
        assert begun == [known]
    assert not tries


@pytest.mark.slow
def test_a_bundle_of_another_machine_spares_the_first_process_of_this_one(filled, tmp_path):
    """Pack and sign what one home has; an empty one that trusts the key builds nothing."""

    def cache(home, *args):
        command = [sys.executable, "-m", "ipex_inductor", "cache", *map(str, args)]
        env = os.environ | {"IPEX_HOME": str(home)}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    there, here, bundle = filled[0] / "home", tmp_path / "here", tmp_path / "graphs.bundle"
    cache(there, "trust", "new", "builder", "--into", tmp_path)
    cache(there, "pack", bundle, "--key", tmp_path / "builder.key")
    unknown = run(here, IPEX, IPEX_AOT_BUNDLES=str(bundle))
    assert outcome(unknown) == "miss"
    assert unknown["built"]
    assert any("a bundle of IPEX_AOT_BUNDLES is not used" in line for _, line in unknown["said"])
    shutil.rmtree(here)
    cache(here / "home", "trust", "add", "builder", tmp_path / "builder.pub")
    served = run(here, IPEX, IPEX_AOT_BUNDLES=str(bundle))
    assert outcome(served) == "hit"
    assert (served["built"], served["tried"], served["aot"]) == ([], [], [1, 0])
    ((_, reason),) = served["outcomes"][0]
    assert f"all verified, from the bundle {bundle} ('graphs', serial " in reason
    assert ", signed by builder (" in reason
    assert graphs(here) == []  # it is read where it lies


LATE = """
import torch._inductor.async_compile as compilers
from ipex_inductor.aot_cache.graph_files import workroom

room = workroom.room()

class Pool:
    def shutdown(self):
        room.mkdir(exist_ok=True)
        (room / "late").touch()

compilers._pool_set.add(Pool())
print(room)
"""


def test_torchs_compilers_end_before_their_folder_goes(tmp_path):
    env = {**os.environ, "IPEX_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LATE], env=env, capture_output=True, text=True)
    assert not Path(done.stdout.strip()).exists()
    assert done.stderr == ""
