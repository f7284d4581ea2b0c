"""What notes accesses to weights changes nothing else: Dynamo, transforms, subclasses, pickle."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from ipex_inductor.passes.weights import weight_access, weight_results

X = torch.randn(2, 16)
CLOSE = {"rtol": 1e-4, "atol": 5e-4}  # sums of fp32 products of hundreds, in another order


@pytest.fixture(scope="module")
def model():
    """A model whose weights are watched, and which stays right."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    compiled = torch.compile(model, backend="ipex", options={"strict": True})

    def check():
        with torch.no_grad():
            torch.testing.assert_close(compiled(X), model(X), rtol=1e-5, atol=1e-5)

    check()
    assert weight_access._computed, "else this shows nothing"
    yield model
    check()


FUNCTIONS = {
    "numpy": lambda m, v: v.detach().cpu().numpy(),
    "a branch on numpy": lambda m, v: v + 1 if v.numpy()[0, 0] > 0 else v - 1,
    "from numpy": lambda m, v: torch.from_numpy(v.numpy() + 1),
    "a copied module": lambda m, v: copy.deepcopy(m)(v),
    "data": lambda m, v: v.data * 2 + m[0].weight.data.sum(),
    "the property": lambda m, v: torch.Tensor.data.__get__(v) + 1,
    "the function": lambda m, v: torch.Tensor.numpy(v),
    "set data": lambda m, v: (setattr(v, "data", v.data + 1), v * 1)[1],
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dynamo_compiles_what_accesses(model, backend):
    """It would compile the wrappers, call them while it does, and never end."""
    with torch.no_grad():
        for name, function in FUNCTIONS.items():
            got = torch.compile(function, backend=backend)(model, X.clone())
            want = function(model, X.clone())
            np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, err_msg=name)


def test_transforms_read_data(model):
    weight = model[0].weight
    got = torch.func.grad(lambda v: (weight.data * v).sum())(torch.ones(16))
    torch.testing.assert_close(got, weight.detach().sum(0))
    got = torch.vmap(lambda v: (weight.data * v).sum())(torch.ones(3, 16))
    assert got.shape == (3,)


def test_lazy_modules_are_made(model):
    assert nn.LazyLinear(5)(X).shape == (2, 5)
    lazy = nn.LazyLinear(4)
    lazy.load_state_dict(nn.Linear(16, 4).state_dict())


def test_a_subclass_that_knows_no_other_function(model):
    class Strict(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function in (torch.Tensor.data.__get__, torch.add):
                return super().__torch_function__(function, types, args, kwargs or {})
            return NotImplemented

    tensor = X.as_subclass(Strict)
    assert type(tensor.data) is Strict


def test_what_is_wrapped_is_what_it_was(model):
    import pickle

    for name in ("numpy", "untyped_storage", "__dlpack__"):
        method = getattr(torch.Tensor, name)
        assert pickle.loads(pickle.dumps(method)) is method  # noqa: S301  our own bytes
        assert method.__doc__
    with pytest.raises(RuntimeError, match="Deleting tensor data is not allowed"):
        del X.clone().data


def test_a_write_that_falls_into_the_computing_is_seen(monkeypatch):
    """By another thread, through `.data` or unseen: the results are those of before, once."""
    from ipex_inductor.passes.weights import program

    run, writes = program.Program.run, []

    def interrupted(self, weights):
        values = run(self, weights)
        if writes:
            writes.pop()(weights[0])
        return values

    monkeypatch.setattr(program.Program, "run", interrupted)
    layer = nn.Linear(16, 16).eval()
    compiled = torch.compile(layer, backend="ipex", options={"strict": True})
    for write in (lambda w: w.data.mul_(2), lambda w: w.mul_(2), lambda w: w.numpy().__imul__(2)):
        with torch.no_grad():
            layer.weight.normal_()
            writes.append(write)
            compiled(X)
            for _ in range(2):
                torch.testing.assert_close(compiled(X), layer(X), rtol=1e-5, atol=1e-5)


def test_aliases_are_noted_once_and_quickly_settled():
    """However many graphs share the vector that parameters are parts of."""
    layers = [nn.Linear(8, 8).eval().requires_grad_(False) for _ in range(8)]
    parameters = [p for layer in layers for p in layer.parameters()]
    vector = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(vector, parameters)
    compiled = torch.compile(lambda layer, x: layer(x), backend="ipex", options={"strict": True})
    for _ in range(3):
        for layer in layers:
            torch.testing.assert_close(compiled(layer, X[:, :8]), layer(X[:, :8]))
    assert len(weight_access._aliases) <= len(parameters) + 8
    vector.mul_(2)
    for layer in layers:
        torch.testing.assert_close(compiled(layer, X[:, :8]), layer(X[:, :8]))


CALLS = """
import sys
import torch
from ipex_inductor.passes.weights import weight_access, weight_reader
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.tensor_reader import accesses_cpp

if sys.argv[1] == "Python":
    def library():
        raise NotBuiltError("no compiler")
    accesses_cpp.library = library


class Results:
    def outdate(self): ...
    def is_current(self, storage): return True


weight, results = torch.ones(4), Results()
weight_access.watch([weight], results)
assert isinstance(vars(torch.Tensor).get("data"), property) is (sys.argv[1] == "Python")
calls = {
    "our own": lambda: weight_access.open_storage(weight),
    "a method": lambda: weight.numpy(),
    "a function": lambda: torch.Tensor.numpy(weight),
    "a bound method": (lambda bound: lambda: bound())(weight.numpy),
    "a storage": lambda: weight.untyped_storage(),
    "a capsule": lambda: weight.__dlpack__(),
    "another capsule": lambda: torch.to_dlpack(weight),
    "an alias": lambda: weight.data,
    "set": lambda: setattr(torch.empty(0), "data", weight),
}
for name, call in calls.items():
    weight_access.settle()
    assert weight_access.is_quiet(), name
    held = call()
    print(name, weight_access.is_quiet())
    del held
"""


@pytest.mark.parametrize("way", ["C++", "Python"])
def test_each_call_is_noted(way):
    """It is noted in torch's C functions, and by wrappers where these cannot be replaced."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CALLS, way], capture_output=True, text=True
    )
    assert not run.returncode, run.stderr
    quiet = dict(line.rsplit(" ", 1) for line in run.stdout.splitlines())
    assert {name for name, is_quiet in quiet.items() if is_quiet == "True"} == {"our own"}


class Scaled(nn.Module):
    """A linear layer on a weight in int8 and a scale of each of its rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (96, 64), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(96, 1))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.float() * self.scale)


def test_a_small_weight_in_doubt_costs_no_comparison_of_a_large_one(monkeypatch):
    model, x = Scaled().eval(), torch.randn(5, 64)
    compiled = torch.compile(model, backend="ipex", options={"strict": True})
    with torch.no_grad():
        compiled(x)
        array, compared = model.scale.numpy(), []
        holds = weight_results._holds
        monkeypatch.setattr(
            weight_results, "_holds", lambda s, h: compared.append(h.size) or holds(s, h)
        )
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x), **CLOSE)
        assert set(compared) == {model.scale.nbytes}
        array *= 2
        torch.testing.assert_close(compiled(x), model(x), **CLOSE)
