"""Kernels of linear layers on quantized weights beside their values in fp64, for each ISA."""

from collections.abc import Iterator

import pytest
import torch

from ipex_inductor.ops.quant.weight_only import Scheme
from ipex_inductor.target.device import as_cpu, current, level
from ipex_inductor.templates.cpu import weight_only
from support.weight_only_ops import (
    BF16,
    F16,
    F32,
    SCHEMES,
    Operands,
    assert_right,
    compute_values,
    make_operands,
)

pytestmark = pytest.mark.skipif(
    weight_only.why_not() is not None, reason=f"{weight_only.why_not()}"
)
HERE = current("cpu").arch
# Architecture, and instruction sets that Linux lists: None for those of this CPU.
BUILDS = {
    "this CPU": (HERE, None),
    "AVX-512 bf16": ("x86-64:avx512_bf16", None),
    "AVX-512 VNNI": ("x86-64:avx512", frozenset({"avx512_vnni"})),
    "AVX-512": ("x86-64:avx512", frozenset()),
    "AVX-VNNI": ("x86-64:avx2", frozenset({"avx_vnni"})),
    "AVX2": ("x86-64:avx2", frozenset()),
    "SSE": ("x86-64", None),
}
QUICK = ("this CPU", "AVX2")  # each build takes five seconds and more
PARAMS = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BUILDS]
ROWS = (1, 2, 3, 4, 5, 16, 17, 64)
GROUPS = (8, 32, 64, 100, 128, 192, 1000)


@pytest.fixture(scope="module", params=PARAMS)
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels built for a CPU, which this one can run, in place of its own."""
    name = request.param
    arch, listed = BUILDS[name]
    if name != "this CPU":
        if not HERE.startswith("x86-64") or level(arch) > level(HERE):
            pytest.skip(f"this CPU, {HERE}, has no {name}")
        if listed and not listed <= weight_only.list_instructions():
            pytest.skip(f"this CPU has no {name}")
    with pytest.MonkeyPatch.context() as patch:
        if name != "this CPU":
            if listed is not None:
                patch.setattr(weight_only, "list_instructions", lambda: listed)
            with as_cpu(arch):
                assert len(weight_only._variants()) == (2 if listed else 1)
                library = weight_only.library.__wrapped__()
            patch.setattr(weight_only, "library", lambda: library)
            weight_only._kernel.cache_clear()
        yield name
    weight_only._kernel.cache_clear()


def check(o: Operands) -> None:
    """Assert that the kernel's result is right, and that nothing around it is written."""
    expected = o.x.new_empty(*o.x.shape[:-1], o.weight.shape[0])
    size, guard = expected.untyped_storage().nbytes(), 64
    room = torch.full((size + 2 * guard,), 0xA5, dtype=torch.uint8)
    out = room[guard : guard + size].view(o.x.dtype).view(expected.shape)
    tensors = o.x, o.weight, o.scales, o.zeros, o.order, o.bias
    weight_only.run(*tensors, o.scheme, out)
    assert (room[:guard] == 0xA5).all()
    assert (room[guard + size :] == 0xA5).all()
    assert_right(out, o)


@pytest.mark.parametrize(("name", "compute"), SCHEMES)
def test_each_group_and_number_of_rows(build: str, name: str, compute: str) -> None:
    """K ends within a group, a block and a byte; each of zero points, order and bias occurs."""
    torch.manual_seed(0)
    for group in GROUPS:
        for depth in (1, 7, 130, 576):
            for number, rows in enumerate(ROWS):
                bits = number + depth + group
                words = {"zeros": bits % 2 == 1, "order": bits % 3 == 1, "bias": bits % 4 > 1}
                check(make_operands(rows, depth, 13, Scheme(name, group, compute), **words))


@pytest.mark.parametrize(("name", "compute"), SCHEMES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_each_dtype(build: str, name: str, compute: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for scale_dtype in (F32, BF16, F16):
        for rows in (1, 4, 70):
            words = {"dtype": dtype, "scale_dtype": scale_dtype, "zeros": True, "bias": True}
            o = make_operands(rows, 256, 131, Scheme(name, 64, compute), **words)
            o.bias = None if o.bias is None else o.bias.to(scale_dtype)
            check(o)


@pytest.mark.parametrize(("name", "compute"), SCHEMES)
def test_no_rows_columns_or_depth(build: str, name: str, compute: str) -> None:
    for rows, depth, columns in ((0, 64, 8), (3, 64, 0), (3, 0, 8)):
        check(make_operands(rows, depth, columns, Scheme(name, 32, compute), bias=True))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_nothing_saturates(build: str, name: str) -> None:
    """The largest integers of both signs: sums of pairs in 16 bits would saturate."""
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        for sign in (-1.0, 1.0):
            o = make_operands(2, 512, 5, Scheme(name, 512, "int8"))
            o.x.fill_(sign)
            o.weight.view(torch.uint8).fill_(byte)
            check(o)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("name", "compute"), SCHEMES)
def test_one_row_that_is_not_finite(build: str, name: str, compute: str, value: float) -> None:
    """Other rows keep their values, and no finite number hides the element."""
    o = make_operands(6, 192, 9, Scheme(name, 64, compute), zeros=True)
    if name in ("int4", "nf4"):
        o.weight.fill_(0x11)  # no zeros, which infinity turns into NaN
    if o.zeros is not None:
        o.zeros.fill_(5)
    o.x[3, 70] = value
    tensors = o.x, o.weight, o.scales, o.zeros, o.order, o.bias
    out = torch.empty(6, 9)
    weight_only.run(*tensors, o.scheme, out)
    assert not out[3].isfinite().any()
    keep = [0, 1, 2, 4, 5]
    o.x, out = o.x[keep], out[keep]
    assert_right(out, o)


def test_nan_of_an_fp8_weight(build: str) -> None:
    o = make_operands(2, 100, 5, Scheme("fp8", 100, "float32"))
    o.weight.view(torch.uint8)[3, 99] = 0xFF
    out = torch.empty(2, 5)
    weight_only.run(o.x, o.weight, o.scales, None, None, None, o.scheme, out)
    assert out.isnan().sum(0).tolist() == [0, 0, 0, 2, 0]


def test_an_order_outside_of_x_gives_nan(build: str) -> None:
    for bad in (-1, 64):
        o = make_operands(1, 64, 5, Scheme("int4", 64, "int8"), order=True)
        o.order[5] = bad
        out = torch.empty(1, 5)
        weight_only.run(o.x, o.weight, o.scales, None, o.order, None, o.scheme, out)
        assert out.isnan().all()


def test_results_do_not_depend_on_other_rows(build: str) -> None:
    """With few rows each is computed in the same way alone: batches change no bit."""
    for name, compute in SCHEMES:
        o = make_operands(4, 256, 21, Scheme(name, 64, compute))
        together = weight_only.compute(*o.arguments)
        rows = [weight_only.compute(row[None], *o.arguments[1:]) for row in o.x.unbind()]
        assert torch.equal(together, torch.cat(rows))


def test_the_check_sees_one_wrong_element() -> None:
    """A nibble that differs by one is more than the bound allows, in each compute dtype."""
    torch.manual_seed(2)
    for compute in ("float32", "bfloat16", "int8"):
        o = make_operands(1, 576, 13, Scheme("int4", 64, compute))
        o.x.abs_().add_(0.5)
        (value, _), *_ = compute_values(o)
        o.weight[4, 100] ^= 1
        with pytest.raises(AssertionError):
            assert_right(value.float(), o)
