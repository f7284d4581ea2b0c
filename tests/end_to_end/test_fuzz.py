"""Random programs, rewritten, are the program: the share of `make fuzz` that runs every time."""

import functools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._inductor import pattern_matcher

from fuzz import campaign, faults, forms, quantized, twin
from fuzz import generate as generator
from fuzz.builder import Builder
from fuzz.compiled import judge_compiled, suits
from fuzz.generate import generate
from fuzz.program import Leaf, Program, from_json
from fuzz.reduce import reduce
from ipex_inductor.passes import joint

CORPUS = sorted((Path(__file__).parents[1] / "corpus").glob("*.json"))


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small are faster on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_some_programs():
    """Which take half a second each; the others with -m slow."""
    judge(range(25, 33))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_500_programs(part):
    judge(range(50 * part, 50 * part + 50))


def judge(seeds):
    tally = campaign.judge_seeds(seeds)
    assert tally.programs == len(seeds)
    assert not tally.failures, "\n".join(failure.text() for failure in tally.failures)
    assert len(tally.fired) > 5, "the programs should be ones that rules fire on"
    assert tally.trained > 0.8 * len(seeds)


def test_programs_of_any_size():
    """Most of those that try for it can be replayed at two sizes."""
    asked = range(0, 500, generator.DYNAMIC)
    assert sum(bool(generate(seed).dynamic) for seed in asked) > len(asked) / 2


SEEDS = [seed for seed in range(1000, 1010) if suits(generate(seed))][:5]


# Seven seconds each.
@pytest.mark.parametrize(
    "seed", [*SEEDS[:3], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[3:])]
)
@pytest.mark.sampled
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


def test_every_rule_has_its_turn():
    count = len(forms.turns())
    drawn = Counter(name for seed in range(count) for name in forms.due(seed, generator.RULES))
    assert drawn == {name: n * generator.RULES for name, n in Counter(forms.turns()).items()}
    assert drawn.keys() == joint.RULE_NAMES


def test_what_is_no_pattern_has_a_piece():
    assert forms.BESIDES.keys() == joint.RULE_NAMES - {rule.name for rule in joint.RULES}


@pytest.mark.parametrize("name", sorted({rule.name for rule in joint.RULES}))
@pytest.mark.sampled
def test_a_rule_fires_on_its_own_form(name):
    """Whatever the rule: its example with other sizes is a program that it rewrites."""
    for seed in range(3):
        rng = random.Random(seed)
        drawn = forms.draw(rng, name)
        b = Builder(rng, drawn.dtype or "float32")
        program = b.program([drawn.make(b)], b.dtype)
        _, report = twin.rewrite(twin.capture(program, False))
        if any(e.subject == name for e in report.events if e.kind in ("fired", "left")):
            return
    pytest.fail(f"{name} never fired on what was drawn for it")


def test_a_dynamic_program_is_judged_at_two_sizes():
    leaves = Leaf("x0", "input", (7, 11, 4)), Leaf("w0", "parameter", (6, 4))
    sizes = ("n0", "x0.shape[0]"), ("n1", "x0.shape[1]")
    flat = (*sizes, ("v0", "F.gelu(F.linear(x0, w0)).view(n0 * n1, 6)"))
    rows = (*sizes, ("v0", "F.linear(x0, w0).view(n0, 66)"))  # which is for a length of 11
    for steps, other in ((flat, (9, 10)), (rows, (9, 11))):
        program = Program(leaves, steps, ("v0",), dynamic=((7, 9), (11, 10)))
        twin.judge(program)
        first, second = twin.capture(program, False).trials
        assert first.program == program
        assert second.program.leaves[0].shape == (*other, 4)


def test_a_pass_that_holds_for_one_size_alone_is_noticed(monkeypatch):
    leaf = Leaf("x0", "input", (7, 4))
    program = Program((leaf,), (("v0", "torch.relu(x0)"),), ("v0",), dynamic=((7, 9),))
    twin.judge(program)
    monkeypatch.setattr(joint, "drop_noops", lambda graph: _take_sizes(graph))
    with pytest.raises(twin.Mismatch, match="Eq"):
        twin.judge(program)


def _take_sizes(graph):
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            tuple(map(int, node.meta["val"].shape))


def test_a_failing_program_becomes_small():
    fault = next(f for f in faults.FAULTS if f.name == "gamma dropped")
    fails = functools.partial(twin.fails, training=False)
    with fault.seeded():
        program = next(p for p in map(generate, range(SAMPLE[fault.name], 200)) if fails(p))
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
        faults.Fault("", "passes.engine.rule:equal_shapes", "not there", "").seeded(),
    ):
        pass


# The matcher of torch 2.15 compares keywords itself.
COMPARED = hasattr(pattern_matcher, "_has_undeclared_non_default_kwarg")
# One of each kind for every run, with the seed of a program that shows it; all with -m slow.
SAMPLE = {
    "epsilon doubled": 5,
    "gamma dropped": 6,
    "groups mixed": 85,
    "rows need not be the same": 201,
    **({} if COMPARED else {"keyword defaults not spelt out": 23}),
    "operands swapped": 3,
    "scalars lost": 5,
    "sub for add": 28,
    "dilation ignored": 2,
    "rest of the epilogue lost": 0,
    "scale squared": 15,
    "gate and value swapped": 13,
    "padding transposed": 84,
}


def kills(seeded, programs):
    captured = [(program, twin.capture(program, False)) for program in map(generate, programs)]
    assert faults.killed_by(None, captured) is None, "a legal rewrite was judged wrong"
    return {fault.name: faults.killed_by(fault, captured) for fault in seeded}


@pytest.mark.parametrize("seed", sorted({*SAMPLE.values()}))
def test_seeded_faults_are_caught(seed):
    """Those of one program; if another generator draws it otherwise, SAMPLE needs another seed."""
    seeded = [fault for fault in faults.FAULTS if SAMPLE.get(fault.name) == seed]
    assert len(seeded) == [*SAMPLE.values()].count(seed)
    caught = kills(seeded, [seed])
    left = [fault for fault in seeded if caught[fault.name] is None]
    others = kills(left, range(200)) if left else {}
    assert not left, {name: number and number - 1 for name, number in others.items()}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_seeded_faults_are_caught():
    assert len(faults.FAULTS) >= 60
    table = kills(faults.FAULTS, range(1000))
    print("\n".join(f"{name:45} {at or 'survived'}" for name, at in table.items()))
    caught = sum(at is not None for at in table.values())
    assert caught >= 0.95 * len(table)


# The subjects of the 23 INT8 patterns, with results in fp32 and in int8.
INT8_RULES = {
    f"int8 {layer}{follow.replace('sum', 'add') and '+' + follow.replace('sum', 'add')}{end}"
    for layer, row in quantized.FOLLOWERS.items()
    for follow in row
    for end in ("", "+quantize")
}


def judge_quantized(seeds):
    tally = quantized.judge_seeds(seeds)
    assert tally.programs == len(seeds)
    assert not tally.failures, "\n".join(failure.text() for failure in tally.failures)
    return tally


def test_some_quantized_programs():
    """The first four; those of all 23 patterns with -m slow."""
    tally = judge_quantized(range(4))
    assert {name for name in tally.fired if name.startswith("int8 conv")}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_100_quantized_programs(part):
    tally = judge_quantized(range(100 * part, 100 * part + 100))
    assert len({tag for tag in tally.tags if tag.startswith("pattern: ")}) == 23
    assert tally.fired.keys() >= INT8_RULES, INT8_RULES - tally.fired.keys()


def test_a_quantized_program_notices_a_wrong_zero_point(monkeypatch):
    """The judge is judged: a kernel's factors with another zero point are noticed."""
    program = quantized.generate(0)
    assert not quantized.fails(program)
    plain = quantized.twin.joint.products._Builder.numbers

    def shift(self, value):
        scale, zero_point = plain(self, value)
        return scale, self.call(torch.ops.aten.add.Tensor, zero_point, 1)

    monkeypatch.setattr(quantized.twin.joint.products._Builder, "numbers", shift)
    assert quantized.fails(program)
