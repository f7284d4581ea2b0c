"""The kernels that read gradients once: compiled for GPUs that are not here, and interpreted."""

import os
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from ipex_inductor.optim import norms
from ipex_inductor.target.device import find_target
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.build.gpu import binary
from ipex_inductor.templates.optimizer.norm_triton import parts_signature, parts_source
from ipex_inductor.templates.optimizer.step import StepKernel

pytestmark = pytest.mark.unit

DTYPES = ("float32", "bfloat16", "float16", "float64")


SLOW = [
    pytest.param(*both, None, marks=pytest.mark.slow)
    for both in product(DTYPES, ("a100-80gb", "h200", "b200", "mi300x"))
]


# With a step in passing every second way to read on one GPU, and slowly the others on another.
SOME = [
    ("float32", "h200", 0),
    pytest.param("float16", "a100-80gb", 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("dtype", "gpu", "half"), [*SOME, *SLOW])
def test_kernels_compile_where_there_is_no_gpu(dtype, gpu, half, tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    constants = {"ALIGNED": 16, "BLOCK": 2048, "TURNS": 8, "ROWS": 256}
    adam = StepKernel("AdamW", ("weight_decay",), dtype, "", dtype, (dtype,) * 2, "float32", True)
    wide = "float64" if dtype == "float64" else "float32"
    ways = [*product((None, adam), ((True, True), (True, False), (False, True)))]
    for kernel, (squares, looks) in ways if half is None else ways[half::2]:
        problem = (("made for", f"{dtype} {squares} {looks} {kernel}"),)
        source = parts_source(dtype, wide, squares, looks, kernel)
        types = parts_signature(wide, squares, kernel)
        options = {"num_warps": 8, "maxnreg": 80}
        made = binary(source, "parts", find_target(gpu), problem, types, constants, options)
        assert made.blob[:4] == b"\x7fELF"


# All of `Reading` but the launches: in place of a GPU, Triton's interpreter.
INTERPRETED = """
import contextlib, gc, math, sys
from functools import partial
from itertools import product
import numpy
import torch
from ipex_inductor.optim import Lamb, Lars, norms
from ipex_inductor.optim.launching import launch_groups as batches
from ipex_inductor.optim.launching import launch_groups_cuda as batches_cuda
from ipex_inductor.templates.build import cuda, gpu
from ipex_inductor.templates.optimizer.step import StepKernel

numpy.seterr(over="ignore")
gc.freeze()  # what is imported: `memory` looks through the rest at each launch
norms.BLOCK, norms.TURNS, norms.ROWS = 32, 4, 4
norms.CHUNK = norms.BLOCK * norms.TURNS
launched = []

def loaded(source, name, device, problem, types, constants, warps, registers=None):
    power = "libdevice.pow(tl.cast(a, tl.float64), tl.cast(b, tl.float64))"
    here = "tl.exp(tl.cast(b, tl.float64) * tl.log(tl.cast(a, tl.float64)))"  # of the interpreter
    source = source.replace(power, here)
    kernel, pointers = gpu._module(source)[name], [t.startswith("*") for t in types.values()]
    def launch(blocks, stream, arguments):
        launched.append(name)
        pairs = zip(arguments, pointers, strict=True)
        made = [memory(a) if is_pointer else a for a, is_pointer in pairs]
        kernel[(blocks,)](*made, **constants)
    launch.launch = lambda *given: cuda.Launch(0, (), {}, ())  # nothing is launched again
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
        dtype = torch.float64 if values.typecode == "d" else torch.int64
        tables.append(torch.frombuffer(values, dtype=dtype))
        return tables[-1].data_ptr()

class Room:
    def __init__(self, held):
        self.held = held
    def __len__(self):
        return len(self.held)
    def address(self, stream):
        return self.held.data_ptr()

def chunks_of(blocks, device):
    chunks = [[r, b] for r, count in enumerate(blocks) for b in range(count)]
    return torch.tensor(chunks, dtype=torch.int32).reshape(-1, 2)

def turns_of(blocks, device):
    chunks = chunks_of(blocks, device)
    return torch.cat((chunks, chunks * torch.tensor([1, -1]) - torch.tensor([0, 1])))

def on(device):
    return contextlib.nullcontext(0)

torch.cuda.is_current_stream_capturing = lambda: False
batches_cuda.turns_of = turns_of
given = dict(load_triton_kernel=loaded, Sent=Sent, Room=Room, On=on, chunks_of=chunks_of)
for name, value in given.items():
    setattr(norms, name, value)
    setattr(batches_cuda, name, value)

torch.manual_seed(0)
EVERY, CPU = sys.argv[1:] == ["every"], torch.device("cpu")
SIZES = (1, 64, 129, 0, 203, 1000 if EVERY else 300)
LARGEST = {dtype: torch.finfo(getattr(torch, dtype)).max for dtype in %r}
PLANTED = None, math.inf, math.nan, LARGEST["float32"]
READ = [("float32", planted) for planted in PLANTED] + [(dtype, None) for dtype in [*LARGEST][1:]]

def read(reading, addresses, clip, divisor, looks, scalars=None, found=None):
    clipped = reading.allocate_clip() if clip else None
    found = reading.allocate_flag() if looks else found
    reading.run(addresses, clip, divisor, clipped, found, looks, scalars)
    assert not reading._counters.held.any()  # ready for the next launch, and for a graph's replay
    return clipped, found

for dtype, planted in READ if EVERY else READ[:2] + READ[3:]:
    grads = [torch.randn(n).to(getattr(torch, dtype)) for n in SIZES]
    grads.append(torch.randn(77)[1:] if dtype == "float16" else torch.randn(3))
    if planted is not None:
        grads[5][-1] = planted
    tables.clear()
    launched.clear()
    reading = norms.Reading(grads, CPU)
    addresses = norms.array("q", (t.data_ptr() for t in grads))
    scale = torch.tensor(1024.0)
    (norm, factor), found = read(reading, addresses, 0.01, scale, True)
    _, looked = read(reading, addresses, None, scale, True)
    # One launch for each dtype and alignment, and none beside.
    assert launched == ["parts"] * 2 * (1 if dtype == "float32" else 2), launched
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
    again, _ = read(reading, addresses, 1e30, None, False)
    whole = torch.nn.utils.get_total_norm([t.double() for t in grads])
    if planted is None:
        torch.testing.assert_close(again.norm.double(), whole, rtol=1e-6, atol=0)
        assert again.factor == 1

    print(dtype, planted)
    if not EVERY and (dtype, planted) not in (("float32", math.inf), ("float16", None)):
        continue
    # The scalars of a step in passing are those of a launch of their own, to the bit.
    kernel = StepKernel("AdamW", ("decoupled_weight_decay", "weight_decay"), "float32", "",
                        "float32", ("float32", "float32"), "float32", True)
    made, columns = [], [torch.ones(5) for _ in range(4)]
    for apart in (True, False):
        steps = [torch.tensor(float(n)) for n in range(9)]
        batch = batches_cuda.CountingBatch(kernel, CPU, True)
        for n, step in enumerate(steps):
            batch.add([t.data_ptr() for t in columns], 5, step, False, n %% 2)
        groups = [dict(lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
                  for lr in (0.1, torch.tensor(0.3))]
        batch.prepare()
        for looks in (True, False):
            told = torch.tensor(float(not finite))
            one = norms.Read.__new__(norms.Read)
            one.clip, one.clipped = 0.01, reading.allocate_clip()
            one.found_inf = reading.allocate_flag() if looks else None
            one._reading, one._divisor, one._addresses = reading, scale, addresses
            one._done = False
            around = batches.Scale(1.0, one.clipped.factor, scale, told, one)
            if apart:
                around.launch_reading()
            launched.clear()
            batch.run(batch.numbers(groups, around), around)
            parts = 1 if dtype == "float32" else 2
            assert launched == (["scalars", "step"] if apart else ["parts"] * parts + ["step"])
            made.append((batch._table.held.clone(), torch.stack(steps), one.clipped.factor))
            assert one.found_inf in (None, told)
    torch.testing.assert_close(made[:2], made[2:], rtol=0, atol=0, equal_nan=True)
    assert made[1][1].tolist() == [n + 2.0 * finite for n in range(9)]

reading = norms.Reading([torch.zeros(0), torch.zeros(0)], CPU)  # of nothing somebody says so, too
(norm, factor), found = read(reading, norms.array("q", (0, 0)), 0.5, None, True)
assert (norm, factor, found) == (0, 1, 0)

# Norms of tensors, of shards too: where the device counts steps, which changes nothing if told so,
# where the host does, and where it tells the device. There rates are, in fp64 and in fp32.
RATES = {"counts": torch.float64, "is told": torch.float32}
for (make, flags, counted), sharded, there in product((
    (partial(Lamb, lr=0.01, weight_decay=0.1), (), "float32"),
    (partial(Lars, lr=0.1, momentum=0.9, weight_decay=0.1, epsilon=1e-3), ("lars", "momentum"), ""),
), (False, True), (None, "counts", "is told")):
    if there == "is told" and not counted:
        continue
    if not EVERY and (sharded == bool(there)) == bool(flags):
        continue
    theirs = [torch.nn.Parameter(torch.randn(n)) for n in SIZES]
    reference, count = make(theirs), 2 if counted else 1
    kernel = StepKernel(make.func.__name__, (*flags, "weight_decay"), "float32", "", "float32",
                        ("float32",) * count, counted, True, sharded=sharded)
    if there:
        far = 0.0 if there == "is told" else None
        batch = batches_cuda.CountingBatch(kernel, CPU, True, far)
    else:
        batch = batches_cuda.CudaBatch(kernel, CPU, True, 0, 0.0 if counted else 1.0)
    ours = [[q.detach().clone(), torch.empty_like(q), *torch.zeros(count, len(q))] for q in theirs]
    steps = [torch.tensor(0.0) if counted else None for _ in theirs]
    own, total = torch.zeros(2, len(SIZES), 2, dtype=torch.float64)
    for n, (row, step) in enumerate(zip(ours, steps)):
        places = [own[n].data_ptr(), total[n].data_ptr()] * sharded
        batch.add([*(t.data_ptr() for t in row), *places], len(row[0]), step, True, 0)
    batch.prepare()
    groups = [dict(group) for group in reference.param_groups]
    if there:
        groups[0]["lr"] = torch.tensor(groups[0]["lr"], dtype=RATES[there])
    before_step = ["scalars"] * bool(there) + ["norms"] * sharded
    for left in (0.0, 1.0, 0.0, 0.0) if there == "counts" else (0.0, 0.0, 0.0):
        for (_, grad, *_), q in zip(ours, theirs):
            grad.copy_(torch.randn_like(q))
            q.grad = 0.5 * grad
        before = [[t.clone() for t in row] for row in ours]
        around = batches.Scale(0.5, found_inf=torch.tensor(left) if there else None)
        numbers = batch.numbers(groups, around)
        launched.clear()
        batch.take_norms(numbers, around)
        assert launched == before_step * sharded
        total.copy_(own)
        batch.run(numbers, around)
        assert launched == [*before_step, "step"]
        if left:
            torch.testing.assert_close(ours, before, rtol=0, atol=0)
        else:
            reference.step()
    for row, q, step in zip(ours, theirs, steps):
        known = reference.state[q]
        assert step is None or step == 3 == known["step"]
        wanted = [q.detach(), *(v for name, v in known.items() if name != "step")]
        # Three steps of some roundings, of values of about 1; norms are added up in another order.
        torch.testing.assert_close([row[0], *row[2:]], wanted, rtol=1e-5, atol=1e-6)
    print(make.func.__name__, sharded, there)
gc.unfreeze()
"""


@pytest.mark.slow  # no lowering calls this template yet
@pytest.mark.parametrize(
    ("how", "cases"),
    [("some", 2 + 4 + 5), ("every", 3 + 4 + 10)],
    ids=["some", "every"],
)
def test_a_reading_is_torchs(how, cases, tmp_path):
    """Norms and judgements, interpreted on the CPU, of several dtypes and alignments in one."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    code = INTERPRETED % (DTYPES,)
    done = subprocess.run(
        [sys.executable, "-c", code, how], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == cases


def test_a_step_whose_scalars_are_no_part_of_a_reading_says_so(monkeypatch):
    """The two launches have become three; what is read is the same."""
    ran, said = [], []

    def load(squares, looks, kernel):
        if kernel is not None:
            raise NotBuiltError("too many registers")

    reading = SimpleNamespace(
        allocate_flag=lambda: None, load=load, run=lambda *given: ran.append(given)
    )
    seen = SimpleNamespace(grads=[], addresses=[])
    monkeypatch.setattr(norms.log, "warning", lambda text, *more: said.append(text % more))
    norms._tell_apart.cache_clear()
    read = norms.Read(reading, seen, None, None, True)
    assert read.run(SimpleNamespace(kernel="a kernel")) is False
    assert ran[0][-1] is None
    assert said == ["the scalars of a step are a launch of their own: too many registers"]


def test_a_graph_gets_a_reading_that_was_there_before(monkeypatch):
    """What a reading needs cannot be had while a graph is captured, which keeps what it got."""
    made, now = [], SimpleNamespace(capturing=False)

    def reading(grads):
        nothing = {
            "allocate_clip": lambda: None,
            "allocate_flag": lambda: None,
            "load": lambda *_: None,
        }
        made.append(SimpleNamespace(takes=lambda divisor: True, **nothing))
        return made[-1]

    monkeypatch.setattr(norms, "_make_reading", reading)
    monkeypatch.setattr(norms, "_captured", [])
    monkeypatch.setattr(norms, "is_capturing", lambda: now.capturing)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(params)
    for p in params:
        p.grad = torch.ones(3)
    now.capturing = True
    assert norms.read_of(optimizer, 1.0, None, None) is None
    now.capturing = False
    assert norms.read_of(optimizer, 1.0, None, None)._reading is made[0]
    assert norms._captured == []
    now.capturing = True
    for _ in range(2):
        assert norms.read_of(optimizer, 1.0, None, None)._reading is made[0]
    assert norms._captured == made
    params[1].grad = None
    assert norms.read_of(optimizer, 1.0, None, None) is None
