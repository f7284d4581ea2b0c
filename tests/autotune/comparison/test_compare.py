"""Pools and comparisons: verdicts that know about noise."""

import math
import random

import pytest

from ipex_inductor.autotune.comparison.compare import BAND, Exit, Verdict, compare
from ipex_inductor.autotune.pool import TIE_SHARE, pool
from ipex_inductor.autotune.record import Provenance
from support.autotune.autotune_records import LIBRARY, PROVENANCE, TILES, failed, record, timed

pytestmark = pytest.mark.unit


def best(*records):
    (only,) = pool(records).values()
    return only.best()


def test_the_fastest_is_the_best():
    assert best(record(timed(LIBRARY, 10.0), timed(TILES[0], 8.0))).choice == TILES[0]


def test_as_good_as_the_fastest_is_a_library_call_then_the_first_by_name():
    assert best(record(timed(TILES[0], 10.0), timed(LIBRARY, 10.1))).choice == LIBRARY
    for one, other in ((TILES[0], TILES[1]), (TILES[1], TILES[0])):
        assert best(record(timed(one, 10.0), timed(other, 10.05))).choice == TILES[1]  # "128x64"


@pytest.mark.parametrize("noise", [1e-4, 0.01, 0.5])
@pytest.mark.parametrize("share", [0.99, 1.01])
def test_how_near_ties_does_not_depend_on_the_noise_found(noise, share):
    """Which tunings of the same find thrice as large or as small: the line would move with it."""
    slower = timed(LIBRARY, 10.0 * math.exp(share * TIE_SHARE), noise)
    chosen = best(record(timed(TILES[0], 10.0, noise), slower)).choice
    assert chosen == (LIBRARY if share < 1 else TILES[0])


def test_what_failed_once_is_never_the_best():
    good, bad = timed(TILES[0], 1.0), failed(TILES[0])
    assert best(record(timed(LIBRARY, 10.0), good), record(bad)).choice == LIBRARY
    assert best(record(bad)) is None


def test_measurements_that_differ_by_more_than_their_noise_say_so():
    quiet = [record(timed(LIBRARY, p50, noise=1e-4)) for p50 in (9.0, 10.0, 11.0)]
    assert best(*quiet).noise == pytest.approx(0.1 * math.sqrt(math.pi / 6), rel=0.01)
    assert best(*quiet[:1]).noise == 1e-4


def test_each_verdict():
    a = [
        record(timed(LIBRARY, 10.0), rows=1),
        record(timed(LIBRARY, 10.0), timed(TILES[0], 20.0), rows=2),
        record(timed(LIBRARY, 10.0), rows=3),
        record(timed(LIBRARY, 10.0), rows=4),
        record(timed(LIBRARY, 10.0), rows=5),
        record(timed(LIBRARY, 10.0), rows=7),
    ]
    b = [
        record(timed(LIBRARY, 10.1), rows=1),
        record(timed(LIBRARY, 20.0), timed(TILES[0], 10.1), rows=2),
        record(timed(LIBRARY, 5.0), rows=3),
        record(timed(LIBRARY, 20.0), rows=4),
        record(timed(LIBRARY, 10.0), rows=6),
        record(failed(LIBRARY), rows=7),
    ]
    result = compare(a, b)
    verdicts = {row.problem.operands[0].shape[0]: row.verdict for row in result.rows}
    assert verdicts == {
        1: Verdict.SAME,
        2: Verdict.NOISE,
        3: Verdict.FASTER,
        4: Verdict.SLOWER,
        5: Verdict.ONLY_A,
        6: Verdict.ONLY_B,
        7: Verdict.FAILED,
    }
    assert result.rows[0].verdict is Verdict.FAILED  # before what is but slower
    assert abs(result.rows[1].effect) == pytest.approx(math.log(2))
    assert result.geometric_mean() == pytest.approx((1.01**2) ** (1 / 4))
    assert result.exit() is Exit.REGRESSIONS
    assert compare(a, a).exit() is Exit.NOTHING_WORSE
    assert compare(a[:3], b[:3]).exit() is Exit.NOTHING_WORSE


def test_architectures_are_compared_only_on_request():
    a, b = [record(arch="sm_80")], [record(timed(LIBRARY, 5.0), arch="sm_90")]
    assert compare(a, b).exit() is Exit.NOT_COMPARABLE
    assert compare(a, b).reason == "A is of sm_80, B of sm_90"
    assert compare(a, b, cross=True).count() == {Verdict.FASTER: 1}
    assert compare(a, a + b, cross=True).exit() is Exit.NOT_COMPARABLE


def test_nothing_in_common():
    assert compare([], []).geometric_mean() is None
    result = compare([record(rows=1)], [record(rows=2)])
    assert result.count() == {Verdict.ONLY_A: 1, Verdict.ONLY_B: 1}
    assert result.geometric_mean() is None


def measured(rng, truth, noise, rows, provenance=PROVENANCE):
    """What a tuning of these choices finds, if its noise is as large as it says."""
    outcomes = [timed(c, t * math.exp(rng.gauss(0, noise)), noise) for c, t in truth]
    return record(*outcomes, rows=rows, provenance=provenance)


@pytest.mark.parametrize("records_a_side", [1, 3])
def test_planted_effects(records_a_side):
    """Of 1,000 pairs at most 1 % seem to differ that do not; 95 % of twice the band are found."""
    rng = random.Random(0)
    a, b, planted = [], [], {}
    for rows in range(1, 1001):
        noise = 10 ** rng.uniform(-3, -1.5)
        truth = [(choice, rng.uniform(10, 20)) for choice in (LIBRARY, *TILES)]
        band = BAND * noise * math.sqrt(2 / records_a_side)
        planted[rows] = effect = rng.choice([0, 0, 2 * band, -2 * band])
        changed = [(choice, p50 * math.exp(effect)) for choice, p50 in truth]
        for turn in range(records_a_side):
            when = Provenance(f"2026-11-21T12:00:0{turn}Z", "test device", "2.13.0", "00")
            a.append(measured(rng, truth, noise, rows, when))
            b.append(measured(rng, changed, noise, rows, when))
    found = {row.problem.operands[0].shape[0]: row.verdict for row in compare(a, b).rows}
    sign = {Verdict.SLOWER: 1, Verdict.FASTER: -1}
    wrong = sum(bool(sign.get(found[rows])) for rows, effect in planted.items() if not effect)
    right = sum(
        sign.get(found[rows], 0) == math.copysign(1, effect)
        for rows, effect in planted.items()
        if effect
    )
    without = sum(not effect for effect in planted.values())
    print(f"false {wrong} of {without}, found {right} of {1000 - without}")
    assert wrong <= 0.01 * without
    assert right >= 0.95 * (1000 - without)
