"""Files of quantized models: TorchScript, and weights with a description."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from ipex_inductor import quantization
from ipex_inductor.errors import QuantizationError, SummaryFileError
from ipex_inductor.quantization.files import tensor_file

STATIC = quantization.default_static_qconfig_mapping
SMOOTH = quantization.get_smooth_quant_qconfig_mapping()
CORRECTED = quantization.QConfigMapping().set_global(quantization.Scheme(bias_correction=True))


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.linear = nn.Linear(width, 4)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x, scale=None):
        y = self.norm(self.conv(x)).relu().mean((2, 3)).view(x.shape[0], -1)
        y = self.linear(y)
        return y if scale is None else {"result": y * scale["factor"]}


def quantize(net, mapping=STATIC, kwargs=None, size=8):
    inputs = [torch.randn(2, 3, size, size) for _ in range(3)]
    prepared = quantization.prepare(net, mapping, inputs[0], example_kwarg_inputs=kwargs)
    for x in inputs:
        prepared(x, **(kwargs or {}))
    return quantization.convert(prepared), inputs[0]


LOAD = """
import sys, torch
model, x, expected = (sys.argv[1] + name for name in ("/m.pt", "/x.pt", "/y.pt"))
model = torch.jit.load(model).eval()
x = torch.load(x)
with torch.no_grad():
    assert torch.equal(model(x), torch.load(expected))
    assert model(torch.cat([x, x, x])).shape[0] == 6
assert "ipex_inductor" not in sys.modules
"""


@torch.no_grad()
def test_a_torchscript_file_needs_torch_alone(tmp_path):
    quantized, x = quantize(Net().eval())
    quantized.save(tmp_path / "m.pt")
    torch.save(x, tmp_path / "x.pt")
    torch.save(quantized(x), tmp_path / "y.pt")
    command = [sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@torch.no_grad()
def test_a_torchscript_file_of_keyword_arguments(tmp_path):
    kwargs = {"scale": {"factor": torch.tensor(2.0)}}
    quantized, x = quantize(Net().eval(), kwargs=kwargs)
    quantized.save(tmp_path / "m.pt")
    loaded = torch.jit.load(tmp_path / "m.pt")
    assert torch.equal(loaded(x, **kwargs)["result"], quantized(x, **kwargs)["result"])


@torch.no_grad()
def test_converted_under_autocast_a_file_computes_in_bf16(tmp_path):
    conf, net, x = quantization.QuantConf(), Net().eval(), torch.randn(2, 3, 8, 8)
    with quantization.calibrate(conf):
        net(x)
    with torch.autocast("cpu", torch.bfloat16):
        quantized = quantization.convert(net, conf, x)
        expected = quantized(x)
    quantized.save(tmp_path / "m.pt")
    result = torch.jit.load(tmp_path / "m.pt")(x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    "mapping", [STATIC, SMOOTH, CORRECTED], ids=["static", "smooth", "corrected"]
)
def test_a_model_comes_back_on_other_weights(mapping, tmp_path):
    net = Net().eval()
    quantized, x = quantize(net, mapping)
    quantization.save(quantized, tmp_path / "net")
    assert {f.name for f in tmp_path.iterdir()} == {"net.safetensors", "net.json"}
    fresh = Net().eval()
    before = fresh(x)
    loaded = quantization.load(tmp_path / "net", fresh)
    assert torch.equal(loaded(x), quantized(x))
    assert torch.equal(fresh(x), before)
    state = loaded.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    loaded.save(tmp_path / "again.pt")
    assert torch.equal(torch.jit.load(tmp_path / "again.pt")(x), quantized(x))
    x = torch.randn(5, 3, 12, 12)
    assert torch.equal(loaded(x), quantized(x))


@torch.no_grad()
def test_a_summary_has_the_means_of_corrected_biases(tmp_path):
    net = Net().eval()
    quantized, x = quantize(net, CORRECTED)
    prepared = quantization.prepare(net, CORRECTED, x)
    prepared(x)
    prepared.save_qconf_summary(tmp_path / "conf.json")
    again = quantization.prepare(net, CORRECTED, x)
    again.load_qconf_summary(tmp_path / "conf.json")
    assert torch.equal(quantization.convert(again)(x), quantization.convert(prepared)(x))
    assert not torch.equal(quantize(net)[0](x), quantized(x))


@torch.no_grad()
def test_layers_in_floating_point_stay_so(tmp_path):
    mapping = quantization.QConfigMapping().set_global(quantization.default_static_qconfig)
    mapping.set_module_name("linear", None)
    quantized, x = quantize(Net().eval(), mapping)
    quantization.save(quantized, tmp_path / "net.safetensors")
    loaded = quantization.load(tmp_path / "net.safetensors", Net().eval())
    assert torch.equal(loaded(x), quantized(x))
    assert [(d.name, d.quantized) for d in loaded.layer_decisions] == [
        ("conv:conv2d:0", True),
        ("linear:linear:0", False),
    ]


@torch.no_grad()
def test_torn_changed_and_foreign_files_are_refused(tmp_path):
    quantized, _ = quantize(Net().eval())
    quantization.save(quantized, tmp_path / "net")
    weights, text = tmp_path / "net.safetensors", (tmp_path / "net.json").read_text()
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    with pytest.raises(SummaryFileError, match="torn or changed"):
        quantization.load(tmp_path / "net", Net())
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(SummaryFileError, match="torn or changed"):
        quantization.load(tmp_path / "net", Net())
    weights.write_bytes(whole)
    with pytest.raises(SummaryFileError, match=r"differs in .*conv[.]weight"):
        quantization.load(tmp_path / "net", Net(width=16))
    for content in ("", text[:100], "[]", json.dumps({**json.loads(text), "version": 3})):
        (tmp_path / "net.json").write_text(content)
        with pytest.raises(SummaryFileError, match="torn or foreign"):
            quantization.load(tmp_path / "net", Net())
    (tmp_path / "net.json").unlink()
    with pytest.raises(SummaryFileError, match="no file"):
        quantization.load(tmp_path / "net", Net())


def test_a_model_that_was_not_quantized_is_refused(tmp_path):
    with pytest.raises(QuantizationError, match="a statically quantized model"):
        quantization.save(Net(), tmp_path / "net")


def test_tensors_of_every_type_come_back(tmp_path):
    tensors = {
        name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in tensor_file.DTYPES.items()
    }
    tensors |= {"empty": torch.empty(0, 3), "one": torch.tensor(2.5)}
    digest = tensor_file.write_tensors(tmp_path / "t", tensors)
    back = tensor_file.read_tensors(tmp_path / "t", digest)
    assert list(back) == list(tensors)
    for name, value in tensors.items():
        assert torch.equal(back[name], value)
        assert back[name].dtype == value.dtype
    safetensors = pytest.importorskip("safetensors.torch")
    assert torch.equal(safetensors.load_file(tmp_path / "t")["BF16"], tensors["BF16"])
