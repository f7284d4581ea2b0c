"""One sum that a graph returns in several shapes, for which Inductor declares a name twice."""

import contextlib

import pytest
import torch
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.compat import reductions
from ipex_inductor.target.device import architecture

pytestmark = pytest.mark.skipif(
    not architecture().startswith("x86-64:"), reason="the loops are vectors of x86-64 there"
)


def sums(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of all rows in three shapes, as gradients of biases are."""
    return x.sum(0), x.sum(0, keepdim=True), x.sum(0).view(-1, 2)


def compiled(backend: str, x: Tensor) -> tuple[Tensor, ...]:
    torch.compiler.reset()
    with compat.graph_caches_off():
        return torch.compile(sums, backend=backend)(x)


@pytest.mark.sampled("10-dtype0", "64-dtype2")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [10, 64])
def test_a_sum_is_stored_in_several_shapes(dtype: torch.dtype, columns: int) -> None:
    x = torch.randn(40, columns).to(dtype)
    # Rounded once from sums in fp32 of 40 terms, in another order.
    close = {"rtol": 2**-7, "atol": 2**-7} if dtype.itemsize == 2 else {}
    for got, expected in zip(compiled("ipex", x), sums(x), strict=True):
        torch.testing.assert_close(got, expected, **close)
        assert got.stride() == expected.stride()
    assert not reductions._in_blocks.get()


def error_of(backend: str, x: Tensor) -> str:
    try:
        compiled(backend, x)
    except Exception as error:
        return str(error)
    return ""


def test_without_blocks_of_their_own_they_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 64).bfloat16()
    if not error_of("inductor", x):
        pytest.skip("this torch stores such sums right by itself")
    monkeypatch.setattr(compat, "stores_in_blocks", contextlib.nullcontext)
    monkeypatch.setenv("IPEX_STRICT", "1")
    assert "conflicting declaration" in error_of("ipex", x)
