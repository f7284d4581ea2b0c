"""The race and its judge, with clocks and results made up."""

import math
import random
import statistics
import time

import pytest
import torch

from ipex_inductor.autotune import measure, timers
from ipex_inductor.autotune.measure import (
    Candidate,
    Judge,
    Runner,
    noise_of,
    race,
    timings,
    verify_candidate,
)
from ipex_inductor.autotune.pool import TIE_SHARE
from ipex_inductor.autotune.record import Choice

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


STAGED = sum(measure.STAGES)  # blocks of all that are in to the last stage


def choice(name):
    return Choice("library", name)


def runner(name, round):
    """What takes as long as `round` says, wherever it is."""
    return Runner(Candidate(choice(name), round), error=0.0)


def anywhere():
    return lambda round: round


def rounds_of(runner):
    return sum(map(len, runner.blocks))


def steady(microseconds, spread=0.01, seed=0):
    random_ = random.Random(f"{microseconds} {seed}")
    return lambda: microseconds * random_.gauss(1, spread)


def exact_and_eager(dtype=torch.float32):
    a, b = (torch.randn(32, 48, dtype=torch.float64) for _ in range(2))
    a, b = a.to(dtype), b.to(dtype)
    return a, b, Judge(a.double() @ b.double().t(), a @ b.t())


def test_torchs_own_result_and_one_summed_otherwise_are_right():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b, judge = exact_and_eager(dtype)
        assert judge.why_wrong(a @ b.t()) is None
        first, last = (a[:, k].float() @ b[:, k].float().t() for k in (slice(24), slice(24, 48)))
        assert judge.why_wrong((first + last).to(dtype)) is None
        assert judge.tolerance < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda y: y.index_put((torch.tensor(3), torch.tensor(4)), y[3, 4] * 1.01), "wrong by"),
        (lambda y: y * (1 + 1e-5), "wrong by"),
        (lambda y: y.masked_fill(y == y.max(), math.nan), "wrong by nan where"),
        (lambda y: y.masked_fill(y == y.max(), math.inf), "wrong by inf"),
        (lambda y: y.roll(1, 0), "wrong by"),
        (lambda y: y + 5e-7 * y.abs().max(), "on average where"),
        (lambda y: y.double(), "its dtype is torch.float64, not torch.float32"),
        (lambda y: y[:, :-1], "its shape is"),
        (lambda y: y.t().contiguous().t(), "its stride is"),
    ],
)
def test_what_is_wrong(spoil, reason):
    a, b, judge = exact_and_eager()
    assert reason in judge.why_wrong(spoil(a @ b.t()))


def test_strides_of_one_element_say_nothing():
    """A convolution's image of one pixel, as eager and as Inductor lay it out."""
    x = torch.randn(64, 8, 1, 1, dtype=torch.float64)
    judge = Judge(x, x.float())
    result = x.float().as_strided(x.shape, (8, 1, 8, 8))
    assert result.stride() != judge.eager.stride()
    assert judge.why_wrong(result) is None


def test_a_choice_that_rounds_like_a_lower_precision_is_wrong():
    """As a TF32 or bf16 accumulator would be where torch itself uses fp32."""
    a, b, judge = exact_and_eager()
    assert judge.why_wrong((a.bfloat16() @ b.t().bfloat16()).float())


def test_candidates_are_judged_on_copies():
    a, b, judge = exact_and_eager()

    def writes(inputs):
        result = inputs[0] @ inputs[1].t()
        inputs[0].zero_()
        return result

    found = verify_candidate(Candidate(choice("writes"), writes), judge, [a, b])
    assert found.reason == "it writes its inputs"
    assert a.abs().sum() > 0
    assert isinstance(
        verify_candidate(Candidate(choice("right"), lambda i: i[0] @ i[1].t()), judge, [a, b]),
        float,
    )


def test_a_message_of_pages_is_its_first_line():
    def fails(_):
        raise RuntimeError("\n  invalid argument  \nand pages more")

    a, b, judge = exact_and_eager()
    found = verify_candidate(Candidate(choice("fails"), fails), judge, [a, b])
    assert found.reason == "RuntimeError: invalid argument"


def test_one_element_that_stands_for_all_is_copied_as_such():
    wide = torch.randn(3, 1).expand(3, 5)
    copy = measure.copy(wide)
    assert copy.stride() == wide.stride()
    assert torch.equal(copy, wide)
    assert copy.data_ptr() != wide.data_ptr()


def test_the_slower_half_drops_out_and_keeps_what_was_measured():
    runners = [runner(str(us), steady(us)) for us in (80, 10, 40, 20, 60, 30, 70, 50)]
    race(runners, anywhere)
    blocks = {r.candidate.choice.name: len(r.blocks) for r in runners}
    assert [blocks[str(us)] for us in range(10, 90, 10)] == [8, 8, 2, 2, 1, 1, 1, 1]
    assert {rounds_of(r) for r in runners} == {8 * measure.ROUNDS, 2 * measure.ROUNDS, 8}
    assert min(runners, key=Runner.p50).candidate.choice.name == "10"


def test_whoever_is_near_the_fastest_stays_in():
    runners = [runner(str(i), steady(100 + i, 0.001)) for i in range(8)]
    race([*runners, runner("slow", steady(150))], anywhere, most=STAGED)
    assert {len(r.blocks) for r in runners} == {STAGED}


def placed(kind, us, spread, rng):
    """What takes `us`, but for what a place in memory changes of it and what shakes each round."""
    run = (us, spread, rng)
    return Runner(Candidate(Choice(kind, kind), run), error=0.0)


def places(shared):
    """Each changes what each takes by itself, and what all take by `shared`."""
    rng = random.Random(0)

    def place():
        all_of_them = rng.gauss(1, shared)

        def prepare(run):
            us, spread, own = run
            here = us * all_of_them * own.gauss(1, spread)
            return lambda: here * own.gauss(1, 0.002)

        return prepare

    return place


def blocks_of_two(kind, share, spread, shared=0.0):
    """Of a template and a second that takes longer by `share`, after a race."""
    rng = random.Random(0)
    runners = [placed("template", 10, spread, rng), placed(kind, 10 * (1 + share), spread, rng)]
    race(runners, places(shared))
    return [len(r.blocks) for r in runners]


@pytest.mark.parametrize(
    ("kind", "share", "spread", "shared", "blocks"),
    [
        ("template", 0.0, 0.003, 0.0, STAGED),  # ties, and no doubt of it: 1.5 % from the edge
        ("library", 0.05, 0.003, 0.0, STAGED),  # lost: 3.5 % from it
        ("library", -0.05, 0.003, 0.0, STAGED),  # the fastest, and would win by a tie too
        ("library", -0.015, 0.004, 0.0, STAGED),  # 3 % from losing, though no tie for the other
        ("library", TIE_SHARE, 0.003, 0.0, measure.MOST),  # on the edge: nothing can tell
        ("library", 0.03, 0.01, 0.0, None),  # open for a while
        ("library", 0.05, 0.003, 0.1, STAGED),  # what is slow in both tells nothing of either
    ],
)
def test_a_race_goes_on_while_it_is_open_who_ties(kind, share, spread, shared, blocks):
    found = blocks_of_two(kind, share, spread, shared)
    assert found[0] == found[1]
    if blocks is None:
        assert STAGED < found[0] < measure.MOST
    else:
        assert found[0] == blocks


def test_whoever_is_settled_leaves_the_race_while_others_go_on():
    rng = random.Random(0)
    takes = {"edge": 1 + TIE_SHARE, "same": 1.0, "near": 1.06}
    runners = {name: placed("template", 10 * t, 0.003, rng) for name, t in takes.items()}
    race([*runners.values(), placed("template", 9.99, 0.003, rng)], places(0.0))
    blocks = {name: len(r.blocks) for name, r in runners.items()}
    assert blocks == {"edge": measure.MOST, "same": STAGED, "near": STAGED}


def test_what_is_open_is_measured_no_longer_than_a_few_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])

    def place():
        now[0] += measure.LONGEST / 3
        return places(0.0)()

    def blocks(deadline):
        now[0], rng = 0.0, random.Random(0)
        takes = (10, 10 * (1 + TIE_SHARE))
        runners = [placed("template", us, 0.01, rng) for us in takes]
        race(runners, place, deadline=deadline)
        return {len(r.blocks) for r in runners}

    assert blocks(deadline=math.inf) == {STAGED + 3}
    assert blocks(deadline=(STAGED + 1.5) * measure.LONGEST / 3) == {STAGED + 2}


# What a place in memory changed of kernels of 4 to 30 us, by ten tunings of 60 problems on H200s
# (the noise of eight blocks, times their root, by that of a median): for itself, and for all.
LIBRARY_SPREAD, TEMPLATE_SPREAD, SHARED_SPREAD = 0.022, 0.018, 0.02


def repeated(most):
    """Sixty problems, each raced ten times: by how much the library's is slower, and if it wins."""
    rng = random.Random(0)
    for step in range(60):
        share = (step - 24) / 200  # from 12 % faster to 17.5 % slower: as dense as those 60 are
        wins = []
        for _ in range(10):
            library = placed("library", 10 * math.exp(share), LIBRARY_SPREAD, rng)
            template = placed("template", 10, TEMPLATE_SPREAD, rng)
            race([library, template], places(SHARED_SPREAD), most=most)
            wins.append(math.log(library.p50() / template.p50()) <= TIE_SHARE)
        yield share, wins


def test_repeated_races_agree_more_often_if_what_is_open_goes_on():
    agree, wrong, cost = {}, {}, {}
    for most in (STAGED, measure.MOST):
        found = [*repeated(most)]
        agree[most] = statistics.fmean(len(set(wins)) == 1 for _, wins in found)
        missed = [(s, s if w else -s) for s, wins in found for w in wins if w != (s <= TIE_SHARE)]
        wrong[most] = len(missed) / 600
        cost[most] = max(lost for _, lost in missed)
    print(agree, wrong, cost)
    # Of seven seeds: 0.87 to 0.90 agree at first (0.87 of the tunings did), then 0.93 to 0.95.
    assert agree[STAGED] <= 0.9
    assert agree[measure.MOST] > 0.92
    assert wrong[measure.MOST] < 0.7 * wrong[STAGED]  # half the noise is half the wrong ones
    assert cost[measure.MOST] < TIE_SHARE + 2 * 0.006  # the noise of 32 blocks of both


def test_what_slows_the_machine_down_slows_all():
    """A clock that drifts by half while it runs, and a difference of 3 %: found in every order."""
    for seed in range(50):
        turn = [0]

        def drifting(us, turn=turn, seed=seed):
            inner = steady(us, 0.002, seed)

            def round():
                turn[0] += 1
                return inner() * (1 + 0.5 * turn[0] / 180)

            return round

        runners = [runner("slow", drifting(103)), runner("fast", drifting(100))]
        race(runners if seed % 2 else runners[::-1], anywhere)
        assert runners[1].p50() < runners[0].p50()


def test_who_dropped_out_is_told_in_proportion_to_who_stayed():
    """A clock that is twice as slow from the second block on; who was slower stays slower."""
    started = [0]

    def place():
        started[0] += 1
        slow = 2.0 if started[0] > 1 else 1.0
        return lambda round: lambda: slow * round()

    runners = [runner(str(us), steady(us, 0.001)) for us in (100, 105, 110, 120)]
    race(runners, place)
    assert [len(r.blocks) for r in runners] == [8, 8, 1, 1]
    times = [t.p50 for t in timings(runners)]
    assert times == pytest.approx([200, 210, 220, 240], rel=0.01)  # noise: 0.001 a round


def test_every_block_is_at_a_place_of_its_own_and_whoever_cannot_be_timed_is_out():
    places = []

    def place():
        places.append([])

        def prepare(run):
            if len(places) == 2 and run() > 25:
                raise RuntimeError("no graph\nof this")
            places[-1].append(run())
            return run

        return prepare

    runners = [runner(str(us), lambda us=us: us) for us in (10, 20, 30, 60, 70)]
    race(runners, place)
    assert places == [[10, 20, 30, 60, 70], [10, 20], *[[10, 20]] * 6]
    runners = [runner(str(us), lambda us=us: us) for us in (30, 30.5, 10)]
    places[:] = [[]]
    race(runners, place)
    assert [r.failure for r in runners] == 2 * ["it cannot be timed: RuntimeError: no graph"] + [""]


def test_memory_that_is_short_is_nobodys_failure_and_loses_no_block():
    def short(*_):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        race([runner("a", steady(10))], short)
    with pytest.raises(torch.OutOfMemoryError):
        race([runner("a", steady(10))], lambda: short)
    for second in (short, lambda: short):
        places = iter([anywhere, second])
        runners = [runner("a", steady(10)), runner("b", steady(11))]
        race(runners, lambda places=places: next(places)())
        assert [(len(r.blocks), r.failure) for r in runners] == [(1, ""), (1, "")]


def test_an_error_of_the_device_is_for_the_parent_to_blame():
    def fails(_):
        raise torch.AcceleratorError("an illegal memory access", 700)

    a, b, judge = exact_and_eager()
    with pytest.raises(torch.AcceleratorError):
        verify_candidate(Candidate(choice("fails"), fails), judge, [a, b])
    with pytest.raises(torch.AcceleratorError):
        race([runner("a", steady(10))], lambda: fails)


def test_nobody_always_follows_the_same():
    order = []
    runners = [runner(name, steady(10, seed=name)) for name in "abc"]
    race(runners, anywhere, most=1, say=lambda r: order.append(r.candidate.choice.name))
    turns = ["".join(order[i : i + 3]) for i in range(3, len(order), 3)]
    assert order[:3] == ["a", "b", "c"]  # as they are prepared
    assert turns == (["abc", "bca", "cab"] * 3)[: measure.ROUNDS]


def test_past_the_deadline_a_few_rounds_are_run():
    runners = [runner("a", steady(10)), runner("b", steady(11))]
    race(runners, anywhere, deadline=time.monotonic() - 1)
    assert {rounds_of(r) for r in runners} == {measure.FEWEST}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("place", [0.0, 0.01, 0.1])
def test_the_noise_is_how_far_the_median_is_off(count, place):
    """Of 1,000 medians of known rounds at known places: their spread against what was said."""
    random_ = random.Random(0)

    def blocks():
        for _ in range(count):
            here = 100 * random_.gauss(1, place)
            yield [random_.gauss(here, 3) for _ in range(measure.ROUNDS)]

    samples = [[*blocks()] for _ in range(1000)]
    medians = [statistics.median([t for block in s for t in block]) for s in samples]
    said = statistics.fmean([noise_of(s, place) for s in samples])
    # The errors of few values are themselves known by few: 8 rounds, or 4 medians.
    assert 0.85 < said / (statistics.stdev(medians) / 100) < 1.35


@pytest.mark.parametrize("count", [4, 8])
def test_equal_kernels_hardly_ever_differ_by_three_errors(count):
    """Which is what `compare` and ties go by: in less than 1.5 % of 4,000 pairs of races."""
    random_ = random.Random(0)

    def race_of():
        places = [100 * random_.gauss(1, 0.01) for _ in range(count)]
        blocks = [[random_.gauss(here, 0.2) for _ in range(measure.ROUNDS)] for here in places]
        return statistics.median([t for block in blocks for t in block]), noise_of(blocks, 0.01)

    pairs = [(race_of(), race_of()) for _ in range(4000)]
    far = [abs(math.log(a / b)) > 3 * math.hypot(m, n) for (a, m), (b, n) in pairs]
    assert sum(far) / len(far) < 0.015


def test_noise_sees_a_drift_that_single_rounds_do_not_show():
    drifting = [100 + i / 5 for i in range(64)]
    still = [100 + (i * 37 % 64) / 5 for i in range(64)]  # the same values, shuffled
    cut = [[times[i : i + 8] for i in range(0, 64, 8)] for times in (drifting, still)]
    assert noise_of(cut[0], 0.0) > 2 * noise_of(cut[1], 0.0)


def test_one_round_says_nothing_of_its_noise():
    assert noise_of([[5.0]], 0.0) == 1.0


def test_who_dropped_out_has_the_noise_of_places_that_others_show():
    def place():
        here = random_.gauss(1, 0.05)
        return lambda round: lambda: here * round()

    random_ = random.Random(0)
    said = []
    for seed in range(200):
        runners = [runner(str(us), steady(us, 0.001, seed)) for us in (100, 102, 200)]
        race(runners, place)
        first, _, last = timings(runners)
        assert last.rounds == measure.ROUNDS
        said.append((first.noise, last.noise))
    stayed, dropped = (statistics.fmean(column) for column in zip(*said, strict=True))
    assert 0.04 < dropped < 0.06
    assert 0.04 < stayed * math.sqrt(8) / measure.OF_MEDIAN < 0.06


def test_a_timing_has_its_percentiles_in_order():
    entrant = runner("a", steady(10, 0.1))
    race([entrant], anywhere)
    (timing,) = timings([entrant])
    assert timing.p20 <= timing.p50 <= timing.p80
    assert timing.rounds == rounds_of(entrant) == STAGED * measure.ROUNDS


def test_the_cpu_clock_takes_every_buffer_in_turn_and_counts_one_call():
    met = []

    def run(inputs):
        met.append(inputs[0])
        time.sleep(100e-6)

    buffers = [[n] for n in range(7)]
    round = timers.CpuClock().prepare(run, buffers)
    del met[:]
    microseconds = [round() for _ in range(10)]
    assert met == [n % 7 for n in range(met[0], met[0] + len(met))]
    assert all(100 <= us < 2000 for us in microseconds)


def test_of_two_sizes_as_many_calls_of_each(monkeypatch):
    monkeypatch.setattr(timers, "CPU_SAMPLES", 1)
    met = []
    round = timers.CpuClock().prepare(lambda i: met.append(i[0]), [["a"], ["b"]] * 3, sizes=2)
    del met[:]
    round()
    assert met.count("a") == met.count("b") > 0


@pytest.mark.parametrize("size", [1, 10**6, 10**9, 10**12])
def test_buffers_are_more_than_the_caches_and_less_than_memory(size):
    count = timers.buffers_against_caches(CPU, size)
    assert 1 <= count <= timers.MOST_BUFFERS
    assert count * size <= max(size, timers.MOST_BYTES)
    if 10**5 < size < 10**9:
        assert count * size >= timers._cache(CPU)


def test_moved_buffers_are_copies_elsewhere():
    buffers = [[torch.randn(4, 6).t(), torch.randn(3, 1).expand(3, 5)] for _ in range(2)]
    for inputs, copies in zip(buffers, timers.relocate_buffers(buffers, seed=1), strict=True):
        for tensor, copy in zip(inputs, copies, strict=True):
            assert torch.equal(tensor, copy)
            assert tensor.stride() == copy.stride()
            assert tensor.data_ptr() != copy.data_ptr()


def test_a_round_of_a_gpu_is_followed_by_a_rest(monkeypatch):
    now, rests = [0.0], []

    def round():
        now[0] += 3.0
        return 7.0

    monkeypatch.setattr(timers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(timers.time, "sleep", rests.append)
    assert timers._add_rest(round)() == 7.0
    assert rests == [3.0]


def test_integers_may_be_a_step_off_where_values_are_ties():
    """One of a thousand may, as roundings of fp32 decide it; not every tenth, nor by two steps."""
    exact = torch.randint(-128, 128, (10_000,), generator=torch.Generator().manual_seed(0)).double()
    judge = Judge(exact, exact.to(torch.int8))
    for every, step, is_wrong in ((1000, 1, False), (10, 1, True), (1000, 2, True)):
        result = exact.clone()
        result[::every] -= step * exact[::every].sign()
        assert bool(judge.why_wrong(result.to(torch.int8))) == is_wrong, (every, step)
