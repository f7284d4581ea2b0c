"""Libraries that an older C library cannot load: known by what they name, and built anew."""

import os
import subprocess
import sys

import pytest
import torch

from ipex_inductor.aot_cache.digest import frame_fields
from ipex_inductor.aot_cache.graph_files import glibc, graphs, workroom

pytestmark = pytest.mark.unit

NEW = b"\x7fELF\0libc.so.6\0GLIBC_2.2.5\0GLIBC_9.99\0GLIBC_2.34\0"


def test_the_newest_version_that_a_library_names():
    assert glibc.required_version(NEW) == (9, 99)
    assert glibc.required_version(b"GLIBC_9.99\0 no table \0GLIBCXX_9.99\0") == (0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="ELF")
def test_what_is_loaded_here_can_be():
    with open(torch._C.__file__, "rb") as file:
        library = file.read()
    assert (0, 0) < glibc.required_version(library) <= glibc.running_version()
    assert glibc.why_not(library) == ""


def test_an_older_c_library_is_named(monkeypatch):
    assert "linked with glibc 9.99, running on 2." in glibc.why_not(NEW)
    monkeypatch.setattr(glibc, "running_version", lambda: None)
    assert glibc.why_not(NEW) == "linked with glibc 9.99, running on another C library"
    assert glibc.why_not(b"no library") == ""


def test_such_a_file_of_an_entry_is_not_there_and_the_others_are(tmp_path, caplog):
    blob = frame_fields({"triton/A/cuda_utils.so": NEW, "triton/A/kernel.cubin": NEW})
    for n in range(2):
        known = workroom.unpack(blob, tmp_path / str(n), graphs._is_too_new)
        assert known == {"triton/A/kernel.cubin"}
        assert {*workroom.files_in(tmp_path / str(n))} == known
    assert caplog.text.count("cuda_utils.so of an entry is built anew: linked with glibc") == 1


PLANTED = """
import ctypes, sys, tempfile
from pathlib import Path
import triton
from triton import knobs
from triton.runtime import build
from ipex_inductor.aot_cache.graph_files import graphs, workroom
from ipex_inductor.aot_cache.digest import frame_fields

SOURCE = '''
#include <Python.h>
#include <unistd.h>
static struct PyModuleDef of = {PyModuleDef_HEAD_INIT, "planted"};
PyMODINIT_FUNC PyInit_planted(void) { return getpid() ? PyModule_Create(&of) : 0; }
'''
made, folder = [], Path(tempfile.mkdtemp())
usual = build._build

def counted(*args, **kwargs):
    made.append(args[0])
    return usual(*args, **kwargs)

build._build = counted
knobs.cache.dir = str(folder / "first")
build.compile_module_from_src(SOURCE, "planted")
files = {n: (folder / "first" / n).read_bytes() for n in workroom.files_in(folder / "first")}
(name,) = files
# What an older glibc says no to: the loader finds no such version.
old = files[name].replace(b"GLIBC_2.2.5", b"GLIBC_9.9.9")
assert old != files[name]
try:
    (folder / "old.so").write_bytes(old)
    ctypes.CDLL(str(folder / "old.so"))
except OSError as error:
    print("RESULT", "GLIBC_9.9.9" in str(error))
sys.modules.pop("planted", None)
workroom.unpack(frame_fields({name: old}), folder / "user", graphs._is_too_new)
knobs.cache.dir = str(folder / "user")
build.compile_module_from_src(SOURCE, "planted")
print("RESULT", len(made), "planted" in sys.modules or "loaded")
"""


@pytest.mark.slow
def test_tritons_module_for_the_driver_is_built_anew_where_it_would_not_load(tmp_path):
    env = {n: v for n, v in os.environ.items() if not n.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", PLANTED], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert told[0] == "RESULT True"  # the loader refuses the planted one
    assert told[1].startswith("RESULT 2")
