"""What Inductor writes for an H200 that is not here."""

import functools

import torch
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode

from ipex_inductor import lowerings
from ipex_inductor.lowerings.problem.workload import empty, function_of
from ipex_inductor.lowerings.tune import compiling
from ipex_inductor.prebuild import described as described_gpu
from ipex_inductor.target.device import find_target

NAME = "sm_90:NVIDIA-H200"


def code(function, inputs, tmp_path, monkeypatch):
    """Of `function`; `inputs` made there are on it."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    lowerings.register()
    codes = []
    with described_gpu.device(find_target("h200")), torch.no_grad():
        monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
        with FakeTensorMode(allow_non_fake_inputs=True):
            compiling.static(function, inputs(), {"fx_graph_cache": False})
    return codes[-1]


def code_of_call(problem, call, tmp_path, monkeypatch):
    """Of `problem` with what `call` makes of its op."""
    operands = functools.partial(map, lambda o: empty(o, torch.device("cuda:0")))
    function = function_of(problem, call.compute)
    return code(function, lambda: [*operands(problem.operands)], tmp_path, monkeypatch)
