"""The check of many weights in C++ says what Python's own way says, whatever is done to them."""

from dataclasses import replace

import pytest
import torch
from helpers import Mlp
from torch import nn

from ipex_inductor.passes import derived, program
from ipex_inductor.templates import fields, weights_cpp
from ipex_inductor.templates.cpp import NotBuiltError

READER = weights_cpp.reader()


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
    told = memoryview(READER.read(tuple(tensors))).cast("q").tolist()
    count = len(tensors)
    ours = [told[:count], told[count : 2 * count], told[2 * count :]]
    _, identities, versions, addresses = derived._state(tuple(tensors))
    return ours, [memoryview(identities).cast("q").tolist(), versions, addresses]


def test_there_is_one():
    assert READER is not None


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
    before = READER.read(tuple(mine)), both(mine)[1]
    kept = list(mine)  # no identity goes to another object
    write(mine)
    after = READER.read(tuple(mine)), both(mine)[1]
    assert (before[0] != after[0]) is (before[1] != after[1]) is seen
    assert both(mine)[0] == both(mine)[1]
    same = READER.same(range(len(mine)))
    assert bool(same(mine, before[0])) is not seen
    assert same(mine, after[0])
    del kept


def test_tensors_without_versions_have_no_state_in_either_way():
    with torch.inference_mode():
        mine = (nn.Parameter(torch.ones(2)), torch.ones(2))
    assert READER.read(mine) == b""
    assert derived._state(mine, READER) is None is derived._state(mine)


def test_only_inputs_with_these_numbers_count():
    mine = weights()
    inputs = [torch.randn(1), mine[0], 3, mine[2]]  # sizes are inputs too
    told, same = READER.read((mine[0], mine[2])), READER.same([1, 3])
    assert same(inputs, told)
    inputs[0] = None
    assert same(inputs, told)
    assert not same(inputs[:3], told)
    with torch.no_grad():
        mine[2].add_(1)
    assert not same(inputs, told)


def test_a_tensor_that_lost_its_version_is_not_the_same():
    mine, same = weights()[0], READER.same([0])
    told = READER.read((mine,))
    with torch.inference_mode():
        other = nn.Parameter(torch.ones(2))
    told = int.to_bytes(id(other), 8, "little") + told[8:]
    assert not same([other], told)


def test_parts_have_one_state_in_either_way():
    """Graphs share results, whichever way each of them reads."""
    mine = tuple(weights())
    own = derived.taking([5, 0, 3])
    parts = [derived._state_of_part(derived._state(mine, read), own) for read in (READER, None)]
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
    assert made._same is None


def test_many_are_read_in_one_call_and_derived_when_one_changes(monkeypatch):
    asked = []

    class Counted(weights_cpp.Reader):
        def same(self, numbers):
            same = super().same(numbers)
            return lambda inputs, told: asked.append(len(numbers)) or same(inputs, told)

    monkeypatch.setattr(derived, "reader", lambda: Counted(READER.read, READER._same))
    made, mine = sums(derived.MANY), [torch.ones(1) for _ in range(derived.MANY)]
    assert [v.item() for v in made.of(mine)] == [2.0] * derived.MANY
    first = made.of(mine)
    assert made.of(mine) is first
    assert asked == [derived.MANY] * 2
    mine[7].fill_(5)
    assert [v.item() for v in made.of(mine)][6:9] == [2.0, 10.0, 2.0]


def test_where_it_cannot_be_built_python_reads(monkeypatch):
    monkeypatch.setattr(derived, "reader", lambda: None)
    made, mine = sums(derived.MANY), [torch.ones(1) for _ in range(derived.MANY)]
    made.of(mine)
    mine[7].fill_(5)
    assert made.of(mine)[7].item() == 10.0


def test_a_torch_that_has_its_fields_elsewhere_is_read_by_python(monkeypatch):
    monkeypatch.setattr(fields, "_word", lambda tensor, place: 0)
    weights_cpp.reader.cache_clear()
    assert weights_cpp.reader() is None
    weights_cpp.reader.cache_clear()


@pytest.mark.parametrize("dtype", fields.KINDS, ids=str)
def test_where_a_view_of_any_kind_begins_is_told(dtype):
    base = torch.zeros(7, dtype=dtype)
    mine = (base, base[3:], base.view(torch.uint8)[5:])
    ours, theirs = both(mine)
    assert ours == theirs
    assert ours[2][1] == base.data_ptr() + 3 * base.element_size()


@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference mode"])
def test_fields_are_found_whatever_the_mode(inference):
    found = fields.version(), fields.storage()
    with torch.inference_mode(inference), torch.device("meta"):
        assert (fields.version(), fields.storage()) == found


def test_what_has_no_storage_has_no_state():
    assert READER.read((torch.eye(2).to_sparse(),)) == b""


def test_what_says_something_else_than_torch_is_not_believed():
    with pytest.raises(NotBuiltError, match="where it was"):
        weights_cpp._check(replace(READER, read=lambda tensors: READER.read(tensors[::-1])))
    with pytest.raises(NotBuiltError, match="where it was"):
        weights_cpp._check(replace(READER, _same=lambda *_: False))


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
