"""Max pools in training: kernels of ours by Triton's interpreter, and for GPUs that are not here.

And which graphs get them, with what mask.
"""

import itertools
import json
import os
import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from rendered import source, usage
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch.utils._pytree import tree_leaves

from ipex_inductor.decisions import GraphReport
from ipex_inductor.passes import pool
from ipex_inductor.passes.joint import WHOLE
from ipex_inductor.passes.whole_ops import decompose, reduced_table
from ipex_inductor.prebuild import graphs
from ipex_inductor.target import described
from ipex_inductor.templates import pool as template
from ipex_inductor.templates.gpu import _module

LAST = torch.channels_last


def random_case(seed):
    """A window that fits, on an image of odd sizes."""
    draw = random.Random(seed)
    window = [draw.choice((1, 2, 3, 5)) for _ in range(2)]
    stride = [draw.randint(-(-size // 3), size + 2) for size in window]
    padding = [draw.randint(0, size // 2) for size in window]
    image = [draw.choice((5, 7, 12, 17)) for _ in range(2)]
    given = {"window": window, "stride": stride, "padding": padding}
    tile = draw.choice(template.TILES)
    channels = draw.choice((8, 16, 24, 40))
    return (
        {"x": [draw.randint(1, 3), channels, *image], "ceil": draw.random() < 0.5}
        | given
        | {"tile": [*vars(tile).values()], "dtype": draw.choice(("float32", "bfloat16", "float16"))}
    )


RESNET = {"x": [2, 64, 32, 32], "window": [3, 3], "stride": [2, 2], "padding": [1, 1]}
CASES = [
    {**RESNET, "ceil": False, "tile": [32, 64, 4], "dtype": "bfloat16"},
    {**RESNET, "ceil": True, "tile": [32, 64, 4], "dtype": "float32"},
    *map(random_case, range(46)),
]


def pooled(case, device="cpu"):
    """An image with equal neighbours, what a pool makes of it, and a gradient of that."""
    torch.manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    x = torch.randint(-2, 3, case["x"]).to(device, dtype).to(memory_format=LAST)
    around = case["window"], case["stride"], case["padding"]
    y, at = F.max_pool2d(x, *around, ceil_mode=case["ceil"], return_indices=True)
    grad = torch.randn_like(y)
    columns = torch.arange(y.shape[3], device=device) * around[1][1] - around[2][1]
    rows = (torch.arange(y.shape[2], device=device) * around[1][0] - around[2][0])[:, None]
    offsets = (at // x.shape[3] - rows) * around[0][1] + at % x.shape[3] - columns
    return x, y, at, grad, offsets.to(torch.int8).to(memory_format=LAST)


def rendered(case, shape, sides, text=template.BACKWARD):
    """Its constants, and the source of the kernel."""
    around = case["window"], case["stride"], case["padding"]
    tile = template.Tile(*case["tile"])
    constants = template.constants(shape[0], shape[1:], sides, *around, tile)
    return constants, source(text, constants, shape[1], epilogue=False)


def launched(constants, text, count, case, device, *operands):
    """Its result's rows, in memory that was full of NaN."""
    tile, channels = template.Tile(*case["tile"]), case["x"][1]
    rows = torch.full([count, channels], torch.nan).to(device, getattr(torch, case["dtype"]))
    blocks = constants["STEPS" if "OFFSETS" in text and "GRAD" in text else "PIXELS"]
    grid = -(-blocks // tile.BLOCK_M), -(-channels // tile.BLOCK_N)
    warps = {} if device == "cpu" else {"num_warps": tile.num_warps}
    _module(text)["kernel"][grid](*operands, None, rows, **warps)
    return rows


def forward_differs(case, device="cpu"):
    """In how many values and offsets, of numbers with which all arithmetic is exact."""
    if case["ceil"]:  # which is left to Inductor
        return 0
    x, *_ = pooled(case, device)
    around, channels = (case["window"], case["stride"], case["padding"]), x.shape[1]
    draw = lambda *of: torch.tensor(random.choices(of, k=channels), device=device)  # noqa: E731
    each = draw(-0.5, 0.0, 1.5), draw(0.5, 1.0, 2.0), draw(-2.0, 1.0, 3.0), draw(-1.0, 0.0, 4.0)
    if case["x"][0] > 1:
        x[0, :, 2:4, 1] = torch.nan
    wanted, places = torch.ops.ipex.norm_relu_pool(x, *each, *around)
    offsets = torch.full_like(places, 77)
    sides = [-(-(n + 2 * p - w + 1) // s) for n, w, s, p in zip(x.shape[2:], *around, strict=True)]
    constants, text = rendered(case, x.shape, sides, template.FORWARD)
    *three, bias = each
    rows = launched(constants, text, len(wanted), case, device, x, *three, offsets, bias)
    same = (rows == wanted) | (rows.isnan() & wanted.isnan())
    certain = offsets == places
    certain |= wanted.isnan()  # torch takes the last of them on a CPU
    return int((~same).sum() + (~certain).sum())


def differs(case, device="cpu"):
    """In how many elements, by more than one rounding; into memory full of NaN."""
    x, y, at, grad, offsets = pooled(case, device)
    constants, text = rendered(case, x.shape, y.shape[2:])
    count = x.numel() // x.shape[1]
    rows = launched(constants, text, count, case, device, grad, offsets, None)
    around = case["window"], case["stride"], case["padding"]
    same = torch.ops.ipex.max_pool_backward(grad, offsets, [*x.shape[2:]], *around)
    exact = torch.zeros(*x.shape[:2], x[0, 0].numel(), dtype=torch.float64, device=device)
    exact.scatter_add_(2, at.flatten(2), grad.flatten(2).double())
    exact = exact.view(x.shape).permute(0, 2, 3, 1).reshape(rows.shape)
    # Nine numbers of a few units are added in fp32, then rounded once.
    close = 1e-5 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
    bound = close * exact.abs() + 1e-5
    return sum(int(((r.double() - exact).abs() <= bound).logical_not().sum()) for r in (rows, same))


def test_values_by_the_interpreter(tmp_path):
    """Against float64, ties, tails, padding and windows over the border among them."""
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(CASES))
    program = (
        "import json, sys, test_pool\n"
        "for case in json.load(open(sys.argv[1])):\n"
        "    print(test_pool.differs(case) + test_pool.forward_differs(case))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "IPEX_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    command = [sys.executable, "-c", program, str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [int(line) for line in done.stdout.split()] == [0] * len(CASES)


KERNELS = [
    *((template.FORWARD, tile) for tile in template.TILES),
    *((template.BACKWARD, tile) for tile in template.TILES),
]
GPUS = ("a100-80gb", "h200", "b200", "mi300x")
SLOW = [
    pytest.param(*each, marks=pytest.mark.slow)
    for each in itertools.product(KERNELS, ("float32", "float16", "bfloat16"), GPUS)
]


@pytest.mark.parametrize(
    ("kernel", "dtype", "gpu"),
    [*((kernel, "bfloat16", gpu) for kernel in KERNELS[::3] for gpu in GPUS), *SLOW],
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
    target = described(gpu)
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
    made = graphs.prebuild(model, (x,), described("h200"), training=True, options=options)
    return [e for e in made.events if e.subject == pool.NAME], codes


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a real GPU")


@no_gpu
@pytest.mark.parametrize("relu", [True, False])
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
        (Pooling(), image(), {"rules": f"-{pool.NAME}"}, None),
    ],
    ids=["contiguous", "dilated", "many", "off"],
)
def test_near_misses_are_inductors(model, x, options, said, monkeypatch):
    events, codes = on_an_h200(model, x, options, monkeypatch)
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
