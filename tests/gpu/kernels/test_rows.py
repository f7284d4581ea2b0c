"""Linear layers of many rows on a GPU, by our products of rows, as Inductor has them.

Convolutions of one pixel, and values of many shapes, are in `test_conv_templates.py`.
"""

import pytest
import torch

from ipex_inductor.autotune import measure
from ipex_inductor.autotune.measure import Candidate
from ipex_inductor.lowerings.problem.workload import function_of, inputs_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import compiling, tuner
from ipex_inductor.target import device
from ipex_inductor.templates.triton import persistent, software_pipelined, weight_stationary
from support.cases.skinny_cases import linear

pytestmark = pytest.mark.gpu

A100 = "sm_80:NVIDIA-A100-SXM4-80GB"  # what is for those runs on any later GPU
PROBLEMS = {
    "streamed": (weight_stationary.NAME, "bfloat16", 8192, 512, 128, "gelu"),
    "streamed, odd sizes": (weight_stationary.NAME, "float16", 4099, 301, 200, "silu"),
    "persistent": (persistent.NAME, "bfloat16", 2048, 768, 512, "gelu"),
    "persistent, odd sizes": (persistent.NAME, "float16", 1101, 1000, 776, "gelu_tanh"),
    "persistent, many terms": (persistent.NAME, "bfloat16", 1101, 520, 8216, "silu"),
    "pipelined": (software_pipelined.NAME, "bfloat16", 4096, 1536, 512, "gelu"),
    "pipelined, odd sizes": (software_pipelined.NAME, "float16", 1101, 1001, 776, "silu"),
    "pipelined, a head of words": (software_pipelined.NAME, "bfloat16", 384, 50257, 768, "none"),
    "padded, a head of words": ("aten.addmm_padded", "bfloat16", 384, 50257, 768, "none"),
    "pipelined, added": (software_pipelined.NAME, "bfloat16", 4099, 1000, 4096, "relu", "add"),
}


@pytest.mark.parametrize("name", PROBLEMS)
@torch.no_grad()
def test_through_inductor_and_captured_in_a_graph(name):
    """No farther off than torch's own may be; replayed on other numbers, the same to the bit."""
    kind, *sizes = PROBLEMS[name]
    here = str(device.current("cuda"))
    even = sizes[2] % 8 == 0
    arch = A100 if kind == software_pipelined.NAME and even else here
    problem = linear(*sizes, arch=arch)
    trial = tuner._trial(problem, torch.device("cuda"))
    calls = [call for call in library.calls(problem) if call.name == kind]
    if not calls:
        pytest.skip("it is for Hopper's copy engine")
    for call in calls[:2]:
        run = compiling.compile_choice(problem, call.choice, trial.inputs)
        found = measure.verify_candidate(Candidate(call.choice, run), trial.judge, trial.inputs)
        assert isinstance(found, float), (call.choice, found.reason)
    inputs = [t.clone() for t in trial.inputs]
    run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs)
    inputs[0].mul_(-0.5)
    graph.replay()
    assert torch.equal(captured, run(inputs))


@pytest.mark.parametrize("name", PROBLEMS)
@torch.no_grad()
def test_no_rows(name, tmp_path):
    """Torch's to compute, where all is timed too."""
    problem = linear(*PROBLEMS[name][1:], arch=str(device.current("cuda")))
    operands = [
        t[:0] if len(t) == problem.operands[0].shape[0] else t
        for t in inputs_of(problem, torch.device("cuda"), 0)
    ]
    layer = function_of(problem)
    options = {"strict": True, "autotune": "always", "autotune_database": str(tmp_path)}
    found = torch.compile(layer, backend="ipex", options=options)(*operands)
    torch.testing.assert_close(found, layer(*operands))
