"""The tables of winners in the package: whole, and used on the devices that they are of."""

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch._subclasses import FakeTensorMode

from ipex_inductor import compat
from ipex_inductor.autotune import fallback_sources, select
from ipex_inductor.autotune.database import Records, Shard, write
from ipex_inductor.autotune.pool import pool
from ipex_inductor.autotune.record import (
    Choice,
    Operand,
    Outcome,
    Record,
    decode_problem,
    encode,
)
from ipex_inductor.autotune.table import file_name, winners
from ipex_inductor.compiler.request import Request
from ipex_inductor.config import resolve
from ipex_inductor.lowerings.common import templated
from ipex_inductor.lowerings.problem import selector_hook, shapes
from ipex_inductor.lowerings.select import library, selection
from ipex_inductor.target import device as target
from support.autotune.autotune_records import PROVENANCE, timed
from support.autotune.shipped_tables import H200, TABLES, of_batch, offered_on

pytestmark = pytest.mark.unit

PROBLEMS = Path(__file__).parents[2] / "benchmarks" / "problems" / "tuning.txt"
CONVOLUTION = "ipex.conv.default"
WEIGHTS = "ipex.conv_weight_grad.default"


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
        assert select.lookup(problems(target.find_target(other)), None) == {}


def test_what_nobody_measured_is_derived_from_a_gpu_that_is_alike(of_torch):
    """On the same chip with slower memory the very choices; and the source says whose they are."""
    of_torch("2.11.0")
    offered, known, there = offered_on("h100")
    found = select.select_by_stand_in(offered, None)
    assert found.keys() == offered.keys()
    assert {each.source for each in found.values()} == {f"derived from {H200}"}
    assert not any(each.is_measured for each in found.values())
    same = [found[key].choice == known[encode(problem)].choice for key, problem in there.items()]
    assert all(same)


def test_of_what_is_derived_only_what_is_offered_there_too(of_torch):
    """An A100 has no engine for boxes: the table's other choice, or nothing."""
    of_torch("2.11.0")
    offered, known, there = offered_on("a100-80gb")
    found = select.select_by_stand_in(offered, None)
    assert (len(offered), len(found)) == (697, 649)
    assert all(each.choice in offered[key] for key, each in found.items())
    others = [k for k in found if found[k].choice != known[encode(there[k])].choice]
    assert others
    assert not any("boxes" in found[key].choice.name for key in others)


def test_what_is_derived_is_of_the_nearest_batch_too_and_never_what_failed(of_torch, tmp_path):
    of_torch("2.11.0")
    offered, *_ = offered_on("h100")
    image = Operand((128, 64, 56, 56), (200704, 1, 3584, 64), "bfloat16")
    key = next(k for k in offered if decode_problem(k).operands[0] == image)
    problem = of_batch(48, decode_problem(key))
    other = {encode(problem): [call.choice for call in library.calls(problem)]}
    (best,) = select.select_by_stand_in(other, None).values()
    (there,) = select.nearest(
        {encode(replace(problem, arch=str(H200))): [best.choice]}, None
    ).values()
    assert best.choice == there.choice
    assert best.source == f"derived from {H200} for a batch of 64"
    shard = Shard(tmp_path)
    shard.append(Record(problem, (Outcome(best.choice, reason="wrong"),), PROVENANCE))
    shard.close()
    (second,) = select.select_by_stand_in(other, tmp_path).values()
    assert second.choice != best.choice


def test_nothing_is_derived_of_torchs_own_ops(of_torch):
    """Templates of Inductor's were held against float64 on the H200 alone."""
    of_torch("2.11.0")
    h100 = str(target.find_target("h100"))
    offered = {
        encode(replace(decode_problem(key), arch=h100)): [known.choice]
        for key, known in select.lookup(problems(H200), None).items()
    }
    assert len(offered) == 60
    assert select.select_by_stand_in(offered, None) == {}


def test_what_stands_in_is_there_for_gpus_that_are_described():
    """Whose multiprocessors and shared memory are known, or are those of all of their level."""
    for arch in fallback_sources.gpus():
        level = arch.split(":")[0]
        alike = [t for t in target.table() if t.arch == level]
        own = [t for t in alike if str(t) == arch]
        assert select.table_of(arch) == str(H200)
        assert own or len({(t.multiprocessors, t.shared_memory) for t in alike}) == 1


@pytest.mark.parametrize(
    ("arch", "like"),
    [
        ("sm_90:NVIDIA-H800-PCIe", (114, 227)),
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
    arch = gpu if ":" in gpu else str(target.find_target(gpu))
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


def test_a_graph_is_settled_only_where_there_is_a_table_of_its_device(monkeypatch):
    policy = selection.Policy(None, may_time=False, budget=1.0, tables=True)
    assert not policy.records({torch.device("cpu")})
    of = {"cpu": "x86-64:other", "cuda": str(H200)}
    monkeypatch.setattr(selection, "arch_of", lambda device: of[device.type])
    assert not policy.records({torch.device("cpu")})
    assert policy.records({torch.device("cpu"), torch.device("cuda")})
    assert not dataclasses.replace(policy, tables=False).records({torch.device("cuda")})
    of["cuda"] = str(target.find_target("h100"))  # for which another's stands in, unless it may not
    assert policy.records({torch.device("cuda")})
    assert not dataclasses.replace(policy, guesses=False).records({torch.device("cuda")})


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_calls_are_looked_up_in_a_table_only_where_no_records_come_first(
    gpu, monkeypatch, tmp_path
):
    arch = str(target.find_target(gpu))
    monkeypatch.setattr(selector_hook, "arch_of", lambda device: arch)
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
