"""`ipex-inductor demo` without a measurement: options, verdicts, tables, JSON, exit codes."""

import io
import json
import math
import sys
import textwrap
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from ipex_inductor.cli.demo import demo, measure, models
from ipex_inductor.cli.demo.models import CONTESTANTS, MODELS, Contestant, Job
from ipex_inductor.errors import OptionError

pytestmark = pytest.mark.unit

COLDS = {
    "inductor": {"seconds": 20.0, "start_s": 15.0},
    "frozen": {"seconds": 30.0, "start_s": 3.0},
    "ipex": {"seconds": 12.5, "start_s": 3.0, "rules": {"linear + gelu": 12}, "fallbacks": []},
}
SPEEDS = {"eager": 40.0, "inductor": 30.0, "frozen": 24.0, "ipex": 20.0}
SPEEDS_SHOWN = {"eager": "40.50", "inductor": "30.50", "frozen": "24.50", "ipex": "20.50"}
MACHINE = {"torch": "2.13.0", "ipex_inductor": "1", "device": "cpu", "chip": "a CPU", "threads": 2}


def measured(**changes):
    rows = {
        name: {
            "seconds": 2.0,
            "correct": True,
            "error": 2.5e-3,
            "limit": 9e-3,
            "median_ms": ms + 0.5,
            "min_ms": ms,
            "calls": 8,
            "fx_hits": 1,
            "aot_hits": 1,
        }
        for name, ms in SPEEDS.items()
    }
    return {name: {**row, **changes.get(name, {})} for name, row in rows.items()}


WRONG = {"correct": False, "error": 0.5, "median_ms": None, "min_ms": None}


def report(colds=COLDS, **changes):
    return demo.Report(
        "bert",
        "BERT-base",
        "bf16",
        ["1x128"],
        demo.merge(colds, measured(**changes)),
        MACHINE,
        {"import_s": 2.0, "start_s": 3.0, "fresh_start_s": 15.0},
        {"timing": 10.0},
    )


def printed(*reports, width=80):
    console = Console(file=io.StringIO(), width=width)
    demo.show(list(reports), "ipex-inductor demo --model bert", console)
    return console.file.getvalue()


@pytest.fixture
def invoke(monkeypatch):
    """Calls the verb with canned measurements; `invoke.asked` is what it would have measured."""
    app = typer.Typer()
    app.command()(demo.demo)

    def call(*args, reports=None):
        def run(names, job):
            call.asked = (tuple(names), job)
            return reports or [report()]

        monkeypatch.setattr(demo, "run", run)
        return CliRunner().invoke(app, args)

    return call


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ((), ("resnet50", "bert")),
        (("--quick",), ("resnet50",)),
        (("--model", "vit", "--model", "my:net", "--quick"), ("vit", "my:net")),
    ],
    ids=["default", "quick", "named"],
)
def test_models_asked_for(invoke, args, names):
    assert invoke(*args).exit_code == 0
    assert invoke.asked[0] == names


def test_options_reach_the_job(invoke):
    args = ("--dtype", "fp32", "--batch", "4", "--device", "cpu", "--seconds", "0.5")
    assert invoke(*args).exit_code == 0
    job = invoke.asked[1]
    assert (job.dtype, job.batch, job.device, job.seconds) == ("fp32", 4, "cpu", 0.5)
    assert not job.folder.exists(), "the caches outlive the command"


@pytest.mark.parametrize(
    ("device", "has_bf16", "dtype"),
    [("cpu", True, "bf16"), ("cpu", False, "fp32"), ("cuda", False, "bf16")],
)
def test_nets_run_in_what_the_processor_multiplies(invoke, monkeypatch, device, has_bf16, dtype):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    done = invoke("--device", device)
    assert invoke.asked[1].dtype == dtype
    assert ("no bf16 on this processor" in done.stderr) == (dtype == "fp32")


@pytest.mark.parametrize("args", ["--dtype int8", "--batch 0", "--device tpu", "--seconds -1"])
def test_values_out_of_range_are_refused(invoke, args):
    assert invoke(*args.split()).exit_code == 2
    assert not hasattr(invoke, "asked")


def test_an_unknown_model_is_refused_before_anything_starts(invoke):
    done = invoke("--model", "resnet51")
    assert isinstance(done.exception, OptionError)
    assert "resnet50" in str(done.exception)
    assert not hasattr(invoke, "asked")


def test_missing_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r'pip install "ipex-inductor\[demo\]"'):
        demo.check_name("bert")
    demo.check_name("my:net")


def test_ratios_are_of_minima():
    rows = {row.name: row for row in report().rows}
    assert list(rows) == [c.name for c in CONTESTANTS]
    assert (rows["ipex"].vs_inductor, rows["ipex"].vs_eager) == (1.5, 2.0)
    assert rows["inductor"].vs_inductor == 1.0
    assert (rows["ipex"].cold_s, rows["ipex"].warm_s) == (12.5, 2.0)
    assert (rows["eager"].cold_s, rows["eager"].warm_s) == (None, None)


def test_table_has_every_speed_and_fits_80_columns():
    text = printed(report())
    for shown in SPEEDS_SHOWN.values():
        assert shown in text
    assert "1.50x" in text
    assert "linear + gelu x12" in text
    for note in ("torch 2.13.0", "a CPU, 2 threads", "ipex-inductor demo --model bert"):
        assert note in text
    assert max(len(line) for line in text.split("torch 2.13.0")[0].splitlines()) <= 80


@pytest.mark.parametrize("name", SPEEDS)
def test_a_wrong_result_hides_its_speed_and_fails(invoke, name):
    # Even if a measurement came along: the row must not carry it.
    bad = report(**{name: {**WRONG, "median_ms": SPEEDS[name] + 0.5, "min_ms": SPEEDS[name]}})
    row = next(row for row in bad.rows if row.name == name)
    times = ("median_ms", "min_ms", "vs_inductor", "vs_eager", "cold_s", "warm_s")
    assert [getattr(row, key) for key in times] == [None] * len(times)
    text = printed(bad)
    assert SPEEDS_SHOWN[name] not in text
    assert "wrong" in text
    assert "5.0e-01" in text
    assert invoke(reports=[bad]).exit_code == 1
    assert invoke("--json", reports=[bad]).exit_code == 1


def test_without_its_yardstick_a_ratio_is_left_out():
    rows = {row.name: row for row in report(inductor=WRONG).rows}
    assert rows["ipex"].vs_inductor is None
    assert rows["ipex"].vs_eager == 2.0


@pytest.mark.parametrize(
    ("name", "code"), [("eager", 1), ("inductor", 0), ("frozen", 0), ("ipex", 1)]
)
def test_a_failed_compile_is_ours_or_a_rivals(name, code):
    failed = {"failed": "RuntimeError: [bad] thing"}
    warm = {name: {"failed": "x"}} if name == "eager" else {}
    one = report({**COLDS, name: failed} if name != "eager" else COLDS, **warm)
    assert demo.exit_code([report(), one]) == code
    text = printed(one)
    assert "failed" in text
    assert SPEEDS_SHOWN[name] not in text
    if name != "eager":
        assert "RuntimeError: [bad] thing" in text


def test_a_fallback_is_shown():
    ipex = {**COLDS["ipex"], "fallbacks": ["plain Inductor: no such pass"]}
    assert "ipex fell back to plain Inductor: no such pass" in printed(
        report({**COLDS, "ipex": ipex})
    )


@pytest.mark.parametrize(("load", "warned"), [(None, False), (0.01, False), (0.43, True)])
def test_a_busy_machine_is_said(load, warned):
    text = " ".join(printed(replace(report(), other_load=load)).split())
    assert ("43% of the processors meanwhile: do not trust" in text) == warned


def test_load_of_others_is_a_share():
    with measure._other_load() as shares:
        sum(range(10**6))
    assert shares[0] is None or 0 <= shares[0] <= 1.5


def test_json_carries_the_same_facts(invoke):
    done = invoke("--json", "--model", "bert", "--dtype", "bf16")
    facts = json.loads(done.stdout, parse_constant=pytest.fail)
    assert facts["schema"] == 1
    command = "ipex-inductor demo --model bert --dtype bf16 --batch 1 --device cpu --seconds 10"
    assert facts["command"].endswith(command)
    (model,) = facts["models"]
    assert set(model) == {field.name for field in fields(demo.Report)}
    assert [row["name"] for row in model["rows"]] == list(SPEEDS)
    for row in model["rows"]:
        assert set(row) == {field.name for field in fields(demo.Row)}
        assert row["min_ms"] == SPEEDS[row["name"]]


def test_the_command_repeats_with_the_same_threads(monkeypatch):
    job = Job("", "", "fp16", 2, None, (), Path(), Path(), 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert demo.repeat_command(["a b:c"], job, "cuda") == (
        "OMP_NUM_THREADS=4 ipex-inductor demo --model 'a b:c' --dtype fp16 --batch 2 "
        "--device cuda --seconds 3"
    )


def test_a_job_survives_its_command_line(tmp_path):
    job = Job("cold", "bert", "bf16", 1, None, CONTESTANTS, tmp_path, tmp_path / "s", 10.0)
    assert Job.from_json(job.to_json()) == job


MODULE = """
    import torch
    def pair():
        return torch.nn.Linear(4, 2), (torch.ones(3, 4), torch.tensor(7))
    def alone():
        return torch.nn.Linear(4, 2)
    def broken():
        raise ZeroDivisionError
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    name = f"user_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_module_function_is_loaded_from_the_current_folder(user_module):
    model, (x, seven) = models.load(f"{user_module}:pair", "bf16", 1, "cpu")
    assert not model.training
    assert {x.dtype, model.weight.dtype} == {torch.bfloat16}
    assert seven.dtype == torch.int64, "only floats are cast"
    again, _ = models.load(f"{user_module}:pair", "bf16", 1, "cpu")
    assert torch.equal(model.weight, again.weight), "every process must build the same weights"


@pytest.mark.parametrize("name", ["{}:nothing", "{}x:pair", "{}:alone", "{}:broken"])
def test_a_bad_module_function_is_a_typed_error(user_module, name):
    with pytest.raises(OptionError, match=user_module):
        models.load(name.format(user_module), "fp32", 1, "cpu")


def test_a_users_error_comes_back_typed_from_the_child(tmp_path):
    job = Job("measure", "no_such:model", "fp32", 1, "cpu", (), tmp_path, tmp_path, 0)
    with pytest.raises(OptionError, match="no_such:model"):
        demo.run_child(job, lambda step: None)


@pytest.mark.slow  # 6 s; errors of a child are typed: above
def test_a_childs_death_shows_the_tail_of_its_log(tmp_path):
    job = Job("dance", "bert", "fp32", 1, "cpu", (), tmp_path, tmp_path, 0)
    with pytest.raises(demo.ChildError) as death:
        demo.run_child(job, lambda step: None)
    assert "KeyError: 'dance'" in death.value.tail


def test_tables_hold_the_specified_models_and_contestants():
    assert list(MODELS) == ["resnet50", "bert", "vit", "gpt2"]
    assert set(models.DTYPES) == {d.value for d in demo.Dtype}
    assert [c.name for c in CONTESTANTS] == list(SPEEDS)
    assert [c.freezing for c in CONTESTANTS] == [False, False, True, False]


def rough(truth, dtype, off=0.0):
    """Eager's rounding of `truth`, with noise of relative size `off` on top."""
    noise = torch.randn(truth.shape, dtype=torch.float64)
    return (truth * (1 + off * noise)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_check_allows_rounding_and_no_more(dtype):
    truth = torch.randn(64, 64, dtype=torch.float64)
    eager = rough(truth, dtype)
    limit = measure.error_limit(eager, truth)
    outputs = {
        "eager": [eager],
        "near": [rough(truth, dtype, 0.5 * limit)],
        "far": [rough(truth, dtype, 2 * limit)],
        "later": [eager, rough(truth, dtype, 2 * limit)],
        "nan": [torch.full_like(eager, math.nan), eager],
        "shape": [eager[:1]],
        "dtype": [eager.double()],
    }
    verdicts = measure.check(outputs, truth)
    assert {name for name, v in verdicts.items() if v["correct"]} == {"eager", "near"}
    assert verdicts["nan"]["error"] is None
    json.dumps(verdicts, allow_nan=False)


def test_an_eager_model_without_finite_output_is_wrong():
    truth = torch.full((4,), math.nan, dtype=torch.float64)
    assert not measure.check({"eager": [truth.float()]}, truth)["eager"]["correct"]


def test_limit_is_three_times_eagers_error_in_16_bits_and_twice_in_32():
    truth = torch.randn(4096, dtype=torch.float64)
    for dtype, times, tolerance in [(torch.bfloat16, 3, 1e-3), (torch.float32, 2, 1e-5)]:
        own = measure.relative_rmse(truth.to(dtype), truth)
        limit = measure.error_limit(truth.to(dtype), truth)
        assert limit == pytest.approx(times * own + tolerance)


def test_rounds_give_every_contestant_as_many_calls_in_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    times = measure.time_rounds(calls, 0, torch.device("cpu"))
    turn = measure.CALLS + 1  # the first of a turn is not counted
    assert "".join(order) == "a" * turn + "b" * 2 * turn + "a" * turn
    assert times["a"]["calls"] == times["b"]["calls"] == 2 * measure.CALLS
    assert 0 < times["a"]["min_ms"] <= times["a"]["median_ms"]


def test_freezing_and_folders_end_with_the_first_call(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "IPEX_HOME"):
        monkeypatch.setenv(name, "elsewhere")
    from torch._inductor import config

    seen = []

    def backend(graph, inputs, mode=None):
        seen.append((config.freezing, mode))
        return graph

    frozen = Contestant("f", "f", backend, "m", freezing=True)
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        measure.first_call(frozen, model, (torch.ones(1, 4),), tmp_path)
    assert seen[0][0]
    assert not config.freezing


def test_reasons_are_one_short_line():
    with measure._failure() as reasons:
        raise ValueError("first\nsecond " + "x" * 1000)
    assert reasons[0].startswith("ValueError: first second x")
    assert len(reasons[0]) == 200
