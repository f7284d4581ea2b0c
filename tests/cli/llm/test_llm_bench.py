"""`ipex-inductor llm bench`: results are checked before they get a speed; tables and errors."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ipex_inductor.cli import app
from ipex_inductor.cli.llm import bench
from ipex_inductor.cli.llm.jobs import ChildError, Job, start_child
from ipex_inductor.cli.llm.results import describe_error

FACTS = {
    "bytes_weights": 3 << 20,
    "bytes_read": 2_000_000,
    "bytes_keys": 0,
    "bytes_peak": 7 << 20,
    "logits_error": 0.004,
    "logits_limit": 0.006,
}


class FakeChild:
    """A process that takes 4 and 2 ms a token, and 10 ms for a prompt."""

    def __init__(self, facts):
        self.facts, self.turns = facts, []

    def take_turn(self):
        self.turns.append({"prefill": 0.010, "steps": [0.004, 0.002, 0.004]})

    def measure_bandwidth(self):
        return 4.0


def run(*args):
    return CliRunner().invoke(app, ["llm", "bench", "tiny", *args])


@pytest.fixture
def children(monkeypatch):
    """Replace processes; return the jobs that were started, and facts by variant to change."""
    seen = SimpleNamespace(jobs=[], facts={})

    @contextmanager
    def start(command, log, environment=None):
        job = Job.from_json(command[-1])
        seen.jobs.append(job)
        facts = seen.facts.get((job.variant, job.weights), FACTS)
        if isinstance(facts, Exception):
            raise facts
        yield FakeChild(dict(facts))

    monkeypatch.setattr(bench, "start_child", start)
    return seen


def test_speeds_memory_and_the_share_of_the_bandwidth(children):
    done = run("--json", "--prompt", "50", "--turns", "1")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["variant"] for row in rows] == ["ours", "eager", "inductor"]
    first = rows[0]
    assert (first["prefill_tokens_s"], first["median_ms"], first["least_ms"]) == (5000, 4, 2)
    assert first["tokens_s"] == 250
    assert first["of_bandwidth"] == 0.25  # 2 MB in 2 ms is 1 GB/s of 4
    kinds = [job.variant for job in children.jobs]
    assert kinds == ["reference", "ours", "eager", "inductor"]


def test_a_wrong_variant_gets_no_speed_and_the_exit_code_says_so(children):
    children.facts["ours", "int4"] = {**FACTS, "logits_error": 0.5}
    done = run("--weights", "int4", "--alone", "--json")
    assert done.exit_code == 1
    wrong, right = json.loads(done.stdout)["rows"]
    assert wrong["failed"] == "wrong: logits off by 0.5, 0.006 allowed"
    assert not {"median_ms", "tokens_s", "prefill_tokens_s"} & wrong.keys()
    assert right["median_ms"] == 4
    table = run("--weights", "int4", "--alone").stdout
    assert "wrong: logits off by 0.5" in table


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 0.0061])
def test_errors_beyond_the_limit_are_wrong(error):
    assert "wrong: logits" in describe_error({**FACTS, "logits_error": error})
    assert "wrong: beam" in describe_error({**FACTS, "beam_error": error, "beam_limit": 0.006})
    assert describe_error(FACTS) == ""


def test_a_peer_that_fails_is_a_row_and_no_error(children):
    children.facts["inductor", ""] = ChildError("the process ended with exit code -9")
    done = run()
    assert done.exit_code == 0, done.output
    assert "exit code -9" in done.stdout
    assert "off by 0.004, 0.006 allowed" in done.stdout


def test_each_kind_of_weights_has_exact_logits_of_its_own(children):
    run("--weights", "int8", "--alone")
    jobs = [(job.variant, job.weights, job.group_size, job.lowp_mode) for job in children.jobs]
    assert jobs == [
        ("reference", "int8", -1, "INT8"),
        ("ours", "int8", -1, "INT8"),
        ("reference", "", -1, "NONE"),
        ("ours", "", -1, "NONE"),
    ]
    assert len({job.reference for job in children.jobs}) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--group-size", "32"), "--weights beside them"),
        (("--weights", "nf4", "--lowp-mode", "int8"), "lowp_mode INT8"),
        (("--weights", "int4", "--group-size", "33"), "power of two"),
    ],
)
def test_options_that_do_not_go_together(children, args, words):
    done = run(*args)
    assert done.exit_code == 2
    assert words in done.output
    assert children.jobs == []


def test_a_model_that_is_not_there(tmp_path):
    for name in ("no-such-shape", "tiny:x", str(tmp_path)):
        done = CliRunner().invoke(app, ["llm", "bench", name])
        assert done.exit_code == 2
        assert "MODEL: a folder of transformers" in done.output


def test_a_process_that_ends_raises_the_end_of_its_log(tmp_path):
    command = ["python3", "-c", "import sys; sys.exit('no memory for it')"]
    with (
        pytest.raises(ChildError, match="exit code 1\nno memory for it"),
        start_child(command, tmp_path / "log"),
    ):
        pass


@pytest.mark.slow
def test_a_whole_run_on_a_tiny_model():
    """Run all processes: compiled code is right, and so are int4 weights in groups of 32."""
    sizes = ("--prompt", "20", "--new", "10", "--turns", "1")
    done = run(*sizes, "--weights", "int4", "--group-size", "32", "--beside", "eager", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["variant"] for row in rows] == ["ours, int4", "ours", "eager"]
    for row in rows:
        assert row["logits_error"] <= row["logits_limit"]
        assert row["least_ms"] <= row["median_ms"]
        assert row["bytes_peak"] >= row["bytes_loaded"] > row["bytes_weights"]
    assert rows[0]["bytes_weights"] < rows[1]["bytes_weights"]
