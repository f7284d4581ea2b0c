"""Models that become packages, and those that are refused with a reason; the verb."""

import json
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import ipex_inductor
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.cli import app
from ipex_inductor.errors import ArgumentError
from ipex_inductor.prebuild import exporting
from ipex_inductor.prebuild.package import decode, encode
from ipex_inductor.reporting.decisions import GraphReport
from support.cache.signed_bundles import MODEL, packed

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # a few roundings of numbers of about 1


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x + self.count


class Returns(nn.Module):
    def forward(self, x):
        return x.view(-1), x + 1


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(4, 4), "one in train mode"),
        (torch.relu, "got builtin_function_or_method"),
        (Writes().eval(), "it writes to inputs or buffers"),
        (Returns().eval(), "it returns its inputs, or views of them"),
    ],
)
def test_what_is_more_than_a_computation_is_refused(model, words, tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    with pytest.raises(ArgumentError, match=words):
        ipex_inductor.package(model, (torch.ones(4, 4),), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "value",
    [
        *(1, 1.5, True, None, "s", [1, [2.0, None]], float("inf")),
        *(torch.float64, torch.strided, torch.channels_last, torch.device("cpu")),
    ],
)
def test_arguments_of_programs_come_back(value):
    text = json.dumps(encode(value))
    back = decode(msgspec.json.decode(text))
    assert (type(back), back) == (type(value), value)


def test_what_is_no_plain_argument_is_refused():
    with pytest.raises(ArgumentError, match="weight preprocessing with plain values"):
        encode(object())


@pytest.fixture
def verb(tmp_path, monkeypatch):
    """`prebuild` of a model in a file."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made_for_prebuild.py").write_text(MODEL)
    command = ["prebuild", "made_for_prebuild:make", "-o", "out"]
    return lambda *more: CliRunner().invoke(app, [*command, *more])


def test_the_verb_says_what_it_made(verb, monkeypatch):
    """Of a package that is given to it; those that are compiled: test_prebuild.py."""
    asked = []

    def package(model, inputs, out, **given):
        asked.append((type(model), [tuple(x.shape) for x in inputs], model.training, given))
        packed(out, name="out")
        manifest = open_bundle(out, True, True).manifest
        return SimpleNamespace(compiled=True, manifest=manifest, report=GraphReport())

    monkeypatch.setattr(exporting, "package", package)
    refused = verb()
    assert (refused.exit_code, "--package" in refused.output) == (2, True)
    assert not asked
    done = verb("--package")
    assert done.exit_code == 0, done.output
    assert "out: out " in done.output
    assert "; compiled; it is not signed" in done.output
    given = {"targets": [], "mode": None, "name": "", "key": None}
    assert asked == [(nn.Linear, [(2, 8)], False, given)]


@pytest.mark.slow  # 40 seconds
def test_the_verb_writes_a_bundle(verb):
    done = verb("--package")
    assert done.exit_code == 0, done.output
    assert "out: out " in done.output
    assert "; compiled; it is not signed" in done.output
    own = torch.nn.Linear(8, 8)
    loaded = ipex_inductor.load("out", own.state_dict(), allow_unsigned=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(torch.ones(2, 8)), own(torch.ones(2, 8)), **CLOSE)


class Shifted(nn.Module):
    """A tensor that is neither a parameter nor a buffer, and one that is written in its code."""

    def __init__(self, shift):
        super().__init__()
        self.shift = torch.tensor(shift)

    def forward(self, x):
        return x * 2 + self.shift + torch.tensor([0.5, 0.25])


@pytest.mark.slow  # 20 seconds; one is in the package of a test below
def test_tensors_that_are_constants_of_the_code_are_in_it(tmp_path, monkeypatch):
    shifts = [1.0, 2.0], [5.0, 6.0]
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    x = torch.ones(3, 2)
    for name, shift in zip("ab", shifts, strict=True):
        made = ipex_inductor.package(Shifted(shift).eval(), (x,), tmp_path / name)
        assert made.compiled
        model = ipex_inductor.load(tmp_path / name, {}, allow_unsigned=True)
        assert torch.equal(model(x), Shifted(shift)(x))


def test_tensors_that_are_constants_of_the_code_are_in_the_key():
    models = [Shifted(shift).eval() for shift in ([1.0, 2.0], [5.0, 6.0], [5.0, 6.0])]
    given = (torch.ones(3, 2),)
    one, other, same = (exporting._Exported.of(m, given, {}).problem() for m in models)
    assert one != other
    assert other == same


@pytest.mark.slow
def test_weights_stay_inputs_whatever_is_frozen_and_inputs_may_be_lazy(tmp_path):
    """Freezing set for the process, a default device, autocast, negated and expanded inputs."""
    torch.manual_seed(0)
    model, other = (
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), Shifted([1.0, 2.0])).eval()
        for _ in range(2)
    )
    # Headers that torch would compile first, for many packages, take longer than this one.
    with torch._inductor.config.patch({"freezing": True, "aot_inductor.precompile_headers": False}):
        ipex_inductor.package(model, (torch.randn(1, 4).expand(5, 4),), tmp_path / "p")
    with torch.device("meta"):
        loaded = ipex_inductor.load(tmp_path / "p", other.state_dict(), allow_unsigned=True)
    x = torch._neg_view(torch.randn(5, 4))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = loaded(x)
    torch.testing.assert_close(got, other(x).detach(), **CLOSE)


def test_parameters_that_the_state_dict_renames_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    model._register_state_dict_hook(
        lambda module, state, *_: {f"renamed.{name}": value for name, value in state.items()}
    )
    with pytest.raises(ArgumentError, match=r"lacks 0\.bias, 0\.weight"):
        ipex_inductor.package(model, (torch.ones(1, 2),), tmp_path / "p")


class Branch(nn.Module):
    """A choice by value, which is a higher-order op with a body for each side."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        def positive(x):
            return F.gelu(self.left(x)) + torch.arange(8, device=x.device)

        def other(x):
            return torch.relu(self.right(x))

        return torch.cond(x.sum() > 0, positive, other, (x,))


def test_bodies_of_higher_order_ops_go_to_the_gpu_as_well():
    """A device that is not there stands for it: of the graph's words, none names the CPU."""
    with torch.no_grad():
        call = exporting._Exported.of(Branch().eval(), (torch.ones(2, 8),), {})
    moved = call.on(torch.device("meta"))
    bodies = dict(exporting._graphs(moved.gm))
    words = [node.kwargs.get("device") for gm in bodies.values() for node in gm.graph.nodes]
    assert len(bodies) == 3
    assert {word for word in words if word} == {torch.device("meta")}
    assert {t.device.type for t in exporting._tensors(moved.gm).values()} == {"meta"}


@pytest.mark.slow  # 20 seconds
def test_a_package_with_a_branch_takes_either(tmp_path):
    net, x = Branch().eval(), torch.rand(2, 8) + 1
    ipex_inductor.package(net, (x,), tmp_path / "b.ipexbundle")
    call = ipex_inductor.load(
        tmp_path / "b.ipexbundle", weights=net.state_dict(), allow_unsigned=True
    )
    with torch.no_grad():
        for given in (x, -x):
            # A product of eight terms in another order, and its GELU.
            torch.testing.assert_close(call(given), net(given), rtol=1e-5, atol=1e-6)
