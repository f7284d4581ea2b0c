"""Step kernels in Triton: compiled for GPUs that are not here, and interpreted on the CPU."""

import os
import subprocess
import sys
from itertools import product

import pytest

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.errors import TargetError
from ipex_inductor.target import current, described
from ipex_inductor.templates.formulas import FORMULAS
from ipex_inductor.templates.gpu import binary
from ipex_inductor.templates.step import StepKernel
from ipex_inductor.templates.step_triton import (
    norms_signature,
    scalars_signature,
    signature,
    triton_source,
)

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
GPUS = ("a100-80gb", "h200", "b200", "mi300x")


def kernel(formula, form, scaled=True, zeroed=True):
    """With every flag on."""
    rule, (param, rest, grad, state) = FORMULAS[formula], FORMS[form]
    states = (state,) * len(rule.state(frozenset(rule.flags)))
    counted = "float32" if rule.counts else ""
    flags = tuple(sorted(rule.flags))
    return StepKernel(formula, flags, param, rest, grad, states, counted, scaled, zeroed)


def compiled(made, gpu, name="step", tabled=False):
    signatures = {"norms": norms_signature, "scalars": scalars_signature}
    block = {"BLOCK": 32} if name == "scalars" else {"ALIGNED": 16, "BLOCK": 1024}
    return binary(
        triton_source(made, tabled),
        name,
        described(gpu),
        pairs({**made.problem, "tabled": tabled}),
        signatures[name](made) if name in signatures else signature(made, tabled),
        block,
        {"num_warps": 1 if name == "scalars" else 8},
    )


def kernels_of(formula):
    """Names, and whether they are of the form whose scalars are made on the device."""
    if FORMULAS[formula].norms:
        return [("step", False), ("norms", False)]
    return [("step", False), ("step", True), ("scalars", True)]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("formula", "form"), [*product(ONE_PASS[:2], ["split"]), ("Adam", "fp32"), ("Lamb", "bf16")]
)
def test_kernels_compile_where_there_is_no_gpu(formula, form, gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    for name, tabled in kernels_of(formula):
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
    for name, tabled in kernels_of(formula):
        assert compiled(kernel(formula, form), gpu, name, tabled).blob[:4] == b"\x7fELF"


def test_no_kernel_is_compiled_for_a_cpu():
    with pytest.raises(TargetError, match="CUDA or HIP"):
        binary("", "step", current(), (), {})


INTERPRETED = """
import ctypes, sys
from array import array
import test_step_templates as mine
import torch
from ipex_inductor.optim.batches import library
from ipex_inductor.templates.gpu import _module
from ipex_inductor.templates.step import scalar_names, scalars_function
from ipex_inductor.templates.step_triton import signature, triton_source

NUMBERS = {
    "lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.2, "lr_decay": 0.1,
    "eps": 1e-3, "beta1": 0.8, "beta2": 0.95, "scale": 0.37,
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

torch.manual_seed(0)
for formula in mine.ONE_PASS[:3]:  # AdamW is Adam with a flag
    for form in mine.FORMS:
        if form == "master":
            continue  # Triton's interpreter cuts where it should round to bf16; see "fp16 master"
        kernel = mine.kernel(formula, form, scaled="bfloat16" not in mine.FORMS[form][2])
        ours = [tensors(kernel, size) for size in SIZES]
        theirs = [[t.clone() for t in row] for row in ours]
        numbers = {n: NUMBERS[n] for n in kernel.numbers}
        step = torch.tensor(2.0)
        count = step.data_ptr() if kernel.rule.counts else 0

        made = scalars_function(kernel)(3.0 if kernel.rule.counts else 0.0, *numbers.values())
        scalars = dict(zip(scalar_names(kernel), made, strict=True))
        names = [n for n in signature(kernel) if n not in ("rows", "chunks")]
        chunks = [[r, b] for r, size in enumerate(SIZES) for b in range(-(-size // BLOCK))]
        fn = _module(triton_source(kernel))["step"]
        rows = table(ours, lambda row: [row[0].numel()])
        given = (rows, torch.tensor(chunks, dtype=torch.int32), *(scalars[n] for n in names))
        fn[(len(chunks),)](*given, ALIGNED=16, BLOCK=BLOCK)

        given = array("d", numbers.values())
        for row in theirs:
            if kernel.rule.counts:
                step.fill_(2.0)
            one = table([row], lambda row: [count, 0])
            whole = torch.tensor([[0, 0, row[0].numel()]])
            library(kernel)(one.data_ptr(), 1, whole.data_ptr(), 1, given.buffer_info()[0], 1)
        for mine_, theirs_ in zip(ours, theirs):
            for (name, dtype), a, b in zip(kernel.columns, mine_, theirs_):
                if name == "rest" and dtype == "int16":
                    continue  # seen in the joined value
                if kernel.rest == "int16" and name == "param":
                    a, b = (mine.joined(row[0], row[1]) for row in (mine_, theirs_))
                # Contraction to fused multiply-adds differs: a few roundings of each dtype.
                tolerance = 8 * torch.finfo(a.dtype).eps
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        print(formula, form)
"""


def joined(upper, lower):
    from ipex_inductor.optim.halves import join

    return join(upper, lower)


def test_triton_and_cpp_agree(tmp_path):
    """Interpreted on the CPU, every formula and form."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 3 * (len(FORMS) - 1)
