"""`ipex_inductor.explain` on compiled models: what it says is so, and it leaves no trace."""

import copy
import json

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters, graph_break_reasons
from typer.testing import CliRunner

import ipex_inductor
from ipex_inductor.cli import app
from ipex_inductor.errors import OptionError
from ipex_inductor.inspection import kernel_times
from ipex_inductor.reporting import decisions
from support.helpers import Mlp, Plain, has_kernels

X = torch.randn(4, 32)


class Broken(nn.Module):
    """Two graphs with a break between, a near-miss in the second; it counts its calls."""

    def __init__(self):
        super().__init__()
        self.mlp, self.wide = Mlp(), Mlp(dtype=torch.float64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = self.mlp(x) + torch.rand(())
        torch._dynamo.graph_break()
        return self.wide(x.double())


@torch.no_grad()
def explain(model, *inputs, **kwargs):
    return ipex_inductor.explain(model.eval(), *inputs, **kwargs)


def rows(graph, kind):
    return {row.subject: row for row in graph.rows if row.kind == kind}


def test_rules_hoisted_work_kernels_and_the_users_line():
    options = {"blocked_products": False}  # the same on all CPUs
    (graph,) = explain(Mlp(), X, compile_args={"options": options}).graphs
    fired = rows(graph, "fired")
    assert {name: row.count for name, row in fired.items()} == {"linear+gelu": 1}
    (line,) = fired["linear+gelu"].where
    assert "helpers.py" in line
    assert line.endswith("in forward")
    assert (
        rows(graph, "hoisted")["weight preprocessing"].reason == "2 tensors, 0.0 MiB, of 2 weights"
    )
    assert graph.kernels == {"_linear_pointwise": 2}


def test_the_graph_is_shown_before_and_after(op_by_op):
    (graph,) = explain(Mlp(), X).graphs
    assert list(graph.stages) == ["traced", "rewritten", "compiled"]
    assert "aten.gelu" in graph.stages["traced"]
    assert "aten.gelu" not in graph.stages["rewritten"]
    assert "ipex.linear.default" in graph.stages["rewritten"]
    assert "derived_0" in graph.stages["compiled"]
    html = ipex_inductor.explain(Mlp().eval(), X).to_html()  # with gradients: nothing rewritten
    assert "→ rewritten by ipex: 0 lines differ" in html
    assert "→ rewritten by ipex: 4 lines differ" in explain(Mlp(), X).to_html()


def test_kernels_are_timed_in_further_runs():
    explained = explain(Mlp(), X, with_kernel_times=True)
    assert not explain(Mlp(), X).kernel_times
    (graph,) = explained.graphs
    names = [kernel.name for kernel in explained.kernel_times]
    assert set(graph.kernels) <= set(names)
    assert names[-1] == kernel_times.REST
    calls = {kernel.name: kernel.calls for kernel in explained.kernel_times}
    assert {name: calls[name] for name in graph.kernels} == graph.kernels
    assert all(kernel.microseconds > 0 for kernel in explained.kernel_times)


def test_near_misses_and_graph_breaks_have_reason_and_line(op_by_op):
    explained = explain(Broken(), X)
    missed = rows(explained.graphs[-1], "missed")["linear+gelu"]
    assert "float64" in missed.reason
    assert "helpers.py" in missed.where[0]
    (found,) = explained.breaks
    assert "graph_break()" in found.reason
    assert "test_explain_run.py" in found.where
    assert found.where.endswith("in forward")
    assert found.reason in str(explained)


def test_every_break_is_one_row_though_dynamo_meets_it_in_every_frame(op_by_op):
    def branch(x):
        y = x.sin()
        return y.cos() if y.sum() > 0 else y

    def fn(x):
        y = branch(x)
        return y + 1 if y.sum() > 1 else y

    first, second = ipex_inductor.explain(fn, X).breaks
    assert "branching" in first.reason
    assert first.where.endswith("in branch")
    assert "a branch on the value of a tensor" in second.reason
    assert second.where.endswith("in fn")


def test_a_fallback_is_told_without_what_had_been_rewritten(monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("ipex_inductor.passes.weights.prologue.split", broken)
    explained = explain(Mlp(), X)
    assert "planted" in rows(explained.graphs[0], "fallback")["plain Inductor"].reason
    assert not explained.fired()


def test_options_and_mode_are_those_of_torch_compile(op_by_op):
    assert explain(Mlp(), X, compile_args={"mode": "max-autotune"}).fired() == {"linear+gelu": 1}
    off = {"options": {"rules": "-linear+gelu"}, "mode": "default"}
    assert not explain(Mlp(), X, compile_args=off).fired()
    (graph,) = explain(Mlp(), X, compile_args={"dynamic": True}).graphs
    assert "float32[s" in graph.stages["traced"]


def test_our_errors_arrive_as_they_are():
    with pytest.raises(OptionError, match=r"linear\+gelu"):
        explain(Mlp(), X, compile_args={"options": {"rules": "-linear+gellu"}})


def test_keyword_inputs_and_training(op_by_op):
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp()

        def forward(self, *, x):
            return self.mlp(x)

    explained = ipex_inductor.explain(Keyword().train(), x=X)
    assert "the backward reads" in rows(explained.graphs[0], "missed")["linear+gelu"].reason


def test_a_compiled_model_is_explained_and_not_compiled_again():
    model = Mlp().eval()
    for wrapped in (torch.compile(model, backend="ipex"), torch.compile(model.forward)):
        with torch.no_grad():
            wrapped(X)
            before = counters["stats"]["unique_graphs"]
            assert ipex_inductor.explain(wrapped, X).fired() == {"linear+gelu": 1}
            wrapped(X)
        assert counters["stats"]["unique_graphs"] == before


# It leaves no trace.


def state(model):
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    return {
        "counters": copy.deepcopy(dict(counters)),
        "reports": decisions.reports(),
        "breaks": list(graph_break_reasons),
        "entries": len(entries(type(model).forward.__code__)),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": torch._inductor.config.save_config(),
        "functorch": torch._functorch.config.save_config(),
        "random": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "training": model.training,
        "weights": {name: value.tolist() for name, value in model.state_dict().items()},
    }


@pytest.mark.parametrize(
    "ran",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["fresh", "another model ran before"],
)
def test_nothing_is_left_of_it(ran):
    model = Broken().eval()
    if ran:
        with torch.no_grad():
            torch.compile(Mlp().eval(), backend="ipex")(X)
    before = state(model)
    for _ in range(3):
        explain(model, X)
    after = state(model)
    assert {k for k in before if before[k] != after[k]} == set()


def test_nothing_is_left_when_the_model_raises(op_by_op):
    class Raises(Broken):
        def forward(self, x):
            super().forward(x)
            raise ZeroDivisionError("the model's own")

    model = Raises().eval()
    before = state(model)
    with pytest.raises(ZeroDivisionError, match="own"):
        explain(model, X)
    assert state(model) == before


@pytest.mark.usefixtures("op_by_op")
def test_the_users_own_compile_is_not_made_dynamic_or_evicted():
    model = Broken().eval()
    fn = torch.compile(model, backend="ipex")
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        fn(X)
        frames = counters["stats"]["unique_graphs"]
        for rows_ in (2, 3, 5):  # more than that limit
            explain(model, torch.randn(rows_, 32))
        fn(X)
        assert counters["stats"]["unique_graphs"] == frames
    assert len(explain(model, torch.randn(12, 32)).graphs) == 2


def test_written_inputs_have_their_values_back(op_by_op):
    def write(x):
        return x.add_(1)

    x = X.clone()
    with torch.no_grad():
        ipex_inductor.explain(write, x)
    torch.testing.assert_close(x, X)


def test_a_second_explain_with_another_shape_is_as_static_as_the_first(op_by_op):
    explain(Mlp(), X)
    (graph,) = explain(Mlp(), X[:3]).graphs
    assert "float32[3, 32]" in graph.stages["traced"]


def test_graphs_are_not_kept_unless_asked_for(op_by_op):
    with torch.no_grad():
        torch.compile(Plain().eval(), backend="ipex")(X)
    assert [found.stages for found in decisions.reports()] == [None]


# The verb.


MODEL = """
import torch
from torch import nn
def make():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU()), (torch.ones(2, 8),)
"""


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    (tmp_path / "made_to_be_explained.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(app, ["explain", "made_to_be_explained:make", *args])


def test_verb_prints_a_table(invoke, op_by_op):
    done = invoke()
    assert done.exit_code == 0, done.output
    assert "linear+gelu" in done.output


def test_verb_json_and_page(invoke, tmp_path):
    dtype = "bf16" if has_kernels(torch.bfloat16) else "fp32"
    done = invoke("--json", "--html", "page.html", "--dtype", dtype, "--mode", "max-autotune")
    told = json.loads(done.stdout)
    assert told["graphs"][0]["rows"][0]["subject"] == "linear+gelu"
    page = (tmp_path / "page.html").read_text()
    assert f"{'bfloat16' if dtype == 'bf16' else 'float32'}[2, 8]" in page
    assert "ipex.linear.default" in page


def test_verb_rules_dynamic_and_train(invoke, op_by_op):
    assert "fired" not in invoke("--rules=-linear+gelu").output
    assert "fired" in invoke("--dynamic").output
    assert "the backward reads" in invoke("--train").output
    wrong = invoke("--rules=-linear+gellu")
    assert wrong.exit_code == 2
    assert "'linear+gelu'" in wrong.stderr
