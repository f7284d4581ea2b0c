"""Measurements of a first call among the sources of a selection: last, and only if allowed."""

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.virtualized import V

from ipex_inductor.autotune.record import encode
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.select import library
from ipex_inductor.passes.engine.whole_ops import WHOLE, reduced_table
from ipex_inductor.passes.fusion.library import FIRST_CALL, place
from ipex_inductor.reporting.decisions import GraphReport
from support.first_call_problems import CONV, problem
from support.meta_device import H200, conv, image, selected, targets, traced

pytestmark = pytest.mark.unit

PLAIN, RELU = "aten.convolution", "cudnn.convolution_relu"
FP32 = torch.float32


@pytest.fixture(autouse=True)
def _h200(monkeypatch):
    monkeypatch.setattr(selector_hook, "arch_of", lambda device: H200)


class FirstCall:
    """Selects cuDNN's call for all that it is asked about, and keeps what that is."""

    def __init__(self, reasons=None):
        self.asked, self.reasons = [], reasons

    def measure(self, offers, unselected, device):
        self.asked.append((offers, unselected, device))
        found = {k: o.problem for k, o in offers.items() if k in unselected}
        selections = {}
        for each in found.values() if self.reasons is None else ():
            selections |= selected(each, RELU, "measured at the first call")
        reasons = dict.fromkeys(found, self.reasons or "")
        return SimpleNamespace(selections=selections, reasons=reasons, summary="2 of 2")


def twice_and_more(x, weight, bias, small, small_weight):
    """A convolution at two places, and another one."""
    first, second = (conv(x, weight, bias, padding=1) for _ in range(2))
    return first, second, conv(small, small_weight, bias)


def given():
    x = image(4, 12, 7, 9, dtype=FP32)
    small = image(4, 12, 7, 9, dtype=FP32), image(16, 12, 3, 3, dtype=FP32)
    return x, image(16, 12, 3, 3, dtype=FP32), torch.randn(16), *small


def placed(chooser, fn=twice_and_more, inputs=None):
    mode, gm = traced(fn, *(inputs or given()))
    gm.graph.eliminate_dead_code()
    report = GraphReport()
    with V.set_fake_mode(mode):
        table = reduced_table(frozenset(WHOLE))
        place(gm.graph, chooser, (), table, report, measure=chooser.measure)
    return gm, report


def test_what_it_selects_is_called_with_its_reason():
    first_call = FirstCall()
    gm, report = placed(library.Chooser({}, first_call=first_call))
    assert targets(gm).count("ipex.cudnn_conv_relu.default") == 3
    summary, *choices = report.events
    assert (summary.kind, summary.subject, summary.reason) == ("choice", FIRST_CALL, "2 of 2")
    assert [e.reason for e in choices] == [f"{RELU}: 5 us, measured at the first call"] * 3


def test_it_is_asked_once_about_each_problem_of_the_graph():
    first_call = FirstCall()
    placed(library.Chooser({}, first_call=first_call))
    ((offers, unselected, device),) = first_call.asked
    assert {o.times for o in offers.values()} == {1, 2}
    assert unselected == offers.keys()
    assert [o.taken.name for o in offers.values()] == [PLAIN] * 2
    assert device.type == "meta"


def test_what_another_source_selects_is_not_measured():
    known = problem(CONV["3x3"])
    assert encode(known) in _keys(FirstCall())
    first_call = FirstCall()
    chooser = library.Chooser(selected(known, PLAIN), first_call=first_call)
    gm, report = placed(chooser)
    ((offers, unselected, _),) = first_call.asked
    assert unselected == offers.keys() - {encode(known)}
    assert targets(gm).count("ipex.cudnn_conv_relu.default") == 1
    assert sum(e.reason.endswith("us, recorded") for e in report.events) == 2


def _keys(first_call):
    placed(library.Chooser({}, first_call=first_call))
    ((offers, _, _),) = first_call.asked
    return offers.keys()


def test_why_a_problem_was_not_measured_is_said():
    _, report = placed(library.Chooser({}, first_call=FirstCall("the budget is spent")))
    reason = f"{PLAIN}: nothing is recorded of 2 choices; the budget is spent"
    assert {e.reason for e in report.events[1:]} == {reason}


def test_nothing_is_measured_where_nothing_may_be_chosen():
    first_call = FirstCall()
    gm, report = placed(library.Chooser({}, "a reason", first_call=first_call))
    assert not first_call.asked
    assert {e.reason for e in report.events} == {"a reason"}
    assert "ipex.cudnn_conv_relu.default" not in targets(gm)
    assert library.Chooser({}).measure([]) == ""


def test_a_graph_without_a_choice_asks_nothing():
    first_call = FirstCall()
    chooser = library.Chooser({}, first_call=first_call)
    x, weight, bias, *_ = given()
    inputs = x.contiguous(), weight, bias
    placed(chooser, lambda x, weight, bias: conv(x, weight, bias, padding=1), inputs)
    assert not first_call.asked
