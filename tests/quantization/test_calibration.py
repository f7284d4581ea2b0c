"""`QuantConf` and `calibrate`: what is observed, what is left as it was, and what is refused."""

import json
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ipex_inductor import quantization
from ipex_inductor.errors import QuantizationError, SummaryFileError
from ipex_inductor.quantization import QuantConf, calibrate, convert, prepare


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, flip=False):
        y = self.second(self.first(x).relu()).relu()
        return self.third(-y if flip else y)


def hooks():
    names = [name for name in vars(torch_module) if name.startswith("_global_forward")]
    return {n: dict(v) for n in names if isinstance(v := getattr(torch_module, n), dict)}


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    before, call = hooks(), nn.Module.__call__
    yield
    assert hooks() == before
    assert nn.Module.__call__ is call


def data(count=3):
    return [torch.randn(4, 8) * (n + 1) for n in range(count)]


def calibrated(net, inputs, conf=None):
    conf = conf or QuantConf()
    for x in inputs:
        with calibrate(conf):
            net(x)
    return conf


def scale_of_input(conf):
    return conf.only_graph().tensor_scales()["input:0"].scale


@torch.no_grad()
def test_blocks_and_calls_accumulate():
    net, inputs = Net().eval(), data()
    several, one = calibrated(net, inputs), QuantConf()
    with calibrate(one, default_recipe=True):
        for x in inputs:
            net(x)
    assert several.only_graph().tensor_scales() == one.only_graph().tensor_scales()
    assert scale_of_input(one) > 2 * scale_of_input(calibrated(net, inputs[:1]))


@torch.no_grad()
def test_it_decorates():
    net, conf = Net().eval(), QuantConf()

    @calibrate(conf)
    def run(x):
        return net(x)

    results = [run(x) for x in data()]
    assert len(conf.graphs()) == 1
    assert results[0].shape == (4, 4)


def test_the_model_is_as_before():
    net, x = Net(), data()[0]
    before = {**vars(net)}, {n: v.clone() for n, v in net.state_dict().items()}, net.training
    conf = calibrated(net, [x])
    quantized = convert(net, conf, x)
    assert (vars(net).keys(), net.training) == (before[0].keys(), before[2])
    assert all(torch.equal(v, before[1][n]) for n, v in net.state_dict().items())
    assert not net._forward_hooks
    assert {*quantized.state_dict()} == {*net.state_dict()}
    net(x).sum().backward()  # under no_grad of ours it would fail
    assert net.first.weight.grad is not None


@torch.no_grad()
def test_hooks_go_after_errors():
    net, conf = Net().eval(), QuantConf()
    with pytest.raises(ZeroDivisionError), calibrate(conf):
        1 / 0  # noqa: B018
    with pytest.raises(RuntimeError), calibrate(conf):
        net(torch.randn(4, 7))
    assert conf.graphs() == []


@torch.no_grad()
def test_a_call_that_fails_is_not_observed_and_the_next_is():
    net, conf, inputs = Net().eval(), QuantConf(), data(1)
    with calibrate(conf):
        with pytest.raises(RuntimeError):
            net(torch.randn(4, 7) * 1000)
        net(inputs[0])
    assert conf.only_graph().tensor_scales() == calibrated(net, inputs).only_graph().tensor_scales()


@torch.no_grad()
def test_other_threads_are_not_observed():
    net, conf = Net().eval(), QuantConf()
    with calibrate(conf):
        thread = threading.Thread(target=lambda: net(data()[0]))
        thread.start()
        thread.join()
    assert conf.graphs() == []


@torch.no_grad()
def test_blocks_in_blocks_observe_their_own():
    net, outer, inner, x = Net().eval(), QuantConf(), QuantConf(), data()[0]
    with calibrate(outer), calibrate(inner):
        net(x)
    assert outer.only_graph().tensor_scales() == inner.only_graph().tensor_scales()
    assert len(outer.graphs()) == len(inner.graphs()) == 1


@torch.no_grad()
def test_keyword_arguments_and_a_loss_are_no_trouble():
    net, conf, loss = Net().eval(), QuantConf(), nn.MSELoss()
    with calibrate(conf):
        loss(net(x=data()[0]), torch.zeros(4, 4))
    assert len(conf.graphs()) == 1


@torch.no_grad()
def test_the_input_is_observed_as_it_was_before_the_call():
    class Writes(Net):
        def forward(self, x):
            return super().forward(x.mul_(100))

    conf = QuantConf()
    with calibrate(conf):
        Writes().eval()(torch.ones(4, 8))
    assert conf.only_graph().tensor_observers


@torch.no_grad()
def test_a_model_that_was_prepared_is_observed_inside_of_others():
    net, x = Net().eval(), data()[0]
    model, conf = prepare(net, QuantConf())
    assert model is net
    with calibrate(conf):
        nn.Sequential(nn.Linear(8, 8), model, nn.Linear(4, 4))(x)
    assert [layer.name for layer in conf.only_graph().layer_decisions] == [
        "first:linear:0",
        "second:linear:0",
        "third:linear:0",
    ]


@torch.no_grad()
def test_a_compiled_model_is_observed_by_its_code():
    net, conf, x = Net().eval(), QuantConf(), data()[0]
    compiled = torch.compile(net, backend="eager")
    with calibrate(conf), pytest.warns(UserWarning, match="global hooks"):
        compiled(x)
    assert convert(net, conf, x)(x).shape == (4, 4)


def test_inference_mode_and_autocast_observe_the_same():
    net, x = Net().eval(), data()[0]
    with torch.inference_mode():
        inferred = calibrated(net, [x])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cast = calibrated(net, [x])
    with torch.no_grad():
        plain = calibrated(net, [x])
        assert torch.equal(convert(net, inferred, x)(x), convert(net, plain, x)(x))
    scales = [conf.only_graph().tensor_scales() for conf in (inferred, cast, plain)]
    assert scales[0] == scales[1] == scales[2]


@torch.no_grad()
def test_another_model_with_the_same_layers_gets_the_scales():
    inputs = data()
    conf, other = calibrated(Net().eval(), inputs), Net().eval()
    quantized = convert(other, conf, inputs[0])
    assert quantized.tensor_scales() == conf.only_graph().tensor_scales()
    with pytest.raises(QuantizationError, match="differs in "):
        convert(nn.Sequential(nn.Linear(8, 4)), conf, inputs[0])


@torch.no_grad()
def test_layers_called_one_by_one_are_refused():
    net, conf, x = Net().eval(), QuantConf(), data()[0]
    with calibrate(conf):
        net.second(net.first(x))
    with pytest.raises(QuantizationError, match=r"2 with layers to quantize .*Linear, Linear"):
        convert(net, conf, x)


@torch.no_grad()
@pytest.mark.parametrize("qscheme", [torch.per_tensor_affine, torch.per_tensor_symmetric])
def test_a_file_of_save_deploys(qscheme, tmp_path):
    net, inputs, file = Net().eval(), data(), tmp_path / "conf.json"
    conf = calibrated(net, inputs, QuantConf(qscheme=qscheme))
    conf.save(file, default_recipe=True)
    entries = json.loads(file.read_text())
    assert [entry["name"] for entry in entries] == ["linear"] * 3
    kind = "int8" if qscheme is torch.per_tensor_symmetric else "uint8"
    assert entries[0]["input_quantized_dtypes"] == [kind]
    deployed = QuantConf(str(file), qscheme=qscheme)
    expected = convert(net, conf, inputs[0])(inputs[0])
    assert torch.equal(convert(net, deployed, (inputs[0],))(inputs[0]), expected)


@torch.no_grad()
def test_layers_are_switched_off_by_hand(tmp_path):
    net, inputs, file = Net().eval(), data(), tmp_path / "conf.json"
    calibrated(net, inputs).save(file, default_recipe=False)
    entries = json.loads(file.read_text())
    assert all(all(entry["inputs_quantized"]) for entry in entries)
    entries[1]["inputs_quantized"] = [False]
    file.write_text(json.dumps(entries))
    quantized = convert(net, QuantConf(file), inputs[0])
    assert [layer.quantized for layer in quantized.layer_decisions] == [True, False, True]


# Traps, and what is refused


def test_a_configuration_without_data_is_refused(tmp_path):
    net, x = Net().eval(), data()[0]
    conf = QuantConf()
    with calibrate(conf):
        pass
    with pytest.raises(QuantizationError, match="a calibrated configuration"):
        convert(net, conf, x)
    with pytest.raises(QuantizationError, match="one calibrated model"):
        conf.save(tmp_path / "conf.json")
    assert not list(tmp_path.iterdir())


def test_a_missing_file_is_refused_when_it_is_needed(tmp_path):
    conf = QuantConf(tmp_path / "none.json")
    with pytest.raises(SummaryFileError, match="no file"):
        convert(Net().eval(), conf, data()[0])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}'])
def test_a_torn_or_foreign_file_is_refused(text, tmp_path):
    (tmp_path / "conf.json").write_text(text)
    with pytest.raises(SummaryFileError, match="empty, torn or foreign"):
        QuantConf(tmp_path / "conf.json")


def test_a_file_of_another_model_is_refused(tmp_path):
    calibrated(Net().eval(), data()).save(tmp_path / "conf.json")
    with pytest.raises(SummaryFileError, match="second:linear:0: 1 in the file, 0 here"):
        convert(nn.Sequential(nn.Linear(8, 4)), QuantConf(tmp_path / "conf.json"), data()[0])


def test_arguments_that_cannot_be_are_refused():
    with pytest.raises(QuantizationError, match="per_channel_affine"):
        QuantConf(qscheme=torch.per_channel_affine)
    with pytest.raises(ValueError, match=r"dtype=torch[.]float16"):
        QuantConf(dtype=torch.float16)
    with pytest.raises(QuantizationError, match="a QuantConf"), calibrate(None):
        pass
    conf = QuantConf()
    with pytest.raises(QuantizationError, match="example inputs"):
        convert(Net(), conf)
    with pytest.raises(QuantizationError, match="a model that `prepare` returned"):
        convert(Net())
    assert QuantConf(torch.int8).configure_file is None


@torch.no_grad()
def test_activations_that_are_not_finite_are_refused():
    net, conf = Net().eval(), QuantConf()
    with calibrate(conf), pytest.raises(QuantizationError, match="finite activations"):
        net(torch.full((4, 8), float("nan")))


def test_a_model_that_cannot_be_captured_says_what_to_do():
    class Branches(Net):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with calibrate(QuantConf()), pytest.raises(QuantizationError, match="dynamic quantization"):
        Branches().eval()(torch.ones(4, 8))


@torch.no_grad()
def test_traps_of_the_new_api():
    net, x = Net().eval(), data()[0]
    static = quantization.default_static_qconfig_mapping
    with pytest.raises(QuantizationError, match="example inputs"):
        prepare(net, static)
    with pytest.raises(QuantizationError, match="a calibrated model"):
        convert(prepare(net, static, x))
    with pytest.raises(SummaryFileError, match="no file"):
        prepare(net, static, x).load_qconf_summary(qconf_summary="none.json")
    sequential = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    image = torch.randn(1, 3, 4, 4)
    prepared = prepare(sequential, static, image)
    prepared(image)
    converted = convert(prepared)
    torch.testing.assert_close(converted(image), sequential(image), atol=0.05, rtol=0.05)


def test_the_memory_format_of_weights_stays():
    net = nn.Conv2d(8, 8, 3)
    strides = net.weight.stride()
    prepare(net, quantization.default_static_qconfig_mapping, torch.randn(1, 8, 8, 8))
    assert net.weight.stride() == strides
