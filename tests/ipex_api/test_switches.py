"""What a program switches for the whole process: fusion, logging, oneDNN's own report."""

import logging

import pytest
import torch
from torch._dynamo.utils import counters

from ipex_inductor import __version__, config
from ipex_inductor.cpu.verbose import VERBOSE_OFF, VERBOSE_ON, VERBOSE_ON_CREATION, verbose
from ipex_inductor.errors import ArgumentError, OptionError
from ipex_inductor.ipex_api.switches import LOGS, enable_onednn_fusion, set_logging_level, version
from ipex_inductor.reporting import decisions
from support.helpers import Mlp, code_of

X = torch.randn(4, 32)


@pytest.fixture(autouse=True)
def _restored():
    yield
    enable_onednn_fusion(True)


@torch.no_grad()
def fired(options=None):
    torch.compiler.reset()
    counters.clear()
    model = Mlp().eval()
    fn = torch.compile(model, backend="ipex", options={"strict": True, **(options or {})})
    torch.testing.assert_close(fn(X), model(X))
    return counters["ipex"]["linear+gelu"]


def test_fusion_is_switched_for_what_is_compiled_afterwards():
    assert fired() == 1
    enable_onednn_fusion(False)
    assert fired() == 0
    enable_onednn_fusion(True)
    assert fired() == 1


@torch.no_grad()
def test_what_is_compiled_already_keeps_its_code():
    model = Mlp().eval()
    fn = torch.compile(model, backend="ipex")
    fn(X)
    enable_onednn_fusion(False)
    counters.clear()
    fn(X)
    assert not counters["ipex"]
    assert len(decisions.reports()) == 1


def test_rules_named_by_a_call_beat_the_switch():
    enable_onednn_fusion(False)
    assert fired({"rules": ""}) == 1


def test_the_switch_beats_the_environment(monkeypatch):
    monkeypatch.setenv("IPEX_RULES", "-attention")
    enable_onednn_fusion(False)
    assert config.resolve(None, None, {}).rules == "-*"


def test_the_switch_enters_the_identity_of_the_graph():
    """Inductor's caches see the rules that are off, so no entry of the other setting is taken."""
    from ipex_inductor.compiler.request import Request

    gm = torch.fx.symbolic_trace(torch.nn.Identity())

    def identity():
        return Request(gm, [X], config.resolve(None, None, {}, {})).identity()

    on = identity()
    enable_onednn_fusion(False)
    off = identity()
    enable_onednn_fusion(True)
    assert on != off
    assert on == identity()


@torch.no_grad()
def test_inductor_is_not_touched():
    model = Mlp().eval()

    def code():
        torch.compiler.reset()
        return code_of(torch.compile(model, backend="inductor"), X)

    before = code()
    enable_onednn_fusion(False)
    assert code() == before


@pytest.mark.parametrize("enabled", [None, 1, "off"])
def test_fusion_takes_a_bool(enabled):
    with pytest.raises(ArgumentError, match="expected True or False"):
        enable_onednn_fusion(enabled)


@pytest.fixture
def logs():
    found = [logging.getLogger(name) for name in LOGS]
    before = [(log, log.level, list(log.handlers), log.propagate) for log in found]
    yield found
    for log, *facts, log.propagate in before:
        log.setLevel(facts[0])
        log.handlers[:] = facts[1]


@pytest.mark.usefixtures("logs")
def test_the_log_says_as_much_as_was_asked_for(caplog):
    for level, lines in ((logging.WARNING, 0), ("INFO", 1)):
        set_logging_level(level)
        caplog.clear()
        fired()
        assert sum("fired linear+gelu" in line for line in caplog.messages) == lines


def test_without_handlers_the_logs_go_to_standard_error(logs):
    for log in logs:
        log.propagate = False
        log.handlers[:] = []
    set_logging_level(logging.INFO)
    set_logging_level(logging.INFO)
    for log in logs:
        assert [type(handler) for handler in log.handlers] == [logging.StreamHandler]


def test_version_names_both(capsys):
    version()
    said = capsys.readouterr().out
    assert __version__ in said
    assert torch.__version__ in said


def convolve():
    return torch.nn.functional.conv2d(torch.ones(2, 8, 16, 16), torch.ones(4, 8, 3, 3))


@pytest.mark.parametrize("level", [VERBOSE_ON, VERBOSE_ON_CREATION])
def test_onednn_says_what_it_runs(capfd, level):
    with verbose(level):
        convolve()
    said = capfd.readouterr().out
    assert "convolution" in said
    assert ("create" in said) == (level == VERBOSE_ON_CREATION)
    convolve()
    assert not capfd.readouterr().out


def test_verbose_off_says_nothing(capfd):
    with verbose(VERBOSE_OFF):
        convolve()
    assert not capfd.readouterr().out


def test_an_unknown_level_names_the_known_ones():
    with pytest.raises(OptionError, match="VERBOSE_OFF, VERBOSE_ON or VERBOSE_ON_CREATION; got 3"):
        verbose(3)
