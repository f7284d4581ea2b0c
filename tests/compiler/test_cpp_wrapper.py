"""Graphs whose kernels are called from C++: in inference on CPUs, unless asked not to."""

import contextlib
import math
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ipex_inductor import compat
from ipex_inductor.compiler import graph_cache
from ipex_inductor.passes.attention import short_attention
from ipex_inductor.passes.weights import blocked, cached_primitives, winograd
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.cpu import cached_primitives as onednn
from ipex_inductor.templates.cpu import cpu_library
from support.helpers import Mlp, code_of

X = torch.randn(4, 32)
IN_CPP = "CppWrapperCodeCache.load_pybinding"
needs_library = pytest.mark.skipif(
    cpu_library.why_not() is not None, reason=f"{cpu_library.why_not()}"
)


class EachKernel(nn.Module):
    """A stem, a window, a pixel with its shortcut, a layer, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3)
        self.window = nn.Conv2d(64, 64, 3, 1, 1)
        self.pixel = nn.Conv2d(64, 64, 1)
        self.layer = nn.Linear(64, 192)

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 4, H * W / 4, 16]."""
        stem = F.relu(self.stem(image))
        pixel = F.relu(self.pixel(F.relu(self.window(stem))) + stem)
        rows = F.gelu(self.layer(pixel.flatten(2).transpose(1, 2)))
        heads = rows.view(len(image), -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*heads)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on every CPU, whether it is faster or not."""
    here = architecture(), torch.float32
    anything = blocked.Bounds(1, 1 << 20)
    for room, bounds in (
        (blocked, (anything, anything)),
        (winograd, winograd.Bounds(16, 16, 1, 1)),
        (short_attention, (math.inf, 1024, 128)),
        (cached_primitives, cached_primitives.Most(*[math.inf] * 4)),
    ):
        monkeypatch.setattr(room, "FASTER", {here: bounds})


def said(kind: str) -> list[str]:
    events = [event for report in decisions.reports() for event in report.events]
    return [f"{event.subject}: {event.reason}" for event in events if event.kind == kind]


def compiled(model: nn.Module, **how: object) -> torch._dynamo.eval_frame.OptimizedModule:
    return torch.compile(model, backend="ipex", **how)  # type: ignore[call-overload,no-any-return]


@needs_library
@torch.no_grad()
def test_each_kernel_of_ours_is_called_from_cpp(everywhere: None) -> None:
    model = EachKernel().eval().to(memory_format=torch.channels_last)
    image = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    fn = compiled(model, options={"cpp_wrapper": True, "strict": True})
    (source,) = code_of(fn, image)
    assert IN_CPP in source
    names = ["product_float32(", "winograd_float32(plane", "attention_float32(sizes"]
    names += ["static IpexKept kept"] if onednn.installed_version() else []
    assert not [name for name in names if name not in source]
    for _ in range(2):
        truth = model.double()(image.double())
        model.float()
        # Some hundred sums of fp32, a rounding each.
        assert (fn(image) - truth).norm() < 2e-6 * truth.norm()
        for weight in model.parameters():
            weight.mul_(1.5)  # which must be packed anew


@pytest.mark.skipif(not onednn.installed_version(), reason="onednn-cpu-gomp is not installed")
@torch.no_grad()
def test_a_primitive_for_each_number_of_threads(
    everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which the code says nothing where it has no loop, so torch loads it once for both."""
    model = nn.Conv2d(3, 64, 7, 2, 3).eval().to(memory_format=torch.channels_last)
    image = torch.randn(1, 3, 32, 32).to(memory_format=torch.channels_last)
    made, threads = [], torch.get_num_threads()
    make = onednn.primitive
    monkeypatch.setattr(
        onednn, "primitive", lambda words: made.append(torch.get_num_threads()) or make(words)
    )
    fn = compiled(model, options={"cpp_wrapper": True, "strict": True})
    try:
        for count in (1, threads + 1, 1, threads + 1):
            torch.set_num_threads(count)
            # Sums of fp32, in another order.
            torch.testing.assert_close(fn(image), model(image), rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(threads)
    assert made == [1, threads + 1]


@needs_library
@torch.no_grad()
def test_a_library_that_is_gone_is_an_error_that_says_so(
    everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a graph out of a cache that was filled where it can be built."""

    def gone() -> None:
        raise NotBuiltError("no compiler was found")

    monkeypatch.setattr(cpu_library.LIBRARY, "library", gone)
    fn = compiled(nn.Linear(48, 16).eval(), options={"cpp_wrapper": True})
    with pytest.raises(RuntimeError, match="cpu_library: no compiler was found"):
        fn(torch.randn(3, 48))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@torch.no_grad()
def test_inference_has_cpp(mode: str) -> None:
    model = Mlp().eval()
    fn = compiled(model, mode=mode)
    (source,) = code_of(fn, X)
    torch.testing.assert_close(fn(X), model(X))
    assert IN_CPP in source
    assert said("hoisted")
    assert not said("missed")


@pytest.mark.parametrize(
    ("how", "trains"),
    [({}, True), ({"options": {"cpp_wrapper": False}}, False)],
    ids=["training", "by option"],
)
def test_others_have_python(how: dict[str, object], trains: bool) -> None:
    model = Mlp().eval()
    with torch.set_grad_enabled(trains):
        sources = code_of(compiled(model, **how), X)
    assert IN_CPP not in "".join(sources)


@torch.no_grad()
def test_a_dynamic_size_is_converted_to_a_tensor_once() -> None:
    model = Mlp().eval()
    fn = compiled(model, dynamic=True)
    compat.cpp_wrapper.cached_size.cache_clear()
    (source,) = code_of(fn, X)
    assert IN_CPP in source
    assert "convert_size(arg)" in source
    for rows in (4, 7, 4, 7, 4):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=1e-5)  # 32 sums of fp32
    assert compat.cpp_wrapper.cached_size.cache_info().misses == 2


@pytest.mark.parametrize("mode", [FunctionalTensorMode, FakeTensorMode])
@torch.no_grad()
def test_a_size_made_under_a_mode_is_not_kept(mode: type) -> None:
    compat.cpp_wrapper.cached_size.cache_clear()
    plain = compat.cpp_wrapper.convert_size(5)
    with mode():
        other = compat.cpp_wrapper.convert_size(5)
        compat.cpp_wrapper.convert_size(6)
    assert type(other) is not torch.Tensor
    assert type(compat.cpp_wrapper.convert_size(6)) is torch.Tensor
    assert compat.cpp_wrapper.convert_size(5) is plain
    torch.func.functionalize(lambda x: x + compat.cpp_wrapper.convert_size(7))(X)
    assert not torch._is_functional_tensor(compat.cpp_wrapper.convert_size(7))


def test_inductor_converts_dynamic_sizes_its_own_way() -> None:
    torch.compile(Mlp().eval(), backend="ipex", dynamic=True)(X)  # which puts ours in its place
    fn = torch.compile(Mlp().eval(), dynamic=True, options={"cpp_wrapper": True})
    with torch.no_grad():
        (source,) = code_of(fn, X)
    assert IN_CPP in source
    assert "convert_size" not in source


@torch.no_grad()
def test_its_two_sources_compile_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to begin."""
    both, usual, met = threading.Barrier(2, timeout=60), CppBuilder.build, []

    def build(builder: CppBuilder) -> None:
        if builder.get_target_file_path().endswith(".o"):
            met.append(both.wait())
        usual(builder)

    monkeypatch.setattr(CppBuilder, "build", build)
    scale = 1 + time.time() % 1  # which no other run has compiled
    fn = compiled(lambda x: F.gelu(x) * scale)  # type: ignore[arg-type]
    torch.testing.assert_close(fn(X), F.gelu(X) * scale)
    assert sorted(met) == [0, 1]
    assert not said("missed")


@torch.no_grad()
def test_inductors_own_may_call_by_name() -> None:
    fn = compiled(lambda x: torch.linalg.cholesky(x) + 1)  # type: ignore[arg-type]
    x = torch.eye(4) * 2
    fn(x)
    torch.compiler.reset()
    theirs = torch.compile(lambda x: torch.linalg.cholesky(x) + 1, options={"cpp_wrapper": True})
    (source,) = code_of(theirs, x)
    torch.testing.assert_close(theirs(x), torch.linalg.cholesky(x) + 1)
    assert IN_CPP in source


@torch.no_grad()
def test_what_inductor_has_not_in_cpp_is_called_from_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("not in C++ yet")

    monkeypatch.setattr(CppWrapperCpu, "write_wrapper_decl", refuse)
    model = Mlp().eval()
    fn = compiled(model)
    (source,) = code_of(fn, X)
    torch.testing.assert_close(fn(X), model(X))
    assert IN_CPP not in source
    (reason,) = [reason for reason in said("missed") if reason.startswith("C++ wrapper")]
    assert "not in C++ yet" in reason
    assert "Python calls the kernels" in reason
    assert said("hoisted")
    assert not said("fallback")


@torch.no_grad()
def test_what_an_op_raises_is_its_own_error() -> None:
    """In C++ all that an op without a function of Inductor's raises is a RuntimeError."""
    fn = torch.compile(lambda x: torch.linalg.cholesky(x) + 1, backend="ipex")
    raised = pytest.raises(torch.linalg.LinAlgError, match="positive-definite")
    # 2.11's Inductor loses the check, without us too.
    with raised if compat.torch_minor() >= (2, 13) else contextlib.nullcontext():
        fn(-torch.eye(4))
    (reason,) = [reason for reason in said("missed") if reason.startswith("C++ wrapper")]
    assert "by its name alone" in reason
    assert len(decisions.reports()) == 1


@pytest.mark.parametrize("place", ["of an input", "of a weight"])
@torch.no_grad()
def test_is_lowered_once_if_cpp_lacks_an_op(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `matrix_exp` C++ has the name alone; what is done to weights alone is not in the code."""
    lowered, usual = [], GraphLowering.run

    def run(graph: GraphLowering, *args: object) -> object:
        lowered.append(graph.cpp_wrapper)
        return usual(graph, *args)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4) * 3)

        def forward(self, x: Tensor) -> Tensor:
            if place == "of a weight":
                return torch.linalg.matrix_exp(self.weight) + x
            return torch.linalg.matrix_exp(x) + self.weight

    monkeypatch.setattr(GraphLowering, "run", run)
    model, x = Model().eval(), torch.eye(4) * 2
    with graph_cache.spare():
        torch.testing.assert_close(compiled(model)(x), model(x))
    in_cpp = place == "of a weight"
    assert lowered[0] is in_cpp
    assert len({*lowered}) == 1, "lowered for both wrappers"
    assert bool([r for r in said("missed") if "by its name alone" in r]) is not in_cpp


@torch.library.custom_op("mine::raises", mutates_args=())
def raises(x: Tensor) -> Tensor:
    raise KeyError("mine")


@raises.register_fake
def _(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize("inside", [False, True], ids=["itself", "in a branch"])
@torch.no_grad()
def test_ops_of_users_are_pythons_to_call(inside: bool) -> None:
    def plain(x: Tensor) -> Tensor:
        return torch.ops.mine.raises(x) + 1

    def branching(x: Tensor) -> Tensor:
        result: Tensor = torch.cond(x.sum() > 0, plain, torch.sin, (x,))
        return result

    fn = torch.compile(branching if inside else plain, backend="ipex")
    with pytest.raises(KeyError, match="mine"):
        fn(X.abs())


@torch.no_grad()
def test_without_a_compiler_what_needs_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CppWrapperCpu, "write_wrapper_decl", _no_compiler)
    fn = torch.compile(lambda a, b: (a.t(), b), backend="ipex")
    assert fn(X, X)[0].shape == (32, 4)


def _no_compiler(*_: object) -> None:
    raise InvalidCxxCompiler


@pytest.mark.skipif(not onednn.installed_version(), reason="onednn-cpu-gomp is not installed")
@torch.no_grad()
def test_a_bound_may_be_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    every = cached_primitives.Most(*[math.inf] * 4)
    monkeypatch.setattr(cached_primitives, "FASTER", {(architecture(), torch.float32): every})
    monkeypatch.setattr(winograd, "FASTER", {})
    conv = nn.Conv2d(3, 64, 7, 2, 3).eval().to(memory_format=torch.channels_last)
    image = torch.randn(1, 3, 32, 32).to(memory_format=torch.channels_last)

    def model(x: Tensor) -> Tensor:
        return F.hardtanh(conv(x), -1.0, math.inf)

    options = {"cpp_wrapper": True, "strict": True}
    fn = torch.compile(model, backend="ipex", options=options)
    # Sums of fp32, in another order.
    torch.testing.assert_close(fn(image), model(image), rtol=1e-5, atol=1e-5)
    assert [reason for reason in said("choice") if "cached oneDNN primitives" in reason]


@torch.no_grad()
def test_torchs_variable_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CPP_WRAPPER", "0")
    (source,) = code_of(compiled(Mlp().eval()), X)
    assert IN_CPP not in source


def test_graphs_with_objects_as_inputs_are_called_from_python():
    """A device mesh, as graphs on DTensors have, is no tensor; test_shards.py has the slow twin."""
    graph = torch.fx.Graph()
    x, mesh = graph.placeholder("x"), graph.placeholder("mesh")
    x.meta["val"], mesh.meta["val"] = torch.ones(3), object()
    graph.output((x,))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    compat.check_has_cpp(gm)  # outside of this backend's own wrapper nothing is refused
    with compat.wrapping():
        with pytest.raises(NotImplementedError, match="no input of type object"):
            compat.check_has_cpp(gm)
        for value in (torch.ones(2), 3, 0.5, None):
            mesh.meta["val"] = value
            compat.check_has_cpp(gm)
