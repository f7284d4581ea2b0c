"""`ipex-inductor bisect` on planted faults: the real search over real compiles."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from ipex_inductor.cli import app
from ipex_inductor.cli.bisect import trials
from ipex_inductor.cli.bisect.search import REST, search
from ipex_inductor.cli.bisect.trials import PARTS, PROLOGUE, Trial
from ipex_inductor.passes import joint
from ipex_inductor.passes.weights.program import Program


class Net(nn.Module):
    """Fires linear+gelu, linear+relu and linear+silu, and has weights to pack."""

    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        a, b, c, d = self.layers
        x = F.dropout(F.gelu(a(x)), 0.5, self.training)
        return {"y": d(F.silu(c(F.relu(b(x))))), "calls": self.calls.clone()}


def plant(monkeypatch, name, wrong):
    """Replace what the rule `name` rewrites to."""
    rules = [
        dataclasses.replace(rule, replacement=wrong, op=None) if rule.name == name else rule
        for rule in joint.RULES
    ]
    monkeypatch.setattr(joint, "RULES", tuple(rules))


def relu_instead(x, weight, bias=None):
    return F.relu(F.linear(x, weight, bias))


def no_bias(x, weight, bias=None):
    return F.silu(F.linear(x, weight))


def slow_gelu(x, weight, bias=None):
    y = F.gelu(F.linear(x, weight, bias))
    return y + 1e-30 * torch.linalg.matrix_exp(x.mT @ x / x.numel()).sum()


class Small(nn.Module):
    """Fires linear+gelu alone, which is soon found."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return F.gelu(self.layer(x))


def find(model, x):
    trial = Trial(model.eval(), (x,), None, lambda text: None)
    return search(trial.check, PARTS)


X = torch.randn(4, 32)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_nothing_is_wrong_with_the_rules_as_they_are(dtype):
    model = Net().to(dtype)
    assert find(model, X.to(dtype)).status == "fine"
    assert model.calls == 0


@pytest.mark.slow  # of one that fires alone: by the verb
def test_a_wrong_rule_is_found(op_by_op, monkeypatch):
    plant(monkeypatch, "linear+gelu", relu_instead)
    finding = find(Net(), X)
    assert finding.culprits == (("linear+gelu",),)
    assert "RMSE" in finding.detail


@pytest.mark.slow  # 10 s; several at once: test_bisect.py
def test_two_wrong_rules_are_both_found(op_by_op, monkeypatch):
    plant(monkeypatch, "linear+gelu", relu_instead)
    plant(monkeypatch, "linear+silu", no_bias)
    assert find(Net(), X).off == {"linear+gelu", "linear+silu"}


def test_a_wrong_prologue_is_found(op_by_op, monkeypatch):
    run = Program.run
    monkeypatch.setattr(Program, "run", lambda self, weights: [2 * t for t in run(self, weights)])
    norm = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).double()
    norm[1].running_var.fill_(4)
    finding = find(norm, torch.randn(1, 3, 5, 5).double())
    assert finding.status == "found"
    assert set(finding.culprits[0]) <= {PROLOGUE, "conv2d+batch_norm"}
    assert PROLOGUE in finding.culprits[0]


def test_a_fault_of_what_has_no_name_is_told_from_those_of_the_rules(op_by_op, monkeypatch):
    def wrong(rules, graph, *rest):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.replace_all_uses_with(node.args[0])

    monkeypatch.setattr(joint, "apply_rules", wrong)
    finding = find(Net(), X)
    assert finding.culprits == ((REST,),)


def test_a_rule_whose_code_raises_is_found(op_by_op, monkeypatch):
    @torch.library.custom_op("ipex_test::raises", mutates_args=())
    def raises(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("planted")

    raises.register_fake(torch.empty_like)
    plant(monkeypatch, "linear+gelu", lambda x, weight, bias=None: raises(F.linear(x, weight)))
    finding = find(Small(), X)
    assert finding.culprits == (("linear+gelu",),)
    assert "planted" in finding.detail


def test_what_inductor_does_wrong_is_not_ours():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Wrong(CustomGraphPass):
        """A pass of the user's that replaces every relu by its input."""

        def __call__(self, graph):
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)

        def uuid(self):
            return "wrong"

    with torch._inductor.config.patch(joint_custom_pre_pass=Wrong()):
        finding = find(nn.Sequential(nn.Linear(32, 8), nn.ReLU()), X)
    assert finding.status == "not ours"


def test_a_model_that_cannot_run_in_float64_is_compared_with_eager(op_by_op, monkeypatch):
    class Half(Small):
        def forward(self, x):
            assert x.dtype == torch.float32
            return super().forward(x)

    plant(monkeypatch, "linear+gelu", relu_instead)
    assert find(Half(), X).culprits == (("linear+gelu",),)


@pytest.mark.slow  # it times, and other tests run on the same two cores
def test_a_slow_rule_is_found(monkeypatch):
    plant(monkeypatch, "linear+gelu", slow_gelu)
    trial = Trial(Net(256).eval(), (torch.randn(64, 256),), None, lambda text: None)
    finding, ratios = trial.find_slow(percent=50, seconds=0.2)
    assert finding.culprits == (("linear+gelu",),), ratios
    assert ratios["linear+gelu"] > 2
    assert ratios["linear+relu"] < 1.5


DIFFERENT = {
    "values": (torch.zeros(8), "RMSE"),
    "dtype": (torch.ones(8).double(), "dtypes"),
    "shape": (torch.ones(4), "shapes"),
    "nan": (torch.full((8,), torch.nan), ""),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_is_named(name):
    got, said = DIFFERENT[name]
    eager, truth = torch.ones(8), torch.ones(8).double()
    assert said in trials.difference({"y": eager}, {"y": got}, {"y": truth})


def test_rounding_is_no_difference():
    truth = torch.randn(1000).double()
    eager = truth.bfloat16()
    assert trials.difference(eager, eager + eager * 2**-8, truth) is None
    both = torch.tensor([1.0, torch.nan])
    assert trials.difference(both, both.clone(), both.double()) is None


MODEL = """
import torch
from torch import nn
def make():
    return nn.Sequential(nn.Linear(32, 32), nn.GELU()), (torch.ones(4, 32),)
"""


def test_the_verb_names_rule_and_option(monkeypatch, tmp_path):
    (tmp_path / "made_to_be_bisected.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    plant(monkeypatch, "linear+gelu", relu_instead)
    done = CliRunner().invoke(app, ["bisect", "made_to_be_bisected:make", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0
    assert told["culprits"] == [["linear+gelu"]]
    assert told["options"] == {"rules": "-linear+gelu"}
