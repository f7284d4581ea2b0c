"""Attention of few queries over a cache on an H200 that is not here: where the rule fires."""

import pytest
import torch
from torch._inductor.graph import GraphLowering

from ipex_inductor.passes.attention import decode_attention as rule
from ipex_inductor.prebuild import graphs
from ipex_inductor.target.device import find_target
from support.cached_attention import Added, Decoder, Unmasked

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="an H200 is pretended here; tests/gpu has the real one"
)


def prebuild(model, monkeypatch, queries=1, dtype=torch.bfloat16, **options):
    """Return the decisions about the rule, and the code of the graph."""
    codes = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    x = torch.randn(1, 2 * model.groups, queries, model.width, dtype=dtype)
    position = torch.arange(queries)
    with torch.no_grad():
        made = graphs.prebuild(
            *(model.eval(), (x, position), find_target("h200")),
            training=False,
            options={"strict": True, **options},
        )
    return [e for e in made.events if e.subject == rule.NAME], codes[-1]


def test_each_layer_is_our_kernel_on_the_mask_as_it_is(monkeypatch):
    events, code = prebuild(Decoder(), monkeypatch)
    assert [(e.kind, e.reason) for e in events] == [("choice", "2 by this package's kernel")]
    call = code.split("def call(")[1]
    assert call.count("triton_tem_fused") == 2
    assert "torch.ops.aten._scaled_dot_product" not in call
    # Torch 2.11 for CUDA has made numbers of the mask before any pass sees it.
    makes_numbers = torch.version.cuda is not None and torch.__version__.startswith("2.11.")
    assert ("torch.bool" in call) is not makes_numbers
    # Counters are zeroed once; keys and values are not copied.
    assert call.count("torch.int32") == 1


@pytest.mark.slow
def test_a_mask_of_other_numbers_is_added(monkeypatch):
    events, code = prebuild(Added(), monkeypatch)
    assert [e.kind for e in events] == ["choice"]
    assert "torch.bool" not in code.split("def call(")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "groups", "dtype", "width", "keys"),
    [
        (4, 4, torch.float16, 128, 512),  # as many as are few
        (1, 16, torch.bfloat16, 80, 300),
        (1, 1, torch.bfloat16, 256, 4096),
        (2, 3, torch.bfloat16, 96, 64),
    ],
)
def test_the_rule_fires(monkeypatch, queries, groups, dtype, width, keys):
    model = Decoder(groups, keys, width, dtype=dtype)
    events, code = prebuild(model, monkeypatch, queries, dtype)
    assert [(e.kind, e.reason) for e in events] == [("choice", "2 by this package's kernel")]
    assert code.split("def call(")[1].count("triton_tem_fused") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "queries", "dtype", "options", "reason"),
    [
        (Decoder(), 8, torch.bfloat16, {}, None),  # 32 queries of a head
        (Unmasked(), 1, torch.bfloat16, {}, None),
        (Decoder(), 1, torch.bfloat16, {"rules": f"-{rule.NAME}"}, None),
        (Decoder(width=72), 1, torch.bfloat16, {}, "heads are 72 wide"),
        (Decoder(dtype=torch.float32), 1, torch.float32, {}, "it has no torch.float32"),
    ],
    ids=["many", "unmasked", "off", "width", "fp32"],
)
def test_what_it_is_not_for_is_left(monkeypatch, model, queries, dtype, options, reason):
    events, code = prebuild(model, monkeypatch, queries, dtype, **options)
    expected = [] if reason is None else [("missed", f"2 left to torch: {reason}")]
    assert [(e.kind, e.reason) for e in events] == expected
    assert "triton_tem_fused" not in code
