"""Short attention by our kernel on a CPU: what it computes, where it is chosen, and where not."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ipex_inductor
from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.passes.attention import short_attention as choice
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import current, level
from ipex_inductor.templates.build import cpp
from ipex_inductor.templates.cpu import attention_call, cpu_library, short_attention

needs_library = pytest.mark.skipif(
    short_attention.why_not() is not None, reason=f"{short_attention.why_not()}"
)
DTYPES = (torch.bfloat16, torch.float32)
QUERIES = {
    dtype: choice.FASTER[current("cpu").arch, dtype][0]
    for dtype in DTYPES
    if (current("cpu").arch, dtype) in choice.FASTER and short_attention.why_not() is None
}
CHOSEN = [dtype for dtype, most in QUERIES.items() if most == math.inf]
needs_choice = pytest.mark.skipif(not CHOSEN, reason="torch's attention is kept on this CPU")
# Of bf16 the shares and the result are rounded, 2^-9 / sqrt(3) each in the mean; in fp32 the sums,
# and an exponential of 20 units in the last place, torch's own.
LIMIT = {torch.bfloat16: 3e-3, torch.float32: 2e-6}
# Batch, heads, queries, keys, width: one query; few; odd keys; rows beyond a part; many parts; a
# part of its own, whose values are not packed.
SIZES = ((1, 12, 1, 129, 64), (2, 3, 4, 7, 32), (2, 2, 33, 71, 16), (1, 2, 197, 197, 64))
SIZES += ((1, 1, 64, 1, 128), (2, 1, 3, 40, 80), (1, 2, 16, 300, 48))


def made(dtype: torch.dtype, sizes: tuple[int, ...]) -> list[Tensor]:
    """q, k, v, as a projection gives them: [B, S, H, D] transposed."""
    torch.manual_seed(0)
    batch, heads, queries, keys, width = sizes
    shapes = [(batch, n, heads, width) for n in (queries, keys, keys)]
    return [torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes]


def masks(dtype: torch.dtype, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
    """None; a number a score; keys that nobody sees (in one batch none is seen); one a row."""
    batch, _, queries, keys, _ = sizes
    padding = torch.zeros(batch, 1, 1, keys)
    padding[..., keys // 2 + 1 :] = -torch.inf
    padding[0] = padding[0] if batch == 1 else -torch.inf
    bias, rows = torch.randn(1, 1, queries, keys), torch.randn(batch, 1, queries, 1)
    named = {"none": None, "bias": bias, "padding": padding, "rows": rows}
    return {name: mask if mask is None else mask.to(dtype) for name, mask in named.items()}


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """In fp64; zeros where every key is masked, as torch's kernel has it."""
    wide = mask if mask is None else mask.double()
    result = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), wide, is_causal=causal
    )
    return result.nan_to_num(0)


def relative(result: Tensor, truth: Tensor) -> float:
    """Distance of `result` from `truth`, as a share of its size."""
    return float((result.double() - truth).norm() / truth.norm().clamp(min=1e-30))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_kernel_and_reference_compute_attention(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Every mask, causal, and tensors that lie otherwise; NaNs where nothing was written."""
    q, k, v = made(dtype, sizes)
    batch, heads, queries, _, width = sizes
    words = [(mask, False) for mask in masks(dtype, sizes).values()] + [(None, True)]
    odd = F.pad(k, (0, 1))[..., :width]  # rows begin at odd places
    for (mask, causal), keys in itertools.product(words, (k, k.contiguous(), odd)):
        out = torch.full((batch, queries, heads, width), torch.nan, dtype=dtype).transpose(1, 2)
        rest = [*([] if mask is None else [mask]), causal, width**-0.5]
        short_attention.call(q, keys, v, *rest, out=out)
        plain = torch.ops.ipex.short_attention(q, keys, v, mask, causal, width**-0.5)
        truth = exact(q, k, v, mask, causal)
        assert relative(out, truth) < LIMIT[dtype], causal
        assert relative(plain, truth) < LIMIT[dtype], causal


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 40])
def test_no_number_is_hidden(dtype: torch.dtype, queries: int) -> None:
    """A NaN or an infinite score spoils its row alone, as in torch."""
    q, k, v = made(dtype, (1, 2, queries, 50, 32))
    q[0, 1, 0, 3] = torch.nan
    out = torch.empty_like(q)
    short_attention.call(q, k, v, False, 32**-0.5, out=out)
    assert out[0, 1, 0].isnan().all()
    assert int(out.isnan().any(-1).sum()) == 1


class Attention(nn.Module):
    """One layer's, with its projection."""

    def __init__(self, width: int = 64, **how: object) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, width], in heads of 16 (or `heads`)."""
        how = dict(self.how)
        heads = int(how.pop("heads", 4))  # type: ignore[call-overload]
        parts = self.project(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts, **how).transpose(1, 2).flatten(2)  # type: ignore[arg-type]


def chosen(model: nn.Module, x: Tensor, **options: object) -> tuple[int, Tensor]:
    """How many attentions were given to our kernel, and the result."""
    torch.compiler.reset()
    decisions.clear()
    result = torch.compile(model, backend="ipex", options={"strict": True, **options})(x)
    events = [e for report in decisions.reports() for e in report.events]
    told = [e.reason for e in events if e.subject == "attention over few keys"]
    return sum(int(reason.split()[0]) for reason in told), result


@pytest.mark.sampled("{'is_causal': True}-dtype0")
@torch.no_grad()
@pytest.mark.parametrize("dtype", CHOSEN)
@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"scale": 0.5}], ids=str)
def test_it_is_chosen(dtype: torch.dtype, how: dict[str, object]) -> None:
    model, x = Attention(**how).to(dtype).eval(), torch.randn(2, 40, 64).to(dtype)
    count, result = chosen(model, x)
    assert count == 1
    # Behind a projection, which is rounded too, and attention averages what that has.
    assert relative(result, model.double()(x.double())) < 3 * LIMIT[dtype]


@pytest.mark.usefixtures("op_by_op")
@torch.no_grad()
@pytest.mark.parametrize("dtype", [dtype for dtype, most in QUERIES.items() if most < math.inf])
def test_of_few_queries_alone(dtype: torch.dtype) -> None:
    """Where torch's kernel is faster for more."""
    keys = torch.randn(1, 2, 40, 32).to(dtype)
    for count in (1, int(QUERIES[dtype]), int(QUERIES[dtype]) + 1):
        q = torch.randn(1, 2, count, 32).to(dtype)

        def attend(q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, keys, keys)

        taken, result = chosen(attend, q)  # type: ignore[arg-type]
        assert taken == (count <= QUERIES[dtype])
        exact = F.scaled_dot_product_attention(q.double(), keys.double(), keys.double())
        assert relative(result, exact) < 3 * LIMIT[dtype]


@pytest.mark.sampled("(2, 0, 1, 3)")
@needs_choice
@torch.no_grad()
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_the_result_lies_as_torchs(order: tuple[int, ...]) -> None:
    """As q, whatever that is: callers and what was traced (`as_strided`) count on it."""
    sizes = (2, 4, 20, 32)
    inverse = [order.index(n) for n in range(4)]
    x = torch.randn([sizes[n] for n in order]).permute(inverse)
    for strides in (None, (1, 32, 640, 2560)):

        def attend(q: Tensor, strides: tuple[int, ...] | None = strides) -> Tensor:
            result = F.scaled_dot_product_attention(q, q, q)
            return result if strides is None else result.as_strided(sizes[::-1], strides) + 1

        count, result = chosen(attend, x)  # type: ignore[arg-type]
        expected = attend(x)
        assert count == 1
        assert result.stride() == expected.stride()
        # Two results of fp32 are compared.
        assert relative(result, expected.double()) < 2 * LIMIT[torch.float32]


@needs_choice
@pytest.mark.usefixtures("op_by_op")
@torch.no_grad()
def test_what_it_cannot_do_or_was_not_asked_for_is_left_to_torch() -> None:
    """Many keys; wide heads; a width of no whole vectors; switched off; a dtype without a row."""
    dtype = CHOSEN[0]
    _, limit, widest = choice.FASTER[current("cpu").arch, dtype]
    near: tuple[tuple[Attention, int, dict[str, object]], ...] = (
        (Attention(), limit + 1, {}),
        (Attention(widest + 16, heads=1), 40, {}),
        (Attention(heads=8), 40, {}),
        (Attention(), 40, {"blocked_products": False}),
    )
    cases = [(dtype, *case) for case in near]
    cases += [(other, Attention(), 40, {}) for other in DTYPES if other not in CHOSEN]
    for dtype, model, keys, options in cases:
        x = torch.randn(1, keys, model.project.in_features).to(dtype)
        count, result = chosen(model.to(dtype).eval(), x, **options)
        assert count == 0
        assert relative(result, model.double()(x.double())) < 3 * LIMIT[dtype]


@needs_choice
@pytest.mark.usefixtures("op_by_op")
def test_training_keeps_torchs_attention_and_its_gradient() -> None:
    model, x = Attention(), torch.randn(2, 40, 64)
    count, result = chosen(model, x)
    assert count == 0
    result.sum().backward()
    assert model.project.weight.grad is not None


@needs_choice
@torch.no_grad()
def test_a_cached_graph_is_right_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that was filled elsewhere: torch's ops then."""
    model, x = Attention().eval(), torch.randn(2, 40, 64)
    torch.compiler.reset()
    run = torch.compile(model, backend="ipex", options={"strict": True})
    expected = run(x)
    monkeypatch.setattr(short_attention, "why_not", lambda: "for this test")
    assert relative(run(x), expected.double()) < 3 * LIMIT[torch.float32]


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_that_torchs_micro_kernel_does_not_take(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is raised out of OpenMP's threads: our own loops do them."""
    refusing = """
    template <typename T>
    void refusing(int64_t m, int64_t n, int64_t k, int64_t a, int64_t b, int64_t c, bool add,
                  const T* x, const T* y, float* z, bool paired) {
      if (m > 1) throw m;
      at::native::cpublas::brgemm(m, n, k, a, b, c, add, x, y, z, paired);
    }
    """
    end = "}  // namespace at::native::cpublas\n"
    text = cpu_library.source().replace("at::native::cpublas::brgemm(", "refusing(")
    text = text.replace(end, end + refusing)
    built = cpp.load(lambda: text, pairs({"template": "refusing"}), with_torch=True)
    monkeypatch.setattr(attention_call, "library", lambda: built)
    monkeypatch.setattr(attention_call, "_kernel", attention_call._kernel.__wrapped__)
    q, k, v = torch.randn(3, 2, 4, 70, 64).to(dtype)
    out = torch.full_like(q, torch.nan)
    short_attention.call(q, k, v, True, 0.125, out=out)
    truth = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), is_causal=True)
    # Shares are kept in fp32 here; the result is rounded once.
    assert relative(out, truth) < LIMIT[dtype]


CHILD = """
import sys
sys.path.insert(0, {tests!r})
import torch
from passes.attention import test_short_attention as test
from passes.weights import test_blocked
from ipex_inductor.templates.cpu import short_attention
assert short_attention.why_not() is None, short_attention.why_not()
for dtype in test.DTYPES:
    for sizes in test.SIZES[:4]:
        test.test_kernel_and_reference_compute_attention(dtype, sizes)
    for sizes in ((3, 2, 17), (16, 70, 130), (65, 66, 63)):
        for panel in test_blocked.PANELS:
            test_blocked.test_every_word_is_computed(dtype, sizes, panel)
print("told", torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.slow
@pytest.mark.skipif("x86" not in current("cpu").arch, reason="limits of x86")
@pytest.mark.parametrize(
    ("capability", "isa"), [("default", "SSE41"), ("avx2", "AVX2"), ("avx512", "AVX512_CORE")]
)
def test_lesser_cpus_compute_the_same(capability: str, isa: str) -> None:
    """The kernels themselves, without torch's micro-kernel, as CPUs of less have them."""
    if level(f"x86-64:{capability}") > level(current("cpu").arch):
        pytest.skip("of a CPU that has more")
    tests = str(Path(__file__).parents[2])
    root = os.path.dirname(os.path.dirname(ipex_inductor.__file__))
    limits = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": isa}
    env = {**os.environ, **limits, "PYTHONPATH": os.pathsep.join([root, tests])}
    command = [sys.executable, "-c", CHILD.format(tests=tests)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1].lower() == capability
