"""What vLLM needs of a Dynamo backend: a name that resolves, and rules beside its custom ops."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.registry import list_backends, lookup_backend

from ipex_inductor.backend import compile_graph
from ipex_inductor.quantization import (
    WoqWeightDtype,
    get_weight_only_quant_qconfig_mapping,
    quantize_weights,
)
from ipex_inductor.reporting import decisions

WIDTH, HEADS = 64, 4


def test_the_name_is_in_dynamos_list():
    """vLLM 0.32 looks for the name in this list, without excluded tags, in modes 1 and 2."""
    assert "ipex" in list_backends(exclude_tags=())
    assert lookup_backend("ipex") is compile_graph


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed")
@pytest.mark.parametrize("mode", [1, 2])
def test_vllms_config_takes_the_name(mode):
    from vllm.config import CompilationConfig, VllmConfig

    config = CompilationConfig(mode=mode, backend="ipex")
    assert config.init_backend(VllmConfig(compilation_config=config)) == "ipex"


@torch.library.custom_op("like_vllm::attention_with_output", mutates_args={"output"})
def attention_with_output(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer: str
) -> None:
    """Attend and write the result: opaque to a compiler, as the attention of vLLM is."""
    parts = (each.unflatten(-1, (HEADS, -1)).transpose(0, 1) for each in (query, key, value))
    result = F.scaled_dot_product_attention(*parts, is_causal=True)
    output.copy_(result.transpose(0, 1).flatten(1))


@attention_with_output.register_fake
def _(query, key, value, output, layer):
    return None


@torch.library.custom_op("like_vllm::add_rms_norm", mutates_args={"x", "residual"})
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """Add in place, and normalize in place."""
    residual.add_(x)
    x.copy_(F.rms_norm(residual, (x.shape[-1],), weight, 1e-6))


@add_rms_norm.register_fake
def _(x, residual, weight):
    return None


class Block(nn.Module):
    """A decoder layer as vLLM's graphs have it: tokens of all texts in one dimension."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norms = nn.ParameterList(torch.rand(WIDTH) for _ in range(2))

    def forward(self, x, residual):
        query, key, value = self.qkv_proj(x).split(WIDTH, -1)
        output = torch.empty_like(query)
        torch.ops.like_vllm.attention_with_output(query, key, value, output, self.name)
        x = self.o_proj(output)
        torch.ops.like_vllm.add_rms_norm(x, residual, self.norms[0])
        x = self.down_proj(F.silu(self.gate(x)) * self.up(x))
        torch.ops.like_vllm.add_rms_norm(x, residual, self.norms[1])
        return x, residual


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block(f"layers.{i}") for i in range(2))

    def forward(self, tokens):
        residual = self.embed(tokens)
        x = residual.clone()
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return Decoder().eval().requires_grad_(False)


def run_compiled(model):
    """Compare with eager execution, and return the subjects of the rules that fired, counted."""
    decisions.clear()
    compiled = torch.compile(model, backend="ipex", fullgraph=True, options={"strict": True})
    tokens = torch.arange(9)
    torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-4)  # fp32 sums
    events = [e for report in decisions.reports() for e in report.events]
    return [e.subject for e in events if e.kind == "fired"], events


def test_rules_of_linear_layers_fire_beside_mutating_ops(decoder):
    fired, events = run_compiled(decoder)
    assert fired.count("silu(linear)*linear") == 2
    assert [e for e in events if e.kind == "hoisted"]


@pytest.mark.slow
def test_quantized_layers_run_on_their_kernels(decoder):
    int4 = get_weight_only_quant_qconfig_mapping(weight_dtype=WoqWeightDtype.INT4, group_size=32)
    fired, _ = run_compiled(quantize_weights(decoder, int4))
    assert fired
