"""The INT8 listings of the original documentation, but for their placeholders, and every import."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("instructions_known")

ROOT = Path(__file__).parents[2]

# What stands for the listings' placeholders: `MyModel(…)`, data, shapes.
PLACEHOLDERS = """
import torch

class MyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(self.norm(self.conv(x)).relu().mean((2, 3)))

def Model():
    return MyModel()

def calibration_data_loader():
    torch.manual_seed(1)
    for _ in range(3):
        yield torch.rand(2, 3, 8, 8)

shape = (2, 3, 8, 8)
sample_image = images = next(calibration_data_loader())
"""

FIRST = """
import torch
{ipex}
# First-time quantization flow
# construct the model
model = MyModel()
model.eval()
conf = ipex.QuantConf(dtype=torch.int8)
model, conf = ipex.quantization.prepare(model, conf)
for images in calibration_data_loader():
    # here, conf is in/out, populated with observed statistics
    with ipex.quantization.calibrate(conf):
        model(images)
conf.save('int8_conf.json', default_recipe=True) # optional: save the configuration for later use
model = ipex.quantization.convert(model, conf, sample_image)
# run the model
output = model(images)
"""

DEPLOYED = """
model = MyModel().eval()
# Deployment
{old}
conf = ipex.QuantConf('int8_conf.json')
model = ipex.quantization.convert(model, conf, sample_image)
output = model(images)
"""

CALIBRATION = """
import os
import torch
model = Model()
model.eval()
data = torch.rand(shape)
# Applying torch.fx.experimental.optimization.fuse against model performs
# conv-batchnorm folding for better performance.
import torch.fx.experimental.optimization as optimization
model = optimization.fuse(model, inplace=True)
#################### code changes ####################
{ipex}
conf = ipex.quantization.QuantConf(qscheme=torch.per_tensor_affine)
for d in calibration_data_loader():
    # conf will be updated with observed statistics during calibrating with the dataset
    with ipex.quantization.calibrate(conf):
        model(d)
conf.save('int8_conf.json', default_recipe=True)
with torch.no_grad():
    model = ipex.quantization.convert(model, conf, torch.rand(shape))
######################################################
model.save('quantization_model.pt')
"""

LOADED = """
import torch
#################### code changes ####################
{ipex}
######################################################
model = torch.jit.load('quantization_model.pt')
model.eval()
data = torch.rand(shape)
with torch.no_grad():
    model(data)
"""

# The typical script of releases 1.12 to 2.8.
STATIC = """
{ipex}
from {package}.quantization import prepare, convert
model = Model().eval()
data = torch.rand(shape)
qconfig_mapping = ipex.quantization.default_static_qconfig_mapping
prepared_model = prepare(model, qconfig_mapping, example_inputs=data, inplace=False)
for d in calibration_data_loader():
    prepared_model(d)
prepared_model.save_qconf_summary(qconf_summary="configure.json")
converted_model = convert(prepared_model)
with torch.no_grad():
    traced_model = torch.jit.trace(converted_model, data)
    traced_model = torch.jit.freeze(traced_model)
    for _ in range(2):
        y = traced_model(data)
traced_model.save("quantized_model.pt")

# Redeploy
prepared_model = prepare(Model().eval(), qconfig_mapping, example_inputs=data, inplace=False)
prepared_model.load_qconf_summary(qconf_summary="configure.json")
assert torch.equal(convert(prepared_model)(data), converted_model(data))
assert torch.allclose(torch.jit.load("quantized_model.pt")(data), y)
"""

CUSTOM = """
{ipex}
from {package}.quantization import prepare, convert
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver, QConfig, QConfigMapping
qconfig = QConfig(
        activation=MinMaxObserver.with_args(qscheme=torch.per_tensor_affine, dtype=torch.quint8),
        weight=PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric))
qconfig_mapping = QConfigMapping().set_global(qconfig)
model = Model().eval()
prepared_model = prepare(model, qconfig_mapping, example_inputs=torch.rand(shape), inplace=False)
for d in calibration_data_loader():
    prepared_model(d)
output = convert(prepared_model)(torch.rand(shape))
"""

DYNAMIC = """
{ipex}
from {package}.quantization import prepare, convert
dynamic_qconfig = ipex.quantization.default_dynamic_qconfig_mapping
model = Model().eval()
data = torch.rand(shape)
prepared_model = prepare(model, dynamic_qconfig, example_inputs=data)
converted_model = convert(prepared_model)
with torch.no_grad():
    traced_model = torch.jit.trace(converted_model, data)
    output = traced_model(data)
"""

OURS = {
    "ipex": "import ipex_inductor as ipex",
    "old": "import ipex_inductor as ipex",
    "package": "ipex_inductor",
}
THEIRS = {
    "ipex": "import intel_extension_for_pytorch as ipex",
    "old": "import intel_pytorch_extension as ipex",
    "package": "intel_extension_for_pytorch",
}
FLOWS = {
    "readme": [FIRST, DEPLOYED],
    "tutorial": [CALIBRATION, LOADED],
    "static": [STATIC],
    "custom": [CUSTOM],
    "dynamic": [DYNAMIC],
}


# Two programs each; the files and the numbers are those of the other names. Each flow runs each
# time by one set of names.
ALSO = [pytest.param(flow, OURS, marks=[pytest.mark.slow] * (flow != "static")) for flow in FLOWS]
OLD = [pytest.param(flow, THEIRS, marks=[pytest.mark.slow] * (flow == "static")) for flow in FLOWS]


@pytest.mark.parametrize(("flow", "names"), [*OLD, *ALSO])
def test_a_listing_runs_in_processes_of_its_own(flow, names, tmp_path):
    runner = [] if names is OURS else ["-m", "ipex_inductor.as_ipex"]
    for number, listing in enumerate(FLOWS[flow]):
        program = tmp_path / f"program_{number}.py"
        program.write_text(textwrap.dedent(PLACEHOLDERS) + listing.format(**names))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *runner, program.name],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
