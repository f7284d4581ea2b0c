"""Whether the host waits for what a step's gradients are multiplied by."""

import pytest
import torch

from ipex_inductor.optim.launching.launch_groups import Scale
from ipex_inductor.optim.launching.launch_groups_cpu import CpuBatch
from ipex_inductor.optim.launching.launch_groups_cuda import CountingBatch, CudaBatch
from ipex_inductor.optim.plan import Plan

pytestmark = pytest.mark.host("the CPU, as if it were a GPU")

HERE, THERE = torch.device("cpu"), torch.device("meta")  # two GPUs, as it were
CLIP, SCALER = "a factor", "GradScaler's finding"


def batch(kind, device=HERE, counts=False):
    made = kind.__new__(kind)
    vars(made).update(device=device, counts=counts, kernel="its kernel")
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
        (plan(looking()), "fp64", False),
        (plan(batch(CudaBatch)), CLIP, False),
        (plan(looking(), batch(CudaBatch)), CLIP, False),
        (plan(looking(), batch(CpuBatch)), CLIP, False),
        (plan(), CLIP, False),
    ],
)
def test_whether_a_gpu_looks_itself(made, asked, looks):
    word = torch.ones((), dtype=torch.float64 if asked == "fp64" else torch.float32)
    scale = Scale(factor=word) if asked is CLIP else Scale(divisor=word, found_inf=word)
    assert made.looks_itself(scale) is looks


@pytest.mark.parametrize(
    ("made", "loads"),
    [
        (plan(looking(), fresh={"a parameter": {}}), True),
        (plan(looking()), False),  # it is there
        (plan(looking(counts=True), fresh={"a parameter": {}}), False),  # the next waits too
        (plan(looking(), looking(device=THERE), fresh={"a parameter": {}}), False),
        (plan(batch(CudaBatch), fresh={"a parameter": {}}), False),
    ],
)
def test_what_the_next_step_may_be_captured_with_is_loaded(made, loads):
    """As the host waits only for states to begin, and nothing is loaded in a graph."""
    reading = Reading()
    made.load_ahead(Scale(factor=torch.ones(()), reading=reading))
    made.load_ahead(Scale(factor=torch.ones(())))
    assert reading.loaded == ["its kernel"] * loads


class Reading:
    def __init__(self):
        self.loaded = []

    def makes(self, kernel):
        self.loaded.append(kernel)
