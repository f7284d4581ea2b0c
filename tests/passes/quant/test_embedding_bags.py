"""Embedding bags on int8 rows: the rule, and its numbers by the op and by Inductor's code."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ipex_inductor as ipex
from ipex_inductor.passes.quant import embedding_bags
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.cpu import int8
from support.helpers import code_of
from support.int8_nets import QUANTIZED, dequantized_weight
from support.rewritten import count, rewrite

pytestmark = pytest.mark.skipif(int8.why_not() is not None, reason=f"{int8.why_not()}")
ROWS, COLUMNS = 50, 21  # columns are no whole number of vectors
NAME = embedding_bags.NAME
# Sums of up to 9 rows of at most 4 in another order than torch's: some roundings of 2^-24.
CLOSE = {"rtol": 1e-6, "atol": 3e-6}


def bags_of(dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Return indices and offsets of five bags, the second and the last of which are empty."""
    indices = torch.randint(ROWS, (20,), generator=torch.Generator().manual_seed(1))
    return indices.to(dtype), torch.tensor([0, 9, 9, 12, 20], dtype=dtype)


def events() -> list[tuple[str, str]]:
    """Return what was decided about embedding bags, with the reasons."""
    every = itertools.chain(*(report.events for report in decisions.reports()))
    return [(event.kind, event.reason) for event in every if event.subject == NAME]


class Bag(nn.Module):
    """A bag of a rounded table, with the words of `embedding_bag`."""

    def __init__(self, dtype: torch.dtype = torch.float32, **words: Any) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, COLUMNS).to(dtype))
        self.words = words

    def forward(self, indices: Tensor, offsets: Tensor, *weights: Tensor) -> Tensor:
        table = dequantized_weight(self.table).to(self.table.dtype)
        weighted = {"per_sample_weights": weights[0]} if weights else {}
        return F.embedding_bag(indices, table, offsets, **self.words, **weighted)


CASES: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "padded mean": {"mode": "mean", "padding_idx": 7},
    "padded max": {"mode": "max", "padding_idx": 7},
    "last offset": {"mode": "sum", "include_last_offset": True},
}


def compile_strictly(model: nn.Module, **words: Any) -> Any:
    return torch.compile(model, backend="ipex", options={"strict": True}, **words)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_computes_what_torch_does(case: str, dtype: torch.dtype) -> None:
    words = CASES[case]
    bag, (indices, offsets) = Bag(**words), bags_of(dtype)
    indices[3] = words.get("padding_idx", 3)
    with torch.no_grad():
        expected = bag(indices, offsets)
        integers, scales = quantized_table(bag)
        result = torch.empty_like(expected)
        mode = ("sum", "mean", "max").index(words["mode"])
        rest = mode, int(words.get("include_last_offset", False)), words.get("padding_idx", -1)
        int8.sum_bags(integers, scales, indices, offsets, False, *rest, out=result)
        operands = integers, scales, indices, offsets, None, [*rest]
        reference = torch.ops.ipex.int8_embedding_bag(*operands, torch.float32)
    torch.testing.assert_close(result, expected, **CLOSE)
    torch.testing.assert_close(reference, expected, **CLOSE)
    assert not result[1].any()


def quantized_table(bag: Bag) -> tuple[Tensor, Tensor]:
    """Return the integers and the scales of a bag's table."""
    scale = bag.table.abs().amax(1) / 127.5
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    words = scale, zeros, 0, -128, 127, torch.int8
    return QUANTIZED.quantize_per_channel.default(bag.table, *words), scale


@pytest.mark.parametrize("place", ["index", "negative", "offset", "decreasing", "first"])
def test_what_is_out_of_range_is_not_read(place: str) -> None:
    bag, (indices, offsets) = Bag(mode="sum"), bags_of()
    indices[-1] = {"index": ROWS, "negative": -1}.get(place, 0)
    offsets[1] = {"offset": 21, "decreasing": 13}.get(place, 9)
    offsets[0] = int(place == "first")
    integers, scales = quantized_table(bag)
    out = torch.empty(5, COLUMNS)
    with pytest.raises(IndexError, match="no row of the table"):
        int8.sum_bags(integers, scales, indices, offsets, False, 0, 0, -1, out=out)


def test_generated_code_reads_integers() -> None:
    """In C++, with weights of samples, a bf16 table, and another number of bags."""
    bag, (indices, offsets) = Bag(torch.bfloat16, mode="sum").eval(), bags_of()
    weights = torch.rand(20).bfloat16()
    with torch.no_grad():
        run = compile_strictly(bag, dynamic=True)
        (code,) = code_of(run, indices, offsets, weights)
        assert events() == [("fired", "")]
        assert "int8_embedding_bag(" in code
        for count in (5, 3):
            result, expected = (f(indices, offsets[:count], weights) for f in (run, bag))
            # Eager rounds the rows to bf16, and the sums of 20 at most.
            torch.testing.assert_close(result, expected, rtol=2**-6, atol=2**-5)
        with pytest.raises(Exception, match="no row of the table"):
            run(indices + ROWS, offsets, weights)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_table_may_have_one_scale(kind: str) -> None:
    op = getattr(QUANTIZED.dequantize_per_tensor, "default" if kind == "number" else kind)

    def run(integers: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        zeros = torch.zeros((), dtype=torch.int64)
        words = (0.01, 0) if kind == "number" else (torch.full((), 0.01), zeros)
        table = op(integers, *words, -128, 127, torch.int8)
        return F.embedding_bag(indices, table, offsets, mode="sum")

    table = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8)
    quantize = embedding_bags.quantize_bags
    gm, decided = rewrite(lambda *args: quantize(*args, lambda _: None), run, table, *bags_of())
    assert decided == [("fired", NAME, "")]
    assert count(gm, torch.ops.ipex.int8_embedding_bag.default) == 1


def test_a_quantized_model_reads_integers() -> None:
    """The recipe's own graph: the table stays fp32, what is read is int8."""
    model = nn.Sequential(nn.EmbeddingBag(ROWS, 16, mode="sum"), nn.ReLU(), nn.Linear(16, 4)).eval()
    inputs = torch.randint(ROWS, (6, 5))
    mapping = ipex.quantization.default_static_qconfig_mapping
    prepared = ipex.quantization.prepare(model, mapping, example_inputs=inputs)
    prepared(inputs)
    quantized = ipex.quantization.convert(prepared)
    with torch.no_grad():
        result = compile_strictly(quantized)(inputs)
        torch.testing.assert_close(result, quantized(inputs), **CLOSE)
        assert events() == [("fired", "")]
        report = ipex.quantization.report(quantized, [inputs])
    (row,) = [layer for layer in report.layers if layer.operator == "embedding_bag"]
    assert (row.kernel, row.kernel_reason) == (NAME, "")


def _positions(bag: Bag, indices: Tensor, offsets: Tensor) -> Tensor:
    table = dequantized_weight(bag.table)
    sums, positions, *_ = torch.ops.aten._embedding_bag(table, indices, offsets)
    return sums.sum() + positions.sum()


def _columns(bag: Bag, indices: Tensor, offsets: Tensor) -> Tensor:
    return F.embedding_bag(indices, dequantized_weight(bag.table, axis=1), offsets, mode="sum")


MISSES = {
    "positions": (_positions, "positions of the bags"),
    "scales of columns": (_columns, "a scale of each row"),
    "float table": (
        lambda bag, indices, offsets: F.embedding_bag(indices, bag.table, offsets),
        "",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_are_right(name: str) -> None:
    function, reason = MISSES[name]
    bag, inputs = Bag(mode="sum"), bags_of()
    with torch.no_grad():
        run = compile_strictly(lambda *args: function(bag, *args))
        torch.testing.assert_close(run(*inputs), function(bag, *inputs), rtol=1e-5, atol=1e-4)
    assert [kind for kind, _ in events()] == (["missed"] if reason else [])
    assert all(reason in text for _, text in events())
