"""Ops kept whole and decomposed again give plain Inductor's own graph."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ipex_inductor.passes.engine.whole_ops import WHOLE, decompose, overloads, reduced_table

NAMES = frozenset(WHOLE)

# One model a whole op, each with more ops around it.
OPS = {
    "_softmax": lambda x: x.softmax(-1),
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "mish": F.mish,
    "native_layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "silu": F.silu,
}

AS_EAGER = {"fallback_random": True, "strict": True}


class Net(nn.Module):
    def __init__(self, *ops):
        super().__init__()
        self.ops = ops
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x):
        x = self.bn(self.conv(x))
        return [op(x).sin() for op in self.ops]


class Redecompose(CustomGraphPass):
    def __init__(self):
        self.whole = 0

    def __call__(self, graph):
        self.whole += sum(n.target in overloads(NAMES) for n in graph.nodes)
        decompose(graph, NAMES)
        graph.lint()

    def uuid(self):
        return None


def graphs(model, x, grad, dynamic, own):
    """The (op, dtype of the result) lists handed to the inner compiler, and how many were whole."""
    seen, redecompose = [], Redecompose()

    def inner(gm, example_inputs, **kwargs):
        calls = [n for n in gm.graph.nodes if n.op == "call_function"]
        # A decomposition traced alone computes its sizes anew: integers, so no generated code.
        values = [n for n in calls if not isinstance(n.meta.get("val"), torch.SymInt)]
        seen.append([(str(n.target), getattr(n.meta.get("val"), "dtype", None)) for n in values])
        return gm.forward

    def backend(gm, example_inputs):
        patches = {"joint_custom_pre_pass": redecompose} if own else None
        table = reduced_table(NAMES) if own else None
        return compile_fx(gm, example_inputs, inner, config_patches=patches, decompositions=table)

    torch.compiler.reset()
    with torch.set_grad_enabled(grad):
        results = torch.compile(model, backend=backend, dynamic=dynamic)(x)
        if grad:
            sum(y.sum() for y in results).backward()
    return seen, redecompose.whole


# Sizes that vary take ten times as long: some ops in one graph, and in training those whose
# decompositions read them. Of dtype and mode, which nothing ties to each other, two pairs.
PAIRS = {("fp32", "eval", "static"), ("bf16", "train", "static")}
READ_SIZES = ("max_pool", "native_layer_norm")
HOW = [
    pytest.param(
        name,
        *how,
        marks=[]
        if how in PAIRS or (name in READ_SIZES and how == ("fp32", "train", "dynamic"))
        else [pytest.mark.slow],
        id="-".join((name, *how)),
    )
    for name in OPS
    for how in itertools.product(("fp32", "bf16"), ("eval", "train"), ("static", "dynamic"))
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize(("name", "dtype", "mode", "sizes"), HOW)
@pytest.mark.sampled
def test_graph_is_plain_inductors(name, dtype, mode, sizes):
    check([name], DTYPES[dtype], mode == "train", sizes == "dynamic")


# A number by itself is the same whatever the sizes: quickly those of windows and rows, and few.
FEW = ("_softmax", "gelu", "hardswish", "max_pool", "native_layer_norm")


@pytest.mark.slow  # 10 s; those that read sizes vary them above
@pytest.mark.parametrize(
    "names", [FEW, pytest.param([*OPS], marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_ops_at_once_whatever_the_sizes(names):
    check(names, torch.bfloat16, False, True)


def check(names, dtype, grad, dynamic):
    model = Net(*(OPS[name] for name in names)).to(dtype).train(grad)
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    plain, _ = graphs(model, x, grad, dynamic, own=False)
    ours, whole = graphs(model, x, grad, dynamic, own=True)
    alone = "max_pool" in names and not grad  # what is kept whole is its backward
    wanted = len(names) + 1 - alone
    assert whole >= wanted, "the ops and the batch norm should have reached the pass whole"
    assert ours == plain


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("op", [F.dropout, F.rrelu, F.alpha_dropout], ids=lambda op: op.__name__)
def test_random_numbers_are_eagers_where_an_option_says_so(op, training, op_by_op):
    """As with plain Inductor, whose table of decompositions depends on the option."""
    x = torch.randn(64, 8, requires_grad=training)
    fn = torch.compile(lambda x: op(x, training=True), backend="ipex", options=AS_EAGER)
    with torch.set_grad_enabled(training):
        torch.manual_seed(1)
        result = fn(x)
        torch.manual_seed(1)
        torch.testing.assert_close(result, op(x, training=True), rtol=0, atol=0)
