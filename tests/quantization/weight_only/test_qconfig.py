"""Settings: IPEX's numbers and rules, and refusals that name what would work."""

import pytest
import torch
from torch import nn

from ipex_inductor import quantization
from ipex_inductor.errors import ArgumentError, QuantizationError
from ipex_inductor.quantization.weight_only.qconfig import (
    QConfigWoq,
    WoqActQuantMode,
    WoqLowpMode,
    WoqWeightDtype,
    WoqWeightQScheme,
    is_weight_only,
    read_mapping,
)

pytestmark = pytest.mark.unit


def test_names_have_the_numbers_of_ipex():
    assert {m.name: m.value for m in WoqWeightDtype} == {"INT8": 1, "INT4": 2, "NF4": 3, "FP8": 4}
    assert [m.name for m in WoqLowpMode] == ["NONE", "FP16", "BF16", "INT8"]
    assert [m.value for m in WoqActQuantMode] == list(range(-1, 8))
    assert WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM == 7
    assert [m.name for m in WoqWeightQScheme] == ["UNDEFINED", "ASYMMETRIC", "SYMMETRIC"]


def test_defaults_are_those_of_ipex():
    qconfig = quantization.get_weight_only_quant_qconfig_mapping().global_qconfig
    assert (qconfig.weight_dtype, qconfig.lowp_mode) == (WoqWeightDtype.INT8, WoqLowpMode.NONE)
    assert qconfig.act_quant_mode is WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM
    assert qconfig.group_size == -1
    assert qconfig.weight_qscheme is WoqWeightQScheme.ASYMMETRIC
    assert (qconfig.storage, qconfig.compute) == ("int8", "")


@pytest.mark.parametrize(
    ("weight_dtype", "lowp_mode", "symmetric"),
    [
        ("INT8", "NONE", False),
        ("INT8", "BF16", False),
        ("INT8", "INT8", True),
        ("INT4", "INT8", False),
        ("INT4", "NONE", False),
        ("NF4", "NONE", True),
        ("FP8", "FP16", True),
    ],
)
def test_an_undefined_scheme_is_asymmetric_where_that_is_possible(
    weight_dtype, lowp_mode, symmetric
):
    qconfig = QConfigWoq(WoqWeightDtype[weight_dtype], WoqLowpMode[lowp_mode])
    assert qconfig.is_symmetric is symmetric


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"weight_dtype": WoqWeightDtype.NF4, "weight_qscheme": 1}, "WoqWeightQScheme.SYMMETRIC"),
        ({"weight_dtype": WoqWeightDtype.FP8, "weight_qscheme": 1}, "WoqWeightQScheme.SYMMETRIC"),
        ({"lowp_mode": WoqLowpMode.INT8, "weight_qscheme": 1}, "WoqWeightQScheme.SYMMETRIC"),
        ({"weight_dtype": 3, "lowp_mode": 3}, "WoqLowpMode.BF16"),
        ({"weight_dtype": 4, "lowp_mode": 3}, "WoqLowpMode.BF16"),
        ({"lowp_mode": 3, "act_quant_mode": 0}, "WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM"),
        ({"lowp_mode": 3, "act_quant_mode": -1}, "WoqLowpMode.BF16"),
        ({"group_size": 48}, "32, 64 and 128"),
        ({"group_size": 0}, "-1"),
        ({"group_size": True}, "power of two"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_others(settings, names):
    with pytest.raises(QuantizationError, match=names.replace(".", r"\.")):
        QConfigWoq(**settings)


@pytest.mark.parametrize("value", [7, "INT8", None])
def test_values_of_no_enumeration_are_refused(value):
    with pytest.raises(ArgumentError, match=r"WoqWeightDtype\.INT4"):
        QConfigWoq(weight_dtype=value)


def test_types_of_torch_are_read_as_ipex_read_them():
    assert QConfigWoq(weight_dtype=torch.qint8).weight_dtype is WoqWeightDtype.INT8
    assert QConfigWoq(weight_dtype=torch.quint4x2).weight_dtype is WoqWeightDtype.INT4


def test_a_mapping_chooses_by_path_pattern_class_and_default():
    four, eight = QConfigWoq(weight_dtype=2), QConfigWoq()
    mapping = quantization.get_weight_only_quant_qconfig_mapping()
    mapping.set_module_name("head", None).set_module_name("body.0", four)
    mapping.set_module_name_regex(r".*gate", four).set_object_type(nn.Bilinear, None)
    woq = read_mapping(mapping)
    linear = nn.Linear(2, 2)
    assert woq.choose("head", linear) is None
    assert woq.choose("body.0.up", linear) == four
    assert woq.choose("body.1.gate", linear) == four
    assert woq.choose("body.1.up", linear) == eight
    assert woq.choose("body.1.up", nn.Bilinear(1, 1, 1)) is None


def test_mappings_of_both_kinds_are_refused():
    mapping = quantization.get_weight_only_quant_qconfig_mapping()
    mapping.set_module_name("0", quantization.default_static_qconfig)
    assert is_weight_only(mapping)
    with pytest.raises(QuantizationError, match="a mapping of QConfigWoq and None"):
        read_mapping(mapping)
    assert not is_weight_only(quantization.default_static_qconfig_mapping)
