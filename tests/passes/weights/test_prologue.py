"""Weight-only work runs once, and again whenever a weight changes."""

import copy
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor import derived_memory
from ipex_inductor.ops.conv.grouped import Blocks
from ipex_inductor.passes.weights import program, prologue, weight_nodes, weight_snapshot
from ipex_inductor.reporting import decisions
from support.helpers import Mlp

X = torch.randn(4, 32)

pytestmark = pytest.mark.usefixtures("op_by_op_unless_in_code")


@pytest.fixture
def runs(monkeypatch):
    """How often a program ran: each is one derivation that shares no work with another."""
    counted = []
    run = program.Program.run
    monkeypatch.setattr(
        program.Program, "run", lambda self, weights: counted.append(1) or run(self, weights)
    )
    return counted


class Scaled(nn.Module):
    """`w * scale` is weight-only; so is what batch norm makes of its statistics."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 32))
        self.scale = nn.Parameter(torch.randn(32))
        self.bn = nn.BatchNorm1d(32)
        self.bn.running_mean.normal_()
        self.bn.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.bn((x @ (self.w * self.scale)).sin())  # sin: what folds is one program


def compiled(model, **options):
    return torch.compile(model, backend="ipex", options={"strict": True, **options})


def hoisted():
    return [e.reason for r in decisions.reports() for e in r.events if e.kind == "hoisted"]


@torch.no_grad()
@pytest.mark.parametrize("make", [Mlp, Scaled])
def test_runs_once(in_code, make, runs):
    model = make().eval()
    fn = compiled(model)
    for _ in range(4):
        torch.testing.assert_close(fn(X), model(X))
    assert len(runs) == 2, "two packed weights; a product, and what batch norm needs"
    assert len(hoisted()) == 1


WRITES = {
    "in place": lambda m: m.w.mul_(2),
    "through a view": lambda m: m.w[0].fill_(3),
    "data replaced": lambda m: setattr(m.w, "data", torch.randn(32, 32)),
    "parameter replaced": lambda m: setattr(m, "w", nn.Parameter(torch.randn(32, 32))),
    "state dict": lambda m: m.load_state_dict(Scaled().state_dict()),
    "buffer": lambda m: m.bn.running_var.add_(1),
    "dtype and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "replaced twice between calls": lambda m: [
        setattr(m.w, "data", torch.randn(32, 32)) for _ in range(4)
    ],
    "swapped": lambda m: setattr(m, "w", nn.Parameter(m.w.t().clone())),
}


@pytest.fixture
def patient(monkeypatch):
    """Weights that change at nearly every call are derived from all the same."""
    monkeypatch.setattr(weight_snapshot, "UNPAID", 100)


@pytest.mark.sampled
@torch.no_grad()
@pytest.mark.parametrize("write", WRITES)
def test_never_stale(write, runs, patient):
    model = Scaled().eval()
    fn = compiled(model)
    for _ in range(3):
        fn(X)
        WRITES[write](model)
        torch.testing.assert_close(fn(X), model(X))
        torch.testing.assert_close(fn(X), model(X))
    changed = 2 if write in ("state dict", "dtype and back") else 1
    assert len(runs) == 2 + 3 * changed, "only what depends on a changed weight"


def test_an_optimizer_step_is_seen(runs, patient):
    model = Scaled().eval()
    fn = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(3):
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(fn(X), model(X))
    assert len(runs) == 4, "statistics are none of the optimizer's"


def test_parameters_made_in_inference_mode_show_by_their_contents(runs):
    with torch.inference_mode():
        model = Scaled().eval()
        fn = compiled(model)
        for _ in range(3):
            torch.testing.assert_close(fn(X), model(X))
            model.w.mul_(2)
    assert len(runs) == 4, "torch counts no versions there"


@torch.no_grad()
def test_two_models_of_one_class_do_not_share(runs):
    models = [Scaled().eval() for _ in range(2)]
    fns = [compiled(m) for m in models]
    for _ in range(2):
        for fn, model in zip(fns, models, strict=True):
            torch.testing.assert_close(fn(X), model(X))


@torch.no_grad()
def test_a_deepcopy_of_the_model_is_right():
    model = Scaled().eval()
    fn = compiled(lambda m, x: m(x))
    torch.testing.assert_close(fn(model, X), model(X))
    other = copy.deepcopy(model)
    other.w.mul_(3)
    torch.testing.assert_close(fn(other, X), other(X))
    torch.testing.assert_close(fn(model, X), model(X))


@torch.no_grad()
def test_a_buffer_the_graph_writes_is_not_a_weight():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(32))

        def forward(self, x):
            y = x + self.n * 2 + 1
            self.n.add_(1)
            return y

    model, twin = Counter().eval(), Counter().eval()
    fn = compiled(model)
    for _ in range(3):
        torch.testing.assert_close(fn(X), twin(X))
    assert not hoisted()


@torch.no_grad()
def test_random_work_is_not_hoisted():
    w = nn.Parameter(torch.ones(32, 32))
    fn = compiled(lambda x: x @ F.dropout(w, 0.5, training=True))
    assert not torch.equal(fn(X), fn(X))
    assert not hoisted()


@torch.no_grad()
def test_views_and_widening_casts_stay_where_they_are_free():
    w = nn.Parameter(torch.randn(512, 1024, dtype=torch.bfloat16))
    fn = compiled(lambda x: (x.unsqueeze(-1) + w.t().float()).sum(0))
    torch.testing.assert_close(fn(X[:, :1]), (X[:, :1].unsqueeze(-1) + w.t().float()).sum(0))
    assert not hoisted()


@pytest.mark.parametrize("ours", [True, False])
def test_blocks_of_a_grouped_convolution_may_grow(ours):
    """A grouped convolution reads blocks from memory in any case; Inductor makes them in place."""
    shape, groups, around = (12288, 24, 1, 1), 512, ([1, 1], [1, 1], [0, 0], [1, 1])
    found = Blocks.fit(shape, groups, 32, 32)

    def fn(x, weight):
        blocks = found.of_weight(weight)
        if not ours:
            return x.sum() * blocks
        return torch.ops.ipex.conv_grouped(x, blocks, *around, groups, len(weight), [])

    gm = make_fx(fn)(torch.randn(1, shape[0], 1, 1), torch.randn(shape))
    _, weight = gm.graph.find_nodes(op="placeholder")
    derived = weight_nodes.weight_only(gm.graph, {weight})
    made = [*derived][-1]
    assert weight_nodes.count_bytes(made.meta["val"]) > weight_nodes.SMALL
    assert weight_nodes.is_worth_hoisting(made, derived) is ours


@torch.no_grad()
def test_autocast_casts_each_weight_once(in_code, runs):
    model = Mlp().eval()

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    ours = compiled(fn)
    for _ in range(3):
        # Eager rounds to bf16 before the GELU, oneDNN after it: one ulp of values below 1.
        torch.testing.assert_close(ours(X), fn(X), rtol=0, atol=2**-8)
    assert len(runs) == 4
    assert hoisted() == ["4 tensors, 0.0 MiB, of 4 weights"]


@torch.no_grad()
def test_switched_off(runs):
    model = Mlp().eval()
    torch.testing.assert_close(compiled(model, weight_prologue=False)(X), model(X))
    assert not runs
    assert not hoisted()


@torch.no_grad()
def test_derived_weights_die_with_the_model(no_garbage):
    before = derived_memory()  # of models that live as long as the module of a test
    model = Scaled().eval()
    fn = compiled(lambda m, x: m(x), blocked_products=False)
    fn(model, X)
    assert derived_memory() - before == 4 * (32 * 32 + 32)
    alive = weakref.ref(model.w)
    del model
    assert alive() is None
    assert derived_memory() == before


@torch.no_grad()
def test_threads_share_one_run(runs):
    model = Scaled().eval()
    fn = compiled(model)
    want = model(X)
    fn(X)
    model.scale.mul_(2)
    want = model(X)
    results = []
    call = torch.no_grad()(lambda: results.append(fn(X)))  # grad mode is per thread
    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for result in results:
        torch.testing.assert_close(result, want)
    assert len(runs) == 3


@torch.no_grad()
def test_inputs_that_alias_a_weight(in_code):
    w = nn.Parameter(torch.randn(32, 32))
    fn = compiled(lambda x: x @ (w * 2) + w.view(-1)[:32])
    torch.testing.assert_close(fn(w.data), w @ (w * 2) + w.view(-1)[:32])
    w.mul_(0.5)
    torch.testing.assert_close(fn(w.data), w @ (w * 2) + w.view(-1)[:32])


RETURNED = {
    "itself": lambda w: w * 2,
    "a view": lambda w: (w * 2).t(),
    "a view of a view": lambda w: (w * 2).t()[1:],
}


@pytest.mark.sampled("a view of a view")
@torch.no_grad()
@pytest.mark.parametrize("name", RETURNED)
def test_what_the_caller_gets_it_may_write(in_code, name):
    w, derive = nn.Parameter(torch.randn(32, 32)), RETURNED[name]
    fn = compiled(lambda x: (derive(w), x @ derive(w).t()))
    for _ in range(3):
        got, product = fn(X)
        torch.testing.assert_close((got, product), (derive(w), X @ derive(w).t()))
        got.fill_(7)


@torch.no_grad()
def test_a_graph_of_weights_alone(in_code):
    w = nn.Parameter(torch.randn(32, 32))
    fn = compiled(lambda: (w * 2).sum(0))
    for _ in range(3):
        fn().fill_(7)
        w.add_(1)
        torch.testing.assert_close(fn(), (w * 2).sum(0))


@torch.no_grad()
def test_a_weight_without_the_usual_strides(in_code):
    linear, conv = nn.Linear(32, 32), nn.Conv2d(4, 4, 3)
    linear.weight.data = linear.weight.data.t()
    conv.weight.data = conv.weight.data.permute(1, 0, 3, 2)
    image = torch.randn(1, 4, 8, 8)
    fn = compiled(lambda x, y: (F.relu(linear(x)), F.relu(conv(y)), linear.weight.sum()))
    want = (F.relu(linear(X)), F.relu(conv(image)), linear.weight.sum())
    torch.testing.assert_close(fn(X, image), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_global_freezing_is_left_to_inductor(in_code):
    model = Mlp().eval()
    with torch._inductor.config.patch(freezing=True):
        torch.testing.assert_close(compiled(model)(X), model(X))
    assert not hoisted()


@torch.no_grad()
def test_without_onednn(in_code, monkeypatch):
    model = Mlp().eval()
    with torch.backends.mkldnn.flags(enabled=False):
        torch.testing.assert_close(compiled(model)(X), model(X))
    assert not hoisted()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_optimizer_is_seen_although_it_counts_no_version(make):
    model = Scaled().eval()
    fn = compiled(model)
    optimizer = make(model.parameters(), lr=0.1, fused=True)
    with torch.no_grad():
        fn(X)
    model(X).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(fn(X), model(X))


@torch.no_grad()
def test_threads_with_models_of_their_own_never_meet(in_code):
    models = [Scaled().eval() for _ in range(2)]
    fn = compiled(lambda m, x: m(x))
    wants = [m(X) for m in models]
    fn(models[0], X)
    wrong = []

    @torch.no_grad()
    def work(number):
        for _ in range(200):
            if not torch.allclose(fn(models[number], X), wants[number], atol=1e-3):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_a_weight_stored_in_a_smaller_dtype_is_packed_in_the_prologue(in_code):
    w = nn.Parameter(torch.randn(1024, 1024, dtype=torch.bfloat16) / 32)
    x = torch.randn(2, 1024)
    fn = compiled(lambda x: F.relu(F.linear(x, w.float())))
    torch.testing.assert_close(fn(x), F.relu(F.linear(x, w.float())), rtol=1e-4, atol=1e-4)
    assert len(hoisted()) == 1


def test_a_model_that_turns_grad_on_itself_is_training():
    linear = nn.Linear(32, 32)

    def fn(x):
        with torch.enable_grad():
            return F.relu(linear(x))

    with torch.no_grad():
        torch.testing.assert_close(compiled(fn)(X), fn(X))


@torch.no_grad()
def test_in_the_body_of_a_higher_order_op_nothing_is_a_weight():
    """Its inputs have numbers of their own: whatever is done there is done on every call."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.bn.running_mean.normal_()
            self.w = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            def norm(x):
                return self.bn(self.conv(x)) @ (self.w * 2)

            return torch.cond(x.sum() > 0, norm, lambda x: self.conv(x) @ (self.w + 1), (x,))

    model, x = Branches().eval(), torch.rand(2, 3, 8, 8)
    fn = compiled(model)
    for _ in range(2):
        for sign in (1, -1):
            torch.testing.assert_close(fn(sign * x), model(sign * x), rtol=1e-4, atol=1e-5)
        model.w.mul_(2)
        model.bn.weight.mul_(2)
    events = {(e.kind, e.subject, e.reason) for r in decisions.reports() for e in r.events}
    reason = "a weight, bias or statistic is not a parameter or buffer"
    subjects = ("conv2d+batch_norm", "batch_norm+linear")
    missed = {event for event in events if event[0] != "choice"}
    assert missed == {("missed", subject, reason) for subject in subjects}


class OfTable(nn.Module):
    """A product of weights alone, beside one of the input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(32, 32))
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.outer(x) @ self.inner(self.table)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_that_only_a_program_reads_is_not_handed_over(in_code, dtype):
    """It was, to a graph that did not take it, and all that follows stood one place too early."""
    model = OfTable().to(dtype)
    x = X.to(dtype)
    fn = compiled(model)
    for _ in range(2):
        torch.testing.assert_close(fn(x), model(x), rtol=2e-2, atol=1e-1)
    with torch.no_grad():
        model.inner.weight.mul_(2)
    torch.testing.assert_close(fn(x), model(x), rtol=2e-2, atol=1e-1)


@pytest.mark.parametrize("limit", [-1, 0])
def test_rounding_is_balanced_ahead_of_the_calls_alone(limit, monkeypatch):
    """Where a bound leaves it in the graph, each call would compute it: a cast stands there."""

    def fn(weight, x):
        return x @ torch.ops.ipex.round_balanced(weight, torch.bfloat16, 0).t()

    monkeypatch.setattr(weight_nodes.compat, "is_own_input", lambda node: True)
    weight, x = torch.randn(16, 8), torch.randn(4, 8).bfloat16()
    with torch.no_grad():
        mode = FakeTensorMode()
        gm = make_fx(fn)(*map(mode.from_tensor, (weight, x)))
        fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        parts = prologue.split(
            gm, fakes, [0], decisions.GraphReport(), prologue.SplitSettings(limit=limit)
        )
        called = {node.target for node in gm.graph.nodes}
        assert torch.ops.ipex.round_balanced.default not in called
        if limit == 0:
            result, expected = gm(weight, x), x @ weight.bfloat16().t()
            assert (parts is None, torch.equal(result, expected)) == (True, True)
        else:
            assert len(parts.programs) == 1
