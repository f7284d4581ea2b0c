"""Captured graphs: shared parameters, stable names, any sizes; the caller's module stays."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.capture import capture_graph
from ipex_inductor.quantization.graphs.in_place import CHANGED
from support.int8_models import ResNet, operators
from support.tiny_models import build

X = torch.randn(1, 3, 32, 32)


def layers(module):
    return [n.meta["layer"] for n in module.graph.nodes if n.op == "call_function"]


class Twice(nn.Module):
    """One linear layer, called twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, *, scale=None):
        x = self.inner(F.relu(self.inner(x)))
        return {"scaled": x if scale is None else x * scale, "both": (x, x.sum(-1))}


def test_parameters_and_buffers_are_the_models():
    model = ResNet()
    captured = capture_graph(model, (X,))
    expected = model.state_dict(keep_vars=True)
    state = captured.state_dict(keep_vars=True)
    assert state.keys() == expected.keys()
    assert all(state[name] is expected[name] for name in state)


@pytest.mark.sampled("gpt2")
@pytest.mark.parametrize("name", ["gpt2", "t5"])  # tied weights, and constants in the graph
def test_tied_parameters_have_all_their_names(name):
    model, inputs = build(name)
    captured = capture_graph(model, (), inputs)
    assert captured.state_dict().keys() == model.state_dict().keys()


def test_the_module_stays_as_it_was():
    model = ResNet()
    model.layer1.eval()
    model.to(memory_format=torch.channels_last)
    modes = [module.training for module in model.modules()]
    state = {name: (t.data_ptr(), t.stride()) for name, t in model.state_dict().items()}
    values = {name: t.clone() for name, t in model.state_dict().items()}
    captured = capture_graph(model, (X,))
    assert [module.training for module in model.modules()] == modes
    assert {name: (t.data_ptr(), t.stride()) for name, t in model.state_dict().items()} == state
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])
    with torch.no_grad():  # in eval mode, whatever the model's mode is
        assert torch.equal(captured(X), model.eval()(X))


def test_a_failed_capture_restores_the_modes():
    class Refusing(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = Refusing()
    with pytest.raises(QuantizationError, match=r"Refusing.*dynamic quantization"):
        capture_graph(model, (X,))
    assert model.training


def test_calls_are_named_by_module_operator_and_number():
    captured = capture_graph(Twice(), (torch.randn(1, 4),))
    names = [layer.name for layer in layers(captured)]
    assert names == ["inner:linear:0", ":relu:0", "inner:linear:1", ":sum:0"]
    again = capture_graph(Twice(), (torch.randn(3, 4),))
    assert [layer.name for layer in layers(again)] == names


def test_layers_have_the_classes_of_their_module_and_of_those_around_it():
    class Mine(nn.Linear):
        pass

    captured = capture_graph(nn.Sequential(Mine(4, 4)), (torch.randn(1, 4),))
    (layer,) = layers(captured)
    mine, linear, sequential = layer.classes
    assert mine.endswith("Mine")
    assert linear == "torch.nn.modules.linear.Linear"
    assert sequential == "torch.nn.modules.container.Sequential"


def test_sizes_and_keywords_differ_from_the_examples():
    model = Twice()
    captured = capture_graph(model, (torch.randn(1, 4),), {"scale": torch.ones(1, 4)})
    x, scale = torch.randn(7, 4), torch.randn(7, 4)
    expected, result = model(x, scale=scale), captured(x, scale=scale)
    assert result.keys() == {"scaled", "both"}
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("batch", [1, 2])
def test_images_of_any_batch_and_size(batch):
    model = ResNet().eval()
    captured = capture_graph(model, (torch.randn(batch, 3, 32, 32),))
    x = torch.randn(7, 3, 40, 48)
    with torch.no_grad():
        assert torch.equal(captured(x), model(x))


def test_dimensions_of_one_element_broadcast():
    model = Function(lambda x, y: x * y)
    x, y = torch.randn(2, 4, 5), torch.randn(1, 4, 1)
    captured = capture_graph(model, (x, y))
    x = torch.randn(3, 4, 6)
    assert torch.equal(captured(x, y), x * y)


def test_autocast_is_off():
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture_graph(nn.Linear(4, 4), (torch.randn(1, 4),))
    assert operators(captured) == {"linear": 1}
    assert captured(torch.randn(2, 4)).dtype is torch.float32


def test_in_place_operators_return_a_new_tensor():
    def change(x):
        y = x * 2
        y.add_(1)
        z = y.relu_()
        return y + z

    captured = capture_graph(Function(change), (X,))
    assert operators(captured) == {"mul": 1, "add": 2, "relu": 1}
    assert torch.equal(captured(X), change(X))


def test_a_view_that_is_changed_marks_all_that_share_its_memory():
    def change(x):
        y = x * 2
        y.view(-1).relu_()
        return y + 1

    captured = capture_graph(Function(change), (X,))
    assert torch.equal(captured(X), change(X))
    changed = [node.name for node in captured.graph.nodes if node.meta.get(CHANGED)]
    assert changed == ["mul", "view", "relu_"]


def scale_lists(x):
    first, second = x * 2, x * 3
    torch._foreach_mul_([first, second], 5.0)
    return first + second


def write_out(x):
    result = torch.zeros_like(x)
    torch.mul(x, 3.0, out=result)
    return result + 1


def broadcast(x):
    y = x * 2
    torch.broadcast_tensors(y, y)[0].mul_(7)
    return y + 1


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (scale_lists, {"mul", "mul_1"}),
        (write_out, {"zeros_like"}),
        (broadcast, {"mul"}),
    ],
)
def test_all_written_tensors_are_marked(change, names):
    captured = capture_graph(Function(change), (X,))
    assert torch.equal(captured(X), change(X))
    changed = {node.name for node in captured.graph.nodes if node.meta.get(CHANGED)}
    assert names <= changed
    assert "add" not in changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_operators_keep_the_type_of_the_changed_tensor(dtype):
    def change(x):
        y = x * 2
        y += torch.full((3, 1, 1), 0.3, dtype=torch.float64)
        z = x * 1
        return y, z.gt_(0)

    captured = capture_graph(Function(change), (X.to(dtype),))
    for result, expected in zip(captured(X.to(dtype)), change(X.to(dtype)), strict=True):
        assert result.dtype is dtype
        assert torch.equal(result, expected)


def test_dropout_of_inference_and_whole_slices_are_no_nodes():
    captured = capture_graph(Function(lambda x: F.dropout(x, training=False)[:, None] + 1), (X,))
    assert operators(captured) == {"unsqueeze": 1, "add": 1}
    in_place = capture_graph(Function(lambda x: nn.Dropout(inplace=True).eval()(x.flatten())), (X,))
    assert operators(in_place) == {"flatten": 1}
    random = capture_graph(Function(lambda x: F.dropout(x, training=True) + 1), (X,))
    assert operators(random) == {"dropout": 1, "add": 1}


def test_conversions_leave_no_checks_of_dtypes():
    captured = capture_graph(Function(lambda x: x.half().to(torch.float32) * 2), (X,))
    assert operators(captured) == {"to": 2, "mul": 1}


def test_threads_capture_models_of_their_own():
    errors = []

    def capture():
        try:
            for _ in range(4):
                model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
                capture_graph(model, (torch.randn(2, 3, 9, 9),))
        except QuantizationError as error:
            errors.append(error)

    threads = [threading.Thread(target=capture) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not torch.compiler.is_compiling()


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)
