"""Steps by kernels in SYCL, on its CPU device: the same checks as of those in C++."""

import functools
import itertools
import re

import pytest
import torch

from ipex_inductor.lowerings.optimizer import step as launching
from ipex_inductor.optim import fuse_step, planning
from ipex_inductor.optim.launching import launch_groups_cpu, launch_groups_sycl
from ipex_inductor.optim.launching.launch_groups_sycl import SyclBatch
from ipex_inductor.passes.engine.source import OPTIMIZER_STEP
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.optimizer import step_cpp
from ipex_inductor.templates.optimizer.formulas import FORMULAS
from ipex_inductor.templates.optimizer.step import StepKernel
from ipex_inductor.templates.sycl import step, wheels
from support.optim.optimizer_variants import (
    LOW,
    ONE_EACH,
    VARIANTS,
    copies,
    in_groups,
    left,
    single,
    tensors,
)
from support.optim.step_checks import check_alone, check_fp32, check_fp64, check_kept
from support.sycl_device import needs_sycl

pytestmark = pytest.mark.host("SYCL's CPU device")


@pytest.fixture
def in_sycl(monkeypatch):
    """Steps on the CPU are by SYCL, each call of a kernel is noted."""
    called = []

    @functools.cache
    def function(kernel, name):
        made = step.step_function(kernel)

        def run(*given):
            called.append(kernel)
            made(*given)

        return run

    monkeypatch.setattr(launch_groups_cpu, "_library", function)
    yield called
    assert called


# A second each to compile.
QUICK = {
    "fp32": ("sgd momentum",),  # others: as on GPUs
    "fp64": ("lamb decay",),
    "kept": {"bf16 split": ("lamb decay",), "bf16 master": ("sgd momentum",)},
    "alone": ("adagrad",),
}


def each(names, quick):
    return pytest.mark.parametrize(
        "variant",
        [pytest.param(n, marks=() if n in quick else pytest.mark.slow, id=n) for n in names],
    )


@pytest.mark.slow  # 9 s; kernels step as torch does: test_compiled_step_xpu.py
@needs_sycl
@each(VARIANTS, QUICK["fp32"])
def test_fp32(variant, in_sycl):
    check_fp32(VARIANTS[variant], tensors())


@needs_sycl
@each(ONE_EACH, QUICK["fp64"])
def test_fp64(variant, in_sycl):
    check_fp64(VARIANTS[variant])


@needs_sycl
@pytest.mark.parametrize(
    ("held", "variant"),
    [
        pytest.param(h, v, marks=() if v in QUICK["kept"].get(h, ()) else pytest.mark.slow)
        for h in LOW
        for v in ONE_EACH
    ],
)
def test_low_precision_with_all_bits_kept(held, variant, in_sycl):
    check_kept(LOW[held], VARIANTS[variant])


@needs_sycl
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
    ids=["bf16", "fp16"],
)
@each(ONE_EACH, QUICK["alone"])
def test_low_precision_alone(dtype, variant, in_sycl):
    check_alone(dtype, VARIANTS[variant])


@needs_sycl
@each(ONE_EACH, ("lamb decay", "lars momentum"))
def test_several_chunks(variant, in_sycl):
    """Norms add up over them, of weights that grow from chunk to chunk."""
    ours = tensors(torch.float32, [(3,), (2 * step_cpp.CHUNK + 3,)])
    ours[1].data *= torch.linspace(0, 2, ours[1].numel())
    check_fp32(VARIANTS[variant], ours, steps=5)


# As on Intel's GPUs: tables are sent there, steps are counted and scalars made by the host.


@pytest.fixture
def as_on_gpus(monkeypatch):
    """Tensors of the CPU go the way of an Intel GPU's."""
    batch, groups = planning._batch, []

    def batched(made, kernel, columns, group, step, first, looks):
        groups.append(group)
        if columns[0].device.type != "cpu":
            return batch(made, kernel, columns, group, step, first, looks)
        far = planning.count_steps_before(step, first)
        return planning._find_batch(made, SyclBatch, kernel, columns[0].device, group, far)

    monkeypatch.setattr(planning, "_batch", batched)
    yield
    assert {0, 1} <= {*groups}


@needs_sycl
@each(VARIANTS, ("adagrad", "lamb decay"))
def test_fp32_as_on_gpus(variant, as_on_gpus):
    check_fp32(VARIANTS[variant], tensors())


@needs_sycl
@each(ONE_EACH, ("adam amsgrad",))
def test_split_weights_as_on_gpus(variant, as_on_gpus):
    check_kept(LOW["bf16 split"], VARIANTS[variant])


@needs_sycl
@each(ONE_EACH, ("adagrad",))
def test_bf16_alone_as_on_gpus(variant, as_on_gpus):
    """A number at a time; by words, as on the CPU, they would have to be aligned."""
    check_alone(torch.bfloat16, VARIANTS[variant])


@needs_sycl
def test_several_chunks_as_on_gpus(as_on_gpus):
    ours = tensors(torch.float32, [(3,), (3 * step.CHUNK + 3,)])
    ours[1].data *= torch.linspace(0, 2, ours[1].numel())
    check_fp32(VARIANTS["lamb decay"], ours, steps=5)


@needs_sycl
def test_a_graph_of_the_gpus_is_refused(as_on_gpus, monkeypatch):
    """It would replay the scalars of one step, from memory that is not theirs any more."""
    params = tensors(torch.float32, [(3,), (5,)])
    optimizer = VARIANTS["adamw"](in_groups(params))
    fuse_step(optimizer)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copies(params)
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.xpu, name, lambda: True)
    with pytest.raises(RuntimeError, match="no graph can have a step of AdamW"):
        optimizer.step()
    monkeypatch.undo()
    torch.testing.assert_close(params, before, rtol=0, atol=0)


def test_without_sycl_torch_itself_steps_a_gpu(as_on_gpus, monkeypatch):
    monkeypatch.setattr(step, "device_of", absent)
    launch_groups_sycl._step.cache_clear()
    params = tensors(torch.float32, [(3,), (5,)])
    optimizer = VARIANTS["adamw"](in_groups(params))
    assert fuse_step(optimizer) is None
    for p in params:
        p.grad = torch.ones_like(p)
    said = "a SYCL kernel is not to be had: expected the package intel-sycl-rt; got none installed."
    (reason,) = left(optimizer)
    assert reason.startswith(said)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 1
    launch_groups_sycl._step.cache_clear()


def absent(device):
    raise wheels.SyclAbsentError("the package intel-sycl-rt", "none installed", "Install it.")


# Compiled steps


def stepped(variant, **options):
    """Three steps of a compiled optimizer and of its twin, and what was decided."""
    torch.manual_seed(0)
    ours = tensors(torch.float32, [(3, 5), (70001,)])
    theirs = copies(ours)
    make = VARIANTS[variant]
    optimizer, reference = make(in_groups(ours)), single(make)(in_groups(theirs))
    run = torch.compile(optimizer.step, backend="ipex", options={"strict": True, **options})
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        run()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        # Contraction to fused multiply-adds differs: an ulp a step of the larger operand.
        bound = 3 * torch.finfo(torch.float32).eps * max(1.0, q.abs().max().item())
        assert (p - q).abs().max() <= bound
    events = [e for r in decisions.reports() for e in r.events if e.subject == OPTIMIZER_STEP]
    assert "fired" in {e.kind for e in events}
    return {e.reason for e in events if e.kind == "choice"}


@needs_sycl
@each(["adam amsgrad", "sgd momentum"], ["adam amsgrad"])
def test_an_option_asks_for_it(variant):
    launching._in_sycl.cache_clear()
    assert stepped(variant, sycl="cpu") == {"kernels in SYCL"}
    assert launching._in_sycl.cache_info().currsize
    decisions.clear()
    torch.compiler.reset()
    assert stepped(variant) == set()


def test_where_there_is_none_the_kernel_is_cpps(monkeypatch, caplog):
    monkeypatch.setattr(step, "device_of", absent)
    launching._in_sycl.cache_clear()
    said = (
        "kernels in C++: a SYCL kernel is not to be had: "
        "expected the package intel-sycl-rt; got none installed. Install it."
    )
    assert stepped("adamw", sycl="cpu") == {said}
    assert [m for m in caplog.messages if "SYCL" in m] == [f"an optimizer's step: {said}"]


# Sources


def sources(counting):
    """Of every formula, with all its flags."""
    for name, rule in FORMULAS.items():
        flags = tuple(sorted(rule.flags))
        states = ("float32",) * len(rule.state(frozenset(flags)))
        counted = "float32" if rule.counts else ""
        given = (name, flags, "bfloat16", "int16", "bfloat16", states, counted, True, True)
        yield step.step_source(StepKernel(*given), counting)


def test_bf16_is_taken_by_words_on_the_cpu_alone():
    """And nothing that holds another dtype too."""
    given = "SGD", ("momentum",), "bfloat16", "", "bfloat16"
    for state, counting in itertools.product(("bfloat16", "float32"), (True, False)):
        text = step.step_source(StepKernel(*given, (state,)), counting).text
        assert ("Upper" in text) == (counting and state == "bfloat16")


def test_without_counting_nothing_is_in_fp64():
    """Some of Intel's GPUs have none of it."""
    for source in sources(counting=False):
        assert "fp64" not in source.needs
        assert "scalars" not in [entry.name for entry in source.entries]
        code = re.sub(r"//.*", "", source.text)
        assert "double" not in code
        assert not re.findall(r"(?<!Real\()\b\d+\.\d", code)
    for source in sources(counting=True):
        assert "fp64" in source.needs
