"""Step kernels in Triton: compiled for GPUs that are not here, and interpreted on the CPU."""

import json
import os
import subprocess
import sys
from itertools import product

import pytest

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.errors import TargetError
from ipex_inductor.target.device import current, find_target
from ipex_inductor.templates.build.gpu import binary
from ipex_inductor.templates.optimizer.formulas import FORMULAS
from ipex_inductor.templates.optimizer.step import StepKernel
from ipex_inductor.templates.optimizer.step_cuda import APART
from ipex_inductor.templates.optimizer.step_triton import (
    norms_signature,
    scalars_signature,
    signature,
    triton_source,
)

pytestmark = pytest.mark.unit

FORMS = {  # of parameters: dtype, rest, gradients, state
    "fp32": ("float32", "", "float32", "float32"),
    "bf16": ("bfloat16", "", "bfloat16", "bfloat16"),
    "fp16": ("float16", "", "float16", "float16"),
    "fp64": ("float64", "", "float64", "float64"),
    "split": ("bfloat16", "int16", "bfloat16", "float32"),
    "master": ("bfloat16", "float32", "bfloat16", "float32"),
    "fp16 master": ("float16", "float32", "float32", "float32"),
}
ONE_PASS = [name for name, rule in FORMULAS.items() if not rule.norms]
TWO_PASSES = [name for name in FORMULAS if name not in ONE_PASS]
GPUS = ("a100-80gb", "h200", "b200", "mi300x")


def kernel(formula, form, scaled=True, zeroed=True, sharded=False):
    """With every flag on."""
    rule, (param, rest, grad, state) = FORMULAS[formula], FORMS[form]
    states = (state,) * len(rule.state(frozenset(rule.flags)))
    counted = "float32" if rule.counts else ""
    flags = tuple(sorted(rule.flags))
    return StepKernel(formula, flags, param, rest, grad, states, counted, scaled, zeroed, sharded)


def compiled(made, gpu, name="step", tabled=False):
    signatures = {"norms": norms_signature, "step": signature}
    given = signatures[name](made, tabled) if name in signatures else scalars_signature(made)
    block = {"BLOCK": 32} if name == "scalars" else {"ALIGNED": 16, "BLOCK": 1024}
    return binary(
        triton_source(made, tabled),
        name,
        find_target(gpu),
        pairs({**made.problem, "tabled": tabled}),
        given,
        block,
        {"num_warps": 1 if name == "scalars" else 8, **APART},
    )


# Names, and whether they are of the form whose scalars are made on the device.
KERNELS = [("step", False), ("step", True), ("scalars", True)]


@pytest.mark.parametrize(
    ("formula", "form", "gpu"),
    [
        pytest.param("SGD", "split", "a100-80gb", marks=pytest.mark.slow),
        ("Adagrad", "split", "b200"),
        pytest.param("Adam", "fp32", "h200", marks=pytest.mark.slow),
        ("Adam", "fp32", "mi300x"),
        ("Lamb", "bf16", "h200"),
    ],
)
def test_kernels_compile_where_there_is_no_gpu(formula, form, gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    for name, tabled in KERNELS:
        entry = compiled(kernel(formula, form), gpu, name, tabled)
        assert entry.blob[:4] == b"\x7fELF"
        assert entry.meta["name"] == name
        assert compiled(kernel(formula, form), gpu, name, tabled) == entry


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("formula", FORMULAS)
def test_all_kernels_compile_where_there_is_no_gpu(formula, form, gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    for name, tabled in KERNELS:
        assert compiled(kernel(formula, form), gpu, name, tabled).blob[:4] == b"\x7fELF"


def test_no_kernel_is_compiled_for_a_cpu():
    with pytest.raises(TargetError, match="CUDA or HIP"):
        binary("", "step", current(), (), {})


# Two seconds each; quickly of each formula both kernels, and both ways.
OF_SHARDS = [*product(TWO_PASSES, ("norms", "step"), (False, True))]


@pytest.mark.parametrize(
    "cases",
    [
        [c for c in OF_SHARDS if (TWO_PASSES.index(c[0]) + (c[1] == "step") + c[2]) % 2],
        pytest.param(OF_SHARDS, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_kernels_of_shards_compile_where_there_is_no_gpu(cases, tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    for formula, name, tabled in cases:
        made = kernel(formula, "fp32", sharded=True)
        assert compiled(made, "h200", name, tabled).meta["name"] == name


COMMON = """
import json, sys
from array import array
import test_step_triton as mine
import torch
from ipex_inductor.optim.launching.launch_groups_cpu import library
from ipex_inductor.templates.build.gpu import _module
from ipex_inductor.templates.optimizer.step import scalar_names, scalars_function
from ipex_inductor.templates.optimizer.step_triton import (
    blocks_of, norms_signature, signature, triton_source
)

NUMBERS = {
    "lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.2, "lr_decay": 0.1,
    "eps": 1e-3, "beta1": 0.8, "beta2": 0.95, "scale": 0.37, "eeta": 0.1, "epsilon": 1e-3,
}
SIZES, BLOCK = (1, 64, 65, 203), 64

def tensors(kernel, size):
    made = []
    for name, dtype in kernel.columns:
        value = torch.randn(size)
        if name in ("exp_avg_sq", "max_exp_avg_sq", "sum"):
            value = value.abs()
        if dtype == "int16":
            value = torch.randint(-2**15, 2**15, (size,))
        if name == "rest" and dtype == "float32":
            value = made[0].float() + 1e-4 * value * made[0].float().abs()
            made[0].copy_(value)
            made[0][::7] = 3.0  # somebody wrote the parameter
        made.append(value.to(getattr(torch, dtype)))
    return made

def table(rows, count):
    return torch.tensor([[*(t.data_ptr() for t in row), *count(row)] for row in rows])

def close(kernel, ours, theirs, roundings):
    for mine_, theirs_ in zip(ours, theirs):
        for (name, dtype), a, b in zip(kernel.columns, mine_, theirs_):
            if name == "rest" and dtype == "int16":
                continue  # seen in the joined value
            if kernel.rest == "int16" and name == "param":
                a, b = (mine.joined(row[0], row[1]) for row in (mine_, theirs_))
            tolerance = roundings * torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

CHUNKS = [[r, b] for r, size in enumerate(SIZES) for b in range(-(-size // BLOCK))]
torch.manual_seed(0)
"""
ONE = """
for formula, form in json.loads(sys.argv[1]):
    kernel = mine.kernel(formula, form, scaled="bfloat16" not in mine.FORMS[form][2])
    ours = [tensors(kernel, size) for size in SIZES]
    theirs = [[t.clone() for t in row] for row in ours]
    numbers = {n: NUMBERS[n] for n in kernel.numbers}
    step = torch.tensor(2.0)
    count = step.data_ptr() if kernel.rule.counts else 0

    made = scalars_function(kernel)(3.0 if kernel.rule.counts else 0.0, *numbers.values())
    scalars = dict(zip(scalar_names(kernel), made, strict=True))
    names = [n for n in signature(kernel) if n not in ("rows", "chunks")]
    fn = _module(triton_source(kernel))["step"]
    rows = table(ours, lambda row: [row[0].numel()])
    given = (rows, torch.tensor(CHUNKS, dtype=torch.int32), *(scalars[n] for n in names))
    fn[(len(CHUNKS),)](*given, ALIGNED=16, BLOCK=BLOCK)

    given = array("d", numbers.values())
    for row in theirs:
        if kernel.rule.counts:
            step.fill_(2.0)
        one = table([row], lambda row: [count, 0])
        whole = torch.tensor([[0, 0, row[0].numel()]])
        library(kernel)(one.data_ptr(), 1, whole.data_ptr(), 1, given.buffer_info()[0], 1)
    # Contraction to fused multiply-adds differs: a few roundings of each dtype.
    close(kernel, ours, theirs, 8)
    print(formula, form)
"""
TWO = """
def fixed(kernel):  # numbers that both are given
    numbers = [NUMBERS[n] for n in kernel.numbers]
    made = scalars_function(kernel)(3.0 if kernel.rule.counts else 0.0, *numbers)
    return array("d", numbers), dict(zip(scalar_names(kernel), made, strict=True))

def table_of(kernel, scalars, left):
    row = [*scalars.values(), left]
    return torch.tensor([row] * len(SIZES), dtype=getattr(torch, kernel.real))

def launch(kernel, name, tabled, **given):
    types = {"norms": norms_signature, "step": signature}[name](kernel, tabled)
    twice = kernel.rule.norms and not kernel.sharded  # programs take norms, then step
    chunks = [*CHUNKS, *([r, ~b] for r, b in CHUNKS)] if twice else CHUNKS
    given["chunks"] = torch.tensor(chunks, dtype=torch.int32)
    fn = _module(triton_source(kernel, tabled))[name]
    block = BLOCK // blocks_of(kernel)
    fn[(len(chunks),)](*(given[n] for n in types), ALIGNED=16, BLOCK=block)

torch.manual_seed(0)
for formula, form, sharded, tabled in json.loads(sys.argv[-1]):
    kernel = mine.kernel(formula, form, "split" != form, True, sharded)
    ours = [tensors(kernel, size) for size in SIZES]
    theirs = [[t.clone() for t in row] for row in ours]
    numbers, scalars = fixed(kernel)
    real, count = getattr(torch, kernel.real), len(SIZES)
    # Their own sums, and those of all, which are more.
    sums = [torch.zeros(2, count, 2, dtype=torch.float64) for _ in range(2)]
    places = [[[own[k, r].data_ptr() for k in (0, 1)] * sharded for r in range(count)]
              for own in sums]

    rows = torch.tensor([[*(t.data_ptr() for t in row), *place, row[0].numel()]
                         for row, place in zip(ours, places[0])])
    counters = torch.zeros(1 + count, dtype=torch.int64)
    each = [-(-size // BLOCK) for size in SIZES]  # chunks
    grown = torch.tensor([0] * (1 + count) if sharded else [2 * sum(each), *(n + 1 for n in each)])
    launches = 0
    parts = torch.full((2 * 2 * len(CHUNKS),), torch.nan, dtype=real)
    given = {"rows": rows, "ratios": torch.full((count,), torch.nan, dtype=real)}
    given |= {"parts": parts, "counters": counters}
    for left in (1, 0) if tabled else (0,):
        given |= {"table": table_of(kernel, scalars, left)} if tabled else scalars
        before = [[t.clone() for t in row] for row in ours]
        if sharded:
            launch(kernel, "norms", tabled, **given)
            assert not counters.any()
            sums[0][1] = 3 * sums[0][0]
        launch(kernel, "step", tabled, **given)
        launches += 1
        assert torch.equal(counters, launches * grown)
        for row, were in zip(ours, before) if left else ():
            for (name, _), a, b in zip(kernel.columns, row, were):
                assert torch.equal(a, torch.zeros_like(b) if name == "grad" else b)
                a.copy_(b)

    step = torch.full((count,), 2.0)
    last = [t.data_ptr() if kernel.rule.counts else 0 for t in step]
    rows = torch.tensor([[*(t.data_ptr() for t in row), *place, at, 0]
                         for row, place, at in zip(theirs, places[1], last)])
    whole = torch.tensor([[r, 0, size] for r, size in enumerate(SIZES)])
    given = (rows.data_ptr(), count, whole.data_ptr(), count, numbers.buffer_info()[0], 1)
    if sharded:
        library(kernel, "norms")(*given)
        sums[1][1] = 3 * sums[1][0]
        torch.testing.assert_close(*sums, rtol=1e-5, atol=0)  # of squares added up in fp32
    library(kernel)(*given)
    if kernel.rule.counts:
        assert step.eq(3).all()  # once
    close(kernel, ours, theirs, 32)  # as above, and of the sums
    print(formula, form, sharded, tabled)
"""


def joined(upper, lower):
    from ipex_inductor.optim.bf16_split import join

    return join(upper, lower)


# AdamW is Adam with a flag. Triton's interpreter cuts where it should round to bf16, so that of the
# masters there is "fp16 master".
ONES = [*product(ONE_PASS[:3], (form for form in FORMS if form != "master"))]
TWOS = [*product(TWO_PASSES, ("fp32", "fp64", "split"), (False, True), (False, True))]


# Each form with each formula, with shards and without, tabled and not: sharded, tabled.
WAYS = {
    "fp32": ((False, False), (True, True)),
    "fp64": ((True, False), (False, True)),
    "split": ((False, True), (True, False)),
}
PAIRS = [
    (formula, form, *way)
    for form, ways in WAYS.items()
    for formula, way in zip(TWO_PASSES, ways, strict=True)
]


@pytest.mark.parametrize(
    ("script", "cases"),
    [
        (ONE + TWO, [[c for n, c in enumerate(ONES) if n % 3 == n // 6], PAIRS]),  # each form once
        pytest.param(ONE, [ONES], marks=pytest.mark.slow),
        pytest.param(TWO, [TWOS], marks=pytest.mark.slow),
    ],
    ids=["some", "one, all", "norms, all"],
)
def test_triton_and_cpp_agree(script, cases, tmp_path):
    """Interpreted on the CPU, every formula and form."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    command = [sys.executable, "-c", COMMON + script, *map(json.dumps, cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == sum(map(len, cases))
