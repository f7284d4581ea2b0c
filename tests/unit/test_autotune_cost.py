"""The cost model: what it says, what it is fitted to, and what it has no say in."""

import itertools
import json
import math
import random

import pytest
import torch
from msgspec.structs import replace
from records import PROVENANCE, timed
from typer.testing import CliRunner

from ipex_inductor import target
from ipex_inductor.autotune import cost, fitting, select
from ipex_inductor.autotune.cost import Model
from ipex_inductor.autotune.database import write
from ipex_inductor.autotune.pool import pool
from ipex_inductor.autotune.record import (
    Choice,
    Operand,
    Outcome,
    Problem,
    Record,
    Symbol,
    encode,
)
from ipex_inductor.autotune.space import why_refused
from ipex_inductor.cli import app
from ipex_inductor.errors import ArgumentError
from ipex_inductor.lowerings import spaces  # noqa: F401  what records may name
from ipex_inductor.lowerings.listed import Offer
from ipex_inductor.lowerings.tuner import LIKELY, _unlikely

H200 = "sm_90:NVIDIA-H200"
MM, BMM = "aten.mm.default", "aten.bmm.default"
WIDTH = len(
    cost.features(
        Choice("template", "any"), cost.Tile(16, 16, 16, 1, 1), cost.Parts((1.0,) * 4, 1, 1)
    )
)


def template(rows=64, columns=64, terms=32, stages=3, warps=4, name="mm"):
    sizes = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": terms}
    parameters = {**sizes, "num_stages": stages, "num_warps": warps, "GROUP_M": 8}
    return Choice("template", f"inductor.triton.{name}", parameters, "torch 2.11.0")


def product(rows, columns, terms, count=None, arch=H200, dtype="bfloat16", epilogue=""):
    shapes = (rows, terms), (terms, columns)
    if count is not None:
        shapes = tuple((count, *shape) for shape in shapes)
    operands = []
    for shape in shapes:
        stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        operands.append(Operand(shape, tuple(stride), dtype))
    return Problem(MM if count is None else BMM, tuple(operands), arch, epilogue=epilogue)


def model(**changes):
    """Two thirds of the peaks for templates and half of them for the library, from 2 us on."""
    stretched = (1.5, 0.2, 1.5, 0.02)  # by as much: arithmetic, loads, traffic, steps
    first = tuple((math.log(by), *[0.0] * (WIDTH - 1)) for by in stretched)
    half = (math.log(2), math.log(2), math.log(2))
    templates = ("inductor.triton.bmm", "inductor.triton.mm")
    plain = Model(
        H200,
        ("bfloat16",),
        first,
        math.log(2),
        {MM: half, BMM: half},
        templates,
        {MM: 1.1},
        0.1,
        60,
    )
    return replace(plain, **changes)


TILES = [
    template(*sizes, stages, warps)
    for sizes in ((32, 32, 32), (64, 64, 32), (64, 128, 64), (128, 128, 32), (128, 64, 64))
    for stages, warps in ((2, 4), (3, 4), (3, 8))
]


def test_large_products_take_what_the_peak_rate_and_small_ones_what_a_launch_takes():
    device = target.described("h200")
    large = model().microseconds(product(16384, 16896, 8192), template(128, 128, 64, 3, 8))
    at_peak = 2 * 16384 * 16896 * 8192 / device.rate("bf16") * 1e6
    assert 1.5 * at_peak < large < 1.6 * at_peak
    assert 2 <= model().microseconds(product(16, 16, 16), template()) < 2.5
    moved = (4096 + 4096 * 4096 + 4096) * 2 / device.bandwidth * 1e6
    library = model().microseconds(product(1, 4096, 4096), Choice("library", "aten.mm"))
    assert 2 * moved < library < 2.3 * moved


def test_an_epilogue_costs_the_library_another_pass():
    with_, without = (product(64, 65536, 64, epilogue=e) for e in ("aten.relu.default(y)", ""))
    times = [model().microseconds(p, Choice("library", "aten.mm")) for p in (with_, without)]
    assert times[0] > 1.9 * times[1]
    times = [model().microseconds(p, template()) for p in (with_, without)]
    assert times[0] == times[1]


def test_a_tile_that_is_cut_off_computes_all_of_it():
    times = [model().microseconds(product(n, 4096, 4096), template(128, 128)) for n in (4224, 4225)]
    assert times[1] > 1.1 * times[0]


@pytest.mark.parametrize(
    ("problem", "choice"),
    [
        (product(64, 64, 64, arch="sm_90:NVIDIA-H100-80GB-HBM3"), template()),
        (product(64, 64, 64, dtype="float32"), template()),
        (product(64, 64, 64), template(name="mm_persistent_tma")),
        (product(64, 64, 64), Choice("template", "inductor.triton.mm", {"num_warps": 4})),
        (product(64, 64, 64), template(128, 128, 128, stages=4)),  # 256 KiB of shared memory
        (product("n0", 64, 64), template()),
        (replace(product(64, 64, 64), op="aten.addmm.default"), Choice("library", "aten.addmm")),
        (replace(product(64, 64, 64), op="aten.relu.default"), template()),
    ],
)
def test_what_the_model_has_no_say_in(problem, choice):
    if any(isinstance(n, str) for o in problem.operands for n in o.shape):
        operands = [replace(o, stride=(1, 1)) for o in problem.operands]
        problem = replace(problem, operands=tuple(operands), symbols=(Symbol("n0", 2, 64),))
    assert model().microseconds(problem, choice) is None


def test_a_guess_is_the_fastest_template_if_it_is_faster_than_the_library_by_the_margin():
    wanted = product(4096, 4096, 4096)
    said = {encode(c): model().microseconds(wanted, c) for c in TILES}
    best = min(TILES, key=lambda c: said[encode(c)])
    library = Choice("library", "aten.mm")
    guess = model().guess(wanted, [library, *TILES])
    assert (guess.choice, guess.microseconds) == (best, said[encode(best)])
    assert guess.library == model().microseconds(wanted, library)
    ratio = guess.library / guess.microseconds
    assert model(margins={MM: ratio * 0.999}).guess(wanted, TILES)
    assert model(margins={MM: ratio * 1.001}).guess(wanted, TILES) is None
    assert model(margins={BMM: 1.1}).guess(wanted, TILES) is None
    assert model().guess(wanted, [library]) is None
    assert "not measured" in str(guess)
    assert str(guess).startswith(best.name)


def test_equal_guesses_do_not_depend_on_the_order():
    twins = [replace(template(), template=f"torch 2.1{i}.0") for i in range(3)]
    wanted = product(4096, 4096, 4096)
    guesses = {
        encode(model(margins={MM: 1.0}).guess(wanted, order).choice)
        for order in itertools.permutations(twins)
    }
    assert len(guesses) == 1


def test_a_model_is_read_from_the_first_folder_that_has_a_good_one(tmp_path):
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    for folder in (own, shipped):
        folder.mkdir()
    name = cost.file_name(H200)
    (shipped / name).write_bytes(encode(model(error=0.25)))
    assert cost.load([own, shipped], H200).error == 0.25
    assert cost.load([own, shipped], "sm_90:other") is None
    (own / name).write_bytes(encode(model()))
    assert cost.load([own, shipped], H200) == model()
    good = json.loads(encode(model()))
    for spoilt in (
        {"launch": "fast"},
        {"tiles": good["tiles"][:3]},
        {"tiles": [row[:-1] for row in good["tiles"]]},
        {"tiles": [[1e400] * WIDTH] * 4},
        {"libraries": {MM: [1.0]}},
        {"arch": "sm_80"},
        {"more": 1},
    ):
        (own / name).write_text(json.dumps(good | spoilt))
        assert cost.load([own, shipped], H200).error == 0.25
    (own / name).write_bytes(b"\xff{")
    assert cost.load([own, shipped], H200).error == 0.25


def test_what_the_package_ships_can_be_read(monkeypatch, tmp_path):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path))
    files = list(select.SHIPPED.glob("cost-*.json"))
    assert files
    for file in files:
        arch = json.loads(file.read_bytes())["arch"]
        assert file.name == cost.file_name(arch)
        assert select.cost_model(arch).problems >= fitting.FEWEST


@pytest.fixture(scope="module", autouse=True)
def _a_third_held_out():
    """Instead of a tenth: the fits take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "FOLDS", 3)
        yield


@pytest.fixture(scope="module")
def known():
    """Records as another model with other factors has them, 2 % off; products of the library's are
    twice as fast as it says, batched ones half."""
    random_ = random.Random(0)
    tiles = [[0.4 + i / 10, *(random_.gauss(0, 0.05) for _ in range(WIDTH - 1))] for i in range(4)]
    hidden = model(tiles=tuple(map(tuple, tiles)), launch=math.log(3))
    records = []
    for _ in range(40):
        rows, columns, terms = (2 ** random_.randrange(6, 13) for _ in range(3))
        count = random_.choice([None, 16])
        wanted = product(rows, columns, terms, count)
        name = "mm" if count is None else "bmm"
        choices = [replace(c, name=f"inductor.triton.{name}") for c in TILES]
        times = {}
        outcomes = []
        for choice in choices:
            time = hidden.microseconds(wanted, choice) * random_.gauss(1, 0.02)
            outcomes.append(timed(choice, time))
            times[encode(choice)] = time
        best = min(times.values())
        library = Choice("library", f"aten.{name}")
        outcomes.append(timed(library, best / 2 if count is None else best * 2))
        records.append(Record(wanted, tuple(outcomes), PROVENANCE))
    return records


@pytest.fixture(scope="module")
def fitted(known):
    return fitting.fit(known)


def test_a_fitted_model_knows_what_it_has_not_seen(fitted):
    found, quality = fitted
    assert found.arch == H200
    assert found.dtypes == ("bfloat16",)
    assert found.templates == ("inductor.triton.bmm", "inductor.triton.mm")
    assert quality.error < 0.06  # 2 % of noise, and what 54 problems leave open
    assert quality.lost[5][0] < 0.01
    assert quality.lost[1][1] >= quality.lost[5][1] >= quality.lost[12][1] >= 0


def test_a_margin_is_where_the_guesses_won(fitted, known):
    found, quality = fitted
    assert found.margins.keys() == {BMM}
    gain, count = quality.gained[BMM]
    assert 1.8 < gain < 2.1
    batched = {encode(r.problem) for r in known if r.problem.op == BMM}
    assert 0.8 * len(batched) <= count <= len(batched)
    assert found.guess(product(512, 512, 512), TILES) is None
    batched = [replace(c, name="inductor.triton.bmm") for c in TILES]
    assert found.guess(product(512, 512, 512, 16), batched)


def test_fitting_does_not_depend_on_the_order_of_records(fitted, known):
    again, _ = fitting.fit(known[::-1])
    assert encode(again) == encode(fitted[0])


def test_times_of_other_tools_count_without_what_they_have_besides(known):
    """Ten microseconds of launch in what another tool says of half of the choices."""
    told = []
    for record in known:
        cut = []
        for i, outcome in enumerate(record.outcomes):
            if outcome.choice.kind == "template" and i % 2:
                word = Outcome(outcome.choice, reported=outcome.timing.p50 + 10)
                told.append(Record(record.problem, (outcome, word), PROVENANCE))
                outcome = word
            cut.append(outcome)
        told.append(Record(record.problem, tuple(cut), PROVENANCE))
    assert fitting._besides(list(pool(told).values())) == pytest.approx(10)
    assert fitting._besides(list(pool(known).values())) is None


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda rs: rs[:5], "20 problems with a template that was timed; got 5 of 5"),
        (lambda rs: [], "records of one described GPU; got no records"),
        (
            lambda rs: [replace(r, problem=replace(r.problem, arch="x86-64:amx")) for r in rs],
            "records of one described GPU; got x86-64:amx",
        ),
        (
            lambda rs: [
                *rs,
                replace(rs[0], problem=replace(rs[0].problem, arch="sm_80:NVIDIA-A100-SXM4-80GB")),
            ],
            "records of one described GPU",
        ),
    ],
)
def test_what_cannot_be_fitted_is_an_error(known, spoil, expected):
    with pytest.raises(ArgumentError, match=expected):
        fitting.fit(spoil(known))


def test_the_command_writes_the_model_and_says_what_it_is_worth(
    known, fitted, tmp_path, monkeypatch
):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    read = []
    monkeypatch.setattr(fitting, "fit", lambda records: (read.extend(records), fitted)[1])
    database = tmp_path / "db.jsonl"
    write(database, known)
    done = CliRunner().invoke(app, ["autotune", "fit", str(database)])
    assert done.exit_code == 0, done.output
    assert "bmm" in done.stdout
    assert {encode(r) for r in read} == {encode(r) for r in known}
    assert select.cost_model(H200) == fitted[0]
    done = CliRunner().invoke(app, ["autotune", "fit", str(database), "--json"])
    facts = json.loads(done.stdout)
    assert facts["gained"].keys() == {BMM}
    assert facts["file"] == str(tmp_path / "home" / "autotune" / cost.file_name(H200))


def test_of_a_long_list_the_likely_are_measured_and_the_rest_is_kept_as_predicted():
    library, unknown = Choice("library", "aten.mm"), template(name="mm_persistent_tma")
    offered = (library, unknown, *TILES)
    wanted = product(512, 512, 512)
    out = _unlikely(wanted, Offer(wanted, offered, library), model())
    assert len(out) == len(TILES) - LIKELY
    said = {encode(c): model().microseconds(wanted, c) for c in TILES}
    slowest = sorted(said.values())[-len(out) :]
    assert sorted(o.predicted for o in out) == slowest
    assert all(o.predicted == said[encode(o.choice)] for o in out)
    raced = timed(library, 3.0)
    assert why_refused(Record(wanted, (raced, *out), PROVENANCE)) is None
    assert "passed over for nothing" in why_refused(Record(wanted, tuple(out), PROVENANCE))
    (pooled,) = pool([Record(wanted, (raced, *out), PROVENANCE)]).values()
    assert [e.choice for e in pooled.estimates().values()] == [library]
    again = timed(out[0].choice, 2.0)
    (pooled,) = pool(
        [Record(wanted, (raced, *out), PROVENANCE), Record(wanted, (again,), PROVENANCE)]
    ).values()
    assert pooled.best().choice == out[0].choice  # predicted as slow is no failure


def test_the_model_says_what_torch_says():
    """`cost._larger` against the tensors that it is fitted with."""
    times, factors = [1.0, 2.0, -1.0, 0.5], [0.1, -0.2, 0.3, 0.0]
    rows = torch.tensor([times], dtype=torch.float64) + torch.tensor([factors])
    found = fitting._larger(rows, torch.tensor([0.7], dtype=torch.float64))
    assert cost._larger(times, factors, 0.7) == pytest.approx(float(found))
