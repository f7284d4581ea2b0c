"""Max pools in training: kernels of ours by Triton's interpreter, and for GPUs that are not here.

And which graphs get them, with what mask.
"""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch.utils._pytree import tree_leaves

from ipex_inductor.passes.engine.whole_ops import decompose, reduced_table
from ipex_inductor.passes.joint import WHOLE
from ipex_inductor.passes.training import pool
from ipex_inductor.prebuild import graphs
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import find_target
from ipex_inductor.templates.build.gpu import _module
from ipex_inductor.templates.triton import pool as template
from support.case_sampling import few_with_each
from support.cases import pool_cases
from support.cases.pool_cases import LAST, RESNET, rendered
from support.rendered_templates import usage

pytestmark = pytest.mark.unit

# Those of ResNet-50 and twelve others have every tile, dtype and kind of window.
FIRST, ALL = 14, len(pool_cases.CASES)


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, FIRST), pytest.param(FIRST, ALL, marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_values_by_the_interpreter(first, last, tmp_path):
    """Against float64, ties, tails, padding and windows over the border among them."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, pool_cases.__file__, str(first), str(last)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [int(line) for line in done.stdout.split()] == [0] * (last - first)


KERNELS = [
    *((template.FORWARD, tile) for tile in template.TILES),
    *((template.BACKWARD, tile) for tile in template.TILES),
]
# For the first each time: test_every_template.py has a small window of each dtype for all.
GPUS = ("h200", "a100-80gb", "b200", "mi300x")
DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize(
    ("kernel", "dtype", "gpu"),
    few_with_each(
        itertools.product(KERNELS, DTYPES, GPUS),
        lambda kernel, *others: [kernel[0]],
    ),
    ids=lambda each: each if isinstance(each, str) else str(vars(each[1])),
)
def test_it_compiles_where_there_is_no_gpu(kernel, dtype, gpu):
    """Nothing spilled, and many blocks fit into a multiprocessor."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    template_, tile = kernel
    case = {**RESNET, "tile": [*vars(tile).values()]}
    _, text = rendered(case, [128, 64, 112, 112], [56, 56], template_)
    kind = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}[dtype]
    if template_ is template.FORWARD:
        types = {"X": kind, **dict.fromkeys(("MEAN", "RSTD", "WEIGHT"), "*fp32")}
    else:
        types = {"GRAD": kind}
    types |= {"OFFSETS": "*i8", "BIAS": "*fp32", "OTHER": kind, "OUT": kind}
    target = find_target(gpu)
    arch = int(target.arch[3:]) if target.kind == "cuda" else target.arch
    attrs = {(n,): [["tt.divisibility", 16]] for n in range(len(types))}
    with triton.knobs.cache.scope():
        made = triton.compile(
            ASTSource(_module(text)["kernel"], types, constexprs={}, attrs=attrs),
            target=GPUTarget(target.kind, arch, target.subgroup or 32),
            options={"num_warps": tile.num_warps, "num_stages": 2},
        )
    registers, spilled = usage(made)
    assert spilled == 0
    assert registers <= 128
    assert made.metadata.shared <= target.shared_memory / 8


class Pooling(nn.Module):
    """A pool behind a relu, or behind nothing that masks."""

    def __init__(self, relu=True, **given):
        super().__init__()
        self.pool = nn.MaxPool2d(**{"kernel_size": 3, "stride": 2, "padding": 1, **given})
        self.act = nn.ReLU() if relu else nn.Identity()
        self.weight = nn.Parameter(torch.ones(1, 16, 1, 1))

    def forward(self, x):
        return (self.pool(self.act(x * self.weight)) * 3).square().mean()


def image(dtype=torch.bfloat16, channels=16):
    torch.manual_seed(1)
    x = torch.randint(-3, 4, (2, channels, 18, 14)).to(dtype)
    return x.to(memory_format=LAST)


def on_an_h200(model, x, options=None, monkeypatch=None):
    """What was decided of the pool, and the code of forward and backward."""
    codes = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    made = graphs.prebuild(model, (x,), find_target("h200"), training=True, options=options)
    return [e for e in made.events if e.subject == pool.NAME], codes


def told(model, x, monkeypatch):
    """What the rule decides of the pool; nothing more is compiled."""
    events, replace = [], pool.replace

    def replace_and_stop(graph, report):
        replace(graph, report)
        events.extend(e for e in report.events if e.subject == pool.NAME)
        raise InterruptedError

    monkeypatch.setattr(pool, "replace", replace_and_stop)
    with pytest.raises((InterruptedError, BackendCompilerFailed)):
        on_an_h200(model, x, {"strict": True}, monkeypatch)
    return events


no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="an H200 is pretended here; tests/gpu has the real one"
)


@no_gpu
@pytest.mark.parametrize("relu", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_training_graph_gets_it(relu, monkeypatch):
    events, (forward, backward) = on_an_h200(Pooling(relu), image(), monkeypatch=monkeypatch)
    assert [e.kind for e in events] == ["fired"]
    assert ("mask of the relu" in events[0].reason) == relu
    assert forward.count("def triton_tem") == 0
    assert backward.count("def triton_tem") == 1
    assert "arg_OFFSETS" in backward


@no_gpu
@pytest.mark.parametrize(
    ("model", "x", "options", "said"),
    [
        (Pooling(), image().contiguous(), None, "not channels-last"),
        (Pooling(dilation=2), image(), None, "dilated"),
        (Pooling(kernel_size=5, stride=1), image(), None, "too many windows"),
        (Pooling(), image()[:0], None, "a size is zero"),
        pytest.param(
            *(Pooling(), image(), {"rules": f"-{pool.NAME}"}, None), marks=pytest.mark.slow
        ),
    ],
    ids=["contiguous", "dilated", "many", "empty", "off"],
)
@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "with code"]
)
def test_near_misses_are_inductors(model, x, options, said, whole, monkeypatch):
    """Quickly as the rule says; with code where it is not even asked."""
    if whole or said is None:
        events, codes = on_an_h200(model, x, options, monkeypatch)
    else:
        events, codes = told(model, x, monkeypatch), ()
    assert [e.kind for e in events] == ([] if said is None else ["missed"])
    assert said is None or said in events[0].reason
    assert not any("def triton_tem" in code for code in codes)


def joint(fn, *inputs, table):
    """Forward and backward of `fn` in one graph."""
    with enable_python_dispatcher():
        return aot_export_joint_simple(fn, inputs, trace_joint=True, decompositions=table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("special", [None, torch.nan, -torch.inf, torch.inf], ids=str)
@pytest.mark.parametrize("relu", [True, False])
def test_gradients_are_those_of_the_graph_before(relu, special, dtype, monkeypatch):
    """Bit for bit: the same few numbers are added in fp32, the mask is the same one."""
    monkeypatch.setattr(pool, "why_not", lambda node: None)
    x = image(dtype)
    if special is not None:
        x[0, 3, 4:6, 5] = special
    model = Pooling(relu)

    def fn(x):
        y = model.pool(model.act(x))
        return (y * y,)

    x.requires_grad_()
    plain = joint(fn, x, table=select_decomp_table())
    ours = joint(fn, x, table=reduced_table(WHOLE))
    report = GraphReport()
    pool.replace(ours.graph, report)
    decompose(ours.graph, WHOLE)
    ours.graph.lint()
    ours.recompile()
    assert [e.kind for e in report.events] == ["fired"]
    (y,) = fn(x.detach())
    grad = torch.randint(-4, 5, y.shape).to(dtype).to(memory_format=LAST)
    given = [x.detach()], [grad]
    for a, b in zip(tree_leaves(ours(*given)), tree_leaves(plain(*given)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.stride() == b.stride()
