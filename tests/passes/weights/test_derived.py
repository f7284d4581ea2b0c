"""Derived weights: `refresh`, who shares them, how many are kept, and each part of the check."""

import copy
import ctypes
import gc
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import runtime_wrappers
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ipex_inductor import compat, derived_memory, refresh
from ipex_inductor.errors import ArgumentError
from ipex_inductor.passes.weights import derived, program, weight_results, weight_snapshot
from ipex_inductor.reporting import decisions
from support.helpers import Mlp, code_of


def whole(*shape):
    """Whole numbers so small that sums of their products are exact, in whatever order."""
    return torch.randint(-4, 5, shape).float()


X = whole(4, 32)

pytestmark = pytest.mark.usefixtures("op_by_op_unless_in_code")


@pytest.fixture
def runs(monkeypatch):
    """How often a program ran."""
    counted = []
    run = program.Program.run
    monkeypatch.setattr(
        program.Program, "run", lambda self, weights: counted.append(1) or run(self, weights)
    )
    return counted


class Product(nn.Module):
    """One derived tensor of 4 KiB, read by no product: a packed one depends on the batch."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(whole(32, 32))
        self.scale = nn.Parameter(whole(32))

    def forward(self, x):
        return (x.unsqueeze(-1) * (self.w * self.scale)).sum(1)


SIZE = 4 * 32 * 32


def compiled(model, **options):
    return torch.compile(model, backend="ipex", options={"strict": True, **options})


def check(fn, model, x=X):
    torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=1e-5)


def events(kind):
    return [e.reason for r in decisions.reports() for e in r.events if e.kind == kind]


@torch.no_grad()
def test_a_first_call_derives_past_aot_autograds_check(monkeypatch):
    """Which takes every op through Python; of others' modes none is left out."""
    around, run = [], program.Program.run

    def noted(self, weights):
        around.append([type(mode) for mode in _get_current_dispatch_mode_stack()])
        return run(self, weights)

    monkeypatch.setattr(program.Program, "run", noted)
    model = Product()
    check(compiled(model), model)
    assert around == [[]]
    check_of_ops = runtime_wrappers._AnalyzeCustomOpInputOutputMode
    for inner, left in ((check_of_ops, [TorchDispatchMode]), (TorchDispatchMode, None)):
        with TorchDispatchMode(), inner():
            before = _get_current_dispatch_mode_stack()
            with compat.skip_op_analysis():
                now = _get_current_dispatch_mode_stack()
            assert _get_current_dispatch_mode_stack() == before
        assert [type(mode) for mode in now] == (left or [type(mode) for mode in before])


# Where the environment says CI, torch raises what it else warns of.
@torch.no_grad()
@pytest.mark.parametrize("raises", [False, True])
def test_a_users_op_on_weights_is_checked_by_aot_autograd(raises):
    """That it returns its input, against its schema, is told as Inductor tells it."""
    with torch.library._scoped_library("ipex_test_derived", "FRAGMENT") as library:
        name = f"turned_{raises}"  # torch looks at each op once a process
        library.define(f"{name}(Tensor w) -> Tensor")
        library.impl(name, lambda w: w.t(), "CPU")
        torch.library.register_fake(
            f"ipex_test_derived::{name}", lambda w: w.new_empty(w.shape).t(), lib=library
        )
        op = getattr(torch.ops.ipex_test_derived, name)
        model = nn.Module()
        model.w = nn.Parameter(torch.randn(8, 8))
        model.forward = lambda x: x @ (op(model.w) * 2)
        matching = f"ipex_test_derived::{name}"
        told = (
            pytest.raises(RuntimeError, match=matching)
            if raises
            else pytest.warns(UserWarning, match=matching)
        )
        with torch._functorch.config.patch(error_on_custom_op_aliasing=raises), told:
            compiled(model)(torch.randn(3, 8))


@torch.no_grad()
def test_refresh_shows_at_once_what_nothing_notices(runs, monkeypatch):
    monkeypatch.setattr(weight_results, "_hashes", lambda weight, watched: None)
    model = Product().eval()
    fn = compiled(model)
    check(fn, model)
    graphs = counters["stats"]["unique_graphs"]
    ctypes.memset(model.w.data_ptr(), 0x40, 4 * 32)
    assert not torch.allclose(fn(X), model(X)), "else this test shows nothing"
    assert refresh(model) == 1
    assert refresh(model) == 0, "nothing is left to refresh"
    for _ in range(2):
        check(fn, model)
    assert len(runs) == 2
    assert counters["stats"]["unique_graphs"] == graphs


@torch.no_grad()
@pytest.mark.parametrize("as_what", ["module", "compiled module", "everything", "part"])
def test_what_can_be_refreshed(as_what, runs):
    model = nn.Sequential(Product(), Product()).eval()
    fn = compiled(model)
    check(fn, model)
    model[0].w.data.add_(1)
    of = {"module": model, "compiled module": fn, "everything": None, "part": model[0]}
    refreshed = refresh(of[as_what])
    assert refreshed == (1 if as_what == "part" else 2)
    check(fn, model)
    assert len(runs) == 2 + refreshed


@torch.no_grad()
def test_refresh_finds_weights_that_share_storage():
    model, holder = Product().eval(), nn.Module()
    fn = compiled(model)
    check(fn, model)
    holder.register_buffer("view", model.w.data.view(-1)[5:])
    holder.view.numpy()[0] = 9
    assert refresh(holder) == 1
    check(fn, model)


@torch.no_grad()
def test_refresh_leaves_other_models_alone():
    model, other = Product().eval(), Product().eval()
    fn = compiled(model)
    check(fn, model)
    assert refresh(other) == 0
    assert refresh(nn.Module()) == 0


@pytest.mark.parametrize("wrong", [X, "model", lambda x: x, [nn.Linear(1, 1)]])
def test_refresh_of_anything_else_is_an_error(wrong):
    with pytest.raises(ArgumentError, match="expected a module, a compiled module, or None"):
        refresh(wrong)


@torch.no_grad()
def test_graphs_share_what_they_derive_alike(in_code, runs, no_garbage):
    model = Product().eval()
    first, second = compiled(model), compiled(lambda x: model(x).relu())
    check(first, model)
    check(first, model, whole(7, 32))  # another graph, of a dynamic batch
    second(X)
    assert counters["stats"]["unique_graphs"] == 3
    assert len(runs) == 1
    assert derived_memory() == SIZE
    model.w.mul_(2)
    check(first, model)
    torch.testing.assert_close(second(X), model(X).relu())
    assert len(runs) == 2
    assert derived_memory() == SIZE


@torch.no_grad()
def test_a_changed_weight_frees_what_other_graphs_hold(no_garbage):
    model = Product().eval()
    first, second = compiled(model), compiled(lambda x: model(x).relu())
    check(first, model)
    second(X)
    model.w.mul_(2)
    check(first, model)
    held = [o for o in gc.get_objects() if type(o) is weight_snapshot.Snapshot and o.current]
    assert sum(v.nbytes for s in held for v in s.current.values) == SIZE


MODELS = 12


@torch.no_grad()
def test_any_number_of_models_behind_one_graph_is_derived_once_each(runs, no_garbage):
    models = [Product().eval() for _ in range(MODELS)]
    fn = compiled(lambda m, x: m(x))
    for _ in range(3):
        for model in models:
            torch.testing.assert_close(fn(model, X), model(X))
    assert len(runs) == len(models)
    assert derived_memory() == SIZE * len(models)
    models[1].scale.add_(1)
    for model in models:
        torch.testing.assert_close(fn(model, X), model(X))
    assert len(runs) == len(models) + 1
    del models[3:], model
    assert derived_memory() == SIZE * 3


@torch.no_grad()
def test_models_that_share_a_first_and_last_weight_are_told_apart(runs):
    class Stack(nn.Module):
        def __init__(self, first, last):
            super().__init__()
            self.layers = nn.ModuleList([first, Product(), last])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    first, last = Product(), Product()
    models = [Stack(first, last).eval() for _ in range(3)]
    fn = compiled(lambda m, x: m(x))
    for _ in range(3):
        for model in models:
            check(lambda x, m=model: fn(m, x), model)
    assert len(runs) == 2 + len(models)


@torch.no_grad()
def test_where_memory_is_scarce_the_latest_models_are_kept(no_garbage, monkeypatch):
    models = [Product().eval() for _ in range(MODELS)]
    monkeypatch.setattr(derived, "available_memory", lambda _: 10 * SIZE - derived_memory())
    fn = compiled(lambda m, x: m(x))
    for _ in range(2):
        for model in models:
            torch.testing.assert_close(fn(model, X), model(X))
    assert 0 < derived_memory() <= 9 * SIZE
    assert derived_memory() < SIZE * MODELS


@torch.no_grad()
def test_a_step_concerns_the_parameters_of_its_optimizer(runs):
    """A frozen teacher beside a net that trains is not derived again."""
    teacher, student = Product().eval(), Product()
    fn = compiled(teacher)
    check(fn, teacher)
    for fused in (False, True):
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1, fused=fused)
        for _ in range(3):
            for p in student.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            check(fn, teacher)
    assert len(runs) == 1
    tuned = torch.optim.SGD(teacher.parameters(), lr=0.1, fused=True)
    for p in teacher.parameters():
        p.grad = torch.ones_like(p)
    tuned.step()
    check(fn, teacher)
    assert len(runs) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_made_in_inference_mode_are_derived_once(mode, runs):
    """They have no version; writes show by their contents."""
    with torch.inference_mode():
        model = Product().eval()
    fn = compiled(model)
    with mode():
        for _ in range(5):
            check(fn, model)
    assert len(runs) == 1
    with torch.inference_mode():
        model.w.mul_(2)
        check(fn, model)
        model.scale[3] = 7
        check(fn, model)
        model.w.data.mul_(3)
        check(fn, model)
    assert len(runs) == 4


def learn(model, fn, steps, runs, x=X):
    """Act and step in turns; return how many programs ran at each call."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    counts = []
    for _ in range(steps):
        before = len(runs)
        with torch.no_grad():
            check(fn, model, x)
        counts.append(len(runs) - before)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_that_change_at_each_call_are_read_as_they_are(dynamic, runs, monkeypatch):
    """Until they stayed the same for as many calls as deriving costs."""
    monkeypatch.setattr(derived, "MOST_CALLS", 6)
    model = Product()
    fn = torch.compile(model, backend="ipex", dynamic=dynamic, options={"strict": True})
    monkeypatch.setattr(
        derived.DerivedWeights, "note_call", lambda self, _: setattr(self, "_call_seconds", 1e-9)
    )
    most = weight_snapshot.UNPAID
    assert learn(model, fn, 8, runs) == [1] * most + [0] * (8 - most)
    said = [reason for reason in events("missed") if "plain weights" in reason]
    assert len(said) == 1
    runs.clear()
    with torch.no_grad():
        for _ in range(6):
            check(fn, model)
        assert not runs
        for _ in range(3):
            check(fn, model)
    assert len(runs) == 1
    assert learn(model, fn, 4, runs)[1:] == [0] * 3, "one that was not paid back ends it again"


@torch.no_grad()
def test_a_model_in_shared_memory_reads_its_weights_as_they_are(runs, monkeypatch):
    """Of a size that is not compared whole at each call."""
    monkeypatch.setattr(derived, "FULL", SIZE // 2)
    model = Product().eval()
    model.share_memory()
    fn = compiled(model)
    for _ in range(3):
        check(fn, model)
        model.w.numpy()[0, 0] += 1
    assert not runs
    assert "shared memory" in " ".join(events("missed"))
    model.w.data, model.scale.data = model.w.clone(), model.scale.clone()
    for _ in range(3):
        check(fn, model)


@torch.no_grad()
@pytest.mark.parametrize("end", ["model", "graph"])
def test_what_was_derived_goes_with_its_last_user(end, no_garbage):
    model = Product().eval()
    fns = [compiled(lambda m, x: m(x)), compiled(lambda m, x: m(x) + 1)]
    for fn in fns:
        fn(model, X)
    assert derived_memory() == SIZE
    if end == "model":
        del model
    else:
        del fn, fns
        torch.compiler.reset()
        gc.collect()
    assert derived_memory() == 0


@torch.no_grad()
@pytest.mark.parametrize(("limit", "left"), [(-1, 0), (2**14, 0), (2**13, 1), (2**13 - 1, 2)])
@pytest.mark.sampled
def test_the_bound_leaves_work_in_the_graph(limit, left, no_garbage):
    model = Mlp().eval()  # two weights of 2**13 bytes, packed by oneDNN
    fn = compiled(model, weight_prologue_bytes=limit, blocked_products=False)
    check(fn, model)
    model.up.weight.mul_(2)
    check(fn, model)
    assert derived_memory() == (2 - left) * 2**13
    beyond = [reason for reason in events("missed") if "weight_prologue_bytes" in reason]
    assert beyond == (
        [f"{left} tensors are beyond weight_prologue_bytes={limit}: left in the graph"]
        if left
        else []
    )


class Quantized(nn.Module):
    """A linear layer whose weight is stored in int8."""

    def __init__(self, size=1100):  # beyond what stays in a cache
        super().__init__()
        self.register_buffer("w", torch.randint(-127, 127, (size, size), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(size, 1))

    def forward(self, x):
        return F.linear(x, self.w.to(x.dtype) * self.scale.to(x.dtype))


@torch.no_grad()
@pytest.mark.parametrize("limit", [-1, 1 << 30])
def test_quantized_weights_are_packed_only_within_a_bound(limit, no_garbage):
    model, x = Quantized().eval(), torch.randn(4, 1100)
    fn = compiled(model, weight_prologue_bytes=limit)
    # Sums of 1100 terms of up to 127 x 3, in another order.
    torch.testing.assert_close(fn(x), model(x), rtol=1e-4, atol=1e-1)
    assert (derived_memory() > model.w.nbytes) is (limit > 0)
    assert any("of quantized weights" in reason for reason in events("missed")) is (limit < 0)


@torch.no_grad()
def test_the_bound_holds_for_what_is_not_packed(no_garbage):
    model = nn.Sequential(Product(), Product()).eval()
    fn = compiled(model, weight_prologue_bytes=SIZE)
    check(fn, model)
    assert derived_memory() == SIZE
    assert events("hoisted") == ["1 tensors, 0.0 MiB, of 2 weights"]


# Each of these is seen by one part of the check alone.


@torch.no_grad()
def test_another_tensor_with_the_same_memory_and_version():
    model = Product().eval()
    fn = compiled(model)
    old = model.w
    check(fn, model)
    model.w = nn.Parameter(old.data)
    assert model.w._version == old._version
    old.mul_(2)
    check(fn, model)
    model.w = nn.Parameter(old.data)
    check(fn, model)


@torch.no_grad()
def test_another_tensor_with_the_same_identity_memory_and_version():
    model = Product().eval()
    model.w = nn.Parameter(model.w.data)
    fn = compiled(model)
    reused = 0
    for _ in range(50):
        check(fn, model)
        seen = id(model.w), model.w._version
        memory = model.w.data
        memory.mul_(-1)
        model.w = None
        model.w = nn.Parameter(memory)
        reused += seen == (id(model.w), model.w._version)
        check(fn, model)
    assert reused, "else this test shows nothing"


@torch.no_grad()
@pytest.mark.parametrize("how", ["tensors", "module.to", "load_state_dict"])
def test_tensors_can_still_be_swapped(how):
    model, other = Product().eval(), Product().eval()
    fn = compiled(model)
    check(fn, model)
    torch.__future__.set_swap_module_params_on_conversion(how != "tensors")
    try:
        if how == "tensors":
            torch.utils.swap_tensors(model.w, other.w)
        elif how == "module.to":
            model.to(torch.float64).to(torch.float32)
        else:
            model.load_state_dict(other.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    check(fn, model)
    model.w.mul_(2)
    check(fn, model)


@torch.no_grad()
def test_weights_are_saved_and_copied_without_us(tmp_path):
    model = Product().eval()
    check(compiled(model), model)
    torch.save(model.w, tmp_path / "w")
    assert torch.equal(torch.load(tmp_path / "w", weights_only=True), model.w)
    torch.save(model.state_dict(), tmp_path / "state")
    torch.load(tmp_path / "state", weights_only=True)
    assert b"ipex" not in (tmp_path / "state").read_bytes()
    assert torch.equal(copy.deepcopy(model).w, model.w)


@torch.no_grad()
def test_another_place_in_the_same_storage():
    model, both = Product().eval(), whole(2, 32, 32)
    model.w.data = both[0]
    fn = compiled(model)
    check(fn, model)
    version = model.w._version
    model.w.data = both[1]
    assert model.w._version == version
    check(fn, model)


@torch.no_grad()
def test_another_storage_at_the_same_address():
    model = Product().eval()
    fn = compiled(model)
    check(fn, model)
    memory, version = torch.empty(32, 32), model.w._version
    for _ in range(50):
        model.w.data = torch.empty(1)
        memory.copy_(whole(32, 32))
        model.w.data = torch.from_numpy(memory.numpy())
        assert model.w.data_ptr() == memory.data_ptr()
        check(fn, model)
    assert model.w._version == version


@pytest.mark.skipif(
    compat.torch_minor() == (2, 11),
    reason="does not guard on strides of parameters: Inductor's own code raises as well",
)
@torch.no_grad()
def test_other_strides_of_the_same_memory(in_code):
    model = Product().eval()
    fn = compiled(model)
    check(fn, model)
    model.w.data = model.w.data.t()
    check(fn, model)


LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.t(),
    "cut": lambda x: x[:, ::2],
    "cut and transposed": lambda x: x[1:, ::2].t(),
    "expanded": lambda x: x[:, :1].expand(6, 8),
    "parameter": nn.Parameter,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_program_casts_as_prims_does(layout, dtype):
    """Inductor's code relies on the strides that the op itself would give."""
    x = LAYOUTS[layout](torch.randn(6, 8))
    step = program.Step("prims::convert_element_type", (program.Ref(0), dtype), ())
    (got,) = program.Program((0,), ("",), (step,), (program.Ref(1),)).run([x])
    want = torch.ops.prims.convert_element_type.default(x, dtype)
    assert torch.equal(got, want)
    assert (got.dtype, got.stride()) == (want.dtype, want.stride())
    assert got.data_ptr() != x.data_ptr()


WEIGHTS = {
    "plain": (torch.randn(6, 4, 3, 3), (6, 1, 1, 1)),
    "more than one block": (torch.randn(40, 2000), (40, 1)),
    "rows longer than a block": (torch.randn(2, 40_000), (2, 1)),
    "channels last": (torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last), (6, 1, 1, 1)),
    "cut": (torch.randn(12, 4, 3, 3)[::2], (6, 1, 1, 1)),
    "transposed convolution": (torch.randn(4, 6, 3, 3), (1, 6, 1, 1)),
    "no row": (torch.randn(0, 4, 3, 3), (0, 1, 1, 1)),
    "one factor": (torch.randn(6, 4), ()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", WEIGHTS)
def test_a_weight_is_scaled_in_one_pass_with_the_same_bits_and_strides(shape, dtype):
    weight, factors = WEIGHTS[shape][0].to(dtype), torch.randn(WEIGHTS[shape][1]).double()
    ref, cast = program.Ref, "prims::convert_element_type"
    steps = (
        program.Step(cast, (ref(0), torch.float64), ()),
        program.Step("aten::mul.Tensor", (ref(2), ref(1)), ()),
        program.Step(cast, (ref(3), dtype), ()),
    )
    whole = program.Program((0, 1), ("", ""), steps, (ref(4),))
    assert [step and step.op for step in whole._fused_steps] == [None, None, "scaled"]
    (got,) = whole.run([weight, factors])
    want = torch.ops.prims.convert_element_type.default(weight, torch.float64) * factors
    want = torch.ops.prims.convert_element_type.default(want, dtype)
    assert torch.equal(got, want)
    assert (got.dtype, got.stride()) == (want.dtype, want.stride())


@pytest.mark.parametrize("seen", [2, 3])
def test_what_somebody_else_reads_is_computed_by_itself(seen):
    ref, cast = program.Ref, "prims::convert_element_type"
    steps = (
        program.Step(cast, (ref(0), torch.float64), ()),
        program.Step("aten::mul.Tensor", (ref(2), ref(1)), ()),
        program.Step(cast, (ref(3), torch.float32), ()),
    )
    whole = program.Program((0, 1), ("", ""), steps, (ref(4), ref(seen)))
    assert whole._fused_steps == steps
    weight, factors = torch.randn(6, 4), torch.randn(6, 1).double()
    got, other = whole.run([weight, factors])
    assert torch.equal(got, (weight.double() * factors).float())
    assert torch.equal(other, weight.double() * (factors if seen == 3 else 1))


def test_a_program_fills_lists_and_keywords():
    ref = program.Ref
    steps = (
        program.Step("aten::cat", ([ref(0), ref(1)], 0), ()),
        program.Step("aten::split.Tensor", (ref(2), 3), ()),
        program.Step("getitem", (ref(3), 1), ()),
        program.Step("aten::add.Tensor", (ref(4), ref(0)), (("alpha", 2),)),
    )
    a, b = torch.randn(3), torch.randn(3)
    (got,) = program.Program((0, 1), ("", ""), steps, (ref(5),)).run([a, b])
    assert torch.equal(got, b + 2 * a)


def captured(op, *args):
    """What a graph under capture keeps of one op on its only weight."""
    step = program.Step(op, args, ())
    return derived.DerivedWeights([program.Program((0,), ("",), (step,), (program.Ref(1),))], True)


@torch.no_grad()
def test_captured_results_keep_their_addresses():
    w = nn.Parameter(torch.randn(8))
    kept = captured("aten::add.Tensor", program.Ref(0), program.Ref(0))
    (first,) = kept.of([w])
    for write in (lambda: w.mul_(2), lambda: w.data.mul_(2), lambda: setattr(w, "data", w + 1)):
        write()
        refresh()
        (now,) = kept.of([w])
        assert now is first
        torch.testing.assert_close(now, w + w)
    with torch.inference_mode():
        w.data.mul_(2)
        refresh()
        assert kept.of([w])[0] is first
    torch.testing.assert_close(first, w + w)


@pytest.mark.parametrize(
    ("op", "args"),
    [("expand", ([3, 8],)), ("unfold", (0, 4, 2)), ("expand", ([0, 8],)), ("t", ())],
)
@torch.no_grad()
def test_results_with_elements_that_share_memory_are_computed_again(op, args):
    """As a mask that is the same for all of a batch; torch refuses to write to such tensors."""
    ref = program.Ref
    steps = (
        program.Step("aten::add.Tensor", (ref(0), 1.0), ()),
        program.Step(f"aten::{op}", (ref(1), *args), ()),
    )
    kept = derived.DerivedWeights([program.Program((0,), ("",), steps, (ref(2),))], True)
    w = nn.Parameter(torch.randn(8))
    (first,) = kept.of([w])
    w.mul_(2)
    (now,) = kept.of([w])
    assert now is first
    torch.testing.assert_close(now, getattr(w + 1, op)(*args))
    assert now.stride() == getattr(w + 1, op)(*args).stride()


@torch.no_grad()
def test_captured_results_never_overwrite_a_weight():
    w = nn.Parameter(torch.randn(8))
    kept = captured("aten::view", program.Ref(0), [8])
    kept.of([w])
    old, copy = w.data, w.detach().clone()
    w.data = torch.randn(8)
    torch.testing.assert_close(kept.of([w])[0], w.detach())
    torch.testing.assert_close(old, copy)


@torch.no_grad()
def test_eval_dropout_vanishes_and_constants_propagate(in_code):
    """Inductor's work, which must survive ours: no random number, one constant."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Dropout1d(0.5)).eval()
    fn = compiled(lambda x: model(x) * (torch.ones(32) * 2 + 1))
    (code,) = code_of(fn, X)
    assert not re.search("rand_cpu|seed|bernoulli", code)
    assert "static_cast<float>(3.0)" in code
    assert re.search("rand_cpu|seed|bernoulli", code_of(compiled(nn.Dropout(0.5)), X)[0])
    torch.testing.assert_close(fn(X), F.linear(X, model[0].weight, model[0].bias) * 3)
