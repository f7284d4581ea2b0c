"""The tables of winners in the package: whole, and used on the devices that they are of."""

import dataclasses
import hashlib
from itertools import starmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from records import PROVENANCE, timed
from torch._subclasses import FakeTensorMode

from ipex_inductor import compat, target
from ipex_inductor.autotune import batches, select
from ipex_inductor.autotune.database import Records, Shard, write
from ipex_inductor.autotune.pool import pool
from ipex_inductor.autotune.record import Choice, Outcome, Record, decode_problem, encode
from ipex_inductor.autotune.table import file_name, winners
from ipex_inductor.config import resolve
from ipex_inductor.lowerings import library, listed, selection, shapes, templated
from ipex_inductor.request import Request

TABLES = sorted(select.SHIPPED.glob("*.jsonl"))
PROBLEMS = Path(__file__).parents[2] / "benchmarks" / "tuning_problems.txt"
H200 = target.described("h200")
CONVOLUTION = "ipex.conv.default"
WEIGHTS = "ipex.conv_weight_grad.default"
STREAMED = "ipex.triton.streamed"
TIMED = "cudnn.benchmark"


def problems(device):
    return {encode(p) for p in shapes.problems(PROBLEMS.read_text().splitlines(), str(device), {})}


@pytest.fixture
def of_torch(monkeypatch):
    return lambda version: monkeypatch.setattr(compat, "TEMPLATES", f"torch {version}")


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_a_table_is_whole_and_says_where_it_is_from(table):
    read = Records(table)
    records = [*read]
    assert records
    assert not read.refused
    (arch,) = {record.problem.arch for record in records}
    assert table.name == file_name(arch)
    assert select.table_of(arch) == arch
    assert len({encode(record.problem) for record in records}) == len(records)
    for by in (record.provenance for record in records):
        assert arch.endswith(by.device.replace(" ", "-"))
        assert all((by.driver, by.triton, by.toolkit, by.clock))
        assert not by.source
    assert all(len(record.outcomes) <= 2 for record in records)  # a winner and a runner-up


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_what_a_table_chooses_is_what_it_was_cut_to(table):
    records = {encode(record): record for record in Records(table)}
    assert {encode(record) for record in winners(records.values())} == records.keys()


def test_the_winners_on_an_h200_are_used_there_and_nowhere_else(of_torch):
    of_torch("2.11.0")
    found = select.lookup(problems(H200), None)
    assert len(found) == 60
    assert {each.source for each in found.values()} == {"shipped"}
    kinds = [each.choice.kind for each in found.values()]
    assert 20 <= kinds.count("template") < 60
    assert all(
        each.library is None or each.best.p50 < 1.02 * each.library.p50 for each in found.values()
    )
    for other in ("h100", "b200"):
        assert select.lookup(problems(target.described(other)), None) == {}


def offered_on(gpu):
    """The problems of ours in the H200's table, were they another's, and the H200's own choices."""
    ours = [r.problem for r in Records(*TABLES) if r.problem.op.startswith("ipex.")]
    there = {encode(replace(p, arch=str(target.described(gpu)))): p for p in ours}
    offered = {key: [c.choice for c in library.calls(decode_problem(key))] for key in there}
    return offered, select.lookup([*map(encode, there.values())], None), there


def test_what_nobody_measured_is_derived_from_a_gpu_that_is_alike(of_torch):
    """On the same chip with slower memory the very choices; and the source says whose they are."""
    of_torch("2.11.0")
    offered, known, there = offered_on("h100")
    found = select.derived(offered, None)
    assert found.keys() == offered.keys()
    assert {each.source for each in found.values()} == {f"derived from {H200}"}
    assert not any(each.measured for each in found.values())
    same = [found[key].choice == known[encode(problem)].choice for key, problem in there.items()]
    assert all(same)


def test_of_what_is_derived_only_what_is_offered_there_too(of_torch):
    """An A100 has no engine for boxes: the table's other choice, or nothing."""
    of_torch("2.11.0")
    offered, known, there = offered_on("a100-80gb")
    found = select.derived(offered, None)
    assert (len(offered), len(found)) == (294, 283)
    assert all(each.choice in offered[key] for key, each in found.items())
    others = [k for k in found if found[k].choice != known[encode(there[k])].choice]
    assert others
    assert not any("boxes" in found[key].choice.name for key in others)


def test_what_is_derived_is_of_the_nearest_batch_too_and_never_what_failed(of_torch, tmp_path):
    of_torch("2.11.0")
    offered, *_ = offered_on("h100")
    key = next(k for k in offered if decode_problem(k).operands[0].shape == (128, 64, 56, 56))
    problem = of_batch(48, decode_problem(key))
    other = {encode(problem): [call.choice for call in library.calls(problem)]}
    (best,) = select.derived(other, None).values()
    (there,) = select.nearest(
        {encode(replace(problem, arch=str(H200))): [best.choice]}, None
    ).values()
    assert best.choice == there.choice
    assert best.source == f"derived from {H200} for a batch of 64"
    shard = Shard(tmp_path)
    shard.append(Record(problem, (Outcome(best.choice, reason="wrong"),), PROVENANCE))
    shard.close()
    (second,) = select.derived(other, tmp_path).values()
    assert second.choice != best.choice


def test_nothing_is_derived_of_torchs_own_ops(of_torch):
    """Templates of Inductor's were held against float64 on the H200 alone."""
    of_torch("2.11.0")
    h100 = str(target.described("h100"))
    offered = {
        encode(replace(decode_problem(key), arch=h100)): [known.choice]
        for key, known in select.lookup(problems(H200), None).items()
    }
    assert len(offered) == 60
    assert select.derived(offered, None) == {}


def test_what_stands_in_is_there_for_gpus_that_are_described():
    """Whose multiprocessors and shared memory are known, or are those of all of their level."""
    for arch in select._stand_ins()["gpus"]:
        level = arch.split(":")[0]
        alike = [t for t in target.table() if t.arch == level]
        own = [t for t in alike if str(t) == arch]
        assert select.table_of(arch) == str(H200)
        assert own or len({(t.multiprocessors, t.shared_memory) for t in alike}) == 1


@pytest.mark.parametrize(
    ("arch", "like"),
    [
        ("sm_90:NVIDIA-GH200-480GB", (114, 227)),
        ("sm_80:NVIDIA-A30", (108, 163)),
        ("sm_75:NVIDIA-T4", (58, 99)),
    ],
)
def test_a_gpu_of_which_nothing_is_told_is_like_the_least_of_its_level(arch, like):
    """Or of its maker, where none of its level is described."""
    assert templated.facts(arch) == (like[0], like[1] * 1024)


NOT_ALIKE = ["b200", "mi300x", "rtx-4090", "max-1550", "sm_90:NVIDIA-H20", "sm_80:NVIDIA-A30"]


@pytest.mark.parametrize("gpu", NOT_ALIKE)
def test_nothing_is_derived_for_what_is_not_alike(gpu):
    arch = gpu if ":" in gpu else str(target.described(gpu))
    assert select.table_of(arch) == select.table_digest(arch) == ""


def test_resnets_convolutions_have_a_choice_at_every_batch(of_torch):
    of_torch("2.11.0")
    known = [r.problem for r in Records(*TABLES) if r.problem.op in (CONVOLUTION, WEIGHTS)]
    ours = [p for p in known if p.operands[0].shape[0] == 128]
    batched = [of_batch(48, problem) for problem in ours]
    asked = {encode(p): [call.choice for call in library.calls(p)] for p in batched}
    found = select.nearest(asked, None)
    assert len(ours) == 30  # five stems in training among them, and their weights' gradients
    assert found.keys() == {*asked}
    sources = {each.source for each in found.values()}
    assert sources == {"shipped for a batch of 128", "shipped for a batch of 64"}


def of_batch(size, problem):
    weights = batches.WEIGHTS.get(problem.op, (1,))

    def changed(number, operand):
        is_image = len(operand.shape) == 4 and number not in weights
        return replace(operand, shape=(size, *operand.shape[1:])) if is_image else operand

    return replace(problem, operands=tuple(starmap(changed, enumerate(problem.operands))))


def test_records_of_ones_own_come_before_the_table(of_torch, tmp_path):
    of_torch("2.11.0")
    record = next(r for r in Records(*TABLES) if r.outcomes[0].choice.kind == "template")
    library = Choice("library", "aten.mm")
    write(tmp_path / "own.jsonl", [replace(record, outcomes=(timed(library, 1.0),))])
    (found,) = select.lookup({encode(record.problem)}, tmp_path).values()
    assert (found.choice, found.source) == (library, "recorded")


def test_with_another_torch_the_table_chooses_library_calls_alone(of_torch):
    """Templates of one torch are none of another's: that problem is as if nothing were known."""
    of_torch("2.11.0")
    here = select.lookup(problems(H200), None)
    of_torch("2.13.0")
    there = select.lookup(problems(H200), None)
    assert there == {key: each for key, each in here.items() if each.choice.kind == "library"}
    assert len(there) < len(here)


def as_of(choice, version):
    """The same of another torch; a library's plain call is every torch's."""
    of, comma, digest = choice.template.partition(",")
    return replace(choice, template=of and f"torch {version}{comma}{digest}")


@pytest.mark.parametrize("version", ["2.11.1", "2.13.0", "2.15.0"])
@pytest.mark.parametrize(("gpu", "source"), [("h200", "shipped"), ("h100", f"derived from {H200}")])
def test_the_table_stands_in_for_that_of_another_torch(gpu, source, version, of_torch):
    """Of each op of ours the very choice, compiled by that torch; and the source says whose."""
    of_torch("2.11.0")
    _, known, there = offered_on(gpu)
    of_torch(version)
    offered, *_ = offered_on(gpu)
    kinds = [each.choice for each in select.lookup(offered, None).values()]
    assert not any(choice.template for choice in kinds), "they are to be measured where that may be"
    found = {**select.nearest(offered, None), **select.derived(offered, None)}
    assert found.keys() == offered.keys()
    for key, each in found.items():
        wanted = known[encode(there[key])].choice
        assert each.choice == as_of(wanted, version)
        assert each.source == source + " by torch 2.11.0" * bool(wanted.template)
        assert not each.measured or not wanted.template
    assert {each.choice.name for each in found.values()} >= {"cudnn.convolution_relu", STREAMED}


def test_no_table_stands_in_for_a_torch_that_nobody_tried(of_torch):
    of_torch("2.16.0")
    offered, *_ = offered_on("h100")
    found = {**select.nearest(offered, None), **select.derived(offered, None)}
    assert not any(each.choice.template for each in found.values())


@pytest.fixture
def asked(of_torch, tmp_path):
    """A convolution of an H200 at a batch that no table has, with torch 2.13, and a database.

    `kept` writes records of it at a batch: microseconds, or why it failed, of a choice by a torch.
    """
    of_torch("2.13.0")
    offered, *_ = offered_on("h200")
    problem = next(
        of_batch(48, p)
        for p in map(decode_problem, offered)
        if (p.op, p.operands[0].shape) == (CONVOLUTION, (128, 64, 56, 56))
        and p.operands[1].shape[:2] == (256, 64)
    )
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


def test_what_another_torch_says_is_of_the_nearest_batch_too(asked):
    choice, source = asked.nearest()
    assert source == "shipped for a batch of 64 by torch 2.11.0"
    asked.kept("2.13.0", [(choice, "wrong")])
    assert asked.nearest()[0] != choice


@pytest.mark.parametrize("version", ["2.11.0", "2.12.0"])
def test_what_failed_by_any_torch_stands_in_for_nothing(asked, version):
    choice, _ = asked.nearest()
    asked.kept(version, [(choice, "crashed")])
    assert asked.nearest()[0] != choice


def test_a_damaged_record_of_another_batch_is_none(asked):
    asked.kept("2.13.0", [(asked.template[0], 1), (asked.library[0], 2)], batch=47)
    (file,) = asked.folder.rglob("*.jsonl")
    file.write_bytes(file.read_bytes().replace(b'"p50":1.0', b'"p50":1.5'))
    assert asked.nearest()[1] == "shipped for a batch of 64 by torch 2.11.0"


def test_what_failed_without_cudnns_timing_stands_in_for_nothing_with_it(asked):
    choice, _ = asked.nearest()
    asked.kept("2.13.0", [(choice, "wrong")])
    timed_by_cudnn = encode(replace(decode_problem(asked.key), settings={TIMED: True}))
    found = select.nearest({timed_by_cudnn: [choice]}, asked.folder)
    assert choice not in [each.choice for each in found.values()]


def test_records_of_ones_own_outlive_an_update_of_torch_until_they_are_measured_anew(asked):
    first, second = asked.template[:2]
    asked.kept("2.12.1", [(first, 1), (asked.library[0], 2)])
    assert select.lookup([asked.key], asked.folder) == {}, "it may be measured"
    assert asked.nearest() == (first, "recorded by torch 2.12.1")
    asked.kept("2.13.0", [(second, 1.5), (asked.library[0], 2)])
    (found,) = select.lookup([asked.key], asked.folder).values()
    assert (found.choice, found.source) == (second, "recorded")


def test_a_librarys_call_with_an_epilogue_that_was_measured_here_is_known_here(asked):
    """Though it is no template, another torch's word counts beside it no more."""
    plain, fused = (
        next(c for c in asked.library if bool(c.template) is bound) for bound in (False, True)
    )
    asked.kept("2.12.0", [(fused, 1), (asked.template[0], 0.5), (plain, 2)])
    asked.kept("2.13.0", [(fused, 2.5), (plain, 2)])
    (found,) = select.lookup([asked.key], asked.folder).values()
    assert (found.choice, found.source) == (plain, "recorded")


def test_this_torch_at_another_batch_comes_before_another_torch(asked):
    first, second = asked.template[:2]
    asked.kept("2.12.0", [(first, 1), (asked.library[0], 2)], batch=47)
    assert asked.nearest() == (first, "recorded for a batch of 47 by torch 2.12.0")
    asked.kept("2.13.0", [(second, 1), (asked.library[0], 2)], batch=32)
    assert asked.nearest() == (second, "recorded for a batch of 32")


def test_of_several_other_torches_the_newest_counts(asked):
    first, second = asked.template[:2]
    asked.kept("2.12.0", [(first, 1), (asked.library[0], 4)])
    asked.kept("2.12.10", [(first, 3), (second, 2), (asked.library[0], 4)])
    asked.kept("2.9.0", [(asked.template[2], 0.1), (asked.library[0], 4)])
    asked.kept("2.12.9", [(first, 1), (asked.library[0], 4)])
    assert asked.nearest() == (second, "recorded by torch 2.12.10")


@pytest.mark.parametrize("change", [{"arch": "gfx942:AMD-Instinct-MI300X"}, {"op": "aten.addmm"}])
def test_another_torch_stands_in_for_ops_of_ours_on_nvidias_gpus_alone(asked, change):
    problem = decode_problem(asked.key)
    others = [replace(of_batch(batch, problem), **change) for batch in (48, 64)]
    by_another = timed(as_of(asked.template[0], "2.12.0"), 1.0)
    write(asked.folder / "own.jsonl", [Record(p, (by_another,), PROVENANCE) for p in others])
    offered = {encode(others[0]): asked.template}
    assert select.nearest(offered, asked.folder) == {}
    offered = {encode(of_batch(48, problem)): asked.template}
    write(asked.folder / "own.jsonl", [Record(problem, (by_another,), PROVENANCE)])
    assert select.nearest(offered, asked.folder) != {}


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0"])
@pytest.mark.parametrize(("gpu", "source"), [("h200", "shipped"), ("h100", f"derived from {H200}")])
def test_where_cudnn_times_its_kernels_what_was_measured_without_stands_in(
    gpu, source, version, of_torch
):
    """Many scripts have `torch.backends.cudnn.benchmark` on; it may be measured anew there."""
    of_torch("2.11.0")
    _, known, there = offered_on(gpu)
    of_torch(version)
    offered, *_ = offered_on(gpu)
    switched = {key: replace(decode_problem(key), settings={TIMED: True}) for key in offered}
    asked = {encode(p): offered[key] for key, p in switched.items()}
    assert select.lookup(asked, None) == {}
    found = {**select.nearest(asked, None), **select.derived(asked, None)}
    for key, problem in switched.items():
        each, wanted = found[encode(problem)], known[encode(there[key])].choice
        assert each.choice == as_of(wanted, version)
        by = " by torch 2.11.0" * bool(wanted.template and version != "2.11.0")
        assert each.source == f"{source} without {TIMED}{by}"
    more = {TIMED: True, "deterministic": True}
    other = {encode(replace(p, settings=more)): offered[key] for key, p in switched.items()}
    assert select.nearest(other, None) == select.derived(other, None) == {}


@pytest.mark.parametrize("settings", [{}, {TIMED: True}], ids=str)
@pytest.mark.parametrize(("gpu", "source"), [("h200", "shipped"), ("h100", f"derived from {H200}")])
def test_fp16_is_as_bf16(gpu, source, settings, of_torch):
    """Of what is offered for it: the templates are tried on both, and so are the libraries'."""
    of_torch("2.11.0")
    _, known, there = offered_on(gpu)
    halves = {}
    for key, problem in there.items():
        half = as_dtype(decode_problem(key), "float16")
        halves[encode(replace(half, settings=settings))] = problem
    asked = {key: [call.choice for call in library.calls(decode_problem(key))] for key in halves}
    assert select.lookup(asked, None) == {}
    found = {**select.nearest(asked, None), **select.derived(asked, None)}
    assert found.keys() == asked.keys()
    for key, each in found.items():
        assert each.choice == known[encode(halves[key])].choice
        without = f" without {TIMED}" * bool(settings)
        assert each.source == f"{source}{without} in bfloat16"
    wide = {encode(as_dtype(decode_problem(k), "float32")): c for k, c in asked.items()}
    assert select.nearest(wide, None) == select.derived(wide, None) == {}


def as_dtype(problem, dtype):
    return replace(problem, operands=tuple(replace(o, dtype=dtype) for o in problem.operands))


def test_a_graph_is_settled_only_where_there_is_a_table_of_its_device(monkeypatch):
    policy = selection.Policy(None, may_time=False, budget=1.0, tables=True)
    assert not policy.records({torch.device("cpu")})
    of = {"cpu": "x86-64:other", "cuda": str(H200)}
    monkeypatch.setattr(selection, "arch_of", lambda device: of[device.type])
    assert not policy.records({torch.device("cpu")})
    assert policy.records({torch.device("cpu"), torch.device("cuda")})
    assert not dataclasses.replace(policy, tables=False).records({torch.device("cuda")})
    of["cuda"] = str(target.described("h100"))  # for which another's stands in, unless it may not
    assert policy.records({torch.device("cuda")})
    assert not dataclasses.replace(policy, guesses=False).records({torch.device("cuda")})


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_calls_are_looked_up_in_a_table_only_where_no_records_come_first(
    gpu, monkeypatch, tmp_path
):
    arch = str(target.described(gpu))
    monkeypatch.setattr(listed, "arch_of", lambda device: arch)
    monkeypatch.setattr(selection, "arch_of", lambda device: arch)
    gm, none = torch.fx.symbolic_trace(torch.nn.Identity()), str(tmp_path / "none")

    def tables(device="cuda", database=none, **options):
        config = resolve(None, {"autotune_database": database, **options}, {})
        with FakeTensorMode():
            return Request(gm, [torch.empty(1, device=device)], config).tables

    table = select.SHIPPED / file_name(str(H200))
    assert tables() == {arch: hashlib.sha256(table.read_bytes()).hexdigest()}
    assert tables("cpu") == {}
    assert tables(database=str(tmp_path)) == {}, "there is a database"
    assert (
        tables(autotune="inductor") == tables(autotune="never") == tables(autotune="always") == {}
    )


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_what_a_table_says_of_our_ops_may_be_called(table, of_torch):
    """A template that has changed since is not what was measured: its records are to be renewed."""
    records = [r for r in Records(table) if r.problem.op in library.CALLS]
    assert records
    for record in records:
        of_torch(record.provenance.torch.partition("+")[0])
        best = pool([record])[encode(record.problem)].best()
        assert library.call_of(record.problem, best.choice).choice == best.choice
