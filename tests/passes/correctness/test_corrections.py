"""What Inductor computes wrongly, and backend `ipex` must not."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

from ipex_inductor import compat
from ipex_inductor.passes.attention import misread
from ipex_inductor.reporting import decisions

POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
# Dimensions, window (the second is larger than what it is over), whether padding counts.
CASES = [
    (2, (3, 2, 1), True),
    (2, (9, None, 0), True),
    (2, (3, 2, 1), False),
    (1, (2, 2, 0), True),
    (3, (2, 2, 0), True),
]


# In one graph, as the compiler takes long for each: half a minute for all.
GRAPHS = {
    "all": (CASES, [5]),
    "over the border": (CASES[3:4], [5]),
    "sizes that vary": (CASES[1:2], [5, 7]),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "sizes that vary")) for n in GRAPHS],
)
def test_gradients_of_average_pooling_at_the_border(name):
    check(*GRAPHS[name])


def test_gradients_of_every_average_pooling(op_by_op):
    check(*GRAPHS["all"])


def check(cases, sizes):
    def pool(*images):
        return [
            POOLS[dims](x, *window, True, counts)
            for x, (dims, window, counts) in zip(images, cases, strict=True)
        ]

    dynamic = len(sizes) > 1
    compiled = torch.compile(pool, backend="ipex", dynamic=dynamic, options={"strict": True})
    for size in sizes:
        images = [torch.randn(2, 3, *[size] * d, dtype=torch.float64) for d, *_ in cases]
        tangents = [torch.randn_like(made) for made in pool(*images)]
        given = [x.requires_grad_() for x in images]
        got, want = (torch.autograd.grad(fn(*given), given, tangents) for fn in (compiled, pool))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # quotients are in fp32
    (fired, *_) = [n for r in decisions.reports() if (n := r.count("fired")["avg_pool_backward"])]
    assert fired == sum(counts for *_, counts in cases)


@pytest.mark.parametrize(
    "training",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["inference", "training"],
)
def test_what_is_kept_from_patterns_compiles_to_the_same_code(training, monkeypatch):
    """The view that hides attention costs nothing: shown where no pattern would match anyway."""

    def fn(q, k, v, mask):
        scores = torch.where(mask > 0, q.permute(2, 0, 1, 3) @ k.mT * 0.3, 0.0)
        return F.softmax(scores, -2) @ v

    given = [torch.randn(4, 4, 4, 4, requires_grad=training) for _ in range(3)]
    codes, hidden = [], []
    for keep_apart in (misread.keep_apart, lambda graph, report: None):
        torch.compiler.reset()
        monkeypatch.setattr(misread, "keep_apart", keep_apart)
        _, code = run_and_get_code(torch.compile(fn, backend="ipex"), *given, torch.ones(4, 4))
        codes.append([line for line in code[0].splitlines() if not line.strip().startswith("#")])
        hidden.append(any(misread.NAME in r.count("fired") for r in decisions.reports()))
    assert hidden == [True, False]
    assert codes[0] == codes[1]


def test_a_mean_of_no_elements_beside_a_variance():
    def fn(x, y):
        return (*torch.var_mean(x), *torch.std_mean(x, (0, 1), keepdim=True), *torch.var_mean(y, 1))

    given = torch.empty(0, 3), torch.randn(4, 5)
    compiled = torch.compile(fn, backend="ipex", options={"strict": True})
    torch.testing.assert_close(compiled(*given), fn(*given), equal_nan=True)
    (report,) = decisions.reports()
    assert report.count("fired")["var_mean"] == 2  # and not where there are elements


def test_a_number_of_elements_that_is_not_known():
    def fn(x):
        return torch.var_mean(x[x > 0])

    compiled = torch.compile(fn, backend="ipex", fullgraph=True, options={"strict": True})
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for given in (torch.randn(20), -torch.ones(20)):
            torch.testing.assert_close(compiled(given), fn(given), equal_nan=True)


@pytest.mark.parametrize(
    ("training", "dtype"),
    [(False, torch.bfloat16), (True, torch.float32)],
    ids=["inference", "training"],
)
def test_fractional_pooling_takes_the_sample_of_its_axis(training, dtype):
    def fn(x):
        return F.fractional_max_pool3d(x, (2, 3, 2), output_size=(4, 3, 5), return_indices=True)

    given = torch.randn(2, 3, 9, 8, 12, dtype=dtype)
    options = {"strict": True, "fallback_random": True}
    results, grads = [], []
    for f in (torch.compile(fn, backend="ipex", options=options), fn):
        torch.manual_seed(1)
        x = given.clone().requires_grad_(training)
        results.append(f(x))
        if training:
            grads.append(torch.autograd.grad(results[-1][0].float().square().sum(), x)[0])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    if training:
        torch.testing.assert_close(*grads, rtol=0, atol=0)
    (report,) = decisions.reports()
    op = torch.ops.aten.fractional_max_pool3d.default
    assert report.count("fired")["fractional_max_pool"] == compat.is_lowered(op)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_windows_of_fractional_pools_are_those_of_torch(dtype):
    """Of forty draws; in bf16, Inductor's own windows differ for most of them."""

    def fn(x, samples):
        return F.fractional_max_pool2d(x, 3, output_size=(7, 8), _random_samples=samples)

    compiled = torch.compile(fn, backend="ipex", options={"strict": True})
    for seed in range(40):
        torch.manual_seed(seed)
        x, samples = torch.randn(2, 3, 20, 20, dtype=dtype), torch.rand(2, 3, 2, dtype=dtype)
        assert torch.equal(compiled(x, samples), fn(x, samples)), seed


@pytest.mark.sampled("dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_factor_of_what_is_subtracted_from_lists(dtype):
    """Of results and of updates in place; without a factor nothing is changed."""

    def fn(xs, ys):
        torch._foreach_sub_(ys, xs, alpha=0.5)
        return torch._foreach_sub(xs, ys, alpha=2), torch._foreach_sub(xs, ys)

    given = [[torch.randn(4, 5).to(dtype) for _ in range(3)] for _ in range(2)]
    copies = [[x.clone() for x in each] for each in given]
    got = torch.compile(fn, backend="ipex", options={"strict": True})(*given)
    want = fn(*copies)
    # Where results cancel, roundings of operands near 1 are left; half the factor is off by 0.5.
    rtol, atol = (0.016, 2.0**-6) if dtype == torch.bfloat16 else (1.3e-6, 1e-6)
    torch.testing.assert_close((got, given), (want, copies), rtol=rtol, atol=atol)
    (report,) = decisions.reports()
    assert report.count("fired")["_foreach_sub"] == 2
