"""The check of many weights in C++ says what Python's own way says, whatever is done to them."""

import pytest
import torch
from helpers import Mlp
from torch import nn

from ipex_inductor.passes import derived, program
from ipex_inductor.templates import weights_cpp
from ipex_inductor.templates.cpp import NotBuiltError

READ = weights_cpp.reader()


class Mine(torch.Tensor):
    """A subclass."""


def weights():
    """Of every kind that can be one, at versions of their own."""
    base = torch.randn(4, 6)
    made = [
        nn.Parameter(torch.randn(3, 3)),
        nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False),
        base,
        base.t()[1:],
        torch.zeros(0, 2),
        torch.tensor(1.0),
        torch.randn(3).as_subclass(Mine),
    ]
    with torch.no_grad():
        for number, weight in enumerate(made):
            for _ in range(number):
                weight.add_(1)
    return made


def both(tensors):
    """The state in either way, as the same three lists."""
    told = memoryview(READ(tuple(tensors))).cast("q").tolist()
    count = len(tensors)
    ours = [told[:count], told[count : 2 * count], told[2 * count :]]
    _, identities, versions, addresses = derived._state(tuple(tensors))
    return ours, [memoryview(identities).cast("q").tolist(), versions, addresses]


def test_there_is_one():
    assert READ is not None


def test_it_says_what_python_says():
    ours, theirs = both(weights())
    assert ours == theirs
    assert ours[1][:3] != [0, 0, 0]  # versions that are told apart


def storage_of(tensor, size):
    """Another address under the same tensor."""
    tensor.untyped_storage().resize_(size)


WRITES = {
    "nothing": (lambda w: None, False),
    "read": (lambda w: (w[0].sum(), w[2].numpy(), w[3].contiguous()), False),
    "in place": (lambda w: w[0].add_(1), True),
    "through a view": (lambda w: w[3].zero_(), True),
    "the base of a view": (lambda w: w[2].fill_(3), True),
    "copy": (lambda w: w[1].copy_(torch.ones(3)), True),
    "out": (lambda w: torch.add(w[2], 1, out=w[2]), True),
    "data": (lambda w: setattr(w[0], "data", torch.randn(3, 3)), True),
    "set": (lambda w: w[2].set_(torch.randn(4, 6)), True),
    "storage": (lambda w: storage_of(w[0], 1 << 16), True),
    "swap": (lambda w: torch.utils.swap_tensors(w[0], nn.Parameter(torch.randn(3, 3))), True),
    "another": (lambda w: w.__setitem__(5, torch.tensor(1.0)), True),
    "subclass": (lambda w: w[6].mul_(2), True),
    "unseen": (lambda w: w[0].data.add_(1), False),  # by torch itself; `refresh` is for it
}


@torch.no_grad()
@pytest.mark.parametrize("name", WRITES)
def test_it_sees_what_python_sees(name):
    write, seen = WRITES[name]
    mine = weights()
    before = READ(tuple(mine)), both(mine)[1]
    kept = list(mine)  # no identity goes to another object
    write(mine)
    after = READ(tuple(mine)), both(mine)[1]
    assert (before[0] != after[0]) is (before[1] != after[1]) is seen
    assert both(mine)[0] == both(mine)[1]
    del kept


def test_tensors_without_versions_have_no_state_in_either_way():
    with torch.inference_mode():
        mine = (nn.Parameter(torch.ones(2)), torch.ones(2))
    assert READ(mine) == b""
    assert derived._state(mine, READ) is None is derived._state(mine)


def test_parts_have_one_state_in_either_way():
    """Graphs share results, whichever way each of them reads."""
    mine = tuple(weights())
    own = derived._taking([5, 0, 3])
    parts = [derived._state_of_part(derived._state(mine, read), own) for read in (READ, None)]
    assert parts[0] == parts[1]
    assert len(parts[0]) == 3


def sums(count):
    step = program.Step("aten::add.Tensor", (program.Ref(0), program.Ref(0)), ())
    programs = [program.Program((i,), ("",), (step,), (program.Ref(1),)) for i in range(count)]
    return derived.DerivedWeights(programs, captured=False)


def test_few_weights_are_read_by_python_and_nothing_is_built(monkeypatch):
    monkeypatch.setattr(derived, "reader", None)
    made = sums(derived.MANY - 1)
    made.of([torch.ones(1)] * (derived.MANY - 1))
    assert made._read is None


def test_many_are_read_in_one_call_and_derived_when_one_changes(monkeypatch):
    asked = []
    monkeypatch.setattr(derived, "reader", lambda: lambda w: asked.append(len(w)) or READ(w))
    made, mine = sums(derived.MANY), [torch.ones(1) for _ in range(derived.MANY)]
    assert [v.item() for v in made.of(mine)] == [2.0] * derived.MANY
    first = made.of(mine)
    assert asked[-1] == derived.MANY
    assert made.of(mine) is first
    mine[7].fill_(5)
    assert [v.item() for v in made.of(mine)][6:9] == [2.0, 10.0, 2.0]


def test_where_it_cannot_be_built_python_reads(monkeypatch):
    monkeypatch.setattr(derived, "reader", lambda: None)
    made, mine = sums(derived.MANY), [torch.ones(1) for _ in range(derived.MANY)]
    made.of(mine)
    mine[7].fill_(5)
    assert made.of(mine)[7].item() == 10.0


def test_a_torch_without_that_function_is_read_by_python(monkeypatch):
    monkeypatch.setattr(weights_cpp, "VERSION", "no_such_symbol")
    weights_cpp.reader.cache_clear()
    assert weights_cpp.reader() is None
    weights_cpp.reader.cache_clear()


def test_what_says_something_else_than_torch_is_not_believed():
    with pytest.raises(NotBuiltError, match="where it was"):
        weights_cpp._check(lambda tensors: READ(tensors[::-1]))


def test_a_compiled_model_follows_its_weights_in_this_way(monkeypatch):
    monkeypatch.setattr(derived, "MANY", 0)
    model, x = Mlp().eval(), torch.randn(2, 32)
    fn = torch.compile(model, backend="ipex", options={"strict": True})
    with torch.no_grad():
        for _ in range(2):
            # packed products add in another order
            torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=1e-5)
            model.up.weight.mul_(2)
        torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=1e-5)
