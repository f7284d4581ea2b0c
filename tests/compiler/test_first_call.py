"""Graphs that may be measured while they compile, and those that may not."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ipex_inductor.compiler import first_call, graph_cache
from ipex_inductor.compiler.compile_context import CompileContext
from ipex_inductor.compiler.request import Request
from ipex_inductor.config import resolve

pytestmark = pytest.mark.unit

GPU, CPU, XPU = (torch.device(name) for name in ("cuda:0", "cpu", "xpu:0"))


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Make torch report a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(graph_cache, "is_rank", lambda: False)


def request(devices=(GPU,), inputs=(), mode=None, **options):
    names = ("max_autotune", "max_autotune_gemm", "deterministic")
    config = resolve(mode, options, dict.fromkeys(names))
    gm = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    found = Request(gm, list(inputs), config)
    found.__dict__["devices"] = {*devices}  # of cached properties
    return found


def field_of(request):
    """Return what the key of a request says of first calls."""
    request.__dict__["places"] = {CPU}
    return request.identity_fields({})["first_call"]


@torch.no_grad()
def test_inference_on_a_gpu_may_be_measured():
    assert first_call.may_measure(request())
    assert first_call.may_measure(request([GPU, CPU]))
    found = first_call.start_first_call(request())
    assert found.now() >= found.began


@pytest.mark.parametrize(
    "options",
    [
        {"autotune_first_call": False},
        {"autotune": "never"},
        {"autotune": "always"},
        {"autotune": "inductor"},
        {"mode": "max-autotune"},
        {"max_autotune_gemm": True},
        {"deterministic": True},
        {"devices": [CPU]},
        {"devices": [XPU]},
        {"devices": [GPU, torch.device("cuda:1")]},
    ],
    ids=str,
)
@torch.no_grad()
def test_what_rules_it_out(options):
    assert not first_call.may_measure(request(**options))
    assert first_call.start_first_call(request(**options)) is None


def test_training_is_not_measured():
    weight = torch.ones(2, requires_grad=True)
    assert not first_call.may_measure(request(inputs=[weight]))
    with torch.no_grad():
        assert first_call.may_measure(request(inputs=[weight]))


@torch.no_grad()
def test_states_of_the_process_that_rule_it_out(monkeypatch):
    for owner, name, value in (
        (torch.cuda, "is_available", False),
        (torch.cuda, "is_current_stream_capturing", True),
        (torch, "are_deterministic_algorithms_enabled", True),
        (graph_cache, "is_rank", True),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, lambda value=value: value)
            assert not first_call.may_measure(request()), name
    monkeypatch.setattr(torch.version, "hip", "7")
    assert not first_call.may_measure(request())


@torch.no_grad()
def test_a_graph_that_is_prebuilt_is_not_measured():
    """Its inputs are fake; without `prebuild` Dynamo hands over real ones."""
    with FakeTensorMode():
        fake = torch.empty(2)
    assert not first_call.may_measure(request(inputs=[fake]))


def test_code_for_others_is_not_for_use():
    from ipex_inductor import compat

    for compiler, is_for_use in (
        (compat.compile_inner, True),
        (compat.lower_inner, False),
        (compat.read_inner, False),
        (print, False),
    ):
        context = CompileContext(
            *(None,) * 4, may_time=False, prologue=False, captures=False, compiler=compiler,
            join=None,
        )  # fmt: skip
        assert context.is_for_use == is_for_use


def test_the_key_says_that_it_may_be_measured_and_nothing_of_results():
    """A prebuilt entry serves where it may be, too."""
    on, off, fake = request(), request(autotune_first_call=False), None
    with FakeTensorMode():
        fake = request(inputs=[torch.empty(2)])
    assert [*map(field_of, (on, off, fake))] == [True, False, True]


@torch.no_grad()
def test_the_option_changes_no_key_of_graphs_that_are_not_measured():
    """Else switching it would compile all graphs on CPUs, and all training, once more."""
    weight = torch.ones(2, requires_grad=True)
    for devices in ([CPU], [XPU]):
        on, off = request(devices), request(devices, autotune_first_call=False)
        assert field_of(on) == field_of(off), devices
    with torch.enable_grad():
        on, off = (request(inputs=[weight], autotune_first_call=v) for v in (True, False))
        assert field_of(on) == field_of(off)


@torch.no_grad()
def test_a_rank_has_a_key_of_its_own(monkeypatch):
    """Else it could find code that another process measured on its host alone."""
    alone = field_of(request())
    monkeypatch.setattr(graph_cache, "is_rank", lambda: True)
    assert field_of(request()) != alone
    assert field_of(request()) == field_of(request(autotune_first_call=False))
