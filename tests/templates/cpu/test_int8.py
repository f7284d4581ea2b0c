"""Kernels on 8-bit integers beside the reference of their ops, built for each instruction set."""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ipex_inductor.target.device import as_cpu, current, level
from ipex_inductor.templates.cpu import int8
from support.int8_ops import BF16, F32, S8, U8, Case, Operands, make_operands
from support.int8_tables import (
    CASES,
    EPILOGUES,
    ONE,
    POOLS,
    SAME,
    UNARIES,
    as_images,
    compute_pool,
    random_integers,
)

pytestmark = pytest.mark.skipif(int8.why_not() is not None, reason=f"{int8.why_not()}")
TESTS = Path(__file__).parents[2]
HERE = current("cpu").arch
# Architecture, and instruction sets that Linux lists: None for those of this CPU.
BUILDS = {
    "this CPU": (HERE, None),
    "AVX-512 VNNI": ("x86-64:avx512_bf16", None),
    "AVX-512": ("x86-64:avx512", None),
    "AVX-VNNI": ("x86-64:avx2", frozenset({"avx_vnni"})),
    "AVX2": ("x86-64:avx2", frozenset()),
    "SSE": ("x86-64", None),
}


QUICK = ("this CPU", "AVX2")  # each build takes five seconds and more
PARAMS = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BUILDS]


@pytest.fixture(scope="module", params=PARAMS)
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels built for a CPU, which this one can run, in place of its own."""
    name = request.param
    arch, listed = BUILDS[name]
    if name != "this CPU":
        if level(arch) > level(HERE) or (not HERE.startswith("x86-64")):
            pytest.skip(f"this CPU, {HERE}, has no {name}")
        if listed and not listed <= int8.list_instructions():
            pytest.skip(f"this CPU has no {name}")
    with pytest.MonkeyPatch.context() as patch:
        if name != "this CPU":
            if listed is not None:
                patch.setattr(int8, "list_instructions", lambda: listed)
            with as_cpu(arch):
                settings, library = int8._settings(), int8.library.__wrapped__()
            # AVX-VNNI is chosen where the library is loaded, not for other CPUs of the level.
            assert settings["INT8_VNNI"] == (int8.AVX512_VNNI if name == "AVX-512 VNNI" else 0)
            patch.setattr(int8, "library", lambda: library)
            int8._kernel.cache_clear()
        yield name
    int8._kernel.cache_clear()


def poisoned(like: Tensor, guard: int = 64) -> tuple[Tensor, Tensor]:
    """Return a tensor for a result, full of another value, and the bytes around it."""
    size = like.untyped_storage().nbytes()
    room = torch.full((size + 2 * guard,), 0xA5, dtype=torch.uint8)
    own = room[guard : guard + size].view(like.dtype)
    return own.as_strided(like.shape, like.stride()), room


def check(operands: Operands) -> None:
    """Assert that the kernel's result is that of the op's reference, and lies where it should."""
    case, expected = operands.case, operands.in_kernels_layout(operands.by_reference())
    out, room = poisoned(expected)
    operands.by_kernel(out)
    size = expected.untyped_storage().nbytes()
    assert (room[:64] == 0xA5).all(), case
    assert (room[64 + size :] == 0xA5).all(), case
    if case.dtype in (F32, BF16):
        # The kernel adds an offset to a sum that holds the zero point: fp32 rounds both to 2^-24 of
        # numbers some ten times the result. Activations are within 1e-6 of torch's, and have slopes
        # up to ten. Results of bf16 may be rounded to the neighbor, 2^-7 away at most.
        rtol, atol = {F32: (2e-5, 2e-5), BF16: (2**-7, 2e-5)}[case.dtype]
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol, msg=lambda m: f"{case} {m}")
        return
    exact = operands.by_reference(F32).double()
    steps = exact / operands.result_scale
    differs = out != expected
    # One step, where a step is a tie up to the rounding of fp32: as above, in steps of 0.03.
    assert (out.int() - expected.int()).abs().max() <= 1 if out.numel() else True, case
    ties = (steps - steps.floor() - 0.5).abs()[differs]
    assert (ties < 2e-3).all(), (case, ties)


def test_the_kernels_are_the_references(build: str) -> None:
    """Each shape, type and addend; results lie in memory that held something else."""
    for case in CASES:
        check(make_operands(case))


def test_each_epilogue(build: str) -> None:
    assert {*int8.UNARY} == {"none", *UNARIES}
    for case in EPILOGUES:
        check(make_operands(case))


@pytest.mark.parametrize("x_dtype", [U8, S8])
def test_nothing_saturates(build: str, x_dtype: torch.dtype) -> None:
    """The largest integers: sums are exact, where sums of pairs in 16 bits would saturate."""
    for case in (
        Case((40, 256), (48, 256), (), x_dtype, F32),
        Case((3, 258), (17, 258), (), x_dtype, F32),
        Case((1, 16, 5, 5), (16, 16, 3, 3), SAME, x_dtype, F32),
        Case((1, 16, 5, 5), (16, 1, 3, 3), (*SAME[:3], 16), x_dtype, F32),
        Case((1, 64, 4, 4), (16, 64, 1, 1), ONE, x_dtype, F32),
    ):
        for weight in (-128, 127):
            for value in (255, 0) if x_dtype == U8 else (127, -128):
                operands = make_operands(case)
                operands.x.fill_(value)
                operands.plain.fill_(weight)
                operands.bias.zero_()
                operands.weight_scale.fill_(1 / 64)
                operands.x_scale = 1.0
                operands.x_zero_point.zero_()
                operands.arrange()
                expected = operands.in_kernels_layout(operands.by_reference())
                # Powers of two, and sums below 2^24 as integers: fp32 has each step exactly.
                assert torch.equal(operands.by_kernel(torch.empty_like(expected)), expected)


@pytest.mark.parametrize("dtype", [U8, S8])
def test_max_pools(build: str, dtype: torch.dtype) -> None:
    for shape, words in POOLS:
        x = as_images(random_integers(shape, dtype))
        expected = compute_pool(x, words)
        out, room = poisoned(expected)
        int8.pool(x, *words, out=out)
        assert torch.equal(out, expected)
        assert (room[:64] == 0xA5).all()
        assert (room[64 + out.numel() :] == 0xA5).all()


MATRICES = ((1, 1, 1, 1), (3, 5, 30, 7), (2, 33, 64, 40), (2, 100, 66, 17), (1, 200, 128, 64))


@pytest.mark.parametrize("dtype", [U8, S8, F32, BF16])
def test_products_of_two_activations(build: str, dtype: torch.dtype) -> None:
    """Each pair of types, the largest integers among them."""
    bounds = {U8: (0, 255), S8: (-128, 127)}.get(dtype, (0, 0))
    number = torch.tensor
    for (batch, rows, depth, columns), a_dtype, b_dtype in itertools.product(
        MATRICES, (U8, S8), (U8, S8)
    ):
        a = random_integers((batch, rows, depth), a_dtype)
        b = random_integers((batch, depth, columns), b_dtype)
        words = number(0.02), number(7), number(0.02), number(-3), number(0.05), number(20)
        scales = torch.ops.ipex.int8_bmm_scales(*words, *bounds)
        factor = 1 / (4 * depth**0.5)
        expected = torch.ops.ipex.int8_bmm(a, b, scales, factor, dtype)
        out, room = poisoned(expected)
        int8.multiply(a, b, scales, factor, out=out)
        # One step at ties; one rounding of bf16 to a neighbor; fp32 as in `check`.
        rtol, atol = {F32: (2e-5, 2e-5), BF16: (2**-7, 2e-5)}.get(dtype, (0, 1))
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
        assert (out != expected).float().mean() < 0.01 or dtype == F32
        assert (room[:64] == 0xA5).all()
        assert (room[64 + out.nbytes :] == 0xA5).all()


def test_random_problems(build: str) -> None:
    """Convolutions and linear layers drawn by number: sizes, windows, groups, types, epilogues."""
    for seed in range(150):
        check(make_operands(draw_case(random.Random(seed)), seed))


def draw_case(rng: random.Random) -> Case:
    """Return a small problem; the window fits into the padded activation."""
    unary = rng.choice(["none", "none", "relu", "silu", "gelu", "hardswish", "tanh", "sigmoid"])
    x_dtype, dtype = rng.choice([U8, S8]), rng.choice([U8, S8, F32, BF16])
    other = rng.choice([None, None, U8, S8, F32, BF16])
    binary = "none" if other is None else rng.choice(["add", "add", "add", "mul", "sub"])
    words = x_dtype, dtype, other, binary, unary
    if rng.random() < 0.3:
        depth, outs = rng.choice([1, 3, 16, 50, 64, 130]), rng.randrange(1, 80)
        return Case((rng.randrange(1, 40), depth), (outs, depth), (), *words)
    dims = rng.choice([2, 2, 2, 3])
    groups = rng.choice([1, 1, 1, 2, 4])
    channels = rng.choice([1, 1, 3, 8, 16, 20])
    outs = rng.choice([1, 2, 5, 17])
    window, stride, padding, dilation = (
        tuple(rng.choice(options) for _ in range(dims))
        for options in ([1, 1, 2, 3], [1, 1, 2, 3], [0, 0, 1, 2], [1, 1, 2])
    )
    least = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, window, padding, strict=True)]
    size = [max(n, 1) + rng.randrange(8 - dims) for n in least]
    x = (rng.choice([1, 1, 2]), channels * groups, *size)
    weight = (outs * groups, channels, *window)
    return Case(x, weight, (stride, padding, dilation, groups), *words)


def test_a_depthwise_sum_of_many_taps_is_exact(build: str) -> None:
    """31 x 31 pixels of the largest integers: more than fp32 has exactly."""
    case = Case((1, 8, 31, 31), (8, 1, 31, 31), ((1, 1), (0, 0), (1, 1), 8), U8, F32)
    operands = make_operands(case)
    operands.x.fill_(255)
    operands.x[..., ::5] -= 2
    operands.plain.fill_(-127)
    operands.x_zero_point.zero_()
    operands.arrange()
    expected = operands.by_reference()
    out = operands.by_kernel(torch.empty_like(expected))
    # One rounding of the sum to fp32, one of its product.
    torch.testing.assert_close(out, expected, rtol=2**-22, atol=0)


def test_several_threads_give_the_bits_of_one(build: str) -> None:
    threads = torch.get_num_threads()
    for case in (
        Case((5, 256), (700, 256), (), U8, F32),
        Case((200, 96), (130, 96), (), S8, BF16, unary="gelu"),
        Case((2, 32, 15, 15), (70, 32, 3, 3), SAME, U8, U8, U8, "add", "relu"),
        Case((1, 32, 9, 7), (64, 4, 3, 3), (*SAME[:3], 8), U8, F32),
        Case((1, 48, 15, 15), (48, 1, 3, 3), (*SAME[:3], 48), S8, F32),
    ):
        operands = make_operands(case)
        like = operands.in_kernels_layout(operands.by_reference())
        results = []
        try:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                results.append(operands.by_kernel(torch.zeros_like(like)))
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(result, results[0]) for result in results), case


def test_no_byte_beside_a_tensor_is_touched() -> None:
    """Tensors lie beside pages without access, in a process that would die of one byte too many."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "support.int8_pages"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * (len(CASES) + len(POOLS))


@pytest.mark.skipif(int8.why_not() is not None, reason=f"{int8.why_not()}")
@pytest.mark.parametrize("depth", [32767, 32768, 70000])
@pytest.mark.parametrize(
    ("a", "b"), [((torch.uint8, 255), (torch.int8, 127)), ((torch.int8, -128), (torch.uint8, 255))]
)
def test_sums_of_the_largest_products_do_not_overflow(depth, a, b) -> None:
    """From 32,768 products on, they and what zero points add need more than 32 bits."""
    left, right = (
        torch.full(shape, number, dtype=dtype)
        for shape, (dtype, number) in (((2, 3, depth), a), ((2, depth, 5), b))
    )
    numbers = (torch.tensor(n) for n in (0.01, 3, 0.02, -4))
    scales = torch.ops.ipex.int8_bmm_scales(*numbers, None, None, 0, 0)
    result = torch.empty(2, 3, 5)
    int8.multiply(left, right, scales, 0.5, out=result)
    truth = torch.ops.ipex.int8_bmm(left, right, scales, 0.5, torch.float32)
    # Scales and results are rounded to 24 bits.
    torch.testing.assert_close(result, truth, rtol=1e-6, atol=0)


@pytest.mark.skipif(int8.why_not() is not None, reason=f"{int8.why_not()}")
@pytest.mark.parametrize("x_dtype", [U8, S8])
@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 24, 9, 7), (33, 24, 3, 3), ((2, 1), (0, 2), (1, 2), 1)),
        ((1, 64, 8, 8), (48, 64, 1, 1), ((1, 1), (0, 0), (1, 1), 1)),
        ((1, 32, 9, 7), (64, 4, 3, 3), ((1, 1), (1, 1), (1, 1), 8)),
        ((1, 33, 9, 7), (66, 1, 5, 5), ((2, 2), (2, 2), (1, 1), 33)),
        ((3, 50), (70, 50), ()),
        ((40, 64), (17, 64), ()),
    ],
)
def test_weights_may_have_zero_points(shapes, x_dtype) -> None:
    """Of a net that others quantized: the sums of rows of x are multiplied by them."""
    case = Case(*shapes, x_dtype=x_dtype, dtype=F32, unary="relu", weight_zeros=100)
    operands = make_operands(case)
    zeros = operands.weight_zero_point.view(-1, *[1] * (operands.plain.dim() - 1))
    x = (operands.x.double() - operands.x_zero_point) * operands.x_scale
    scale = operands.weight_scale.double().view(zeros.shape)
    weight = (operands.plain.double() - zeros) * scale
    if case.window:
        stride, padding, dilation, groups = case.window
        bias = operands.bias.double()
        truth = torch.conv2d(x, weight, bias, stride, padding, dilation, groups).relu()
    else:
        truth = torch.nn.functional.linear(x, weight, operands.bias.double()).relu()
    reference = operands.by_reference()
    result = operands.by_kernel(operands.in_kernels_layout(torch.full_like(reference, torch.nan)))
    # Sums are exact; offsets of some hundred times a result are rounded to 24 bits.
    limit = 3e-5 * truth.abs().max()
    assert (reference - truth).abs().max() < limit
    assert (result - truth).abs().max() < limit


CONV = ((2, 16, 5, 7), (24, 16, 3, 3), ((1, 1), (1, 1), (1, 1), 1))
DEPTHWISE = ((2, 24, 5, 7), (24, 1, 3, 3), ((1, 1), (1, 1), (1, 1), 24))
NANS = {
    "addend of a convolution": Case(*CONV, other=F32, binary="add", unary="relu"),
    "addend in bf16": Case(*CONV, other=BF16, binary="add", dtype=S8),
    "addend of a depthwise one": Case(*DEPTHWISE, other=F32, binary="add", unary="relu"),
    "addend of a linear layer": Case((5, 40), (24, 40), other=F32, binary="add"),
    "factor": Case((5, 40), (24, 40), other=F32, binary="mul", unary="relu", dtype=S8),
    "weight": Case(*CONV, unary="relu"),
    "weight of a depthwise one": Case(*DEPTHWISE, dtype=S8),
    "row": Case((5, 40), (24, 40), x_dtype=S8, by_row=True, unary="relu"),
    "row of floats": Case((5, 40), (24, 40), x_dtype=S8, by_row=True, unary="relu", dtype=F32),
    "root": Case((5, 40), (24, 40), unary="sqrt"),
    "infinite scale": Case(*CONV, unary="relu"),
    "infinite scale of a depthwise one": Case(*DEPTHWISE, dtype=S8),
    "infinite scale of a linear layer": Case((5, 40), (24, 40)),
}


@pytest.mark.parametrize("name", NANS)
def test_what_is_no_number_is_quantized_as_in_eager(name: str) -> None:
    """To the integer 0, whatever the zero point is; floats stay NaN."""
    case = NANS[name]
    operands = make_operands(case)
    if case.other is not None:
        operands.other[:, ::3] = torch.nan
    if name.startswith("weight"):
        operands.weight_scale[::3] = torch.nan
        operands.arrange()
    if name.startswith("infinite"):  # times sums of 0
        operands.x_zero_point.zero_()
        operands.x.zero_()
        operands.weight_scale[::3] = torch.inf
        operands.arrange()
        operands.factors[1] = operands.bias
    if case.by_row:
        operands.row_scales[::2] = torch.nan
    reference = operands.in_kernels_layout(operands.by_reference())
    floats = operands.by_reference(F32)
    result = operands.by_kernel(torch.full_like(reference, 77))
    assert 0.1 < floats.isnan().float().mean() < 0.9
    if case.dtype == F32:
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5, equal_nan=True)
        return
    assert not result[floats.isnan()].any()
    assert (result.int() - reference.int()).abs().max() <= 1  # ties
