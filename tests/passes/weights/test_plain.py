"""Small fp32 products that torch's own kernels compute on plain weights: which, and what comes."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor.lowerings.gemm import blocked
from ipex_inductor.passes.training import training
from ipex_inductor.passes.weights import cached_primitives, plain
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import architecture

CPUS, LEAST = plain.CPUS, training.LEAST  # other tests have none, and no bound
pytestmark = pytest.mark.skipif(architecture() not in CPUS, reason="not measured here")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # sums of up to 600 terms of size 1 in another order
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's choice depends on it; without kept primitives, of which most machines have none."""
    monkeypatch.setattr(cached_primitives, "FASTER", {})
    monkeypatch.setattr(plain, "CPUS", CPUS)
    monkeypatch.setattr(training, "LEAST", LEAST)
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


class Lines(nn.Module):
    """Two convolutions of one pixel over a line, one with a ReLU and one with an addend."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, 16, 1), nn.Conv1d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 8, T] and the same back."""
        return x + self.second(F.relu(self.first(x)))


def missed() -> list[str]:
    events = (event for report in decisions.reports() for event in report.events)
    return [e.reason for e in events if (e.kind, e.subject) == ("missed", "packed weights")]


def hoisted() -> bool:
    return any(e.kind == "hoisted" for report in decisions.reports() for e in report.events)


@pytest.mark.sampled("dynamic")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@torch.no_grad()
def test_small_convolutions_stay_plain(dynamic: bool) -> None:
    model = Lines().eval()
    fn = torch.compile(model, backend="ipex", dynamic=dynamic, options={"strict": True})
    for batch in (2, 5) if dynamic else (2,):
        x = torch.randn(batch, 8, 40)
        torch.testing.assert_close(fn(x), model(x), **CLOSE)
        assert fn(x).stride() == model(x).stride()
    assert len(missed()) == 2
    assert all("torch's own kernel is faster" in reason for reason in missed())
    assert not hoisted()  # nothing is packed, laid over a plane or computed ahead
    model.second.weight.mul_(2)
    torch.testing.assert_close(fn(x), model(x), **CLOSE)
    assert len(decisions.reports()) == 1  # a size that varies got no guard


@pytest.mark.skipif(blocked.why_not() is not None, reason="no kernel of ours is here")
@pytest.mark.parametrize("in_python", [True, False], ids=["by Python", "by C++"])
@torch.no_grad()
def test_small_layers_stay_plain_where_python_calls_kernels(
    in_python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of our kernel from Python takes longer than torch's own product."""
    if in_python:
        monkeypatch.setenv("TORCHINDUCTOR_CPP_WRAPPER", "0")
    layer, x = nn.Linear(128, 32).eval(), torch.randn(20, 128)
    fn = torch.compile(lambda x: F.relu(layer(x)), backend="ipex", options={"strict": True})
    torch.testing.assert_close(fn(x), F.relu(layer(x)), **CLOSE)
    assert bool(missed()) == in_python, missed()
    events = (event for report in decisions.reports() for event in report.events)
    ours = [event.reason for event in events if event.subject == "layers on packed weights"]
    assert len(ours) == (not in_python), ours


@torch.no_grad()
def test_rule_can_be_switched_off() -> None:
    model, x = Lines().eval(), torch.randn(2, 8, 40)
    options = {"strict": True, "rules": f"-{plain.NAME}"}
    fn = torch.compile(model, backend="ipex", options=options)
    torch.testing.assert_close(fn(x), model(x), **CLOSE)
    assert not missed()
    assert hoisted()


def reason(conv: nn.Module, shape: tuple[int, ...], last: bool = False) -> str | None:
    """Return why the product in `conv`, traced on an input of that shape, would stay plain."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from ipex_inductor.passes.engine.packable import packable

    x = torch.randn(shape, dtype=next(conv.parameters()).dtype)
    if last:
        conv, x = conv.to(memory_format=LAST), x.to(memory_format=LAST)

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        named = dict(zip(dict(conv.named_parameters()), weights, strict=True))
        return torch.func.functional_call(conv, named, (x,))

    table = {torch.ops.aten.t.default: lambda x: x.permute(1, 0)}
    traced = make_fx(call, decomposition_table=table, tracing_mode="fake")(x, *conv.parameters())
    graph = traced.graph
    products = [one for _, one in packable(graph, {*graph.find_nodes(op="placeholder")})]
    return plain.why_plain(products[0]) if products else None


@pytest.mark.parametrize(
    ("conv", "shape", "last", "stays"),
    [
        (nn.Conv2d(64, 64, 1), (1, 64, 16, 16), True, True),
        (nn.Conv2d(64, 64, 1), (1, 64, 28, 28), True, False),  # 3.2M multiplications
        (nn.Conv2d(64, 64, 1), (1, 64, 28, 28), False, True),  # oneDNN's converts such images
        (nn.Conv2d(8, 8, 1), (8, 8, 28, 28), True, False),  # 6272 pixels of few channels
        (nn.Conv2d(16, 16, 3), (1, 16, 10, 10), True, True),
        (nn.Conv2d(8, 8, 3), (1, 8, 28, 28), True, False),  # 676 windows to be gathered
        (nn.Conv2d(16, 16, 3), (1, 16, 18, 18), False, False),  # 0.6M multiplications
        (nn.Conv2d(16, 16, 1, groups=2), (1, 16, 8, 8), True, False),
        (nn.Conv2d(16, 16, 1, stride=2), (2, 16, 8, 8), True, False),  # torch takes oneDNN
        (nn.ConvTranspose2d(8, 8, 2), (1, 8, 4, 4), True, False),
        (nn.Conv3d(4, 4, 1), (1, 4, 4, 4, 4), False, False),
        (nn.Linear(64, 64), (64, 64), False, True),
        (nn.Linear(64, 64), (128, 64), False, False),
        (nn.Linear(16, 16).bfloat16(), (4, 16), False, False),
    ],
    ids=str,
)
@torch.no_grad()
def test_which_stay_plain(conv: nn.Module, shape: tuple[int, ...], last: bool, stays: bool) -> None:
    assert (reason(conv, shape, last) is not None) is stays


@torch.no_grad()
def test_lower_precision_that_was_asked_for_stays_onednns() -> None:
    backend = torch.backends.mkldnn.conv  # type: ignore[attr-defined]
    usual = backend.fp32_precision
    assert reason(nn.Conv1d(8, 8, 1), (1, 8, 16))
    backend.fp32_precision = "bf16"
    try:
        assert reason(nn.Conv1d(8, 8, 1), (1, 8, 16)) is None
    finally:
        backend.fp32_precision = usual


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("least", [LEAST, 40 * 16 * 16])
def test_small_layers_in_training(
    least: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch, op_by_op: None
) -> None:
    """From as many multiplications on the rule fires; a size that varies gets no guard."""
    monkeypatch.setattr(training, "LEAST", least)
    layer = nn.Linear(16, 16)
    fn = torch.compile(
        lambda x: F.relu(layer(x)), backend="ipex", dynamic=dynamic, options={"strict": True}
    )
    for rows in (40, 50) if dynamic else (40,):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(fn(x), F.relu(layer(x)), **CLOSE)
    events = [event for report in decisions.reports() for event in report.events]
    kinds = [event.kind for event in events if event.subject == "linear+relu"]
    assert kinds == (["missed"] if least == LEAST else ["fired"])
