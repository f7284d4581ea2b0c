"""Graph mode: compiled, and still the model it was."""

import copy
import gc

import pytest
import torch
from torch import nn

import ipex_inductor
from ipex_inductor.reporting import decisions
from support.helpers import Mlp, has_kernels, pickled

X = torch.linspace(-1, 1, 64).view(2, 32)


def compiled_graphs():
    return sum("passes" in r.source for r in decisions.reports())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_runs_compiled_and_stays_the_model(dtype, op_by_op):
    model = Mlp().eval()
    ours = ipex_inductor.optimize(model, dtype, graph_mode=True)
    assert type(ours) is Mlp
    assert ours.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        # bf16: three roundings of 2**-8 on numbers around 1
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype is None else {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(ours(X), model(X), **close)
    assert compiled_graphs() == 1
    fired = decisions.reports()[0].count("fired")
    assert "linear+gelu" in fired or not has_kernels(dtype or torch.float32)


def test_copies_and_pickles_run_eagerly_until_compiled_again(op_by_op):
    ours = ipex_inductor.optimize(Mlp().eval(), graph_mode=True)
    with torch.no_grad():
        expected = ours(X)
        for copied in (copy.deepcopy(ours), pickled(ours)):
            torch.testing.assert_close(copied(X), expected)
            assert compiled_graphs() == 1
    again = ipex_inductor.optimize(copy.deepcopy(ours))  # it was in graph mode, so it is again
    assert again._compiled_call_impl is not None
    with torch.no_grad():
        torch.testing.assert_close(again(X), expected)
    eager = ipex_inductor.optimize(ours, graph_mode=False)
    assert eager._compiled_call_impl is None


def test_switched_off_in_place():
    ours = ipex_inductor.optimize(Mlp().eval(), graph_mode=True)
    assert ipex_inductor.optimize(ours, graph_mode=False, inplace=True) is ours
    assert ours._compiled_call_impl is None


def test_reports_of_later_calls_say_what_earlier_ones_did():
    first = ipex_inductor.optimize(Mlp().eval(), torch.bfloat16, graph_mode=True)
    events = list(ipex_inductor.report(first).events)
    again = ipex_inductor.optimize(first, graph_mode=False)
    report = ipex_inductor.report(again)
    assert set(events) < set(report.events)
    assert {"dtype", "graph_mode"} <= report.count("fired").keys()
    assert report.events[-1].reason == "off again"
    assert ipex_inductor.report(first).events == events
    # What is said twice stands once, and graph mode is off whatever was done before.
    third = ipex_inductor.optimize(again, graph_mode=False, inplace=True)
    assert third._compiled_call_impl is None
    assert sorted(map(str, ipex_inductor.report(third).events)) == sorted(map(str, report.events))


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.sampled
def test_a_cast_model_compiles_to_one_graph(dynamic, autocast, op_by_op):
    model = Mlp().eval()
    ours = ipex_inductor.optimize(model, torch.bfloat16)
    whole = torch.compile(ours, backend="ipex", fullgraph=True, dynamic=dynamic)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for x in (X, torch.cat([X, X])):
            torch.testing.assert_close(whole(x), ours(x), rtol=0.02, atol=0.02)  # 2**-8, thrice
    fired = decisions.reports()[0].count("fired")
    assert "linear+gelu" in fired or not (autocast and has_kernels(torch.bfloat16))


def test_state_dicts_load_into_it(op_by_op):
    ours = ipex_inductor.optimize(Mlp().eval(), graph_mode=True)
    other = Mlp().eval()
    with torch.no_grad():
        ours(X)
        ours.load_state_dict(other.state_dict())
        torch.testing.assert_close(ours(X), other(X))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_torch_traces_and_exports_the_models_own_code(dtype, op_by_op, tmp_path):
    """torch.jit.trace and torch.fx cannot enter compiled code; IPEX's graph mode was traced too."""
    from torch.fx.experimental.proxy_tensor import make_fx

    ours = ipex_inductor.optimize(Mlp().eval(), dtype, graph_mode=True)
    eager = ipex_inductor.optimize(ours, graph_mode=False)
    with torch.no_grad():
        expected = eager(X)
        traced = torch.jit.trace(ours, X, check_trace=False)  # the check calls the model as it is
        made = {
            "trace": traced,
            "freeze": torch.jit.freeze(traced),
            "make_fx": make_fx(ours)(X),
            "export": torch.export.export(ours, (X,)).module(),
            "export, not strict": torch.export.export(ours, (X,), strict=False).module(),
        }
        for name, each in made.items():
            # The same kernels in the same order, but what freezing folds: 2**-8 of numbers below 1.
            atol = 4e-3 if dtype else 1e-6
            torch.testing.assert_close(each(X), expected, rtol=0, atol=atol, msg=name)
        assert compiled_graphs() == 0
        ours(X)
        assert compiled_graphs() == 1  # traced or not, calls run compiled
        torch.testing.assert_close(torch.jit.trace(ours, X)(X), traced(X), rtol=0, atol=0)
        traced.save(tmp_path / "traced.pt")
        torch.testing.assert_close(torch.jit.load(tmp_path / "traced.pt")(X), traced(X))


def test_it_is_compiled_into_a_graph_around_it(op_by_op):
    ours = ipex_inductor.optimize(Mlp().eval(), torch.bfloat16, graph_mode=True)
    whole = torch.compile(nn.Sequential(ours, nn.ReLU()), backend="ipex", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(whole(X), ours(X).relu(), rtol=0.02, atol=0.02)  # 2**-8, thrice


def test_training(op_by_op):
    model = Mlp()
    twin = copy.deepcopy(model)
    pair = ipex_inductor.optimize(
        model, torch.bfloat16, torch.optim.SGD(model.parameters(), lr=0.1), graph_mode=True
    )
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for net, optimizer in (pair, (twin, reference)):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=net is not twin):
                loss = net(X).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert compiled_graphs() == 1
    for name, value in pair[0].state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=0.02, atol=0.02)


def test_kernel_selection_is_max_autotune(monkeypatch):
    asked = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: asked.append(options))
    ipex_inductor.optimize(Mlp().eval(), graph_mode=True, auto_kernel_selection=True)
    assert asked == [{"backend": "ipex", "mode": "max-autotune"}]


def test_dynamo_is_imported_with_the_collector_off(monkeypatch):
    seen = []
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: seen.append(gc.isenabled()))
    ipex_inductor.optimize(Mlp().eval(), graph_mode=True)
    assert seen == [False]
    assert gc.isenabled()
