"""Results of compiled graphs lie in memory as eager's, whatever layout the inputs have."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from ipex_inductor.passes.correctness.output_strides import OutputStrides
from ipex_inductor.passes.engine.whole_ops import inline
from ipex_inductor.passes.weights import blocked, cached_primitives, winograd
from ipex_inductor.passes.weights.packing import onednn_dtypes
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu import cached_primitives as library
from ipex_inductor.templates.cpu import cpu_library

C = 16
SIZES = {1: (5,), 2: (5, 6), 3: (4, 5, 6)}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolutions(rank: int) -> list[nn.Module]:
    """One of each kind that kernels are chosen by."""
    conv = getattr(nn, f"Conv{rank}d")
    transposed = getattr(nn, f"ConvTranspose{rank}d")
    return [
        conv(C, C, 3, padding=1),
        conv(C, 8, 1),
        conv(C, 2 * C, 3, stride=2, padding=1),
        conv(C, C, 3, padding="same", groups=C),
        conv(C, C, 3, groups=4, bias=False),
        conv(C, C, 3, dilation=2, padding=2),
        conv(C, 1, 3),
        transposed(C, 8, 3, 2, 1, 1),
        transposed(C, C, 2, 2, groups=4),
    ]


def linears(rank: int) -> list[nn.Module]:
    """With a bias and without."""
    return [nn.Linear(C, C), nn.Linear(C, 8, bias=False)]


# Layers, and the shape of what they read.
LAYERS = {
    **{f"conv{n}d": (convolutions, n, (2, C, *SIZES[n])) for n in SIZES},
    **{f"linear{n}d": (linears, n, (2, *SIZES[n], C)) for n in SIZES},
}


def _permuted(shape: tuple[int, ...], *order: int) -> Tensor:
    """A tensor of that shape whose dimensions lie in memory in this order."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.randn([shape[i] for i in order]).permute(back)


def layouts(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The same shape as callers may have it."""
    dims = range(len(shape))
    wider = (shape[0], 2 * shape[1], *shape[2:])
    given = {
        "contiguous": torch.randn(shape),
        "channels last": _permuted(shape, 0, *dims[2:], 1),
        "transposed": _permuted(shape, *dims[:-2], dims[-1], dims[-2]),
        "batch second": _permuted(shape, 1, 0, *dims[2:]),
        "reversed": _permuted(shape, *reversed(dims)),
        "batch expanded": torch.randn(1, *shape[1:]).expand(shape),
        "expanded": torch.randn(*shape[:-1], 1).expand(shape),
        "every other channel": torch.randn(wider)[:, ::2],
        "half of the channels": _permuted(wider, 0, *dims[2:], 1)[:, : shape[1]],
        "one of a batch": torch.randn(1, *shape[1:]),
    }
    return {name: x for name, x in given.items() if x.shape[1:] == shape[1:]}


class Net(nn.Module):
    """Each layer with what may be behind it, and a view of one result."""

    def __init__(self, layers: list[nn.Module], channels: int) -> None:
        super().__init__()
        self.layers, self.channels = nn.ModuleList(layers), channels

    def forward(self, x: Tensor) -> list[Tensor]:
        plain = [layer(x) for layer in self.layers]
        activated = [F.relu(layer(x * 2)) for layer in self.layers]
        added = [F.relu(layer(x + 1) + y) for layer, y in zip(self.layers, plain, strict=True)]
        read = [y.as_strided((y.numel(),), (1,)).clone() for y in activated[:1]]
        return [*plain, *activated, *added, *read]


def lies(value: Tensor) -> list[int]:
    """Strides; of a single element they say nothing."""
    return [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]


def check(fn, model: nn.Module, x: Tensor, close: float) -> None:
    """Strides of all results as eager's, and values but for roundings of sums in fp32."""
    for number, (got, want) in enumerate(zip(fn(x), model(x), strict=True)):
        assert lies(got) == lies(want), number
        torch.testing.assert_close(got, want, rtol=close, atol=close)
    assert not any(report.count("fallback") for report in decisions.reports())


@pytest.fixture(params=["oneDNN", "kept", "ours"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels compute, wherever they can."""
    kind: str = request.param
    dtypes, every = [(architecture(), torch.float32)], cached_primitives.Most(*[math.inf] * 4)
    bounds = blocked.Bounds(2, 1 << 20)
    if kind == "kept" and not library.installed_version():
        pytest.skip("onednn-cpu-gomp is not installed")
    if kind == "ours" and cpu_library.why_not() is not None:
        pytest.skip(f"{cpu_library.why_not()}")
    monkeypatch.setattr(
        cached_primitives, "FASTER", dict.fromkeys(dtypes, every) if kind == "kept" else {}
    )
    ours = kind == "ours"
    monkeypatch.setattr(blocked, "FASTER", dict.fromkeys(dtypes, (bounds, bounds)) if ours else {})
    tiles = winograd.Bounds(1, 1, 1, math.inf)
    monkeypatch.setattr(winograd, "FASTER", dict.fromkeys(dtypes, tiles) if ours else {})
    return kind


@pytest.mark.sampled
@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("layout", layouts((2, C, 5)))
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_in_every_layout(name, layout, dynamic, kernels, op_by_op):
    """Op by op: Inductor gives results the strides that ops say they give."""
    make, rank, shape = LAYERS[name]
    x = layouts(shape).get(layout)
    assert x is not None
    model = Net(make(rank), C).eval()
    fn = torch.compile(model, backend="ipex", dynamic=dynamic, options={"strict": True})
    check(fn, model, x, 1e-4)


@pytest.mark.sampled("ipex")
@torch.no_grad()
@pytest.mark.parametrize("backend", ["inductor", "ipex"])
def test_a_convolution_over_a_line_of_transposed_inputs(backend):
    """`(batch, time, channels)` as `(batch, channels, time)`: eager's result is contiguous."""
    model = nn.Conv1d(C, C, 3, padding=1).eval()
    for dynamic in (False, True):
        torch.compiler.reset()
        x = torch.randn(2, 5, C).transpose(1, 2)
        result = torch.compile(model, backend=backend, dynamic=dynamic)(x)
        assert result.stride() == model(x).stride() == (80, 5, 1)
        torch.testing.assert_close(result.view(2, -1), model(x).view(2, -1))


ADDENDS = {
    "linear": (nn.Linear(C, C), (4, C), (1, 0)),
    "linear 3d": (nn.Linear(C, C), (4, 5, C), (2, 0, 1)),
    "conv1d": (nn.Conv1d(C, C, 1), (4, C, 5), (2, 0, 1)),
    "conv2d": (nn.Conv2d(C, C, 1), (4, C, 5, 6), (3, 2, 1, 0)),
    "conv2d to channels-last": (nn.Conv2d(C, C, 1), (4, C, 5, 6), (0, 2, 3, 1)),
    "conv3d": (nn.Conv3d(C, C, 1), (2, C, 3, 4, 5), (4, 1, 2, 3, 0)),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ADDENDS)
def test_a_sum_lies_as_its_first_addend(name, training, op_by_op):
    """Which may be either: the product, or what is added to it."""
    layer, shape, order = ADDENDS[name]

    def fn(x: Tensor, other: Tensor) -> list[Tensor]:
        return [other + layer(x), layer(x * 2) + other, F.relu(other + layer(x * 3))]

    x, other = torch.randn(shape), _permuted(shape, *order)
    compiled = torch.compile(fn, backend="ipex", options={"strict": True})
    with torch.set_grad_enabled(training):
        for got, want in zip(compiled(x, other), fn(x, other), strict=True):
            assert lies(got) == lies(want)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled("channels last-linear3d", "reversed-conv1d", "batch expanded-conv2d")
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "linear3d"])
@pytest.mark.parametrize("layout", ["channels last", "reversed", "batch expanded"])
def test_training_keeps_strides(name, layout, op_by_op):
    """Results, and gradients of the input and the weights."""
    make, rank, shape = LAYERS[name]
    model, x = Net(make(rank), C), layouts(shape)[layout].requires_grad_()
    compiled = torch.compile(model, backend="ipex", options={"strict": True})
    read = [x, *model.parameters()]
    results, gradients = [], []
    for fn in (compiled, model):
        made = fn(x)
        results.append(made)
        gradients.append(torch.autograd.grad(sum(y.square().sum() for y in made), read))
    for got, want in zip(*results, strict=True):
        assert lies(got) == lies(want)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


@torch.no_grad()
@pytest.mark.skipif(torch.bfloat16 not in onednn_dtypes(), reason="oneDNN has no bf16 here")
def test_a_chain_over_a_line_has_no_copies(op_by_op):
    """The format is named to the call, as copies between convolutions would cost more than it."""
    seen = []
    model = nn.Sequential(nn.Conv1d(C, C, 3), nn.ReLU(), nn.Conv1d(C, C, 3)).eval().bfloat16()
    show = decisions.GraphReport.show

    def noted(self, stage, graph):
        seen.extend([graph] if stage == "compiled" else [])
        show(self, stage, graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions.GraphReport, "show", noted)
        x = torch.randn(2, 9, C, dtype=torch.bfloat16).transpose(1, 2)
        assert torch.compile(model, backend="ipex")(x).stride() == model(x).stride()
    (graph,) = seen
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert not copies


class Padding(CustomGraphPass):
    """Compute products with eight columns more and cut them off, as `pad_mm` does on GPUs."""

    def __call__(self, graph):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            inline(graph, node, self.padded, restrides=False)

    @staticmethod
    def padded(a, b):
        return (a @ F.pad(b, (0, 8)))[:, : b.shape[1]]

    def uuid(self):
        return "padding"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.sampled("True-False", "False-True")
def test_a_product_that_inductor_pads_lies_as_eagers(dynamic, training):
    """The cut is copied where it is a result, and nowhere else."""
    a, b = torch.randn(6, 5, requires_grad=training), torch.randn(5, 10)
    options = {"strict": True, "joint_custom_post_pass": Padding()}
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        show = decisions.GraphReport.show
        patch.setattr(
            decisions.GraphReport,
            "show",
            lambda self, stage, graph: shown.append(str(graph)) or show(self, stage, graph),
        )
        fn = torch.compile(
            lambda a, b: (a @ b, (a @ b + 1).t(), (a @ (b + 1)).relu()),
            backend="ipex",
            options=options,
            dynamic=dynamic,
        )
        got, want = fn(a, b), (a @ b, (a @ b + 1).t(), (a @ (b + 1)).relu())
    assert any("pad" in graph for graph in shown), "else this test shows nothing"
    for one, other in zip(got, want, strict=True):
        assert lies(one) == lies(other)
        torch.testing.assert_close(one, other)
    fired = [e for r in decisions.reports() for e in r.events if e.subject == "strides of results"]
    assert [event.kind for event in fired] == ["fired"]


def test_results_behind_an_effect_are_found():
    """AOT autograd describes the token of an effect (here of a check), and takes it away."""
    recorded = []
    with pytest.MonkeyPatch.context() as patch:
        record = OutputStrides.record
        patch.setattr(
            OutputStrides,
            "record",
            lambda self, graph: record(self, graph) or recorded.append([*self._traced]),
        )
        fn = torch.compile(lambda x: torch.linalg.cholesky(x) + 1, backend="ipex")
        with torch.no_grad():
            fn(torch.eye(4))
    assert recorded[0] == [0]
