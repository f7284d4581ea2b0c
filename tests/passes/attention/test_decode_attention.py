"""Attention of few queries over a cache: what the kernel computes, where the rule fires and not."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.attention.decode_attention import (
    DTYPES,
    QUERIES,
    gather_rows,
    why_not_supported,
)
from ipex_inductor.passes.attention import decode_attention as rule
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import current
from ipex_inductor.templates.cpu import decode_attention

HERE = current("cpu").arch
WHY_NOT = decode_attention.why_not() or why_not_supported(HERE, torch.float32, 64)
needs_kernel = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))
# Shares stay in fp32, and the result is rounded once: at most 2^-9 in bf16 and 2^-12 in fp16 of
# each element. In fp32 exponentials are within two units of the last place, and sums have another
# order.
LIMIT = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 2e-6}
# Batch, heads, queries, keys, width: few keys; one; odd ones; several lots; one query; many.
SIZES = ((1, 2, 2, 256, 64), (2, 1, 1, 1, 16), (3, 2, 5, 513, 80), (1, 1, 16, 700, 128))
SIZES += ((2, 3, 1, 1100, 32), (1, 2, 64, 130, 16))


def make_tensors(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return a query as a projection gives it, and keys and values as a cache has them."""
    batch, heads, queries, keys, width = sizes
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, queries, heads, width, generator=generator).to(dtype).transpose(1, 2)
    k, v = torch.randn(2, batch, heads, keys, width, generator=generator).to(dtype)
    return q, k, v


def make_masks(dtype: torch.dtype, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
    """Return masks by name: padding on both sides, a chunk, biases, hidden texts."""
    batch, heads, queries, keys, _ = sizes
    padding = torch.zeros(batch, 1, 1, keys)
    for text in range(batch):
        padding[text, ..., : text * keys // 8] = -torch.inf
        padding[text, ..., keys // 2 + 1 + text :] = -torch.inf
    rows, columns = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    window = (columns > rows + keys // 2) | (columns < rows + keys // 3)
    alibi = torch.randn(batch, heads, queries, keys)
    alibi[..., keys * 3 // 4 + 1 :] = -torch.inf
    hidden = torch.zeros(batch, 1, 1, keys)
    hidden[0] = -torch.inf
    masks = {
        "padding": padding,
        "window": torch.zeros(1, 1, queries, keys).masked_fill(window, -torch.inf),
        "alibi": alibi,
        "hidden": hidden,
        "rows": torch.randn(batch, 1, queries, 1),
    }
    return {"none": None, **{name: mask.to(dtype) for name, mask in masks.items()}}


def compute_exactly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return attention in fp64, zeros where every key is hidden."""
    wide = mask if mask is None else mask.double()
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide).nan_to_num(0)


def run_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor | None
) -> Tensor:
    """Return what the kernel writes over NaNs."""
    out = torch.full_like(q, torch.nan)
    tensors = [t for t in (mask, table) if t is not None]
    words = mask is not None, table is not None, q.shape[3] ** -0.5
    decode_attention.call(q, k, v, *tensors, *words, out=out)
    return out


def distance(result: Tensor, truth: Tensor) -> float:
    """Return the distance of `result` from `truth`, as a share of its size."""
    return float((result.double() - truth).norm() / truth.norm().clamp(min=1e-30))


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_kernel_and_reference_compute_attention(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    q, k, v = make_tensors(dtype, sizes)
    tables = None, torch.randint(0, sizes[0], (sizes[0], sizes[3]))
    odd = F.pad(k, (0, 1))[..., : sizes[4]]  # rows begin at odd places
    for (name, mask), table in itertools.product(make_masks(dtype, sizes).items(), tables):
        rows = (k, v) if table is None else [gather_rows(t, table) for t in (k, v)]
        truth = compute_exactly(q, *rows, mask)
        reference = torch.ops.ipex.decode_attention(q, k, v, mask, table, sizes[4] ** -0.5)
        assert distance(reference, truth) < LIMIT[dtype], name
        for keys in (k, odd):
            assert distance(run_kernel(q, keys, v, mask, table), truth) < LIMIT[dtype], name


@needs_kernel
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_parts_of_a_head_are_merged(threads: int) -> None:
    """Heads begin and end within the lots of a thread, and one head goes to many."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for sizes in ((1, 1, 16, 1500, 64), (1, 3, 16, 700, 64), (2, 2, 8, 1030, 128)):
            q, k, v = make_tensors(torch.float32, sizes)
            for mask in make_masks(torch.float32, sizes).values():
                result, truth = run_kernel(q, k, v, mask, None), compute_exactly(q, k, v, mask)
                assert distance(result, truth) < LIMIT[torch.float32]
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_hidden_keys_are_not_read_and_visible_ones_hide_nothing() -> None:
    q, k, v = make_tensors(torch.float32, (2, 2, 3, 300, 32))
    mask = torch.zeros(2, 1, 1, 300)
    mask[..., :10] = mask[..., 200:] = -torch.inf
    truth = compute_exactly(q, k, v, mask)
    for states in (k, v):
        states[:, :, :10] = states[:, :, 200:] = torch.nan
    assert distance(run_kernel(q, k, v, mask, None), truth) < LIMIT[torch.float32]
    q[0, 1, 0, 3] = torch.nan
    result = run_kernel(q, k, v, mask, None)
    assert result[0, 1, 0].isnan().all()
    assert int(result.isnan().any(-1).sum()) == 1


def decode(
    q: Tensor, new: Tensor, cache: Tensor, count: Tensor, table: Tensor | None = None
) -> Tensor:
    """Write a token's states at `count` of a static cache, and attend to all so far."""
    cache = cache.index_copy(2, count, new)
    visible = torch.arange(cache.shape[2]) <= count
    states = cache if table is None else gather_rows(cache, table)
    return F.scaled_dot_product_attention(q, states, states, visible[None, None, None])


def compile_decoding(
    dtype: torch.dtype,
    queries: int = 4,
    keys: int = 96,
    width: int = 32,
    table: bool = False,
    **options: object,
) -> tuple[str, float]:
    """Return what the rule reports of a compiled token, and the result's distance from fp64."""
    q, cache, _ = make_tensors(dtype, (2, 2, queries, keys, width))
    arguments = [q, cache[:, :, :1] * 2, cache, torch.tensor([keys // 3])]
    arguments += [torch.randint(0, 2, (2, keys))] if table else []
    torch.compiler.reset()
    decisions.clear()
    result = torch.compile(decode, backend="ipex", options={"strict": True, **options})(*arguments)
    events = [e for report in decisions.reports() for e in report.events]
    reason = "".join(e.reason for e in events if e.subject == rule.NAME)
    truth = decode(*(t.double() if t.is_floating_point() else t for t in arguments))
    return reason, distance(result, truth)


@pytest.mark.sampled("dtype1")
@needs_kernel
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rule_fires(dtype: torch.dtype) -> None:
    reason, error = compile_decoding(dtype)
    assert reason == "1 by this package's kernel"
    assert error < LIMIT[dtype]


@needs_kernel
@torch.no_grad()
def test_keys_that_a_table_names_are_not_gathered() -> None:
    reason, error = compile_decoding(torch.float32, table=True)
    assert reason == "1 by this package's kernel, 1 by a table of beams"
    assert error < LIMIT[torch.float32]


@needs_kernel
@pytest.mark.slow
@torch.no_grad()
def test_the_rule_fires_over_many_keys() -> None:
    """Which no kernel of ours was for before."""
    reason, error = compile_decoding(torch.float32, keys=4096)
    assert reason
    assert error < LIMIT[torch.float32]


@needs_kernel
@pytest.mark.slow
@pytest.mark.usefixtures("op_by_op")
@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    [
        {"queries": QUERIES + 1},
        {"width": 24},
        {"rules": f"-{rule.NAME}"},
        {"blocked_products": False},
    ],
    ids=str,
)
def test_what_it_is_not_for_is_left(case: dict[str, object]) -> None:
    reason, error = compile_decoding(torch.float32, **case)  # type: ignore[arg-type]
    assert not reason
    assert error < LIMIT[torch.float32]


@needs_kernel
@pytest.mark.slow
def test_training_keeps_torchs_attention_and_its_gradient() -> None:
    q, cache, _ = make_tensors(torch.float32, (1, 2, 2, 64, 32))
    q.requires_grad_()
    decisions.clear()
    torch.compiler.reset()
    run = torch.compile(decode, backend="ipex", options={"strict": True})
    run(q, cache[:, :, :1], cache, torch.tensor([20])).sum().backward()
    assert q.grad is not None
    assert rule.NAME not in [e.subject for report in decisions.reports() for e in report.events]


@needs_kernel
@pytest.mark.slow
@torch.no_grad()
def test_a_cached_graph_is_right_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a cache that was filled elsewhere: torch's ops compute it then."""
    q, cache, _ = make_tensors(torch.float32, (1, 2, 2, 64, 32))
    arguments = q, cache[:, :, :1], cache, torch.tensor([20])
    torch.compiler.reset()
    run = torch.compile(decode, backend="ipex", options={"strict": True, "cpp_wrapper": False})
    expected = run(*arguments)
    monkeypatch.setattr(decode_attention, "why_not", lambda: "for this test")
    torch.testing.assert_close(run(*arguments), expected)
