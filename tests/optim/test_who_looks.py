"""Whether the host waits for what a step's gradients are multiplied by, and plans but once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ipex_inductor.optim.again import Asked, Known, taken
from ipex_inductor.optim.batches import Scale
from ipex_inductor.optim.batches_cpu import CpuBatch
from ipex_inductor.optim.batches_cuda import CountingBatch, CudaBatch
from ipex_inductor.optim.plan import Plan
from ipex_inductor.templates.cells import Cells

pytestmark = pytest.mark.host("the CPU, as if it were a GPU")

HERE, THERE = torch.device("cpu"), torch.device("meta")  # two GPUs, as it were
CLIP, SCALER = "a factor", "GradScaler's finding"


def batch(kind, device=HERE, far=0.0, counts=False):
    made = kind.__new__(kind)
    made.device, made._here, made._cells = device, counts, Cells("float32", far)
    return made


def plan(*batches, **more):
    return Plan(batches=dict(enumerate(batches)), **more)


def looking(**more):
    return batch(CountingBatch, **more)


@pytest.mark.parametrize(
    ("made", "asked", "looks"),
    [
        (plan(looking()), CLIP, True),
        (plan(looking()), SCALER, True),
        (plan(looking(counts=True)), CLIP, True),
        (plan(looking(counts=True)), SCALER, False),  # who counts has to know
        (plan(looking(), looking(counts=True)), SCALER, False),
        (plan(looking(), fresh={"a parameter": {}}), CLIP, True),
        (plan(looking(), fresh={"a parameter": {}}), SCALER, False),  # they may not begin
        (plan(looking(), left={"a parameter": "a reason"}), CLIP, False),
        (plan(looking(), looking(device=THERE)), CLIP, False),
        (plan(looking(device=THERE)), CLIP, False),  # of which the factor is not
        (plan(batch(CudaBatch)), CLIP, False),
        (plan(looking(), batch(CudaBatch)), CLIP, False),
        (plan(looking(), batch(CpuBatch)), CLIP, False),
        (plan(), CLIP, False),
    ],
)
def test_whether_a_gpu_looks_itself(made, asked, looks):
    word = torch.ones(())
    scale = Scale(factor=word) if asked is CLIP else Scale(divisor=word, found_inf=word)
    assert made.looks_itself(scale) is looks


@pytest.mark.parametrize(
    ("made", "may"),
    [
        (plan(batch(CudaBatch, far=3.0)), True),  # the next one, if it is asked so
        (plan(batch(CudaBatch, far=2.5)), False),
        (plan(batch(CudaBatch, far=1e20)), False),
        (plan(batch(CudaBatch), batch(CudaBatch, device=THERE)), False),
        (plan(batch(CpuBatch)), False),
        (plan(looking(), left={"a parameter": "a reason"}), False),
    ],
)
def test_whether_the_next_step_may_be_asked_to(made, may):
    assert made.may_look is may


@pytest.mark.parametrize("chosen", [False, True])
def test_a_plan_holds_whether_one_waits_if_it_would_be_the_same(chosen):
    """Or what a first step waited for would be planned again by the second."""
    made = plan(looking(), chosen=chosen)
    waiting, looks = (Asked(scaled=True, zeroed=False, waits=waits) for waits in (True, False))
    last = Known([], waiting, made, [], plain=False, on_cuda=True)
    seen = SimpleNamespace(addresses=[], held=[nn.Parameter(torch.ones(1))])
    assert taken(last, seen, waiting) is made
    assert taken(last, seen, looks) is (None if chosen else made)
    assert taken(last, seen, looks._replace(zeroed=True)) is None
