"""The default recipe: what is quantized, where quantization moves to, and what stays float."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.converted import convert_prepared
from ipex_inductor.quantization.prepared import prepare_graph
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping
from support.int8_models import (
    DEFAULT,
    ResNet,
    calibrate,
    is_dequantized,
    is_operator,
    node_of,
    operators,
    quantize,
)
from support.tiny_models import build

torch.manual_seed(0)
IMAGE = torch.randn(2, 4, 8, 8)


class Net(nn.Module):
    """Convolutions and linear layers of four channels, and a function that calls them."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.l, self.m = nn.Linear(4, 4), nn.Linear(4, 4)
        self.w = nn.Parameter(torch.randn(4, 4))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def converted(function, x=IMAGE, **options):
    return quantize(Net(function).eval(), (x,), **options)


def pairs(quantized):
    """Return how many tensors are quantized; each has one pair of nodes."""
    counts = operators(quantized)
    assert counts["quantize_per_tensor"] == counts["dequantize_per_tensor"]
    assert counts["quantize_per_channel"] == counts["dequantize_per_channel"]
    return counts["quantize_per_tensor"]


def inputs(quantized, operator, number=0):
    """Return the operators that make the inputs of a call, without weights and biases."""
    node = [n for n in quantized.graph.nodes if is_operator(n, operator)][number]
    nodes = [n for n in node.args[:2] if isinstance(n, torch.fx.Node) and n.op == "call_function"]
    return [n.target.overloadpacket.__name__ for n in nodes]


def test_resnet():
    model = ResNet().eval()
    quantized = quantize(model, (torch.randn(1, 3, 32, 32),))
    # The image, the stem, four convolutions with activations, the pool after the last of them, and
    # the downsampling convolution, which is added to another one.
    assert pairs(quantized) == 1 + 1 + 4 + 1 + 1
    assert operators(quantized)["quantize_per_channel"] == 7
    assert all(decision.quantized for decision in quantized.layer_decisions)
    (linear,) = [d for d in quantized.layer_decisions if d.operator == "linear"]
    assert linear.output == ""  # the last layer stays float
    assert linear.inputs == (":adaptive_avg_pool2d:0",)
    assert linear.weight == "fc.weight"
    assert linear.weight_channels == 10


def test_the_residual_is_read_as_int8():
    quantized = quantize(ResNet().eval(), (torch.randn(1, 3, 32, 32),))
    first, second = [
        n for n in quantized.graph.nodes if is_operator(n, "add") and n.meta.get("layer")
    ]
    assert is_operator(first.args[0], "conv2d")
    assert is_operator(first.args[1], "max_pool2d")  # of the quantized stem
    assert is_dequantized(first.args[1].args[0])
    assert is_operator(second.args[0], "conv2d")
    assert is_dequantized(second.args[1])  # of the downsampling convolution
    assert is_operator(second.args[1].args[0].args[0], "conv2d")


def test_one_of_two_convolutions_is_quantized_if_their_sum_is():
    """Not if anything else reads it, nor if the sum stays in floating point."""

    def numbers(function):
        quantized = converted(function)
        adds = [n for n in quantized.graph.nodes if is_operator(n, "add") and n.meta.get("layer")]
        return [sum(map(is_dequantized, add.args[:2])) for add in adds]

    assert numbers(lambda m, x: m.b((m.a(x) + m.c(x)).relu())) == [1]
    assert numbers(lambda m, x: m.b(m.a(x) + m.c(x))) == [1]
    assert numbers(lambda m, x: m.a(x) + m.c(x)) == [0]

    def read_twice(m, x):
        y = m.c(x)
        return m.b((m.a(x) + y).relu()) * y

    assert numbers(read_twice) == [0]


def test_one_pair_serves_all_readers():
    quantized = converted(lambda m, x: m.a(x) + m.b(x).relu() * m.c(x))
    assert pairs(quantized) == 1
    (pair,) = filter(is_dequantized, quantized.graph.nodes)
    assert len(pair.users) == 3


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (lambda x: F.max_pool2d(x, 2), "max_pool2d"),
        (lambda x: x.permute(0, 1, 3, 2), "permute"),
        (lambda x: x.view(-1, 4, 4, 16), "view"),
        (lambda x: F.interpolate(x, scale_factor=2.0), "upsample_nearest2d"),
        (lambda x: F.pad(x, (1, 1, 1, 1)), "pad"),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), "pad"),
        (lambda x: x[:, :, 1:], "slice"),
        (lambda x: x.transpose(2, 3).transpose(2, 3), "transpose"),
    ],
)
def test_quantization_moves_before_exact_operators(move, name):
    quantized = converted(lambda m, x: m.b(move(m.a(x).relu())))
    assert pairs(quantized) == 2
    assert inputs(quantized, name) == ["dequantize_per_tensor"]
    assert inputs(quantized, "conv2d", 1) == [name, "dequantize_per_channel"]


def test_padding_with_other_values_is_not_exact():
    quantized = converted(lambda m, x: m.b(F.pad(m.a(x).relu(), (1, 1), value=1.0)))
    assert inputs(quantized, "conv2d", 1) == ["dequantize_per_tensor", "dequantize_per_channel"]
    assert pairs(quantized) == 2


def test_moved_values_are_those_of_quantizing_afterwards():
    net = Net(lambda m, x: m.b(F.max_pool2d(m.a(x).relu(), 2))).eval()
    prepared = calibrate(net, (IMAGE,))
    quantized = convert_prepared(prepared)
    scale = prepared.tensor_scales()[":relu:0"]
    first = quantize(Net(lambda m, x: m.a(x).relu()).eval(), (IMAGE,))
    first.load_state_dict(net.state_dict())
    exact = F.max_pool2d(first(IMAGE), 2)
    rounded = torch.round(exact / scale.scale).clamp(0, 255) * scale.scale
    grid = torch.fx.Interpreter(quantized, garbage_collect_values=False)
    grid.run(IMAGE)
    torch.testing.assert_close(grid.env[node_of(quantized, "max_pool2d")], rounded)


def test_a_view_has_a_copy_for_readers_in_floating_point():
    def function(m, x):
        y = F.gelu(m.l(x))
        y = y.transpose(0, 1)
        return m.m(y), y.softmax(-1)

    quantized = converted(function, torch.randn(2, 3, 4))
    assert operators(quantized)["transpose"] == 2
    assert inputs(quantized, "softmax") == ["transpose"]
    transposes = [n for n in quantized.graph.nodes if is_operator(n, "transpose")]
    assert sorted(is_dequantized(n.args[0]) for n in transposes) == [False, True]


def test_work_runs_once_in_floating_point_where_a_reader_wants_that():
    def function(m, x):
        y = F.max_pool2d(m.a(x).relu(), 2)
        return m.b(y), y.sigmoid()

    quantized = converted(function)
    assert operators(quantized)["max_pool2d"] == 1
    assert inputs(quantized, "max_pool2d") == ["relu"]
    assert inputs(quantized, "sigmoid") == ["max_pool2d"]


def test_edges_inside_of_fused_chains_stay_float():
    quantized = converted(lambda m, x: m.b(F.relu6(m.a(x) + x)))
    assert pairs(quantized) == 2
    assert inputs(quantized, "add") == ["conv2d", "dequantize_per_tensor"]
    assert inputs(quantized, "relu6") == ["add"]


def test_what_a_linear_layer_is_added_to_stays_float():
    quantized = converted(lambda m, x: m.m(m.l(x) + x), torch.randn(3, 4))
    assert pairs(quantized) == 2
    assert inputs(quantized, "add") == ["linear"]  # and the input itself


def test_pools_are_quantized_between_quantized_layers():
    quantized = converted(lambda m, x: m.l(F.adaptive_avg_pool2d(m.a(x).relu(), 1).flatten(1)))
    assert pairs(quantized) == 3
    assert inputs(quantized, "adaptive_avg_pool2d") == ["dequantize_per_tensor"]
    alone = converted(lambda m, x: m.l(F.adaptive_avg_pool2d(x.sin(), 1).flatten(1)))
    assert pairs(alone) == 1
    assert inputs(alone, "adaptive_avg_pool2d") == ["sin"]
    last = converted(lambda m, x: F.avg_pool2d(m.a(x), 2))
    assert pairs(last) == 1


def test_a_relu_of_a_quantized_tensor_is_not_quantized_again():
    quantized = converted(lambda m, x: m.a((y := x.sin()).relu()) + m.b(y))
    assert pairs(quantized) == 1
    assert inputs(quantized, "relu") == ["dequantize_per_tensor"]


def test_concatenated_layers_share_a_scale():
    net = Net(lambda m, x: torch.cat([m.a(x).relu(), m.b(x).relu() * 1, m.c(x)], 1)[:, :4])
    quantized = converted(lambda m, x: m.c(torch.cat([m.a(x).relu(), m.b(x).relu()], 2)))
    assert pairs(quantized) == 3
    scales = quantized.tensor_scales()
    assert scales[":relu:0"] == scales[":relu:1"]
    (cat,) = [n for n in quantized.graph.nodes if is_operator(n, "cat")]
    assert all(map(is_dequantized, cat.args[0]))
    assert inputs(quantized, "conv2d", 2) == ["cat", "dequantize_per_channel"]
    assert pairs(quantize(net.eval(), (IMAGE,))) == 1  # nothing reads that concatenation quantized


def test_a_tensor_is_in_one_shared_scale_at_most():
    def function(m, x):
        y, z = m.a(x).relu(), m.b(x).relu()
        first = torch.cat([y, z], 2)
        return m.c(first), m.c(torch.cat([y, z.sin()], 3)), m.a(torch.cat([y, z], 3))

    quantized = converted(function)
    scales = quantized.tensor_scales()
    assert scales[":relu:0"] == scales[":relu:1"]
    assert [name for name in scales if "cat" in name] == [":cat:1"]


def test_concatenation_with_what_no_layer_made_has_a_scale_of_its_own():
    quantized = converted(lambda m, x: m.c(torch.cat([m.a(x).relu(), x.sin()], 2)))
    assert quantized.tensor_scales().keys() == {"input:0", ":cat:0"}


def test_attention_by_matmul():
    model, batch = build("bert", attn_implementation="eager")
    prepared = prepare_graph(model, DEFAULT, (), batch)
    with torch.no_grad():
        prepared(**batch)
    layers = {
        d.name.removeprefix("bert."): d for d in prepared.layer_decisions if "layer.0" in d.name
    }
    attention = "encoder.layer.0.attention.self"
    scores, mixed = layers[f"{attention}:matmul:0"], layers[f"{attention}:matmul:1"]
    assert [name.split(":")[0].split(".")[-1] for name in scores.inputs] == ["query", "key"]
    assert [name.split(":")[0].split(".")[-1] for name in mixed.inputs] == ["self", "value"]
    assert mixed.inputs[0].endswith(":softmax:0")


def test_scaled_dot_product_attention_stays_float():
    model, batch = build("bert", attn_implementation="sdpa")
    prepared = prepare_graph(model, DEFAULT, (), batch)
    assert {decision.operator for decision in prepared.layer_decisions} == {"linear"}
    query = next(d for d in prepared.layer_decisions if d.name.endswith("query:linear:0"))
    assert query.output == ""
    readers = [d for d in prepared.layer_decisions if d.inputs == query.inputs]
    assert len(readers) == 3  # query, key and value read one pair


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda m, x: x @ m.w, 1),
        (lambda m, x: torch.addmm(m.l.bias, x, m.w), 1),
        (lambda m, x: F.linear(x, m.w), 0),
    ],
)
def test_parameters_of_functions_are_weights(function, axis):
    quantized = converted(function, torch.randn(3, 4))
    assert pairs(quantized) == 1
    assert node_of(quantized, "quantize_per_channel").args[3] == axis
    assert quantized.layer_decisions[0].weight == "w"


def test_matmul_of_two_activations():
    quantized = converted(lambda m, x: torch.bmm(x, x.transpose(1, 2)).softmax(-1), IMAGE[0])
    assert pairs(quantized) == 1
    assert inputs(quantized, "bmm") == ["dequantize_per_tensor", "transpose"]


def test_embedding_bags_have_quantized_weights_alone():
    bag = nn.EmbeddingBag(10, 4, mode="sum")
    quantized = quantize(bag.eval(), (torch.randint(10, (3, 2)),))
    assert pairs(quantized) == 0
    assert operators(quantized)["quantize_per_channel"] == 1


def test_subclasses_and_functions_are_layers():
    class Mine(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight, self.bias, padding=1) * 1

    class Line(nn.Linear):
        pass

    model = nn.Sequential(Mine(4, 4, 3), nn.Flatten(), Line(256, 4))
    assert [d.quantized for d in quantize(model.eval(), (IMAGE,)).layer_decisions] == [True, True]


def test_a_module_that_is_called_twice_has_one_weight():
    quantized = converted(lambda m, x: m.l(m.l(x).relu()), torch.randn(3, 4))
    assert [d.name for d in quantized.layer_decisions] == ["l:linear:0", "l:linear:1"]
    assert pairs(quantized) == 2
    assert operators(quantized)["quantize_per_channel"] == 1


def test_weights_that_inputs_make_stay_float():
    quantized = converted(lambda m, x: F.linear(m.l(x), x), torch.randn(3, 4))
    first, second = quantized.layer_decisions
    assert first.quantized
    assert not second.quantized
    assert "computed from inputs" in second.reason


@pytest.mark.parametrize(
    "mapping",
    [
        SchemeMapping(Scheme(), by_module_name=(("a", None),)),
        SchemeMapping(Scheme(), by_module_name=(("a:conv2d:0", None),)),
        SchemeMapping(Scheme(), by_operator=(("conv2d", None),)),
        SchemeMapping(Scheme(), by_module_class=(("torch.nn.modules.conv.Conv2d", None),)),
        SchemeMapping(None, by_module_name=(("l", Scheme()),)),
        SchemeMapping(Scheme(), by_module_name=(("l", Scheme()),), by_operator=(("conv2d", None),)),
    ],
)
def test_layers_that_are_switched_off_stay_float(mapping):
    quantized = converted(lambda m, x: m.l(m.a(x).relu()), IMAGE[:, :, :, :4], mapping=mapping)
    conv, linear = quantized.layer_decisions
    assert conv.operator == "conv2d"
    assert not conv.quantized
    assert "switched off" in conv.reason
    assert linear.quantized
    assert inputs(quantized, "conv2d") == []


def test_the_longest_path_decides():
    names = (("layer1", None), ("layer1.conv2", Scheme()))
    prepared = prepare_graph(ResNet(), SchemeMapping(Scheme(), names), (torch.randn(1, 3, 32, 32),))
    off = [d.name for d in prepared.layer_decisions if not d.quantized]
    assert off == ["layer1.conv1:conv2d:0"]


def test_symmetric_activations_are_int8():
    mapping = SchemeMapping(Scheme(symmetric=True))
    quantized = converted(lambda m, x: m.b(m.a(x)), mapping=mapping)
    for node in filter(is_dequantized, quantized.graph.nodes):
        assert node.args[3:] == (-128, 127, torch.int8)
    assert {scale.zero_point for scale in quantized.tensor_scales().values()} == {0}


def test_weights_with_one_scale():
    mapping = SchemeMapping(Scheme(per_channel=False))
    quantized = converted(lambda m, x: m.a(x), mapping=mapping)
    node = node_of(quantized, "quantize_per_channel")
    interpreter = torch.fx.Interpreter(quantized, garbage_collect_values=False)
    interpreter.run(IMAGE)
    scales = interpreter.env[node.args[1]]
    assert scales.shape == (4,)
    assert torch.equal(scales, (quantized.a.weight.abs().max() / 127.5).expand(4))


@pytest.mark.parametrize(
    ("function", "mapping", "reason"),
    [
        (lambda m, x: x.relu(), DEFAULT, "no such layers"),
        (lambda m, x: m.a(x), SchemeMapping(None), "switched off"),
        (lambda m, x: m.a(x), SchemeMapping(Scheme(dynamic=True)), "dynamic"),
    ],
)
def test_nothing_to_quantize_is_an_error(function, mapping, reason):
    with pytest.raises(QuantizationError, match=reason):
        prepare_graph(Net(function), mapping, (IMAGE,))


def test_batch_norms_that_cannot_be_folded_are_listed():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval()
    prepared = prepare_graph(model, DEFAULT, (IMAGE,))
    (norm,) = [d for d in prepared.layer_decisions if d.operator == "batch_norm"]
    assert norm.name == "0:batch_norm:0"
    assert "right before" in norm.reason
    unfolded = prepare_graph(model, DEFAULT, (IMAGE,), bn_folding=False)
    assert operators(unfolded)["batch_norm"] == 2


def test_double_precision_stays_float():
    model = nn.Sequential(nn.Linear(4, 4)).double()
    with pytest.raises(QuantizationError, match="no floating-point tensor"):
        prepare_graph(model, DEFAULT, (torch.randn(1, 4).double(),))
