"""What other tools measured: read as they write it, shown as reported, never chosen."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ipex_inductor.autotune.database import Records, Shard, digest, write
from ipex_inductor.autotune.foreign.foreign import read
from ipex_inductor.autotune.foreign.told import Told
from ipex_inductor.autotune.pool import pool
from ipex_inductor.autotune.record import Choice, Operand, Outcome, Provenance
from ipex_inductor.cli import app
from support.autotune.autotune_records import LIBRARY, PROVENANCE, TILES, failed, record, timed

pytestmark = pytest.mark.unit

HEAD = """\
Validator,PT_VERSION,2.11.0
Validator,ROCM_VERSION,6.4.0.0-1-abc
Validator,HIPBLASLT_VERSION,1000-abc
Validator,GCN_ARCH_NAME,gfx942:sramecc+:xnack-
"""
SOURCE = Provenance("2026-11-21T12:00:00Z", "unknown", "2.13.0", "unknown", source="tunableop")


def run(*args):
    return CliRunner().invoke(app, ["autotune", *map(str, args)])


def tunableop(tmp_path, *lines, head=HEAD, told=Told()):  # noqa: B008
    path = tmp_path / "tunableop_results0.csv"
    path.write_text(head + "\n".join(lines) + "\n")
    os.utime(path, (1_790_000_000, 1_790_000_000))
    return read(path, "tunableop", told)


def test_a_line_of_tunableop(tmp_path):
    """mm(x, weight.t()) of 512x64 and 1024x64, as BLAS has it: TN, 1024, 512, 64."""
    line = "GemmTunableOp_BFloat16_TN,tn_1024_512_64_ld_64_64_1024,Gemm_Hipblaslt_123,0.0123"
    found = tunableop(tmp_path, line)
    (only,) = found.records
    assert not found.refused
    assert only.problem.op == "aten.mm.default"
    assert only.problem.operands == (
        Operand((512, 64), (64, 1), "bfloat16"),
        Operand((64, 1024), (1, 64), "bfloat16"),
    )
    assert only.problem.arch == "gfx942"
    (outcome,) = only.outcomes
    assert outcome.choice == Choice("library", "tunableop", {"solution": "Gemm_Hipblaslt_123"})
    assert outcome.reported == pytest.approx(12.3)
    assert (outcome.timing, outcome.error, outcome.reason) == (None, None, "")
    assert only.provenance == Provenance(
        "2026-09-21T14:13:20Z",
        "unknown",
        "2.11.0",
        "unknown",
        toolkit="ROCM_VERSION 6.4.0.0-1-abc, HIPBLASLT_VERSION 1000-abc",
        source="tunableop",
    )


@pytest.mark.parametrize(
    ("line", "op", "operands"),
    [
        (
            "GemmTunableOp_Half_NN,nn_8_4_2_ld_8_2_8,Default,1",
            "aten.mm",
            [((4, 2), (2, 1)), ((2, 8), (8, 1))],
        ),
        (
            "GemmTunableOp_Half_NT,nt_8_4_2_ld_8_4_8,Default,1",
            "aten.mm",
            [((4, 2), (1, 4)), ((2, 8), (8, 1))],
        ),
        (  # a part of a larger matrix
            "GemmTunableOp_Half_NN,nn_8_4_2_ld_100_50_8,Default,1",
            "aten.mm",
            [((4, 2), (50, 1)), ((2, 8), (100, 1))],
        ),
        (  # of torch before 2.6: sizes alone
            "GemmTunableOp_Half_TN,tn_8_4_2,Default,1",
            "aten.mm",
            [((4, 2), (2, 1)), ((2, 8), (1, 2))],
        ),
        (
            "GemmAndBiasTunableOp_Half_TN,tn_8_4_2_ld_2_2_8,Default,1",
            "aten.addmm",
            [((8,), (1,)), ((4, 2), (2, 1)), ((2, 8), (1, 2))],
        ),
        (
            "GemmStridedBatchedTunableOp_Half_NN,nn_8_4_2_B_3_ld_8_2_8,Default,1",
            "aten.bmm",
            [((3, 4, 2), (8, 2, 1)), ((3, 2, 8), (16, 8, 1))],
        ),
    ],
    ids=lambda v: v.split(",")[1] if isinstance(v, str) and "," in v else "",
)
def test_sizes_and_layouts_of_tunableop(line, op, operands, tmp_path):
    (only,) = tunableop(tmp_path, line).records
    assert only.problem.op == f"{op}.default"
    assert [(o.shape, o.stride) for o in only.problem.operands] == operands
    assert only.outcomes[0].choice == Choice("library", op)


def test_products_of_other_precision_are_other_problems(tmp_path):
    lines = [f"GemmTunableOp_{t}_NN,nn_8_4_2_ld_8_2_8,Default,1" for t in ("float", "tf32")]
    lines.append("GemmTunableOp_bfx9_NN,nn_8_4_2_ld_8_2_8_compute_bf16x9_r,Default,1")
    fp32, tf32, bfx9 = (r.problem for r in tunableop(tmp_path, *lines).records)
    assert fp32.operands == tf32.operands == bfx9.operands
    assert [p.constants for p in (fp32, tf32, bfx9)] == [
        {},
        {"precision": "tf32"},
        {"precision": "bf16x9"},
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_Half_TN,tn_8_4_2,x,1", "no product"),
        ("GemmTunableOp_Half_NN,nn_8_4,x,1", "no product"),
        ("GemmTunableOp_Half_NN,nn_8_*_2_ld_8_2_8,x,1", "no product"),
        ("GemmTunableOp_Half_NN,nn_8_4_2_B_3_ld_8_2_8,x,1", "does not go with"),
        ("GemmStridedBatchedTunableOp_Half_NN,nn_8_4_2_ld_8_2_8,x,1", "does not go with"),
        ("GemmTunableOp_Half_NN,nn_8_4_2_ld_8_2_8,x", "solution and time"),
        ("GemmTunableOp_Half_NN,nn_8_4_2_ld_8_2_8,x,fast", "its time is 'fast'"),
        ("GemmTunableOp_Half_NN,nn_8_4_2_ld_8_2_8,x,nan", "its time is 'nan'"),
        ("GemmTunableOp_Half_NN,nn_8_4_2_ld_8_2_8,x,0", "its time is '0'"),
        ("GemmTunableOp_Half_NN,nn_8_4_2_ld_8_2_8,,1", ""),
        (f"GemmTunableOp_Half_NN,nn_8_4_2_ld_8_2_8,{'x' * 99},1e999", "its time is"),
        (f"GemmTunableOp_Half_NN,nn_{'9' * 5000}_4_2_ld_8_2_8,x,1", "no product"),
    ],
)
def test_lines_that_make_no_record_are_refused(line, reason, tmp_path):
    found = tunableop(tmp_path, line)
    if reason:
        (refusal,) = found.refused
        assert str(refusal).startswith(f"{tmp_path}/tunableop_results0.csv:5: ")
        assert reason in refusal.reason
    else:
        assert found.records[0].outcomes[0].choice.parameters == {"solution": ""}


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("", "a line Validator,PT_VERSION,..."),
        ("Validator,PT_VERSION,2.11.0\n", "an architecture"),
        (HEAD + "Validator,PT_VERSION,2.12.0\n", "results of one machine"),
    ],
)
def test_another_kind_of_file_is_an_error(head, expected, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(head + "GemmTunableOp_Half_NN,nn_8_4_2_ld_8_2_8,Default,1\n")
    done = run("import", path, "--into", tmp_path / "db", "--format", "tunableop")
    assert done.exit_code == 2
    assert f"error: expected {expected}; got " in done.stderr
    assert not (tmp_path / "db").exists()


TRITON = {"type": "triton", "time": 0.02, "BLOCK_M": 64, "BLOCK_K": 32, "BLOCK_N": 64}
TRITON |= {"num_stages": 3, "num_warps": 4}
LOG = [
    {
        "(512, 64, 1024)": [
            {"type": "cublas", "time": 0.03},
            {"type": "cublas", "time": 0.05},
            TRITON,
            TRITON | {"num_warps": 8, "time": float("inf")},
            None,
        ],
        "kernel_type": "addmm",
    },
    {"(3, 512, 64)": [{"type": "cublas", "time": 1.0}], "kernel_type": "bmm"},
    {"(s0, 512, 64)": [{"type": "cublas", "time": 1.0}], "kernel_type": "mm"},
    "nonsense",
    {"kernel_type": "mm"},
]


def test_inductors_log(tmp_path):
    path = tmp_path / "log.json"
    path.write_text(json.dumps(LOG))
    found = read(path, "inductor-mm-log", Told("sm_90", torch="2.13.0", dtype="bfloat16"))
    (only,) = found.records
    assert only.problem.op == "aten.addmm.default"
    assert [(o.shape, o.stride) for o in only.problem.operands] == [
        ((512, 64), ()),
        ((64, 1024), ()),
    ]
    parameters = {k: v for k, v in TRITON.items() if k not in {"type", "time"}}
    assert [(o.choice, o.reported) for o in only.outcomes] == [
        (Choice("library", "aten.addmm"), 30.0),
        (Choice("template", "inductor.mm", parameters), 20.0),
    ]
    assert (only.provenance.source, only.provenance.torch) == ("inductor-mm-log", "2.13.0")
    assert [(r.line, r.reason.partition(":")[0]) for r in found.refused] == [
        (1, "triton failed, or has no time"),
        (1, "a choice that the log does not describe"),
        (2, "'bmm' of sizes ['(3, 512, 64)'] is no product that is read here"),
        (3, "'mm' of sizes ['(s0, 512, 64)'] is no product that is read here"),
        (4, "None of sizes [] is no product that is read here"),
        (5, "'mm' of sizes [] is no product that is read here"),
    ]


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("[]", (), "an architecture and a dtype"),
        ("{}", ("--arch", "x", "--dtype", "y"), "a JSON list of matrix products"),
        ("[" * 100_000, ("--arch", "x", "--dtype", "y"), "a JSON list of matrix products"),
        ("\udcff", ("--arch", "x", "--dtype", "y"), "a JSON list of matrix products"),
        ("[]", ("--arch", "x", "--dtype", "y"), "something to import (inductor-mm-log)"),
    ],
)
def test_another_kind_of_log_is_an_error(text, options, expected, tmp_path):
    path = tmp_path / "log.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    done = run("import", path, "--into", tmp_path / "db", "--format", "inductor-mm-log", *options)
    assert done.exit_code == 2
    assert f"error: expected {expected}; got " in done.stderr
    assert not (tmp_path / "db").exists()


def test_import_show_and_compare(tmp_path):
    db, path = tmp_path / "db", tmp_path / "r.csv"
    line = "GemmTunableOp_Half_NN,nn_8_4_2_ld_8_2_8,Gemm_Rocblas_7,{}"
    for time in (1, 2):
        path.write_text(HEAD + line.format(time) + "\nrubbish\n")
        for _ in range(2):  # the same again is the same file
            os.utime(path, (1_790_000_000, 1_790_000_000))
            into = db / str(time)
            done = run("import", path, "--into", into, "--format", "tunableop")
            assert done.exit_code == 0, done.output
            assert done.stderr == f"1 lines refused:\n  {path}:6: it has no operator, sizes, " + (
                "solution and time\n"
            )
        assert len(list(into.iterdir())) == 1
    shown = run("show", db / "1").stdout
    assert "reported" in shown
    assert "reported by tunableop 2026-09-21T14:13:20Z" in shown
    assert "best" not in shown
    compared = json.loads(run("compare", db / "1", db / "2", "--json").stdout)
    (row,) = compared["rows"]
    assert row["verdict"] == "same choice"  # twice as long, but who knows the noise
    assert (row["effect"], row["band"]) == (pytest.approx(0.693147), None)


def test_import_of_records(tmp_path):
    path = tmp_path / "from.jsonl"
    write(path, [record(rows=1), record(rows=2)])
    path.write_bytes(path.read_bytes() + b"damaged\n")
    done = run("import", path, "--into", tmp_path / "db", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["records"] == 2
    assert found["refused"][0].startswith(f"{path}:3: ")
    assert {digest(r) for r in Records(tmp_path / "db")} == {digest(r) for r in Records(path)}
    assert (tmp_path / "db").stat().st_mode & 0o777 == 0o700
    assert run("import", path, "--into", path).exit_code == 2


REPORTED = record(
    Outcome(TILES[0], reported=1.0), Outcome(LIBRARY, reported=50.0), provenance=SOURCE
)


def test_reported_times_choose_nothing():
    ours = record(timed(LIBRARY, 10.0), timed(TILES[1], 9.0))
    (alone,) = pool([REPORTED]).values()
    assert alone.best() is None
    assert not alone.estimates()
    assert alone.best_known().choice == TILES[0]
    (together,) = pool([ours, REPORTED]).values()
    assert together.best() == together.best_known()
    assert together.best() == next(iter(pool([ours]).values())).best()
    (ruled_out,) = pool([record(failed(TILES[0])), REPORTED]).values()
    assert ruled_out.best_known().choice == LIBRARY


@pytest.mark.parametrize(
    ("outcome", "provenance", "reason"),
    [
        (timed(LIBRARY, 1.0), SOURCE, "has no reported time"),
        (failed(LIBRARY), SOURCE, "has no reported time"),
        (Outcome(LIBRARY, reason="x", reported=1.0), SOURCE, "more than a reported time"),
        (Outcome(LIBRARY, reported=1.0), PROVENANCE, "skipped without a reason"),
    ],
)
def test_other_tools_say_reported_times_and_nothing_else(outcome, provenance, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        Shard(tmp_path).append(record(outcome, provenance=provenance))


def test_records_from_before_keep_their_digests():
    before = "a99fa2ffccf077e263a87e8b4cd7c30da024d4051d02f834f806a545407f0649"
    assert digest(record(timed(LIBRARY, 10.0), timed(TILES[0], 8.0), failed(TILES[1]))) == before


def test_the_log_of_torch_2_11_says_no_op(tmp_path):
    path = tmp_path / "log.json"
    size = "(512, 64, 1024)"
    path.write_text(
        json.dumps([{"invoke": size}, {size: [{"type": "cublas", "time": 1.0}, TRITON]}])
    )
    told = Told("sm_90", dtype="bfloat16")
    found = read(path, "inductor-mm-log", told)
    assert not found.records
    assert [(r.line, "--op mm" in r.reason) for r in found.refused] == [(2, True)]
    found = read(path, "inductor-mm-log", replace(told, op="addmm"))
    assert [r.problem.op for r in found.records] == ["aten.addmm.default"]
    assert len(found.records[0].outcomes) == 2
    assert not found.refused
    assert read(path, "inductor-mm-log", replace(told, op="bmm")).refused


def test_the_log_is_read_as_the_installed_torch_writes_it(tmp_path, monkeypatch):
    """Its own writer, on two choices that nobody timed."""
    from torch._inductor import select_algorithm as select

    path = tmp_path / "log.json"
    monkeypatch.setenv("TORCHINDUCTOR_MM_LOGGING_FILE", str(path))
    select.get_mm_log_filename.cache_clear()
    extern = object.__new__(select.ExternKernelCaller)
    triton = object.__new__(select.TritonTemplateCaller)
    extern.name, triton.name = "mm", "mm_0"
    info = {"tile_shape": "(64, 32, 128)", "num_stages": 3, "num_warps": 4}
    monkeypatch.setattr(select.TritonTemplateCaller, "info_dict", lambda _: info)
    nodes = [SimpleNamespace(get_size=lambda size=size: size) for size in ([512, 64], [64, 1024])]
    times = {extern: 0.03, triton: 0.02}
    cache = select.AlgorithmSelectorCache
    if not hasattr(cache, "maybe_log_mm_results"):
        pytest.skip("torch 2.11 has no function of its own for that")
    cache.maybe_log_mm_results("mm", nodes, times)
    select.get_mm_log_filename.cache_clear()

    found = read(path, "inductor-mm-log", Told("sm_90", dtype="bfloat16"))
    assert not found.refused
    (only,) = found.records
    assert [o.shape for o in only.problem.operands] == [(512, 64), (64, 1024)]
    library, template = only.outcomes
    assert (library.choice, library.reported) == (Choice("library", "aten.mm"), 30.0)
    assert template.reported == 20.0
    assert template.choice.parameters.items() >= {
        ("BLOCK_M", 64),
        ("BLOCK_K", 32),
        ("BLOCK_N", 128),
        ("num_stages", 3),
        ("num_warps", 4),
    }
