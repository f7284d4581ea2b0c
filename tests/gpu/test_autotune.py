"""Kernels by record on a GPU: Triton's templates beside the library, measured and selected."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

from ipex_inductor import decisions, target
from ipex_inductor.autotune import select
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.pool import pool
from ipex_inductor.autotune.record import encode
from ipex_inductor.lowerings import settings, shapes
from ipex_inductor.lowerings.selection import here, tuned

pytestmark = pytest.mark.gpu

LINES = {
    "mm": "aten.mm.default bfloat16 512x1024 1024x768:T",
    "addmm, relu": "aten.addmm.default float16 768 512x1024 1024x768:T -> aten.relu.default(y)",
    "bmm": "aten.bmm.default bfloat16 24x128x64 24x64x128:T -> aten.mul.Tensor(y, 0.125)",
    "conv": (
        "aten.convolution.default bfloat16 8x64x28x28:L 128x64x3x3:L bias=None stride=1,1 "
        "padding=1,1 dilation=1,1 transposed=False output_padding=0,0 groups=1"
    ),
}


def problem(name):
    here = str(target.current("cuda"))
    (found,) = shapes.problems([LINES[name]], here, settings.settings_of("cuda"))
    return found


@pytest.mark.parametrize("name", LINES)
def test_a_problem_is_measured(name, tmp_path):
    ((_, record),) = tuned(here([problem(name)], 500), tmp_path / "db")
    timed = [o for o in record.outcomes if o.timing]
    assert {o.choice.kind for o in timed} == {"library", "template"}
    for outcome in timed:
        assert outcome.error <= outcome.tolerance
        assert outcome.timing.noise < 0.05
        # Nothing is faster than the device, nor than memory but for what its caches hold.
        assert 0 < outcome.rate < 1.05
        assert 0 < outcome.bandwidth < 2
        if outcome.choice.kind == "template":
            assert 16 <= outcome.registers <= 255
            assert 0 < outcome.shared_memory <= target.current("cuda").shared_memory
        else:
            assert outcome.registers is None
    assert len(timed) <= 14  # of templates the likely, and the library's
    best = pool([record])[encode(record.problem)].best()
    assert best.choice in [o.choice for o in timed]


@torch.no_grad()
def test_what_was_measured_is_used_in_every_mode(tmp_path):
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(768, 1024, device="cuda", dtype=torch.bfloat16) / 32

    def fn(x):
        return F.relu(x @ weight.t())

    options = {"strict": True, "autotune_database": str(tmp_path / "db")}
    wanted = fn(x)
    for autotune in ("always", "auto", "never"):
        torch.compiler.reset()
        decisions.clear()
        compiled = torch.compile(fn, backend="ipex", options={**options, "autotune": autotune})
        result, (code,) = run_and_get_code(compiled, x)
        torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)  # sums of bf16 products
        (event,) = [e for r in decisions.reports() for e in r.events if e.kind == "choice"]
        assert event.reason.endswith("recorded")
        assert ("triton_tem" in code) == event.reason.startswith("inductor.triton.")
    assert len(list(Records(tmp_path / "db"))) == 1


def test_the_cost_model_ranks_what_is_measured(tmp_path):
    """The best of all templates is among the likely, but for what nobody would notice."""
    ((_, record),) = tuned(here([problem("bmm")], 500), tmp_path / "db")
    model = select.cost_model(record.problem.arch)
    if model is None:
        pytest.skip("no cost model is shipped for this GPU")
    predicted = [o for o in record.outcomes if o.predicted]
    timed = [o for o in record.outcomes if o.timing and o.choice.kind == "template"]
    assert predicted
    assert len(timed) <= 12
    said = [model.microseconds(record.problem, o.choice) for o in timed]
    assert max(filter(None, said)) <= min(o.predicted for o in predicted)
