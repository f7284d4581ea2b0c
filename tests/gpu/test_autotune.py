"""Kernels by record on a GPU: Triton's templates beside the library, measured and selected."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

from ipex_inductor import compat
from ipex_inductor.autotune import select
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.pool import pool
from ipex_inductor.autotune.predictor import Guess
from ipex_inductor.autotune.record import encode
from ipex_inductor.lowerings.problem import settings, shapes
from ipex_inductor.lowerings.select import selection
from ipex_inductor.lowerings.select.selection import store_results, tune_locally
from ipex_inductor.lowerings.tune import tuner
from ipex_inductor.reporting import decisions
from ipex_inductor.target import device

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
    here = str(device.current("cuda"))
    (found,) = shapes.problems([LINES[name]], here, settings.settings_of("cuda"))
    return found


@pytest.mark.alone
@pytest.mark.parametrize("name", LINES)
def test_a_problem_is_measured(name, tmp_path):
    ((_, record),) = store_results(tune_locally([problem(name)], 500), tmp_path / "db")
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
            assert 0 < outcome.shared_memory <= device.current("cuda").shared_memory
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
    ((_, record),) = store_results(tune_locally([problem("bmm")], 500), tmp_path / "db")
    model = select.cost_model(record.problem.arch)
    if model is None:
        pytest.skip("no cost model is shipped for this GPU")
    predicted = [o for o in record.outcomes if o.predicted]
    timed = [o for o in record.outcomes if o.timing and o.choice.kind == "template"]
    assert predicted
    assert len(timed) <= 12
    said = [model.microseconds(record.problem, o.choice) for o in timed]
    assert max(filter(None, said)) <= min(o.predicted for o in predicted)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """The package's model that chooses, if it is of this GPU and of this torch's templates."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    known = select.guesser(str(device.current("cuda")))
    templates = [t for c in known.classes for t in c.templates] if known else []
    if not any(t.template == compat.TEMPLATES for t in templates):
        pytest.skip("no model is shipped that chooses on this GPU with this torch")
    return known


def scores(q, k):
    return torch.bmm(q, k.transpose(1, 2)) * 0.125


def queries_and_keys(count, rows):
    make = functools.partial(torch.randn, count, rows, 64, device="cuda", dtype=torch.bfloat16)
    return make(), make()


def said():
    return [e.reason for r in decisions.reports() for e in r.events if e.kind == "choice"]


@torch.no_grad()
def test_the_model_chooses_with_an_empty_database(shipped, tmp_path):
    decisions.clear()
    torch.compiler.reset()
    given = queries_and_keys(64, 384)
    options = {"strict": True, "autotune_database": str(tmp_path / "db")}
    compiled = torch.compile(scores, backend="ipex", options=options)
    result, (code,) = run_and_get_code(compiled, *given)
    torch.testing.assert_close(
        result, scores(*given), rtol=2e-2, atol=2e-2
    )  # two roundings, not one
    assert "triton_tem" in code
    (reason,) = said()
    assert reason.startswith("inductor.triton.bmm ")
    assert reason.endswith(", model")
    assert not (tmp_path / "db").exists(), "nothing is measured"


@torch.no_grad()
def test_never_asks_no_model(shipped, tmp_path):
    decisions.clear()
    torch.compiler.reset()
    given = queries_and_keys(64, 384)
    options = {"autotune": "never", "strict": True, "autotune_database": str(tmp_path / "db")}
    compiled = torch.compile(scores, backend="ipex", options=options)
    result, (code,) = run_and_get_code(compiled, *given)
    torch.testing.assert_close(result, scores(*given), rtol=2e-2, atol=2e-2)  # as above
    assert "triton_tem" not in code
    assert not any(reason.endswith(", model") for reason in said())


@torch.no_grad()
def test_what_the_model_refuses_is_the_librarys(shipped, tmp_path):
    decisions.clear()
    torch.compiler.reset()
    q, k = queries_and_keys(8, 64)  # fewer and shorter than any that were measured
    (tmp_path / "db").mkdir()  # or the graph is not even looked into
    options = {"strict": True, "autotune_database": str(tmp_path / "db")}
    compiled = torch.compile(scores, backend="ipex", options=options)
    result, (code,) = run_and_get_code(compiled, q, k)
    torch.testing.assert_close(result, scores(q, k), rtol=2e-2, atol=2e-2)
    assert "extern_kernels.bmm" in code
    missed = [e.reason for r in decisions.reports() for e in r.events if e.kind == "missed"]
    assert any("products, known from" in reason for reason in missed)


def test_the_models_choice_in_training(shipped, tmp_path):
    decisions.clear()
    torch.compiler.reset()
    given = [t.requires_grad_() for t in queries_and_keys(96, 256)]
    options = {"strict": True, "autotune_database": str(tmp_path / "db")}
    torch.compile(scores, backend="ipex", options=options)(*given).float().square().sum().backward()
    found = [t.grad.clone() for t in given]
    for t in given:
        t.grad = None
    scores(*given).float().square().sum().backward()
    for have, want in zip(found, given, strict=True):
        # Sums of 256 products whose factors are rounded to eight bits on either side.
        torch.testing.assert_close(have, want.grad, rtol=5e-2, atol=0.1 * want.grad.std().item())
    assert any(reason.endswith(", model") for reason in said())


@pytest.mark.parametrize(("count", "rows"), [(64, 384), (40, 768), (160, 200)])
def test_what_the_model_takes_beats_the_library_on_sizes_it_has_not_seen(
    count, rows, shipped, tmp_path
):
    """None of these is in the records that it was fitted on."""
    line = f"aten.bmm.default bfloat16 {count}x{rows}x64 {count}x64x{rows}:T"
    here_ = str(device.current("cuda")), settings.settings_of("cuda")
    (unseen,) = shapes.problems([f"{line} -> aten.mul.Tensor(y, 0.125)"], *here_)
    ((_, record),) = store_results(tune_locally([unseen], 500), tmp_path / "db")
    guess = shipped.guess(unseen, [o.choice for o in record.outcomes])
    assert guess.wins
    times = {encode(o.choice): o.timing.p50 for o in record.outcomes if o.timing}
    library = min(o.timing.p50 for o in record.outcomes if o.timing and o.choice.kind == "library")
    taken = times[encode(guess.template)]
    print(
        f"{line}: {taken:.4g} us, said {guess.microseconds:.4g}; library {library:.4g}, "
        f"said {guess.library:.4g}; best {min(times.values()):.4g}"
    )
    assert taken < library


class TooLarge:
    """Takes a tile that the device has not the shared memory for."""

    def ops(self):
        return {"aten.mm.default"}

    def guess(self, problem, choices):
        def shared(c):
            sizes = [c.parameters.get(f"BLOCK_{name}", 0) for name in "MNK"]
            return (sizes[0] + sizes[1]) * sizes[2] * c.parameters.get("num_stages", 0) * 2

        largest = max(choices, key=shared)
        room = device.current("cuda").shared_memory
        return Guess(largest, 1.0, 9.0, 1.5) if shared(largest) > room else "all of them fit"


@pytest.mark.parametrize("training", [False, True])
def test_a_template_that_the_device_cannot_run_is_the_librarys(training, tmp_path, monkeypatch):
    """Which Triton finds out as it is compiled; in a backward, where nothing else falls back."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    for room in (select, selection):
        monkeypatch.setattr(room, "guesser", lambda arch: TooLarge())
    decisions.clear()
    torch.compiler.reset()
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    a, b = make(2048, 4096, requires_grad=training), make(4096, 4096, requires_grad=training)
    compiled = torch.compile(torch.mm, backend="ipex")
    result = compiled(a, b)
    want = torch.mm(a, b)
    torch.testing.assert_close(result, want, rtol=2e-2, atol=2e-2 * want.std().item())
    if training:
        found = torch.autograd.grad(result.float().sum(), (a, b))
        wanted = torch.autograd.grad(want.float().sum(), (a, b))
        for have, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                have, expected, rtol=2e-2, atol=2e-2 * expected.float().std().item()
            )
    if not said():
        pytest.skip("Inductor offers no such tile here")
    assert any("(model) does not compile" in reason for reason in said())
    assert not any(r.count("fallback") for r in decisions.reports())


# Of torch's own test, which failed of it (pytorch#173068): many windows over 33 channels in fp32.
FLATTENED = (
    "aten.convolution.default float32 2x33x34x41:L 34x33x3x3:L bias=None stride=2,3 padding=4,5 "
    "dilation=1,1 transposed=False output_padding=0,0 groups=1"
)


def test_inductors_convolutions_by_eight_warps_are_held_against_fp64(monkeypatch):
    """Triton may compile their loop wrongly (triton#1254): a wrong one has no time, so never wins.

    On H200s with torch 2.11 and Triton 3.6 all of this problem's were right.
    """
    where = str(device.current("cuda")), settings.settings_of("cuda")
    (wanted,) = shapes.problems([FLATTENED], *where)
    monkeypatch.setattr(tuner, "FINALISTS", 100)  # all are measured, whatever a model says of them
    record = tuner.Tuner(Silent()).tune(wanted, [], 500)
    loops = [o for o in record.outcomes if o.choice.name == "inductor.triton.convolution2d"]
    eight = [o for o in loops if o.choice.parameters["num_warps"] == 8]
    if not eight:
        pytest.skip("this torch offers no convolution by 8 warps")
    for outcome in eight:
        print(outcome.choice.parameters, outcome.reason or f"{outcome.error:.3g}")
        if outcome.timing:
            assert outcome.error <= outcome.tolerance
        else:
            assert outcome.reason
    best = pool([record])[encode(wanted)].best()
    (taken,) = [o for o in record.outcomes if o.choice == best.choice]
    assert taken.error <= taken.tolerance


class Silent:
    """Nobody watches."""

    def choices(self, choices):
        pass

    def doing(self, number):
        pass
