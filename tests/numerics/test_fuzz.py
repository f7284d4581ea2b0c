"""Random programs, rewritten, are the program: the share of `make fuzz` that runs every time."""

import functools
import random
from pathlib import Path

import pytest
import torch

from fuzz import campaign, faults, twin
from fuzz.compiled import judge_compiled, suits
from fuzz.generate import generate
from fuzz.program import from_json
from fuzz.reduce import reduce

CORPUS = sorted((Path(__file__).parents[1] / "corpus").glob("*.json"))


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small are faster on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("part", range(10))
def test_500_programs(part):
    tally = campaign.judge_seeds(range(50 * part, 50 * part + 50))
    assert tally.programs == 50
    assert not tally.failures, "\n".join(failure.text() for failure in tally.failures)
    assert len(tally.fired) > 5, "the programs should be ones that rules fire on"
    assert tally.trained > 40


@pytest.mark.parametrize("seed", [s for s in range(1000, 1010) if suits(generate(s))][:5])
def test_a_program_compiled(seed):
    judge_compiled(generate(seed))


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_corpus(file):
    """Programs that were wrong once, or would be were a guard lost: replayed for ever."""
    twin.judge(from_json(file.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_corpus_compiled(file):
    judge_compiled(from_json(file.read_text()))


def test_a_seed_is_a_program():
    """In any process, and whatever ran before: a failing seed can be told by its number."""
    random.seed(1)
    first = generate(7)
    generate(8)
    assert generate(7) == first
    assert from_json(first.to_json()).steps == first.steps


def test_a_failing_program_becomes_small():
    fault = next(f for f in faults.FAULTS if f.name == "gamma dropped")
    fails = functools.partial(twin.fails, training=False)
    with fault.seeded():
        program = next(p for p in map(generate, range(200)) if fails(p))
        small = reduce(program, fails)
        assert fails(small)
    assert not fails(small)
    assert len(small.steps) == 2
    assert len(small.reproducer().splitlines()) <= 10


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_seeded(fault):
    with fault.seeded():
        pass


def test_a_fault_whose_target_is_gone_is_an_error():
    with (
        pytest.raises(LookupError),
        faults.Fault("", "passes.rule:equal_shapes", "not there", "").seeded(),
    ):
        pass


# One of each kind for every run; all of them with -m slow.
SAMPLE = (
    "epsilon doubled",
    "gamma dropped",
    "groups mixed",
    "rows need not be the same",
    "keyword defaults not spelt out",
    "operands swapped",
    "scalars lost",
    "sub for add",
    "dilation ignored",
    "rest of the epilogue lost",
)


def kills(seeded, programs):
    captured = [(program, twin.capture(program, False)) for program in map(generate, programs)]
    assert faults.killed_by(None, captured) is None, "a legal rewrite was judged wrong"
    return {fault.name: faults.killed_by(fault, captured) for fault in seeded}


def test_seeded_faults_are_caught():
    seeded = [fault for fault in faults.FAULTS if fault.name in SAMPLE]
    assert len(seeded) == len(SAMPLE)
    survivors = [name for name, at in kills(seeded, range(200)).items() if at is None]
    assert not survivors


@pytest.mark.slow
def test_all_seeded_faults_are_caught():
    assert len(faults.FAULTS) >= 60
    table = kills(faults.FAULTS, range(500))
    print("\n".join(f"{name:45} {at or 'survived'}" for name, at in table.items()))
    caught = sum(at is not None for at in table.values())
    assert caught >= 0.95 * len(table)
