"""The kernels that read gradients once: compiled for GPUs that are not here, and interpreted."""

import os
import subprocess
import sys
from itertools import product

import pytest

from ipex_inductor.target import described
from ipex_inductor.templates.gpu import binary
from ipex_inductor.templates.norm_triton import PARTS, parts_source, total_signature, total_source

DTYPES = ("float32", "bfloat16", "float16", "float64")


SLOW = [
    pytest.param(*both, marks=pytest.mark.slow)
    for both in product(DTYPES, ("a100-80gb", "h200", "b200", "mi300x"))
]


@pytest.mark.parametrize(("dtype", "gpu"), [("float32", "h200"), ("float16", "a100-80gb"), *SLOW])
def test_kernels_compile_where_there_is_no_gpu(dtype, gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    constants = {"ALIGNED": 16, "BLOCK": 2048, "TURNS": 8}
    for squares, looks in ((True, True), (True, False), (False, True)):
        problem = (("made for", f"{dtype} {squares} {looks}"),)
        source = parts_source(dtype, squares, looks)
        made = binary(source, "parts", described(gpu), problem, PARTS, constants)
        assert made.blob[:4] == b"\x7fELF"
    types = total_signature(dtype)
    made = binary(total_source(dtype), "total", described(gpu), (), types, {"BLOCK": 2048})
    assert made.blob[:4] == b"\x7fELF"


# All of `Reading` but the launches: in place of a GPU, Triton's interpreter.
INTERPRETED = """
import contextlib, gc, math
from unittest import mock
import numpy
import torch
from ipex_inductor.optim import norms
from ipex_inductor.optim.look import _in_python
from ipex_inductor.templates.gpu import _module

numpy.seterr(over="ignore")
norms.BLOCK, norms.TURNS = 32, 4
norms.CHUNK = norms.BLOCK * norms.TURNS

def loaded(source, name, device, problem, types, constants, warps):
    kernel, pointers = _module(source)[name], [t.startswith("*") for t in types.values()]
    def launch(blocks, stream, arguments):
        pairs = zip(arguments, pointers, strict=True)
        made = [memory(a) if is_pointer else a for a, is_pointer in pairs]
        kernel[(blocks,)](*made, **constants)
    return launch

def memory(address):
    # The tensor there; for 0 one that nobody reads or writes.
    if not address:
        return torch.zeros(1)
    for t in tables + [t for t in gc.get_objects() if type(t) is torch.Tensor]:
        begin = t.data_ptr()
        if begin and begin <= address < begin + t.numel() * t.element_size():
            return t.view(-1)[(address - begin) // t.element_size():]
    raise LookupError(address)

tables = []

class Sent:
    def __init__(self, device):
        pass
    def address(self, values, stream):
        tables.append(torch.frombuffer(values, dtype=torch.int64))
        return tables[-1].data_ptr()

def chunks_of(blocks, device):
    chunks = [[r, b] for r, count in enumerate(blocks) for b in range(count)]
    return torch.tensor(chunks, dtype=torch.int32).reshape(-1, 2)

stream = mock.Mock(cuda_stream=0)
for name, value in dict(loaded=loaded, Sent=Sent, chunks_of=chunks_of).items():
    setattr(norms, name, value)
torch.cuda.device = lambda _: contextlib.nullcontext()
torch.cuda.current_stream = lambda: stream

torch.manual_seed(0)
SIZES, CPU = (1, 64, 129, 0, 203, 1000), torch.device("cpu")
LARGEST = {dtype: torch.finfo(getattr(torch, dtype)).max for dtype in %r}
for dtype in LARGEST:
    for planted in (None, math.inf, math.nan, LARGEST[dtype]) if dtype == "float32" else (None,):
        grads = [torch.randn(n).to(getattr(torch, dtype)) for n in SIZES]
        grads.append(torch.randn(77)[1:] if dtype == "float16" else torch.randn(3))
        if planted is not None:
            grads[5][999] = planted
        tables.clear()
        reading = norms.Reading(grads, CPU)
        addresses = norms.array("q", (t.data_ptr() for t in grads))
        scale = torch.tensor(1024.0)
        found, looked = torch.zeros(()), torch.zeros(())
        norm, factor = reading.clipped(addresses, 0.01, scale, found)
        reading.look(addresses, looked)
        wanted = torch.nn.utils.get_total_norm([t.double() / 1024 for t in grads])
        finite = planted in (None, LARGEST[dtype])
        assert found == looked == float(not finite), (dtype, planted, found, looked)
        if finite and planted and dtype != "float16":
            wanted = torch.tensor(math.inf)  # of finite numbers: so says torch, in their precision
        # fp32 sums of 128 squares, then fp64's: some roundings of fp32.
        assert norm.dtype == (torch.float64 if dtype == "float64" else torch.float32)
        close = {"atol": 0, "equal_nan": True}
        torch.testing.assert_close(norm.double(), wanted.double(), rtol=1e-6, **close)
        clipped = (0.01 / (norm.double() + 1e-6)).clamp(max=1.0)
        torch.testing.assert_close(factor, clipped, rtol=1e-15, **close)
        again = reading.clipped(addresses, 1e30, None, None)
        whole = torch.nn.utils.get_total_norm([t.double() for t in grads])
        if planted is None:
            torch.testing.assert_close(again.norm.double(), whole, rtol=1e-6, atol=0)
            assert again.factor == 1
        print(dtype, planted)
"""


def test_a_reading_is_torchs(tmp_path):
    """Norms and judgements, interpreted on the CPU, of several dtypes and alignments in one."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    code = INTERPRETED % (DTYPES,)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 3 + len(DTYPES)
