"""Torn and foreign checkpoints are refused by a typed error, and the model stays as it was."""

import json

import pytest
import torch
from torch import nn

from ipex_inductor.errors import ArgumentError, CheckpointError
from ipex_inductor.llm.checkpoints import load_low_precision_checkpoint, load_quantized
from ipex_inductor.llm.checkpoints.settings import read_settings
from support.packed_weights import pack_gptq

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors writes the checkpoints")

pytestmark = pytest.mark.unit

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 8, bias=False))


def layer(rows, columns, size=16, bits=4):
    stored = torch.randint(0, 2**bits, (rows, columns))
    zeros = torch.randint(0, 2**bits - 1, (rows, columns // size))
    qweight, qzeros = pack_gptq(stored, zeros, bits)
    scales = torch.rand(columns // size, rows).half()
    g_idx = (torch.arange(columns) // size).int()
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}


def tensors():
    torch.manual_seed(1)
    state = {f"0.{key}": value for key, value in layer(16, 32).items()}
    state.update({f"2.{key}": value for key, value in layer(8, 16).items()})
    return {**state, "0.bias": torch.rand(16), "1.weight": torch.rand(16), "1.bias": torch.rand(16)}


def write(folder, state, config=CONFIG):
    safetensors.save_file(state, folder / "model.safetensors")
    (folder / "quantize_config.json").write_text(json.dumps(config))
    return folder


def identities(target):
    state = target.state_dict(keep_vars=True)
    return {name: (id(value), value._version) for name, value in state.items()}


def refuse(source, match):
    """Load into a model with weights and one without; both stay as they were."""
    for device in ("cpu", "meta"):
        target = model().to(device)
        before = {
            name: (id(value), value._version)
            for name, value in target.state_dict(keep_vars=True).items()
        }
        kinds = [type(part) for part in target]
        copies = {name: value.clone() for name, value in target.state_dict().items()}
        with pytest.raises(CheckpointError, match=match):
            load_quantized(target, source)
        after = target.state_dict(keep_vars=True)
        assert identities(target) == before
        assert [type(part) for part in target] == kinds
        if device == "cpu":
            assert all(torch.equal(after[name], value) for name, value in copies.items())


def test_the_checkpoint_without_damage_is_loaded(tmp_path):
    load_quantized(model(), write(tmp_path, tensors()))


@pytest.mark.parametrize("share", [0, 4, 0.1, 0.5, 0.99])
def test_files_that_are_cut_off(share, tmp_path):
    write(tmp_path, tensors())
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content)) if share < 1 else share])
    refuse(tmp_path, "torn")


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 4]},
        {"data_offsets": [-4, 0]},
        {"shape": [-1, 16]},
        {"shape": None},
        {"dtype": "I9"},
    ],
    ids=str,
)
def test_headers_that_contradict_themselves(change, tmp_path):
    write(tmp_path, tensors())
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["0.qweight"].update(change)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    refuse(tmp_path, "foreign")


def test_files_that_are_something_else(tmp_path):
    write(tmp_path, tensors())
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0" + b"[1,2,3,4,5,6,7] " * 9)
    refuse(tmp_path, "foreign")
    (tmp_path / "model.safetensors").unlink()
    refuse(tmp_path, "files of tensors")
    (tmp_path / "model.bin").write_bytes(b"no pickle")
    refuse(tmp_path, "state_dict of torch.save")
    (tmp_path / "quantize_config.json").write_text("{")
    refuse(tmp_path, "JSON")
    (tmp_path / "quantize_config.json").unlink()
    refuse(tmp_path, "quantization_config")
    refuse(tmp_path / "nothing", "quantization_config")


@pytest.mark.parametrize("name", ["0.qweight", "0.scales", "2.qzeros", "0.bias", "1.weight"])
def test_tensors_that_are_missing(name, tmp_path):
    state = tensors()
    del state[name]
    # Without its marker a layer is one in floating point, of which the rest is unknown.
    named = "0.g_idx" if name == "0.qweight" else name
    refuse(write(tmp_path, state), named.replace(".", r"\."))


def test_an_index_of_columns_may_be_missing_and_zero_points_of_symmetric_weights(tmp_path):
    state = {name: value for name, value in tensors().items() if "g_idx" not in name}
    load_quantized(model(), write(tmp_path, state))
    state = {name: value for name, value in state.items() if "qzeros" not in name}
    load_quantized(model(), write(tmp_path, state, {**CONFIG, "sym": True}))


def test_tensors_of_other_shapes_and_dtypes(tmp_path):
    for name, value in {
        "0.scales": torch.rand(3, 16).half(),
        "0.qweight": torch.zeros(5, 16, dtype=torch.int32),
        "0.qzeros": torch.zeros(2, 2),
        "2.g_idx": torch.zeros(15, dtype=torch.int32),
        "1.weight": torch.rand(17),
        "0.bias": torch.rand(15),
    }.items():
        refuse(write(tmp_path, {**tensors(), name: value}), name.replace(".", r"\."))


def test_groups_of_columns_that_contradict_the_group_size(tmp_path):
    g_idx = torch.zeros(32, dtype=torch.int32)
    g_idx[3] = 1
    refuse(write(tmp_path, {**tensors(), "0.g_idx": g_idx}), "columns in each group")
    g_idx[3] = 70
    refuse(write(tmp_path, {**tensors(), "0.g_idx": g_idx}), "columns in each group")


@pytest.mark.parametrize(("columns", "size", "config_size"), [(96, 64, 128), (96, 48, 48)])
def test_shapes_of_a_mixed_checkpoint_tell_a_group_that_does_not_divide_a_row(
    columns, size, config_size
):
    groups = -(-columns // size)
    stored, zeros = torch.randint(0, 16, (8, columns)), torch.randint(0, 15, (8, groups))
    qweight, qzeros = pack_gptq(stored, zeros, 4)
    scales = torch.rand(groups, 8)
    state = {"0.qweight": qweight, "0.qzeros": qzeros, "0.scales": scales}
    config = {**CONFIG, "group_size": config_size, "dynamic": {"1": {"bits": 8}}}
    target = load_quantized(nn.Sequential(nn.Linear(columns, 8, bias=False)), (state, config))
    expected = torch.arange(columns) // size
    exact = (stored - zeros[:, expected] - 1) * scales.t()[:, expected]
    torch.testing.assert_close(target[0].dequantize(), exact.float(), rtol=0, atol=0)


def test_a_number_of_groups_that_tells_no_size_is_refused():
    state = {"0.qweight": torch.zeros(12, 8, dtype=torch.int32), "0.scales": torch.rand(7, 8)}
    config = {**CONFIG, "sym": True, "dynamic": {"1": {"bits": 8}}}
    with pytest.raises(CheckpointError, match="number of groups of 0"):
        load_quantized(nn.Sequential(nn.Linear(96, 8, bias=False)), (state, config))


def test_checkpoints_of_other_models(tmp_path):
    refuse(write(tmp_path, {**tensors(), "5.weight": torch.rand(3)}), r"5\.weight")
    other = {f"model.{name}": value for name, value in tensors().items()}
    refuse(write(tmp_path, other), "quantized layers")
    mixed = {**CONFIG, "dynamic": {"0": {"bits": 2}}}
    two_bits = {**tensors(), "0.qweight": torch.zeros(2, 16, dtype=torch.int32)}
    refuse(write(tmp_path, two_bits, mixed), "2 bits")


def test_eight_bit_zero_points_that_leave_a_byte(tmp_path):
    state = tensors()
    state.update({f"0.{key}": value for key, value in layer(16, 32, bits=8).items()})
    state.update({f"2.{key}": value for key, value in layer(8, 16, bits=8).items()})
    load_quantized(model(), write(tmp_path, state, {**CONFIG, "bits": 8}))
    state["0.qzeros"] = torch.full_like(state["0.qzeros"], -1)
    refuse(write(tmp_path, state, {**CONFIG, "bits": 8}), "zero points of 0")
    load_quantized(model(), write(tmp_path, tensors()))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bits": 3}, "3 bits"),
        ({"bits": "many"}, "numbers"),
        ({"quant_method": "bitsandbytes"}, "gptq, awq"),
        ({"quant_method": None}, "gptq, awq"),
        ({"checkpoint_format": "marlin"}, "gptq_v2"),
        ({"group_size": -3}, "group_size"),
        ({"quant_method": "awq", "version": "gemv"}, "gemm"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:exotic"}, "auto_gptq"),
        ({"quant_method": "compressed-tensors"}, "one kind of weights"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "pack-quantized",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "type int",
        ),
    ],
    ids=str,
)
def test_settings_that_no_reader_serves(change, match, tmp_path):
    refuse(write(tmp_path, tensors(), {**CONFIG, **change}), match)
    with pytest.raises(CheckpointError, match=match):
        load_low_precision_checkpoint(tmp_path)


def test_models_that_cannot_be_loaded(tmp_path):
    write(tmp_path, tensors())
    with pytest.raises(ArgumentError, match="Module"):
        load_quantized({}, tmp_path)
    with pytest.raises(CheckpointError, match="state_dict"):
        load_quantized(model(), 3)
    lazy = model()
    with torch.device("meta"):
        lazy[1].register_buffer("table", torch.zeros(3), persistent=False)
    with pytest.raises(CheckpointError, match=r"1\.table on the device meta"):
        load_quantized(lazy, tmp_path)
    own = model()
    own[0].__class__ = type("Own", (nn.Linear,), {"forward": lambda self, x: x})
    with pytest.raises(CheckpointError, match="forward of its own"):
        load_quantized(own, tmp_path)


def test_settings_are_read_by_tables():
    assert read_settings({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}).group_size == 64
    assert read_settings({"quant_method": "GPTQ", "bits": 8, "group_size": None}).group_size == -1
