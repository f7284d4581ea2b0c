"""What is chosen unmeasured: by which times, in which problems, and on what evidence."""

import json
import math
import random
from dataclasses import replace as changed
from pathlib import Path

import pytest
from msgspec.structs import replace

from ipex_inductor.autotune import fitting, guess_fitting, predictor, select
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.guess_fitting import (
    Held,
    check_families,
    errors_of,
    families_of,
    margin,
)
from ipex_inductor.autotune.pool import pool
from ipex_inductor.autotune.predictor import Guess, Guesser
from ipex_inductor.autotune.record import (
    Choice,
    Operand,
    Outcome,
    Problem,
    Record,
    Symbol,
    decode_problem,
    encode,
)
from ipex_inductor.autotune.select import Selection
from ipex_inductor.target import device
from support.autotune.autotune_records import PROVENANCE, failed, timed

pytestmark = pytest.mark.unit

H200 = "sm_90:NVIDIA-H200"
BMM, MM = "aten.bmm.default", "aten.mm.default"
SCALED = "aten.mul.Tensor(y, 0.125)"
RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "tuning_h200.jsonl"
LIBRARY = Choice("library", "aten.bmm")


def template(rows=64, columns=128, terms=32, stages=3, warps=4, version="torch 2.11.0"):
    sizes = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": terms, "GROUP_M": 8}
    parameters = {**sizes, "num_stages": stages, "num_warps": warps}
    return Choice("template", "inductor.triton.bmm", parameters, version)


def scores(count, rows, columns=None, terms=64, **changes):
    """Products of queries and keys, as `q @ k.transpose(1, 2) * 0.125`."""
    columns = columns or rows
    first = Operand((count, rows, terms), (rows * terms, terms, 1), "bfloat16")
    second = Operand((count, terms, columns), (columns * terms, 1, terms), "bfloat16")
    return replace(Problem(BMM, (first, second), H200, epilogue=SCALED), **changes)


def shipped():
    return select.guesser(H200)


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def evaluated():
    """What the committed records justify, worked out anew."""
    return guess_fitting.fit(Records(RECORDS))


@pytest.fixture(scope="module")
def measured():
    return pool(Records(RECORDS))


# The evidence.


def test_the_package_ships_what_its_records_justify(evaluated):
    found, _ = evaluated
    known = shipped()
    assert [replace(c, margin=1.0) for c in found.classes] == [
        replace(c, margin=1.0) for c in known.classes
    ]
    for mine, theirs in zip(found.classes, known.classes, strict=True):
        assert mine.margin == pytest.approx(
            theirs.margin, rel=0.02
        )  # other processors add otherwise
    assert found.model.templates == known.model.templates


def test_what_was_held_out_and_taken_did_win(evaluated):
    """Each family by models and a margin of the others alone; nothing that was taken lost."""
    found, held = evaluated
    choosing = [c for c in found.classes if c.templates]
    assert [(c.op, c.behind) for c in choosing] == [(BMM, True)]
    for each in choosing:
        mine = [h for h in held if h.kind == (each.op, each.behind)]
        verdict = check_families(mine)
        assert False not in verdict.values()
        assert sum(good is True for good in verdict.values()) >= guess_fitting.FAMILIES
        taken = [h for h in mine if h.predicted >= each.margin]
        assert min(h.measured for h in taken) > 1.7
        assert {encode(h.template) for h in mine} == {encode(t) for t in each.templates}


def test_all_else_is_the_librarys_with_a_reason(evaluated):
    found, _ = evaluated
    reasons = {(c.op, c.behind): c.reason for c in found.classes if not c.templates}
    assert reasons.pop((BMM, False)).startswith("held out, templates said to win did in 1 of 4")
    assert len(reasons) == 5
    assert all(r.startswith("families of sizes that were measured: ") for r in reasons.values())


def test_what_the_shipped_model_takes_of_its_own_problems_won(measured):
    taken = 0
    for key, known in measured.items():
        problem, estimates = decode_problem(key), known.estimates()
        found = shipped().guess(problem, [s.choice for s in known.samples.values()])
        if isinstance(found, Guess) and found.wins:
            taken += 1
            library = min(e.p50 for e in estimates.values() if e.choice.kind == "library")
            assert library > 1.7 * estimates[encode(found.template)].p50
            assert found.library == pytest.approx(library, rel=0.35)
    assert taken == 4


def test_a_family_shares_sizes_also_by_way_of_others(measured):
    problems = [decode_problem(key) for key in sorted(measured)]
    families = dict(zip(map(encode, problems), families_of(problems), strict=True))
    by_op = {}
    for problem in problems:
        by_op.setdefault(problem.op, set()).add(families[encode(problem)])
    assert len(by_op[BMM]) == 4
    assert len(by_op["aten.addmm.default"]) == 1  # of one model
    assert len(by_op["aten.convolution.default"]) == 1
    assert len(by_op[MM]) == 3
    assert by_op[MM] & by_op["aten.addmm.default"]  # its weights' gradients
    chain = [scores(2, 64), scores(2, 128), scores(4, 64), scores(2, 64, 128)]
    assert families_of(chain) == [0, 1, 2, 1]


def held(family, predicted, measured, tile=None):
    return Held((BMM, True), family, scores(32, 128), tile or template(), predicted, measured)


def test_a_margin_is_three_deviations_beyond_the_mean_of_the_families():
    assert margin([0.1, 0.2, 0.3]) == pytest.approx(math.exp(0.2 + 3 * 0.1))
    assert margin([-2.0, -2.0]) == guess_fitting.LEAST
    assert margin([0.1]) == margin([]) == math.inf
    found = errors_of([held(1, 2.0, 1.0), held(1, 1.0, 2.0), held(2, 3.0, 2.0)])
    assert found == pytest.approx({1: math.log(2), 2: math.log(1.5)})


def test_every_family_is_judged_by_the_margin_of_the_others():
    sure = [held(family, 2.0, 2.0) for family in range(4)]
    assert check_families(sure) == dict.fromkeys(range(4), True)
    lost = [*sure[:3], held(3, 2.0, 0.9)]
    assert check_families(lost)[3] is False
    doubted = [*sure[:3], held(3, 1.05, 0.9)]
    assert check_families(doubted)[3] is None
    one_is_far_off = [held(0, 2.0, 1.0), held(1, 2.0, 2.0), held(2, 2.0, 2.0), held(3, 1.5, 2.0)]
    assert check_families(one_is_far_off)[3] is None


# What it is fitted to.

TILES = [template(*sizes) for sizes in ((64, 128), (128, 64), (128, 128), (64, 64))]


def planted(gains):
    """Records of as many families as `gains` has, whose templates are so many times as fast."""
    random_ = random.Random(0)
    records = []
    for i, gain in enumerate(gains):
        count, side = 64 + 8 * i, 256 + 32 * i
        for columns in (side, side // 2):
            base = 3 + count * side * columns * 2e-6
            outcomes = [timed(LIBRARY, base * gain)]
            outcomes += [timed(t, base * random_.gauss(1, 0.02)) for t in TILES]
            records.append(Record(scores(count, side, columns), tuple(outcomes), PROVENANCE))
    return records


def the_class(records):
    found, _ = guess_fitting.fit(records)
    (only,) = found.classes
    return only


@pytest.fixture(autouse=True)
def _few_problems_will_do(monkeypatch):
    monkeypatch.setattr(fitting, "FEWEST", 4)
    monkeypatch.setattr(fitting, "STEPS", 60)  # of a fit, which takes seconds with more


def test_templates_that_won_in_every_family_may_be_taken():
    found = the_class(planted([2.0] * 5))
    assert {encode(t) for t in found.templates} == {encode(t) for t in TILES}
    assert guess_fitting.LEAST <= found.margin < 2
    assert (found.low[0], found.high[0], found.high[1]) == (64, 96, 384)


def test_one_family_that_lost_keeps_the_class_the_librarys():
    found = the_class(planted([2.0, 2.0, 2.0, 2.0, 0.5]))
    assert not found.templates
    assert "templates said to win did in" in found.reason


def test_few_families_keep_the_class_the_librarys():
    found = the_class(planted([2.0] * 3))
    assert not found.templates
    assert found.reason == "families of sizes that were measured: 3 of the 4 it takes"


def test_what_failed_once_is_taken_nowhere():
    records = planted([2.0] * 5)
    records.append(Record(scores(66, 256), (failed(TILES[0]), timed(LIBRARY, 9.0)), PROVENANCE))
    names = {encode(t) for t in the_class(records).templates}
    assert names == {encode(t) for t in TILES[1:]}


def test_another_tools_word_teaches_nothing():
    records, told, silent = planted([2.0] * 4), [], []
    for record in records:
        library, first, *rest = record.outcomes
        word = Outcome(first.choice, reported=0.01)
        told.append(replace(record, outcomes=(library, word, *rest)))
        silent.append(replace(record, outcomes=(library, *rest)))
    assert encode(guess_fitting.fit(told)[0]) == encode(guess_fitting.fit(silent)[0])


def test_fitting_does_not_depend_on_the_order_of_records():
    records = planted([2.0] * 4)
    assert encode(guess_fitting.fit(records)[0]) == encode(guess_fitting.fit(records[::-1])[0])


# What it says.


def test_the_library_pays_for_an_epilogue_and_for_rows_of_odd_lengths():
    known = shipped().libraries
    times = [known.microseconds(scores(96, 512, epilogue=e)) for e in (SCALED, "")]
    moved = 2 * 96 * 512 * 512 * 2 / device.find_target("h200").bandwidth * 1e6
    assert times[0] - times[1] > moved
    assert known.microseconds(scores(96, 509)) > known.microseconds(scores(96, 512))
    assert known.microseconds(replace(scores(96, 512), op="aten.relu.default")) is None


OUTSIDE = {
    "too many products": (scores(400, 128), "400 products, known from 32 to 192"),
    "too long": (scores(32, 2048), "2048 rows, known from 128 to 1024"),
    "other heads": (scores(96, 512, terms=128), "128 terms, known from 64 to 64"),
    "one row": (scores(96, 1, 512), "1 rows, known from 128 to 1024"),
    "fp16": (
        scores(
            96, 512, operands=tuple(replace(o, dtype="float16") for o in scores(96, 512).operands)
        ),
        "other dtypes were measured",
    ),
    "another GPU": (scores(96, 512, arch="sm_90:NVIDIA-H100-80GB-HBM3"), "other dtypes"),
    "another epilogue": (
        scores(96, 512, epilogue="aten.gelu.default(aten.mul.Tensor(y, 0.125))"),
        "no epilogue with aten.gelu.default was measured",
    ),
    "transposed": (
        scores(
            96,
            512,
            operands=(
                scores(96, 512).operands[0],
                Operand((96, 64, 512), (32768, 512, 1), "bfloat16"),
            ),
        ),
        "operands with these strides were not measured",
    ),
    "gaps": (
        scores(
            96,
            512,
            operands=(
                replace(scores(96, 512).operands[0], stride=(65536, 128, 1)),
                scores(96, 512).operands[1],
            ),
        ),
        "operands with these strides were not measured",
    ),
    "another operand": (
        scores(96, 512, operands=(*scores(96, 512).operands, Operand((512,), (1,), "bfloat16"))),
        "operands with these strides were not measured",
    ),
    "settings": (scores(96, 512, settings={"deterministic": True}), "the usual settings"),
    "arguments": (scores(96, 512, constants={"out_dtype": "torch.float32"}), "usual settings and"),
    "a size that varies": (
        scores(
            "n0",
            512,
            symbols=(Symbol("n0", 33, 64),),
            operands=tuple(
                replace(o, shape=("n0", *o.shape[1:])) for o in scores(64, 512).operands
            ),
        ),
        "its sizes vary",
    ),
    "no epilogue": (scores(96, 512, epilogue=""), "held out, templates said to win"),
    "another op": (replace(scores(96, 512), op="aten.baddbmm.default"), "no such op was measured"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_unlike_all_that_was_measured_is_refused(name):
    problem, reason = OUTSIDE[name]
    known = shipped()
    every = [t for c in known.classes for t in c.templates]
    found = known.guess(problem, every)
    assert isinstance(found, str)
    assert reason in found


def test_only_templates_that_are_offered_and_listed_are_taken():
    known = shipped()
    every = [t for c in known.classes for t in c.templates]
    newer = [replace(t, template="torch 2.99.0") for t in every]
    unknown = template(16, 16, 16, 1, 1)
    for offered in ([], newer, [LIBRARY, unknown]):
        assert "templates it knows" in known.guess(scores(96, 512), offered)
    found = known.guess(scores(96, 512), [LIBRARY, *newer, unknown, every[-1]])
    assert found.template == every[-1]


def test_the_fastest_is_taken_if_it_is_faster_by_the_margin():
    known = shipped()
    every = [t for c in known.classes for t in c.templates]
    problem = scores(96, 512)
    times = {encode(t): known.model.microseconds(problem, t) for t in every}
    found = known.guess(problem, every)
    assert found.microseconds == min(times.values()) == times[encode(found.template)]
    assert known.guess(problem, every[::-1]) == found
    ratio = found.library / found.microseconds
    assert ratio > found.margin
    assert found.wins
    assert changed(found, margin=ratio * 0.999).wins
    assert not changed(found, margin=ratio * 1.001).wins


def test_a_selection_says_what_the_model_thinks():
    known = shipped()
    every = tuple(t for c in known.classes for t in c.templates)
    taken = select.select_by_model(scores(96, 512), [LIBRARY, *every], LIBRARY)
    assert taken.choice.name == "inductor.triton.bmm"
    assert str(taken).endswith(", model")
    assert ", aten.bmm 50." in str(taken)
    assert select.select_by_model(scores(96, 512, arch="x86-64:amx"), every, LIBRARY) == ""
    assert "gelu" in select.select_by_model(OUTSIDE["another epilogue"][0], every, LIBRARY)


def test_the_library_is_named_where_the_margin_is_not_reached(tmp_path):
    known = shipped()
    strict = replace(known, classes=tuple(replace(c, margin=9.0) for c in known.classes))
    folder = tmp_path / "home" / "autotune"
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "home").chmod(0o700)
    (folder / predictor.file_name(H200)).write_bytes(encode(strict))
    every = tuple(t for c in known.classes for t in c.templates)
    found = select.select_by_model(scores(96, 512), [LIBRARY, *every], LIBRARY)
    assert isinstance(found, Selection)
    assert found.choice == LIBRARY
    assert "model (inductor.triton.bmm " in str(found)
    assert "taken from 9 times as fast)" in str(found)


def test_it_is_read_from_the_first_folder_that_has_a_good_one(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    file, good = own / predictor.file_name(H200), json.loads(encode(shipped()))
    folders = [own, select.SHIPPED]
    mine = replace(shipped(), libraries=replace(shipped().libraries, launch=2.0))
    file.write_bytes(encode(mine))
    assert predictor.load(folders, H200) == mine
    assert predictor.load(folders, "sm_80:other") is None
    for spoilt in (
        {"classes": "all"},
        {"libraries": good["libraries"] | {"launch": 400.0}},
        {"libraries": good["libraries"] | {"odd": [1.0]}},
        {"model": good["model"] | {"arch": "sm_80"}},
        {"model": good["model"] | {"features": 0}},
        {"classes": [c | {"margin": 0.5} for c in good["classes"]]},
        {"more": 1},
    ):
        file.write_text(json.dumps(good | spoilt))
        assert predictor.load(folders, H200) == shipped()
    file.write_bytes(b"\xff{")
    assert predictor.load(folders, H200) == shipped()


def test_it_is_known_of_which_ops_it_may_take_templates():
    assert shipped().ops() == {BMM}
    none = Guesser(shipped().model, shipped().libraries, ())
    assert none.ops() == set()
    assert none.guess(scores(96, 512), []) == "no such op was measured"
