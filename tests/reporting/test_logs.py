"""What TORCH_LOGS, `set_logs` and TORCH_TRACE show of our decisions, in processes of their own."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("instructions_known")

RUN = """
import logging, sys, torch
import torch.nn.functional as F
if "set_logs" in sys.argv:
    torch._dynamo.lookup_backend("ipex")  # registers the short name
    torch._logging.set_logs(modules={"ipex": logging.DEBUG})
weight = torch.nn.Parameter(torch.randn(32, 16))
# Which would be one more decision, on some CPUs, or leave so small a product plain.
options = {"blocked_products": False, "rules": "-plain-products"}
fn = torch.compile(lambda x: F.gelu(F.linear(x, weight)), backend="ipex", options=options)
with torch.no_grad():
    fn(torch.randn(4, 16))
"""


def run(*args, **env):
    caches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    quiet = {k: v for k, v in os.environ.items() if k not in ("TORCH_LOGS", "TORCH_TRACE")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *args],
        env={**quiet, **caches, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


SUMMARY = "[0/0] fired linear+gelu; hoisted weight preprocessing"
DECISION = "[0/0] fired: linear+gelu"


@pytest.mark.slow  # 10 s; the summary is asked for below, too, and nothing is above
def test_torch_logs_prints_the_summary_of_each_graph():
    said = run(TORCH_LOGS="ipex_inductor")
    assert said.count(SUMMARY) == 1
    assert DECISION not in said


def test_every_decision_is_logged(op_by_op, caplog):
    """What the logger is told; when torch prints it is tested below."""
    caplog.set_level("DEBUG", "ipex_inductor")
    weight = torch.nn.Parameter(torch.randn(32, 16))
    options = {"blocked_products": False}  # as above
    fn = torch.compile(lambda x: F.gelu(F.linear(x, weight)), backend="ipex", options=options)
    with torch.no_grad():
        fn(torch.randn(4, 16))
    told = [(record.levelname, f"[0/0] {record.getMessage()}") for record in caplog.records]
    assert told.count(("INFO", SUMMARY)) == 1
    decisions = [text for level, text in told if level == "DEBUG" and text.startswith(DECISION)]
    assert len(decisions) == 1


@pytest.mark.slow  # 10 s each
@pytest.mark.parametrize("how", ["TORCH_LOGS", "set_logs"])
def test_every_decision_is_printed_where_asked_for(how):
    said = run(TORCH_LOGS="+ipex_inductor") if how == "TORCH_LOGS" else run(how)
    assert said.count(SUMMARY) == 1
    assert said.count(DECISION) == 1


@pytest.fixture(scope="module")
def unasked(tmp_path_factory):
    """What is printed where only a trace is asked for, and the trace."""
    folder = tmp_path_factory.mktemp("trace")
    said = run(TORCH_TRACE=str(folder))
    (file,) = folder.iterdir()
    return said, file


def test_nothing_is_printed_unasked(unasked):
    assert "linear+gelu" not in unasked[0]


def test_the_structured_trace_has_one_event_a_graph(unasked):
    _, file = unasked
    lines = file.read_text().splitlines()
    (at,) = (number for number, line in enumerate(lines) if '"ipex_passes"' in line)
    metadata = json.loads(lines[at].partition("] ")[2])
    assert metadata["artifact"] == {"name": "ipex_passes", "encoding": "json"}
    assert (metadata["frame_id"], metadata["frame_compile_id"]) == (0, 0)
    payload = []
    for line in lines[at + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line[1:])
    told = json.loads("\n".join(payload))
    assert told["source"] == "passes"
    assert [event["kind"] for event in told["events"]] == ["fired", "hoisted"]
