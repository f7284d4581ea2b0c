"""Rows that are held in registers: in kernels that Inductor generates for a described GPU."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.graph import GraphLowering

from ipex_inductor.lowerings.pointwise import row_reductions
from ipex_inductor.prebuild import graphs
from ipex_inductor.target.device import find_target

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="an H200 is pretended here; tests/gpu has the real one"
    ),
]

WIDEST = row_reductions.WIDEST["sm_90"]


class Norms(nn.Module):
    """Layer norms of a sum, and softmax, each in rows of its own width."""

    def __init__(self, widths):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)

    def forward(self, *rows):
        normed = [norm(x + 1) for norm, x in zip(self.norms, rows, strict=True)]
        return [*normed, *(F.softmax(x, -1) for x in rows)]


@pytest.fixture
def build_kernels(tmp_path, monkeypatch):
    """Return a function that builds a model for a GPU, for the rule's events and the reductions.

    The reductions are, by the number of columns, whether kernels hold a row in registers.
    """
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    codes, codegen = [], GraphLowering.codegen

    def keep_code(self):
        result = codegen(self)
        codes.append(result[0].value)
        return result

    monkeypatch.setattr(GraphLowering, "codegen", keep_code)

    def build(widths, gpu="h200", training=False, **options):
        rows = tuple(torch.randn(2048, width, dtype=torch.bfloat16) for width in widths)
        model = Norms(widths).bfloat16().train(training)
        done = graphs.prebuild(model, rows, find_target(gpu), training=training, options=options)
        events = [e.reason for e in done.events if e.subject == row_reductions.NAME]
        return events, find_reductions(codes[0])

    return build


def find_reductions(code):
    """Return the widths of the reductions in generated code, with whether each is persistent."""
    found = set()
    for kernel in code.split("@triton_heuristics.")[1:]:
        if kind := re.match(r"(persistent_)?reduction\(", kernel):
            found.add((int(re.search(r"r0_numel = (\d+)", kernel)[1]), bool(kind[1])))
    return found


def test_wide_rows_are_read_once(build_kernels):
    widths = (768, 1025, 1280, WIDEST, WIDEST + 8)
    events, reductions = build_kernels(widths)
    assert reductions == {(width, width <= WIDEST) for width in widths}
    assert events == ["kernels: 3"]  # a norm and a softmax of equal width share their kernel


@pytest.mark.parametrize(
    ("gpu", "training", "options"),
    [
        ("a10", False, {}),
        ("h200", False, {"rules": f"-{row_reductions.NAME}"}),
        ("h200", False, {"rules": "-*"}),
        ("h200", False, {"triton.persistent_reductions": False}),
        ("h200", True, {}),
    ],
    ids=["not measured", "off", "all off", "forbidden", "training"],
)
def test_else_they_are_read_as_inductor_reads_them(gpu, training, options, build_kernels):
    assert build_kernels((1280,), gpu, training, **options) == ([], {(1280, False)})
