"""What stands in for a measurement: another torch's, bf16's, one that cuDNN timed nothing in."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ipex_inductor import compat
from ipex_inductor.autotune import select
from ipex_inductor.autotune.database import Shard, write
from ipex_inductor.autotune.record import Outcome, Record, decode_problem, encode
from ipex_inductor.lowerings.select import library
from support.autotune.autotune_records import PROVENANCE, timed
from support.autotune.shipped_tables import H200, of_batch, offered_on

pytestmark = pytest.mark.unit

CONVOLUTION = "ipex.conv.default"
STREAMED = "ipex.triton.streamed"
TIMED = "cudnn.benchmark"


@pytest.fixture
def of_torch(monkeypatch):
    return lambda version: monkeypatch.setattr(compat, "TEMPLATES", f"torch {version}")


def as_of(choice, version):
    """The same of another torch; a library's plain call is every torch's."""
    of, comma, digest = choice.template.partition(",")
    return replace(choice, template=of and f"torch {version}{comma}{digest}")


SOURCES = {"h200": "shipped", "h100": f"derived from {H200}"}


def quickly(which, *others):
    """Each GPU with each of the others; three seconds each, so that a few pairs are quick."""
    return [
        pytest.param(
            gpu, SOURCES[gpu], other, marks=[pytest.mark.slow] * ((gpu, other) not in which)
        )
        for other in others
        for gpu in SOURCES
    ]


VERSIONS = [("h200", "2.11.1"), ("h100", "2.13.0"), ("h200", "2.15.0")]


@pytest.mark.sampled("h200-shipped-2.15.0", "h100-derived from sm_90:NVIDIA-H200-2.13.0")
@pytest.mark.parametrize(
    ("gpu", "source", "version"), quickly(VERSIONS, "2.11.1", "2.13.0", "2.15.0")
)
def test_the_table_stands_in_for_that_of_another_torch(gpu, source, version, of_torch):
    """Of each op of ours the very choice, compiled by that torch; and the source says whose."""
    of_torch("2.11.0")
    _, known, there = offered_on(gpu)
    of_torch(version)
    offered, *_ = offered_on(gpu)
    kinds = [each.choice for each in select.lookup(offered, None).values()]
    assert not any(choice.template for choice in kinds), "they are to be measured where that may be"
    found = {**select.nearest(offered, None), **select.select_by_stand_in(offered, None)}
    assert found.keys() == offered.keys()
    for key, each in found.items():
        wanted = known[encode(there[key])].choice
        assert each.choice == as_of(wanted, version)
        assert each.source == source + " by torch 2.11.0" * bool(wanted.template)
        assert not each.is_measured or not wanted.template
    assert {each.choice.name for each in found.values()} >= {"cudnn.convolution_relu", STREAMED}


def test_no_table_stands_in_for_a_torch_that_nobody_tried(of_torch):
    of_torch("2.16.0")
    offered, *_ = offered_on("h100")
    found = {**select.nearest(offered, None), **select.select_by_stand_in(offered, None)}
    assert not any(each.choice.template for each in found.values())


@pytest.fixture(scope="module")
def problem():
    """A convolution of an H200 at a batch that no table has."""
    offered, *_ = offered_on("h200")
    return next(
        of_batch(48, p)
        for p in map(decode_problem, offered)
        if (p.op, p.operands[0].shape) == (CONVOLUTION, (128, 64, 56, 56))
        and p.operands[1].shape[:2] == (256, 64)
    )


@pytest.fixture
def conv(problem, of_torch, tmp_path):
    """That convolution with torch 2.13, and a database.

    `kept` writes records of it at a batch: microseconds, or why it failed, of a choice by a torch.
    """
    of_torch("2.13.0")
    choices = [call.choice for call in library.calls(problem)]
    kinds = {kind: [c for c in choices if c.kind == kind] for kind in ("library", "template")}

    def kept(version, times, batch=48):
        made = [(as_of(choice, version), time) for choice, time in times]
        outcomes = (
            Outcome(c, reason=t) if isinstance(t, str) else timed(c, float(t)) for c, t in made
        )
        shard = Shard(tmp_path)
        shard.append(Record(of_batch(batch, problem), tuple(outcomes), PROVENANCE))
        shard.close()

    def nearest():
        (found,) = select.nearest({encode(problem): choices}, tmp_path).values()
        return found.choice, found.source

    return SimpleNamespace(
        key=encode(problem), kept=kept, nearest=nearest, folder=tmp_path, **kinds
    )


def test_what_another_torch_says_is_of_the_nearest_batch_too(conv):
    choice, source = conv.nearest()
    assert source == "shipped for a batch of 64 by torch 2.11.0"
    conv.kept("2.13.0", [(choice, "wrong")])
    assert conv.nearest()[0] != choice


@pytest.mark.parametrize("version", ["2.11.0", "2.12.0"])
def test_what_failed_by_any_torch_stands_in_for_nothing(conv, version):
    choice, _ = conv.nearest()
    conv.kept(version, [(choice, "crashed")])
    assert conv.nearest()[0] != choice


def test_a_damaged_record_of_another_batch_is_none(conv):
    conv.kept("2.13.0", [(conv.template[0], 1), (conv.library[0], 2)], batch=47)
    (file,) = conv.folder.rglob("*.jsonl")
    file.write_bytes(file.read_bytes().replace(b'"p50":1.0', b'"p50":1.5'))
    assert conv.nearest()[1] == "shipped for a batch of 64 by torch 2.11.0"


def test_what_failed_without_cudnns_timing_stands_in_for_nothing_with_it(conv):
    choice, _ = conv.nearest()
    conv.kept("2.13.0", [(choice, "wrong")])
    timed_by_cudnn = encode(replace(decode_problem(conv.key), settings={TIMED: True}))
    found = select.nearest({timed_by_cudnn: [choice]}, conv.folder)
    assert choice not in [each.choice for each in found.values()]


def test_records_of_ones_own_outlive_an_update_of_torch_until_they_are_measured_anew(conv):
    first, second = conv.template[:2]
    conv.kept("2.12.1", [(first, 1), (conv.library[0], 2)])
    assert select.lookup([conv.key], conv.folder) == {}, "it may be measured"
    assert conv.nearest() == (first, "recorded by torch 2.12.1")
    conv.kept("2.13.0", [(second, 1.5), (conv.library[0], 2)])
    (found,) = select.lookup([conv.key], conv.folder).values()
    assert (found.choice, found.source) == (second, "recorded")


def test_a_librarys_call_with_an_epilogue_that_was_measured_here_is_known_here(conv):
    """Though it is no template, another torch's word counts beside it no more."""
    plain, fused = (
        next(c for c in conv.library if bool(c.template) is bound) for bound in (False, True)
    )
    conv.kept("2.12.0", [(fused, 1), (conv.template[0], 0.5), (plain, 2)])
    conv.kept("2.13.0", [(fused, 2.5), (plain, 2)])
    (found,) = select.lookup([conv.key], conv.folder).values()
    assert (found.choice, found.source) == (plain, "recorded")


def test_this_torch_at_another_batch_comes_before_another_torch(conv):
    first, second = conv.template[:2]
    conv.kept("2.12.0", [(first, 1), (conv.library[0], 2)], batch=47)
    assert conv.nearest() == (first, "recorded for a batch of 47 by torch 2.12.0")
    conv.kept("2.13.0", [(second, 1), (conv.library[0], 2)], batch=32)
    assert conv.nearest() == (second, "recorded for a batch of 32")


def test_of_several_other_torches_the_newest_counts(conv):
    first, second = conv.template[:2]
    conv.kept("2.12.0", [(first, 1), (conv.library[0], 4)])
    conv.kept("2.12.10", [(first, 3), (second, 2), (conv.library[0], 4)])
    conv.kept("2.9.0", [(conv.template[2], 0.1), (conv.library[0], 4)])
    conv.kept("2.12.9", [(first, 1), (conv.library[0], 4)])
    assert conv.nearest() == (second, "recorded by torch 2.12.10")


@pytest.mark.parametrize("change", [{"arch": "gfx942:AMD-Instinct-MI300X"}, {"op": "aten.addmm"}])
def test_another_torch_stands_in_for_ops_of_ours_on_nvidias_gpus_alone(conv, change):
    problem = decode_problem(conv.key)
    others = [replace(of_batch(batch, problem), **change) for batch in (48, 64)]
    by_another = timed(as_of(conv.template[0], "2.12.0"), 1.0)
    write(conv.folder / "own.jsonl", [Record(p, (by_another,), PROVENANCE) for p in others])
    offered = {encode(others[0]): conv.template}
    assert select.nearest(offered, conv.folder) == {}
    offered = {encode(of_batch(48, problem)): conv.template}
    write(conv.folder / "own.jsonl", [Record(problem, (by_another,), PROVENANCE)])
    assert select.nearest(offered, conv.folder) != {}


@pytest.mark.parametrize(
    ("gpu", "source", "version"),
    quickly([("h200", "2.13.0"), ("h100", "2.11.0")], "2.11.0", "2.13.0"),
)
def test_where_cudnn_times_its_kernels_what_was_measured_without_stands_in(
    gpu, source, version, of_torch
):
    """Many scripts have `torch.backends.cudnn.benchmark` on; it may be measured anew there."""
    of_torch("2.11.0")
    _, known, there = offered_on(gpu)
    of_torch(version)
    offered, *_ = offered_on(gpu)
    switched = {key: replace(decode_problem(key), settings={TIMED: True}) for key in offered}
    problems = {encode(p): offered[key] for key, p in switched.items()}
    assert select.lookup(problems, None) == {}
    found = {**select.nearest(problems, None), **select.select_by_stand_in(problems, None)}
    for key, problem in switched.items():
        each, wanted = found[encode(problem)], known[encode(there[key])].choice
        assert each.choice == as_of(wanted, version)
        by = " by torch 2.11.0" * bool(wanted.template and version != "2.11.0")
        assert each.source == f"{source} without {TIMED}{by}"
    more = {TIMED: True, "deterministic": True}
    other = {encode(replace(p, settings=more)): offered[key] for key, p in switched.items()}
    assert select.nearest(other, None) == select.select_by_stand_in(other, None) == {}


@pytest.mark.parametrize(
    ("gpu", "source", "timed_by_cudnn"),
    quickly([("h200", False), ("h100", True)], False, True),
)
def test_fp16_is_as_bf16(gpu, source, timed_by_cudnn, of_torch):
    """Of what is offered for it: the templates are tried on both, and so are the libraries'."""
    settings = {TIMED: True} if timed_by_cudnn else {}
    of_torch("2.11.0")
    _, known, there = offered_on(gpu)
    halves = {}
    for key, problem in there.items():
        if "int8" in decode_problem(key).op:
            continue  # of integers, and of factors in fp32
        half = as_dtype(decode_problem(key), "float16")
        halves[encode(replace(half, settings=settings))] = problem
    problems = {key: [call.choice for call in library.calls(decode_problem(key))] for key in halves}
    assert select.lookup(problems, None) == {}
    found = {**select.nearest(problems, None), **select.select_by_stand_in(problems, None)}
    assert found.keys() == problems.keys()
    for key, each in found.items():
        assert each.choice == known[encode(halves[key])].choice
        without = f" without {TIMED}" * bool(settings)
        assert each.source == f"{source}{without} in bfloat16"
    wide = {encode(as_dtype(decode_problem(k), "float32")): c for k, c in problems.items()}
    assert select.nearest(wide, None) == select.select_by_stand_in(wide, None) == {}


def test_a_copy_behind_a_problem_changes_no_choice(of_torch):
    """A record has no epilogue, where a model that is not channels-last copies its result."""
    of_torch("2.11.0")
    _, known, there = offered_on("h200")
    copy = "aten.clone.default(y, memory_format='torch.contiguous_format')"
    some = [key for key in there if not decode_problem(key).epilogue][::40]
    assert len(some) > 5
    copied = {encode(replace(decode_problem(key), epilogue=copy)): key for key in some}
    asked = {key: [call.choice for call in library.calls(decode_problem(key))] for key in copied}
    found = select.nearest(asked, None)
    for key, plain in copied.items():
        assert found[key].choice == known[plain].choice
        assert found[key].source.endswith(" without a copy")
    other = copy.replace("clone.default(y", "add.Tensor(y, 1")
    asked = {encode(replace(decode_problem(key), epilogue=other)): [] for key in some}
    assert select.nearest(asked, None) == {}


def as_dtype(problem, dtype):
    return replace(problem, operands=tuple(replace(o, dtype=dtype) for o in problem.operands))
