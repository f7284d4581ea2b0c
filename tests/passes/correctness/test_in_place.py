"""Updates in place whose source is their target elsewhere: Inductor alone gets them wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ipex_inductor.passes.correctness import in_place
from ipex_inductor.reporting import decisions

ROWS = 40  # more than a vector holds; every other row alone would be right


def shift(x: Tensor) -> Tensor:
    """Down by one row."""
    x[1:] = x[:-1].clone()
    return x.sum()


def shift_columns(x: Tensor) -> Tensor:
    """To the right, and added to what is there."""
    x[:, 1:] = x[:, :-1] + x[:, 1:]
    return x.sum()


def add_own_flip(x: Tensor) -> Tensor:
    """As a list, which Inductor lowers by itself."""
    torch._foreach_add_([x], [x.flip(0)])
    return x.sum()


def put_and_flip(x: Tensor) -> Tensor:
    """Two updates, of which the latter reads the former in another order."""
    x.index_put_((torch.tensor([0, 2]),), x[5:7] * 2)
    x.add_(x.flip(0))
    return x.sum()


def scatter_and_zero(x: Tensor) -> Tensor:
    """A result that outlives its operand."""
    result = torch.slice_scatter(x, x[:8].sin().abs() + 1, 0, 1, 9)
    x.zero_()
    return result


def select_and_zero(x: Tensor) -> Tensor:
    """The same of one row."""
    result = torch.select_scatter(x, torch.ones_like(x[0]), 0, 1)
    x.fill_(3)
    return result


def roll(x: Tensor) -> Tensor:
    """Into itself."""
    x.copy_(x.roll(1, 0))
    return x * 2


def flip(x: Tensor) -> Tensor:
    """Into itself."""
    x.copy_(x.flip(0))
    return x * 2


def add_transpose(x: Tensor) -> Tensor:
    """Of a square part."""
    square = x[:8, :8]
    square.add_(square.t().clone())
    return square.sum()


def pairs(x: Tensor) -> Tensor:
    """Every other row."""
    x[::2] += x[1::2]
    return x.sum()


def ring(x: Tensor) -> Tensor:
    """A buffer of the last rows."""
    x[:-1] = x[1:].clone()
    x[-1] = 7
    return x.mean(0)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    each.__name__: each
    for each in (shift, shift_columns, add_own_flip, put_and_flip, scatter_and_zero)
} | {each.__name__: each for each in (select_and_zero, roll, flip, add_transpose, pairs, ring)}


def every(*given: Tensor) -> list[Tensor]:
    """All in one graph, each on a tensor of its own, as the compiler takes long for each."""
    copies = [fn(x) for fn, x in zip(CASES.values(), given[:-2], strict=True)]
    target, source = given[-2:]
    target.copy_(source)
    source.mul_(2)
    return [*copies, target + 1]


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_order_is_eagers(dtype):
    given = [torch.randn(ROWS, 8).to(dtype) for _ in range(len(CASES) + 2)]
    copies = [x.clone() for x in given]
    got = torch.compile(every, backend="ipex", options={"strict": True})(*given)
    want = every(*copies)
    # Sums of 320 numbers in another order; in bf16 one rounding of them.
    close = 1e-4 if dtype == torch.float32 else 2**-6
    names = [*CASES, "copied", "source"]
    for name, one, two in zip([*names[:-1], *names], [*got, *given], [*want, *copies], strict=True):
        torch.testing.assert_close(one, two, rtol=close, atol=close, msg=lambda m, n=name: n + m)
    assert any(in_place.NAME in report.count("fired") for report in decisions.reports())


class Shift(nn.Module):
    """A register of a module's, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.randn(ROWS, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen[1:] = self.seen[:-1].clone()
            self.seen[0] = x.mean(0)
        return self.linear(x) + self.seen.sum(0)


def test_a_buffer_in_training():
    model, twin = Shift(), Shift()
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="ipex", options={"strict": True})
    for _ in range(2):
        x = torch.randn(4, 8)
        for fn in (compiled, twin):
            fn(x).square().mean().backward()
    torch.testing.assert_close(model.seen, twin.seen)
    torch.testing.assert_close(model.linear.weight.grad, twin.linear.weight.grad)


@torch.no_grad()
def test_a_cache_is_still_written_in_place():
    """What reads nothing of its operand costs no copy."""

    def decode(cache: Tensor, at: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        cache.index_put_((at,), x @ weight)
        return cache @ x.t()

    given = torch.randn(ROWS, 8), torch.tensor([3]), torch.randn(1, 8), torch.randn(8, 8)
    copies = [each.clone() for each in given]
    got = torch.compile(decode, backend="ipex", options={"strict": True})(*given)
    torch.testing.assert_close(got, decode(*copies), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(given[0], copies[0], rtol=1e-5, atol=1e-5)
    assert not any(in_place.NAME in report.count("fired") for report in decisions.reports())
