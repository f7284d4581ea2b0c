"""`torch.compile(backend="ipex")` behaves as `inductor` does, call by call."""

import itertools
import logging
import re

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx

from ipex_inductor import compat
from ipex_inductor.compat import cpp_wrapper
from ipex_inductor.config import MODES
from ipex_inductor.errors import DeviceError, OptionError, PassError, UnsupportedTorchError
from ipex_inductor.passes.weights import upcast
from ipex_inductor.reporting import decisions
from support.helpers import Mlp, Plain, code_of

X = torch.randn(4, 32)
SLOW = pytest.mark.slow


def compiled(model, **kwargs):
    kwargs["options"] = {"strict": True, **kwargs.get("options", {})}
    return torch.compile(model, backend="ipex", **kwargs)


def cause(raised, kind):
    """The error of ours that Dynamo wrapped."""
    error = getattr(raised.value, "inner_exception", raised.value)
    assert isinstance(error, kind), repr(error)
    return str(error)


# The same answers.


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.sampled
def test_inference(dynamic, fullgraph):
    model = Mlp().eval()
    fn = compiled(model, dynamic=dynamic, fullgraph=fullgraph)
    with torch.no_grad():
        for rows in (4, 7, 2):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(fn(x), model(x))
    assert counters["ipex"]["linear+gelu"] >= 1


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode):
    model = Mlp().eval()
    fn = torch.compile(model, backend="ipex", mode=mode)
    with torch.no_grad():
        torch.testing.assert_close(fn(X), model(X))
    assert counters["ipex"]["linear+gelu"] == 1


@pytest.mark.parametrize(
    ("dynamic", "in_code"), [(None, False), (True, True), pytest.param(None, True, marks=SLOW)]
)
def test_training(dynamic, in_code, request):
    if not in_code:
        request.getfixturevalue("op_by_op")
    model, twin = Mlp(), Mlp()
    twin.load_state_dict(model.state_dict())
    fn = compiled(model, dynamic=dynamic)
    for rows in (4, 6):
        x = torch.randn(rows, 32)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        fn(ours).square().sum().backward()
        twin(theirs).square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_batch_norm_training_updates_its_statistics():
    model, twin = (nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    fn = compiled(model)
    for _ in range(3):
        x = torch.randn(16, 32)
        torch.testing.assert_close(fn(x), twin(x))
    for (name, ours), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_eval_with_grad_on_is_training(op_by_op):
    model = Mlp().eval()
    y = compiled(model)(X)
    y.sum().backward()
    assert model.up.weight.grad is not None
    assert not counters["ipex"]


def test_fp64_and_empty_batch():
    for x in (X.double(), X.double()[:0], X[:0]):
        model = Mlp(dtype=x.dtype).eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(model)(x), model(x))


def test_graph_breaks_and_several_outputs():
    model = Mlp().eval()

    def fn(x):
        y = model(x)
        torch._dynamo.graph_break()
        return y, {"twice": model(y)}

    with torch.no_grad():
        got, want = compiled(fn)(X), fn(X)
    torch.testing.assert_close(got, want)
    assert counters["ipex"]["linear+gelu"] == 2


def test_inputs_written_in_place():
    def fn(x, y):
        x.add_(y)
        return x * 2

    ours, theirs = X.clone(), X.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled(fn)(ours, X), fn(theirs, X))
    torch.testing.assert_close(ours, theirs)


def test_recompiles_and_resets_as_inductor(op_by_op):
    def inductor(gm, example_inputs):
        return compile_fx(gm, example_inputs, compat.compile_inner)

    frames = {}
    for name, backend in (("inductor", inductor), ("ipex", "ipex")):
        torch.compiler.reset()
        counters.clear()
        fn = torch.compile(Plain().eval(), backend=backend)
        with torch.no_grad():
            for x in (X, X[:2], X[:3], X.double().float()):
                fn(x)
            torch.compiler.reset()
            fn(X)
        frames[name] = counters["stats"]["unique_graphs"]
    assert frames["ipex"] == frames["inductor"] > 1


def test_reset_forgets_the_reports():
    with torch.no_grad():
        compiled(Mlp().eval())(X)
    assert decisions.reports()
    torch.compiler.reset()
    assert not decisions.reports()


# Nothing changes for Inductor.


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_inductor_is_the_same_before_and_after(grad):
    def code(backend):
        torch.compiler.reset()
        fn = torch.compile(Mlp().train(grad), backend=backend)

        def step():
            with torch.set_grad_enabled(grad):
                y = fn(X)
                if grad:
                    y.sum().backward()

        return code_of(step)

    config = torch._inductor.config.save_config()
    before = code("inductor")
    code("ipex")
    after = code("inductor")
    assert after == before
    assert torch._inductor.config.save_config() == config


# Nothing ties the three values to each other.
EACH = {("training", "static", "fp32"), ("inference", "dynamic", "bf16")}
GRAD, DYNAMIC = {"inference": False, "training": True}, {"static": False, "dynamic": True}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HOW = [
    pytest.param(
        GRAD[how[0]],
        DYNAMIC[how[1]],
        DTYPES[how[2]],
        marks=[] if how in EACH else [SLOW],
        id="-".join(how),
    )
    for how in itertools.product(GRAD, DYNAMIC, DTYPES)
]


ARRAY = re.compile(r"^ *(?:static constexpr|const) int64_t (int_array_\d+)\[\] = (\{.*\});\n", re.M)


def inline_arrays(text):
    """Write the contents of arrays in a C++ wrapper where their names are.

    Torch 2.11 shares arrays by the address of an object, so their numbers vary from run to run.
    """
    arrays = dict(ARRAY.findall(text))
    return re.sub(r"\bint_array_\d+\b", lambda m: arrays.get(m[0], m[0]), ARRAY.sub("", text))


@pytest.mark.parametrize(("grad", "dynamic", "dtype"), HOW)
def test_what_we_cannot_improve_compiles_exactly_as_inductor(grad, dynamic, dtype):
    def code(backend):
        torch.compiler.reset()
        # On some CPUs products in bf16 are ours to improve.
        wrapped = {} if grad else {"cpp_wrapper": True, "cpp_wrapper_build_separate": True}
        asked = {"rules": f"-{upcast.NAME}"} if backend == "ipex" else wrapped
        fn = torch.compile(Plain(dtype), backend=backend, dynamic=dynamic, options=asked)
        x = X.to(dtype)

        def step():
            with torch.set_grad_enabled(grad):
                y = fn(x)
                if grad:
                    y.sum().backward()

        return [inline_arrays(text) for text in code_of(step)]

    plain = code("inductor")
    assert plain
    ours = [text.replace(cpp_wrapper.IMPORT, "") for text in code("ipex")]
    converts = f"convert_size(arg) if type(arg) is int else {cpp_wrapper.CONVERT}"
    assert any(converts in text for text in ours) == (dynamic and not grad)
    assert [text.replace(converts, cpp_wrapper.CONVERT) for text in ours] == plain


def test_a_global_pass_of_the_users_still_runs():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Count(CustomGraphPass):
        runs = 0

        def __call__(self, graph):
            self.runs += 1

        def uuid(self):
            return "count"

    count = Count()
    with torch._inductor.config.patch(joint_custom_pre_pass=count), torch.no_grad():
        compiled(Mlp().eval())(X)
        assert torch._inductor.config.joint_custom_pre_pass is count
    assert count.runs == 1
    assert counters["ipex"]["linear+gelu"] == 1


# What users get wrong.

WRONG = {
    "unknown option": ({"options": {"rulez": ""}}, "'rules'"),
    "inductor's, misspelt": ({"options": {"max_autotun": True}}, "'max_autotune'"),
    "wrong type": ({"options": {"max_autotune": "yes"}}, "bool"),
    "our own, wrong type": ({"options": {"rules": 3}}, "str"),
    "unknown mode": ({"mode": "max-autotun"}, "'max-autotune'"),
    "unknown rule": ({"options": {"rules": "-linear+gellu"}}, "'linear+gelu'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_name_the_right_ones(name):
    kwargs, hint = WRONG[name]
    with pytest.raises(Exception) as raised:  # noqa: PT011  Dynamo wraps it
        torch.compile(Mlp().eval(), backend="ipex", **kwargs)(X)
    assert hint in cause(raised, OptionError)


def test_inductors_options_reach_inductor():
    with torch.no_grad():
        (source,) = code_of(compiled(Plain().eval(), options={"cpp.threads": 1}), X)
    assert "omp parallel" not in source


def test_a_model_on_meta_says_what_to_do():
    with pytest.raises(Exception) as raised, torch.no_grad():  # noqa: PT011
        compiled(Mlp().to("meta"))(X.to("meta"))
    assert "to_empty" in cause(raised, DeviceError)


def test_freezing_per_call_is_said_to_do_nothing(caplog):
    decisions.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        compiled(Plain().eval(), options={"freezing": True})(X)
    assert "freezing" in caplog.text


# Our own failures.


@pytest.mark.parametrize("stage", ["joint.apply_rules", "weights.prologue.split"])
def test_a_failing_pass_falls_back_and_says_so(stage, monkeypatch, caplog):
    def broken(*args):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(f"ipex_inductor.passes.{stage}", broken)
    model = Mlp().eval()
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        torch.testing.assert_close(torch.compile(model, backend="ipex")(X), model(X))
    assert caplog.text.count("planted") == 1
    (event,) = [e for r in decisions.reports() for e in r.events if e.kind == "fallback"]
    assert "planted" in event.reason
    torch.compiler.reset()
    with pytest.raises(Exception) as raised, torch.no_grad():  # noqa: PT011
        compiled(model)(X)
    assert "planted" in cause(raised, PassError)


def test_an_untested_torch_gets_plain_inductor_and_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(compat, "untested_reason", lambda: "torch 2.99 is newer than tested")
    decisions.warn_once.cache_clear()
    model = Mlp().eval()
    fn = torch.compile(model, backend="ipex")
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for rows in (2, 3, 4):
            torch.testing.assert_close(fn(X[:rows]), model(X[:rows]))
    assert caplog.text.count("2.99") == 1
    assert not counters["ipex"]


def test_an_unsupported_torch_is_a_clear_error(monkeypatch):
    original = compat.untested_reason
    monkeypatch.setattr(compat, "untested_reason", lambda: original("2.8.0"))
    with pytest.raises(Exception) as raised:  # noqa: PT011
        torch.compile(torch.sin, backend="ipex")(X)
    assert "pip install" in cause(raised, UnsupportedTorchError)
