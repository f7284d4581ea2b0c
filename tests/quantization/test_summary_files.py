"""Configuration files: both forms of IPEX, ours, and what is no such file."""

import json
from types import SimpleNamespace

import pytest

from ipex_inductor.errors import SummaryFileError
from ipex_inductor.quantization.files import old_summary, summary_file
from ipex_inductor.quantization.files.new_summary import operator_of
from ipex_inductor.quantization.files.summary import TensorRecord, plain_operator

pytestmark = pytest.mark.unit

OLD = [
    {
        "id": 0,
        "name": "conv2d",
        "algorithm": "moving_averager_min_max",
        "weight_granularity": "per_channel",
        "input_scales": [0.02],
        "input_zero_points": [3],
        "output_scales": [0.03],
        "output_zero_points": [0],
        "weight_scales": [[0.1, 0.2, 0.3]],
        "input_quantized_dtypes": ["uint8"],
        "output_quantized_dtypes": ["uint8"],
        "inputs_quantized": [True],
        "outputs_quantized": [False],
        "inputs_flow": [""],
        "outputs_flow": ["conv2d.0.output"],
    },
    {
        "id": 1,
        "name": "add_",
        "algorithm": "min_max",
        "weight_granularity": "per_channel",
        "input_scales": [0.02, 0.5],
        "input_zero_points": [3, 4],
        "output_scales": [0.03],
        "output_zero_points": [0],
        "weight_scales": [],
        "input_quantized_dtypes": ["uint8", "uint8"],
        "output_quantized_dtypes": ["uint8"],
        "inputs_quantized": [False, False],
        "outputs_quantized": [False],
        "inputs_flow": ["conv2d.0.output", ""],
        "outputs_flow": ["add_.1.output"],
    },
    {
        "id": 2,
        "name": "linear",
        "algorithm": "min_max",
        "weight_granularity": "per_channel",
        "input_scales": [0.25],
        "input_zero_points": [0],
        "output_scales": [1.0],
        "output_zero_points": [0],
        "weight_scales": [[0.1, 0.2]],
        "input_quantized_dtypes": ["int8"],
        "output_quantized_dtypes": ["int8"],
        "inputs_quantized": [False],
        "outputs_quantized": [False],
        "inputs_flow": ["add_.1.output"],
        "outputs_flow": ["linear.2.output"],
    },
]


def tensor(scale, zero_point, forced="torch.quint8"):
    return {
        "id": 4,
        "orig_dtype": "torch.float32",
        "inf_dtype": forced,
        "force_dtype": forced,
        "scale": scale,
        "zero_point": zero_point,
        "smooth_quant_scaling_factor": {},
    }


def operator(op_type, fqn, inputs, weights=()):
    return {
        "op_type": op_type,
        "op_type_is_module": op_type.startswith("<class"),
        "fqn": fqn,
        "input_tensor_infos": inputs,
        "weight_tensor_infos": list(weights),
        "output_tensor_infos": [tensor([], [])],
        "activation_observer": {"name": "HistogramObserver", "bins": 2048},
        "weight_observer": {"name": "PerChannelMinMaxObserver"},
        "share_weight_observers": True,
    }


CONV, LINEAR = "<class 'torch.nn.modules.conv.Conv2d'>", "<class 'torch.nn.modules.linear.Linear'>"
MATMUL = "<built-in method matmul of type object at 0x7f3a5c0d1e40>"
NEW = {
    " ": {
        "q_op_infos": {
            "0": operator(CONV, "features:0", [tensor([0.02], [3])], [tensor([0.1] * 3, [0] * 3)]),
            "1": operator(MATMUL, " ", [tensor([0.1], [5]), tensor([0.2], [6])]),
            "2": operator(LINEAR, "head", [tensor([0.25], [0], "torch.float32")]),
        },
        "nonq_op_infos": {"0": {"op_type": "<method 'mean'>", "fqn": " "}},
        "layer_output_infos": [],
    }
}


def row(name, operator, module_path="", inputs=(), output=""):
    return SimpleNamespace(
        name=name, operator=operator, module_path=module_path, inputs=inputs, output=output
    )


def read(tmp_path, content):
    file = tmp_path / "conf.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return summary_file.read_summary(file)


def test_the_old_form_is_read_by_operator_and_order(tmp_path):
    rows = [
        row("stem:conv2d:0", "conv2d", "stem", ["input:0"]),
        row(":add:0", "add", "", ["stem:conv2d:0", "input:1"]),
        row("head:linear:0", "linear", "head", [":add:0"]),
    ]
    summary = read(tmp_path, OLD)
    assert summary.scales(rows) == {
        "input:0": TensorRecord(0.02, 3, False),
        "stem:conv2d:0": TensorRecord(0.02, 3, False),
        "input:1": TensorRecord(0.5, 4, False),
        ":add:0": TensorRecord(0.25, 0, True),
    }
    assert summary.switched_off(rows) == ["head:linear:0"]
    assert [record.weight_channels for record in summary.layers] == [3, None, 2]


def test_the_new_form_is_read_by_module_and_number(tmp_path):
    rows = [
        row("features.0:conv2d:0", "conv2d", "features.0", ["input:0"]),
        row(":matmul:0", "matmul", "", ["a", "b"]),
        row("head:linear:0", "linear", "head", ["c"]),
    ]
    summary = read(tmp_path, NEW)
    assert summary.scales(rows)["b"] == TensorRecord(0.2, 6, False)
    assert summary.scales(rows)["input:0"] == TensorRecord(0.02, 3, False)
    assert summary.switched_off(rows) == ["head:linear:0"]


def test_an_operator_without_a_product_needs_no_match(tmp_path):
    rows = [row("conv", "conv2d", inputs=["x"]), row("head", "linear", inputs=["y"])]
    assert set(read(tmp_path, OLD).scales(rows)) == {"x", "y"}


def test_what_ipex_left_in_floating_point_stays_so(tmp_path):
    rows = [row("c", "conv2d"), row("one", "conv1d", inputs=["x"]), row("l", "linear")]
    assert read(tmp_path, OLD).switched_off(rows) == ["one", "l"]


def test_layers_that_do_not_match_are_listed(tmp_path):
    rows = [row(f"c{n}", "conv2d", inputs=["x"]) for n in range(2)]
    with pytest.raises(SummaryFileError, match="conv2d: 1 in the file, 2 here; linear: 1 in"):
        read(tmp_path, OLD).scales(rows)


def test_weights_of_other_shapes_are_listed(tmp_path):
    rows = [row("conv", "conv2d"), row("head", "linear")]
    summary = read(tmp_path, OLD)
    summary.check_weights(rows, {"conv": 3, "head": 2})
    with pytest.raises(SummaryFileError, match="conv: 3 channels in the file, 64 here"):
        summary.check_weights(rows, {"conv": 64, "head": 2})


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"a": 1}', "\x00", '[{"id": "x"}]'])
def test_torn_and_foreign_files_are_refused(tmp_path, content):
    with pytest.raises(SummaryFileError, match="empty, torn or foreign"):
        read(tmp_path, content)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SummaryFileError, match="no file"):
        summary_file.read_summary(tmp_path / "none.json")


def test_ours_comes_back(tmp_path):
    file = tmp_path / "ours.json"
    layers = [summary_file.LayerEntry("a:conv2d:0", "conv2d", True, ["x"], weight_channels=4)]
    scales = {"x": TensorRecord(0.1, 2, False)}
    summary_file.write_summary(file, layers, scales, {}, {})
    summary = summary_file.read_summary(file)
    rows = [row("a:conv2d:0", "conv2d", "a", ["x"])]
    assert summary.scales(rows) == scales
    assert not summary.switched_off(rows)
    assert [f.name for f in tmp_path.iterdir()] == ["ours.json"]
    with pytest.raises(SummaryFileError, match="b:conv2d:0: 0 in the file, 1 here"):
        summary.scales([*rows, row("b:conv2d:0", "conv2d")])


def test_the_old_form_is_written_with_every_key(tmp_path):
    entries = [old_summary.OldEntry(id=0, name="linear", layer="a:linear:0")]
    (written,) = json.loads(old_summary.write_entries(entries))
    assert {*OLD[0]} <= {*written}


@pytest.mark.parametrize(
    ("op_type", "name"),
    [
        (CONV, "conv2d"),
        (MATMUL, "matmul"),
        ("<function relu at 0x7f3a5c0d1e40>", "relu"),
        ("<built-in function linear>", "linear"),
        ("<class 'torch.nn.modules.pooling.AdaptiveAvgPool2d'>", "adaptive_avg_pool2d"),
        ("<class 'torch.nn.modules.activation.ReLU'>", "relu"),
        ("<method 'add_' of 'torch._C.TensorBase' objects>", "add"),
    ],
)
def test_printed_operators_are_named(op_type, name):
    assert operator_of(op_type) == name


def test_operators_of_modules_are_those_of_functions():
    assert plain_operator("ConvTranspose2d") == "conv_transpose2d"
    assert plain_operator("EmbeddingBag") == "embedding_bag"
    assert plain_operator("relu_") == "relu"
