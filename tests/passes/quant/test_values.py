"""Integers behind nodes of a graph: through views, casts and max pools, and where none are."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor.passes.quant import values
from ipex_inductor.passes.quant.values import Reader, is_zero, read_weight
from support.int8_nets import QUANTIZED

pytestmark = pytest.mark.unit
WORDS = 0.5, 3, 0, 255, torch.uint8
INTEGERS = torch.randint(0, 256, (2, 8, 6, 10), dtype=torch.uint8)


def dequantize(x: Tensor) -> Tensor:
    return QUANTIZED.dequantize_per_tensor.default(x, *WORDS)


def trace(function, *inputs):  # type: ignore[no-untyped-def]
    """Return the graph of a function, with its module, and the node that it returns."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    (returned,) = module.graph.find_nodes(op="output")
    return module, returned.args[0]


MOVES = {
    "nothing": lambda v: v,
    "view": lambda v: v.view(2, 48, 10),
    "reshape": lambda v: v.permute(0, 2, 3, 1).reshape(2, -1),
    "permute": lambda v: v.permute(0, 2, 3, 1),
    "transpose": lambda v: v.transpose(1, 2),
    "squeeze": lambda v: v[:1].squeeze(0),
    "unsqueeze": lambda v: v.unsqueeze(1),
    "expand": lambda v: v.unsqueeze(1).expand(2, 3, 8, 6, 10),
    "slice": lambda v: v[:, 1:7:2, 2:],
    "clone": lambda v: v.clone(memory_format=torch.channels_last),
    "casts": lambda v: v.bfloat16().float(),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_are_of_the_integers(name: str) -> None:
    """The node of integers has the same elements in the same places; scale and bounds stay."""
    module, node = trace(lambda x: MOVES[name](dequantize(x)), INTEGERS)
    quantized = Reader(module.graph).read(node)
    assert quantized is not None
    words = quantized.scale, quantized.zero_point, quantized.least, quantized.most
    assert words == WORDS[:4]
    assert quantized.axis is None
    (output,) = module.graph.find_nodes(op="output")
    output.args = (quantized.integers,)
    module.recompile()
    expected = MOVES[name](INTEGERS) if name != "casts" else INTEGERS
    assert torch.equal(module(INTEGERS), expected)
    value = quantized.integers.meta["val"]
    assert (value.shape, value.dtype) == (expected.shape, torch.uint8)


OTHERS = {
    "an input": lambda x: x,
    "arithmetic": lambda x: dequantize(x) + 1,
    "an integer cast": lambda x: dequantize(x).long(),
    "a gather": lambda x: dequantize(x)[:, [1, 2]],
    "a mean": lambda x: dequantize(x).mean(),
    "indices of a max pool": lambda x: F.max_pool2d(dequantize(x), 2, return_indices=True)[1],
    "an average pool": lambda x: F.avg_pool2d(dequantize(x), 2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_nodes_have_no_integers(name: str) -> None:
    module, node = trace(OTHERS[name], INTEGERS)
    before = [n.target for n in module.graph.nodes]
    assert Reader(module.graph).read(node) is None
    assert [n.target for n in module.graph.nodes] == before


def test_a_value_is_read_once() -> None:
    """Two products on one view share the view of its integers."""
    module, node = trace(lambda x: dequantize(x).permute(0, 2, 3, 1), INTEGERS)
    reader = Reader(module.graph)
    assert reader.read(node) is reader.read(node)
    permutes = module.graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default)
    assert len(permutes) == 2


def _pool(x: Tensor) -> Tensor:
    pool = torch.ops.prims._low_memory_max_pool_with_offsets.default
    return pool(dequantize(x), [3, 3], [2, 2], [1, 1], [1, 1], False)[0]  # type: ignore[no-any-return]


def test_max_pools_are_of_the_integers() -> None:
    import torch._inductor.inductor_prims

    module, node = trace(_pool, INTEGERS)
    quantized = Reader(module.graph).read(node)
    assert quantized is not None
    assert quantized.integers.target is torch.ops.ipex.int8_max_pool.default
    module, node = trace(lambda x: _pool(x[0]), INTEGERS)  # without a batch
    assert Reader(module.graph).read(node) is None


WEIGHT = torch.randint(-128, 128, (8, 4), dtype=torch.int8)


@pytest.mark.parametrize(
    ("make_zeros", "is_known"),
    [
        (lambda scale: torch.zeros_like(scale, dtype=torch.int64), True),
        (lambda scale: torch.full((8,), 0), True),
        (lambda scale: torch.full((8,), 3), False),
        (lambda scale: torch.ones_like(scale, dtype=torch.int64), False),
    ],
)
def test_zero_points_of_weights(make_zeros, is_known: bool) -> None:  # type: ignore[no-untyped-def]
    """They are zero only where the graph says so; then they follow from the scales."""

    def weight(integers: Tensor, scale: Tensor) -> Tensor:
        words = scale, make_zeros(scale), 0, -128, 127, torch.int8
        return QUANTIZED.dequantize_per_channel.default(integers, *words)

    module, node = trace(weight, WEIGHT, torch.rand(8))
    expected = module(WEIGHT, torch.ones(8))
    values.compute_zeros_from_scales(module.graph)
    module.recompile()
    assert torch.equal(module(WEIGHT, torch.ones(8)), expected)
    quantized = read_weight(node)
    assert quantized is not None
    assert is_zero(quantized.zero_point) == is_known
    if is_known:
        zeros = node.args[2]
        never = zeros.args[0]  # no scale is less than itself
        assert never.target is torch.ops.aten.lt.Tensor
        assert never.args == (node.args[1], node.args[1])


def test_weights_with_one_scale_and_transposed() -> None:
    def plain(x: Tensor) -> Tensor:
        words = 0.25, 0, -128, 127, torch.int8
        return QUANTIZED.dequantize_per_tensor.default(x, *words)

    _, node = trace(plain, WEIGHT)
    quantized = read_weight(node)
    assert quantized is not None
    assert (quantized.scale, quantized.axis) == (0.25, None)

    def turned(x: Tensor, scale: Tensor) -> Tensor:
        zeros = torch.zeros_like(scale, dtype=torch.int64)
        words = scale, zeros, 1, -128, 127, torch.int8
        return QUANTIZED.dequantize_per_channel.default(x, *words).permute(1, 0)

    module, node = trace(turned, WEIGHT, torch.rand(4))
    quantized = read_weight(node)
    assert quantized is not None
    assert quantized.axis == 0
    assert quantized.integers.meta["val"].shape == (4, 8)
    assert module.graph.owning_module is module
    assert read_weight(None) is None
    assert read_weight(node.args[0].args[0]) is None


@pytest.mark.parametrize("by_tensor", [False, True], ids=["numbers", "tensors"])
def test_integers_of_gpus_are_signed(by_tensor):  # type: ignore[no-untyped-def]
    """The values stay the same, of a result in bf16 too; zero points may be in uint8."""
    bounds = 0, 255, torch.uint8

    def rounded(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        words = (scale, zero_point) if by_tensor else (0.5, 3)
        name = "tensor" if by_tensor else "default"
        quantize = getattr(QUANTIZED.quantize_per_tensor, name)
        dequantize = getattr(QUANTIZED.dequantize_per_tensor, name)
        return dequantize(quantize(x, *words, *bounds), *words, *bounds, out_dtype=torch.bfloat16)

    x, scale, zero_point = torch.randn(40) * 60, torch.tensor(0.5), torch.tensor(3).byte()
    module, _ = trace(rounded, x, scale, zero_point)
    (quantize,) = filter(values.is_quantize, module.graph.nodes)
    with quantize.meta["val"].fake_mode:
        quantize.meta["val"] = torch.empty(40, dtype=torch.uint8, device="cuda")
    values.use_signed_integers(module.graph)
    module.recompile()
    assert quantize.args[-1] is torch.int8
    expected = rounded(x, scale, zero_point)
    assert torch.equal(module(x, scale, zero_point), expected)
    assert expected.dtype is torch.bfloat16
