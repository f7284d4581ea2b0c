"""Option `drop_plain_weights`: a weight's data is freed once all that reads it is derived."""

import copy
import ctypes
import io
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ipex_inductor
from ipex_inductor.errors import DroppedWeightError
from ipex_inductor.passes.weights import blocked, cached_primitives, winograd
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.cpu import cpu_library
from ipex_inductor.templates.tensor_reader import freed

NOT_HERE = "is freed. Load it again"
free = freed.free


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is freed is NaN before: what still reads it shows."""

    def spoil(weights: Sequence[Tensor]) -> str:
        where = [(weight.data_ptr(), weight.nbytes) for weight in weights]
        if not all(map(freed._is_alone, weights)):
            return free(weights)
        for address, size in where:
            ctypes.memset(address, 0xFF, size)
        return free(weights)

    monkeypatch.setattr(freed, "free", spoil)
    with torch.no_grad():
        yield


class Net(nn.Module):
    """A convolution of one pixel, one of nine, batch norms, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.nine = nn.Conv2d(8, 64, 1), nn.Conv2d(64, 32, 3, 1, 1)
        self.norm = nn.BatchNorm2d(32)
        self.norm.running_mean.normal_()  # type: ignore[operator,union-attr]
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8, H, W) to (B, 16)."""
        image = F.relu(self.norm(self.nine(F.relu(self.one(x)))))
        return self.down(F.gelu(self.up(image.mean((2, 3)))))  # type: ignore[no-any-return]


X = torch.randn(2, 8, 12, 12)


def compiled(model: nn.Module, **options: object) -> torch._dynamo.eval_frame.OptimizedModule:
    how = {"drop_plain_weights": True, "strict": True, **options}
    return torch.compile(model, backend="ipex", dynamic=False, options=how)  # type: ignore[call-overload,no-any-return]


def close(got: Tensor, want: Tensor) -> None:
    """Sums of some hundred terms in fp32, in another order."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def gone(model: nn.Module) -> set[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name for name, tensor in tensors if freed.is_freed(tensor)}


LARGE = {"one.weight", "nine.weight", "up.weight", "down.weight"}


@pytest.mark.sampled("fp32-our kernels", "bf16-oneDNN")
@pytest.mark.parametrize("ours", [True, False], ids=["our kernels", "oneDNN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_derived_is_all_that_stays(
    ours: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ours and cpu_library.why_not() is None:
        here = architecture(), dtype
        anything = blocked.Bounds(1, 1 << 20)
        monkeypatch.setattr(blocked, "FASTER", {here: (anything, anything)})
        monkeypatch.setattr(winograd, "FASTER", {here: winograd.Bounds(16, 16, 1, 1)})
    monkeypatch.setattr(cached_primitives, "FASTER", {})
    model, x = Net().eval().to(dtype), X.to(dtype)
    truth = copy.deepcopy(model).double()(x.double())
    eager = (model(x) - truth).norm()
    fn = compiled(model, blocked_products=ours)
    for _ in range(3):
        # As far from fp64 as eager, and twice that: other sums, rounded elsewhere.
        assert (fn(x) - truth).norm() <= 2 * eager + 1e-6 * truth.norm()
    assert gone(model) >= LARGE
    events = [event for report in decisions.reports() for event in report.events]
    (said,) = [event.reason for event in events if event.subject == "plain weights"]
    assert said.endswith("are freed if nothing else has them")
    assert ipex_inductor.derived_memory() > 0


def test_who_reads_one_is_told() -> None:
    model = Net().eval()
    state = copy.deepcopy(model.state_dict())
    fn = compiled(model)
    want = fn(X)
    reads = (
        lambda: model(X),
        lambda: model.up.weight + 1,
        lambda: model.up.weight.copy_(torch.ones(64, 32)),
        lambda: model.load_state_dict(state),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        lambda: copy.deepcopy(model),
        lambda: model.up.weight.numpy(),
    )
    for read in reads:
        with pytest.raises(RuntimeError, match=NOT_HERE):
            read()
    assert torch.equal(fn(X), want)
    assert model.up.weight.shape == (64, 32)


def test_new_weights_are_derived_from_and_freed() -> None:
    model, other = Net().eval(), Net().eval()
    fn = compiled(model)
    fn(X)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    close(fn(X), other(X))
    assert gone(model) >= LARGE
    model.up.weight.data = torch.ones(64, 32)
    other.up.weight.fill_(1)
    close(fn(X), other(X))


def test_what_something_else_has_stays() -> None:
    model = Net().eval()
    view, want = model.up.weight.detach(), model(X)
    fn = compiled(model)
    for _ in range(2):
        close(fn(X), want)
    assert gone(model).isdisjoint({"up.weight"})
    assert gone(model) >= LARGE - {"up.weight"}
    model.up.weight.mul_(2)
    assert torch.equal(view, model.up.weight)
    assert not torch.equal(fn(X), want)


def test_what_the_graph_reads_as_it_is_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer = nn.Embedding(48, 32), nn.Linear(32, 32)

        def forward(self, numbers: Tensor) -> Tensor:
            return F.linear(self.layer(self.words(numbers)), self.words.weight)

    model, numbers = Tied().eval(), torch.tensor([3, 5])
    want = model(numbers)
    fn = compiled(model)
    close(fn(numbers), want)
    assert "words.weight" not in gone(model)
    assert "layer.weight" in gone(model)


def test_steps_and_refresh_concern_no_freed_weight() -> None:
    model, other = Net().eval(), nn.Linear(4, 4)
    want = model(X)
    fn = compiled(model)
    fn(X)
    other.weight.grad = torch.ones(4, 4)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    close(fn(X), want)
    ipex_inductor.refresh(model)
    ipex_inductor.refresh(None)
    close(fn(X), want)


@pytest.mark.skipif(cpu_library.why_not() is not None, reason=f"{cpu_library.why_not()}")
def test_graphs_that_pack_alike_share_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a weight are the same for all numbers of rows."""
    anything = blocked.Bounds(1, 1 << 20)
    here = architecture(), torch.float32
    monkeypatch.setattr(blocked, "FASTER", {here: (anything, anything)})
    model, inputs = nn.Linear(32, 64).eval(), [torch.randn(rows, 32) for rows in (2, 5)]
    want = [model(x) for x in inputs]
    for _ in range(2):
        fn = compiled(model)
        for x, right in zip(inputs, want, strict=True):
            close(fn(x), right)
        torch.compiler.reset()  # and compiled anew
    assert gone(model) == {"weight"}


def test_another_packing_is_refused() -> None:
    model = nn.Linear(32, 48).eval()
    x = torch.randn(4, 32)
    compiled(model, blocked_products=False)(x)
    assert gone(model) == {"weight"}
    other = nn.Sequential(nn.Linear(32, 48), nn.BatchNorm1d(48)).eval()
    other[0] = model
    other[1].running_var.fill_(2)  # type: ignore[operator,union-attr]
    torch.compiler.reset()
    with pytest.raises(DroppedWeightError, match="load_state_dict"):
        compiled(other)(x)


def test_what_another_graph_derived_otherwise_stays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ipex_inductor")
    model, x = nn.Linear(32, 48).eval(), torch.randn(4, 32)
    want = model(x)
    first = compiled(model, drop_plain_weights=False, blocked_products=False)
    close(first(x), want)
    other = nn.Sequential(model, nn.BatchNorm1d(48)).eval()
    second = compiled(other)
    right = other(x)
    close(second(x), right)
    assert not gone(model)
    assert "another graph derives from them" in caplog.text
    model.weight.mul_(2)
    assert not torch.allclose(second(x), right)
    close(second(x), other(x))
    close(first(x), model(x))


def test_models_that_take_turns_in_one_graph_keep_what_they_need() -> None:
    models = [nn.Linear(16, 16).eval() for _ in range(6)]
    x = torch.randn(2, 16)
    want = [model(x) for model in models]

    options = {"drop_plain_weights": True, "strict": True}
    fn = torch.compile(lambda model, x: model(x), backend="ipex", options=options)
    for _ in range(2):
        for model, right in zip(models, want, strict=True):
            close(fn(model, x), right)
    assert all(map(gone, models))


def test_by_default_all_stays() -> None:
    model = Net().eval()
    compiled(model, drop_plain_weights=False)(X)
    assert not gone(model)


def test_without_a_compiler_all_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise NotBuiltError("no compiler was found")

    monkeypatch.setattr(freed, "_library", absent)
    monkeypatch.setattr(freed, "free", free)
    model = Net().eval()
    want = model(X)
    fn = compiled(model)
    close(fn(X), want)
    assert not gone(model)
