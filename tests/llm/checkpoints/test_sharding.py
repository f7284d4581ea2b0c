"""Shards of checkpoints: put together they are the whole model's layers, to the bit."""

import json

import pytest
import torch
from torch import nn

from ipex_inductor.errors import ArgumentError, CheckpointError
from ipex_inductor.llm import (
    load_low_precision_checkpoint,
    load_quantized,
    shard_low_precision_checkpoint,
)
from ipex_inductor.quantization import report_weights
from ipex_inductor.quantization.weight_only import WeightOnlyLinear
from support.packed_weights import pack, pack_awq, pack_gptq

pytestmark = pytest.mark.unit

GROUP, WIDTH, INNER = 32, 128, 192
CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": WIDTH}
# Query heads by ranks: four key-value heads with two query heads each.
UNITS = {2: (2, 2), 3: (2, 1, 1), 4: (1, 1, 1, 1)}
GRAINS = {2: (3, 3), 3: (2, 2, 2), 4: (2, 2, 1, 1)}
ALONG_N = {"q_proj": (256, WIDTH), "k_proj": (128, WIDTH), "up_proj": (INNER, WIDTH)}
ALONG_K = {"o_proj": (WIDTH, 256), "down_proj": (WIDTH, INNER)}
SHAPES = {**ALONG_N, **ALONG_K, "kv_a_proj": (64, WIDTH)}


def integers(rows, columns, groups, bits):
    """Return stored integers, zero points, and scales that are powers of two: sums are exact."""
    return (
        torch.randint(0, 2**bits, (rows, columns)),
        torch.randint(1, 2**bits, (rows, groups)),
        2.0 ** torch.randint(-3, 3, (rows, groups)),
    )


def make_gptq(rows, columns, bits=4, size=GROUP, act_order=False):
    count = 1 if size == -1 else columns // size
    stored, zeros, scales = integers(rows, columns, count, bits)
    qweight, qzeros = pack_gptq(stored, zeros - 1, bits)
    groups = torch.arange(columns) // (columns if size == -1 else size)
    groups = groups[torch.randperm(columns)] if act_order else groups
    return {
        "qweight": qweight,
        "qzeros": qzeros,
        "scales": scales.t().half(),
        "g_idx": groups.int(),
    }


def make_awq(rows, columns):
    stored, zeros, scales = integers(rows, columns, columns // GROUP, 4)
    qweight, qzeros = pack_awq(stored, zeros)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.t().half()}


def make_int8(rows, columns):
    weight = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return {"weight": weight, "weight_scale": 2.0 ** torch.randint(-3, 3, (rows, 1))}


def make_fp8(rows, columns):
    weight = torch.randint(-8, 8, (rows, columns)).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-3, 3, (rows // GROUP, columns // GROUP))
    return {"weight": weight, "weight_scale_inv": scales}


def make_packed(rows, columns):
    stored, zeros, scales = integers(rows, columns, columns // GROUP, 4)
    return {
        "weight_packed": pack(stored, 4),
        "weight_scale": scales.bfloat16(),
        "weight_zero_point": pack(zeros.t(), 4).t().contiguous(),
        "weight_shape": torch.tensor([rows, columns]),
    }


def settings_of(method, bits=4, size=GROUP, desc_act=False, **more):
    return {
        "quant_method": method,
        "bits": bits,
        "group_size": size,
        "desc_act": desc_act,
        "sym": False,
        **more,
    }


WEIGHTS = {"num_bits": 4, "group_size": GROUP, "symmetric": False, "type": "int"}
FORMS = {
    "gptq": (make_gptq, settings_of("gptq")),
    "rows": (lambda *s: make_gptq(*s, size=-1), settings_of("gptq", size=-1)),
    "act-order": (lambda *s: make_gptq(*s, act_order=True), settings_of("gptq", desc_act=True)),
    "static groups": (make_gptq, settings_of("gptq", desc_act=True)),
    "rtn": (lambda *s: make_gptq(*s, bits=8), settings_of("rtn", bits=8)),
    "awq": (make_awq, settings_of("awq")),
    "int8": (make_int8, settings_of("int8", bits=8)),
    "fp8": (make_fp8, settings_of("fp8", bits=8, weight_block_size=[GROUP, GROUP])),
    "packed": (
        make_packed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": WEIGHTS}},
        },
    ),
}


def make_state(form):
    torch.manual_seed(0)
    make, settings = FORMS[form]
    state = {f"{n}.{k}": t.contiguous() for n, s in SHAPES.items() for k, t in make(*s).items()}
    for name, (rows, _) in SHAPES.items():
        state[f"{name}.bias"] = torch.randint(-8, 8, (rows,)).float()
    return state, settings


def build(state, settings, shapes):
    """Return a model of these shapes, N and K, with the weights of a state."""
    with torch.device("meta"):
        model = nn.ModuleDict({name: nn.Linear(k, n) for name, (n, k) in shapes.items()})
    return load_quantized(model, (state, settings))


def shapes_of(rank, ranks):
    """Return N and K of each layer of a rank: heads of 32, grains of 32."""
    heads, grains = 32 * UNITS[ranks][rank], 32 * GRAINS[ranks][rank]
    return {
        "q_proj": (2 * heads, WIDTH),
        "k_proj": (heads, WIDTH),
        "up_proj": (grains, WIDTH),
        "o_proj": (WIDTH, 2 * heads),
        "down_proj": (WIDTH, grains),
        "kv_a_proj": SHAPES["kv_a_proj"],
    }


def shard(state, settings, rank, ranks, **words):
    bits, desc_act = settings.get("bits", 4), settings.get("desc_act", False)
    size = settings.get("group_size", GROUP)
    arguments = {
        "quantization_method": settings["quant_method"],
        "tp_grain_size": size if size > 0 else 32,
        "desc_act": desc_act,
        "bits": bits,
        **words,
    }
    return shard_low_precision_checkpoint(state, CONFIG, rank, ranks, **arguments)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_shards_put_together_are_the_whole_layers(form, ranks):
    """Outputs to the bit: integers and powers of two have exact sums in any order."""
    state, settings = make_state(form)
    whole = build(state, settings, SHAPES)
    parts = [
        build(shard(state, settings, rank, ranks), settings, shapes_of(rank, ranks))
        for rank in range(ranks)
    ]
    for name in ALONG_N:
        x = torch.randint(-4, 4, (5, WIDTH)).float()
        joined = torch.cat([part[name](x) for part in parts], -1)
        assert torch.equal(joined, whole[name](x))
    for name, (_, columns) in ALONG_K.items():
        x = torch.randint(-4, 4, (5, columns)).float()
        widths = [shapes_of(rank, ranks)[name][1] for rank in range(ranks)]
        bias = whole[name].bias
        sums = [p[name](c) - bias for p, c in zip(parts, x.split(widths, 1), strict=True)]
        assert torch.equal(sum(sums) + bias, whole[name](x))
    x = torch.randint(-4, 4, (5, WIDTH)).float()
    assert all(torch.equal(p["kv_a_proj"](x), whole["kv_a_proj"](x)) for p in parts)


def test_parts_of_groups_alone_are_dequantized_and_the_report_says_so():
    state, settings = make_state("act-order")
    part = build(shard(state, settings, 0, 2), settings, shapes_of(0, 2))
    kinds = {name: isinstance(layer, WeightOnlyLinear) for name, layer in part.items()}
    assert kinds == {name: name not in ALONG_K for name in SHAPES}
    reasons = {row.name: row.reason for row in report_weights(part).layers}
    assert "parts of groups" in reasons["o_proj"]
    in_order, settings = make_state("static groups")
    part = build(shard(in_order, settings, 1, 2), settings, shapes_of(1, 2))
    assert all(isinstance(layer, WeightOnlyLinear) for layer in part.values())


def test_act_order_keeps_scales_whole_where_k_is_cut():
    state, settings = make_state("act-order")
    part = shard(state, settings, 1, 2)
    for key in ("scales", "qzeros"):
        assert torch.equal(part[f"down_proj.{key}"], state[f"down_proj.{key}"])
    assert torch.equal(part["down_proj.g_idx"], state["down_proj.g_idx"][96:])
    assert torch.equal(part["up_proj.g_idx"], state["up_proj.g_idx"])
    assert part["up_proj.scales"].shape == (4, 96)


def test_fused_layers_are_cut_part_by_part():
    torch.manual_seed(0)
    state = {f"attn.qkv_proj.{k}": t for k, t in make_gptq(512, WIDTH).items()}
    state.update({f"mlp.gate_up_proj.{k}": t for k, t in make_gptq(384, WIDTH).items()})
    part = shard(state, settings_of("gptq"), 1, 3)
    qkv, gate = state["attn.qkv_proj.qweight"], state["mlp.gate_up_proj.qweight"]
    expected = torch.cat((qkv[:, 128:192], qkv[:, 320:352], qkv[:, 448:480]), 1)
    assert torch.equal(part["attn.qkv_proj.qweight"], expected)
    expected = torch.cat((gate[:, 64:128], gate[:, 256:320]), 1)
    assert torch.equal(part["mlp.gate_up_proj.qweight"], expected)
    assert "attn.qkv_proj.g_idx" not in part


def test_heads_and_other_tensors():
    head, norm = torch.randn(50, WIDTH), torch.randn(WIDTH)
    part = shard({"lm_head.weight": head, "norm.weight": norm}, settings_of("gptq"), 1, 2)
    assert torch.equal(part["lm_head.weight"], head[:, 64:])
    assert torch.equal(part["norm.weight"], norm)


def test_each_rank_loads_its_part_of_a_folder(tmp_path):
    state, settings = make_state("awq")
    torch.save(state, tmp_path / "model.pt")
    config = {**CONFIG, "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for rank in range(3):
        part, loaded = load_low_precision_checkpoint(tmp_path, rank, 3)
        expected = shard(state, settings, rank, 3)
        assert part.keys() == expected.keys()
        assert all(torch.equal(part[name], expected[name]) for name in part)
        assert loaded["group_size"] == GROUP


def test_a_folder_without_a_model_config_raises(tmp_path):
    state, settings = make_state("awq")
    torch.save(state, tmp_path / "model.pt")
    (tmp_path / "quant_config.json").write_text(json.dumps(settings))
    assert load_low_precision_checkpoint(tmp_path)[0].keys() == state.keys()
    with pytest.raises(CheckpointError, match=r"no .*config\.json"):
        load_low_precision_checkpoint(tmp_path, 0, 2)


@pytest.mark.parametrize(
    ("rank", "ranks", "words", "error"),
    [
        (3, 3, {}, "3 of 3"),
        (0, 2, {"tp_grain_size": 12}, "tp_grain_size that 8 divides"),
        (0, 5, {}, "4 of them"),
        (0, 2, {"tp_grain_size": 40}, "grains of 40"),
        (1, 2, {"quantization_method": "marlin"}, "'marlin'"),
    ],
)
def test_cuts_that_cannot_be_made_raise(rank, ranks, words, error):
    state, settings = make_state("gptq")
    with pytest.raises((ArgumentError, CheckpointError), match=error):
        shard(state, settings, rank, ranks, **words)


def test_a_cut_inside_of_a_group_or_a_hidden_order_raises():
    state = {f"o_proj.{k}": t for k, t in make_gptq(WIDTH, 256, size=128).items()}
    with pytest.raises(CheckpointError, match=r"o_proj[.].* at multiples of 128"):
        shard(state, settings_of("gptq", size=128), 0, 4)
    state, _ = make_state("act-order")
    with pytest.raises(CheckpointError, match="desc_act=True"):
        shard(state, settings_of("gptq"), 0, 2)


def test_a_config_without_heads_raises():
    with pytest.raises(ArgumentError, match="num_attention_heads"):
        shard_low_precision_checkpoint({}, {"width": 3}, 0, 2, "gptq", 32, False, 4)
