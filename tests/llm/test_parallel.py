"""Tensor parallelism: two processes give the model's tokens, on packed weights."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ipex_inductor.errors import ArgumentError
from ipex_inductor.llm import parallel

RUN = """
import copy, json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ipex_inductor.llm import optimize, parallel, parallelize
from ipex_inductor.reporting import decisions
from support.llm_families import FAMILIES, left_padded, prompt

name, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def generate():
    eager = FAMILIES[name].build()
    model = parallelize(copy.deepcopy(eager), mesh)
    shapes = {n: list(p.shape) for n, p in model.named_parameters() if "layers.0" in n}
    model = optimize(model, inplace=True)
    words = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    for inputs in ({"input_ids": prompt(1, 20)}, left_padded(3, 12)):
        ours, theirs = model.generate(**inputs, **words), eager.generate(**inputs, **words)
        assert torch.equal(ours, theirs), (ours, theirs)
    assert not model.forward.reasons, model.forward.reasons
    return [shapes, len(model.forward.steps)]

def run_layers():
    torch.manual_seed(0)
    up, down = nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512)
    model = nn.Sequential(up, nn.ReLU(), down).eval().requires_grad_(False)
    x = torch.randn(4, 512)
    expected = model(x)
    parallel.cut_rows(up, mesh, "up")
    parallel.cut_columns(down, mesh, "down")
    ours = torch.compile(model, backend="ipex", options={"strict": True})(x)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)  # fp32: two partial sums
    return [{}, 0]

result = run_layers() if name == "layers" else generate()
events = [[e.kind, e.subject, e.reason] for r in decisions.reports() for e in r.events]
print(json.dumps([*result, events]), flush=True)
dist.barrier()
os._exit(0)  # torch aborts where a thread of gloo's frees its work in an interpreter that ends
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(name):
    """Return what each of two processes printed."""
    port, tests = str(free_port()), str(Path(__file__).parents[1])
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": tests}
    command = [sys.executable, "-c", RUN, name]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(r), port], env=env, **pipes) for r in range(2)]
    outputs = []
    try:
        outputs = [process.communicate(timeout=1900) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, error) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, error
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_two_processes_give_the_models_tokens():
    for shapes, steps, events in run("llama"):
        prefix = "model.layers.0."
        assert shapes[f"{prefix}self_attn.q_proj.weight"] == [32, 64]
        assert shapes[f"{prefix}self_attn.o_proj.weight"] == [64, 32]
        assert shapes[f"{prefix}mlp.down_proj.weight"] == [64, 64]
        assert steps == 4  # prompts and tokens of one text and of three
        fired = [subject for kind, subject, _ in events if kind == "fired"]
        assert fired.count("silu(linear)*linear") == 4 * 2
        assert fired.count("linear|linear") == 2 * 2  # of single tokens, in each layer


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_weights_of_both_cuts_are_packed():
    for _, _, events in run("layers"):
        assert not [e for e in events if e[:2] == ["missed", "packed weights"]]
        (reason,) = [reason for kind, _, reason in events if kind == "hoisted"]
        assert "of 2 weights" in reason


def test_modules_are_found_by_their_names():
    plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    find = parallel._find_cut
    assert find("model.layers.11.mlp.up_proj", plan) == "colwise"
    assert find("layers.0.mlp.down_proj", plan) == "rowwise"
    for name in ("model.layers.0.mlp.up_proj.base", "model.layers.x.mlp.up_proj", "lm_head"):
        assert parallel.CUTS[find(name, plan)] is None


class Mesh:
    """A mesh of two processes of which this is the second."""

    ndim = 1

    def size(self):
        return 2

    def get_local_rank(self):
        return 1


def test_each_process_keeps_its_rows_or_columns():
    linear = nn.Linear(6, 4)
    weight, bias = linear.weight.clone(), linear.bias.clone()
    parallel.cut_rows(linear, Mesh(), "up")
    assert torch.equal(linear.weight, weight[2:])
    assert torch.equal(linear.bias, bias[2:])
    assert linear.out_features == 2
    linear = nn.Linear(6, 4)
    weight, bias = linear.weight.clone(), linear.bias.clone()
    parallel.cut_columns(linear, Mesh(), "down")
    assert torch.equal(linear.weight, weight[:, 3:])
    assert torch.equal(linear.bias, bias)
    assert type(linear) is parallel.RowParallelLinear


def config_of(plan, heads=4):
    class Config:
        base_model_tp_plan = plan
        num_key_value_heads = heads

        def get_text_config(self, decoder):
            return self

    return Config()


@pytest.mark.parametrize(
    ("plan", "heads", "ndim", "error"),
    [
        (None, 4, 1, "base_model_tp_plan"),
        ({"experts": "grouped_gemm"}, 4, 1, "grouped_gemm"),
        ({"up": "colwise"}, 3, 1, "3 key-value heads"),
        ({"up": "colwise"}, 4, 2, "2 dimensions"),
        ({"up": "colwise"}, 4, 1, "5 of up"),
    ],
)
def test_models_that_cannot_be_cut_raise(plan, heads, ndim, error):
    model, mesh = nn.ModuleDict({"up": nn.Linear(4, 5)}), Mesh()
    model.config, mesh.ndim = config_of(plan, heads), ndim
    with pytest.raises(ArgumentError, match=error):
        parallel.parallelize(model, mesh)


def test_the_mesh_is_torchs():
    assert all(hasattr(DeviceMesh, name) for name in ("ndim", "size", "get_local_rank"))
