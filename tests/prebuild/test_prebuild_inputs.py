"""What `prebuild` is asked for: functions, folders, sizes, records of a run; and what it says."""

import json
import os
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ipex_inductor
from ipex_inductor import compat
from ipex_inductor.cli import app
from ipex_inductor.cli.prebuild.inputs import examples
from ipex_inductor.errors import ArgumentError, OptionError
from ipex_inductor.prebuild import graphs
from ipex_inductor.prebuild.described import CompiledKernels
from ipex_inductor.prebuild.examples import Example, lines_of
from ipex_inductor.reporting.decisions import Event

X = torch.ones(2, 8)


def model():
    return nn.Linear(8, 8)


def test_a_function_returns_a_model_its_inputs_and_more():
    net, ranges = model(), {0: {0: (1, 4)}}
    step = torch.optim.SGD(net.parameters(), lr=0.1)
    (one,) = Example.all_of("m:f", (net, (X,)))
    assert (one.name, one.model, one.inputs) == ("m:f", net, (X,))
    assert (one.dynamic, one.optimizer, one.training) == (None, None, False)
    first, second = Example.all_of("m:f", (net, [(X,), (X[:1],)], step, ranges))
    assert (first.name, second.name) == ("m:f", "m:f #1")
    assert (second.dynamic, second.optimizer) == (ranges, step)
    asked = second.with_mode(torch.bfloat16, training=False)
    assert (asked.optimizer, asked.model.training) == (None, False)
    assert {t.dtype for t in (*asked.inputs, *asked.model.parameters())} == {torch.bfloat16}
    assert second.with_mode(None, training=True).optimizer is step


@pytest.mark.parametrize(
    "made", [3, (X, (X,)), (model(), X), (model(), []), (model(), (X,), 3), (model(), (X,), {}, {})]
)
def test_anything_else_is_told(made):
    with pytest.raises(ArgumentError, match=r"m:f to return \(model, tuple of inputs\)"):
        Example.all_of("m:f", made)


def test_sizes_of_a_line():
    last = torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last)
    example = Example("m", model(), (last, 7, torch.zeros(1, dtype=torch.int64)))
    sized = example.with_sizes("8x3x16..32x32 4")
    image, number, labels = sized.inputs
    assert (tuple(image.shape), number, tuple(labels.shape)) == ((8, 3, 32, 32), 7, (4,))
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype is torch.int64
    assert sized.dynamic == {0: {2: (16, 32)}}
    for line in ("8x3", "8x3x2x2 4 4", "axb 4", "8x3x2x2 4..", "-1x3x2x2 4"):
        with pytest.raises(ArgumentError, match="sizes of inputs"):
            example.with_sizes(line)


class Two(nn.Module):
    """Inputs by place and by name."""

    def __init__(self):
        super().__init__()
        self.layer = model()

    def forward(self, x, *, scale=None):
        return torch.relu(self.layer(x)) * scale


def test_a_run_is_recorded_and_its_inputs_come_back(op_by_op, tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_RECORD", str(tmp_path / "runs"))
    torch.compiler.reset()
    two = Two()
    call = torch.compile(two, backend="ipex", options={"strict": True})
    x = torch.empty_strided((4, 8), (1, 4)).fill_(1)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
    with torch.no_grad():
        call(x, scale=torch.ones(8))
    call(torch.ones(3, 8), scale=torch.ones(8))
    (file,) = (tmp_path / "runs").iterdir()
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    example = Example("m", two.eval(), ())
    ranged, trained = map(example.with_record, lines)
    assert set(ranged.kwargs) == {"x", "scale"}
    assert (tuple(ranged.kwargs["x"].shape), ranged.kwargs["x"].stride()) == ((4, 8), (1, 4))
    assert (ranged.dynamic, ranged.training) == ({"x": {0: (2, 16)}}, False)
    # Of other rows than before, so that Dynamo took the second graph for all of them.
    assert (trained.dynamic, trained.training) == ({"x": {0: None}}, True)
    with pytest.raises(ArgumentError, match="a record of this model"):
        Example("m", model(), ()).with_record(lines[0])
    with pytest.raises(ArgumentError, match="a record of ipex_inductor"):
        example.with_record('{"inputs": 3}')


def test_where_nothing_can_be_written_a_run_goes_on(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IPEX_RECORD", str(tmp_path / "file"))
    torch.compiler.reset()
    torch.compile(model(), backend="ipex")(X)
    assert "a call is not recorded" in caplog.text


MAKE = """
import torch
def make():
    net = torch.nn.Linear(8, 8)
    return net, [(torch.ones(2, 8),), (torch.ones(4, 8),)], torch.optim.AdamW(net.parameters())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "models").mkdir()
    for name in ("first", "second", "_helper"):
        (tmp_path / "models" / f"{name}.py").write_text(MAKE)
    return tmp_path


def test_a_folder_of_models_and_a_file_of_sizes(folder):
    found, _ = examples("models", None, 1, False, None, None)
    assert [each.name for each in found] == ["first", "first #1", "second", "second #1"]
    (folder / "sizes").write_text("# rows\n3x8\n\n2..16x8\n3x8\n")
    found, _ = examples("models", None, 1, False, folder / "sizes", None)
    assert [each.name for each in found] == [
        *("first 3x8", "first 2..16x8", "second 3x8", "second 2..16x8")
    ]
    (folder / "sizes").write_text("# none\n")
    with pytest.raises(ArgumentError, match="lines to read"):
        examples("models", None, 1, False, folder / "sizes", None)
    (folder / "empty").mkdir()
    with pytest.raises(OptionError, match="a folder of model files"):
        examples("empty", None, 1, False, None, None)


@pytest.mark.skipif(bool(torch.version.cuda), reason="torch makes graphs here")
def test_what_is_said_of_each_model_and_target(folder, monkeypatch):
    asked = []
    reason = [f"mm: 2 us, {source}" for source in ("shipped", "derived from an H200", "model")]
    reason += ["mm: nothing is recorded of 2 choices"]

    def prebuilt(net, inputs, target, **more):
        asked.append((str(target), len(inputs[0]), more["training"], more["optimizer"] is not None))
        if target.arch == "sm_80" and len(inputs[0]) == 4:
            raise RuntimeError("it does not compile\nat all")
        events = tuple(Event("choice", "mm", each) for each in reason)
        why = compat.why_not_for(target.kind)
        return graphs.Prebuilt(
            target, why, graphs=1, made=CompiledKernels(["a", "b"], ["a"]), events=events
        )

    monkeypatch.setattr(graphs, "prebuild", prebuilt)

    def said(*arguments):
        done = CliRunner().invoke(app, ["prebuild", "models", *arguments])
        return done.exit_code, done.stdout

    code, text = said("--arch", "h200", "--train")
    assert code == 0
    assert asked[:2] == [("sm_90:NVIDIA-H200", 2, True, True), ("sm_90:NVIDIA-H200", 4, True, True)]
    assert text.count("table 1, derived 1, model 1, nobody 1") == 4
    alone = CliRunner().invoke(app, ["prebuild", "models", "--arch", "sm_90", "--json"])
    assert alone.exit_code == 0
    first = "sm_90:NVIDIA-H100-80GB-HBM3"
    assert {row["target"] for row in json.loads(alone.stdout)["targets"]} == {first}
    assert f"--arch sm_90: for {first}, the first of that architecture" in alone.stderr
    code, text = said("--arch", "h200", "--arch", "a100-80gb", "--json")
    rows = json.loads(text[text.index("{") :])["targets"]
    assert code == 1
    assert [len(row["missing"]) for row in rows] == [0, 0, 0, 0, 0, 1, 0, 1]
    assert rows[5]["missing"] == ["RuntimeError: it does not compile"]
    assert rows[0]["chosen_by"] == {"table": 1, "derived": 1, "model": 1, "nobody": 1}
    assert (rows[0]["kernels"], rows[0]["untimed"]) == (2, ["a"])
    for wrong in (["--package", "-o", "x"], ["--arch", "h200", "--shapes", "a", "--from-log", "b"]):
        assert said(*wrong)[0] == 2


@pytest.mark.slow
def test_a_cluster_does_the_same(folder, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed, and nothing but --engine ray needs it")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    arguments = ["prebuild", "models", "--arch", "h200", "--engine", "ray", "--json"]
    finished = CliRunner().invoke(app, arguments)
    rows = json.loads(finished.stdout[finished.stdout.index("{") :])["targets"]
    assert [row["model"] for row in rows] == ["first", "first #1", "second", "second #1"]
    assert all(row["graphs"] == 1 for row in rows)
    assert finished.exit_code == 0


class Told(nn.Module):
    """What callers give: tensors in dicts, flags, numbers, a dtype, the same tensor twice."""

    def __init__(self):
        super().__init__()
        self.layer = model()

    def forward(self, batch, extra=(), *, flag=False, scale=1.0, dtype=None, name="#"):
        x = self.layer(batch["x"]) * scale
        x = torch.relu(x) if flag and name else x
        return (x + sum(extra)).to(dtype)


def told(x, *extra, **more):
    return ({"x": x, 0: None}, list(extra)), {"flag": True, "dtype": torch.float64, **more}


@pytest.fixture
def records(tmp_path):
    return tmp_path / "records"


def recorded_by(call, net, folder):
    """The examples that `call` leaves, which gets the compiled model."""
    torch.compiler.reset()
    compiled = torch.compile(net, backend="ipex", options={"strict": True})
    with ipex_inductor.record(compiled, folder), torch.no_grad():
        call(compiled)
    (file,) = folder.iterdir()
    return [Example("m", net, ()).with_record(line) for line in lines_of(file)]


def test_flags_and_what_holds_tensors_are_recorded(op_by_op, records):
    x = torch.empty_strided((4, 8), (1, 4)).fill_(1)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
    one = torch.ones(8)
    args, named = told(x, one, one, scale=float("inf"), name="a # b")

    def call(compiled):
        compiled(*args, **named)
        compiled(*args, **named)  # compiles nothing, so it says nothing

    (example,) = recorded_by(call, Told().eval(), records)
    batch, extra = example.inputs
    assert (set(batch), batch[0]) == ({"x", 0}, None)
    assert (batch["x"].shape, batch["x"].stride()) == (x.shape, x.stride())
    assert extra[0] is extra[1]
    assert example.kwargs == named
    assert type(example.kwargs["flag"]) is bool
    assert (example.dynamic, example.training) == ({(0, "x"): {0: (2, 16)}}, False)
    assert example.name == "m 4x8 8 8 True torch.float64 inf a # b"


def test_a_record_is_compiled_ahead_as_it_was_called(records):
    """The very graph: with the branch of the flag, the range, and one input for equal tensors."""
    one = torch.ones(8)
    net = Told().eval()
    x = torch.ones(4, 8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
    args, named = told(x, one, one)
    (example,) = recorded_by(lambda compiled: compiled(*args, **named), net, records)
    seen = []

    def backend(gm, inputs):
        seen.append((str(gm.code), [tuple(t.shape) for t in inputs if isinstance(t, torch.Tensor)]))
        return gm.forward

    for inputs, kwargs, dynamic in (
        (args, named, None),
        (example.inputs, example.kwargs, example.dynamic),
    ):
        torch.compiler.reset()
        graphs.mark_dynamic_sizes(inputs, kwargs, dynamic)
        with torch.no_grad():
            torch.compile(net, backend=backend)(*inputs, **kwargs)
    assert seen[0] == seen[1]
    assert "relu" in seen[0][0]
    twins = graphs.fake_copy((example.inputs, 3), torch.device("cpu"))
    assert twins[0][1][0] is twins[0][1][1]


def test_eager_and_compiled_in_place_are_recorded_too(records):
    net = Told().eval()
    with ipex_inductor.record(net, records):
        for rows in (2, 2, 3):
            args, named = told(torch.ones(rows, 8))
            net(*args, **named)
    assert len([*lines_of(records)]) == 2
    assert net._compiled_call_impl is None
    net.compile(backend="eager")
    before = net._compiled_call_impl
    with ipex_inductor.record(net, records), torch.no_grad():
        net(*told(torch.ones(5, 8))[0], dtype=torch.float32)
    assert net._compiled_call_impl is before
    example = Example("m", net, ()).with_record([*lines_of(records)][-1])
    assert (example.inputs[0]["x"].shape, example.training) == ((5, 8), False)
    first = Example("m", net, ()).with_record(next(lines_of(records)))
    assert first.training  # gradients were on, and the weights ask for them


def test_what_cannot_be_recorded_says_so_twice(records, caplog):
    """Where it runs, once, and where it is to be compiled."""
    net = Told().eval()
    with ipex_inductor.record(net, records):
        for _ in range(2):
            net({"x": X}, extra=(1,), name=frozenset("a"), dtype=torch.float32)
    assert caplog.text.count("a call is not recorded: name is a frozenset") == 1
    (line,) = lines_of(records)
    with pytest.raises(ArgumentError, match=r"got name is a frozenset. Give such arguments in"):
        Example("m", net, ()).with_record(line)
    with ipex_inductor.record(net, records):
        pass
    assert "the model was not called" in caplog.text
    with pytest.raises(ArgumentError, match=r"torch\.nn\.Module; got function"):
        ipex_inductor.record(told, records).__enter__()
    (records.parent / "file").write_text("")
    with pytest.raises(ArgumentError, match="a folder for records"):
        ipex_inductor.record(net, records.parent / "file").__enter__()


TENSOR = {"shape": [2], "strides": [1], "dtype": "float32", "requires_grad": False, "ranges": {}}


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"tensor": TENSOR | {"dtype": "load"}}, "no dtype: load"),
        ({"tensor": TENSOR | {"shape": [2, 2]}}, "RuntimeError"),
        ({"tensor": {"shape": [2]}}, "KeyError"),
        ({"same": 0}, "no argument"),
        ({"pickle": "gASVAA=="}, "no argument"),
        ({"device": "nowhere"}, "RuntimeError"),
        ({"tensor": TENSOR | {"ranges": {"-1": [2, 9]}}}, "no range of dimension -1"),
        ({"tensor": TENSOR | {"ranges": {"1": [2, 9]}}}, "no range of dimension 1"),
        ({"tensor": TENSOR | {"ranges": {"0": ["a", "b"]}}}, "no range of dimension 0"),
        ({"tensor": TENSOR | {"ranges": {"0": [1.5, 9.2]}}}, "no range of dimension 0"),
        ({"dict": [["x"]]}, "ValueError"),
    ],
)
def test_bad_records_are_refused(argument, said):
    told = {"call": {"args": [argument], "kwargs": {}}, "training": False}
    check_refused(told, said)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"inputs": [], "training": False}, "no inputs"),
        ({"call": {"args": {"0": 1}, "kwargs": {}}, "training": False}, "no call"),
        ({"call": {"args": [], "kwargs": []}, "training": False}, "no call"),
    ],
)
def test_what_is_no_call_is_refused(told, said):
    check_refused(told, said)


def check_refused(told, said):
    line = json.dumps(told)
    with pytest.raises(ArgumentError, match=r"a record of ipex_inductor") as caught:
        Example("m", model(), ()).with_record(line)
    assert said in str(caught.value)
    assert "Record the run again" in str(caught.value)
