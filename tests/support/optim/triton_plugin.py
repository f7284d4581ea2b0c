"""A plugin of pytest: on the CPU, steps of compiled graphs are the kernels of GPUs, interpreted.

`TRITON_INTERPRET=1 pytest -p support.optim.triton_plugin ...`; the rest of a GPU is left out: what
would be sent there stays, and every address is the host's. Numbers that tensors hold are read by
the kernels.
"""

import ctypes
from contextlib import nullcontext

import pytest
import torch

from ipex_inductor.lowerings.optimizer import step, step_cuda
from ipex_inductor.passes.optimizer.updates import Writing, dtype_name
from ipex_inductor.templates.build import cuda, gpu

DTYPES = {"i64": torch.int64, "i32": torch.int32, "fp32": torch.float32, "fp64": torch.float64}
WIDE = "tl.cast({}, tl.float64)"
BLOCK = 16  # small, so that tensors are of several


class Interpreted(cuda.Kernel):
    """A kernel as `templates.cuda` has them."""

    def __init__(self, source, name, device, problem, signature, constants, warps):
        power = "libdevice.pow(tl.cast(a, tl.float64), tl.cast(b, tl.float64))"
        assert power in source  # which the interpreter does not have
        source = source.replace(
            power, "tl.exp(tl.cast(b, tl.float64) * tl.log(tl.cast(a, tl.float64)))"
        )
        self.function, self.signature = gpu._module(source)[name], signature
        self.constants = constants

    def __call__(self, blocks, stream, arguments):
        kinds = self.signature.values()
        given = [_pointed(a, k) if "*" in k else a for a, k in zip(arguments, kinds, strict=True)]
        self.function[(blocks,)](*given, **self.constants)


def _pointed(address, kind):
    if not address:
        return torch.empty(0)
    memory = (ctypes.c_char * 8).from_address(address)
    return torch.frombuffer(memory, dtype=DTYPES[kind[1:]], count=1)


class Here:
    """As `Sent`, of what stays."""

    def __init__(self, device):
        self.known = None

    def address(self, values, stream):
        self.known = values
        return values.buffer_info()[0]


class Room:
    """As the other."""

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return len(self.held)

    def address(self, stream):
        return self.held.data_ptr()


def _chunks_of(blocks, device):
    pairs = [(row, block) for row, count in enumerate(blocks) for block in range(count)]
    return torch.tensor(pairs, dtype=torch.int32)


def _held_as(writing, number):
    return (
        dtype_name(writing.examples[number.operand]) if isinstance(number, step.HostScalar) else ""
    )


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setattr(step_cuda, "load_triton_kernel", Interpreted)
    monkeypatch.setattr(step_cuda, "Sent", Here)
    monkeypatch.setattr(step_cuda, "Room", Room)
    monkeypatch.setattr(step_cuda, "On", lambda device: nullcontext(0))
    monkeypatch.setattr(step_cuda, "chunks_of", _chunks_of)
    monkeypatch.setattr(step_cuda, "tile", lambda columns: (BLOCK, 1))
    monkeypatch.setitem(step.KINDS, "cpu", step.KINDS["cuda"])
    monkeypatch.setattr(step, "_Kernel", step_cuda.CudaKernel)
    monkeypatch.setattr(Writing, "_held_as", _held_as)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    step_cuda._kernel_or_why.cache_clear()
    yield
    step_cuda._kernel_or_why.cache_clear()
